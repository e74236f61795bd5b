"""IFEval: check whether the verifiable instructions of a prompt are followed; all 25 kinds, in both dataset forms.

`reward.IFEvalReward` grades one response. `official.py` has the rules by instruction id, `functions.py` those by
open-instruct's function names; both document their differences.

Example:
    >>> row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    >>> (await IFEvalReward().grade(Response("Short and sweet.", label=row))).reward
    1.0
"""
