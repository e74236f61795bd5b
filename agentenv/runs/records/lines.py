"""Trajectories as JSON values and as lines of `trajectories.jsonl`, and back.

A line is `{"v":3,"crc":"0a1b2c3d","episode":{…}}`: plain JSON in ASCII. `v` is the schema version, `crc` is
`zlib.crc32(bytes of the episode's value, v)` in hexadecimal, so that a flipped bit anywhere in the line shows.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, groupby
from typing import Any, NamedTuple

from agentenv._util.jsonable import jsonable
from agentenv.core.trajectory import NO_VERSION, EpisodeError, Segment, Trajectory, Turn
from agentenv.core.types import Answer, SamplingParams, StepResult, StopReason, Task
from agentenv.errors import DataError

SCHEMA_VERSION = 3
"""Version of every line and of `config.json`. Readers refuse all others."""
MAX_LINE_BYTES = 1 << 28
"""Maximum number of bytes of a line, which bounds the memory of a reader."""

_HEAD = re.compile(rb'(?:\xef\xbb\xbf)?\{"v":(\d{1,9}),"crc":"([0-9a-f]{8})","episode":')
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON values, without loss except as documented at `jsonable`; images are only counted.

    Redundant values are left out: spans replace masks; log-probabilities and runs of [policy version, count] cover the
    tokens of actions only; `prompt` is null if it is the task's. `reward` and `score` are for readers such as jq.
    """
    task = trajectory.task
    return {  # `directory.py` expects these two keys first in a line
        "episode_id": trajectory.episode_id,
        "error": asdict(trajectory.error) if trajectory.error else None,
        "attempt": trajectory.attempt,
        "group_id": trajectory.group_id,
        "stop_reason": trajectory.stop_reason.value if trajectory.stop_reason else None,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "seed": trajectory.seed,
        "max_length": trajectory.max_length,
        "wait_s": trajectory.wait_s,
        "began_s": trajectory.began_s,
        "prompt": None if trajectory.prompt == task.prompt else jsonable(trajectory.prompt),
        "tools": jsonable(trajectory.tools),
        "refusals": dict(trajectory.refusals),
        **({"refusal_reasons": dict(trajectory.refusal_reasons)} if trajectory.refusal_reasons else {}),
        **({"retried": trajectory.retried} if trajectory.retried else {}),
        "task": {
            "prompt": jsonable(task.prompt),
            "label": jsonable(task.label),
            "task_id": task.task_id,
            "num_images": len(task.images),
            "metadata": jsonable(task.metadata),
            "seed": task.seed,
            **({"env": task.env} if task.env else {}),
        },
        "turns": [_turn_to_dict(turn) for turn in trajectory.turns],
        "segments": [
            _segment_to_dict(
                segment,
                [(turn.start, turn.end) for turn in trajectory.turns if turn.segment == index and turn.answer is None],
            )
            for index, segment in enumerate(trajectory.segments)
        ],
    }


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    names = ("segment", "start", "end", "action", "finish_reason", "matched_stop")
    numbers = ("generate_s", "step_s", "num_cached_tokens", "num_retries", "began_s")
    reply = ("bridge", "num_synthesized", "observation_cut")
    values: dict[str, Any] = {name: getattr(turn, name) for name in names + numbers + reply}
    if turn.answer is not None:
        values["answer"] = jsonable(asdict(turn.answer))
    if turn.forced is not None:
        values["forced"] = list(turn.forced)
    for name in ("num_failovers", "num_request_retries"):
        if getattr(turn, name):
            values[name] = getattr(turn, name)
    result = turn.result
    if result is None:
        return values | {"result": None}
    values["result"] = {
        "observation": jsonable(result.observation),
        "reward": result.reward,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "score": result.score,
        "info": jsonable(result.info),
        "sampling": jsonable(asdict(result.sampling)) if result.sampling else None,
        "num_images": len(result.images),
    }
    return values


