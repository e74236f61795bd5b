"""Runs episodes of policies in the time of an audit, and keeps what it needs of them.

Policies whose steps take long come last, and what does not fit is left out.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from agentenv._util.calls import time_limit
from agentenv.chat.chat import Chat
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Limits, SamplingParams, Task
from agentenv.core.views import spans_of
from agentenv.episode.loop import AgentFactory
from agentenv.episode.runner import derive_seed
from agentenv.episode.setup import EpisodeKey, Stage
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import EpisodeFailed
from agentenv.testing.audit.policies import BASELINES, LONG_NAMES, LONG_POLICIES, PART, WITHOUT, AuditPolicy, View
from agentenv.testing.chats import observation_text
from agentenv.testing.conformance.context import NUM_ATTEMPTS, RETRY_WAIT_S

GOLD_TURNS = 500
"""Turns of gold where the class has no limit: a task may need many, while other policies gain nothing from more."""
_MEASURED = ("constant/0", "calls/each_tool", "gold")
"""Policies after whose actions the size of the state is measured: it takes long if the state is large."""
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_SHOWN_CHARS = 400
"""Maximum number of characters of an action or observation in a report."""
_PER_ITEM = 8
_MAX_ITEMS = 50_000
"""Maximum number of values to visit, so that a large state delays no step."""


_OF_ONE_POLICY = 1 / 40
"""Part of the time after which a policy is slow, and is played after the others."""
SLOW_S = 1.0
"""Seconds of a step that is recorded as slow."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action and its reply."""

    action: str
    observation: str
    """The observation that the policy read; empty if the episode ended here."""
    reward: float
    score: float | None
    num_special: int
    """Special tokens in the observation and around it."""


@dataclass(frozen=True, slots=True)
class Play:
    """One episode of one policy on one task."""

    policy: str
    variant: str
    task_id: str
    seed: int
    """Seed of the environment."""
    prompt: str
    steps: tuple[Step, ...]
    reward: float | None
    """Sum over the steps; None if the episode failed."""
    score: float | None
    stop_reason: str
    error: EpisodeError | None = None
    step_s: tuple[float, ...] = field(default=(), compare=False)
    """Seconds of each step of the environment, which differ between equal plays."""
    state_bytes: tuple[int, ...] = field(default=(), compare=False)
    """Size of the environment's attributes after each turn, for the policies in `_MEASURED`."""

    @property
    def key(self) -> str:
        """The policy as name/variant."""
        return f"{self.policy}/{self.variant}" if self.variant else self.policy

    @property
    def failed_outside(self) -> bool:
        """Whether a service failed, not the environment."""
        return self.error is not None and self.error.kind == "infra"

    @property
    def began(self) -> bool:
        """Whether the policy was asked for an action, so that it is known to have one."""
        return self.error is None or self.error.where not in (Stage.CREATE, Stage.RESET, Stage.PROMPT)

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions in order."""
        return tuple(step.action for step in self.steps)

    @property
    def action(self) -> str:
        """The last action."""
        return self.steps[-1].action if self.steps else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, with long texts shortened."""
        steps = [
            {**asdict(step), "action": shorten(step.action), "observation": shorten(step.observation)}
            for step in self.steps
        ]
        error = None if self.error is None else asdict(self.error)
        return {
            "policy": self.key, "task_id": self.task_id, "seed": self.seed, "reward": self.reward, "score": self.score,
            "stop_reason": self.stop_reason, "error": error, "steps": steps,
        }  # fmt: skip


