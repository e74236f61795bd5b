"""Observations of Gymnasium spaces as text, and the masks of legal actions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from agentenv.errors import ConfigError
from agentenv.gym.parsing import Names, first_name

MAX_NUMBERS = 256
"""Maximum numbers in one observation; larger ones, such as pixels, need `render`."""
_MARKED = re.compile(r"\x1b\[[\d;]*?(?<![\d])(?:4[0-7]|10[0-7]|7)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


def plain(text: str) -> str:
    """Remove a terminal picture's escapes; put text with a background color, such as a map's player, in brackets."""
    return _ESCAPE.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")


def describe(value: Any, space: Any) -> str:
    """Return an observation as text: texts unchanged, numbers with four digits, each part of a Dict on its own line.

    Raises:
        ConfigError: the observation has too many numbers, or its space has no text form.
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
            f"{space}. Pass `render`, a function that returns it as text."
        )
    if array.dtype.kind not in "iufb" or array.size > MAX_NUMBERS:
        raise ConfigError(
            f"from_gymnasium: expected an observation of at most {MAX_NUMBERS} numbers, got {array.size} of {space}. "
            "Pass `render`, a function that returns it as text."
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
    """Return True if an observation is a list of chat messages, each with a role and a content."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value)
    )


def mask_text(info: Mapping[str, Any], space: Any, names: Names) -> str:
    """Describe the legal actions of a Discrete space by `info["action_mask"]`; empty if all are legal or no mask."""
    mask = info.get("action_mask")
    if mask is None or not isinstance(space, spaces.Discrete):
        return ""
    allowed = np.asarray(mask).ravel() != 0
    if allowed.size != int(space.n) or allowed.all():
        return ""
    legal = [first_name(int(space.start) + int(index), names) for index in np.flatnonzero(allowed)]
    return f"Possible now: {', '.join(legal)}." if legal else "No action is possible now."
