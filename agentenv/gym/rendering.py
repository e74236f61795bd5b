"""Observations of Gymnasium spaces in words, and the masks of legal actions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from agentenv.errors import ConfigError
from agentenv.gym.parsing import Names, first_name

MAX_NUMBERS = 256
"""In one observation; more, such as the pixels of a picture, are no text."""
_MARKED = re.compile(r"\x1b\[[\d;]*?(?<![\d])(?:4[0-7]|10[0-7]|7)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


def plain(text: str) -> str:
    """A terminal's picture without escapes: what has a background colour stands in brackets, as a map's player does."""
    return _ESCAPE.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")


def describe(value: Any, space: Any) -> str:
    """An observation in words: texts as they are, numbers with four digits, the parts of a Dict on a line each.

    Raises:
        ConfigError: it has too many numbers, or is of a space that has no words.
    """
    if isinstance(value, str):
        return value
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {describe(value[key], inner)}" for key, inner in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(describe(part, inner) for part, inner in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Sequence):
        parts = list(value) if isinstance(value, list | tuple) else [value]
        return "; ".join(describe(part, space.feature_space) for part in parts[:MAX_NUMBERS]) or "nothing"
    if isinstance(space, spaces.OneOf):
        index, part = value
        return describe(part, space.spaces[int(index)])
    try:
        array = np.asarray(None if isinstance(space, spaces.Graph) else value)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind == "O":
        raise ConfigError(
            f"from_gymnasium: expected an observation of text or numbers, got {' '.join(repr(value).split()):.100} of "
            f"{space}. Give `render`, which puts it in words."
        )
    if array.dtype.kind not in "iufb" or array.size > MAX_NUMBERS:
        raise ConfigError(
            f"from_gymnasium: expected an observation of at most {MAX_NUMBERS} numbers, got {array.size} of {space}. "
            "Give `render`, which puts it in words."
        )
    return _numbers(array)


def _numbers(array: Any) -> str:
    if array.ndim == 0:
        return _number(array.item())
    if array.ndim == 1:
        return "[" + ", ".join(_number(one) for one in array.tolist()) + "]"
    return "\n".join(_numbers(row) for row in array)


def _number(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(int(value))


def is_messages(value: Any) -> bool:
    """Whether an observation is chat messages, each with a role and a content."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value)
    )


def mask_text(info: Mapping[str, Any], space: Any, names: Names) -> str:
    """What `info["action_mask"]` says of a Discrete space's actions; empty without a mask, or where all may be done."""
    mask = info.get("action_mask")
    if mask is None or not isinstance(space, spaces.Discrete):
        return ""
    allowed = np.asarray(mask).ravel() != 0
    if allowed.size != int(space.n) or allowed.all():
        return ""
    said = [first_name(int(space.start) + int(index), names) for index in np.flatnonzero(allowed)]
    return f"Possible now: {', '.join(said)}." if said else "No action is possible now."


def allows(info: Mapping[str, Any], space: Any, action: Any) -> bool:
    """Whether the mask, where there is one, has the action."""
    mask = info.get("action_mask")
    if mask is None or not isinstance(space, spaces.Discrete):
        return True
    allowed = np.asarray(mask).ravel() != 0
    return allowed.size != int(space.n) or bool(allowed[int(action) - int(space.start)])
