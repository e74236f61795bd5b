"""What the readers share: lines and objects of JSON, and episodes of what a record has; what it lacks is left out."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentenv._util.disk import open_plain
from agentenv.core.trajectory import NO_VERSION, EpisodeError, Trajectory
from agentenv.core.types import Answer, Completion, Message, StepResult, StopReason, Task
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records.lines import MAX_LINE_BYTES

Json = Mapping[str, Any]
Sources = Iterator[tuple[str, Callable[[], Json]]]
"""The place of each record, and a function that reads it."""
Episodes = Iterator[Trajectory]
_FINISHES = {"tool_calls": "stop", "completed": "stop", "incomplete": "length"}


class Reader:
    """Reads one peer's records, each of which is a line of a file, unless a subclass has other `sources`."""

    peer: str
    files: str
    """How the files are named, for messages."""
    keys: frozenset[str]
    """Keys that every record has."""

    def __init__(self) -> None:
        self.numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """The next number of an episode in each group, for records that have none."""

    def is_record(self, value: Json) -> bool:
        """Return True if this is a record of the peer."""
        return self.keys <= value.keys()

    def files_in(self, folder: Path) -> list[Path]:
        """Return the files of a folder; none if their names do not tell."""
        return []

    def sources(self, path: Path) -> Sources:
        """Yield the records in a file, or in those of a folder."""
        for file in self.files_in(path) if path.is_dir() else [path]:
            yield from records_in(file)

    def episodes(self, value: Json) -> Episodes:
        """Yield the episodes of a record."""
        raise NotImplementedError


@dataclass(slots=True)
class Call:
    """One generation and the reply to it."""

    answer: Answer
    """The text and the calls of tools."""
    prompt_ids: Sequence[int] = ()
    """The tokens before it: all of them, or those after the previous call if `continues`."""
    token_ids: Sequence[int] = ()
    """The sampled tokens; empty if the record has none."""
    logprobs: Sequence[float | None] | None = None
    finish: str | None = None
    """The peer's word for why it ended."""
    version: int = NO_VERSION
    continues: bool = False
    generate_s: float = 0.0
    observation: list[Message] = field(default_factory=list)


def build_episode(
    task: Task, sample: str | int, calls: Sequence[Call], reward: float | None, info: Json,
    stop_reason: StopReason | None, error: EpisodeError | None = None, **fields: Any,
) -> Trajectory:  # fmt: skip
    """Return an episode of a task, whose `task_id` is that of its group; `fields` are further ones of Trajectory.

    The reward stands at the last turn. There are tokens if each call has some.

    Raises:
        ValueError, TypeError, OverflowError, ContractError: values that no episode has.
    """
    has_tokens = bool(calls) and all(call.token_ids for call in calls)
    size = sum(len(call.prompt_ids) + len(call.token_ids) for call in calls)
    fields["tools"] = tuple(fields.get("tools") or ())
    episode = Trajectory(task, size, f"{task.task_id}/{sample}", task.task_id, prompt=task.prompt, **fields)
    for call in calls:
        if has_tokens:
            _append_tokens(episode, call)
        elif episode.turns:
            episode.append_observation([], bridge="messages")
        finish: Any = _FINISHES.get(call.finish or "", call.finish or "")
        completion = Completion((), finish, answer=call.answer)
        if has_tokens:
            known = tuple(math.nan if value is None else value for value in call.logprobs or ())
            completion = Completion(tuple(call.token_ids), finish, logprobs=known or None, policy_version=call.version)
        called = [json.dumps(each["function"], ensure_ascii=False) for each in call.answer.tool_calls]
        said = [call.answer.reasoning, call.answer.content, *called]
        episode.append_turn(completion, "\n".join(filter(None, said)), call.generate_s)
        if call is not calls[-1]:
            episode.set_result(StepResult(call.observation))
        elif reward is not None or (error is not None and call.observation):
            is_over = stop_reason is StopReason.TERMINATED and error is None
            facts = {key: each for key, each in info.items() if isinstance(each, str) or number_of(each) is not None}
            episode.set_result(StepResult(call.observation, reward or 0.0, is_over, info=facts))
    stop_reason = stop_reason if error is None else StopReason.ERROR
    if stop_reason is not None:
        episode.finish(stop_reason, error)
    return episode


def _append_tokens(episode: Trajectory, call: Call) -> None:
    known = [] if call.continues else episode.segments[-1].token_ids.tolist()
    if list(call.prompt_ids[: len(known)]) == known:
        episode.append_observation(call.prompt_ids[len(known) :])
    else:
        episode.open_segment(call.prompt_ids)


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call of a tool as OpenAI's API has it."""
    return {"id": str(call_id), "type": "function", "function": {"name": name, "arguments": arguments}}


def content_text(content: Any) -> str:
    """Return the text of a content; of parts that are not text, their type."""
    parts = [{"text": content or ""}] if content is None or isinstance(content, str) else content
    return "".join(part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type')}]" for part in parts)


def number_of(value: Any) -> float | None:
    """Return a finite number; None for other values."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def failure(kind: Any, message: Any) -> EpisodeError:
    """Return a failure that the peer recorded; peers do not tell whose fault it is."""
    return EpisodeError("infra", str(kind or "unknown"), str(message or "")[:4000])


def _parse(text: bytes) -> Json:
    value = json.loads(text) if len(text) <= MAX_LINE_BYTES else None
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object of at most {MAX_LINE_BYTES} bytes, got {text[:40]!r}")
    return value


def read_object(path: Path) -> Json:
    """Return the JSON object in a file, which another process may have replaced by a link or a pipe.

    Raises:
        OSError, ValueError, RecursionError, DataError: there is none.
    """
    with open_plain(path) as file:
        return _parse(file.read(MAX_LINE_BYTES + 1))


def records_in(path: Path) -> Sources:
    """Yield a `.json` file, or each line that is not blank of another; one that is too long counts as damaged.

    Raises:
        ConfigError, DataError: the file cannot be read.
    """
    if path.suffix == ".json":
        yield path.name, partial(read_object, path.resolve())
        return
    try:
        with open_plain(path.resolve()) as file:
            number, is_start = 0, True
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += is_start
                if is_start and line.strip():
                    yield f"{path.name}:{number}", partial(_parse, line)
                is_start = line.endswith(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: expected a file that can be read, got {error}.") from error
