"""Episodes for the page: the lines of the record as they are, and what the page cannot know: spans and token texts."""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO

from agentenv.chat.chat import text_of
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Message
from agentenv.core.views import Span, spans_of
from agentenv.errors import DataError
from agentenv.runs.records.lines import MAX_LINE_BYTES, decode_line, trajectory_from_dict
from agentenv.runs.records.tables import turn_rows
from agentenv.view.texts import TokenTexts
from agentenv.view.viewed import TRAJECTORIES, ViewedRun

Place = tuple[int, int]
"""Offset and length of a line of `trajectories.jsonl`."""
HEAD_CHARS = 300
"""Maximum length of a text of `head_of`."""
SLICE_S = 10.0
"""Longest time of a search until its caller has to ask again."""
_READ_BYTES = 1 << 23
_OPENING = re.compile(r"(?:system|developer|user|assistant|tool)\n+")
"""What a template writes behind a special token to begin a message."""
_COUNTED = ("num_action_tokens", "policy_version")
"""Columns of turns that the page has by the rules of the tables."""
_COMPACT: Any = {"separators": (",", ":")}
_UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What values that no run has written raise: a damaged episode costs itself only."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """Episodes in the form of `/api/episodes`."""

    texts: Mapping[int, str]
    """Text of each token id that occurs."""
    special: Sequence[int]
    """Ids among them of added tokens."""
    entries: Sequence[bytes]
    """JSON of each episode."""

    def to_json(self) -> bytes:
        """Return the answer of `/api/episodes`."""
        table = {"texts": sorted(self.texts.items()), "special": list(self.special)}
        return json.dumps(table).encode()[:-1] + b',"episodes":[' + b",".join(self.entries) + b"]}"


def read_value(run: ViewedRun, file: BinaryIO | None, place: Place) -> bytes:
    """Return the episode's value in a line of `file`, the record of the run.

    Raises:
        DataError: it cannot be read.
    """
    offset, length = place
    if file is not None:
        file.seek(offset)
    line = b"" if file is None else file.read(length)
    episode = decode_line(line) if line.endswith(b"\n") else None
    if episode is None:
        raise DataError(
            f"{run.path}: expected an episode at byte {offset}, got a damaged line. Its episode cannot be read."
        )
    return episode


def parse_episode(episode: bytes) -> dict[str, Any]:
    """Return the values of an episode.

    Raises:
        DataError: they are not JSON as browsers read it.
    """
    try:
        values = json.loads(episode, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"episode: expected JSON, got {error}. Its record cannot be shown.") from error
    if not isinstance(values, dict):
        raise DataError(f"episode: expected a JSON object, got {type(values).__name__}. Its record cannot be shown.")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")


def read_episodes(
    run: ViewedRun,
    places: Sequence[Place],
    texts: TokenTexts | None,
    *,
    learned: Callable[[Trajectory], dict[str, Any] | None] | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Episodes:
    """Return episodes for the page.

    Args:
        run: the run.
        places: of its lines.
        texts: those of its tokens; without them only the spans are known.
        learned: returns the learner's part of an episode.
        change: changes the values of an episode that the page gets.
    """
    table: dict[int, str] = {}
    entries = []
    with run.open(TRAJECTORIES) as file:
        for place in places:
            head = b'{"at":[%d,%d],' % place
            try:
                episode = read_value(run, file, place)
                values = parse_episode(episode)
                trajectory = trajectory_from_dict(values)
                view = episode_view(trajectory, texts, table)
                view["learned"] = None if learned is None else learned(trajectory)
                if change is not None:
                    change(values)
                record = episode if change is None and episode.isascii() else json.dumps(values, **_COMPACT).encode()
                entries.append(head + b'"record":%b,"view":%b}' % (record, json.dumps(view).encode()))
            except DataError as error:
                entries.append(head + b'"error":%b}' % json.dumps(str(error)).encode())
    special = sorted(table.keys() & texts.special_ids) if texts else []
    return Episodes(table, special, entries)


def episode_view(trajectory: Trajectory, texts: TokenTexts | None, table: dict[int, str]) -> dict[str, Any]:
    """Return the spans of each segment, the tokens whose text differs from that of their id in `table`, and `_COUNTED`.

    The texts of further ids are added to `table`.

    Raises:
        DataError: the values are not those of an episode.
    """
    try:
        segments = []
        for index, segment in enumerate(trajectory.segments):
            found, alone = ([""] * len(segment), dict[int, str]()) if texts is None else texts.of(segment.token_ids)
            table |= alone
            special = frozenset[int]() if texts is None else texts.special_ids
            differing = [
                [at, text]
                for at, (token, text) in enumerate(zip(segment.token_ids, found, strict=True))
                if texts is not None and text != table[token]
            ]
            is_special = [token in special for token in segment.token_ids]
            spans = [
                [span.start, span.end, span.kind, span.turn, content_of(trajectory, index, span, found, is_special)]
                for span in spans_of(trajectory, index)
            ]
            segments.append({"spans": spans, "texts": differing})
        return {
            "segments": segments,
            "turns": [{name: row[name] for name in _COUNTED} for row in turn_rows(trajectory)],
        }
    except _UNREADABLE as error:
        raise _not_an_episode(error) from error


def content_of(
    trajectory: Trajectory, segment: int, span: Span, texts: Sequence[str], is_special: Sequence[bool]
) -> list[list[int]]:
    """Return the ranges [start, end) of the tokens in a span that carry texts of messages, not of the template.

    Where the texts are not found, these are all tokens but special ones and the role that follows one. An action and a
    close have none.
    """
    if span.kind in ("action", "close"):
        return []
    wanted = _texts_in(trajectory, segment, span)
    ends = list(accumulate(map(len, texts[span.start : span.end])))
    whole, at = "".join(texts[span.start : span.end]), 0
    ranges: list[list[int]] = []
    for text in filter(None, map(str.strip, wanted)):
        found = whole.find(text, at)
        if found < 0:
            ranges = []
            break
        at = found + len(text)
        start, end = bisect_right(ends, found), bisect_left(ends, at) + 1
        if ranges and span.start + start <= ranges[-1][1]:
            ranges[-1][1] = span.start + end
        else:
            ranges.append([span.start + start, span.start + end])
    if ranges:
        return ranges
    for at in range(span.start, span.end):
        if is_special[at]:
            continue
        if at > span.start and not is_special[at - 1]:
            ranges[-1][1] = at + 1
        else:
            ranges.append([at, at + 1])
    for part in ranges:
        opening = _OPENING.match("".join(texts[part[0] : part[1]])) if part[0] > span.start else None
        size = opening.end() if opening else 0
        while size > 0:
            size -= len(texts[part[0]])
            part[0] += 1
    return [part for part in ranges if part[0] < part[1]]


def _texts_in(trajectory: Trajectory, segment: int, span: Span) -> list[str]:
    """Return the texts that a prompt or feedback was rendered from; empty if a part of it is not text."""
    if span.kind == "feedback":
        result = trajectory.turns[span.turn].result
        return [] if result is None else _message_texts(result.observation)
    if trajectory.tools:
        return []  # the template renders them
    texts = _message_texts(trajectory.prompt or trajectory.task.prompt)
    for turn in trajectory.turns:
        if turn.segment >= segment or not texts:
            break
        texts.append(turn.action)
        texts += _message_texts(turn.result.observation) if turn.result is not None else []
    return texts


def _message_texts(messages: str | Sequence[Message]) -> list[str]:
    if isinstance(messages, str):
        return [messages]
    return [] if any(each.get("tool_calls") for each in messages) else list(map(text_of, messages))


def read_heads(run: ViewedRun, places: Iterable[Place]) -> list[dict[str, Any]]:
    """Return `at`, the place, and `head_of` of each episode, or `error` with the reason why it cannot be read."""
    heads: list[dict[str, Any]] = []
    with run.open(TRAJECTORIES) as file:
        for place in places:
            try:
                heads.append({"at": place, **head_of(read_value(run, file, place))})
            except DataError as error:
                heads.append({"at": place, "error": str(error)})
    return heads


def head_of(episode: bytes) -> dict[str, Any]:
    """Return what the prompt asks, label, last action and info of an episode, each text cut.

    That is its last message of a user, as tasks share their system message; or all of it without one.

    Raises:
        DataError: the value is not that of an episode.
    """
    values = parse_texts(episode)
    try:
        task, turns = values["task"], values["turns"]
        result = turns[-1]["result"] if turns else None
        label, prompt = task["label"], values["prompt"] or task["prompt"]
        asked = [] if isinstance(prompt, str) else [text_of(each) for each in prompt if each.get("role") == "user"]
        return {
            "prompt": (asked[-1] if asked else texts_of(values)[0])[:HEAD_CHARS],
            "label": None if label is None else str(label)[:HEAD_CHARS],
            "last_action": turns[-1]["action"][:HEAD_CHARS] if turns else None,
            "info": {
                key: value if isinstance(value, int | float | None) else str(value)[:HEAD_CHARS]
                for key, value in (result["info"] if result else {}).items()
            },
        }
    except _UNREADABLE as error:
        raise _not_an_episode(error) from error


def _not_an_episode(error: Exception) -> DataError:
    return DataError(f"episode: expected the values of an episode, got {error!r:.200}. It cannot be shown.")


def parse_texts(episode: bytes) -> dict[str, Any]:
    """Return the values of an episode without its segments, which are most of it.

    Raises:
        DataError: as `parse_episode`.
    """
    cut = episode.rfind(b',"segments":[')
    return parse_episode(episode if cut < 0 else episode[:cut] + b"}")


def texts_of(values: Mapping[str, Any]) -> list[str]:
    """Return prompt, actions and observations of an episode's values, as `filters.conversation_texts`."""
    prompt = values["prompt"] or values["task"]["prompt"]
    texts = [prompt if isinstance(prompt, str) else "\n\n".join(map(text_of, prompt))]
    for turn in values["turns"]:
        observation = turn["result"]["observation"] if turn["result"] else ""
        is_text = isinstance(observation, str)
        texts += [turn["action"], observation if is_text else json.dumps(observation, ensure_ascii=False)]
    return texts


