"""ConformanceContext: the target of a check, its tasks, and the episodes that the properties examine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import stat
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import finalize

from agentenv._util.calls import create
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.engine import Engine, Tokenizer
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Limits, SamplingParams, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.failures import may_be_a_service
from agentenv.episode.registry import builtin_datasets, env_source
from agentenv.episode.setup import EpisodeKey, EpisodeSetup, StepRetries
from agentenv.episode.source import EnvSource, EpisodeSource
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import AgentEnvError, ConfigError, EpisodeFailed, InfraError
from agentenv.interop.agent_files import load_func_agent
from agentenv.interop.openrlhf.executor import AgentFunc
from agentenv.testing import chats
from agentenv.testing.conformance.call_watch import Around, CallWatch, MethodCall, watched_class
from agentenv.testing.conformance.cases import (
    FORGED,
    LABEL,
    ODD_ACTIONS,
    PROMPT,
    Avoided,
    EpisodeCase,
    Policy,
    Script,
    hacks_of,
    word_calls,
    yielded,
)
from agentenv.testing.conformance.probes import FILE_EVENTS, Event, record_events
from agentenv.testing.conformance.problems import own_files, relative_path, source_of
from agentenv.testing.odd_actions import heard_audit_events
from agentenv.testing.tool_calls import right_calls, wrong_calls

NUM_ATTEMPTS, RETRY_WAIT_S = 3, 0.2
"""Attempts of an episode in which infrastructure fails, as many as in a run, and the wait before the second."""
_MAX_LOST = 2
"""Cases in a row that infrastructure may fail before no further one is run."""
IMPORT_LIMITS = 10
"""An import may take this many times as long as a step, since it may load a model."""
_MAX_TOKENS, _MAX_LENGTH, _MAX_TURNS = 8_000, 1_000_000, 12
_END_S = 1.0
"""Seconds that pending tasks get to end at the close."""
T = TypeVar("T")
_TOOL_TASKS = 8
"""Rows for which the offered tools are looked up, all at once."""
_MAX_ROWS, _NUM_OTHERS = 64, 4
"""Rows that are read for `further_tasks`, and how many of these are other rows for `portability`."""
_MAX_GOLD_TURNS = 256
"""Maximum number of turns for solving a task with gold actions."""


_MAX_SLOW_S = 15.0
"""Seconds of slow calls after which their actions are avoided."""
_BUDGET_STEPS, _MIN_BUDGET_S = 20, 600.0
"""A check starts no episode after this many times the limit of a step, or after these seconds if they are more."""


class NotApplicable(Exception):
    """A property does not apply to this environment; the message is the reason."""


class SlowCalls(Exception):
    """Some actions are so slow that a property is checked again without them."""


@dataclass(frozen=True)
class ConformanceOptions:
    """The target of a check, and its settings."""

    target: str | type[Any]
    """As `agentenv check` takes it, or the class itself."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    task: Task | None = None
    """The task to run; None: the first rows of `data`, of the environment's own data, or a built-in question."""
    data: str | None = None
    """A file, a dataset or the name of built-in data, in place of the environment's own data."""
    split: str | None = None
    """Split of `data`, if that is a Hugging Face dataset."""
    prompt_key: str = "prompt"
    label_key: str = "label"
    num_rows: int = 20
    """Number of rows of each dataset to call `reset` with."""
    step_timeout_s: float = 30.0
    max_turns: int | None = None
    """Every episode must end by itself within this number of turns, for any policy. None: within 12, unless the class
    has `max_turns`, at which the loop ends it."""
    policy: Policy | None = None
    """More actions to try, such as those that solve the task."""
    actions: Sequence[str] = ()
    """Further actions, each of which is tried in every property."""
    model: str | None = None
    """The model whose chat template and tokenizer are used; None: stand-ins that need no download."""


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode, with the calls of the environment's methods."""

    case: EpisodeCase
    trajectory: Trajectory
    seen: list[MethodCall]
    tool_errors: list[tuple[str, Exception]]
    """The name of each tool that raised anything but a ToolError, with its exception."""


