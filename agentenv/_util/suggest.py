"""Suggest the name that a user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", *, cutoff: float = 0.5) -> str:
    """Return " Did you mean '…'?" for the most similar of `names`, or " " and `otherwise` if none is.

    `cutoff` is the least similarity, from 0 to 1.
    """
    by_folded_name = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_folded_name, n=1, cutoff=cutoff)
    if close:
        return f" Did you mean {by_folded_name[close[0]]!r}?"
    return otherwise and f" {otherwise}"
