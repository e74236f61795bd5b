"""Episodes as NeMo RL's samples: a message_log with tokens, and what its rollouts put beside it.

Source: nemo_rl/data/interfaces.py (DatumSpec, LLMMessageLogType), nemo_rl/experience/rollouts.py and
nemo_rl/algorithms/grpo.py (add_grpo_token_loss_masks_and_generation_logprobs), 0.6.0 of 2026-08-22 (7ea279a). It wants
tensors where these are lists. A token is learned from when its message is an assistant's with `generation_logprobs`;
NeMo RL fills missing ones with zeros, so they are refused here. A failed episode has `loss_multiplier` 0.0 and no
`total_reward`: a number would still count in the group's baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.interop.records import Decode, Record, facts, joined, records, required_logprobs
from agentenv.trajectory import Trajectory

_WHERE = "interop.nemo_rl"


def to_records(trajectory: Trajectory, *, decode: Decode) -> list[dict[str, Any]]:
    """One sample for each segment: a message for the prompt, each action and whatever stands between two of them.

    `extra_env_info` has the facts that NeMo RL has no key for.

    Raises:
        DataError: the episode still runs, or a log-probability is missing.
    """
    return [_to_record(record, decode) for record in records(trajectory, _WHERE, keep_failed=True)]


def _to_record(record: Record, decode: Decode) -> dict[str, Any]:
    failed = record.reward is None
    return {
        "message_log": _messages(record, decode),
        "length": len(record.token_ids),
        "loss_multiplier": 0.0 if failed else 1.0,
        "total_reward": record.reward,
        "truncated": record.truncated,
        "extra_env_info": facts(record),
    }


def _messages(record: Record, decode: Decode) -> list[dict[str, Any]]:
    known = record.reward is not None or record.logprobs is not None
    logprobs = required_logprobs(record, _WHERE) if known else None
    messages, end = [], 0
    for start, after in [*record.spans, (len(record.token_ids),) * 2]:
        if start > end:
            messages.append(_message("environment" if end else "user", record.token_ids[end:start], decode))
        if after > start:
            action = _message("assistant", record.token_ids[start:after], decode)
            messages.append(action if logprobs is None else {**action, "generation_logprobs": logprobs[start:after]})
        end = after
    return messages


def _message(role: str, token_ids: list[int], decode: Decode) -> dict[str, Any]:
    return {"role": role, "content": decode(token_ids), "token_ids": token_ids}


def from_records(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records of samples; each message of an assistant's is an action, the last of which ends the tokens."""
    return [_from_record(row) for row in rows]


def _from_record(row: Mapping[str, Any]) -> Record:
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int]] = []
    complete = True
    for message in row["message_log"]:
        start, num = len(token_ids), len(message["token_ids"])
        token_ids += message["token_ids"]
        sampled = message["role"] == "assistant"
        spans += [(start, start + num)] if sampled else []
        complete &= not sampled or "generation_logprobs" in message
        logprobs += message.get("generation_logprobs", [0.0] * num) if sampled else [0.0] * num
    first, last = (spans[0][0], spans[-1][1]) if spans else (len(token_ids),) * 2
    ours = {"turn_spans": [[start - first, end - first] for start, end in spans], **(row.get("extra_env_info") or {})}
    fields = joined(token_ids[:first], token_ids[first:last], None, more=ours)
    failed = not row.get("loss_multiplier", 1.0)
    return replace(
        Record(**fields),
        logprobs=logprobs[:last] if complete else None,
        reward=None if failed else row.get("total_reward"),
        truncated=row.get("truncated"),
    )
