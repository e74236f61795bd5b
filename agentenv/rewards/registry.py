"""Rewards by name, and rewards that JSON describes, for command lines and configs.

    make_reward("math", wrong=-0.1)                   # one of `reward_names()`, or ROLL's name for it
    make_reward("rewards.py:helpful")                 # your own function or class; module:Name too
    reward_from({"sum": {"answer": {"reward": "math"}, "format": {"reward": "format", "weight": 0.05}}})
    reward_from({"route": {"math": "math", "code": {"code": {"scale": "guide"}}}, "key": "data_source"})

To add a reward: write `rules/NAME.py` with a class that has `bounds` and `async def grade`, add its line to REWARDS,
write `tests/rewards/rules/test_NAME.py`, and name it in `docs/how-to/rewards.md`. `rules/similarity.py` is a model of
one that grades an answer, and `rules/length.py` of a penalty. `by_row=True` says that it needs nothing but a row: the
environment `verify` then offers it as a domain; tests fail until one without it, or one with required options, is in
their lists. If its label is the answer, `gold` of `verify` returns it, so that `agentenv audit` knows a right one.
`check_row` is for rows that it can refuse before an answer (`rules/math/reward.py`). What a model's text could make
slow runs in a worker process: see `workers/pool.py`, and `rules/regex.py` for a model. Users need no line here: they
name `FILE.py:Name`. Nothing is imported before it is used.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import construct
from agentenv.errors import ConfigError
from agentenv.rewards.loading import load_function
from agentenv.rewards.types import Reward


class RewardEntry(NamedTuple):
    """Where the class of a reward is."""

    path: str
    """`module:Class`, below `agentenv.rewards`."""
    by_row: bool = False
    """True if the reward can be made without options and needs nothing but a row."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Options that the name has, where the class has others."""


_LOOSE = {"require_box": False, "scale": "loose"}
_GENERAL_TAGS = ("ceval", "race_high", "mmlu_pro", "commonsense_qa")
REWARDS = {
    "math": RewardEntry("rules.math.reward:MathReward", by_row=True),
    "code": RewardEntry("rules.code.reward:CodeReward", by_row=True),
    "ifeval": RewardEntry("rules.ifeval.reward:IFEvalReward", by_row=True),
    "choice": RewardEntry("rules.choice:ChoiceReward", by_row=True),
    "general_val": RewardEntry("rules.choice:ChoiceReward", by_row=True, defaults=_LOOSE | {"tags": _GENERAL_TAGS}),
    "crossthink_qa": RewardEntry(
        "rules.choice:ChoiceReward", by_row=True, defaults=_LOOSE | {"repetition_penalty": -0.5}
    ),
    "detection": RewardEntry("rules.detection.reward:DetectionReward", by_row=True),
    "format": RewardEntry("rules.format:ThinkFormatReward", by_row=True),
    "tool_call_format": RewardEntry("rules.format:ToolCallFormatReward", by_row=True),
    "length": RewardEntry("rules.length:LengthReward", by_row=True),
    "thought_length": RewardEntry("rules.length:LengthReward", by_row=True, defaults={"part": "thought"}),
    "repetition": RewardEntry("rules.repetition:RepetitionReward", by_row=True),
    "regex": RewardEntry("rules.regex:RegexReward", by_row=True),
    "similarity": RewardEntry("rules.similarity:SimilarityReward", by_row=True),
    "json_schema": RewardEntry("rules.json_schema:JsonSchemaReward", by_row=True),
    "overlong": RewardEntry("rules.length:OverlongReward"),
    "judge": RewardEntry("judges.pointwise:JudgeReward"),
    "judge_score": RewardEntry("judges.pointwise:PointwiseReward"),
    "rubric": RewardEntry("judges.pointwise:RubricReward"),
    "model": RewardEntry("models.reward:ModelReward"),
    "normalized": RewardEntry("models.reward:Normalized"),
}
"""The one list of rewards."""
ROLL_NAMES = {
    "MathRuleRewardWorker": "math",
    "CodeSandboxRewardWorker": "code",
    "LLMJudgeRewardWorker": "judge",
    "GeneralValRuleRewardWorker": "general_val",
    "CrossThinkQARuleRewardWorker": "crossthink_qa",
    "MultipleChoiceBoxedRuleRewardWorker": "choice",
    "GeneralRuleRewardWorker": "ifeval",
    "DetectionRewardWorker": "detection",
}
"""ROLL's reward workers, and the names of the rewards that do their work here."""


