"""Names to what is evaluated: reward models wherever they run, judges, and any reward of text.

    hf:PATH (or PATH)       a sequence classifier of transformers, in this process
    vllm:PATH               the same in vLLM, in this process; ray:PATH in Ray actors
    http://…/get_reward     OpenRLHF's reward server; FILE.py or FILE.py:name its reward function
    classify:http://…       vLLM's server
    judge:MODEL@http://…    a language model that compares two answers; judge-score:… one that scores each
    reward:NAME             a reward of text, as `agentenv.rewards.registry` names them

What a spec means is imported when it is opened.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import ConfigError, MissingDependency
from agentenv.loading import nearest, resolve_model
from agentenv.rewards.models.types import Scorer
from agentenv.rewards.tournament import Comparer
from agentenv.rewards.types import Reward

SCORERS: Mapping[str, str] = {
    "hf": "agentenv.rewards.models.hf:HFScorer",
    "vllm": "agentenv.rewards.models.vllm_local:VLLMScorer",
    "classify": "agentenv.rewards.models.vllm_http:VLLMHTTPScorer",
    "get_reward": "agentenv.rewards.models.get_reward:GetRewardScorer",
    "function": "agentenv.rewards.models.function:FunctionScorer",
    "ray": "agentenv.rewards.models.ray_replicas:RayScorer",
}
"""Where each scorer's class is; its constructor takes what stands behind the colon first."""
_OTHERS = ("judge", "judge-score", "reward")


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
        named = {name: getattr(self, name) for name in ("max_length", "overflow", "device", "dtype", "max_batch")}
        return {name: value for name, value in named.items() if value is not None} | dict(self.args)


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
        for name in ("num_compared", "num_flipped"):
            if hasattr(self.comparer, name):
                figures[f"judge/{name}"] = float(getattr(self.comparer, name))
        return figures


def open_rm(spec: str, options: RMOptions | None = None) -> RewardModel:
    """The reward model, judge or reward that a spec names; nothing of a model is loaded yet.

    Raises:
        ConfigError: it names none, or has no such options.
        MissingDependency: what it needs is not installed.
    """
    given = (options or RMOptions()).given
    kind, target = _parsed(spec)
    if kind == "reward":
        from agentenv.rewards.registry import make_reward

        return RewardModel(spec, reward=make_reward(target, **given))
    if kind in ("judge", "judge-score"):
        return _judge(spec, kind, target, given)
    return RewardModel(spec, scorer=_constructed(spec, _class(spec, SCORERS[kind]), given, target))


def _parsed(spec: str) -> tuple[str, str]:
    """The kind of a spec and what it names."""
    kind, colon, target = spec.partition(":")
    if kind in ("http", "https"):
        return "get_reward", spec
    if kind.endswith(".py"):
        return "function", spec
    if not colon:
        kind, target = "hf", spec
    if kind not in {*SCORERS, *_OTHERS} or not target:
        known = ", ".join(f"{name}:…" for name in (*SCORERS, *_OTHERS))
        raise ConfigError(
            f"--rm: expected a model's folder or name, http://…, FILE.py or one of {known}, got {spec!r}."
            f"{nearest(kind, [*SCORERS, *_OTHERS])} See agentenv/rm/specs.py."
        )
    return kind, resolve_model(target) if kind in ("hf", "vllm", "ray") else target


def _class(spec: str, place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingDependency(
            f"--rm: expected what {spec!r} needs to be installed, got {error}. Install it."
        ) from error
    return found


def _judge(spec: str, kind: str, target: str, given: Mapping[str, Any]) -> RewardModel:
    model, at, url = target.rpartition("@")
    if not at or not model:
        raise ConfigError(f"--rm: expected {kind}:MODEL@http://HOST/v1, got {spec!r}. Name the model and its server.")
    from agentenv.rewards.judges.openai import OpenAIJudge
    from agentenv.rewards.judges.pairwise import DebiasedPairwise
    from agentenv.rewards.judges.pointwise import PointwiseReward

    of_client = inspect.signature(OpenAIJudge).parameters
    client = _constructed(spec, OpenAIJudge, {k: v for k, v in given.items() if k in of_client}, url, model)
    rest = {key: value for key, value in given.items() if key not in of_client}
    if kind == "judge":
        return RewardModel(spec, comparer=_constructed(spec, DebiasedPairwise, rest, client), judge=client)
    return RewardModel(spec, reward=_constructed(spec, PointwiseReward, rest, client), judge=client)


def _constructed(spec: str, cls: Callable[..., Any], given: Mapping[str, Any], *args: Any) -> Any:
    """An object of the class.

    Raises:
        ConfigError: it takes other arguments; says which.
    """
    taken = list(inspect.signature(cls).parameters.values())[len(args) :]
    names = [parameter.name for parameter in taken]
    unknown = [name for name in given if name not in names]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        raise ConfigError(
            f"--rm {spec}: expected options among {', '.join(names)}, got {unknown[0]!r}."
            f"{nearest(unknown[0], names)} Leave it out."
        )
    return cls(*args, **given)
