"""The record of an episode: Segment (one training sample), Turn, Trajectory, Group. Standard library only.

Shapes: T tokens of a segment, n tokens of one action. Segment and Trajectory only grow, through their own methods,
which enforce the invariants: arrays have equal length, the mask is 1 exactly on the turns' spans, actions are
unchanged, log-probabilities are 0.0 off the mask, `max_length` holds, and nothing follows the last step.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.plurals import counted
from agentenv.core.types import Answer, BridgeKind, Completion, FinishReason, Message, StepResult, StopReason, Task
from agentenv.errors import DataError, ErrorKind

NO_VERSION = -1
"""Policy version of a token that no policy sampled."""
_NO_VERSION, _ZERO = array("i", [NO_VERSION]), array("f", [0.0])
"""One-element arrays that are repeated: the common values of most tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeError:
    """A failure as text: exceptions are not stored, so that every trajectory can be written and sent."""

    kind: ErrorKind
    """What failed; only "infra" is retried."""
    type: str
    """Class name of the exception."""
    message: str
    """Text of the exception, at most 4,000 characters: its middle is left out beyond them."""
    where: str = ""
    """create, reset, prompt, generate, step, on_truncate, execute, record or group_reward."""
    place: str = ""
    """File and line in the environment's code, if the failure occurred there."""
    traceback: str = ""
    """Traceback from the first frame outside agentenv on, at most 4,000 characters; empty without such a frame."""
    cause: str = ""
    """Class of the exception's cause, and status of the HTTP answer behind it; empty if neither is known."""


def with_cause(error_type: str, cause: str) -> str:
    """Return the name under which an error is counted."""
    return f"{error_type} ({cause})" if cause else error_type


@dataclass(slots=True)
class Turn:
    """One generation and the reply to it."""

    start: int
    """Index of the action's first token in its segment."""
    end: int
    """The action is `segments[segment].token_ids[start:end]`."""
    action: str
    """The action decoded from its ids, without a final terminator."""
    finish_reason: FinishReason
    """Why the generation ended."""
    result: StepResult | None = None
    """None if the step timed out, raised or never ran: then this turn's reward is unknown."""
    matched_stop: int | str | None = None
    """The stop token id or stop string that ended the generation."""
    generate_s: float = 0.0
    """Seconds in the engine."""
    step_s: float = 0.0
    """Seconds in the environment's `step`."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose keys and values the engine had cached."""
    segment: int = 0
    """Index in `Trajectory.segments`."""
    bridge: BridgeKind | None = None
    """How the reply's tokens were joined to the action; None without a reply."""
    num_synthesized: int = 0
    """Number of tokens after `end` that close the turn for the model: the first of the reply, masked like the rest."""
    observation_cut: bool = False
    """True if the middle of the reply's content was cut out because it did not fit."""
    num_retries: int = 0
    """How often `step` was called again because infrastructure failed."""
    num_failovers: int = 0
    """1 if an engine failed before another one sampled the action, else 0."""
    num_request_retries: int = 0
    """How often the request for the action was sent to a server again."""
    answer: Answer | None = None
    """What an engine that takes messages returned. Such a turn has no tokens: `start` equals `end`."""
    forced: tuple[int, ...] | None = None
    """Indices in the action of tokens that a constraint forced, which no loss may count as chosen; None without a
    constraint. With one, the log-probabilities are those of the constrained distribution."""
    began_s: float | None = None
    """Seconds from the episode's start to the request for this action; None in older records."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the action: in its segment, or else as the server counted them; 0 if it did not."""
        return self.end - self.start if self.answer is None else self.answer.num_output_tokens or 0

    @property
    def num_input_tokens(self) -> int:
        """Number of tokens before the action, counted like `num_tokens`."""
        return self.start if self.answer is None else self.answer.num_input_tokens or 0

    @property
    def is_counted(self) -> bool:
        """False if a server of chat completions sent no valid counts of the prompt's or the answer's tokens."""
        return self.answer is None or None not in (self.answer.num_input_tokens, self.answer.num_output_tokens)

    @property
    def forced_places(self) -> list[int]:
        """Indices in the segment of the forced tokens."""
        return [self.start + index for index in self.forced or ()]

    def __repr__(self) -> str:
        """Return one line of bounded length."""
        reward = None if self.result is None else self.result.reward
        length = counted(self.num_tokens, "token")
        return f"Turn({brief(self.action, 60)}, reward={reward}, {self.finish_reason}, {length})"


