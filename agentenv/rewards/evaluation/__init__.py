"""What a reward model is worth: read `rows.py` (the data), `rewardbench.py` (the rules), then `evaluate.py`.

`tables.py` says what came out, `check.py` finds the traps of one model before.
"""
