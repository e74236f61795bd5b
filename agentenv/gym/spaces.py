"""Spaces of the inputs and outputs of language models: any text, chat messages, token ids.

They contain values that Gymnasium's `Text` and `Sequence` refuse: every character, the empty text, a list of dicts;
membership is fast. Vector environments batch them to tuples. `AsyncVectorEnv` with its default `shared_memory=True`
raises an error for them, because text has no fixed size; use `shared_memory=False` or `agentenv.gym.make_vec`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from agentenv.errors import ConfigError

_ALPHABET = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    " \n\t.,:;!?-+*/=_#$%&@()[]{}<>|\\\"'`~^\x00\x1béßñøЖωא中日한ไ€∑√≤→\u200b\u202e\ufffd😀👩\u200d🚀"
)
_PIECES = ("", "0", "-1", "42", "yes", "#### 7", "\\boxed{3}", "<|im_end|>", "<think>", '{"a": 1}', "```python\n")
_SAMPLE_CHARS = 48
_SAMPLE_TOKENS = 32
_ROLES = ("system", "user", "assistant", "tool")


class _Unsized(Space[Any]):
    """A space of values without a fixed size; equal to another one if both are written alike."""

    @property
    def is_np_flattenable(self) -> bool:
        """False: the values have no fixed size."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    __hash__ = None  # type: ignore[assignment]


class AnyText(_Unsized):
    """Texts of at most `max_chars` characters, including the empty text; None allows any length.

    `sample` draws short texts from `np_random`; they include characters that break parsers.
    """

    def __init__(self, max_chars: int | None = None, *, seed: int | np.random.Generator | None = None) -> None:
        self.max_chars = None if max_chars is None else _size("AnyText.max_chars", max_chars, least=0)
        super().__init__(seed=seed)

    def contains(self, x: Any) -> bool:
        """Return True for a text that is short enough."""
        return isinstance(x, str) and (self.max_chars is None or len(x) <= self.max_chars)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return a text of up to 48 characters: letters, symbols, scripts, control characters, typical model output."""
        _refuse_masks("AnyText", mask, probability)
        most = _SAMPLE_CHARS if self.max_chars is None else min(self.max_chars, _SAMPLE_CHARS)
        chars = self.np_random.integers(len(_ALPHABET), size=int(self.np_random.integers(most + 1)))
        piece = _PIECES[int(self.np_random.integers(len(_PIECES)))]
        return ("".join(_ALPHABET[i] for i in chars) + piece)[:most]

    def __repr__(self) -> str:
        return f"AnyText({'' if self.max_chars is None else self.max_chars})"


class Messages(_Unsized):
    """Conversations: a list or tuple of dicts, each with a text `role` and a `content` (text, parts or None)."""

    def __init__(self, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(seed=seed)

    def contains(self, x: Any) -> bool:
        """Return True for a list or tuple of messages."""
        return isinstance(x, list | tuple) and all(map(_is_message, x))

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> list[Mapping[str, Any]]:
        """Return one to four messages with random roles."""
        _refuse_masks("Messages", mask, probability)
        text = AnyText(seed=self.np_random)
        num = 1 + int(self.np_random.integers(4))
        roles = [_ROLES[i] for i in self.np_random.integers(len(_ROLES), size=num)]
        return [{"role": role, "content": text.sample()} for role in roles]

    def __repr__(self) -> str:
        return "Messages()"


class TokenSeq(_Unsized):
    """Token ids: a list, tuple or one-dimensional integer array of `min_len` to `max_len` ids below `vocab_size`."""

    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        *,
        min_len: int = 0,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        self.vocab_size = _size("TokenSeq.vocab_size", vocab_size, least=1)
        self.min_len = _size("TokenSeq.min_len", min_len, least=0)
        self.max_len = _size("TokenSeq.max_len", max_len, least=min_len)
        super().__init__(seed=seed)

    def contains(self, x: Any) -> bool:
        """Return True for ids in range; a sequence of 8,000 takes less than a millisecond."""
        if isinstance(x, np.ndarray):
            if x.ndim != 1 or not np.issubdtype(x.dtype, np.integer):
                return False
        elif isinstance(x, list | tuple):
            kinds = set(map(type, x))
            if bool in kinds or not all(issubclass(kind, int | np.integer) for kind in kinds):
                return False
        else:
            return False
        if not self.min_len <= len(x) <= self.max_len:
            return False
        if not len(x):
            return True
        least, most = (x.min(), x.max()) if isinstance(x, np.ndarray) else (min(x), max(x))
        return bool(least >= 0 and most < self.vocab_size)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return int64[n], up to 32 ids."""
        _refuse_masks("TokenSeq", mask, probability)
        most = max(self.min_len, min(self.max_len, _SAMPLE_TOKENS))
        size = int(self.np_random.integers(self.min_len, most + 1))
        return self.np_random.integers(self.vocab_size, size=size, dtype=np.int64)

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        """Return each sequence as a list of integers."""
        return [[int(i) for i in ids] for ids in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        """Return each sequence as int64[n]."""
        return [np.asarray(ids, np.int64) for ids in sample_n]

    def __repr__(self) -> str:
        return f"TokenSeq({self.vocab_size}, {self.max_len}{f', min_len={self.min_len}' if self.min_len else ''})"


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str) or "content" not in value:
        return False
    content = value["content"]
    return content is None or isinstance(content, str | list | tuple)


def _size(where: str, value: Any, *, least: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{where}: expected an integer >= {least}, got {value!r}.")
    return int(value)


def _refuse_masks(where: str, mask: Any, probability: Any) -> None:
    if mask is not None or probability is not None:
        raise ConfigError(f"{where}.sample: expected no mask and no probability, got one. This space has none.")
