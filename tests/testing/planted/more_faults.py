"""Further planted faults, one for each class of fault that a blind test of `check` and `audit` did not find.

`found` is as in `faults.py`.
"""

import contextlib
import json
import re

from tests.testing.planted.faults import Sum

# --- actions that parsers do not expect -------------------------------------------------------------------------------


class ReadsDigits(Sum):
    """`isdigit` is true for a superscript, which `int` refuses."""

    found = "contract"

    def right(self, text, states):
        said = text.strip()[:9]
        return said.isdigit() and int(said) == int(states["label"])


class ReadsDigitsBehindTheMark(Sum):
    found = "hostile-error"

    def right(self, text, states):
        said = text.rpartition("####")[2].strip()[:9]
        return "####" in text and said.isdigit() and int(said) == int(states["label"])


class ReadsAnObject(Sum):
    """JSON may be something else."""

    found = "contract"

    def right(self, text, states):
        with contextlib.suppress(ValueError, RecursionError):
            return str(json.loads(text[:99]).get("answer")) == states["label"]
        return False

    async def gold(self, states):
        return json.dumps({"answer": int(states["label"])})


class ReadsAListInAFence(Sum):
    found = "contract"

    def right(self, text, states):
        said = re.search(r"```json\n(.*?)\n```", text[:99], re.DOTALL)
        with contextlib.suppress(ValueError, RecursionError, KeyError):
            return said is not None and str(json.loads(said[1])["answer"]) == states["label"]
        return False


class ReadsTheValue(Sum):
    """A value of an object has another type."""

    found = "contract"

    def right(self, text, states):
        try:
            said = json.loads(text[:99])
        except (ValueError, RecursionError):
            return False
        return isinstance(said, dict) and "answer" in said and said["answer"].strip() == states["label"]

    async def gold(self, states):
        return json.dumps({"answer": states["label"]})


PLANTED = [cls for cls in vars().copy().values() if isinstance(cls, type) and "found" in vars(cls)]
