"""IFEval: check whether the verifiable instructions of a prompt are followed; all 25 kinds, in both dataset forms.

`IFEvalReward` grades one response, `report` computes the benchmark's figures. `official.py` has the rules by
instruction id, `functions.py` those by open-instruct's function names; both document their differences.

Example:
    >>> row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    >>> (await IFEvalReward().grade(Response("Short and sweet.", label=row))).reward
    1.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.rewards.rules.ifeval.figures import Accuracy, IFEvalReport, Judgement, report
    from agentenv.rewards.rules.ifeval.instructions import RULES, Instruction, check_text, instructions_of
    from agentenv.rewards.rules.ifeval.reward import IFEvalReward

__all__ = [
    "RULES",
    "Accuracy",
    "IFEvalReport",
    "IFEvalReward",
    "Instruction",
    "Judgement",
    "check_text",
    "instructions_of",
    "report",
]
_HOMES = {
    "figures": ("Accuracy", "IFEvalReport", "Judgement", "report"),
    "instructions": ("RULES", "Instruction", "check_text", "instructions_of"),
    "reward": ("IFEvalReward",),
}
# Imported on first use, because these modules import one another through this package.
__getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names})
