"""Episodes as rows that TRL's GRPOTrainer takes from a `rollout_func`.

Source: trl/trainer/grpo_trainer.py (RolloutFunc, `_generate`, `_generate_and_score_completions`), 1.16.0. The function
returns one dict of lists: `agentenv.interop.columns` of these rows. `env_mask` keeps observations out of the loss. TRL
passes every key that it does not know to the reward functions, one list each, so a reward function only needs to return
`reward`. A failed episode is refused here; `EnvRollout` has a row for it, because every prompt must have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.interop._records import Record, facts, joined, records, required_logprobs

_WHERE = "interop.trl"


def to_records(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return one row for each segment. TRL takes one row for a prompt, so episodes of several segments do not fit.

    Raises:
        DataError: the episode failed or is still running, or a log-probability is missing.
    """
    return [
        {
            "prompt_ids": record.prompt_ids,
            "completion_ids": record.response_ids,
            "logprobs": required_logprobs(record, _WHERE)[record.num_prompt :],
            "env_mask": record.response_mask,
            "reward": record.reward,
            **facts(record),
        }
        for record in records(trajectory, _WHERE)
    ]


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return Records of rows; without an `env_mask` the whole completion is one action.

    Raises:
        DataError: lists have unequal lengths.
    """
    return [
        Record(
            **joined(
                row["prompt_ids"],
                row["completion_ids"],
                row.get("env_mask") or [1] * len(row["completion_ids"]),
                logprobs=row.get("logprobs"),
                more=row,
            ),
            reward=row.get("reward"),
        )
        for row in rows
    ]
