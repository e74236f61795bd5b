"""A reward function for code: `--reward_func_path` here, `--remote_rm_url` in OpenRLHF.

The rewards follow the guide to OpenRLHF's custom rewards: 1.0 if all tests pass, 0.3 if some do, 0.0 if none does, -0.5
for a program that runs out of time, -1.0 for an answer without a program or with one that cannot be loaded. The guide
searches the output of pytest on the model's own file for the word "passed". Here the tests come from the label, the
program never sees them, and each must pass. If the sandbox fails, the function raises instead of returning a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.interop.openrlhf.answers import answers, grade_or_raise
from agentenv.rewards.models.openrlhf_wire import as_answer
from agentenv.rewards.rules.code.reward import CodeReward

LIMIT_S = 600.0
"""Time for all tests of an answer; each test has its own limits."""


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """Return rewards, scores in [0, 1] and logs, each a float tensor of shape [number of queries].

    Args:
        queries: prompt and answer, as one text each.
        prompts: the prompts alone.
        labels: the tests, as JSON in any form that `agentenv.rewards.rules.code.forms` reads.

    Raises:
        InfraError: the sandbox failed, so that a program's result is unknown.
        DataError: a label has no tests.
    """
    results = grade_or_raise(CodeReward(scale="guide"), answers(queries, prompts, labels), limit_s=LIMIT_S)
    rewards = [result.reward for result in results]
    logs = {
        "code_correctness": rewards,
        "correct": [result.components["all_passed"] for result in results],
        "passed_share": [result.components["passed_share"] for result in results],
    }
    return as_answer(rewards, [((result.reward or 0.0) + 1.0) / 2.0 for result in results], logs)
