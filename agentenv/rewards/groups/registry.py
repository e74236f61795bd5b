"""Rewards of groups by name, for `--group_reward` and for verl's `+reward.reward_kwargs.reward`.

    group_reward_from({"pairwise": {"judge": {"base_url": "http://127.0.0.1:8000/v1", "model": "judge"}}})

`judge` is a judge, or settings for `judges.asking.judge_from`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from agentenv.core.arguments import construct
from agentenv.errors import ConfigError
from agentenv.rewards.grading import MAX_CONCURRENT
from agentenv.rewards.groups.function import FunctionGroupReward
from agentenv.rewards.groups.rm_gallery import create_rm_gallery_reward_function
from agentenv.rewards.groups.tournament import Measure, Tournament
from agentenv.rewards.judges.comparisons import ListwiseReward, PairwiseJudge
from agentenv.rewards.types import GroupReward

_OPPONENTS = 4


def pairwise(
    judge: Any,
    *,
    measure: Measure = "comparison_score",
    opponents: int | None = None,
    both_orders: bool = True,
    criteria: str | None = None,
    voting: Mapping[str, Any] | None = None,
    retry: Mapping[str, Any] | None = None,
    limit_s: float = 200.0,
) -> Tournament:
    """Return a `Tournament` of all answers, each against each, by a `PairwiseJudge`."""
    # The tournament shows each pair in both orders itself.
    comparer = PairwiseJudge(judge, order="given", criteria=criteria, voting=voting, retry=retry)
    return Tournament(comparer, measure=measure, opponents=opponents, both_orders=both_orders, limit_s=limit_s)


def tournament(judge: Any, *, opponents: int = _OPPONENTS, **options: Any) -> Tournament:
    """Return `pairwise` in which each answer meets about `opponents` others, for large groups."""
    return pairwise(judge, opponents=opponents, **options)


def bradley_terry(judge: Any, **options: Any) -> Tournament:
    """Return `pairwise` whose reward is the probability to beat an average answer of the group, from -1 to 1."""
    return pairwise(judge, measure="bradley_terry", **options)


def rm_gallery(judge: Any, *, use_group_reward: bool = True) -> FunctionGroupReward:
    """Return RM-Gallery's composition: 0.95 judge + 0.05 format + length + n-gram repetition."""
    function = create_rm_gallery_reward_function(use_group_reward, judge=judge)
    return FunctionGroupReward(function, max_threads=MAX_CONCURRENT)


GROUP_REWARDS: Mapping[str, Callable[..., GroupReward]] = {
    "pairwise": pairwise,
    "tournament": tournament,
    "bradley_terry": bradley_terry,
    "listwise": ListwiseReward,
    "rm_gallery": rm_gallery,
}
"""The one list of group rewards."""


def names_group(spec: object) -> TypeGuard[str | Mapping[str, Any]]:
    """Return True if settings name one of GROUP_REWARDS: `name` or `{name: {option: value}}`."""
    name = next(iter(spec)) if isinstance(spec, Mapping) and len(spec) == 1 else spec
    return isinstance(name, str) and name in GROUP_REWARDS


def group_reward_from(spec: str | Mapping[str, Any]) -> GroupReward:
    """Return the group reward that settings name; see `names_group`.

    Raises:
        ConfigError: the options are wrong.
    """
    ((name, options),) = {spec: {}}.items() if isinstance(spec, str) else spec.items()
    if not isinstance(options, Mapping):
        raise ConfigError(f"{name}: expected an object of options, got {options!r:.200}. Name them.")
    return construct(name, GROUP_REWARDS[name], options)  # type: ignore[no-any-return]
