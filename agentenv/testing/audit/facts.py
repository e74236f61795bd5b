"""The plays of an audit, with the facts to judge them by."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from agentenv.core.types import StopReason, Task
from agentenv.testing.audit.answers import Needle, needles
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.policies import Kind

EPS = 1e-6
"""Rewards and scores that differ by less are equal."""
_TRIVIAL_TEXTS = 4
"""A task that this many different constants solve counts as solved by any text."""


def grouped(plays: Iterable[Play], by: Callable[[Play], str]) -> dict[str, list[Play]]:
    """Return the plays by what `by` returns of each, in their order."""
    found: dict[str, list[Play]] = defaultdict(list)
    for play in plays:
        found[by(play)].append(play)
    return dict(found)


@dataclass(frozen=True)
class Facts:
    """Plays, with the facts to judge them by."""

    plays: Sequence[Play]
    tasks: Mapping[str, Task]
    """The tasks of the plays, by id."""
    kinds: Mapping[str, Kind]
    """Kind of each policy, by name/variant."""
    pass_reward: float | None = None
    """Reward of a full score for tasks without scores; None: the reward of gold."""
    reward_range: tuple[float, float] | None = None
    score_range: tuple[float, float] | None = (0.0, 1.0)
    """`score_range` of the environment; None is judged as 0 to 1."""
    max_turns: int = 8
    """Maximum number of turns of most plays."""
    reseeded: Sequence[Play] = ()
    """Plays of guesses that may be luck, with other seeds."""
    more_gold: Sequence[Play] = ()
    """Plays of gold on further tasks, which no other policy plays."""
    repeated: Sequence[Play] = ()
    """Repetitions of plays that failed."""

    @cached_property
    def by_task(self) -> Mapping[str, Sequence[Play]]:
        """The plays of each task."""
        return grouped(self.plays, attrgetter("task_id"))

    @cached_property
    def gold(self) -> Mapping[str, Play]:
        """The play of gold, by task."""
        return {play.task_id: play for play in self.plays if play.key == "gold"}

    @cached_property
    def trivial(self) -> frozenset[str]:
        """Tasks that almost any text solves."""
        solved = Counter(play.task_id for play in self.plays if play.policy == "constant" and self.full(play))
        return frozenset(task_id for task_id, num in solved.items() if num >= _TRIVIAL_TEXTS)

    @cached_property
    def has_scores(self) -> bool:
        """Whether the environment returns scores."""
        return any(play.score is not None for play in self.plays)

    @cached_property
    def unrated(self) -> list[str]:
        """Ids of the tasks whose full score is unknown, so that most findings are impossible."""
        if self.has_scores or self.pass_reward is not None:
            return []
        return [task_id for task_id in self.by_task if (gold := self.gold.get(task_id)) is None or gold.reward is None]

    def full(self, play: Play) -> bool:
        """Return True if a play has the full score."""
        if play.reward is None:
            return False
        if play.score is not None:
            return self.score_share(play.score) >= 1.0 - EPS
        if self.pass_reward is not None:
            return play.reward >= self.pass_reward - EPS
        gold, floor = self.gold.get(play.task_id), self.floor(play.task_id)
        if self.has_scores or gold is None or gold.reward is None or (floor is not None and gold.reward <= floor):
            return False
        return play.reward >= gold.reward - EPS

    def score_share(self, score: float | None) -> float:
        """Return a score as a share of the full score; 0 without a score."""
        low, high = self.score_range or (0.0, 1.0)
        return 0.0 if score is None else (score - low) / (high - low)

    def floor(self, task_id: str) -> float | None:
        """Return the reward of an empty action; None if it is unknown."""
        own = [play for play in self.by_task[task_id] if play.policy == "null" and not self.is_cut(play)]
        return max((play.reward for play in own if play.reward is not None), default=None)

    def is_cut(self, play: Play) -> bool:
        """Return True if a play that only costs ended by a limit before as many turns as gold takes."""
        gold, cost = self.gold.get(play.task_id), play.reward is not None and play.reward < -EPS
        is_shorter = gold is not None and len(play.steps) < len(gold.steps)
        return cost and is_shorter and play.stop_reason == StopReason.MAX_TURNS

    def gains_nothing(self, gold: Play) -> bool:
        """Return True if gold earns no more than an empty action, which does not solve the task."""
        floor = self.floor(gold.task_id)
        solved = any(self.full(play) for play in self.by_task[gold.task_id] if play.policy == "null")
        return gold.reward is not None and floor is not None and gold.reward <= floor + EPS and not solved

    def needles_of(self, task_id: str) -> list[Needle]:
        """Return the answers in the label and in gold, if that gets the full score."""
        gold = self.gold.get(task_id)
        said = gold.actions if gold is not None and self.full(gold) else ()
        return needles(self.tasks[task_id].label, said)

    def of(self, *kinds: Kind) -> dict[str, list[Play]]:
        """Return the plays of these kinds of policies, by policy."""
        return grouped((play for play in self.plays if self.kinds[play.key] in kinds), attrgetter("policy"))

    def for_nothing(self, task_id: str) -> list[tuple[Play, float]]:
        """Return the plays of policies that solve nothing, except for empty actions, with their rewards."""
        kinds = ("blind", "attack", "robust")
        return [(p, p.reward) for p in self.by_task[task_id] if p.reward is not None and self.kinds[p.key] in kinds]
