r"""Reward programs: find the program in a response, read the tests of a row, run them, and score the result.

    from agentenv.rewards.rules.code.reward import CodeReward

    reward = CodeReward()
    label = {"entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]}
    result = await reward.grade(Response("```python\ndef add(a, b):\n    return a + b\n```", label))
    assert result.reward == 1.0

The programs run in `agentenv.sandbox`; `agentenv.sandbox.grading` checks results outside of the process that runs them.
"""
