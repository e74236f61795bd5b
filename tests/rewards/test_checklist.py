"""What RM-Gallery's tutorial for verl does wrong, or leaves undefined, row by row, and that each has its named tests.

A test holds a row when its name ends in `row_N`, or has `row_N` or `rows_N_M` in it.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = {
    1: "one group's deadline starts when its work starts, and is its own",
    2: "a stuck thread holds up neither the call nor the end of the process",
    3: "one slow or raising group does not end the batch",
    4: "the plain call works inside of a running event loop",
    5: "rewards that are there already are passed on, with their extra information",
    6: "only the valid ids are decoded",
    7: "the valid length is the attention mask's",
    8: "groups are formed by uid, or by the prompt's ids, never by decoded text",
    9: "different group sizes are an error, a warning or nothing, as chosen",
    10: "a reference joins in validation; the caller's lists are left alone",
    11: "every response is compared with the reference",
    12: "statistics of each group exist and are passed on",
    13: "a reward stands on the last valid token; an empty response has none",
    14: "extra information has the same keys for every sample, at the right places",
    15: "`acc` is there, and its key can be chosen",
    16: "a tensor, or a dict with it and the extra information",
    17: "examples are logged by data source",
    18: "the constructor is the tutorial's, and works without compute_score",
    19: "the composition is 0.95 of principle, 0.05 of format, and penalties",
    20: "INVALID goes through to the total and is in no statistics",
    21: "reward_info has exactly the tutorial's keys",
    22: "the penalty of repeated n-grams has the golden values",
    23: "the principle is judged alone or in its group, in both orders",
    24: "verl finds the manager from outside",
}
_NAME = re.compile(r"^(?:async )?def (\w*rows?_(\d+(?:_(?:and_)?\d+)*)\w*)\(", re.MULTILINE)


def rows_held():
    """The rows that tests, or the checks inside of verl, name."""
    files = [path for folder in ("rewards", "interop", "with_verl") for path in (TESTS / folder).rglob("*.py")]
    named = (match[2] for path in files for match in _NAME.finditer(path.read_text()))
    return {int(row) for rows in named for row in re.findall(r"\d+", rows)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"row {row}: {ROWS[row]}")
def test_a_row_of_the_tutorials_checklist_has_a_named_test(row):
    assert row in rows_held()
