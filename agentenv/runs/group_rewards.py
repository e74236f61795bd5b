"""Rewards of all answers to a task together: `--group_reward` of `agentenv run` and `agentenv train`.

An answer is the last action of an episode; its group's reward is added to that action's. An episode whose group is not
graded yet is recorded with an error whose `where` is WHERE, and again without it when the reward is known; a resumed
run takes such answers up and does not sample them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentenv._util.suggest import did_you_mean
from agentenv.core.engine import Tokenizer
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Task
from agentenv.episode.runner import EpisodeRunner, OnEnd, PlannedEpisode, passed
from agentenv.errors import ConfigError, ContractError, DataError, ErrorKind
from agentenv.interop.verl.judges import ScoreFunction, judge_of, mapping
from agentenv.rewards.grading import MAX_CONCURRENT, collect_usage, with_usage
from agentenv.rewards.groups.batch import Each, grade_group
from agentenv.rewards.groups.function import FunctionGroupReward
from agentenv.rewards.groups.registry import GROUP_REWARDS
from agentenv.rewards.judges.templates import prompt_text
from agentenv.rewards.registry import REWARDS
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult, Status
from agentenv.runs.config import GroupOptions
from agentenv.runs.metrics import GROUP_REWARD

WHERE = "group_reward"
"""`EpisodeError.where` of an episode without its group's reward."""
_FAILED = "GroupFailed"
_NUM_BEFORE = 16
"""Tokens before an action that may hold the `<think>` with which a chat template opens it."""
_NAMES = {"win": "reference/win_rate", "win_and": "reference/win_or_tie_rate"}
"""Names in `StepResult.info` whose means are rates; other components are there as group/NAME."""


def open_grader(options: GroupOptions, tokenizer: Tokenizer, *, concurrency: int) -> GroupGrader | None:
    """Return what grades groups; None without --group_reward.

    Raises:
        ConfigError: --group_reward names no reward, or its options are wrong.
    """
    given = options.reward
    if given is None:
        return None
    if isinstance(given, str) and ":" not in given and given not in (names := {**GROUP_REWARDS, **REWARDS}):
        advice = did_you_mean(given, names, "Check its name.")
        expected = f"one of {', '.join(names)}, FILE.py:name or module:name"
        raise ConfigError(f"--group_reward: expected {expected}, got {given!r}.{advice}")
    reward: Any = judge_of(given, limit_s=options.group_timeout_s, max_threads=concurrency)
    if not hasattr(reward, "grade_group"):
        if options.reference_key is not None:
            raise ConfigError(
                f"--reference_key: expected a --group_reward that compares answers, got {given!r}. Leave it out."
            )
        reward = Each(reward, limit_s=options.group_timeout_s)
    return GroupGrader(reward, options, tokenizer)


