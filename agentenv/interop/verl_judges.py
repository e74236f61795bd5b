"""What judges in verl, as its settings or its caller name it: rewards, verl's functions, RM-Gallery's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentenv.errors import ConfigError, ContractError
from agentenv.rewards._functions import load_function
from agentenv.rewards._threads import Threads
from agentenv.rewards.grading import DEADLINE_S, MAX_CONCURRENT
from agentenv.rewards.group_function import FunctionGroupReward
from agentenv.rewards.registry import reward_from
from agentenv.rewards.text import with_opened_thought
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult, is_finite

MAX_GROUPS = 8
"""Groups that a function judges at a time, unless said otherwise."""


def judge_of(
    judge: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit_s: float = DEADLINE_S,
    max_threads: int = MAX_GROUPS,
) -> Reward | GroupReward:
    """What judges one response, or all responses to a prompt.

    Args:
        judge: settings for `reward_from`; a reward, or a group's; a function `(data_source, solution_str, ground_truth,
            extra_info)` as verl has them; a function `(prompt, responses, extras)` as RM-Gallery's tutorial has them;
            or FILE.py:name or module:name of any of these.
        kwargs: more arguments for a function of RM-Gallery's kind.
        limit_s: longest that a function of verl's kind may take.
        max_threads: most calls of one of RM-Gallery's kind at a time, where it is not async.

    Raises:
        ConfigError: it is none of these.
    """
    named = isinstance(judge, str) and ":" in judge
    found: Any = load_function(judge) if named else judge
    if inspect.isclass(found) and hasattr(found, "grade_group"):
        found = _made(found)
    if isinstance(found, str | Mapping) or inspect.isclass(found):
        return reward_from(judge)
    if hasattr(found, "grade_group") or hasattr(found, "grade"):
        return found  # type: ignore[no-any-return]
    if not callable(found):
        raise ConfigError(f"reward: expected a reward or a function, got {judge!r:.200}. Pass one.")
    if takes(found, "solution_str"):
        return ScoreFunction(found, limit_s=limit_s)
    if named and not takes(found, "responses"):
        return reward_from(judge)
    return FunctionGroupReward(found, kwargs=kwargs, max_threads=max_threads)


def _made(cls: Callable[..., Any]) -> Any:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"reward: expected a class that needs no arguments, got {cls!r} ({error}). Give them defaults."
        ) from error
    return cls()


def response_of(
    row: Mapping[str, Any], text: str, prompt: str, judge: object, *, think_opened: bool | None = None
) -> Response:
    """The sample of a row: RM-Gallery's functions get the decoded prompt, and as extras `extra_info` alone.

    A thought that the prompt began (`think_opened`; None: if it ends with `<think>`) begins in the text; functions of
    verl's kind get that as verl has it.
    """
    if not isinstance(getattr(judge, "reward", judge), ScoreFunction) and think_opened is not False:
        text = with_opened_thought(text, "<think>" if think_opened else prompt)
    extra_info, label = mapping(row.get("extra_info")), mapping(row.get("reward_model")).get("ground_truth")
    if isinstance(judge, FunctionGroupReward):
        return Response(text, label, prompt, extra_info)
    return Response(text, label, row.get("raw_prompt") or prompt, {**extra_info, **row})


def mapping(value: Any) -> Mapping[str, Any]:
    """The value, or nothing where it is no mapping."""
    return value if isinstance(value, Mapping) else {}


class ScoreFunction:
    """A `compute_score` of verl's signature as a reward: a number, or a mapping with `score` and other numbers.

    A function that is not async runs in one of MAX_CONCURRENT threads, so that it blocks nobody; it cannot be killed
    there: a call that takes longer than `limit_s` is left behind, and another thread takes the place of its own.
    """

    bounds = (-math.inf, math.inf)

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        limit_s: float = DEADLINE_S,
    ) -> None:
        self._function, self._arguments = function, dict(arguments or {})
        self.limit_s, self._threads = limit_s, Threads(MAX_CONCURRENT)

    async def grade(self, response: Response) -> RewardResult:
        """What the function says.

        Raises:
            ContractError: it says something else than a number or such a mapping.
            InfraError: it took longer than it may.
        """
        given: dict[str, Any] = {
            "data_source": response.metadata.get("data_source"),
            "solution_str": response.text,
            "ground_truth": response.label,
            "extra_info": dict(response.metadata.get("extra_info") or {}),
            **self._arguments,
        }
        if inspect.iscoroutinefunction(_innermost(self._function)):
            return _result(await self._function(**given))
        answer = await self._threads.run(partial(self._function, **given), limit_s=self.limit_s)
        return _result(await answer if inspect.isawaitable(answer) else answer)


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a function has a parameter of that name: what verl wraps one in hides its signature."""
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
            f"compute_score: expected a number, or a mapping with one under 'score', got {value!r:.200}. Mend it."
        )
    components = {str(name): number for name, part in parts.items() if (number := _number(part)) is not None}
    return RewardResult(score, acc if acc is not None and 0 <= acc <= 1 else None, components=components)


def _number(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") else value
    return float(value) if is_finite(value) else None