class ConformanceContext:
    """An environment or agent, loaded once, whose properties are checked one after the other.

    Raises:
        ConfigError: a limit is out of range.
    """

    def __init__(self, options: ConformanceOptions, watch: CallWatch) -> None:
        if not options.step_timeout_s > 0:
            raise ConfigError(f"--step_timeout_s: expected seconds > 0, got {options.step_timeout_s!r}.")
        if (options.max_turns is not None and options.max_turns < 1) or options.num_rows < 1:
            raise ConfigError(
                f"--max_turns, --rows: expected integers >= 1, got {options.max_turns}, {options.num_rows}."
            )
        self.options = options
        self.watch = watch
        self.avoided = Avoided()
        """The actions that `cases` avoid."""
        self.reached: list[EpisodeCase] | None = None
        """Further cases that reach other code; None until they are looked for."""
        self.unreached: list[str] = []
        """Lines that no case has run, as file:line or file:first-last."""
        self.writes = defaultdict[str, set[float]](set)
        """For each file that the environment opens to write: when it was written last, after each episode."""
        self.service_errors: set[EpisodeError] = set()
        """Errors of the environment in its episodes behind which a service may have failed."""
        self.outage: InfraError | None = None
        """The last one that stopped episodes of the property."""
        self.uses_default_task = False
        """Whether the task is the built-in question, for lack of another task and of data."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._budget_s = max(_MIN_BUDGET_S, _BUDGET_STEPS * options.step_timeout_s)
        self._deadline = time.monotonic() + self._budget_s

    @property
    def name(self) -> str:
        """The name of the target."""
        target = self.options.target
        return target if isinstance(target, str) else target.__qualname__

    @cached_property
    def loaded(self) -> tuple[EpisodeSource, type[Any]]:
        """The source of its episodes, and the class of the environment or agent, loaded at the first use."""
        path = self.name.partition(":")[0]
        with self.watch.during("import", path, self.options.step_timeout_s * IMPORT_LIMITS):
            target = self.options.target
            if isinstance(target, str) and (found := load_func_agent(target)) is not None:
                return found
            source = env_source(target, self.options.env_kwargs)
            return source, source.cls

    @property
    def source(self) -> EpisodeSource:
        """The source of its episodes."""
        return self.loaded[0]

    @property
    def agent_cls(self) -> type[Any]:
        """The class of the environment or agent."""
        return self.loaded[1]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. All run on one event loop, as all episodes of a process do.

        Objects that an environment keeps between episodes, such as a client with connections, belong to that loop.
        """
        if self._loop is None or self._loop.is_running():  # it runs if a call hangs and was abandoned
            self._loop = asyncio.new_event_loop()
            finalize(self, _close_idle, self._loop)
        return self._loop.run_until_complete(work)

    @property
    def pending_tasks(self) -> set[asyncio.Task[Any]]:
        """The tasks that are still pending between two calls of `run`."""
        return set() if self._loop is None else asyncio.all_tasks(self._loop)

    @property
    def has_slow_calls(self) -> bool:
        """Whether actions that `cases` do not avoid yet took long, while others were quick."""
        seconds = sum(seconds for action, seconds in self.watch.slow.items() if action not in self.avoided.slow)
        return bool(self.watch.quick) and (seconds > _MAX_SLOW_S or (self.watch.num_hangs > 0 and seconds > 0))

    def avoid_slow_calls(self) -> None:
        """Avoid the actions that were slow so far in `cases`, and run their episodes again where they are needed."""
        watch = self.watch
        quick = tuple(action for action in watch.quick if action not in watch.slow)
        self.avoided = Avoided(frozenset(watch.slow), quick, watch.num_hangs > 0)
        for name in ("cases", "separate_episodes", "recorded_episodes"):
            self.__dict__.pop(name, None)

    def forget_outage(self) -> None:
        """Forget `outage`, and run the episodes again without those that it stopped."""
        if self.outage is not None:
            self.outage = None
            self.__dict__.pop("recorded_episodes", None)

    def close(self) -> None:
        """Close the event loop and cancel its tasks. Repeated calls are harmless; `run` creates a new loop."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_running():
            return
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_END_S))  # some ignore the cancellation
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    @property
    def own_loop(self) -> bool:
        """Whether the agent requests completions itself."""
        return isinstance(self.source, ChatAgentSource)

    def require_steps(self) -> None:
        """Raise NotApplicable if the agent runs its own loop."""
        if self.own_loop:
            raise NotApplicable("it runs its own loop")
        _ = self.cases  # they run on the event loop, so compute them before a property uses it

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Arguments of the constructor, the same for all episodes."""
        if isinstance(self.source, AgentFunc):
            return self.source.agent_kwargs
        return self.source.kwargs  # type: ignore[attr-defined,no-any-return]

    @property
    def limits(self) -> Limits:
        """Limits of an episode: only those of a step and of the turns can be reached."""
        step_s, turns = self.options.step_timeout_s, self.options.max_turns
        if turns is None:
            turns = getattr(self.agent_cls, "max_turns", None) or _MAX_TURNS
        return Limits(_MAX_LENGTH, turns, step_timeout_s=step_s, episode_timeout_s=step_s * (turns + 3))

    @property
    def must_end(self) -> bool:
        """True if an episode that reaches the maximum number of turns is a problem, or worth a note."""
        return self.options.max_turns is not None or getattr(self.agent_cls, "max_turns", None) is None

    @property
    def may_go_on(self) -> bool:
        """True if that is only worth a note: an environment with tools, which policies may call until a run's limit."""
        has_tools = "tool_calls" in source_of(self.agent_cls) or bool(self.tools)
        return self.options.max_turns is None and has_tools

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks to run: the task of the options unchanged, or the first two of the data as messages.

        Raises:
            AgentEnvError: the first row of the data of the options cannot be read.
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
        self.uses_default_task = True
        return [Task([{"role": "user", "content": PROMPT}], LABEL, task_id="check")]

    def rows(self, limit: int | None = None) -> dict[str, list[Task] | AgentEnvError]:
        """Return its datasets by name: the first `limit` tasks of each, or the error in reading it."""
        found: dict[str, Any] = dict(getattr(self.agent_cls, "datasets", {}))
        if self.options.data is not None:
            known = {**builtin_datasets(), **found}
            found = {self.options.data: known.get(self.options.data, self.options.data)}
        prompt_key, label_key = self.options.prompt_key, self.options.label_key
        needs_label = getattr(self.agent_cls, "needs_label", True)
        read: dict[str, list[Task] | AgentEnvError] = {}
        for name, path in found.items():
            try:
                tasks = read_tasks(
                    str(path), prompt_key=prompt_key, label_key=label_key, limit=limit, needs_label=needs_label,
                    split=self.options.split,
                )  # fmt: skip
                read[name] = [in_messages(task) for task in tasks]  # as `agentenv run` does
            except AgentEnvError as error:
                read[name] = error
        return read

    @cached_property
    def offers(self) -> list[tuple[Task, Sequence[Mapping[str, Any]]]]:
        """The tasks to run, and further rows, with the tools that the environment offers for each."""
        tasks, more = list(self.tasks), list[Task]()
        if self.options.task is None and not self.uses_default_task:
            rows = [found for found in self.rows(_TOOL_TASKS).values() if not isinstance(found, AgentEnvError)]
            more = [task for found in rows[:1] for task in found[len(tasks) :]]
        make = partial(create, self.agent_cls, self.kwargs)
        offered = self.run(chats.offered_tools(make, [*tasks, *more], self.limits, self.chat))
        return list(zip([*tasks, *more], offered, strict=True))

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the environment offers for any of these tasks if the chat template renders tools."""
        return list({repr(tool): tool for _, tools in self.offers for tool in tools}.values())

    @property
    def tool_tasks(self) -> list[Task]:
        """The first further row for which tools are offered, if none are for the tasks to run."""
        num = len(self.tasks)
        if any(tools for _, tools in self.offers[:num]):
            return []
        return [task for task, tools in self.offers[num:] if tools][:1]

    def further_tasks(self, most: int) -> list[Task]:
        """Return rows of the data beside the tasks to run: one of each of `most` equal parts, so of any order."""
        if self.options.task is not None or self.uses_default_task:
            return []
        found = [tasks for tasks in self.rows(_MAX_ROWS).values() if not isinstance(tasks, AgentEnvError)]
        rows, draws = (found[0][2:] if found else []), random.Random(0)
        num = min(most, len(rows))
        return [draws.choice(rows[part * len(rows) // num : (part + 1) * len(rows) // num]) for part in range(num)]

    @property
    def cases_of_others(self) -> list[EpisodeCase]:
        """An episode of each row but the first: calls of every tool before the last gold action, or the label."""
        cases, tools = [], self.tools
        for task in [*self.tasks[1:], *self.further_tasks(_NUM_OTHERS)][::-1]:
            seed = 0 if task.seed is None else task.seed
            gold = [] if isinstance(self.source, AgentFunc) else self.gold(task, seed)[0]
            said = (*gold[:-1], *word_calls(tools, task), *(gold[-1:] or [str(task.label)]))
            cases.append(EpisodeCase(task, "another row", Script(said, self.avoided), seed, len(said)))
        return cases

    @property
    def model_chat(self) -> Chat | None:
        """The chat of the model, if one is named."""
        return None if self.options.model is None else chats.of_model(self.options.model)

    @property
    def chat(self) -> Chat:
        """The chat that renders messages: the model's, or a stand-in."""
        return self.model_chat or chats.stand_in()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the chat; it needs no download."""
        return self.chat.tokenizer

    @cached_property
    def cases(self) -> list[EpisodeCase]:
        """The episodes to examine: those of `base_cases`, and those that reach other code."""
        cases = (*self.base_cases, *(self.reached or ()))
        return [replace(case, say=replace(case.say, avoided=self.avoided)) for case in cases]

    @cached_property
    def base_cases(self) -> list[EpisodeCase]:
        """The episodes of uninformed policies, the label, gold, and the policy of the options."""
        tools, cases = self.tools, []  # computed first, since it runs the event loop
        calls = {"calls": list(right_calls(tools).values()), "wrong calls": list(wrong_calls(tools).values())}
        before: list[str] = []
        for index, task in enumerate([*self.tasks, *self.tool_tasks]):
            policies: dict[str, Policy] = {
                "silent": [""],
                "wrong": [ODD_ACTIONS[0]],
                "odd": ODD_ACTIONS[1:],
                "forged": [FORGED],
                "label": [str(task.label)],
                "marked label": [f"#### {task.label}"],
            }
            first = 1_000 * index if task.seed is None else task.seed
            gold = [] if isinstance(self.source, AgentFunc) else self.gold(task, first)[0]
            worded = [] if index else word_calls(tools, task)
            calls |= {"calls with words": worded, "calls with words, last first": worded[::-1]}
            policies |= {name: [*texts, str(task.label)] for name, texts in calls.items() if texts}
            policies |= {f"hack {name!r}": said for name, said in hacks_of(self.agent_cls).items()}
            policies |= {f"action {number}": [text] for number, text in enumerate(self.options.actions, 1)}
            if gold:
                policies["gold"] = gold
            if self.options.policy is not None:
                policies["given"] = self.options.policy
            if before:
                policies["gold of the task before"] = before
            before = gold
            for number, (name, policy) in enumerate(policies.items()):
                seed = first + (number if task.seed is None and name != "gold" else 0)
                turns = len(gold) if name == "gold" else 0
                if name in calls:  # a turn each, before those of an answer
                    turns = len(calls[name]) + self.limits.max_turns
                cases.append(EpisodeCase(task, name, Script(policy), seed, turns))
            if len(gold) > 1 and self.agent_cls.on_truncate is not AgentInstance.on_truncate:
                cases.append(EpisodeCase(task, "gold, cut off", Script(gold), first, cut=len(gold) - 1))
        return cases

    def gold(self, task: Task, seed: int) -> tuple[list[str], BaseException | None]:
        """Return the gold actions of a task (empty if unknown), and the exception of `gold`.

        Only a ContractError is a problem here; the audit reports the others.
        """

        async def actions() -> tuple[list[str], BaseException | None]:
            said: list[str] = []
            async with self.stepped(task, seed, limits=replace(self.limits, max_turns=_MAX_GOLD_TURNS)) as episode:
                with contextlib.suppress(EpisodeFailed):
                    await episode.begin()
                    while not episode.over:
                        gold = asyncio.ensure_future(episode.gold())
                        await asyncio.wait({gold})
                        if (error := gold.exception()) is not None or (action := gold.result()) is None:
                            return said, error
                        said.append(action)
                        await episode.act(action)
            return said, None

        return self.run(actions())

    def stepped(
        self, task: Task, seed: int = 0, limits: Limits | None = None, *, is_watched: bool = False
    ) -> SteppedEpisode:
        """Return an episode of the class that is driven by one action at a time; `is_watched`: its calls are."""
        cls = watched_class(self.agent_cls, self.watch, self.limits, []) if is_watched else self.agent_cls
        make = partial(create, cls, self.kwargs)
        sampling, key = SamplingParams(max_tokens=_MAX_TOKENS), EpisodeKey("check", seed=seed)
        if isinstance(self.source, AgentFunc):
            task = self.source.as_given(task, self.chat)
        return SteppedEpisode(make, task, chat=self.chat, sampling=sampling, limits=limits or self.limits, key=key)

    def recording_source(self, seen: list[MethodCall], around: Around | None = None) -> EpisodeSource:
        """Return the same source with a class that records the calls of its methods in `seen`."""
        source = self.source
        watcher = watched_class(self.agent_cls, self.watch, self.limits, seen, around=around)
        if isinstance(source, AgentFunc):
            return source.with_agent(watcher)
        kind = ChatAgentSource if isinstance(source, ChatAgentSource) else EnvSource
        return kind(watcher, self.kwargs)

    async def episode(
        self,
        case: EpisodeCase,
        *,
        source: EpisodeSource | None = None,
        engine: Engine | None = None,
        limits: Limits | None = None,
    ) -> Trajectory:
        """Run one episode of a case; see `run_episode`."""
        chat, most = self.chat, case.cut or max(self.limits.max_turns, case.num_turns)
        engine = engine or ScriptedEngine(case.say, chat.tokenizer)
        sampling = SamplingParams(max_tokens=_MAX_TOKENS)
        setup = EpisodeSetup(engine, chat, sampling, limits or replace(self.limits, max_turns=most))
        key = EpisodeKey(f"{case.task.task_id}/{case.policy}", seed=case.seed)
        trajectory = await self.run_episode(source or self.source, case.task, setup, key)
        if source is not None and self.has_slow_calls:  # their calls are watched
            raise SlowCalls
        return trajectory

    async def run_episode(self, source: EpisodeSource, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run an episode, again where infrastructure failed.

        Raises:
            InfraError: infrastructure failed each time.
            ConfigError: the constructor says that its arguments or its surroundings are wrong, such as a missing key.
            NotApplicable: the check has taken too long.
        """
        self.watch.require_thread()
        if time.monotonic() > self._deadline:
            raise NotApplicable(f"no time left after {self._budget_s:g} s; check it with --only")
        setup = replace(setup, step_retries=StepRetries(NUM_ATTEMPTS - 1, RETRY_WAIT_S))

        async def run() -> Trajectory:
            with record_events(FILE_EVENTS, own_files(self.agent_cls)) as events:
                trajectory = await source.run(task, setup, key)
            for path, (_, _, written) in written_files(events).items():
                self.writes[path].add(written)
            raise_outage(trajectory)
            error = trajectory.error
            if error is not None and may_be_a_service(setup.progress.error):
                self.service_errors.add(error)
            if error is not None and (error.where, error.type) == ("create", "ConfigError"):
                raise ConfigError(error.message)
            return trajectory

        return await self.retried(run)

    async def retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, which is called again after an InfraError, as a run does.

        Raises:
            InfraError: each call raised one.
        """
        failed: InfraError | None = None
        for attempt in range(NUM_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_WAIT_S * 2 ** (attempt - 1))
            try:
                return await work()
            except InfraError as error:
                if error.ends_run:
                    raise
                failed = error
        raise InfraError(f"the outside failed in {NUM_ATTEMPTS} attempts, {failed}") from failed

    @cached_property
    def separate_episodes(self) -> list[Trajectory]:
        """The trajectory of each of `cases`, run one after the other, once for all properties."""
        return self.run(self.run_separately(self.cases))

    async def run_separately(self, cases: Sequence[EpisodeCase]) -> list[Trajectory]:
        """Run cases one after the other; return their trajectories."""
        return [
            await self.episode(case, engine=ScriptedEngine(partial(yielded, case), self.tokenizer)) for case in cases
        ]

    @cached_property
    def recorded_episodes(self) -> list[RecordedEpisode]:
        """The same episodes with the calls of the environment's methods."""
        cases = self.cases

        async def recorded(case: EpisodeCase) -> RecordedEpisode:
            seen, raised = list[MethodCall](), list[tuple[str, Exception]]()

            def note(event: str, args: tuple[Any, ...]) -> None:
                if event == "agentenv.tool_error":
                    raised.append((args[0], args[1]))

            with heard_audit_events(note):
                trajectory = await self.episode(case, source=self.recording_source(seen))
            return RecordedEpisode(case, trajectory, seen, raised)

        return self.run(self.survivors(cases, recorded))

    async def survivors(self, cases: Sequence[EpisodeCase], run: Callable[[EpisodeCase], Awaitable[T]]) -> list[T]:
        """Return what `run` returns of each case for which infrastructure works; `outage` keeps the last error.

        After `_MAX_LOST` cases in a row for which it does not, no further one is run.
        """
        results, num_lost = list[T](), 0
        for case in cases:
            try:
                results.append(await run(case))
                num_lost = 0
            except InfraError as error:
                if error.ends_run:
                    raise
                self.outage, num_lost = error, num_lost + 1
                if num_lost == _MAX_LOST:
                    break
        return results


