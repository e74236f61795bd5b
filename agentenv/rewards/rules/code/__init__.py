r"""Reward programs: find the program in a response, read the tests of a row, run them, and score the result.

    reward = CodeReward()
    label = {"entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]}
    result = await reward.grade(Response("```python\ndef add(a, b):\n    return a + b\n```", label))
    assert result.reward == 1.0

The programs run in `agentenv.sandbox`; `agentenv.sandbox.grading` checks results outside of the process that runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.rewards.rules.code.extract import extract_code
    from agentenv.rewards.rules.code.forms import code_task, form_of
    from agentenv.rewards.rules.code.phases import grade_in_turn, passed_share
    from agentenv.rewards.rules.code.reward import CodeReward
    from agentenv.rewards.rules.code.shared import shared_sandbox
    from agentenv.rewards.rules.code.task import CodeTask

__all__ = [
    "CodeReward",
    "CodeTask",
    "code_task",
    "extract_code",
    "form_of",
    "grade_in_turn",
    "passed_share",
    "shared_sandbox",
]

_HOMES = {
    "extract": ("extract_code",),
    "forms": ("code_task", "form_of"),
    "phases": ("grade_in_turn", "passed_share"),
    "reward": ("CodeReward",),
    "shared": ("shared_sandbox",),
    "task": ("CodeTask",),
}
# Imported on first use, because these modules import this package themselves.
__getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names})
