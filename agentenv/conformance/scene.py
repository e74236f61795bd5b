"""Scene: what is checked, the tasks it is tried on, and the episodes that the properties look at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import finalize

from agentenv.agent import Engine, Tokenizer, create
from agentenv.chat import Chat
from agentenv.check_watch import Around, CallWatch, Seen, watched_class
from agentenv.conformance import chats
from agentenv.conformance.cases import FORGED, LABEL, ODD_ACTIONS, PROMPT, Case, Policy, script
from agentenv.conformance.target import load_target
from agentenv.dataset import in_messages, read_tasks
from agentenv.endpoint.agent import ChatAgentSource
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode import EpisodeKey
from agentenv.errors import AgentEnvError, ConfigError, EpisodeFailed
from agentenv.executor import AgentFunc
from agentenv.loading import EnvSource, EpisodeSource, builtin_datasets
from agentenv.stepping import SteppedEpisode
from agentenv.trajectory import Trajectory
from agentenv.types import Limits, SamplingParams, Task

IMPORT_LIMITS = 10
"""A file may take so many times as long to be imported as a step: it may load a model."""
_MAX_TOKENS, _MAX_LENGTH = 4_000, 400_000
_END_S = 1.0
"""What is left at the end may take so long to go."""
T = TypeVar("T")
_MOST_GOLD = 256
"""Turns that solving a task may take."""


class NotApplicable(Exception):
    """A property says nothing about this agent; the message is why."""


@dataclass(frozen=True)
class Options:
    """What is checked, and how."""

    target: str | type[Any]
    """As `agentenv check` takes it, or the class itself."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    task: Task | None = None
    """To try it on; None: the first rows of `data`, of its own data, or a question of ours."""
    data: str | None = None
    """A file, a data set or the name of built-in data, in place of the environment's own."""
    prompt_key: str = "prompt"
    label_key: str = "label"
    num_rows: int = 20
    """Rows of each data set that `reset` is tried on."""
    step_timeout_s: float = 30.0
    max_turns: int = 12
    """An episode has to end within so many, whatever the policy says."""
    policy: Policy | None = None
    """Further actions to try, such as those that solve the task."""