def written_files(events: Sequence[Event]) -> dict[str, tuple[str, int, float]]:
    """Return the file and line that opens each file that own code opens to write, and when the file was written last.

    Files whose names say that episodes share them, logs and caches, are left out.
    """
    found: dict[str, tuple[str, int, float]] = {}
    for event in events:
        name = os.path.basename(event.subject).lower()
        writes = event.description == "sqlite" or bool(set(event.description) & set("wx+"))
        if not event.line or not writes or name.endswith(".log") or "cache" in name:
            continue
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(event.subject)  # of a folder: where a temporary file without a name is
            if stat.S_ISREG(status.st_mode):
                found[event.subject] = event.file, event.line, status.st_mtime
    return found


def raise_outage(trajectory: Trajectory) -> None:
    """Raise if an episode failed because of infrastructure.

    Raises:
        InfraError: with the place and the message of the error.
    """
    error = trajectory.error
    if error is not None and error.kind == "infra":
        path, colon, line = error.place.rpartition(":")
        at = f" at {relative_path(path)}{colon}{line}" if path else ""
        raise InfraError(f"{error.where}{at}: {error.type}: {error.message}")


def _close_idle(loop: asyncio.AbstractEventLoop) -> None:
    # The context was garbage-collected without `close`.
    if not loop.is_running():
        loop.close()
