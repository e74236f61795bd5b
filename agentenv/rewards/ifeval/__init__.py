"""IFEval: are the verifiable instructions of a prompt followed? All 25 kinds, in both forms that datasets have.

`IFEvalReward` judges one response, `report` gives the benchmark's figures. `_official.py` holds the rules by
instruction id, `_functions.py` those by open-instruct's function names; both say where they differ from the original.

Example:
    >>> row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    >>> (await IFEvalReward().grade(Response("Short and sweet.", label=row))).reward
    1.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentenv.rewards.ifeval.figures import Accuracy, IFEvalReport, Judgement, report
    from agentenv.rewards.ifeval.instructions import RULES, Instruction, instructions_of, judged
    from agentenv.rewards.ifeval.reward import IFEvalReward

__all__ = [
    "RULES",
    "Accuracy",
    "IFEvalReport",
    "IFEvalReward",
    "Instruction",
    "Judgement",
    "instructions_of",
    "judged",
    "report",
]
_HOME = {
    **dict.fromkeys(("Accuracy", "IFEvalReport", "Judgement", "report"), "figures"),
    **dict.fromkeys(("RULES", "Instruction", "instructions_of", "judged"), "instructions"),
    "IFEvalReward": "reward",
}


def __getattr__(name: str) -> object:
    """Loads a public name when it is first asked for: the modules below import one another through this package."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