def _segment_to_dict(segment: Segment, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    versions = chain.from_iterable(segment.policy_versions[start:end] for start, end in spans)
    # Nine significant digits represent every float32 exactly.
    values = chain.from_iterable(segment.logprobs[start:end] for start, end in spans)
    numbers = [float(f"{value:.9g}") for value in values]
    logprobs: list[float] | list[float | str | None] = numbers
    if not all(map(math.isfinite, numbers)):
        logprobs = [value if math.isfinite(value) else None if math.isnan(value) else str(value) for value in numbers]
    return {
        "token_ids": segment.token_ids.tolist(),
        "action_spans": [list(span) for span in spans],
        "logprobs": logprobs,
        "policy_versions": [[version, len(list(run))] for version, run in groupby(versions)],
    }


def trajectory_from_dict(values: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory for the values of `trajectory_to_dict`.

    Raises:
        DataError: the values are not those of a trajectory.
    """
    try:
        turns = [_turn_from_dict(turn) for turn in values["turns"]]
        segments = [_segment_from_dict(segment) for segment in values["segments"]]
        for turn in turns:
            if turn.result is not None and turn.answer is None:
                segments[turn.segment].rewards[turn.end - 1] = turn.result.reward
        numbers = [values["attempt"], values["wait_s"]]
        began_s = [values.get("began_s"), *(turn.began_s for turn in turns)]
        numbers += [seconds for seconds in began_s if seconds is not None]
        for turn in turns:
            numbers += [turn.generate_s, turn.step_s, turn.num_cached_tokens]
            numbers += (
                [] if turn.answer is None else [turn.num_tokens, turn.num_input_tokens, turn.answer.cost_usd or 0]
            )
            if turn.result is not None:
                given = [turn.result.score, *turn.result.info.values()]
                numbers += [value for value in given if isinstance(value, int | float)]
        if not all(map(math.isfinite, numbers)):  # OverflowError for an int that no float holds
            raise ValueError("a number that is not finite")
        task = {key: value for key, value in values["task"].items() if key != "num_images"}
        stop_reason = values["stop_reason"]
        return Trajectory(
            Task(**task),
            values["max_length"],
            values["episode_id"],
            values["group_id"],
            values["attempt"],
            values["seed"],
            segments,
            turns,
            stop_reason=None if stop_reason is None else StopReason(stop_reason),
            error=EpisodeError(**values["error"]) if values["error"] else None,
            wait_s=values["wait_s"],
            prompt=task["prompt"] if values["prompt"] is None else values["prompt"],
            tools=tuple(values["tools"]),
            refusals=dict(values.get("refusals", {})),
            refusal_reasons=dict(values.get("refusal_reasons", {})),
            began_s=values.get("began_s"),
            retried=list(values.get("retried", ())),
        )
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"trajectory_from_dict: expected the values of a trajectory, got {error!r:.300}. "
            "Read records with the agentenv version that wrote them."
        ) from error


def _turn_from_dict(values: Mapping[str, Any]) -> Turn:
    result = values["result"]
    if result is not None:
        result = {key: value for key, value in result.items() if key != "num_images"}
        sampling = result["sampling"]
        if sampling is not None:
            stops = {"stop": tuple(sampling["stop"]), "stop_token_ids": tuple(sampling["stop_token_ids"])}
            result["sampling"] = SamplingParams(**{**sampling, **stops})
        result = StepResult(**result)
    answer = values.get("answer")
    if answer is not None:
        answer = Answer(**{**answer, "tool_calls": tuple(answer["tool_calls"])})
    turn = Turn(**{**values, "result": result, "answer": answer})
    if turn.forced is not None:
        turn.forced = tuple(map(int, turn.forced))
        if not all(0 <= index < turn.end - turn.start for index in turn.forced):
            raise ValueError(f"forced tokens {turn.forced} outside of an action")
    return turn


def decode_episode(episode: bytes) -> Trajectory:
    """Return the trajectory for the bytes of an episode's value.

    Raises:
        DataError: they are not those of a trajectory.
    """
    try:
        values = json.loads(episode)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"decode_episode: expected the values of a trajectory, got {type(error).__name__}: {error}, in "
            f"{episode[:60]!r}. Read records with the agentenv version that wrote them."
        ) from error
    return trajectory_from_dict(values)


def _segment_from_dict(values: Mapping[str, Any]) -> Segment:
    token_ids = array("i", values["token_ids"])
    num = len(token_ids)
    segment = Segment(
        token_ids,
        bytearray(num),
        array("f", bytes(4 * num)),
        array("i", [NO_VERSION]) * num,
        array("f", bytes(4 * num)),
    )
    logprobs = array("f", [math.nan if value is None else float(value) for value in values["logprobs"]])
    versions = array("i", [version for version, count in values["policy_versions"] for _ in range(count)])
    done = 0
    for start, end in values["action_spans"]:
        size = end - start
        if not 0 <= start < end <= num or len(logprobs) < done + size or len(versions) < done + size:
            raise ValueError(f"action span [{start}, {end}] does not fit {num} tokens and {len(logprobs)} logprobs")
        segment.action_mask[start:end] = b"\x01" * size
        segment.logprobs[start:end] = logprobs[done : done + size]
        segment.policy_versions[start:end] = versions[done : done + size]
        done += size
    return segment


def encode_line(trajectory: Trajectory) -> bytes:
    """Return the line of a trajectory in `trajectories.jsonl`.

    Raises:
        DataError: the trajectory has values that JSON does not support, such as a list that contains itself.
    """
    try:
        episode = _encode(trajectory_to_dict(trajectory)).encode("ascii")
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise DataError(
            f"episode {trajectory.episode_id}: expected values that JSON supports, "
            f"got {type(error).__name__}: {error}. "
            "Put plain numbers, text, lists and dicts into label, metadata, observation and info."
        ) from error
    line = b'{"v":%d,"crc":"%08x","episode":%b}\n' % (SCHEMA_VERSION, zlib.crc32(episode, SCHEMA_VERSION), episode)
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"episode {trajectory.episode_id}: expected a record of at most {MAX_LINE_BYTES} bytes, got {len(line)}. "
            "Shorten observations or metadata."
        )
    return line


class LineParts(NamedTuple):
    """A line of `trajectories.jsonl` whose checksum is right."""

    crc: str
    start: int
    """`line[start:end]` is the episode's value, as JSON."""
    end: int


def split_line(line: bytes) -> LineParts | None:
    """Return the parts of a line of `trajectories.jsonl`; None for a broken line.

    Raises:
        DataError: the line is whole and has another schema.
    """
    head = _HEAD.match(line)
    end = len(line) - 2 if line.endswith(b"}\n") else len(line.rstrip(b"\r\n")) - 1
    if head is None or line[end : end + 1] != b"}":
        return None
    version, start = int(head[1]), head.end()
    if zlib.crc32(memoryview(line)[start:end], version) != int(head[2], 16):
        return None
    if version != SCHEMA_VERSION:
        raise DataError(
            f"trajectories.jsonl: expected records of schema version {SCHEMA_VERSION}, got {version}. "
            "Read them with the agentenv that wrote them."
        )
    return LineParts(head[2].decode(), start, end)


def crc_of(line: bytes) -> str:
    """Return the checksum that a line of `encode_line` has."""
    head = _HEAD.match(line)
    assert head is not None
    return head[2].decode()


def decode_line(line: bytes) -> bytes | None:
    """Return the bytes of the episode's value in a line of `trajectories.jsonl`; None and errors as `split_line`."""
    parts = split_line(line)
    return None if parts is None else line[parts.start : parts.end]
