"""Episodes as rows of SkyRL's GeneratorOutput.

Source: skyrl/train/generators/base.py (GeneratorOutput, TrajectoryID), skyrl_gym_generator.py
(`_build_per_token_rewards`) and utils.py (`apply_overlong_filtering`), 0.3.0 of 2026-08-21 (a956457). The output is one
dict of lists: `agentenv.interop.columns` of these rows. Rewards are per token, at the last token of each action that
the policy chose, since estimators skip tokens off the mask; that of an action without any goes to the action before it.
Rows of one episode stay next to each other, and the last of them has `is_last_step`. `rollout_logprobs` is None for a
row with a missing one: omit the whole column then. A failed episode is refused. Lost: policy versions, and why the
episode ended except for "length".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.interop._records import Record, joined, records

_WHERE = "interop.skyrl"


def to_records(trajectory: Trajectory, *, trajectory_id: Any = None) -> list[dict[str, Any]]:
    """Return one row for each segment; `trajectory_id` is the one that the generator's input has for this episode.

    Raises:
        DataError: the episode failed or is still running.
    """
    return [
        {
            "prompt_token_ids": record.prompt_ids,
            "response_ids": record.response_ids,
            "rewards": _on_choices(record),
            "loss_masks": record.response_mask,
            "stop_reasons": record.finish_reason,
            "rollout_logprobs": record.response_logprobs,
            "trajectory_ids": trajectory_id,
            "is_last_step": record.segment == (record.num_segments or 0) - 1,
        }
        for record in records(trajectory, _WHERE)
    ]


def _on_choices(record: Record) -> list[float]:
    """Return the rewards [R], each moved back to the nearest token that the policy chose, if there is one."""
    moved, place, mask = [0.0] * len(record.response_ids), None, record.response_mask
    for at, reward in enumerate((record.rewards or [])[record.num_prompt :]):
        place = at if mask[at] else place
        moved[at if place is None else place] += reward
    return moved


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return Records of rows; a reward that is one number is the episode's.

    Raises:
        DataError: lists have unequal lengths.
    """
    read = []
    for row in rows:
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
        read.append(Record(**fields, reward=None if per_token is not None or rewards is None else float(rewards)))
    return read
