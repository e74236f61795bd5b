"""Our environments in verifiers 0.4 and prime-rl: a Taskset, and a Harness that runs our loop in verifiers' process.

Source: verifiers/v1 task.py, taskset.py, harness.py, rollout.py and interception/server.py, 0.4.0. The engine of our
loop is the rollout's interception server: verifiers samples, with its own client, and records the tokens. A failed
episode raises, so that its trace has an error; prime-rl leaves such traces out, and none has a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

from agentenv._util.http.client import HTTPClient
from agentenv._util.jsonable import jsonable
from agentenv.chat.chat import Chat
from agentenv.core.dataset import read_tasks
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Conversation, Limits, SamplingParams, Task, own_limits
from agentenv.engines.chat.engine import KEEPALIVE_S, ChatEngine
from agentenv.episode.registry import builtin_datasets
from agentenv.episode.runner import derive_seed
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import needs_label
from agentenv.errors import ConfigError, ContractError, EngineError, PromptTooLong
from agentenv.interop.guest import import_library
from agentenv.interop.hosted import problem_of, stepped_source
from agentenv.interop.verifiers_guest import messages_of

_WHERE = "interop.verifiers_env"
INFO = "agentenv"
"""Key of an episode's facts in its trace's `info`."""


class InterceptionEngine(ChatEngine):
    """A rollout's interception server as the engine. How it samples is verifiers' to decide.

    Once one of verifiers' limits has ended the rollout, no room is left: the environment has its last word.
    """

    def __init__(self, endpoint: str, secret: str, model: str) -> None:
        own = dict.fromkeys(("temperature", "max_completion_tokens", "max_tokens", "seed"))
        super().__init__(endpoint, model, extra_body=own, timeout_s=math.inf)
        self._http = HTTPClient(self.base_url, api_key=secret, errors=self._http.errors, keepalive_s=KEEPALIVE_S)

    async def generate(  # type: ignore[override]  # as ChatEngine
        self, asked: Conversation, sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Return one answer; see `ChatEngine.generate`.

        Raises:
            ConfigError: the environment asks for stop strings, which verifiers' client for training drops.
            PromptTooLong: the conversation is too long for the model, or verifiers ended the rollout.
        """
        if sampling.stop:
            raise ConfigError(
                f"{_WHERE}: expected an environment without stop strings, got {sampling.stop}. verifiers drops them: "
                "end the action in `step`."
            )
        try:
            return await super().generate(asked, sampling, request_id=request_id)
        except EngineError as error:
            if "rollout stopped" in str(error):
                raise PromptTooLong(str(error)) from error
            raise


def env_package(
    env: str | type[Any], data: str, env_kwargs: Mapping[str, Any] | None = None
) -> tuple[type, type, type]:
    """Return the Taskset, Harness and Env of verifiers that the module of a package exports.

    Example::

        EnvTaskset, EnvHarness, EnvOfOne = env_package("math_retry", "word_problems")
        __all__ = ["EnvHarness", "EnvOfOne", "EnvTaskset"]

    Args:
        env: an installed environment's name, `module:Attr`, `FILE.py:Attr`, or the class.
        data: tasks: a file, a Hugging Face dataset id, or a built-in name.
        env_kwargs: arguments of the environment's constructor.

    Raises:
        MissingDependency: verifiers is not installed.
        ConfigError: there is no such environment, or it has a loop that calls an endpoint.
    """
    import_library("verifiers.v1", "verifiers")
    import verifiers.v1 as vf

    _source(env, env_kwargs or {})

    class OneAgentConfig(vf.SingleAgentEnvConfig):  # type: ignore[misc]  # without types
        """The agent runs in this process: verifiers' default is a sandbox of a paid service."""

        agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())

    class EnvOfOne(vf.Env[OneAgentConfig]):  # type: ignore[misc]
        """One agent and one task."""

        run = vf.SingleAgentEnv.run

    return _taskset(env, data, env_kwargs or {}), _harness(env), EnvOfOne


