"""A function over a group's responses as a GroupReward, in the form of RM-Gallery's tutorial for verl."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from agentenv._util.calls import accepted_arguments
from agentenv.core.arguments import is_finite, whole_number
from agentenv.errors import ConfigError, ContractError
from agentenv.rewards.groups.statistics import INVALID_REWARD
from agentenv.rewards.loading import copied
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.threads import Threads


class FunctionGroupReward:
    """`compute_score(prompt, responses, extras, **kwargs) -> (scores, reward_info[, details])` as a GroupReward.

    `prompt` and `responses` are the texts (a prompt in messages stays messages), `extras` the other columns of each
    row, all of them copies; scores and the values of `reward_info` are lists of one number per response. A reference,
    if there is one, is graded as a last response with the extras of the first, and `comparison_score` then yields `win`
    and `win_and`. A score of -999.0, None or NaN means that the reward is missing.

    The function may be async, or plain: then up to `max_threads` calls run concurrently, in threads that persist
    between batches. A group's time limit starts when a thread takes its call. A call that takes longer is abandoned:
    another thread takes its place, and neither the others nor the end of the process wait for it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kwargs: Mapping[str, Any] | None = None,
        bounds: tuple[float, float] = (-inf, inf),
        max_threads: int = 8,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"function: expected a function, got {function!r}. Pass compute_score itself.")
        self.function = function
        self.bounds = bounds
        self.kwargs = dict(kwargs or {})
        fixed = dict.fromkeys(("prompt", "responses", "extras"))
        try:
            inspect.signature(self.function).bind_partial(**fixed)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"function: expected def compute_score(prompt, responses, extras, …), got {self.function!r:.200} "
                f"({error}). Name its parameters so."
            ) from error
        if taken := fixed.keys() & self.kwargs.keys():
            raise ConfigError(f"kwargs: expected none of {', '.join(fixed)}, got {sorted(taken)}. Leave them out.")
        self.meta_info: dict[str, Any] = {}
        """Further arguments, of the current step; they override `kwargs`."""
        self._threads = Threads(whole_number("max_threads", max_threads, low=1))

    @property
    def num_abandoned(self) -> int:
        """Abandoned calls that have not returned yet."""
        return self._threads.num_abandoned

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """Return one result per response, in order; components are the values of `reward_info`.

        Raises:
            DataError: a column cannot be copied.
            ContractError: the function's answer has another form.
            Exception: what the function raised.
        """
        if not responses:
            return []
        texts = [response.text for response in responses] + ([reference] if reference else [])
        count = len(texts)  # the function may change its lists

        def ask() -> Any:
            rows = [response.metadata for response in [*responses, *responses[:1]][:count]]
            prompt, extras = copied(responses[0].prompt), [copied(dict(row)) for row in rows]
            kwargs = accepted_arguments(self.function, self.kwargs | self.meta_info)
            return self.function(prompt=prompt, responses=texts, extras=extras, **kwargs)

        # The group's deadline ends it; that pauses while the call waits for a thread.
        answer = await self._threads.call(self.function, ask, limit_s=inf)
        where = getattr(self.function, "__qualname__", type(self.function).__name__)
        if not isinstance(answer, tuple) or len(answer) not in (2, 3):
            raise ContractError(f"{where}: expected (scores, reward_info[, details]), got {answer!r:.200}.")
        info = answer[1] if isinstance(answer[1], Mapping) else {}
        notes = answer[2] if len(answer) == 3 else None
        details = [str(text)[:500] for text in notes] if isinstance(notes, list) and len(notes) == count else []
        scores = numbers_of(f"{where}: scores", answer[0], count)
        columns = {
            str(key): numbers_of(f"{where}: reward_info[{key!r}]", values, count) for key, values in info.items()
        }
        compared = columns.get("comparison_score")
        results = []
        for index, score in enumerate(scores[: len(responses)]):
            components = {name: values[index] for name, values in columns.items()}
            if compared is not None:
                components |= against_reference(compared[index], compared[-1] if reference else None)
            detail = details[index] if details else ""
            if score is None:
                detail = detail or "the function gave no score: -999, None or not a finite number"
            status = Status.OK if score is not None else Status.INFRA
            results.append(RewardResult(score, status=status, components=components, detail=detail))
        return results


def against_reference(score: float | None, reference: float | None) -> dict[str, float | None]:
    """Return `win`, 1.0 if a response is better than the reference, and `win_and`, also if as good; None if unknown."""
    if score is None or reference is None:
        return {"win": None, "win_and": None}
    return {"win": float(score > reference), "win_and": float(score >= reference)}


def numbers_of(where: str, values: Any, count: int) -> list[float | None]:
    """Return a function's list, or array, of numbers; None for -999.0, None and numbers that float32 cannot hold.

    Raises:
        ContractError: it is not a list of `count` numbers.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        raise ContractError(f"{where}: expected a list of {count} numbers, got {values!r:.200}. Fix the function.")
    numbers: list[float | None] = []
    for value in values:
        if value is not None and (isinstance(value, str) or not hasattr(value, "__float__")):
            raise ContractError(f"{where}: expected numbers, got {value!r:.200}. Fix the function.")
        number = INVALID_REWARD if value is None else float(value)
        numbers.append(number if is_finite(number) and number != INVALID_REWARD else None)
    return numbers