class Scene:
    """One agent, loaded once; its properties are looked at one after the other.

    Raises:
        ConfigError: a limit makes no sense.
    """

    def __init__(self, options: Options, watch: CallWatch) -> None:
        if not options.step_timeout_s > 0:
            raise ConfigError(
                f"--step_timeout_s: expected seconds > 0, got {options.step_timeout_s!r}. Change the value."
            )
        if options.max_turns < 1 or options.num_rows < 1:
            raise ConfigError(
                f"--max_turns, --rows: expected integers >= 1, got {options.max_turns}, {options.num_rows}. Change it."
            )
        self.options, self.watch = options, watch
        self.cls: type[Any] | None = None
        """Of the agent instances; None until it is loaded."""
        self.own_task = False
        """Whether it is tried on a question of ours, for want of a task or data."""
        self._passes: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def name(self) -> str:
        """The target in words."""
        target = self.options.target
        return target if isinstance(target, str) else target.__qualname__

    @cached_property
    def source(self) -> EpisodeSource:
        """What runs its episodes; loaded at the first use."""
        path = self.name.partition(":")[0]
        with self.watch.during("import", path, self.options.step_timeout_s * IMPORT_LIMITS):
            source, self.cls = load_target(self.options.target, self.options.env_kwargs)
        return source

    @property
    def agent_cls(self) -> type[Any]:
        """The class of its agent instances."""
        _ = self.source
        if self.cls is None:
            raise ConfigError(f"{self.name}: expected a class, got none. Report this as a bug.")
        return self.cls

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives. All of them are run on one event loop, as all episodes of a process are.

        What an environment keeps for its episodes, such as a client with its connections, belongs to that loop.
        """
        if self._loop is None or self._loop.is_running():  # with a call that hangs, and was left behind
            self._loop = asyncio.new_event_loop()
            finalize(self, _let_go, self._loop)
        return self._loop.run_until_complete(work)

    @property
    def left(self) -> set[asyncio.Task[Any]]:
        """The tasks that are still there, between two `run`."""
        return set() if self._loop is None else asyncio.all_tasks(self._loop)

    def close(self) -> None:
        """End the event loop, and what is left on it. Again is harmless; a new one is made where it is needed."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_running():
            return
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_END_S))  # some ignore it
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    @property
    def own_loop(self) -> bool:
        """Whether the agent asks for completions itself."""
        return isinstance(self.source, ChatAgentSource)

    def needs_steps(self) -> None:
        """Raises NotApplicable where the agent has a loop of its own."""
        if self.own_loop:
            raise NotApplicable("it has a loop of its own")
        _ = self.cases  # which need event loops of their own

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Arguments of the constructor, of which all episodes have the same."""
        if isinstance(self.source, AgentFunc):
            return getattr(self.source.executor_cls, "agent_kwargs", {})
        return self.source.kwargs  # type: ignore[attr-defined,no-any-return]

    @property
    def limits(self) -> Limits:
        """Of an episode: none but that of a step and that of the turns."""
        step_s, turns = self.options.step_timeout_s, self.options.max_turns
        return Limits(_MAX_LENGTH, turns, step_timeout_s=step_s, episode_timeout_s=step_s * (turns + 3))

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks it is tried on: one that is given, as it is; or the first two of its data, in messages.

        Raises:
            AgentEnvError: data is named, and its first row cannot be read.
        """
        options = self.options
        if options.task is not None:
            return [options.task]
        for limit in (2, 1):
            read = self.rows(limit)
            for tasks in read.values():
                if not isinstance(tasks, AgentEnvError):
                    return tasks
        if options.data is not None and isinstance(error := read[options.data], AgentEnvError):
            raise error
        self.own_task = True
        return [Task([{"role": "user", "content": PROMPT}], LABEL, task_id="check")]

    def rows(self, limit: int | None = None) -> dict[str, list[Task] | AgentEnvError]:
        """Its data sets by name, each as its first `limit` tasks or as what is wrong with it."""
        found: dict[str, Any] = dict(getattr(self.agent_cls, "datasets", {}))
        if self.options.data is not None:
            known = {**builtin_datasets(), **found}
            found = {self.options.data: known.get(self.options.data, self.options.data)}
        prompt_key, label_key = self.options.prompt_key, self.options.label_key
        needs_label = label_key != Options.label_key or getattr(self.agent_cls, "needs_label", True)
        read: dict[str, list[Task] | AgentEnvError] = {}
        for name, path in found.items():
            try:
                tasks = read_tasks(
                    str(path), prompt_key=prompt_key, label_key=label_key, limit=limit, needs_label=needs_label
                )
                read[name] = [in_messages(task) for task in tasks]  # as `agentenv run` does
            except AgentEnvError as error:
                read[name] = error
        return read

    @cached_property
    def chat(self) -> Chat:
        """How messages become tokens; by tiny-math's template, which has tools, where the environment offers some."""
        case, limits = Case(self.tasks[0], "probe", lambda request: ""), replace(self.limits, max_turns=1)
        probed = self.run(self.episode(case, limits=limits, on=chats.with_tools()))
        return chats.with_tools() if probed.tools else chats.plain()

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the chat; it needs no download."""
        return self.chat.tokenizer

    @cached_property
    def cases(self) -> list[Case]:
        """The episodes that properties look at: policies that know nothing, the label, gold, and what is given."""
        _, cases = self.chat, []  # which is found out on an event loop of its own
        for index, task in enumerate(self.tasks):
            said: dict[str, Policy] = {
                "silent": [""],
                "wrong": [ODD_ACTIONS[0]],
                "odd": ODD_ACTIONS[1:],
                "forged": [FORGED],
                "label": [str(task.label)],
                "marked label": [f"#### {task.label}"],
            }
            first = 1_000 * index if task.seed is None else task.seed
            gold = [] if isinstance(self.source, AgentFunc) else self.gold(task, first)[0]
            if gold:
                said["gold"] = gold
            if self.options.policy is not None:
                said["given"] = self.options.policy
            for number, (name, policy) in enumerate(said.items()):
                seed = first + (number if task.seed is None and name != "gold" else 0)
                turns = len(gold) if name == "gold" else 0
                cases.append(Case(task, name, script(policy), seed, turns))
        return cases

    def gold(self, task: Task, seed: int) -> tuple[list[str], BaseException | None]:
        """What the environment itself would say to solve a task, and what `gold` raised; empty where it knows nothing.

        What it raises is the audit's to tell, but for a breach of the contract.
        """
        return self.run(self._gold(task, seed))

    async def _gold(self, task: Task, seed: int) -> tuple[list[str], BaseException | None]:
        said: list[str] = []
        async with self.stepped(task, seed, limits=replace(self.limits, max_turns=_MOST_GOLD)) as episode:
            with contextlib.suppress(EpisodeFailed):
                await episode.begin()
                while not episode.over:
                    asked = asyncio.ensure_future(episode.gold())
                    await asyncio.wait({asked})
                    if (error := asked.exception()) is not None or (action := asked.result()) is None:
                        return said, error
                    said.append(action)
                    await episode.act(action)
        return said, None

    def stepped(self, task: Task, seed: int = 0, limits: Limits | None = None) -> SteppedEpisode:
        """An episode of the agent class, whose actions are given one at a time."""
        make = partial(create, self.agent_cls, self.kwargs)
        sampling, key = SamplingParams(max_tokens=_MAX_TOKENS), EpisodeKey("check", seed=seed)
        chat = chats.plain() if "chat" not in vars(self) else self.chat
        return SteppedEpisode(make, task, chat=chat, sampling=sampling, limits=limits or self.limits, key=key)

    def spied(self, seen: list[Seen], around: Around | None = None) -> EpisodeSource:
        """The same source with an agent class that keeps what its methods get and give."""
        source = self.source
        watcher = watched_class(self.agent_cls, self.watch, self.limits, seen, around=around)
        if isinstance(source, AgentFunc):
            return source.with_agent(watcher)
        kind = ChatAgentSource if isinstance(source, ChatAgentSource) else EnvSource
        return kind(watcher, self.kwargs)

    async def episode(
        self,
        case: Case,
        *,
        source: EpisodeSource | None = None,
        engine: Engine | None = None,
        limits: Limits | None = None,
        on: Chat | None = None,
    ) -> Trajectory:
        """One episode of a case."""
        chat = on or self.chat
        return await (source or self.source).episode(
            case.task,
            engine=engine or ScriptedEngine(case.say, chat.tokenizer),
            chat=chat,
            sampling=SamplingParams(max_tokens=_MAX_TOKENS),
            limits=limits or replace(self.limits, max_turns=max(self.limits.max_turns, case.num_turns)),
            key=EpisodeKey(f"{case.task.task_id}/{case.policy}", seed=case.seed),
        )

    def kept(self, name: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `make` gives, made once for all properties that need it."""
        if name not in self._passes:
            self._passes[name] = self.run(make())
        return self._passes[name]


def _let_go(loop: asyncio.AbstractEventLoop) -> None:
    """Close the loop of a scene that nobody closed."""
    if not loop.is_running():
        loop.close()