@dataclass(slots=True, eq=False)
class Segment:
    """One append-only token sequence: one training sample.

    Example with a prompt P, two actions A, the observation O between them, and rewards 0 and 1::

        token_ids   = P  + A0 + O  + A1
        action_mask = 0…   1…   0…   1…
        rewards     = 0…   0…   0…   0…1     (at the last token of an action)
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """int32[T]"""
    action_mask: bytearray = field(default_factory=bytearray)
    """[T] 1 on tokens of actions, those that a constraint forced included."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """float32[T] 0.0 off the mask; NaN where an action's log-probability is missing."""
    policy_versions: array[int] = field(default_factory=lambda: array("i"))
    """int32[T] -1 off the mask."""
    rewards: array[float] = field(default_factory=lambda: array("f"))
    """float32[T] non-zero only at the last token of an action."""

    def __len__(self) -> int:
        """Return T, the number of tokens."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        """Return one line of bounded length."""
        return f"Segment({counted(len(self), 'token')}, {self.action_mask.count(1)} of actions)"

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample."""
        num = len(token_ids)
        # Converted first: extending by a list would stop at an invalid id, halfway.
        self.token_ids.extend(_array_of("i", token_ids))
        self.action_mask.extend(bytes(num))
        self.logprobs.extend(_ZERO * num)
        self.policy_versions.extend(_NO_VERSION * num)
        self.rewards.extend(_ZERO * num)

    def append_action(self, completion: Completion) -> tuple[int, int]:
        """Add an engine's tokens unchanged and return their span (start, end).

        Raises:
            ValueError: no token, no prompt before the first action, or arrays of unequal length; nothing is changed.
        """
        num, start = len(completion.token_ids), len(self.token_ids)
        logprobs = completion.logprobs if completion.logprobs is not None else (math.nan,) * num
        versions = completion.policy_versions or array("i", [completion.policy_version]) * num
        if num == 0 or start == 0:
            raise ValueError(
                f"Segment.append_action: expected at least one token after at least one prompt token, got {num} after "
                f"{start}. An engine that sampled nothing must finish with 'abort' or 'error'."
            )
        if len(logprobs) != num or len(versions) != num:
            raise ValueError(
                f"Segment.append_action: expected one log-probability and one version for each of {num} tokens, got "
                f"{len(logprobs)} and {len(versions)}. Fix the engine: a shifted log-probability corrupts training."
            )
        new = _array_of("i", completion.token_ids), _array_of("f", logprobs), array("i", versions)
        self.token_ids.extend(new[0])
        self.action_mask.extend(b"\x01" * num)
        self.logprobs.extend(new[1])
        self.policy_versions.extend(new[2])
        self.rewards.extend(_ZERO * num)
        return start, start + num


def _array_of(typecode: str, values: Sequence[float]) -> array[Any]:
    """Return `array(typecode, values)`; `struct` converts the values faster."""
    try:
        return array(typecode, struct.pack(f"{len(values)}{typecode}", *values))
    except (struct.error, OverflowError):  # the array's own error, or infinity for a float beyond its range
        return array(typecode, values)


