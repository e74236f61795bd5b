"""Names to what is evaluated: reward models wherever they run, judges, and any reward of text.

    hf:PATH, vllm:PATH, ray:PATH, http://…, classify:http://…, FILE.py
                            a reward model, as `agentenv.rewards.models.opening` names them
    judge:MODEL@http://…    a language model that compares two answers; judge-score:… one that scores each
    reward:NAME             a reward of text, as `agentenv.rewards.registry` names them

What a spec means is imported when it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import ConfigError
from agentenv.rewards.models.opening import SCORERS, constructed, open_scorer, parsed, unknown
from agentenv.rewards.models.types import Scorer
from agentenv.rewards.tournament import Comparer
from agentenv.rewards.types import Reward

_OTHERS = ("judge", "judge-score", "reward")
_FLAGS = ("max_length", "overflow", "device", "dtype", "max_batch")
"""Arguments of scorers that have a flag of their own; others stand in --rm_args."""


@dataclass(frozen=True, slots=True)
class RMOptions:
    """How a reward model is opened; None is its own default, and what is given must be one of its arguments."""

    max_length: int | None = None
    overflow: str | None = None
    device: str | None = None
    dtype: str | None = None
    max_batch: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor, by name."""

    @property
    def given(self) -> dict[str, Any]:
        """All arguments that are not None."""
        flags = {name: getattr(self, name) for name in _FLAGS}
        return {name: value for name, value in flags.items() if value is not None} | dict(self.args)


@dataclass(frozen=True, slots=True)
class RewardModel:
    """What is evaluated: one of the three is there."""

    spec: str
    scorer: Scorer | None = None
    reward: Reward | None = None
    comparer: Comparer | None = None
    judge: Any = None
    """The client behind `reward` or `comparer`, where there is one."""

    async def close(self) -> None:
        """Free what it holds."""
        for part in (self.scorer, self.judge):
            if part is not None:
                await part.close()

    def metrics(self) -> dict[str, float]:
        """What a judge was asked and what that cost; of comparisons, how many went by the place. Else nothing."""
        figures: dict[str, float] = {} if self.judge is None else self.judge.usage.metrics()
        both = getattr(self.comparer, "order", "both") == "both"  # with one order nothing can turn round
        for name in ("num_compared", "num_flipped") if both else ("num_compared",):
            if hasattr(self.comparer, name):
                figures[f"judge/{name}"] = float(getattr(self.comparer, name))
        return figures


def named(spec: str) -> tuple[str, str]:
    """The kind that a spec is of, and what it names; nothing is opened.

    Raises:
        ConfigError: there is no such kind, or no such folder.
    """
    kind, target = parsed(spec)
    if kind not in (*SCORERS, *_OTHERS):
        raise unknown(spec, [*SCORERS, *_OTHERS])
    return kind, target


@contextmanager
def naming_flags() -> Iterator[None]:
    """What is said of a constructor's argument within it, is said of the flag for it too.

    Raises:
        ConfigError: as it was raised.
    """
    try:
        yield
    except ConfigError as error:
        found = re.match(r"(?:HF|VLLM|Ray|GetReward|VLLMHTTP|Function)Scorer\.(\w+): ", str(error))
        if found is None or found[1] in ("url", "model"):
            raise
        value = '"PATH"' if found[1] == "tokenizer" else "…"
        flag = f"--{found[1]}" if found[1] in _FLAGS else f"--rm_args '{{\"{found[1]}\": {value}}}'"
        raise ConfigError(f"{error} The flag is {flag}.") from error


def open_rm(spec: str, options: RMOptions | None = None) -> RewardModel:
    """The reward model, judge or reward that a spec names; nothing of a model is loaded yet.

    Raises:
        ConfigError: it names none, or has no such options.
        MissingDependency: what it needs is not installed.
    """
    given = (options or RMOptions()).given
    kind, target = named(spec)
    if kind == "reward":
        from agentenv.rewards.registry import make_reward

        return RewardModel(spec, reward=make_reward(target, **given))
    if kind in ("judge", "judge-score"):
        return _judge(spec, kind, target, given)
    return RewardModel(spec, scorer=open_scorer(spec, **given))


def _judge(spec: str, kind: str, target: str, given: Mapping[str, Any]) -> RewardModel:
    model, at, url = target.rpartition("@")
    if not at or not model:
        raise ConfigError(f"--rm: expected {kind}:MODEL@http://HOST/v1, got {spec!r}. Name the model and its server.")
    from agentenv.rewards.judges.pairwise import PairwiseJudge
    from agentenv.rewards.judges.pointwise import PointwiseReward
    from agentenv.rewards.judges.settings import client_options, judge_from

    of_client = {name: value for name, value in given.items() if name in client_options()}
    client = judge_from(of_client | {"base_url": url, "model": model})
    rest = {name: value for name, value in given.items() if name not in of_client}
    if kind == "judge":
        return RewardModel(spec, comparer=constructed(spec, PairwiseJudge, rest, client), judge=client)
    return RewardModel(spec, reward=constructed(spec, PointwiseReward, rest, client), judge=client)