def _taskset(env: str | type[Any], own_data: str, own_kwargs: Mapping[str, Any]) -> type:
    import verifiers.v1 as vf
    from pydantic import Field

    class EnvRow(vf.TaskData):  # type: ignore[misc]
        """A task of ours; its prompt is verifiers' own field."""

        id: str | None = None  # a field of verifiers' since 0.4
        label: Any = None
        metadata: dict[str, Any] = Field(default_factory=dict)
        seed: int = 0
        env_kwargs: dict[str, Any] = Field(default_factory=dict)

    class EnvTask(vf.Task[EnvRow]):  # type: ignore[misc]
        """A task whose reward is that of the episode; its metrics are the score and the last turn's info."""

        @property
        def key(self) -> str:
            return str(self.data.id)

        @vf.reward  # type: ignore[untyped-decorator]
        async def reward(self, trace: Any) -> float:
            return float(_facts(trace)["reward"])

        @vf.metric  # type: ignore[untyped-decorator]
        async def metrics(self, trace: Any) -> dict[str, float]:
            return dict(_facts(trace)["metrics"])

    class EnvTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
        """Which tasks there are, and how their environment is made."""

        data: str = own_data
        env_kwargs: dict[str, Any] = Field(default_factory=lambda: dict(own_kwargs))
        seed: int = 0

    class EnvTaskset(vf.Taskset[EnvTask, EnvTasksetConfig]):  # type: ignore[misc]
        """The tasks of an environment of agentenv."""

        def load(self) -> Iterable[EnvTask]:
            config = self.config
            is_needed = needs_label(_source(env, config.env_kwargs))
            for task in read_tasks(config.data, builtin=builtin_datasets(config.data), needs_label=is_needed):
                row = {"id": task.task_id, "prompt": task.prompt, "env_kwargs": config.env_kwargs}
                row |= {"label": jsonable(task.label), "metadata": jsonable(task.metadata)}
                seed = derive_seed(config.seed, task.task_id) if task.seed is None else task.seed
                yield EnvTask(EnvRow(**row, seed=seed), config.task)

    return EnvTaskset


def _harness(env: str | type[Any]) -> type:
    import verifiers.v1 as vf

    class EnvHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
        """Budgets of an episode beside verifiers' own. Without `max_turns` and `max_length` they are the environment's,
        or 16 and no limit.
        """

        max_turns: int | None = None
        max_length: int | None = None
        step_timeout_s: float = 60.0

    class EnvHarness(vf.Harness[EnvHarnessConfig]):  # type: ignore[misc]
        """Our loop, in verifiers' process."""

        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            source, config = _source(env, data.env_kwargs), self.config
            given = {name: getattr(config, name) for name in ("max_turns", "max_length", "step_timeout_s")}
            given = {name: value for name, value in given.items() if value is not None}
            waits = {"episode_timeout_s": math.inf, "generate_timeout_s": math.inf}
            limits = Limits(**{"max_length": 1_000_000, **own_limits(source.cls), **given, **waits})
            engine = InterceptionEngine(endpoint, secret, ctx.model)
            setup = EpisodeSetup(cast(Engine, engine), Chat(engine.tokenizer), limits=limits)
            task = Task(messages_of(*self.resolve_prompt(data)), data.label, data.id, metadata=data.metadata)
            try:
                trajectory = await source.run(task, setup, EpisodeKey(trace.id, data.id, seed=data.seed))
            finally:
                await engine.close()
            if (problem := problem_of(trajectory)) is not None:
                raise vf.HarnessError(f"{_WHERE}: expected an episode with a reward, got one that failed: {problem}")
            trace.info[INFO] = facts_of(trajectory)
            return vf.ProgramResult(0, "", "")

    return EnvHarness


_source = partial(stepped_source, where=_WHERE, advice="Train it with `agentenv train`.")


def facts_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return what a trace's `info` has of an episode: reward, turn_rewards, metrics, stop_reason, truncated."""
    results = [turn.result for turn in trajectory.turns if turn.result is not None]
    info = results[-1].info if results else {}
    metrics = {name: float(value) for name, value in info.items() if isinstance(value, int | float)}
    metrics |= {} if trajectory.score is None else {"score": trajectory.score}
    stop = trajectory.stop_reason
    return {
        "reward": trajectory.reward,
        "turn_rewards": [result.reward for result in results],
        "metrics": metrics,
        "stop_reason": None if stop is None else stop.value,
        "truncated": trajectory.truncated,
    }


def _facts(trace: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = trace.info.get(INFO)
    if found is None:
        raise ContractError(
            f"{_WHERE}: expected an episode that came to its end, got one that verifiers cut: {trace.stop_condition}. "
            "Raise that limit of the agent."
        )
    return found
