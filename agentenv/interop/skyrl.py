"""Episodes as rows of SkyRL's GeneratorOutput.

Source: skyrl/train/generators/base.py (GeneratorOutput, TrajectoryID), skyrl_gym_generator.py
(`_build_per_token_rewards`) and utils.py (`apply_overlong_filtering`), 0.3.0 of 2026-08-21 (a956457). The output is
one dict of lists: `records.columns` of these rows. Rewards stand per token, at the last token of each action; rows of
one episode stay next to each other and the last of them has `is_last_step`. `rollout_logprobs` is None for a row where
one is missing: leave the whole column out then. A failed episode is refused. Lost: policy versions, and why the episode
ended but for "length".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.interop.records import Record, joined, records
from agentenv.trajectory import Trajectory

_WHERE = "interop.skyrl"


def to_records(trajectory: Trajectory, *, trajectory_id: Any = None) -> list[dict[str, Any]]:
    """One row for each segment; `trajectory_id` is the one that the generator's input has for this episode.

    Raises:
        DataError: the episode failed or still runs.
    """
    return [
        {
            "prompt_token_ids": record.prompt_ids,
            "response_ids": record.response_ids,
            "rewards": (record.rewards or [])[record.num_prompt :],
            "loss_masks": record.response_mask,
            "stop_reasons": record.finish_reason,
            "rollout_logprobs": record.response_logprobs,
            "trajectory_ids": trajectory_id,
            "is_last_step": record.segment == (record.num_segments or 0) - 1,
        }
        for record in records(trajectory, _WHERE)
    ]


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records of rows; a reward that is one number is the episode's.

    Raises:
        DataError: lists of unequal length.
    """
    return [_from_record(row) for row in rows]


def _from_record(row: Mapping[str, Any]) -> Record:
    rewards = row.get("rewards")
    per_token = rewards if isinstance(rewards, Sequence) else None
    fields = joined(
        row["prompt_token_ids"],
        row["response_ids"],
        row["loss_masks"],
        logprobs=row.get("rollout_logprobs"),
        rewards=per_token,
        more={"finish_reason": row.get("stop_reasons")},
    )
    return Record(**fields, reward=None if per_token is not None or rewards is None else float(rewards))
