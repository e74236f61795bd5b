"""Episodes as AReaL's trajectories: parallel lists over the whole sequence.

Source: areal/workflow/multi_turn.py, areal/api/workflow_api.py and areal/trainer/ppo/actor.py, 1.0.4 of 2026-05-21
(4aef98d). AReaL expects each list as a tensor with a leading batch axis of one. `rewards` is one number for a sequence,
which AReaL puts on its last token, so it ends with the last token that the policy chose. A failed episode is refused: a
workflow rejects one by returning None. Lost: forced tokens after that one, rewards per action, and why the episode
ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.errors import DataError
from agentenv.interop._records import Record, records, required_logprobs, runs, up_to_choice

_WHERE = "interop.areal"


def to_records(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return one dict for each segment; log-probabilities are 0.0 and versions -1 off the mask.

    Raises:
        DataError: the episode failed or is still running, or a log-probability is missing.
    """
    return [
        {
            "input_ids": record.token_ids,
            "loss_mask": record.mask,
            "logprobs": required_logprobs(record, _WHERE),
            "versions": record.policy_versions,
            "rewards": record.reward,
            "attention_mask": [True] * len(record.token_ids),
        }
        for record in map(up_to_choice, records(trajectory, _WHERE))
    ]


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return Records of trajectories without padding and without the batch axis.

    Raises:
        DataError: lists have unequal lengths.
    """
    read = []
    for row in rows:
        lists = [row[key] for key in ("input_ids", "loss_mask", "logprobs", "versions")]
        sizes = sorted({len(each) for each in lists})
        if len(sizes) != 1:
            raise DataError(f"{_WHERE}: expected lists of one length, got {sizes}. Cut all of them at the same place.")
        ids, mask, logprobs, versions = map(list, lists)
        read.append(
            Record(
                token_ids=ids, spans=runs(mask), logprobs=logprobs, policy_versions=versions, reward=row.get("rewards")
            )
        )
    return read
