"""Episodes as slime's Samples, in the form of `Sample.to_dict`.

Source: slime/utils/types.py (Sample) and slime/ray/rollout.py, 0.3.1 of 2026-08-21 (624b824). `weight_versions` has one
text for each generation, its newest weights; the versions of each token are in `metadata`. A failed episode has
`remove_sample`, the status "aborted" and no reward: slime samples its prompt again. With the status "failed", slime
would call its own reward model for the missing reward. `metadata` has the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.interop._records import Decode, Record, facts, joined, records, turns_of
from agentenv.interop.hosted import FAILURE_IDIOMS

_WHERE = "interop.slime"


def to_records(trajectory: Trajectory, *, decode: Decode) -> list[dict[str, Any]]:
    """Return fields of a Sample, one dict for each segment; `rollout_log_probs` is None if one is missing.

    The caller sets `index`, `group_index` and `rollout_id`; `rollout_id` must be the same for all segments of an
    episode.

    Raises:
        DataError: the episode is still running.
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
            "weight_versions": [str(max((record.policy_versions or [])[start:end])) for start, end in record.spans],
            "rollout_log_probs": record.response_logprobs,
            "remove_sample": record.reward is None,
            "status": _status(record),
            "metadata": facts(record),
            "non_generation_time": sum(turn.step_s for turn in turns_of(trajectory, record)),
        }
        for record in records(trajectory, _WHERE, keep_failed=True)
    ]


def _status(record: Record) -> str:
    if record.reward is None:
        return FAILURE_IDIOMS["slime"].value
    return "truncated" if record.truncated else "completed"


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return Records of Samples as dicts; foreign ones lack the facts of our `metadata`.

    Raises:
        DataError: lists have unequal lengths.
    """
    read = []
    for row in rows:
        size, metadata = row["response_length"], row.get("metadata") or {}
        start = len(row["tokens"]) - size
        mask = [1] * size if row.get("loss_mask") is None else row["loss_mask"]
        fields = joined(
            row["tokens"][:start], row["tokens"][start:], mask, logprobs=row.get("rollout_log_probs"), more=metadata
        )
        if fields["truncated"] is None:
            fields["truncated"] = row.get("status") == "truncated"
        read.append(Record(**fields, reward=None if row.get("remove_sample", False) else row.get("reward")))
    return read
