"""Episodes as verifiers' TrajectorySteps, which prime-rl trains on: one step for each action.

Source: verifiers/legacy/types.py (TrajectoryStep, TrajectoryStepTokens), 2026-08-21 (a60a606); in 0.3.0 the file is
verifiers/types.py. A step's prompt is all that stands before its action, so inside a segment each prompt begins with
the one before and its completion. `is_truncated` is of the step, not of the episode. A failed episode is refused: a
step's reward of None means that it is still to be graded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from agentenv.errors import DataError
from agentenv.interop.records import Decode, Record, facts, joined, records, required_logprobs
from agentenv.trajectory import Trajectory
from agentenv.types import Message

_WHERE = "interop.verifiers"
_SHARED = ("stop_reason", "finish_reason", "episode_id", "segment", "num_segments")


def to_records(trajectory: Trajectory, *, decode: Decode) -> list[dict[str, Any]]:
    """A step for each action; `prompt` and `completion` are messages, text where the conversation has a piece of text.

    `extras` has policy versions of the completion, and where in the episode the step belongs.

    Raises:
        DataError: the episode failed or still runs, or a log-probability is missing.
    """
    steps, turns = [], iter(zip(trajectory.turns, _prompts(trajectory, decode), strict=True))
    for record in records(trajectory, _WHERE):
        for span in record.spans:
            turn, prompt = next(turns)
            completion = turn.action if isinstance(prompt, str) else [{"role": "assistant", "content": turn.action}]
            is_truncated = turn.finish_reason == "length"
            steps.append(
                {
                    "prompt": prompt,
                    "completion": completion,
                    "response": None,
                    "tokens": {**_tokens(record, span), "is_truncated": is_truncated},
                    "reward": None if record.rewards is None else record.rewards[span[1] - 1],
                    "advantage": None,
                    "is_truncated": is_truncated,
                    "trajectory_id": trajectory.episode_id,
                    "extras": _extras(record, span),
                }
            )
    return steps


def _prompts(trajectory: Trajectory, decode: Decode) -> Iterator[str | list[Message]]:
    """What stands before each action."""
    as_text = trajectory.messages is None
    for index, turn in enumerate(trajectory.turns):
        before = replace(trajectory, turns=trajectory.turns[:index]).messages
        ids = trajectory.segments[turn.segment].token_ids[: turn.start]
        yield decode(ids) if as_text or before is None else before


def _tokens(record: Record, span: tuple[int, int]) -> dict[str, Any]:
    start, end = span
    return {
        "prompt_ids": record.token_ids[:start],
        "prompt_mask": [0] * start,
        "completion_ids": record.token_ids[start:end],
        "completion_mask": [1] * (end - start),
        "completion_logprobs": required_logprobs(record, _WHERE)[start:end],
        "overlong_prompt": False,
        "routed_experts": None,
    }


def _extras(record: Record, span: tuple[int, int]) -> dict[str, Any]:
    versions, known = record.policy_versions, facts(record)
    return {
        "policy_versions": None if versions is None else versions[slice(*span)],
        "reward": record.reward,
        **{key: known[key] for key in _SHARED},
    }


def from_records(steps: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records of one rollout's steps, one for each segment; foreign steps are one segment while each extends the last.

    Raises:
        DataError: a step has no tokens.
    """
    if any(step.get("tokens") is None for step in steps):
        raise DataError(f"{_WHERE}: expected steps with tokens, got one without. Let the client return token ids.")
    numbers: list[int] = []
    for i, step in enumerate(steps):
        extends = i > 0 and step["tokens"]["prompt_ids"][: len(_ids(steps[i - 1]))] == _ids(steps[i - 1])
        numbers.append(numbers[-1] if extends else len(numbers) and numbers[-1] + 1)
    keys = [(step.get("extras") or {}).get("segment", number) for step, number in zip(steps, numbers, strict=True)]
    grouped = groupby(zip(keys, steps, strict=True), key=lambda pair: pair[0])
    return [_from_steps([step for _, step in group]) for _, group in grouped]


def _ids(step: Mapping[str, Any]) -> list[int]:
    return [*step["tokens"]["prompt_ids"], *step["tokens"]["completion_ids"]]


def _from_steps(steps: Sequence[Mapping[str, Any]]) -> Record:
    last, extras = _ids(steps[-1]), steps[-1].get("extras") or {}
    first = len(steps[0]["tokens"]["prompt_ids"])
    size = len(last) - first
    spans, logprobs, versions = [], [0.0] * size, [-1] * size
    for step in steps:
        span = slice(len(step["tokens"]["prompt_ids"]) - first, len(_ids(step)) - first)
        spans.append([span.start, span.stop])
        logprobs[span] = step["tokens"]["completion_logprobs"]
        versions[span] = (step.get("extras") or {}).get("policy_versions") or versions[span]
    rewards = [step.get("reward") for step in steps]
    more = {
        **{key: extras.get(key) for key in _SHARED},
        "turn_spans": spans,
        "turn_scores": None if None in rewards else rewards,
        "policy_versions": versions if extras.get("policy_versions") else None,
    }
    fields = joined(last[:first], last[first:], None, logprobs=logprobs, more=more)
    return Record(**fields, reward=extras.get("reward"))
