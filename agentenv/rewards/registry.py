"""Rewards by name, and rewards built of others from JSON, for command lines and configs.

    make_reward("math", wrong=-0.1)                   # one of `reward_names()`, or ROLL's name of it
    make_reward("rewards.py:helpful")                 # a function, or a class, of one's own; module:Name too
    reward_from({"sum": {"answer": {"reward": "math"}, "format": {"reward": "format", "weight": 0.05}}})
    reward_from({"route": {"math": "math", "code": {"code": {"scale": "guide"}}}, "key": "data_source"})

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError
from agentenv.rewards._functions import load_function
from agentenv.rewards.types import Reward

REWARDS = {
    "math": "agentenv.rewards.math:MathReward",
    "code": "agentenv.rewards.code:CodeReward",
    "ifeval": "agentenv.rewards.ifeval:IFEvalReward",
    "choice": "agentenv.rewards.choice:ChoiceReward",
    "general_val": "agentenv.rewards.choice:GeneralValReward",
    "crossthink_qa": "agentenv.rewards.choice:CrossThinkReward",
    "detection": "agentenv.rewards.detection:DetectionReward",
    "judge": "agentenv.rewards.judges.pointwise:JudgeReward",
    "judge_score": "agentenv.rewards.judges.pointwise:PointwiseReward",
    "rubric": "agentenv.rewards.judges.rubric:RubricReward",
    "model": "agentenv.rewards.models.reward:ModelReward",
    "format": "agentenv.rewards.format:ThinkFormatReward",
    "tool_call_format": "agentenv.rewards.format:ToolCallFormatReward",
    "length": "agentenv.rewards.length:LengthReward",
    "thought_length": "agentenv.rewards.length:ThoughtLengthReward",
    "normalised": "agentenv.rewards.models.normalise:Normalised",
    "overlong": "agentenv.rewards.length:OverlongReward",
    "repetition": "agentenv.rewards.repetition:RepetitionReward",
    "regex": "agentenv.rewards.regex:RegexReward",
    "similarity": "agentenv.rewards.similarity:SimilarityReward",
    "json_schema": "agentenv.rewards.json_schema:JsonSchemaReward",
}
"""Where each reward's class is."""
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
"""ROLL's reward workers: the name of what does their work here."""


def reward_names() -> list[str]:
    """The names that `make_reward` knows, but for ROLL's."""
    return sorted(REWARDS)


def make_reward(name: str, /, **options: Any) -> Reward:
    """A reward by its name, ROLL's name for it, `module:Name` or `FILE.py:Name`, where Name is a class or a function.

    Args:
        name: a function becomes a `FunctionReward`.
        options: arguments of the class's constructor. A `judge` may be settings for `judges.settings.judge_from`,
            as `{"base_url": "http://127.0.0.1:8000/v1", "model": "…"}`, with `cache`, a file of its replies, there.
            A `model` has `rm`, such as "hf:PATH", for its scorer, and `rm_args`; see `models.opening`.
            What is `normalised` is a `reward`, as `reward_from` takes it.

    Raises:
        ConfigError: there is none of that name, it is no reward, or the options are wrong.
    """
    if not isinstance(name, str):
        raise _unread(name)
    spec = REWARDS.get(ROLL_NAMES.get(name, name), name)
    if ":" not in spec:
        expected = f"one of {', '.join(REWARDS)}, module:Name or FILE.py:Name"
        raise ConfigError(f"reward: expected {expected}, got {name!r}.{_nearest(name, [*REWARDS, *ROLL_NAMES])}")
    found, given = _found(spec), dict(options)
    if isinstance(options.get("judge"), Mapping):
        from agentenv.rewards.judges.settings import judge_from

        options["judge"] = judge_from(options["judge"])
    if "rm" in options and "scorer" not in options:
        options["scorer"] = _scorer(options.pop("rm"), options.pop("rm_args", None) or {})
    if name == "normalised" and "reward" in options:
        options["reward"] = reward_from(options["reward"])
    if inspect.isclass(found):
        made = _made(name, found, options, shown=given)
    else:
        from agentenv.rewards.function import FunctionReward

        made = _made(name, FunctionReward, options, spec)
    if not inspect.iscoroutinefunction(getattr(made, "grade", None)) or not hasattr(made, "bounds"):
        raise ConfigError(
            f"{name}: expected a reward, with `bounds` and `async def grade(response)`, got {type(made).__name__}. "
            "Name another, or a function."
        )
    reward: Reward = made
    return reward


