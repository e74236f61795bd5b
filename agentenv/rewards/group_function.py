"""A function over a group's responses as a GroupReward, in the form of RM-Gallery's tutorial for verl."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from agentenv.agent import accepted
from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.rewards._arguments import whole_number
from agentenv.rewards._threads import Threads
from agentenv.rewards.invalid import INVALID_REWARD
from agentenv.rewards.types import Response, RewardResult, is_finite

_Lists = tuple[list[float | None], dict[str, list[float | None]], list[str]]


class FunctionGroupReward:
    """`compute_score(prompt, responses, extras, **kwargs) -> (scores, reward_info[, details])` as a GroupReward.

    `prompt` and `responses` are the texts (a prompt in messages stays messages), `extras` the other columns of each
    row, all of them copies; scores and the values of `reward_info` are lists of one number per response. A reference,
    where there is one, is judged as a last response with the extras of the first, and gives `win` and `win_and` by
    `comparison_score`.
    A score of -999.0, None or NaN is no reward.

    The function may be async, or plain: then up to `max_threads` calls run at a time, in threads that live on between
    batches. A group's time starts when a thread takes its call. One that takes longer is left behind in its thread,
    which holds up neither the others, as another thread takes its place, nor the end of the process.
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
        self.function, self.bounds = function, bounds
        self.kwargs = dict(kwargs or {})
        self._check_signature()
        self.meta_info: dict[str, Any] = {}
        """Further arguments, of the current step; one of the same name as in `kwargs` replaces it."""
        self._threads = Threads(whole_number("max_threads", max_threads, low=1))

    def _check_signature(self) -> None:
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

    @property
    def num_abandoned(self) -> int:
        """Calls that were given up and have not returned yet."""
        return self._threads.num_abandoned

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """One result per response, in order; components are what `reward_info` has, as it is.

        Raises:
            DataError: a column is none that can be copied.
            ContractError: what the function gave cannot be read.
            Exception: what it raised.
        """
        if not responses:
            return []
        texts = [response.text for response in responses] + ([reference] if reference else [])
        count = len(texts)  # the function may change its lists
        ask = partial(self._ask, responses, texts)
        # The group's deadline ends it: it stands still while the call waits for a thread.
        plain = not inspect.iscoroutinefunction(self.function)
        answer = await self._threads.run(ask, limit_s=inf) if plain else ask()
        if inspect.isawaitable(answer):
            answer = await answer
        scores, info, details = self._read(answer, count)
        compared = info.get("comparison_score")
        results = []
        for index in range(len(responses)):
            components = {name: values[index] for name, values in info.items()}
            if compared is not None:
                components |= against_reference(compared[index], compared[-1] if reference else None)
            results.append(_result(scores[index], components, details[index]))
        return results

    def _ask(self, responses: Sequence[Response], texts: list[str]) -> Any:
        rows = [response.metadata for response in [*responses, *responses[:1]][: len(texts)]]
        try:
            prompt, extras = copy.deepcopy(responses[0].prompt), [copy.deepcopy(dict(row)) for row in rows]
        except (TypeError, RecursionError) as error:
            raise DataError(f"row: expected values that can be copied, got {error}. Mend its columns.") from error
        given = accepted(self.function, self.kwargs | self.meta_info)
        return self.function(prompt=prompt, responses=texts, extras=extras, **given)

    def _read(self, answer: Any, count: int) -> _Lists:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        if not isinstance(answer, tuple) or len(answer) not in (2, 3):
            raise ContractError(f"{name}: expected (scores, reward_info[, details]), got {answer!r:.200}. Mend it.")
        info = answer[1] if isinstance(answer[1], Mapping) else {}
        given = answer[2] if len(answer) == 3 else None
        details = [str(detail)[:500] for detail in given] if isinstance(given, list) and len(given) == count else []
        scores = numbers_of(f"{name}: scores", answer[0], count)
        columns = {str(key): numbers_of(f"{name}: reward_info[{key!r}]", values, count) for key, values in info.items()}
        return scores, columns, details or [""] * count


def against_reference(score: float | None, reference: float | None) -> dict[str, float | None]:
    """`win` is 1.0 for a response that is better than the reference, `win_and` for one as good; None for not known."""
    if score is None or reference is None:
        return {"win": None, "win_and": None}
    return {"win": float(score > reference), "win_and": float(score >= reference)}


def numbers_of(where: str, values: Any, count: int) -> list[float | None]:
    """A function's list of numbers, or an array; None for -999.0, None and what no float32 holds.

    Raises:
        ContractError: it is no list of `count` numbers.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        raise ContractError(f"{where}: expected a list of {count} numbers, got {values!r:.200}. Mend the function.")
    return [_number(where, value) for value in values]


def _number(where: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise ContractError(f"{where}: expected numbers, got {value!r:.200}. Mend the function.")
    number = float(value)
    return number if is_finite(number) and number != INVALID_REWARD else None


def _result(score: float | None, components: Mapping[str, float | None], detail: str) -> RewardResult:
    if score is not None:
        return RewardResult(score, components=components, detail=detail)
    failed = RewardResult.failed(detail or "the function gave no score: -999, None or no finite number")
    return RewardResult(None, status=failed.status, components=components, detail=failed.detail)