@dataclass(slots=True, eq=False)
class Trajectory:
    """The record of one episode. Its methods add tokens, turns and results, and keep them aligned."""

    task: Task
    """The dataset row."""
    max_length: int
    """Maximum number of tokens of a segment."""
    episode_id: str = ""
    """Deterministic key of (task, sample); the same in a resumed run."""
    group_id: str = ""
    """Shared by all episodes of one task."""
    attempt: int = 0
    """Number of earlier attempts of this episode that failed because of infrastructure."""
    seed: int | None = None
    """Seed of the environment."""
    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    """Token sequences: one, unless the history was rendered again."""
    turns: list[Turn] = field(default_factory=list)
    """Actions and replies, in order."""
    stop_reason: StopReason | None = None
    """None while the episode runs."""
    error: EpisodeError | None = None
    """The failure that ended the episode."""
    wait_s: float = 0.0
    """Seconds outside of turns: setup, reset, close, and failed calls."""
    prompt: str | Sequence[Message] = ""
    """The first observation, as `reset` returned it; empty before that."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that `reset` offered to the model."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Requests of an agent with its own loop that got no answer, by the code of the error."""
    refusal_reasons: Mapping[str, str] = field(default_factory=dict)
    """The error of the last such request of each code."""
    began_s: float | None = None
    """When this attempt started, in seconds since 1970; None in older records."""
    retried: list[str] = field(default_factory=list)
    """Class and cause of each error after which a step or the episode ran again."""

    def __repr__(self) -> str:
        """Return one line of bounded length."""
        error = f", {self.error.type} in {self.error.where}" if self.error else ""
        return (
            f"Trajectory({brief(self.episode_id, 60)}, reward={self.reward}, {self.stop_reason or 'unfinished'}{error}"
            f", {counted(len(self.turns), 'turn')}, {counted(self.num_tokens, 'token')})"
        )

    @property
    def token_ids(self) -> array[int]:
        """int32[T] of the only segment."""
        return self._only_segment().token_ids

    @property
    def action_mask(self) -> bytearray:
        """[T] of the only segment: 1 on tokens that the policy sampled."""
        return self._only_segment().action_mask

    @property
    def logprobs(self) -> array[float]:
        """float32[T] of the only segment."""
        return self._only_segment().logprobs

    def _only_segment(self) -> Segment:
        if len(self.segments) != 1:
            raise ValueError(f"Trajectory: expected one segment, got {len(self.segments)}. Read `segments` instead.")
        return self.segments[0]

    @property
    def reward(self) -> float | None:
        """Sum over the turns; None without turns, if a turn has no result, or if the episode failed or was aborted."""
        failed = self.error is not None or self.stop_reason in (StopReason.ERROR, StopReason.ABORTED)
        if failed or not self.turns:
            return None
        results = [turn.result for turn in self.turns]
        return None if any(r is None for r in results) else math.fsum(r.reward for r in results if r is not None)

    @property
    def score(self) -> float | None:
        """The score of the last turn that has one; None without one, or if the reward is unknown."""
        scores = [t.result.score for t in self.turns if t.result is not None and t.result.score is not None]
        return scores[-1] if scores and self.reward is not None else None

    @property
    def num_step_retries(self) -> int:
        """How often `step` was called again, in all attempts."""
        # The rest of `retried` failed attempts; older records lack those of earlier sessions.
        return max(sum(turn.num_retries for turn in self.turns), len(self.retried) - self.attempt)

    @property
    def terminated(self) -> bool:
        """True if the task came to its end."""
        return self.stop_reason is not None and self.stop_reason.terminated

    @property
    def truncated(self) -> bool:
        """True if a limit, the environment or a cancellation ended the episode before its task did."""
        return self.stop_reason is not None and self.stop_reason.truncated

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all segments; without token ids, those of the last turn as the server counted them."""
        if self.turns and self.turns[-1].answer is not None:
            return self.turns[-1].num_input_tokens + self.turns[-1].num_tokens
        return sum(len(segment) for segment in self.segments)

    @property
    def is_counted(self) -> bool:
        """False if `num_tokens` lacks tokens that a server did not count."""
        return all(turn.is_counted for turn in self.turns[-1:])

    @property
    def cost_usd(self) -> float | None:
        """Dollars that the turns cost; None without prices, or if the tokens of a turn are unknown."""
        costs = [None if turn.answer is None else turn.answer.cost_usd for turn in self.turns]
        known = [cost for cost in costs if cost is not None]
        return math.fsum(known) if known and len(known) == len(costs) else None

    def check_tokens(self, where: str) -> None:
        """Raise if the record has no token ids because its engine returned none.

        Raises:
            DataError: with a message that starts with `where`.
        """
        if any(turn.answer is not None for turn in self.turns):
            raise DataError(
                f"{where}: expected an episode with token ids, got {self.episode_id!r}, recorded by --engine chat, "
                "which returns no token ids. Sample it with another engine."
            )

    def append_observation(
        self, token_ids: Sequence[int], *, bridge: BridgeKind | None = None, num_synthesized: int = 0, cut: bool = False
    ) -> None:
        """Add prompt or environment tokens; after an action, with the kind of bridge.

        Raises:
            ValueError: the episode is over, or `max_length` would be exceeded; nothing is changed then.
        """
        self._check_growth(len(token_ids))
        self.segments[-1].append_observation(token_ids)
        self._note(bridge, num_synthesized, cut=cut)

    def open_segment(self, token_ids: Sequence[int], *, cut: bool = False) -> None:
        """Start a new segment with the tokens of a history that was rendered again.

        Raises:
            ValueError: as `append_observation`.
        """
        self._check_growth(len(token_ids) - len(self.segments[-1]))
        segment = Segment()
        segment.append_observation(token_ids)
        self.segments.append(segment)
        self._note("rerendered", 0, cut=cut)

    def _note(self, bridge: BridgeKind | None, num_synthesized: int, *, cut: bool) -> None:
        if self.turns and bridge is not None:
            turn = self.turns[-1]
            turn.bridge, turn.num_synthesized, turn.observation_cut = bridge, num_synthesized, cut

    def append_turn(
        self, completion: Completion, action: str, generate_s: float = 0.0, *, began_s: float | None = None
    ) -> None:
        """Add an action and its text; `set_result` adds the result.

        Raises:
            ValueError: as `append_observation` and `Segment.append_action`.
        """
        self._check_growth(len(completion.token_ids))
        start = end = len(self.segments[-1])
        if completion.answer is None:
            start, end = self.segments[-1].append_action(completion)
        self.turns.append(Turn(
            start, end, action, completion.finish_reason, matched_stop=completion.matched_stop,
            generate_s=generate_s, num_cached_tokens=completion.num_cached_tokens, segment=len(self.segments) - 1,
            num_failovers=completion.num_failovers, num_request_retries=completion.num_request_retries,
            answer=completion.answer, forced=completion.forced, began_s=began_s,
        ))  # fmt: skip

    def set_result(self, result: StepResult, step_s: float = 0.0) -> None:
        """Set the last turn's result and put its reward on the action's last token."""
        turn = self.turns[-1]
        turn.result, turn.step_s = result, turn.step_s + step_s
        if turn.answer is None:
            self.segments[turn.segment].rewards[turn.end - 1] = result.reward

    def count_retry(self, error: str) -> None:
        """Count one more call of the last turn's step, after an error of this name."""
        self.turns[-1].num_retries += 1
        self.retried.append(error)

    def finish(self, stop_reason: StopReason, error: EpisodeError | None = None) -> None:
        """Close the record; the first stop reason is kept."""
        if self.stop_reason is None:
            self.stop_reason, self.error = stop_reason, error

    def _check_growth(self, num: int) -> None:
        last = self.turns[-1].result if self.turns else None
        if self.stop_reason is not None or (last is not None and (last.terminated or last.truncated)):
            raise ValueError("Trajectory: expected no token after the last step, got more. The episode is over.")
        total = len(self.segments[-1]) + num
        if total > self.max_length:
            raise ValueError(f"Trajectory: expected at most {self.max_length} tokens, got {total}. Finish it first.")


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one task: the unit of advantages, filtering and pass@k."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