@dataclass(frozen=True, slots=True)
class GroupGrader:
    """Grades the episodes of one task together."""

    reward: GroupReward
    options: GroupOptions
    tokenizer: Tokenizer

    def check(self, tasks: Iterable[Task]) -> None:
        """Check the column of references.

        Raises:
            ConfigError: no task has the column.
            DataError: a value is not text.
        """
        key = self.options.reference_key
        if key is not None and not sum(self._reference(task) is not None for task in tasks):
            raise ConfigError(f"--reference_key: expected a column of the data, got {key!r}. Check its name.")

    async def grade(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the records of a group with its reward, in order.

        One that failed by itself is returned as it is. One that has no reward from its group has an error instead.

        Raises:
            RunStopped: the reward's settings are wrong, such as the key of a judge.
        """
        members = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        is_dropped = self.options.incomplete_groups == "drop"
        num, num_members = len(trajectories), len(members)
        why = f"expected {num} answers to the task, got {num_members}: --incomplete_groups drop"
        results = [RewardResult.failed(why)] * num_members
        kind, spent = "GroupDropped", dict[str, float]()
        if members and not (is_dropped and num_members < num):
            responses = [response_of(member, self.reward, self.tokenizer) for member in members]
            reference = self._reference(members[0].task)
            limit_s, flag = self.options.group_timeout_s, "--group_timeout_s"
            with collect_usage() as spent:  # by judges
                grade = await grade_group(self.reward, responses, reference, limit_s=limit_s, flag=flag)
            results = list(grade.results)
            if (wrong := next((each for each in results if each.is_misconfigured), None)) is not None:
                raise wrong.error("--group_reward")
            kind = _FAILED
            if is_dropped and (failed := [result for result in results if result.reward is None]):
                results = failed[:1] * num_members
        share = {name: count / num_members for name, count in spent.items()}
        graded = iter([_graded(*each, kind, share) for each in zip(members, results, strict=True)])
        return [each if each.reward is None else next(graded) for each in trajectories]

    def _reference(self, task: Task) -> str | None:
        key = self.options.reference_key
        value = None if key is None else task.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise DataError(f"task {task.task_id}: expected text in column {key!r}, got {value!r:.200}.")
        return value


def response_of(trajectory: Trajectory, reward: Reward | GroupReward, tokenizer: Tokenizer) -> Response:
    """Return the answer of an episode, and the row as verl's reward manager gives it to the same reward."""
    task, prompt = trajectory.task, trajectory.prompt or trajectory.task.prompt
    turn, extra = trajectory.turns[-1], mapping(task.metadata.get("extra_info"))
    text = turn.action
    if not isinstance(getattr(reward, "reward", reward), ScoreFunction):  # verl passes it as it is
        before = trajectory.segments[turn.segment].token_ids[max(0, turn.start - _NUM_BEFORE) : turn.start]
        text = with_opened_thought(text, tokenizer.decode(before.tolist()) if before else "")
    if isinstance(reward, FunctionGroupReward):
        return Response(text, task.label, prompt_text(prompt), extra or task.metadata)
    return Response(text, task.label, prompt, {**extra, **task.metadata})


def _graded(trajectory: Trajectory, result: RewardResult, failure: str, spent: Mapping[str, float]) -> Trajectory:
    """Return a record with its group's reward and its share of what grading used, or the reason why there is none."""
    if result.reward is None:
        kinds: dict[Status, ErrorKind] = {Status.LABEL: "data", Status.ERROR: "contract"}
        return _without(trajectory, failure, result.detail, kinds.get(result.status, "infra"))
    components = {_NAMES.get(name, f"group/{name}"): value for name, value in result.components.items()}
    known = {name: value for name, value in components.items() if value is not None}
    last = trajectory.turns[-1].result
    assert last is not None  # the episode has a reward
    # What judges in `step` used is there already, under the same names.
    info = {**with_usage(last.info, spent), **known, GROUP_REWARD: result.reward}
    try:
        trajectory.set_result(replace(last, reward=last.reward + result.reward, info=info))
    except ContractError as error:  # the sum is not a reward
        return _without(trajectory, failure, str(error), "infra")
    return trajectory


def without_group(trajectory: Trajectory) -> None:
    """Take its group's reward, if any, off the last turn of a record."""
    last = trajectory.turns[-1].result
    if last is not None and isinstance(share := last.info.get(GROUP_REWARD), float):
        of_groups = ("group/", *_NAMES.values())
        info = {name: value for name, value in last.info.items() if not name.startswith(of_groups)}
        trajectory.set_result(replace(last, reward=last.reward - share, info=info))


def _without(trajectory: Trajectory, name: str, message: str, kind: ErrorKind = "infra") -> Trajectory:
    return replace(trajectory, error=EpisodeError(kind, name, message, WHERE))


def count_failures(runner: EpisodeRunner, graded: Iterable[Trajectory]) -> None:
    """Count the episodes whose grader failed into the runner's share of failed ones."""
    for trajectory in graded:
        if trajectory.error is not None and trajectory.error.type == _FAILED:
            runner.count_late(trajectory)


class Recorder(Protocol):
    """Receives final records."""

    async def __call__(self, *trajectories: Trajectory) -> None:
        """Record episodes; those of a group come together."""


class OpenGroups:
    """Runs episodes whose groups are graded when their last one has ended.

    Args:
        runner: runs the episodes; a grader that fails counts into its share of failed ones.
        grader: grades the groups.
        num_samples: episodes of a group.
        record: receives each final record, those of a group together.
        hold: receives the record of an episode that waits for its group.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        grader: GroupGrader,
        num_samples: int,
        *,
        record: Recorder,
        hold: OnEnd | None = None,
    ) -> None:
        self._runner, self._grader, self._num_samples = runner, grader, num_samples
        self._record, self._hold = record, hold
        self._open: dict[str, list[Trajectory]] = {}
        # Answers wait in memory: episodes pause when graders hold up so many groups.
        self._places = asyncio.Semaphore(max(runner.concurrency, MAX_CONCURRENT))
        self._grading: asyncio.TaskGroup | None = None

    def take_up(self, trajectories: Iterable[Trajectory]) -> set[str]:
        """Take up the groups of an earlier session, and return the ids of episodes that must not run again.

        A group of which one episode is graded is closed: its other ones, which failed, stay as they are.
        """
        closed: set[str] = set()
        failed: dict[str, str] = {}
        for trajectory in trajectories:
            key = trajectory.group_id
            if trajectory.error is not None and trajectory.error.where == WHERE:  # it lacks its group's reward only
                self._open.setdefault(key, []).append(replace(trajectory, error=None))
            elif trajectory.error is not None:
                failed[trajectory.episode_id] = key
            elif trajectory.reward is None:
                self._open.setdefault(key, []).append(trajectory)
            else:
                closed.add(key)
        over = {episode_id for episode_id, key in failed.items() if key in closed}
        over |= {each.episode_id for group in self._open.values() for each in group}
        for key in closed:
            self._open.pop(key, None)
        return over

    async def run(self, planned: Iterable[PlannedEpisode]) -> None:
        """Run the episodes, and wait until every complete group is graded.

        Episodes wait for graders only if as many groups as run at once are with them.

        Raises:
            RunStopped: more than the policy's share failed; or as `record`.
        """
        try:
            async with asyncio.TaskGroup() as self._grading:
                for key in [key for key, group in self._open.items() if len(group) == self._num_samples]:
                    await self._begin(key)
                await self._runner.run(planned, self._ended)
            if self._runner.num_done >= self._runner.policy.min_episodes:
                self._runner.check_error_share()  # graders may have failed since the last episode
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _ended(self, trajectory: Trajectory) -> None:
        if trajectory.reward is None:
            await self._record(trajectory)
        elif self._hold is not None:
            waiting = "expected the reward of its group, got none yet. Continue with --resume."
            await passed(_without(trajectory, "GroupPending", waiting), self._hold)
        group = self._open.setdefault(trajectory.group_id, [])
        group.append(trajectory)
        if len(group) == self._num_samples:
            await self._begin(trajectory.group_id)

    async def _begin(self, key: str) -> None:
        assert self._grading is not None
        await self._places.acquire()
        group = self._open.pop(key)

        async def grade() -> None:
            try:
                graded = await self._grader.grade(group)
            finally:
                self._places.release()
            count_failures(self._runner, graded)
            pairs = zip(group, graded, strict=True)
            await self._record(*(after for before, after in pairs if before.reward is not None))

        self._grading.create_task(grade())
