"""Preference data: rows of several forms become prompts with answers, the chosen ones first.

Rows come from any file, dataset of an installed environment or Hugging Face dataset that `agentenv.core.dataset` reads,
and have one of these forms:

- `prompt` (a user's text, or messages) with `chosen` and `rejected`: one text or, as in RewardBench 2, several;
- the same, with messages as `chosen` and `rejected`: the answer, or the conversation that ends with it;
- only `chosen` and `rejected`: transcripts with `Human:` and `Assistant:` before each turn, as in hh-rlhf.

`subset` (by default the file's name) and `id` are read too. Roles are never renamed by their position, as RewardBench
does, so a conversation that no chat template accepts is an item that fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentenv._util.brief import brief
from agentenv.core.dataset import read_rows
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One answer and its prompt."""

    prompt: tuple[Message, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    """One comparison."""

    index: int
    """Position in the data, from 0; a resumed evaluation identifies items by it."""
    item_id: str
    subset: str
    candidates: tuple[Candidate, ...]
    """The chosen ones first."""
    num_chosen: int

    @property
    def is_pair(self) -> bool:
        """Whether there is one chosen and one rejected answer."""
        return len(self.candidates) == 2 and self.num_chosen == 1


def read_items(
    specs: Sequence[str],
    *,
    split: str | None = None,
    limit: int | None = None,
    builtin: Mapping[str, Path] = MappingProxyType({}),
) -> list[Item]:
    """Return the items of built-in data, files or Hugging Face datasets, in order; at most `limit` of each.

    `builtin` maps the names of built-in data, such as `rm_chat_pairs`, to their files.

    Raises:
        ConfigError: the data is missing.
        DataError: a row has another form; the message names the row and the reason.
        MissingDependency: the data needs a package that is not installed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: expected a number of items >= 1, got {limit}. Omit it to read all.")
    items: list[Item] = []
    for spec in specs:
        subset = re.sub(r"\.(jsonl?|parquet)(\.gz)?$", "", Path(spec).name, flags=re.IGNORECASE)
        before = len(items)
        for where, row in islice(read_rows(spec, split, builtin), limit):
            items.append(item_of(row, where=where, index=len(items), subset=subset))
        if len(items) == before:
            raise DataError(f"{spec}: expected at least one row, got none. Check the file.")
    return items


def item_of(row: Any, *, where: str, index: int = 0, subset: str = "") -> Item:
    """Return a row as an item; `where` names it in errors, `subset` is used if the row has none.

    Raises:
        DataError: the row has another form.
    """
    if not isinstance(row, Mapping) or not {"chosen", "rejected"} <= row.keys():
        got = f"keys {brief(list(row))}" if isinstance(row, Mapping) else brief(row, 60)
        raise DataError(f"{where}: expected chosen and rejected, got {got}. Rename the columns.")
    prompt: tuple[Message, ...] | None = None
    given = row.get("prompt")
    if isinstance(given, str) and given.strip():
        prompt = ({"role": "user", "content": given},)
    elif isinstance(given, Sequence) and not isinstance(given, str) and given:
        prompt = _messages(f"{where}, 'prompt'", given)
    elif given is not None:
        raise DataError(f"{where}, 'prompt': expected text or messages, got {brief(given, 60)}. Correct the row.")
    chosen = _candidates(f"{where}, 'chosen'", row["chosen"], prompt)
    rejected = _candidates(f"{where}, 'rejected'", row["rejected"], prompt)
    return Item(
        index=index,
        item_id=str(index if row.get("id") is None else row["id"]),
        subset=str(row.get("subset") or subset),
        candidates=(*chosen, *rejected),
        num_chosen=len(chosen),
    )


def _candidates(where: str, value: Any, prompt: tuple[Message, ...] | None) -> list[Candidate]:
    """Return the answers in a column: one, or a list of them."""
    several = isinstance(value, Sequence) and not isinstance(value, str) and value
    if several and not isinstance(value[0], Mapping):
        return [_candidate(f"{where}[{place}]", each, prompt) for place, each in enumerate(value)]
    return [_candidate(where, value, prompt)]


def _candidate(where: str, value: Any, prompt: tuple[Message, ...] | None) -> Candidate:
    if isinstance(value, str):
        return transcript(value, where=where) if prompt is None else Candidate(prompt, value)
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: expected text or messages, got {brief(value, 60)}. Correct the row.")
    *before, answer = _messages(where, value)
    if answer["role"] != "assistant" or not isinstance(answer.get("content"), str):
        raise DataError(f"{where}: expected messages that end with an assistant's text, got {brief(answer, 60)}.")
    # Messages that start with an assistant's turn continue the prompt; others are the complete conversation.
    continues = prompt is not None and (not before or before[0]["role"] == "assistant")
    if not continues and not before:
        raise DataError(f"{where}: expected a prompt before the answer, got none. Add it, or a column 'prompt'.")
    return Candidate((*(prompt or ()), *before) if continues else tuple(before), answer["content"])


def _messages(where: str, value: Sequence[Any]) -> tuple[Message, ...]:
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") is None or "content" not in message:
            raise DataError(f"{where}, message {place}: expected role and content, got {brief(message, 60)}.")
    return tuple({key: each for key, each in message.items() if each is not None} for message in value)


def transcript(text: str, *, where: str) -> Candidate:
    """Return a transcript's last answer and its prompt; consecutive turns of one speaker become one message.

    Raises:
        DataError: it is not a transcript, or the assistant does not speak last.
    """
    head, *pieces = _TURN.split(text)
    messages: list[dict[str, str]] = []
    for name, content in zip(pieces[::2], pieces[1::2], strict=True):
        if messages and messages[-1]["role"] == _ROLES[name]:
            messages[-1]["content"] += f"\n\n{content.strip()}"
        else:
            messages.append({"role": _ROLES[name], "content": content.strip()})
    roles = [message["role"] for message in messages]
    if head.strip() or roles[:1] != ["user"] or roles[-1] != "assistant":
        raise DataError(
            f"{where}: expected a transcript from 'Human:' to a last 'Assistant:', got {brief(text, 60)}. "
            "Add a column 'prompt' if these are only answers."
        )
    return Candidate(tuple(messages[:-1]), messages[-1]["content"])
