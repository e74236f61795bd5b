"""Episodes for tests: a `Setup`, and one (`play`) or many (`play_all`) episodes of it, with the real runner.

Example:
    >>> trajectory = asyncio.run(play(Setup("guess_number", ["8", "4"], env_kwargs={"max_guesses": 2})))
    >>> [turn.action for turn in trajectory.turns], trajectory.stop_reason
    (['8', '4'], <StopReason.TERMINATED: 'terminated'>)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentenv._util.calls import create
from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.dataset import in_messages
from agentenv.core.engine import Engine, Tokenizer
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, SamplingParams, Task, own_limits
from agentenv.engines.scripted import Request, ScriptedEngine
from agentenv.episode.registry import env_source
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, derive_seed, plan
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource, EpisodeSource, needs_label
from agentenv.episode.stepping import SteppedEpisode
from agentenv.episode.tasks import TaskSource
from agentenv.errors import ConfigError
from agentenv.interop.agent_files import load_func_agent
from agentenv.testing.chats import stand_in

Policy = Sequence[Any] | Callable[[Request], Any] | Engine
"""The policy: a list (item i is the action of turn i, the last repeats), a function of the request, or an engine."""
_NO_RETRIES = ErrorPolicy(max_retries=0, max_step_retries=2, max_error_share=1.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts of a test's episode; change a copy with `dataclasses.replace`."""

    env: str | type[Any] | EpisodeSource
    """An installed environment's name, `module:Attr`, `path.py:Attr` or agent_func.py; a class; or a source of
    episodes."""
    policy: Policy = ("",)
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    data: str | Path | Iterable[Mapping[str, Any] | Task] | Task | None = None
    """Rows or tasks in a list, one task, a file or built-in data; None: the first data that comes with the environment,
    or else an empty user's message without a label."""
    seed: int = 0
    """Seed of the run, for environments and sampling, as in `agentenv run --seed`."""
    tokenizer: Tokenizer | None = None
    """None: that of an engine that has one, or else a `CharTokenizer`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: Limits | None = None
    """None: the class's `max_turns`, or else 16, and its `max_length` if there is a tokenizer, or else 8192 tokens."""
    chat_options: ChatOptions = field(default_factory=ChatOptions)
    as_messages: bool = True
    """Text prompts become user messages."""

    def source(self) -> EpisodeSource:
        """Return the source of the episodes.

        Raises:
            ConfigError: the environment is unknown, or does not take the arguments.
        """
        if isinstance(self.env, str) and (found := load_func_agent(self.env)) is not None:
            func, cls = found
            return EnvSource(cls, {**func.agent_kwargs, **self.env_kwargs})
        return env_source(self.env, self.env_kwargs) if isinstance(self.env, str | type) else self.env

    def tasks(self, limit: int | None = None) -> list[Task]:
        """Return the tasks, each with its own id.

        Raises:
            ConfigError: the data is unknown.
            DataError: a row cannot be used.
        """
        source: Any = self.source()
        own: Mapping[str, str | Path] = getattr(source, "datasets", {})
        if isinstance(self.data, Task):
            tasks: Sequence[Task] = [self.data]
        elif self.data is None and not own:
            tasks = [Task([{"role": "user", "content": ""}])]
        else:
            data, rows = (str(self.data), None) if isinstance(self.data, str | Path) else (None, self.data)
            tasks = TaskSource(data).read(own, needs_label=needs_label(source), limit=limit, rows=rows)
        tasks = [in_messages(task) for task in tasks] if self.as_messages else tasks
        if isinstance(self.env, str) and (found := load_func_agent(self.env)) is not None:
            tasks = [found[0].as_given(task, self.chat()) for task in tasks]
        return [replace(task, task_id=task.task_id or f"{number:06d}") for number, task in enumerate(tasks)]

    def chat(self) -> Chat:
        """Return the chat: the tokenizer with its template."""
        tokenizer = self.tokenizer or getattr(self.policy, "tokenizer", None)
        if tokenizer is None and self.chat_options == ChatOptions():
            return stand_in()
        return Chat(tokenizer or stand_in().tokenizer, options=self.chat_options)

    def episode_limits(self) -> Limits:
        """Return the limits of each episode."""
        own = own_limits(getattr(self.source(), "cls", None))
        if self.chat() is stand_in():  # its tokens are characters
            own.pop("max_length", None)
        return self.limits or Limits(**{"max_length": 8192, **own})

    def engine(self) -> Engine:
        """Return the engine of the policy."""
        if callable(getattr(self.policy, "generate", None)):
            return self.policy  # type: ignore[return-value]
        return ScriptedEngine(self.policy, self.chat().tokenizer)  # type: ignore[arg-type]

    def stepped(self, task: int = 0) -> SteppedEpisode:
        """Return an episode of a task that a coroutine of the test drives: `begin`, then `act` until it is `over`.

        Example::

            async with env.stepped() as episode:
                await episode.begin()
                result = await episode.act("#### 42")

        Raises:
            ConfigError: the setup cannot be run, or the environment runs its own loop.
        """
        source = self.source()
        if not isinstance(source, EnvSource):
            raise ConfigError(f"stepped: expected an environment with `step`, got {source!r:.80}. Use `play`.")
        one = self.tasks(task + 1)[task]
        seed = one.seed if one.seed is not None else derive_seed(self.seed, one.task_id)
        key = EpisodeKey(f"{one.task_id}/0", one.task_id, 0, seed)
        make = partial(create, source.cls, source.kwargs)
        limits = self.episode_limits()
        return SteppedEpisode(make, one, chat=self.chat(), sampling=self.sampling, limits=limits, key=key)


async def play(setup: Setup) -> Trajectory:
    """Run one episode of the first task. Errors are recorded on the trajectory, as in a run.

    Raises:
        ConfigError: the setup cannot be run.
    """
    return (await play_all(setup, num_tasks=1))[0]


async def play_all(
    setup: Setup, *, num_tasks: int | None = None, num_samples: int = 1, concurrency: int = 64
) -> list[Trajectory]:
    """Run episodes of the first tasks with the runner of `agentenv run`; return them in the order of tasks and samples.

    Raises:
        ConfigError: the setup cannot be run.
    """
    ended: dict[str, Trajectory] = {}

    def keep(trajectory: Trajectory) -> None:
        ended[trajectory.episode_id] = trajectory

    source, seed = setup.source(), setup.seed if setup.sampling.seed is None else setup.sampling.seed
    own = EpisodeSetup(setup.engine(), setup.chat(), replace(setup.sampling, seed=seed), setup.episode_limits())
    runner = EpisodeRunner(source, own, concurrency=concurrency, policy=_NO_RETRIES)
    planned = list(plan(setup.tasks(num_tasks), num_samples))
    await runner.run(planned, keep)
    return [ended[episode.episode_id] for episode in planned]
