"""The exceptions of agentenv, and who handles which.

AgentEnvError
├── ConfigError      ValueError    a flag, file or argument is wrong: one line before the first episode, exit code 2
├── DataError        ValueError    a row of a dataset or a record of a run directory cannot be read
├── ContractError    TypeError     an agent broke the reset/step contract, or an engine has a bug; not retried
├── MissingDependency ImportError  an optional package is missing; the message contains the pip command
├── InfraError       RuntimeError  something outside the policy and the task failed: retried, then counted, never scored
│   └── EngineError                the engine could not sample
│       └── PromptTooLong          the prompt leaves no room in the engine's context
├── EpisodeFailed    RuntimeError  an episode that the caller drives or awaits failed: its record has the kind of error
└── RunStopped       RuntimeError  more episodes are useless: too many failed, the disk is full, or the code that raises
                                   it (also an environment) knows that all would fail; exit code 3

Who raises, who records: environments and engines raise; `run_episode` records what they raise on the trajectory; the
runner counts, retries (InfraError) and stops the run. Before an engine raises, its HTTP client retried the request.
Every class takes one message, and can be pickled.
Messages read "{where}: expected {what}, got {value!r}. {what to do}", the last part only where it says more.
"""

from __future__ import annotations

from typing import Any, Literal

ErrorKind = Literal["infra", "env", "contract", "data"]
"""What failed: infrastructure (retried), the environment, its contract or the engine's, or the dataset row."""


class AgentEnvError(Exception):
    """Base of every error that agentenv raises on purpose."""

    exit_code = 2
    """Exit code of a command that ends with this error."""
    kind: ErrorKind = "env"
    """What failed, where an episode fails with this error."""
    ends_run = False
    """Whether every other episode would fail too."""
    http_status: int | None = None
    """Status of the HTTP answer that is the cause; 200 if its content is wrong."""


class ConfigError(AgentEnvError, ValueError):
    """A flag, file or argument is wrong; nothing has run yet."""


class DataError(AgentEnvError, ValueError):
    """A dataset row or a stored record cannot be read."""

    kind = "data"


class ContractError(AgentEnvError, TypeError):
    """An agent returned something that reset or step may not return, or an engine raised what it may not raise."""

    kind = "contract"


class MissingDependency(AgentEnvError, ImportError):
    """An optional package is not installed; the message contains the command that installs it."""


class InfraError(AgentEnvError, RuntimeError):
    """Infrastructure failed (a grader, a sandbox, a service): the episode has no reward and may be retried.

    If `step` raises it with `retry_step=True`, `step` is called again with equal states, a bounded number of times. Set
    it only if the step has not changed the environment.
    """

    kind = "infra"
    retry_step: bool = False
    """Whether to call `step` again."""

    def __init__(self, *args: object, retry_step: bool = False) -> None:
        super().__init__(*args)
        self.retry_step = retry_step


class EngineError(InfraError):
    """The engine could not sample."""


class PromptTooLong(EngineError):
    """The prompt leaves no room for a token in the engine's context."""


class EpisodeFailed(AgentEnvError, RuntimeError):
    """An episode that the caller drives step by step, or a test asked for, failed: its reward is unknown."""


class RunStopped(AgentEnvError, RuntimeError):
    """The run stopped itself: too many episodes failed, all would, or the disk is full. A run keeps ended episodes."""

    exit_code = 3
    ends_run = True
    run: Any = None
    """The episodes that ended, if `rollout` raises it: a `Run`."""
