"""`token_stats.jsonl` of a training: what the learner computed for each sampled token of the episodes that are kept.

A line per episode and train step, in the order of steps.jsonl; the last line of an episode counts. A line holds for the
episode whose sampled tokens have its `action_hash`: after a resume, an episode may have been sampled again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Self

from agentenv.core.trajectory import Trajectory
from agentenv.errors import DataError

TOKEN_STATS = "token_stats.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What a train step computed for the sampled tokens of an episode, in the order of its record."""

    step: int
    """The train step, from 1; the weights before it have the version `step - 1`."""
    episode_id: str
    action_hash: str
    """As `hash_actions`, of the sampled tokens."""
    logprobs: Sequence[float]
    """float32[n] the learner's log-probabilities before the step; NaN for tokens that are left out of the loss."""
    advantages: Sequence[float]
    """float32[n] as trained."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values of the line; the numbers are base64 of float32, little-endian."""
        head = {"v": SCHEMA_VERSION, "step": self.step, "episode_id": self.episode_id, "action_hash": self.action_hash}
        return {**head, "logprobs": _packed(self.logprobs), "advantages": _packed(self.advantages)}

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return the values of a line.

        Raises:
            DataError: the line is damaged, or has another schema.
        """
        try:
            values = json.loads(line)
            if values["v"] != SCHEMA_VERSION:
                raise ValueError(f"schema version {values['v']}")
            stats = cls(
                int(values["step"]), str(values["episode_id"]), str(values["action_hash"]),
                _unpacked(values["logprobs"]), _unpacked(values["advantages"]),
            )  # fmt: skip
            if len(stats.logprobs) != len(stats.advantages):
                raise ValueError("lists of different lengths")
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise DataError(
                f"{TOKEN_STATS}: expected a line of schema version {SCHEMA_VERSION}, got {line[:60]!r} "
                f"({type(error).__name__}: {error}). Remove it."
            ) from None
        return stats


def hash_actions(token_ids: Sequence[int]) -> str:
    """Return a hash of sampled tokens, the same on all machines."""
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}i", *token_ids), digest_size=8).hexdigest()


def sampled_tokens(trajectory: Trajectory) -> array[int]:
    """Return the sampled tokens of an episode in the order of its record: by segment, then by place."""
    found = array("i")
    for segment in trajectory.segments:
        found.extend(compress(segment.token_ids, segment.action_mask))
    return found


def read_token_stats(folder: str | Path) -> dict[str, TokenStats]:
    """Return the last line of each episode, by its id; empty for a run without any.

    Raises:
        DataError: a line is damaged, or has another schema.
    """
    path, found = Path(folder) / TOKEN_STATS, dict[str, TokenStats]()
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # else it is still being written
                    stats = TokenStats.from_line(line)
                    found[stats.episode_id] = stats
    return found


def _packed(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")


def _unpacked(text: str) -> array[float]:
    content = base64.b64decode(text, validate=True)
    return array("f", struct.unpack(f"<{len(content) // 4}f", content))