def reward_names() -> list[str]:
    """Return the names that `make_reward` knows, except ROLL's."""
    return sorted(REWARDS)


def make_reward(name: str, /, **options: Any) -> Reward:
    """Return a reward by its name, ROLL's name for it, `module:Name` or `FILE.py:Name` of a class or a function.

    Args:
        name: a function becomes a `FunctionReward`.
        options: arguments of the class's constructor. Constructors accept settings from JSON: `judge` may be an object
            for `judges.asking.judge_from`, `rm` a string such as "hf:PATH" (see `models.factory`), and `reward` of
            `normalized` whatever `reward_from` accepts.

    Raises:
        ConfigError: the name is unknown, it is not a reward, or the options are wrong.
    """
    if not isinstance(name, str):
        raise _bad_spec(name)
    entry = REWARDS.get(ROLL_NAMES.get(name, name))
    path = name if entry is None else f"agentenv.rewards.{entry.path}"
    if ":" not in path:
        advice = did_you_mean(name, [*REWARDS, *ROLL_NAMES], "Check its name.")
        expected = f"one of {', '.join(REWARDS)}, module:Name or FILE.py:Name"
        raise ConfigError(f"reward: expected {expected}, got {name!r}.{advice}")
    target = load_function(path)
    if inspect.isclass(target):
        reward = construct(name, target, {**(entry.defaults if entry else {}), **options})
    else:
        from agentenv.rewards.function import FunctionReward

        reward = construct(name, FunctionReward, options, path)
    if not inspect.iscoroutinefunction(getattr(reward, "grade", None)) or not hasattr(reward, "bounds"):
        raise ConfigError(
            f"{name}: expected a reward, with `bounds` and `async def grade(response)`, got {type(reward).__name__}. "
            "Name another, or a function."
        )
    return reward  # type: ignore[no-any-return]


def reward_from(spec: str | Mapping[str, Any] | Reward) -> Reward:
    """Return the reward that settings describe, as JSON has them.

    Args:
        spec: a name for `make_reward`; `{name: {option: value}}`; `{"sum": {part: {"reward": spec, "weight": 1.0,
            "required": true}}}`, where `spec` alone may stand for such a part; `{"route": {domain: spec}, "tags": {tag:
            domain}, "key": "tag"}`; or a reward, which is returned.

    Raises:
        ConfigError: the settings have another form, or see `make_reward`.
    """
    if isinstance(spec, str):
        return make_reward(spec)
    if not isinstance(spec, Mapping):
        if hasattr(spec, "grade") and not isinstance(spec, type):
            return spec
        raise _bad_spec(spec)
    if not _has_names(spec):
        raise _bad_spec(dict(spec))
    settings = dict(spec)
    if "sum" in spec:
        from agentenv.rewards.weighted_sum import Term, WeightedSum

        terms = {}
        for part, given in _parts("sum", settings.pop("sum")).items():
            term = given if _has_names(given) and "reward" in given else {"reward": given}
            terms[part] = construct(f"sum.{part}", Term, {**term, "reward": reward_from(term["reward"])})
        return construct("sum", WeightedSum, settings, terms)  # type: ignore[no-any-return]
    if "route" in spec:
        from agentenv.rewards.routing import Router

        rewards = {domain: reward_from(part) for domain, part in _parts("route", settings.pop("route")).items()}
        return construct("route", Router, settings, rewards)  # type: ignore[no-any-return]
    if len(spec) != 1:
        raise _bad_spec(dict(spec))
    ((name, options),) = spec.items()
    if not _has_names(options):
        raise _bad_spec(dict(spec))
    return make_reward(name, **options)


def shared_reward(spec: str | Mapping[str, Any] | Reward) -> Reward:
    """Return the reward of these settings, see `reward_from`; JSON settings share one per process."""
    try:
        text = json.dumps(spec)
    except (TypeError, ValueError):
        return reward_from(spec)
    return _from_json(text)


@functools.lru_cache(maxsize=64)
def _from_json(text: str) -> Reward:
    return reward_from(json.loads(text))


def _parts(where: str, value: Any) -> Mapping[str, Any]:
    if _has_names(value) and value:
        parts: Mapping[str, Any] = value
        return parts
    raise ConfigError(f"reward.{where}: expected an object of rewards by name, got {value!r:.200}. Name them.")


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _bad_spec(value: object) -> ConfigError:
    return ConfigError(
        f"reward: expected a name, {{name: {{option: value}}}}, {{'sum': …}} or {{'route': …}}, got {value!r:.200}. "
        f"The names are {', '.join(REWARDS)}."
    )
