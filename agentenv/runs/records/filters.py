"""The language in which episodes are chosen: `reward<1 -stop=terminated info.outcome=wrong "apples" task:0004*`.

    filter   terms, all of which must hold; `or` between two terms: one of them must hold
    term     an optional `-`, which negates, then one of
             "TEXT"          text in the prompt, an action or an observation; i:"TEXT" ignores case
             COLUMN=VALUE    also !=, and for numbers <, <=, >, >=; `none` stands for no value
             COLUMN:PATTERN  text with the wildcards * and ?
    COLUMN   a column of episodes (`tables.EPISODE_COLUMNS`) or a name of `ALIASES`; segments, mean_logprob, min_logprob
             and repeated_share, which only the index has; info.KEY; turn.COLUMN, which must hold for one of the turns;
             group.reward and group.spread, mean and standard deviation of the task's rewards

Values and patterns with spaces are quoted; in quotes, a backslash escapes a quote and a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean, pstdev
from typing import Any, get_args

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import StopReason
from agentenv.errors import ConfigError, ErrorKind
from agentenv.runs.metrics import summarize
from agentenv.runs.records.index import FIELDS, make_row
from agentenv.runs.records.tables import (
    EPISODE_COLUMNS,
    FLOATS,
    INTEGERS,
    TURN_COLUMNS,
    episode_row,
    observation_text,
    turn_rows,
)

ALIASES = {
    "act": "num_action_tokens", "episode": "episode_id", "finish": "finish_reason", "group": "group_id",
    "step_retries": "num_step_retries", "stop": "stop_reason", "task": "task_id", "tokens": "num_tokens",
    "turns": "num_turns", "version": "policy_version",
}  # fmt: skip
"""Short names of columns in filters."""
GROUP_COLUMNS = ("group.reward", "group.spread")
INDEX_COLUMNS = ("segments", "mean_logprob", "min_logprob", "repeated_share")
"""Numbers of an episode that its row of the index has (`index.FIELDS`), and no table."""

_VALUES: Mapping[str, Sequence[str]] = {
    "stop_reason": [*map(str, StopReason), "none"], "error_kind": [*get_args(ErrorKind), "none"],
}  # fmt: skip
"""All values of columns that have few."""

_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_TERM = re.compile(
    rf'\s*(-?)(?:(i:)?{_QUOTED}|([A-Za-z_][^\s"=!<>:]*)(!=|<=|>=|[=<>:])(?:{_QUOTED}|([^\s"]+)))(?=\s|$)', re.DOTALL
)
_OR = re.compile(r"\s+or(?=\s)")
_ORDERS = ("<", "<=", ">", ">=")


@dataclass(frozen=True, slots=True)
class _Term:
    negated: bool
    column: str
    """Empty for text."""
    operator: str
    value: str

    def holds(self, cells: Iterable[Any]) -> bool:
        """Return True if one of the cells matches, or none if the term is negated."""
        return self.negated != any(map(self._matches, cells))

    def _matches(self, cell: Any) -> bool:
        if not self.column:
            return self.value in (cell.casefold() if self.operator == "i:" else cell)
        if self.operator in ("=", "!="):
            same = self.value == ("none" if cell is None else str(cell))
            return (self.operator == "=") == (_as_number(self.value) == cell if _is_number(cell) else same)
        if self.operator == ":":
            return cell is not None and fnmatchcase(str(cell), self.value)
        if not _is_number(cell):
            return False
        number, value = float(self.value), float(cell)
        return {"<": value < number, "<=": value <= number, ">": value > number, ">=": value >= number}[self.operator]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """A parsed filter; `parse_filter` makes it."""

    terms: tuple[tuple[_Term, ...], ...]
    """All of the outer, one of the inner must hold."""

    @property
    def columns(self) -> set[str]:
        """The columns that it reads."""
        return {term.column for choice in self.terms for term in choice if term.column}

    def check_environments(self, runs: str, environments: Iterable[str]) -> None:
        """Raise ConfigError if an `env=` names none of the environments that the episodes of `runs` have."""
        terms = [term for choice in self.terms for term in choice if term.column == "env" and not term.negated]
        names = [term.value for term in terms if term.operator == "="]
        known = sorted({each or "none" for each in environments}) if names else []
        for name in names:
            if known and name not in known:
                has_one = known == ["none"]
                others = "It has one environment: leave env out." if has_one else f"There are {', '.join(known)}."
                advice = did_you_mean(name, known, others)
                raise ConfigError(f"--where: expected an environment of {runs}, got {name!r}.{advice}")

    def keeps_task(self, task_id: str, env: str, where: str) -> bool:
        """Return True for a task that the filter keeps.

        Raises:
            ConfigError: the filter reads more than the task's id and environment; `where` is what has no more.
        """
        row = {"task_id": task_id, "env": env or None}
        others = {term.column or "a text" for choice in self.terms for term in choice} - row.keys()
        if others:
            raise ConfigError(
                f"--where: expected a filter by task or env, got {', '.join(sorted(others))}. "
                f"No more is kept of the episodes of {where}."
            )
        return all(any(term.holds([row[term.column]]) for term in choice) for choice in self.terms)

    def matches(self, trajectory: Trajectory, group_rewards: Sequence[float] = ()) -> bool:
        """Return True for an episode that the filter keeps; `group_rewards` are the rewards of its group."""
        row = episode_row(trajectory)
        if not self.columns.isdisjoint(INDEX_COLUMNS):
            known = dict(zip(FIELDS, make_row(trajectory, summarize(trajectory), 0, 0, ""), strict=False))
            row |= {name: known[name] for name in INDEX_COLUMNS}
        turns = turn_rows(trajectory) if any(column.startswith("turn.") for column in self.columns) else []

        def cells(column: str) -> Iterable[Any]:
            if not column:
                return conversation_texts(trajectory)
            if column.startswith("turn."):
                return [turn.get(column.removeprefix("turn.")) for turn in turns]
            if column in GROUP_COLUMNS:
                fact = fmean if column == "group.reward" else pstdev
                return [fact(group_rewards) if group_rewards else None]
            return [row.get(column)]

        return all(any(term.holds(cells(term.column)) for term in choice) for choice in self.terms)


def conversation_texts(trajectory: Trajectory) -> list[str]:
    """Return the texts of an episode in which filters and `--grep` search: prompt, actions and observations."""
    texts = [episode_row(trajectory)["prompt"]]
    return texts + [text for turn in trajectory.turns for text in (turn.action, observation_text(turn))]


def parse_filter(text: str, where: str = "--where") -> EpisodeFilter:
    """Return the filter that a text describes.

    Raises:
        ConfigError: the text is not a filter, or names an unknown column.
    """
    terms: list[tuple[_Term, ...]] = []
    at, joins = 0, False
    while text[at:].strip():
        if terms and not joins and (found := _OR.match(text, at)):
            at, joins = found.end(), True
            continue
        match = _TERM.match(text, at)
        if match is None:
            rest = text[at:].strip()
            episode = re.match(r'[^\s"=]+/\d+(?=\s|$)', rest)
            advice = f"Write episode={episode[0]}." if episode else "Quote values that contain spaces."
            raise ConfigError(
                f'{where}: expected a term such as reward<1, -stop=terminated or "text", got '
                f"{brief(rest, 60)}. {advice}"
            )
        term = _term(match, where)
        terms = [*terms[:-1], (*terms[-1], term)] if joins else [*terms, (term,)]
        at, joins = match.end(), False
    if joins or not terms:
        raise ConfigError(f"{where}: expected a term{' after `or`' if joins else ''}, got none. Add one.")
    return EpisodeFilter(tuple(terms))


def _term(match: re.Match[str], where: str) -> _Term:
    minus, fold, quoted, column, operator, quoted_value, bare = match.groups()
    if column is None:
        text = _unquoted(quoted)
        return _Term(bool(minus), "", "i:" if fold else '"', text.casefold() if fold else text)
    value = bare if quoted_value is None else _unquoted(quoted_value)
    if operator in _ORDERS and _as_number(value) is None:
        raise ConfigError(f"{where}: expected a number after {column}{operator}, got {brief(value, 60)}.")
    scope, known = ("turn.", TURN_COLUMNS) if column.startswith("turn.") else ("", EPISODE_COLUMNS)
    plain = column.removeprefix(scope)
    plain = ALIASES.get(plain, plain)
    if plain not in known and not plain.startswith("info.") and column not in GROUP_COLUMNS + INDEX_COLUMNS:
        names = [*EPISODE_COLUMNS, *INDEX_COLUMNS, *ALIASES, "info.KEY", *GROUP_COLUMNS]
        names += [f"turn.{each}" for each in TURN_COLUMNS]
        names = [f"turn.{column}"] if plain in TURN_COLUMNS else names
        advice = f"Use one of {', '.join(EPISODE_COLUMNS)}, info.KEY, turn.COLUMN."
        advice = did_you_mean(column, names, cutoff=0.6) or did_you_mean(column[:3], names, advice, cutoff=1.0)  # env
        if column == "step":
            advice = (
                " Of a training without --async_train, version=30 has the episodes of train step 31; of its eval/, "
                "group:*@31 those of the evaluation after that step."
            )
        raise ConfigError(f"{where}: expected a column, got {column!r}.{advice}")
    if operator in _ORDERS and plain in known and plain not in INTEGERS | FLOATS:
        raise ConfigError(
            f"{where}: expected a column of numbers before {operator}, got {column!r}, which has text. "
            f"Compare it with = or :, or write {column}!=none."
        )
    if not scope and (values := _VALUES.get(plain)):
        _check_value(f"{where}: expected a value of {column}", values, column, operator, value)
    return _Term(bool(minus), scope + plain, operator, value)


def _check_value(what: str, values: Sequence[str], column: str, operator: str, value: str) -> None:
    """Raise ConfigError for a value or a pattern that no episode can have."""
    fits = any(fnmatchcase(each, value) for each in values)
    if value in values or (fits and operator == ":"):
        return
    advice = did_you_mean(value, values, f"There are {', '.join(values)}.", cutoff=0.6)
    raise ConfigError(f"{what}, got {value!r}.{f' Write {column}:{value}.' if fits else advice}")


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
