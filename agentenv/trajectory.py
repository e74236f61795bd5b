"""The record of an episode: Segment (one training sample), Turn, Trajectory, Group. Standard library only.

Shapes: T tokens of a segment, n tokens of one action. Segment and Trajectory only grow, through their own methods,
which refuse whatever would break the invariants: arrays of equal length, the mask true exactly on the turns' spans,
actions untouched, log-probabilities 0.0 off the mask, never longer than `max_length`, nothing after the last step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentenv.types import BridgeKind, Completion, FinishReason, Message, StepResult, StopReason, Task

NO_VERSION = -1
"""Policy version of a token that no policy sampled."""
_NO_VERSION, _ZERO = array("i", [NO_VERSION]), array("f", [0.0])
"""Arrays of one element, to be multiplied: what most tokens have."""

ErrorKind = Literal["infra", "env", "contract", "data"]
"""Whose failure: infrastructure's (retried), the environment's, its contract's, or the dataset row's."""


SpanKind = Literal["prompt", "action", "close", "feedback"]
"""Who made tokens: the prompt's writer, the policy, the loop that closed a turn for the policy, the environment."""


@dataclass(frozen=True, slots=True)
class EpisodeError:
    """What failed, as text: exceptions themselves are not kept, so that every trajectory can be written and sent."""

    kind: ErrorKind
    type: str
    """Class name of the exception."""
    message: str
    where: str = ""
    """create, reset, prompt, generate, step, on_truncate, execute or record."""
    place: str = ""
    """File and line of the environment's code in which it arose, where it did."""


@dataclass(slots=True)
class Turn:
    """One generation and the reply to it; written by the trajectory's methods alone."""

    start: int
    end: int
    """The action is `segments[segment].token_ids[start:end]`."""
    action: str
    """The action as text: decoded from the ids, without a final terminator."""
    finish_reason: FinishReason
    result: StepResult | None = None
    """None when the step timed out, raised or never ran: then nobody knows this turn's reward."""
    stop_reason: int | str | None = None
    generate_s: float = 0.0
    step_s: float = 0.0
    num_cached_tokens: int = 0
    segment: int = 0
    bridge: BridgeKind | None = None
    """How the reply's tokens were joined to the action; None where none followed."""
    num_synthesised: int = 0
    """Tokens after `end` that close the turn in the model's place: the first of the reply's, masked like all of it."""
    observation_cut: bool = False
    """The middle of the reply's content was cut out, for want of room."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a segment that belong together: `token_ids[start:end]`."""

    start: int
    end: int
    kind: SpanKind
    turn: int
    """Index in `Trajectory.turns` of the action, or of that which a close or a feedback follows; -1 for a prompt."""


@dataclass(slots=True, eq=False)
class Segment:
    """One append-only token sequence: one training sample.

    Example, a prompt P, two actions A and the observation O between them, rewards 0 and 1::

        token_ids   = P  + A0 + O  + A1
        action_mask = 0…   1…   0…   1…
        rewards     = 0…   0…   0…   0…1     (at the last token of an action)
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """int32[T]"""
    action_mask: bytearray = field(default_factory=bytearray)
    """[T] 1 on tokens the policy sampled."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """float32[T] 0.0 off the mask; NaN where an action's log-probability is missing."""
    policy_versions: array[int] = field(default_factory=lambda: array("i"))
    """int32[T] -1 off the mask."""
    rewards: array[float] = field(default_factory=lambda: array("f"))
    """float32[T] non-zero only at the last token of an action."""

    def __len__(self) -> int:
        """T."""
        return len(self.token_ids)

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample."""
        num = len(token_ids)
        self.token_ids.extend(array("i", token_ids))  # made first: extending by a list stops halfway at a wrong id
        self.action_mask.extend(bytes(num))
        self.logprobs.extend(_ZERO * num)
        self.policy_versions.extend(_NO_VERSION * num)
        self.rewards.extend(_ZERO * num)

    def append_action(self, completion: Completion) -> tuple[int, int]:
        """Add an engine's tokens untouched; gives their span (start, end).

        Raises:
            ValueError: no token, nothing before the first action, or arrays of unequal length; nothing is changed then.
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
                f"{len(logprobs)} and {len(versions)}. Mend the engine: a shifted log-probability spoils training."
            )
        new = array("i", completion.token_ids), array("f", logprobs), array("i", versions)
        self.token_ids.extend(new[0])
        self.action_mask.extend(b"\x01" * num)
        self.logprobs.extend(new[1])
        self.policy_versions.extend(new[2])
        self.rewards.extend(_ZERO * num)
        return start, start + num


