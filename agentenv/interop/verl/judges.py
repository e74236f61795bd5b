"""From verl's settings to a reward: our rewards, verl's functions, RM-Gallery's functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentenv.core.arguments import is_finite
from agentenv.errors import ConfigError, ContractError
from agentenv.rewards.grading import DEADLINE_S, MAX_CONCURRENT
from agentenv.rewards.groups.function import FunctionGroupReward
from agentenv.rewards.groups.registry import group_reward_from, names_group
from agentenv.rewards.loading import failure_of, load_function
from agentenv.rewards.registry import reward_from
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult
from agentenv.rewards.workers.threads import Threads

MAX_GROUPS = 8
"""Default number of groups that a function judges concurrently."""


def judge_of(
    judge: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit_s: float = DEADLINE_S,
    max_threads: int = MAX_GROUPS,
) -> Reward | GroupReward:
    """Return the reward that judges one response, or all responses to a prompt.

    Args:
        judge: settings for `reward_from` or `group_reward_from`; a reward or a group reward; a function `(data_source,
            solution_str, ground_truth, extra_info)` like verl's; a function `(prompt, responses, extras)` like
            RM-Gallery's; or FILE.py:name or module:name of any of these.
        kwargs: more arguments for a function of RM-Gallery's kind.
        limit_s: longest time for a call of a function of verl's kind.
        max_threads: maximum number of concurrent calls of a function of RM-Gallery's kind that is not async.

    Raises:
        ConfigError: `judge` has another type.
    """
    if names_group(judge):
        return group_reward_from(judge)
    is_path = isinstance(judge, str) and ":" in judge
    candidate: Any = load_function(judge) if is_path else judge
    if inspect.isclass(candidate) and hasattr(candidate, "grade_group"):
        try:
            inspect.signature(candidate).bind()
        except TypeError as error:
            raise ConfigError(
                f"reward: expected a class that needs no arguments, got {candidate!r} ({error}). Give them defaults."
            ) from error
        candidate = candidate()
    if isinstance(candidate, str | Mapping) or inspect.isclass(candidate):
        return reward_from(judge)
    if hasattr(candidate, "grade_group") or hasattr(candidate, "grade"):
        return candidate  # type: ignore[no-any-return]
    if not callable(candidate):
        raise ConfigError(f"reward: expected a reward or a function, got {judge!r:.200}.")
    if takes(candidate, "solution_str"):
        return ScoreFunction(candidate, limit_s=limit_s)
    if is_path and not takes(candidate, "responses"):
        return reward_from(judge)
    return FunctionGroupReward(candidate, kwargs=kwargs, max_threads=max_threads)


def response_of(
    row: Mapping[str, Any], text: str, prompt: str, judge: object, *, think_opened: bool | None = None
) -> Response:
    """Return a row's response to grade. RM-Gallery's functions get the decoded prompt, and only `extra_info` as extras.

    If the prompt opened a thought (`think_opened`; None: if the prompt ends with `<think>`), the text starts with that
    tag. Functions of verl's kind get the text as verl passes it.
    """
    if think_opened is False and (mark := with_opened_thought("", prompt)):
        prompt = prompt.rstrip().removesuffix(mark)  # as rewards look at it themselves
    elif not isinstance(getattr(judge, "reward", judge), ScoreFunction):
        text = with_opened_thought(text, "<think>" if think_opened else prompt)
    if think_opened is False:
        prompt = prompt.rstrip().removesuffix("<think>")
    extra_info, label = mapping(row.get("extra_info")), mapping(row.get("reward_model")).get("ground_truth")
    if isinstance(judge, FunctionGroupReward):
        return Response(text, label, prompt, extra_info)
    return Response(text, label, row.get("raw_prompt") or prompt, {**extra_info, **row})


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


@dataclass(eq=False)
class ScoreFunction:
    """A `compute_score` of verl's signature as a reward: a number, or a mapping with `score` and other numbers.

    A function that is not async runs in one of MAX_CONCURRENT threads. A thread cannot be killed: a call that takes
    longer than `limit_s` is abandoned, and a new thread replaces its thread.
    """

    bounds = (-math.inf, math.inf)

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further ones of each call."""
    limit_s: float = DEADLINE_S
    _threads: Threads = field(default_factory=partial(Threads, MAX_CONCURRENT), init=False)

    async def grade(self, response: Response) -> RewardResult:
        """Return the function's grade.

        Raises:
            ContractError: the function raised, or its answer is neither a number nor such a mapping.
            InfraError: the call took longer than `limit_s`.
        """
        arguments: dict[str, Any] = {
            "data_source": response.metadata.get("data_source"),
            "solution_str": response.text,
            "ground_truth": response.label,
            "extra_info": dict(response.metadata.get("extra_info") or {}),
            **self.arguments,
        }
        try:
            work = partial(self.function, **arguments)
            return _result(await self._threads.call(_innermost(self.function), work, limit_s=self.limit_s))
        except Exception as error:
            raise failure_of(error, "compute_score") from error


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Return True if a function has a parameter of that name, looking behind the partials that verl wraps around it."""
    try:
        return parameter in inspect.signature(_innermost(function)).parameters
    except (TypeError, ValueError):  # some builtins have none
        return False


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):  # verl: partial(_call_with_kwargs, function, reward_kwargs)
        function = next((each for each in function.args if callable(each)), function.func)
    return function


def _result(value: object) -> RewardResult:
    parts = dict(value) if isinstance(value, Mapping) else {"score": value}
    score, acc = (_number(parts.pop(name, None)) for name in ("score", "acc"))
    if score is None:
        raise ContractError(
            f"compute_score: expected a number, or a mapping with one under 'score', got {value!r:.200}."
        )
    components = {str(name): number for name, part in parts.items() if (number := _number(part)) is not None}
    return RewardResult(score, acc if acc is not None and 0 <= acc <= 1 else None, components=components)


def _number(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") else value
    return float(value) if is_finite(value) else None
