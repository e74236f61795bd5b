"""Preference data in the forms that there are, read into one: prompts, and answers of which the first are the chosen.

A row is one of these, from any file, dataset of an installed environment or Hugging Face dataset that
`agentenv.dataset` reads:

- `prompt` (text, which a user said, or messages) with `chosen` and `rejected`: a text or, as in RewardBench 2, several;
- the same, where `chosen` and `rejected` are messages: the answer alone, or the conversation with it at its end;
- `chosen` and `rejected` alone, as transcripts with `Human:` and `Assistant:` before each turn, as hh-rlhf has them.

`subset` (by default the file's name) and `id` are kept. Roles are those of the data: nothing is renamed by its place,
as RewardBench does, so a conversation that no chat template takes is an item that fails, and counts as that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentenv.dataset import read_rows
from agentenv.errors import ConfigError, DataError
from agentenv.loading import builtin_datasets
from agentenv.types import Message

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One answer, and what it answers."""

    prompt: tuple[Message, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    """One comparison."""

    index: int
    """Its place in the data, from 0: what a resumed evaluation knows it by."""
    item_id: str
    subset: str
    candidates: tuple[Candidate, ...]
    """The chosen ones first."""
    num_chosen: int

    @property
    def is_pair(self) -> bool:
        """Whether it is one chosen answer against one rejected."""
        return len(self.candidates) == 2 and self.num_chosen == 1


def read_items(specs: Sequence[str], *, split: str | None = None, limit: int | None = None) -> list[Item]:
    """The items of built-in data, files or Hugging Face datasets, in order; at most `limit` of each.

    Built-in data is named as `agentenv list` names it, such as `rm_chat_pairs`.

    Raises:
        ConfigError: there is no such data.
        DataError: a row is of none of the forms; the message says which row and why.
        MissingDependency: the data needs a package that is not installed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: expected a number of items >= 1, got {limit}. Leave it out for all of them.")
    items: list[Item] = []
    builtin = builtin_datasets()
    for spec in specs:
        subset = re.sub(r"\.(jsonl?|parquet)(\.gz)?$", "", Path(spec).name, flags=re.IGNORECASE)
        before = len(items)
        for where, row in islice(read_rows(spec, split, builtin), limit):
            items.append(item_of(row, where=where, index=len(items), subset=subset))
        if len(items) == before:
            raise DataError(f"{spec}: expected at least one row, got none. Check the file.")
    return items


def item_of(row: Any, *, where: str, index: int = 0, subset: str = "") -> Item:
    """A row as an item; `where` names it in errors, `subset` is its own where it names none.

    Raises:
        DataError: it is of none of the forms.
    """
    if not isinstance(row, Mapping) or not {"chosen", "rejected"} <= row.keys():
        got = f"keys {list(row)}" if isinstance(row, Mapping) else f"{row!r:.60}"
        raise DataError(f"{where}: expected chosen and rejected, got {got}. Rename the columns.")
    prompt = None if row.get("prompt") is None else _prompt(f"{where}, 'prompt'", row["prompt"])
    chosen = _candidates(f"{where}, 'chosen'", row["chosen"], prompt)
    rejected = _candidates(f"{where}, 'rejected'", row["rejected"], prompt)
    return Item(
        index=index,
        item_id=str(index if row.get("id") is None else row["id"]),
        subset=str(row.get("subset") or subset),
        candidates=(*chosen, *rejected),
        num_chosen=len(chosen),
    )


def _prompt(where: str, value: Any) -> tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return _messages(where, value)
    raise DataError(f"{where}: expected text or messages, got {value!r:.60}. Correct the row.")


def _candidates(where: str, value: Any, prompt: tuple[Message, ...] | None) -> list[Candidate]:
    """The answers in a column: one, or a list of them."""
    several = isinstance(value, Sequence) and not isinstance(value, str) and value
    if several and not isinstance(value[0], Mapping):
        return [_candidate(f"{where}[{place}]", each, prompt) for place, each in enumerate(value)]
    return [_candidate(where, value, prompt)]


def _candidate(where: str, value: Any, prompt: tuple[Message, ...] | None) -> Candidate:
    if isinstance(value, str):
        return transcript(value, where=where) if prompt is None else Candidate(prompt, value)
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: expected text or messages, got {value!r:.60}. Correct the row.")
    *before, answer = _messages(where, value)
    if answer["role"] != "assistant" or not isinstance(answer["content"], str):
        raise DataError(f"{where}: expected messages that end with an assistant's text, got {answer!r:.60}. Mend it.")
    # What begins with an assistant's turn goes on from the prompt; anything else is the whole conversation.
    continues = prompt is not None and (not before or before[0]["role"] == "assistant")
    if not continues and not before:
        raise DataError(f"{where}: expected a prompt before the answer, got none. Add it, or a column 'prompt'.")
    return Candidate((*(prompt or ()), *before) if continues else tuple(before), answer["content"])


def _messages(where: str, value: Sequence[Any]) -> tuple[Message, ...]:
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where}, message {place}: expected role and content, got {message!r:.60}. Correct it.")
    return tuple({key: each for key, each in message.items() if each is not None} for message in value)


def transcript(text: str, *, where: str) -> Candidate:
    """A transcript's last answer and what stands before it; turns of one speaker in a row become one message.

    Raises:
        DataError: it is none, or the assistant does not speak last.
    """
    head, *pieces = _TURN.split(text)
    messages: list[dict[str, str]] = []
    for name, said in zip(pieces[::2], pieces[1::2], strict=True):
        if messages and messages[-1]["role"] == _ROLES[name]:
            messages[-1]["content"] += f"\n\n{said.strip()}"
        else:
            messages.append({"role": _ROLES[name], "content": said.strip()})
    roles = [message["role"] for message in messages]
    if head.strip() or roles[:1] != ["user"] or roles[-1] != "assistant":
        raise DataError(
            f"{where}: expected a transcript from 'Human:' to a last 'Assistant:', got {text!r:.60}. "
            "Add a column 'prompt' where these are answers alone."
        )
    return Candidate(tuple(messages[:-1]), messages[-1]["content"])
