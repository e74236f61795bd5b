"""Episodes as slime's Samples, in the form of `Sample.to_dict`.

Source: slime/utils/types.py (Sample) and slime/ray/rollout.py, 0.3.1 of 2026-08-21 (624b824). `weight_versions` has one
text for each generation, the newest weights in it; those of each token are in `metadata`. A failed episode has
`remove_sample`, status "failed" or "aborted", and no reward: slime masks it, but counts a reward in its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.interop.records import Decode, Record, facts, joined, records, turns_of
from agentenv.trajectory import Trajectory
from agentenv.types import StopReason

_WHERE = "interop.slime"


def to_records(trajectory: Trajectory, *, decode: Decode) -> list[dict[str, Any]]:
    """Fields of a Sample, one dict for each segment; `rollout_log_probs` is None when one is missing.

    `index`, `group_index` and `rollout_id` are the caller's to set, `rollout_id` to one value for all segments of an
    episode.

    Raises:
        DataError: the episode still runs.
    """
    return [
        {
            "prompt": trajectory.task.prompt,
            "tokens": record.token_ids,
            "response": decode(record.response_ids),
            "response_length": len(record.response_ids),
            "label": trajectory.task.label,
            "reward": record.reward,
            "loss_mask": record.response_mask,
            "weight_versions": _versions(record),
            "rollout_log_probs": record.response_logprobs,
            "remove_sample": record.reward is None,
            "status": _status(record),
            "metadata": facts(record),
            "non_generation_time": sum(turn.step_s for turn in turns_of(trajectory, record)),
        }
        for record in records(trajectory, _WHERE, keep_failed=True)
    ]


def _versions(record: Record) -> list[str]:
    return [str(max((record.policy_versions or [])[start:end])) for start, end in record.spans]


def _status(record: Record) -> str:
    if record.stop_reason is StopReason.ABORTED:
        return "aborted"
    if record.reward is None:
        return "failed"
    return "truncated" if record.truncated else "completed"


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records of Samples as dicts; of foreign ones without our `metadata` less is known.

    Raises:
        DataError: lists of unequal length.
    """
    return [_from_record(row) for row in rows]


def _from_record(row: Mapping[str, Any]) -> Record:
    size, metadata = row["response_length"], row.get("metadata") or {}
    start = len(row["tokens"]) - size
    mask = [1] * size if row.get("loss_mask") is None else row["loss_mask"]
    fields = joined(
        row["tokens"][:start], row["tokens"][start:], mask, logprobs=row.get("rollout_log_probs"), more=metadata
    )
    known, removed = fields["truncated"] is not None, row.get("remove_sample", False)
    record = Record(**fields, reward=None if removed else row.get("reward"))
    return record if known else replace(record, truncated=row.get("status") == "truncated")
