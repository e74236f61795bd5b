"""Training samples as plain lists, from which the records of all trainers are built.

A `Record` is one segment up to the end of its last action. No action follows the tokens after it, so nothing is learned
from them, and trainers would count them as response. `verl.records` and `nemo_rl.records` have `to_records`, which
returns an episode in the trainer's key names, one dict for each segment with an action.

Three rules hold for all trainers. A missing log-probability (NaN) never becomes 0.0, but the format's None or a
DataError. A failed episode has no reward: it is flagged if the format has a flag (NeMo RL), else a DataError. If
the format has one number as the reward, the record of every segment has the whole episode's, because all of them are
samples of that one result; rewards per token belong to the segment, and sum to the episode's over its segments.

Shapes: T tokens of a record, P before its first action, R = T - P of the response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.types import StopReason
from agentenv.errors import DataError

Decode = Callable[[Sequence[int]], str]
"""Decode ids to text, including special tokens: `Chat.decode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One training sample; do not change its lists."""

    token_ids: list[int]
    """[T]"""
    spans: list[tuple[int, int]]
    """Start and end of each action."""
    forced: tuple[int, ...] = ()
    """Indices of the action tokens that a constraint forced, which are off the mask."""
    logprobs: list[float] | None
    """[T] 0.0 off the mask; None if one is missing."""
    policy_versions: list[int]
    """[T] -1 off the mask."""
    rewards: list[float] | None
    """[T] non-zero only at the last token of an action; None for a failed episode."""
    reward: float | None
    """The whole episode's reward, over all its segments; None for a failed one."""
    truncated: bool
    """True if something other than the task ended the episode."""
    stop_reason: StopReason
    finish_reason: str | None
    """How the last action ended: vLLM's word, or "length" if no room was left for the next observation."""
    episode_id: str
    segment: int
    """The index of this record among the episode's records."""
    num_segments: int

    @property
    def num_prompt(self) -> int:
        """P; T if the record has no action."""
        return self.spans[0][0] if self.spans else len(self.token_ids)

    @property
    def mask(self) -> list[int]:
        """[T] 1 on tokens the policy chose: the loss mask."""
        mask = [0] * len(self.token_ids)
        for start, end in self.spans:
            mask[start:end] = [1] * (end - start)
        for place in self.forced:
            mask[place] = 0
        return mask

    @property
    def prompt_ids(self) -> list[int]:
        """[P] the tokens before the first action."""
        return self.token_ids[: self.num_prompt]

    @property
    def response_ids(self) -> list[int]:
        """[R] the actions and the tokens between them."""
        return self.token_ids[self.num_prompt :]

    @property
    def response_mask(self) -> list[int]:
        """[R] 1 on tokens the policy chose: the loss mask."""
        return self.mask[self.num_prompt :]

    @property
    def response_logprobs(self) -> list[float] | None:
        """[R] None if one is missing."""
        return None if self.logprobs is None else self.logprobs[self.num_prompt :]


def records(trajectory: Trajectory, where: str, *, keep_failed: bool = False) -> list[Record]:
    """Return an episode's samples, one for each segment with an action; for a failed episode without any, its prompt.

    Raises:
        DataError: the episode is still running, has no token ids, or failed and `keep_failed` is not set; the message
            starts with `where`.
    """
    if trajectory.stop_reason is None:
        raise DataError(f"{where}: expected a finished episode, got one that is still running. Finish it first.")
    trajectory.check_tokens(where)
    if trajectory.reward is None and not keep_failed:
        error = f" ({trajectory.error.type}: {trajectory.error.message})" if trajectory.error else ""
        raise DataError(
            f"{where}: expected an episode with a reward, got {trajectory.stop_reason.value!r}{error}. "
            "Remove failed episodes from the batch: the policy would learn from any number in place of a reward."
        )
    acted = sorted({turn.segment for turn in trajectory.turns}) or [len(trajectory.segments) - 1]
    samples = []
    for index in acted:
        segment, turns = trajectory.segments[index], [turn for turn in trajectory.turns if turn.segment == index]
        end = turns[-1].end if turns else len(segment)
        logprobs = segment.logprobs[:end].tolist()
        rewards = None if trajectory.reward is None else [0.0] * end
        for turn in turns:
            if rewards is not None and turn.result is not None:
                rewards[turn.end - 1] = turn.result.reward
        samples.append(
            Record(
                token_ids=segment.token_ids[:end].tolist(),
                spans=[(turn.start, turn.end) for turn in turns],
                forced=tuple(place for turn in turns for place in turn.forced_places),
                logprobs=None if any(map(math.isnan, logprobs)) else logprobs,
                policy_versions=segment.policy_versions[:end].tolist(),
                rewards=rewards,
                reward=trajectory.reward,
                truncated=trajectory.truncated,
                stop_reason=trajectory.stop_reason,
                finish_reason=str(turns[-1].finish_reason) if turns else None,
                episode_id=trajectory.episode_id,
                segment=acted.index(index),
                num_segments=len(acted),
            )
        )
    return samples


def up_to_choice(record: Record) -> Record:
    """Return a record that ends with the last token that the policy chose, for formats whose trainer puts the reward on
    the last token: estimators such as GAE skip tokens off the mask. What followed goes to the action before it.
    """
    end = max((at + 1 for at, chosen in enumerate(record.mask) if chosen), default=len(record.token_ids))
    rewards = record.rewards and [*record.rewards[: end - 1], math.fsum(record.rewards[end - 1 :])]
    return replace(
        record,
        token_ids=record.token_ids[:end],
        spans=[(first, min(last, end)) for first, last in record.spans if first < end],
        forced=tuple(place for place in record.forced if place < end),
        logprobs=record.logprobs and record.logprobs[:end],
        policy_versions=record.policy_versions[:end],
        rewards=rewards,
    )


def turns_of(trajectory: Trajectory, record: Record) -> list[Turn]:
    """Return the turns whose actions are in a record, in order."""
    acted = sorted({turn.segment for turn in trajectory.turns})
    return [turn for turn in trajectory.turns if acted.index(turn.segment) == record.segment]


def required_logprobs(record: Record, where: str) -> list[float]:
    """Return the log-probabilities [T], for a format that cannot express a missing one.

    Raises:
        DataError: one is missing.
    """
    if record.logprobs is None:
        raise DataError(
            f"{where}: expected a log-probability for every action token, got none for some. "
            "Use an engine that returns them: 0.0 would mean that the token was certain."
        )
    return record.logprobs


def facts(record: Record) -> dict[str, Any]:
    """Return the facts for which a format has no key, for its field of extras; token lists cover the response.

    Keys: turn_scores (reward of each action, None for a failed episode), turn_spans ([start, end) of each action),
    policy_versions [R], stop_reason, finish_reason, episode_id, segment, num_segments; and forced_tokens (indices in
    the response) if a constraint forced any.
    """
    start, rewards = record.num_prompt, record.rewards
    return {
        "turn_scores": None if rewards is None else [rewards[end - 1] for _, end in record.spans],
        "turn_spans": [[first - start, end - start] for first, end in record.spans],
        "policy_versions": record.policy_versions[start:],
        "stop_reason": record.stop_reason.value,
        "finish_reason": record.finish_reason,
        "episode_id": record.episode_id,
        "segment": record.segment,
        "num_segments": record.num_segments,
        **({"forced_tokens": [place - start for place in record.forced]} if record.forced else {}),
    }


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows with the same keys as one dict of lists, for trainers that take a batch in this form (TRL, SkyRL).

    Raises:
        DataError: the rows have different keys.
    """
    if any(row.keys() != rows[0].keys() for row in rows):
        raise DataError(f"interop: expected rows of the same keys, got {[sorted(row) for row in rows]}.")
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}
