"""A reward function for mathematics: OpenRLHF's `--remote_rm_url` form.

The rewards are those of the guide to OpenRLHF's custom rewards: 1.0 for the right answer, 0.0 for a wrong one, -0.5
for none, or one that cannot be read. The guide takes the number after the first `=` for the answer and compares floats;
here it is the final answer, compared as mathematics: 1,000 is 1000, and 1/2 is 0.5. Where the grader fails it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.openrlhf_rewards import as_answer
from agentenv.rewards.math import MathReward
from agentenv.rewards.presets._answers import answers, judged

NO_ANSWER = -0.5


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """Rewards, scores (1.0 for the right answer, else 0.0) and logs, each a float tensor of shape [number of queries].

    Args:
        queries: prompt and answer, as one text each.
        prompts: the prompts alone.
        labels: the right answers; of a text with `####` or a box, what stands there.

    Raises:
        DataError: a label is no answer.
        InfraError: the grader failed, so that nothing is known of an answer.
    """
    reward = MathReward(no_answer=NO_ANSWER, parse_error=NO_ANSWER, timeout=NO_ANSWER)
    results = judged(reward, answers(queries, prompts, labels))
    logs = {
        "math_accuracy": [result.components["correct"] for result in results],
        "answer_format_rate": [result.components["has_answer"] for result in results],
    }
    return as_answer([result.reward for result in results], [result.score for result in results], logs)