def shorten(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Return a text for a report, without its middle and without lone surrogates, which files cannot store."""
    if len(text) > most:
        text = f"{text[: most // 2]} …[{len(text) - most} characters]… {text[-most // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took long."""

    policy: str
    task_id: str
    action: str
    step_s: float


@dataclass(slots=True)
class Budget:
    """The time of an audit, and what was used of it; it changes while episodes run."""

    limit_s: float = math.inf
    """Seconds of the audit."""
    started_s: float = field(default_factory=time.perf_counter)
    used_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of steps, by the name of the policy."""
    slow: list[SlowStep] = field(default_factory=list)
    part: float = 1.0
    """Part of the time after which no further episode starts; later kinds of episodes have the rest."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Episodes that did not fit, by the name of the policy."""
    num_not_repeated: int = 0
    without_action: set[str] = field(default_factory=set)
    """Names of policies that had nothing to play in some episode."""

    @property
    def num_left_out(self) -> int:
        """Episodes that did not fit."""
        return self.left_out.total()

    def add(self, policy: str, task_id: str, action: str, step_s: float) -> None:
        """Count a step; `policy` is a name/variant."""
        self.used_s[policy.partition("/")[0]] += step_s
        if step_s >= SLOW_S:
            self.slow.append(SlowStep(policy, task_id, action, step_s))

    def is_slow(self, name: str) -> bool:
        """Return True if a policy has used so much time that others come first."""
        return self.used_s[name] > _OF_ONE_POLICY * self.limit_s

    @property
    def left_s(self) -> float:
        """Seconds until no further step may run; negative after that."""
        return self.limit_s * self.part - (time.perf_counter() - self.started_s)

    @property
    def is_over(self) -> bool:
        """Whether no further episode may start."""
        return self.left_s < 0


@dataclass(frozen=True, slots=True)
class PolicyRunner:
    """Runs policies on the tasks of an environment."""

    make_agent: AgentFactory
    tasks: Sequence[Task]
    """All tasks; policies see the labels of the others."""
    chat: Chat
    limits: Limits
    sampling: SamplingParams
    seed: int = 0
    run_turns: int = 0
    """Maximum number of turns of an episode in a run, for the policies that take as many."""
    gold_turns: int = GOLD_TURNS
    """Maximum number of turns of gold."""
    budget: Budget = field(default_factory=Budget)

    async def play(self, policy: AuditPolicy, task: Task, *, is_late: bool = True) -> Play | None:
        """Run one episode; return None if the policy has no action.

        Args:
            policy: what it does.
            task: the task of the episode.
            is_late: whether it may take long, because the episodes of other policies have ended.

        Raises:
            NoTimeError: other episodes come first, or the time is over.
        """
        budget = self.budget
        rng = Random(derive_seed(self.seed, policy.key, task.task_id))
        others = [each.label for each in self.tasks if each.task_id != task.task_id]

        limits = self.limits

        def check_time() -> None:
            if budget.is_over or (not (is_late or policy.name in BASELINES) and budget.is_slow(policy.name)):
                raise NoTimeError

        async def act(episode: SteppedEpisode, prompt: str, feedback: str) -> str | None:
            if episode.trajectory.turns:
                last = episode.trajectory.turns[-1]
                budget.add(policy.key, task.task_id, last.action, last.step_s)
            check_time()
            gold, error = await episode.tried_gold() if policy.sees_gold else (None, None)
            if error is not None:
                raise _NoGoldError(error)
            room = (episode.asked.sampling.max_tokens if episode.asked else None) or self.limits.max_length
            played = episode.trajectory.turns
            view = View(
                prompt, feedback, len(played), rng, room - 1, others, gold, episode.trajectory.tools,
                before=[turn.action for turn in played],
                seen=[observation_text(turn.result.observation) for turn in played if turn.result is not None],
                turns=limits.max_turns,
                label=task.label if policy.sees_gold else None,
            )  # fmt: skip
            action = policy.act(view)
            return None if action is None else _SURROGATE.sub("\ufffd", action)  # as a tokenizer's decode would

        is_long = (
            policy.name in LONG_NAMES
            or policy.key in LONG_POLICIES
            or policy.variant.startswith((PART, WITHOUT, "undo_"))
        )
        if policy.kind == "gold" or is_long:
            turns = self.gold_turns if policy.kind == "gold" else self.run_turns
            limits = replace(limits, max_turns=max(limits.max_turns, turns))
        check_time()  # before `reset`, which may take long
        played = await self._run(task, act, (policy.name, policy.variant), limits)
        if played is None:
            budget.without_action.add(policy.name)
        elif played.steps:
            budget.add(policy.key, task.task_id, played.action, played.step_s[-1])
        return played

    async def replay(self, play: Play, task: Task, before: Callable[[], None] = lambda: None) -> Play:
        """Repeat the actions of a play, again if an outage ends them; `before` is called before each.

        Raises:
            NoTimeError: the time is over.
        """
        actions = play.actions

        async def act(episode: SteppedEpisode, prompt: str, feedback: str) -> str | None:
            index = len(episode.trajectory.turns)
            before()
            return actions[index] if index < len(actions) else None

        limits = replace(self.limits, max_turns=max(self.limits.max_turns, len(play.steps)))
        for attempt in range(NUM_ATTEMPTS):
            await asyncio.sleep(attempt * RETRY_WAIT_S)
            played = await self._run(task, act, (play.policy, play.variant), limits)
            if played is None or not played.failed_outside:
                break
        return play if played is None else played

    async def _run(self, task: Task, act: Callable[..., Any], name: tuple[str, str], limits: Limits) -> Play | None:
        if not self.budget.is_over:
            async with time_limit(self.budget.left_s):
                return await self._run_all(task, act, name, limits)
        raise NoTimeError

    async def _run_all(self, task: Task, act: Callable[..., Any], name: tuple[str, str], limits: Limits) -> Play | None:
        seed = task.seed if task.seed is not None else derive_seed(self.seed, task.task_id)
        key = EpisodeKey(f"audit/{task.task_id}", seed=seed)
        episode = SteppedEpisode(self.make_agent, task, chat=self.chat, sampling=self.sampling, limits=limits, key=key)
        sizes, record = list[int](), episode.trajectory
        async with episode:
            try:
                prompt = observation_text(await episode.begin())
                feedback, is_measured = "", "/".join(filter(None, name)) in _MEASURED
                while not episode.over:
                    action = await act(episode, prompt, feedback)
                    if action is None:
                        break
                    result = await episode.act(action)
                    feedback = observation_text(result.observation)
                    if is_measured and not episode.over:
                        sizes.append(state_size(episode.agent))
            except EpisodeFailed:
                prompt = observation_text(record.prompt)  # the error is on the trajectory
            except _NoGoldError as failed:
                # Other policies that need gold are not counted, unless it may be known in the next attempt.
                play = Play(*name, task.task_id, record.seed or 0, prompt, (), None, None, "error", failed.error)
                return play if name[0] == "gold" or play.failed_outside else None
        if not record.turns and record.error is None:
            return None
        return Play(
            *name, task.task_id, record.seed or 0, prompt, self._steps(record), record.reward, record.score,
            str(record.stop_reason or ""), record.error, tuple(turn.step_s for turn in record.turns), tuple(sizes),
        )  # fmt: skip

    def _steps(self, trajectory: Trajectory) -> tuple[Step, ...]:
        """Return the actions and replies of an episode, up to a turn without a result."""
        steps = []
        for index, turn in enumerate(trajectory.turns):
            if turn.result is None:
                break
            text, num_special = "", 0
            if index + 1 < len(trajectory.turns):
                text, ids = observation_text(turn.result.observation), trajectory.segments[turn.segment].token_ids
                for span in spans_of(trajectory, turn.segment):
                    if span.turn == index and span.kind in ("close", "feedback"):
                        num_special += len(self.chat.added_in(ids[span.start : span.end]))
            steps.append(Step(turn.action, text, turn.result.reward, turn.result.score, num_special))
        return tuple(steps)


class NoTimeError(Exception):
    """An episode has no time: others come first, or the time of the audit is over."""


class _NoGoldError(Exception):
    """`gold` raised."""

    def __init__(self, error: EpisodeError) -> None:
        super().__init__(error.message)
        self.error = error


async def play_all(
    runner: PolicyRunner, pairs: Sequence[tuple[AuditPolicy, Task]], *, concurrency: int, notify: Callable[[int], None]
) -> list[Play | None]:
    """Run all pairs and return the plays in their order, None if a policy has no action or no time.

    The baselines come first, then variants of gold, and the policies whose steps take long come last. What an outage
    ended is played again after that, as a run does. `notify` gets the number of ended episodes.
    """
    plays: list[Play | None] = [None] * len(pairs)

    def rank(index: int) -> int:
        policy = pairs[index][0]
        return 0 if policy.name in BASELINES else 1 if policy.kind == "wrong" else 2

    waiting, late, done = deque(sorted(range(len(pairs)), key=rank)), deque[int](), 0

    async def work() -> None:
        nonlocal done
        while waiting or late:
            is_late = not waiting
            index = (waiting or late).popleft()
            is_again = plays[index] is not None
            try:
                plays[index] = await runner.play(*pairs[index], is_late=is_late)
            except NoTimeError:
                if not is_late and not runner.budget.is_over:
                    late.append(index)
                elif not is_again:
                    runner.budget.left_out[pairs[index][0].name] += 1
                continue
            if plays[index] is not None and not is_again:
                done += 1
                notify(done)

    for attempt in range(NUM_ATTEMPTS):
        await asyncio.sleep(attempt * RETRY_WAIT_S)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
        except BaseExceptionGroup as failed:  # such as RunStopped, which ends the whole audit
            raise failed.exceptions[0] from None
        waiting += [index for index, play in enumerate(plays) if play is not None and play.failed_outside]
        if not waiting:
            break
    return plays


async def replay_all(
    runner: PolicyRunner, plays: Sequence[Play], tasks: Mapping[str, Task], *, notify: Callable[[int], None],
    before: Callable[[], None] = lambda: None,
) -> list[tuple[Play, Play]]:  # fmt: skip
    """Repeat each play alone and in the opposite order, while there is time; return pairs of first and second plays.

    `before` is called before each action.
    """
    pairs = []
    for index, play in enumerate(reversed(plays)):
        try:
            pairs.append((play, await runner.replay(play, tasks[play.task_id], before)))
        except NoTimeError:
            runner.budget.num_not_repeated += len(plays) - index
            break
        notify(index + 1)
    return pairs


def state_size(instance: Any) -> int:
    """Return the approximate bytes in the attributes of an object and of what they refer to, each counted once."""
    size, seen, left = 0, set[int](), [instance]
    while left and len(seen) < _MAX_ITEMS:
        value = left.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, str | bytes | bytearray):
            size += len(value)
        elif isinstance(value, dict):
            size += 2 * _PER_ITEM * len(value)
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            size += _PER_ITEM * len(value)
            left += value
        else:
            size += int(getattr(value, "nbytes", 0)) if type(value).__module__ == "numpy" else _PER_ITEM
            left.append(getattr(value, "__dict__", None))
    return size
