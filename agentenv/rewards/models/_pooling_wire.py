"""Requests and answers of vLLM's `/classify` and `/pooling`. Source: vLLM 0.32, entrypoints/pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.models._http import Failure
from agentenv.rewards.types import is_finite

_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Query:
    """One conversation, as a server is asked about it."""

    given: list[int] | str | list[dict[str, Any]]
    """Its ids, its text, or messages."""
    num_tokens: int | None = None
    """None where only the server knows."""
    truncated: bool = False
    most: int | None = None
    """Most tokens that it may have; None where that is seen to already."""
    switch: str = ""
    """What turns the activation off; empty is whatever does."""
    active: bool = False
    """Whether the activation is asked for."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of its model."""

    model: str
    max_length: int | None


@dataclass(frozen=True, slots=True)
class Answered:
    """What a server says of one conversation."""

    values: tuple[float, ...]
    """One per label; at least one."""
    num_tokens: int | None
    switch: str
    """What was to turn the activation off."""

    @property
    def may_be_activated(self) -> bool:
        """Whether they look like what a sigmoid or softmax gives."""
        return all(0.0 <= value <= 1.0 for value in self.values)

    def value(self, label: int | None, where: str) -> float:
        """That of one label.

        Raises:
            ConfigError: there are several, and none or an unknown one is asked for.
        """
        if label is None and len(self.values) == 1:
            return self.values[0]
        if label is None or label >= len(self.values):
            raise ConfigError(
                f"{where}: expected label, the index of one of the model's {len(self.values)} numbers, got {label!r}. "
                "Name the one that is the score."
            )
        return self.values[label]


def request_of(queries: Sequence[Query], switch: str, endpoint: str) -> dict[str, Any]:
    """A request's body about queries of ids or texts, or about one of messages; the model aside.

    No special token is added: ids and rendered text have theirs, and the defaults would put a second BOS before text.
    """
    body: dict[str, Any] = {switch: queries[0].active, "add_special_tokens": False}
    if endpoint == "pooling":
        body |= {"task": "classify", "encoding_format": "float"}
    given = [query.given for query in queries]
    if isinstance(given[0], list) and isinstance(given[0][0], dict):
        return body | {"messages": given[0], "add_generation_prompt": False}
    return body | {"input": given}


def answers_of(
    answer: Any, queries: Sequence[Query], switch: str, where: str
) -> Sequence[Answered | Failure] | Failure:
    """What an answer says of each query, or one failure where it cannot be read."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return _failure(f"{where}: expected an object with a list 'data', got {_shown(answer)}.")
    by_index = {row.get("index", place): row for place, row in enumerate(rows) if _is_count(row.get("index", place))}
    if len(rows) != len(queries) or sorted(by_index) != list(range(len(queries))):
        return _failure(f"{where}: expected {len(queries)} results, got {len(rows)}: {_shown(rows)}.")
    usage = answer.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    total = counted if _is_count(counted) and counted else None
    known = [query.num_tokens for query in queries]
    if total is not None and None not in known and total != sum(count or 0 for count in known):
        error = ConfigError(
            f"{where}: expected a score of the {known} tokens that were sent, got one of {total}: the server adds or "
            "drops some. Look at its settings."
        )
        return Failure(error)
    num_tokens = total if len(queries) == 1 else None
    return [_answered(by_index[place], num_tokens, switch, where) for place in range(len(queries))]


def served_of(answer: Any, model: str | None, max_length: int | None, where: str) -> Served | Failure:
    """The model of that name, or the only one, of what `/v1/models` answers."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    found = {str(row.get("id")): row for row in rows if isinstance(row.get("id"), str)}
    if not found:
        return _failure(f"{where}/v1/models: expected the served models, got {_shown(answer)}.")
    same = len({str(row.get("root", name)) for name, row in found.items()}) == 1  # one model of several names
    name = next(iter(found)) if model is None and same else model
    if name not in found:
        wanted = "one model" if model is None else repr(model)
        return Failure(
            ConfigError(f"{where}: expected {wanted} to be served, got {list(found)}. Name the reward model.")
        )
    most = found[name].get("max_model_len")
    most = most if _is_count(most) and most else None
    if most is not None and max_length is not None and max_length > most:
        message = f"{where}: expected a max_length of at most the server's {most} tokens, got {max_length}. Lower it."
        return Failure(ConfigError(message))
    return Served(name, most)


def is_off(off: Sequence[float], on: Sequence[float]) -> bool:
    """Whether `off` are raw numbers, seen beside those that were asked for with activation."""
    if not all(0.0 <= value <= 1.0 for value in off):
        return True
    sigmoid = [1.0 / (1.0 + math.exp(-value)) for value in off]
    total = sum(math.exp(value) for value in off)
    softmax = [math.exp(value) / total for value in off]
    activated = [sigmoid] if len(off) == 1 else [sigmoid, softmax]
    return len(off) == len(on) and min(math.dist(each, on) for each in activated) < math.dist(off, on)


def _answered(row: Mapping[str, Any], num_tokens: int | None, switch: str, where: str) -> Answered | Failure:
    values = row.get("probs", row.get("data"))
    if not isinstance(values, list) or not values or not all(_is_number(value) for value in values):
        return _failure(f"{where}: expected one finite number per label, got {_shown(values)}.")
    return Answered(tuple(map(float, values)), num_tokens, switch)


def _is_number(value: Any) -> bool:
    return is_finite(value) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _failure(message: str) -> Failure:
    return Failure(InfraError(f"{message} Look at the server's log."), may_pass=True, suspect=True)


def _shown(value: Any) -> str:
    return f"{value!r:.{_MAX_SHOWN}}"
