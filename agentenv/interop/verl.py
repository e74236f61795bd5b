"""Episodes as verl's AgentLoopOutput.

Source: verl/experimental/agent_loop/agent_loop.py (AgentLoopOutput, AgentLoopMetrics, _postprocess) and
tool_agent_loop.py, 0.8.0.dev of 2026-01-29 (b178a3c). A failed episode is refused: verl grades a `reward_score` of None
itself, and has no mark for a sample to leave out. It reads from the first sample of a batch whether there are
log-probabilities, so mix no samples with and without. Lost: images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.interop.records import Record, facts, joined, records, turns_of
from agentenv.trajectory import Trajectory

_WHERE = "interop.verl"


def to_records(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Keyword arguments of AgentLoopOutput, one dict for each segment; `response_logprobs` is None when one is missing.

    `extra_fields` has the facts that verl has no key for, rewards per action under its own name `turn_scores`.

    Raises:
        DataError: the episode failed or still runs.
    """
    return [_to_record(record, trajectory) for record in records(trajectory, _WHERE)]


def _to_record(record: Record, trajectory: Trajectory) -> dict[str, Any]:
    turns = turns_of(trajectory, record)
    pauses = sum(after[0] > before[1] for before, after in zip(record.spans, record.spans[1:], strict=False))
    return {
        "prompt_ids": record.prompt_ids,
        "response_ids": record.response_ids,
        "response_mask": record.response_mask,
        "response_logprobs": record.response_logprobs,
        "reward_score": record.reward,
        "num_turns": 1 + len(record.spans) + pauses,  # messages of any role: the prompt, actions, observations
        "metrics": {
            "generate_sequences": sum(turn.generate_s for turn in turns),
            "tool_calls": sum(turn.step_s for turn in turns),
        },
        "extra_fields": facts(record),
    }


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records of AgentLoopOutputs as dicts; of foreign ones without our `extra_fields` less is known.

    Raises:
        DataError: lists of unequal length.
    """
    return [
        Record(
            **joined(
                row["prompt_ids"],
                row["response_ids"],
                row["response_mask"],
                logprobs=row.get("response_logprobs"),
                more=row.get("extra_fields"),
            ),
            reward=row.get("reward_score"),
        )
        for row in rows
    ]
