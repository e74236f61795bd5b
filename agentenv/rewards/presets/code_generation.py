"""A reward function for code: OpenRLHF's `--remote_rm_url` form.

The rewards are those of the guide to OpenRLHF's custom rewards: 1.0 when all tests pass, 0.3 when some do, 0.0 when
none does, -0.5 for a program that runs out of time, -1.0 for one that cannot be loaded or is none. The guide takes the
word "passed" in the output of pytest on the model's own file for a pass; here the tests are the label's, which the
program never sees, and each must be seen to pass. Where the sandbox fails there is no reward: it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.openrlhf_rewards import as_answer
from agentenv.rewards.code import CodeReward
from agentenv.rewards.presets._answers import answers, judged

LIMIT_S = 600.0
"""For all tests of an answer; each has limits of its own."""


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """Rewards, scores in [0, 1] and logs, each a float tensor of shape [number of queries].

    Args:
        queries: prompt and answer, as one text each.
        prompts: the prompts alone.
        labels: the tests, in any form that `agentenv.rewards.code.forms` knows, as JSON.

    Raises:
        InfraError: the sandbox failed, so that nothing is known of a program.
        DataError: a label holds no tests.
    """
    results = judged(CodeReward(scale="guide"), answers(queries, prompts, labels), limit_s=LIMIT_S)
    rewards = [result.reward for result in results]
    logs = {
        "code_correctness": rewards,
        "correct": [result.components["all_passed"] for result in results],
        "passed_share": [result.components["passed_share"] for result in results],
    }
    return as_answer(rewards, [((result.reward or 0.0) + 1.0) / 2.0 for result in results], logs)
