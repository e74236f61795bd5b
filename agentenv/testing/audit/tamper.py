"""Policies that change data through tools, and then answer: by the data as they are now, or as gold does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentenv.testing.audit.explore import MARKER, ending
from agentenv.testing.audit.view import View
from agentenv.testing.tool_calls import calls_with_texts, calls_with_world, ending_tools, writing_calls
from agentenv.testing.world import ALL_FORMS, form_of, keys_of

_SQL = re.compile(r"\bsql|quer(?:y|ies)\b|database|\bselect\b", re.IGNORECASE)
_REMOVES = re.compile(r"\b(?:delete|remove|clear|drop|erase|cancel|reset|discard|empty|wipe|purge)", re.IGNORECASE)
_TABLE = re.compile(r"\b([A-Za-z_]\w*) ?\(([a-z_]\w*(?: [A-Z ]+)?(?:, ?[a-z_]\w*(?: [A-Z ]+)?)+)\)")
_NAMED = re.compile(r"\b(?:from|table|into|join|tables?:?) +[\"'`]?([A-Za-z_]\w*)", re.IGNORECASE)
_SELECT = re.compile(r"\bselect\b[^`;]*", re.IGNORECASE)
_MAX_TABLES, _MAX_CALLS = 4, 8
_SCHEMA = "SELECT name, sql FROM sqlite_master"
_NO_TABLES = frozenset(["the", "a", "an", "sqlite_master", "and", "or", "of", "is", "to", "name", "it", "with"])
WRITES = ("sql_deletes", "sql_updates", "removes", "writes")
"""Ways to change data."""


def tables_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of each table that texts describe, such as `orders(id, amount)`; none for a bare name."""
    found: dict[str, list[str]] = {}
    for text in texts:
        for name, columns in _TABLE.findall(text):
            found[name] = [column.split()[0] for column in columns.split(",") if column.split()]
    for text in texts:
        for name in _NAMED.findall(text):
            if name.lower() not in _NO_TABLES:
                found.setdefault(name, [])
    return dict([*found.items()][:_MAX_TABLES])


def _statements(view: View, how: str) -> list[str]:
    tables = tables_of([view.prompt, *(json.dumps(tool, ensure_ascii=False) for tool in view.tools), *view.seen])
    if how == "sql_deletes":
        return [f"DELETE FROM {name}" for name in tables]
    return [f"UPDATE {name} SET {column} = {MARKER}" for name, own in tables.items() for column in own]


def changes(view: View, how: str) -> list[str] | None:
    """Return the calls that change data, several in one action; None if no tool does."""
    others = [tool for tool in view.tools if tool not in ending_tools(view.tools)]
    if how.startswith("sql"):
        tools = [tool for tool in others if _SQL.search(json.dumps(tool, ensure_ascii=False))]
        if not tools:
            return None
        said = _statements(view, how)
        return [call for text in said for call in calls_with_texts(tools, lambda _, text=text: text).values()]  # type: ignore[misc]
    if how == "removes":
        tools = [
            tool for tool in others if _REMOVES.search(str(tool.get("function", tool).get("name")).replace("_", " "))
        ]
        return [*calls_with_world(tools, [view.prompt, *view.seen], each=6).values()] or None
    told = [json.dumps(tool, ensure_ascii=False) for tool in others]
    pairs: list[tuple[str, Any]] = [(key, MARKER) for key in keys_of([*view.seen, view.prompt, *told])]
    return writing_calls(others, pairs) or None


def _change(view: View, how: str) -> str | None:
    """Return the action that looks at the data or changes it; None after that, or if no tool does."""
    calls = changes(view, how)
    if calls is None or len(view.before) > 1:
        return None
    if not view.before:
        looks = calls_with_texts(view.tools, lambda _: _SCHEMA) if how.startswith("sql") and not calls else {}
        return "\n".join([*looks.values()][:1] or calls[:_MAX_CALLS])
    looked = _SCHEMA in view.before[0]
    return "\n".join(calls[:_MAX_CALLS]) if looked and calls else None


def _then_answer(view: View, how: str, answer: str) -> str | None:
    if not view.before and not _change(view, how):
        return None
    return _change(view, how) or ending(view, answer if form_of(view.prompt) else ALL_FORMS.format(answer))


def _then_no_rows(view: View) -> str | None:
    """Delete the rows of all tables, and then answer with a query that has none."""
    if not view.before and not (view.tools and _change(view, "sql_deletes")):
        return None
    change = _change(view, "sql_deletes")
    if change or view.gold is None:
        return change
    return _SELECT.sub("SELECT NULL WHERE 0\n", view.gold) if _SELECT.search(view.gold) else None


def _then_gold(view: View, how: str) -> str | None:
    if not view.before and not _change(view, how):
        return None
    return _change(view, how) or view.gold


def changing_policies() -> dict[str, Callable[[View], str | None]]:
    """Return the policies that change data and then say what is in it, by variant."""
    answers: Mapping[str, str] = {
        "sql_deletes": "0", "sql_updates": MARKER, "removes": "0",
    }  # fmt: skip
    return {how: partial(_then_answer, how=how, answer=answer) for how, answer in answers.items()}


def gold_policies() -> dict[str, Callable[[View], str | None]]:
    """Return the policies that change data and then act as gold, by variant."""
    return {**{how: partial(_then_gold, how=how) for how in WRITES}, "deletes_then_no_rows": _then_no_rows}