def search(run: ViewedRun, text: str, start: int = 0, *, fold: bool = False) -> Iterator[Place | int]:
    """Yield the place of each line whose texts contain `text`; last, an offset to continue at if the time is over.

    Args:
        run: the run.
        text: not empty.
        start: offset of a line.
        fold: ignore case; each line is then decoded, which takes ten times as long.
    """
    needle = b"" if fold else json.dumps(text)[1:-1].encode()
    wanted = text.casefold() if fold else text
    end_s = time.monotonic() + SLICE_S
    with run.open(TRAJECTORIES) as file:
        if file is None:
            return
        file.seek(start)
        # Not mapped into memory: a file that is cut meanwhile would end the process.
        while lines := file.read(_READ_BYTES) + file.readline(MAX_LINE_BYTES):
            lines = lines[: lines.rfind(b"\n") + 1]
            at = 0
            while lines and (at := lines.find(needle, at)) >= 0 and at < len(lines):
                first, last = lines.rfind(b"\n", 0, at) + 1, lines.index(b"\n", at) + 1
                if time.monotonic() > end_s:
                    yield start + first
                    return
                if _occurs(lines[first:last], wanted, fold=fold):
                    yield start + first, last - first
                at = last
            start += len(lines)


def _occurs(line: bytes, text: str, *, fold: bool) -> bool:
    try:
        episode = decode_line(line)
        found = [] if episode is None else texts_of(parse_texts(episode))
        return any(text in (each.casefold() if fold else each) for each in found)
    except (AttributeError, DataError, KeyError, TypeError):
        return False  # damaged; `/api/episodes` tells it