@dataclass(slots=True, eq=False)
class Trajectory:
    """The record of one episode, written only through its methods."""

    task: Task
    max_length: int
    episode_id: str = ""
    """Deterministic key of (task, sample); the same in a resumed run."""
    group_id: str = ""
    """Shared by all episodes of one task."""
    attempt: int = 0
    """How many times this episode failed on infrastructure before."""
    seed: int | None = None
    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason | None = None
    """None while the episode runs."""
    error: EpisodeError | None = None
    wait_s: float = 0.0
    """Seconds not in a turn: set-up, reset, close, and calls that failed."""
    prompt: str | Sequence[Message] = ""
    """The first observation, as `reset` gave it; empty before."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that `reset` offered to the model."""

    @property
    def token_ids(self) -> array[int]:
        """int32[T] of the only segment."""
        return self._only_segment().token_ids

    @property
    def action_mask(self) -> bytearray:
        """[T] of the only segment: 1 on tokens the policy sampled."""
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
        """Sum over the turns; None when there is none, one has no result, or the episode failed or was aborted."""
        failed = self.error is not None or self.stop_reason in (StopReason.ERROR, StopReason.ABORTED)
        if failed or not self.turns:
            return None
        results = [turn.result for turn in self.turns]
        return None if any(r is None for r in results) else math.fsum(r.reward for r in results if r is not None)

    @property
    def score(self) -> float | None:
        """The last score a turn gave; None when none did, or when the reward is unknown."""
        if self.reward is None:
            return None
        scores = [t.result.score for t in self.turns if t.result is not None and t.result.score is not None]
        return scores[-1] if scores else None

    @property
    def terminated(self) -> bool:
        """The task came to its end."""
        return self.stop_reason is not None and self.stop_reason.terminated

    @property
    def truncated(self) -> bool:
        """Something other than the task ended the episode."""
        return self.stop_reason is not None and self.stop_reason.truncated

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment) for segment in self.segments)

    @property
    def messages(self) -> list[Message] | None:
        """The conversation for readers, actions as text; None where a piece of it was raw text, which has no role."""
        if isinstance(self.prompt, str):
            return None
        messages = list(self.prompt)
        begun: str | None = None  # an action that an empty observation followed: the next one goes on with it
        for turn in self.turns:
            said = turn.result.observation if turn.bridge is not None and turn.result is not None else ""
            if said and isinstance(said, str) and turn.bridge == "text":
                return None
            begun = (begun or "") + turn.action
            if said:
                new = [{"role": "user", "content": said}] if isinstance(said, str) else said
                messages += [{"role": "assistant", "content": begun}, *new]
                begun = None
        return messages if begun is None else [*messages, {"role": "assistant", "content": begun}]

    def spans(self, segment: int = 0) -> list[Span]:
        """Spans that cover the segment's tokens without gap or overlap, in order; none is empty."""
        spans, end, before = [], 0, -1
        for index, turn in enumerate(self.turns):
            if turn.segment == segment:
                spans += self._between(end, turn.start, before)
                spans.append(Span(turn.start, turn.end, "action", index))
                end, before = turn.end, index
        return [*spans, *self._between(end, len(self.segments[segment]), before)]

    def _between(self, start: int, end: int, turn: int) -> list[Span]:
        """What lies between two actions, or before the first: the part that closes a turn apart."""
        closed = start if turn < 0 else min(end, start + self.turns[turn].num_synthesised)
        spans = [Span(start, closed, "close", turn), Span(closed, end, "feedback" if turn >= 0 else "prompt", turn)]
        return [span for span in spans if span.end > span.start]

    def append_observation(
        self,
        token_ids: Sequence[int],
        *,
        bridge: BridgeKind | None = None,
        num_synthesised: int = 0,
        cut: bool = False,
    ) -> None:
        """Add prompt or environment tokens; after an action, with how they are joined to it.

        Raises:
            ValueError: the episode is over, or `max_length` would be passed; nothing is changed then.
        """
        self._check_growth(len(token_ids))
        self.segments[-1].append_observation(token_ids)
        self._note(bridge, num_synthesised, cut=cut)

    def open_segment(self, token_ids: Sequence[int], *, cut: bool = False) -> None:
        """Begin a new segment with the tokens of a history that was rendered anew.

        Raises:
            ValueError: as `append_observation`.
        """
        self._check_growth(len(token_ids) - len(self.segments[-1]))
        segment = Segment()
        segment.append_observation(token_ids)
        self.segments.append(segment)
        self._note("rerendered", 0, cut=cut)

    def _note(self, bridge: BridgeKind | None, num_synthesised: int, *, cut: bool) -> None:
        if self.turns and bridge is not None:
            turn = self.turns[-1]
            turn.bridge, turn.num_synthesised, turn.observation_cut = bridge, num_synthesised, cut

    def append_turn(self, completion: Completion, action: str, generate_s: float = 0.0) -> None:
        """Add an action, its text beside it; its result follows with `set_result`.

        Raises:
            ValueError: as `append_observation` and `Segment.append_action`.
        """
        self._check_growth(len(completion.token_ids))
        start, end = self.segments[-1].append_action(completion)
        turn = Turn(
            start, end, action, completion.finish_reason, stop_reason=completion.stop_reason,
            generate_s=generate_s, num_cached_tokens=completion.num_cached_tokens, segment=len(self.segments) - 1,
        )  # fmt: skip
        self.turns.append(turn)

    def set_result(self, result: StepResult, step_s: float = 0.0) -> None:
        """Give the last turn its result and put its reward on the action's last token."""
        turn = self.turns[-1]
        turn.result, turn.step_s = result, turn.step_s + step_s
        self.segments[turn.segment].rewards[turn.end - 1] = result.reward

    def finish(self, stop_reason: StopReason, error: EpisodeError | None = None) -> None:
        """Close the record; the first stop reason stays."""
        if self.stop_reason is None:
            self.stop_reason, self.error = stop_reason, error

    def _check_growth(self, num: int) -> None:
        if self.stop_reason is not None or (self.turns and self.turns[-1].result and self.turns[-1].result.done):
            raise ValueError("Trajectory: expected no token after the last step, got more. The episode is over.")
        if len(self.segments[-1]) + num > self.max_length:
            raise ValueError(
                f"Trajectory: expected at most {self.max_length} tokens, got {len(self.segments[-1]) + num}. "
                "Finish with MAX_LENGTH instead."
            )


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one task: the unit of advantages, filtering and pass@k."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
