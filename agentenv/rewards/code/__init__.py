r"""Programs as answers: which one a response commits to, the tests of a row, and what passing them is worth.

    reward = CodeReward()
    label = {"entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]}
    result = await reward.grade(Response("```python\ndef add(a, b):\n    return a + b\n```", label))
    assert result.reward == 1.0

The programs run in `agentenv.sandbox`, and are judged as `agentenv.sandbox.grading` says: outside of what runs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentenv.rewards.code.extract import extract_code
    from agentenv.rewards.code.forms import code_task, form_of
    from agentenv.rewards.code.phases import grade_in_turn, passed_share
    from agentenv.rewards.code.reward import CodeReward
    from agentenv.rewards.code.shared import shared_sandbox
    from agentenv.rewards.code.task import CodeTask

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


def __getattr__(name: str) -> object:
    # When first asked for: its modules import this package themselves.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
