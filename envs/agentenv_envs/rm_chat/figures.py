"""The log values of a turn, under names that are the same for every reward."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.rewards.grading import RM_RETRIED
from agentenv.rewards.types import RewardResult

PREFIX = "rm/"


def lengths(answer: str) -> dict[str, float]:
    """Return the answer's length, because rewards are biased towards long ones, and a flag for an empty answer."""
    return {
        f"{PREFIX}length_chars": float(len(answer)),
        f"{PREFIX}length_words": float(len(answer.split())),
        f"{PREFIX}no_answer": float(not answer),
    }


def of_grade(result: RewardResult, spent: Mapping[str, float]) -> dict[str, float | str]:
    """Return a grade's components, its cost, and its reward and status.

    `rm/value` is the reward model's raw number if there is exactly one in the reward; `rm/truncated` and `rm/clipped`
    are 1.0 if any was truncated or clipped. They and `rm/num_retried` exist if there is a reward model;
    `judge/requests`, `judge/retries`, `judge/cost` and others exist if a judge was asked.
    """
    known = {name: float(value) for name, value in result.components.items() if value is not None}
    values = _named(known, "value")
    facts = {
        "reward": float(result.reward or 0.0),
        **{name: max(flags) for name in ("truncated", "clipped") if (flags := _named(known, name))},
        **({"value": values[0]} if len(values) == 1 else {}),
    }
    texts = {"status": result.status.value, **({"detail": result.detail} if result.detail else {})}
    found: dict[str, float | str] = {**known, **facts, **texts}
    retried = {RM_RETRIED: 0.0} if "truncated" in facts else {}
    return {**retried, **spent, **{f"{PREFIX}{name}": fact for name, fact in found.items()}}


def of_user(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the cost of playing the user: `user/requests`, `user/cost` and others; nothing for a script."""
    return {f"user/{name.rpartition('/')[2]}": count for name, count in spent.items()}


def _named(components: dict[str, float], name: str) -> list[float]:
    """Return the components of that name, of the reward itself or of a term."""
    return [value for key, value in components.items() if key.rpartition("/")[2] == name]
