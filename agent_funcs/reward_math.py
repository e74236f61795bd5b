"""A reward function for mathematics: `--reward_func_path` here, `--remote_rm_url` in OpenRLHF.

The rewards follow the guide to OpenRLHF's custom rewards: 1.0 for the right answer, 0.0 for a wrong one, -0.5 for a
missing or unreadable one. The guide reads the number after the first `=` and compares floats. Here the final answer
counts, compared as mathematics: 1,000 equals 1000, and 1/2 equals 0.5. If the grader fails, the function raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.interop.openrlhf.answers import answers, grade_or_raise
from agentenv.rewards.models.openrlhf_wire import as_answer
from agentenv.rewards.rules.math.reward import MathReward

NO_ANSWER = -0.5


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """Return rewards, scores (1.0 for the right answer, else 0.0) and logs: float tensors of shape [number of queries].

    Args:
        queries: prompt and answer, as one text each.
        prompts: the prompts alone.
        labels: the right answers; of a text with `####` or a box, the part that it marks.

    Raises:
        DataError: a label is not an answer.
        InfraError: the grader failed, so that an answer's reward is unknown.
    """
    reward = MathReward(no_answer=NO_ANSWER, parse_error=NO_ANSWER, timeout=NO_ANSWER)
    results = grade_or_raise(reward, answers(queries, prompts, labels))
    logs = {
        "math_accuracy": [result.components["correct"] for result in results],
        "answer_format_rate": [result.components["has_answer"] for result in results],
    }
    return as_answer([result.reward for result in results], [result.score for result in results], logs)
