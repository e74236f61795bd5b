"""Episodes as verifiers' TrajectorySteps, on which prime-rl trains: one step for each action.

Source: verifiers/legacy/types.py (TrajectoryStep, TrajectoryStepTokens), 2026-08-21 (a60a606); in 0.3.0 the file is
verifiers/types.py. A step's prompt is everything before its action, so inside a segment each prompt begins with the
previous prompt and completion. `is_truncated` describes the step, not the episode. A failed episode is refused: a step
with a reward of None is still to be graded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.core.views import messages_of
from agentenv.errors import DataError
from agentenv.interop._records import Decode, Record, facts, joined, records, required_logprobs

_WHERE = "interop.verifiers"
_SHARED = ("stop_reason", "finish_reason", "episode_id", "segment", "num_segments")


def to_records(trajectory: Trajectory, *, decode: Decode) -> list[dict[str, Any]]:
    """Return a step for each action; `prompt` and `completion` are messages, or text if the conversation is plain text.

    `extras` has the completion's policy versions, and the step's place in the episode.

    Raises:
        DataError: the episode failed or is still running, or a log-probability is missing.
    """
    steps, turns, is_text = [], enumerate(trajectory.turns), messages_of(trajectory) is None
    for record in records(trajectory, _WHERE):
        versions, known = record.policy_versions, facts(record)
        for start, end in record.spans:
            index, turn = next(turns)
            before = messages_of(replace(trajectory, turns=trajectory.turns[:index]))
            prompt = decode(record.token_ids[:start]) if is_text or before is None else before
            completion = turn.action if isinstance(prompt, str) else [{"role": "assistant", "content": turn.action}]
            is_truncated = turn.finish_reason == "length"
            steps.append(
                {
                    "prompt": prompt,
                    "completion": completion,
                    "response": None,
                    "tokens": {
                        "prompt_ids": record.token_ids[:start],
                        "prompt_mask": [0] * start,
                        "completion_ids": record.token_ids[start:end],
                        "completion_mask": record.mask[start:end],
                        "completion_logprobs": required_logprobs(record, _WHERE)[start:end],
                        "overlong_prompt": False,
                        "routed_experts": None,
                        "is_truncated": is_truncated,
                    },
                    "reward": None if record.rewards is None else record.rewards[end - 1],
                    "advantage": None,
                    "is_truncated": is_truncated,
                    "trajectory_id": trajectory.episode_id,
                    "extras": {
                        "policy_versions": None if versions is None else versions[start:end],
                        "reward": record.reward,
                        **{key: known[key] for key in _SHARED},
                    },
                }
            )
    return steps


def from_records(steps: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return Records of one rollout's steps, one for each segment; foreign steps start one if they extend no other.

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
    read = []
    for _, pairs in groupby(zip(keys, steps, strict=True), key=itemgetter(0)):
        group = [step for _, step in pairs]
        last, extras = _ids(group[-1]), group[-1].get("extras") or {}
        first = len(group[0]["tokens"]["prompt_ids"])
        size = len(last) - first
        spans, logprobs, versions, forced = [], [0.0] * size, [-1] * size, list[int]()
        for step in group:
            span = slice(len(step["tokens"]["prompt_ids"]) - first, len(_ids(step)) - first)
            spans.append([span.start, span.stop])
            forced += [span.start + at for at, one in enumerate(step["tokens"]["completion_mask"]) if not one]
            logprobs[span] = step["tokens"]["completion_logprobs"]
            versions[span] = (step.get("extras") or {}).get("policy_versions") or versions[span]
        rewards = [step.get("reward") for step in group]
        more = {
            **{key: extras.get(key) for key in _SHARED},
            "turn_spans": spans,
            "forced_tokens": forced,
            "turn_scores": None if None in rewards else rewards,
            "policy_versions": versions if extras.get("policy_versions") else None,
        }
        fields = joined(last[:first], last[first:], None, logprobs=logprobs, more=more)
        read.append(Record(**fields, reward=extras.get("reward")))
    return read


def _ids(step: Mapping[str, Any]) -> list[int]:
    return [*step["tokens"]["prompt_ids"], *step["tokens"]["completion_ids"]]
