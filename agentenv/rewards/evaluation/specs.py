"""Specs of what is evaluated: reward models wherever they run, judges, and any reward of text.

    hf:PATH, ray:PATH, http://…, classify:http://…, FILE.py
                            a reward model; see `agentenv.rewards.models.factory`
    judge:MODEL@http://…    a language model that compares two answers; judge-score:… scores each answer
    reward:NAME             a reward of text; see `agentenv.rewards.registry`

Opening a spec imports what it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentenv.errors import ConfigError
from agentenv.rewards.groups.tournament import Comparer
from agentenv.rewards.loading import construct
from agentenv.rewards.models.factory import SCORERS, open_scorer, parsed, unknown
from agentenv.rewards.models.types import RewardScorer
from agentenv.rewards.types import Reward

_OTHERS = ("judge", "judge-score", "reward")
_FLAGS = ("max_length", "overflow", "device", "dtype", "max_batch")
"""Arguments of scorers with their own flag; others go into --rm_args."""


@dataclass(frozen=True, slots=True)
class RewardModel:
    """The object to evaluate: a scorer, a reward or a comparer."""

    spec: str
    scorer: RewardScorer | None = None
    reward: Reward | None = None
    comparer: Comparer | None = None
    judge: Any = None
    """The client behind `reward` or `comparer`, if any."""

    async def close(self) -> None:
        """Close the model and the client."""
        for part in (self.scorer, self.judge):
            if part is not None:
                await part.close()

    def metrics(self) -> dict[str, float]:
        """Return a judge's usage, and the number of comparisons decided by position; {} for other models."""
        figures: dict[str, float] = {} if self.judge is None else self.judge.usage.metrics()
        both = getattr(self.comparer, "order", "both") == "both"  # a single order cannot flip a verdict
        for name in ("num_compared", "num_flipped") if both else ("num_compared",):
            if hasattr(self.comparer, name):
                figures[f"judge/{name}"] = float(getattr(self.comparer, name))
        return figures


def parse_rm_spec(spec: str) -> tuple[str, str]:
    """Return a spec's kind and target; nothing is opened.

    Raises:
        ConfigError: the kind is unknown, or the folder is missing.
    """
    kind, target = parsed(spec)
    if kind not in (*SCORERS, *_OTHERS):
        raise unknown(spec, [*SCORERS, *_OTHERS])
    return kind, target


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """Add the name of the flag to errors about a constructor's argument.

    Raises:
        ConfigError: the error with the flag.
    """
    try:
        yield
    except ConfigError as error:
        match = re.match(r"(?:HF|Ray|GetReward|VLLMHTTP|Function)Scorer\.(\w+): ", str(error))
        if match is None or match[1] in ("url", "model"):
            raise
        value = '"PATH"' if match[1] == "tokenizer" else "…"
        flag = f"--{match[1]}" if match[1] in _FLAGS else f"--rm_args '{{\"{match[1]}\": {value}}}'"
        raise ConfigError(f"{error} The flag is {flag}.") from error


def open_rm(spec: str, /, **options: Any) -> RewardModel:
    """Return the reward model, judge or reward of a spec; a model is loaded later.

    Args:
        spec: see the module.
        options: arguments of its constructor.

    Raises:
        ConfigError: the spec or an option is unknown.
        MissingDependency: a package that it needs is not installed.
    """
    kind, target = parse_rm_spec(spec)
    if kind == "reward":
        from agentenv.rewards.registry import make_reward

        return RewardModel(spec, reward=make_reward(target, **options))
    if kind in ("judge", "judge-score"):
        model, at, url = target.rpartition("@")
        if not at or not model:
            raise ConfigError(
                f"--rm: expected {kind}:MODEL@http://HOST/v1, got {spec!r}. Pass the model and its server."
            )
        from agentenv.rewards.judges.comparisons import PairwiseJudge
        from agentenv.rewards.judges.pointwise import PointwiseReward
        from agentenv.rewards.judges.settings import client_options, judge_from

        of_client = {name: value for name, value in options.items() if name in client_options()}
        client = judge_from(of_client | {"base_url": url, "model": model})
        rest = {name: value for name, value in options.items() if name not in of_client}
        if kind == "judge":
            return RewardModel(spec, comparer=construct(f"rm {spec}", PairwiseJudge, rest, client), judge=client)
        return RewardModel(spec, reward=construct(f"rm {spec}", PointwiseReward, rest, client), judge=client)
    return RewardModel(spec, scorer=open_scorer(spec, **options))
