"""Episodes as NeMo RL's samples: a message_log with tokens, and the keys that its rollouts add.

Source: nemo_rl/data/interfaces.py (DatumSpec, LLMMessageLogType), nemo_rl/experience/rollouts.py and
nemo_rl/algorithms/grpo.py (add_grpo_token_loss_masks_and_generation_logprobs), 0.6.0 of 2026-08-22 (7ea279a). NeMo RL
expects tensors where these are lists. It trains on a token if its message is an assistant's with `generation_logprobs`;
it fills missing ones with zeros, so they are refused here. A failed episode has `loss_multiplier` 0.0 and no
`total_reward`: a number would still count in the group's baseline.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.interop._records import Decode, facts, records, required_logprobs

_WHERE = "interop.nemo_rl"


def to_records(trajectory: Trajectory, *, decode: Decode) -> list[dict[str, Any]]:
    """Return one sample for each segment: a message for the prompt, each action and the tokens between two of them.

    `extra_env_info` has the facts for which NeMo RL has no key.

    Raises:
        DataError: the episode is still running, or a log-probability is missing.
    """
    samples = []
    for record in records(trajectory, _WHERE, keep_failed=True):
        known = record.reward is not None or record.logprobs is not None
        logprobs = required_logprobs(record, _WHERE) if known else None
        messages, end = [], 0
        for start, after in [*record.spans, (len(record.token_ids),) * 2]:
            if start > end:
                messages.append(_message("environment" if end else "user", record.token_ids[end:start], decode))
            # What the policy chose, and what a constraint forced, which is not trained on.
            changes = [at for at in range(start + 1, after) if (at in record.forced) != (at - 1 in record.forced)]
            for first, last in pairwise([start, *changes, after] if start < after else ()):
                role = "environment" if first in record.forced else "assistant"
                message = _message(role, record.token_ids[first:last], decode)
                if role == "assistant" and logprobs is not None:
                    message["generation_logprobs"] = logprobs[first:last]
                messages.append(message)
            end = after
        sample = {
            "message_log": messages,
            "length": len(record.token_ids),
            "loss_multiplier": 0.0 if record.reward is None else 1.0,
            "total_reward": record.reward,
            "truncated": record.truncated,
            "extra_env_info": facts(record),
        }
        samples.append(sample)
    return samples


def _message(role: str, token_ids: list[int], decode: Decode) -> dict[str, Any]:
    return {"role": role, "content": decode(token_ids), "token_ids": token_ids}
