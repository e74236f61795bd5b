"""Episodes as verl's AgentLoopOutput.

Source: verl/experimental/agent_loop/agent_loop.py (AgentLoopOutput, AgentLoopMetrics, _postprocess) and
tool_agent_loop.py, 0.9.1. A failed episode is refused: verl would grade a `reward_score` of
None itself, and cannot mark a sample as excluded. verl decides by the first sample of a batch if there are
log-probabilities, so do not mix samples with and without them. It puts the reward on the last token, so a response ends
with the last token that the policy chose. Lost: images, and forced tokens after that one.
"""

from __future__ import annotations

from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.interop._records import facts, records, turns_of, up_to_choice

_WHERE = "interop.verl"


def to_records(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return keyword arguments of AgentLoopOutput, one dict for each segment.

    `response_logprobs` is None if one is missing. `extra_fields` has the facts for which verl has no key; rewards per
    action are there under verl's name `turn_scores`.

    Raises:
        DataError: the episode failed or is still running.
    """
    samples = []
    for record in records(trajectory, _WHERE):
        turns = turns_of(trajectory, record)
        pauses = sum(after[0] > before[1] for before, after in zip(record.spans, record.spans[1:], strict=False))
        sent = up_to_choice(record)
        sample = {
            "prompt_ids": sent.prompt_ids,
            "response_ids": sent.response_ids,
            "response_mask": sent.response_mask,
            "response_logprobs": sent.response_logprobs,
            "reward_score": record.reward,
            "num_turns": 1 + len(record.spans) + pauses,  # messages of any role: the prompt, actions, observations
            "metrics": {
                "generate_sequences": sum(turn.generate_s for turn in turns),
                "tool_calls": sum(turn.step_s for turn in turns),
            },
            "extra_fields": facts(sent),
        }
        samples.append(sample)
    return samples
