"""Known problems of reasoning-gym 0.1.25's datasets that affect their scores; measured, not copied."""

from __future__ import annotations

EXECUTED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Their scorers pass the answer to `eval`, or to sympy's `parse_expr`, which uses `eval`: see `data_only.py`."""

REPAIRED = {
    "puzzle24": "its scorer ignores the given numbers and rounds: 6*4*1*1 solves every item",
    "countdown": "its scorer takes 12.5 for the numbers 12 and 5",
    "coin_flip": "its scorer takes 0 for most probabilities",
    "complex_arithmetic": "its scorer takes nan for every number",
    "game_of_life_halting": "its scorer takes any text for right",
    "propositional_logic": "its scorer takes a repeated premise of the question for a conclusion",
}
"""Datasets with a trivial way to the full score; `repairs.py` requires more."""

CHANCE = {
    "syllogism": 0.72, "circuit_logic": 0.61, "course_schedule": 0.56, "isomorphic_strings": 0.54, "ransom_note": 0.52,
    "game_of_life_halting": 0.51, "shortest_path": 0.39, "acre": 0.38, "mahjong_puzzle": 0.37, "self_reference": 0.37,
    "letter_counting": 0.36, "rotten_oranges": 0.36, "maze": 0.34, "gcd": 0.32,
}  # fmt: skip
"""Share of 300 items that the best constant answer solves, if it is 0.3 or more, at the default difficulty."""

SCORED_BY_CONFIG = frozenset({"decimal_arithmetic", "polynomial_equations", "puzzle24", "time_intervals"})
"""Their scorers read the settings that generated an item, so these settings are stored with the item."""

BY_TASK_ID = frozenset({"arc_agi", "rearc"})
"""Their items are variations of a few hundred puzzles: variations of one puzzle share a `task_id`."""