def reward_from(spec: str | Mapping[str, Any] | Reward) -> Reward:
    """The reward that settings describe, such as JSON has them.

    Args:
        spec: a name for `make_reward`; `{name: {option: value}}`; `{"sum": {part: {"reward": spec, "weight": 1.0,
            "required": true}}}`, where `spec` alone may stand for such a part; `{"route": {domain: spec}, "tags": {tag:
            domain}, "key": "tag"}`; or a reward, which is given back.

    Raises:
        ConfigError: it is none of these, or as `make_reward`.
    """
    if isinstance(spec, str):
        return make_reward(spec)
    if not isinstance(spec, Mapping):
        if hasattr(spec, "grade") and not isinstance(spec, type):
            return spec
        raise _unread(spec)
    if not _has_names(spec):
        raise _unread(dict(spec))
    if "sum" in spec:
        return _sum(**spec)
    if "route" in spec:
        return _route(**spec)
    if len(spec) != 1:
        raise _unread(dict(spec))
    ((name, options),) = spec.items()
    if not _has_names(options):
        raise _unread(dict(spec))
    return make_reward(name, **options)


def shared_reward(spec: str | Mapping[str, Any] | Reward) -> Reward:
    """The reward of these settings, as `reward_from`; one for all episodes of a process, where they are JSON."""
    try:
        text = json.dumps(spec)
    except (TypeError, ValueError):
        return reward_from(spec)
    return _of_json(text)


@functools.lru_cache(maxsize=64)
def _of_json(text: str) -> Reward:
    return reward_from(json.loads(text))


def _scorer(rm: Any, args: Any) -> Any:
    """The reward model that a spec names, opened with these arguments."""
    from agentenv.rewards.models.opening import open_scorer

    if not isinstance(rm, str) or not _has_names(args):
        raise ConfigError(
            f"model: expected rm, as 'hf:PATH', and rm_args, an object, got {rm!r:.200} and {args!r:.200}. Mend them."
        )
    return open_scorer(rm, **args)


def _sum(**settings: Any) -> Reward:
    from agentenv.rewards.compose import Term, WeightedSum

    parts = _parts("sum", settings.pop("sum"))
    terms = {}
    for part, given in parts.items():
        term = given if _has_names(given) and "reward" in given else {"reward": given}
        terms[part] = _made(f"sum.{part}", Term, {**term, "reward": reward_from(term["reward"])})
    return _made("sum", WeightedSum, settings, terms)  # type: ignore[no-any-return]


def _route(**settings: Any) -> Reward:
    from agentenv.rewards.routing import Router

    rewards = {domain: reward_from(spec) for domain, spec in _parts("route", settings.pop("route")).items()}
    return _made("route", Router, settings, rewards)  # type: ignore[no-any-return]


def _parts(where: str, value: Any) -> Mapping[str, Any]:
    if _has_names(value) and value:
        parts: Mapping[str, Any] = value
        return parts
    raise ConfigError(f"reward.{where}: expected an object of rewards by name, got {value!r:.200}. Name them.")


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _unread(value: object) -> ConfigError:
    return ConfigError(
        f"reward: expected a name, {{name: {{option: value}}}}, {{'sum': …}} or {{'route': …}}, got {value!r:.200}. "
        f"The names are {', '.join(REWARDS)}."
    )


def _found(spec: str) -> Any:
    """What a name means, imported.

    Raises:
        ConfigError: it cannot be.
    """
    try:
        return load_function(spec)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(
            f"reward: expected {spec!r} to import, got {type(error).__name__}: {error}. Mend it, or its name."
        ) from error


def _made(
    name: str, cls: Callable[..., Any], options: Mapping[str, Any], *args: Any, shown: Mapping[str, Any] | None = None
) -> Any:
    """A thing made with these options; errors show `shown` in their place, where they were given in another form.

    Raises:
        ConfigError: it takes others; says which. Or it could not be made with them.
    """
    given = dict(options if shown is None else shown)
    try:
        signature = inspect.signature(cls)
    except ValueError as error:
        raise ConfigError(f"{name}: expected a class of Python, got {cls!r}: {error}. Name another.") from error
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        taken = [each.name for each in list(signature.parameters.values())[len(args) :]]
        wrong = [each for each in options if each not in taken]
        meant = _nearest(wrong[0], taken) if wrong else ""
        raise ConfigError(
            f"{name}: expected options among {', '.join(taken) or 'none'}, got {given!r:.200} ({error}).{meant}"
        ) from error
    try:
        return cls(*args, **options)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}: expected it to be made with {given!r:.200}, got {type(error).__name__}: {error}. "
            "Change the options, or mend the class."
        ) from error


def _nearest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    folded = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(folded[each]) for each in close)}?" if close else " Check its name."
