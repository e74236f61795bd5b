"""What both excerpts of an episode show: its facts, and the tokens of each span."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentenv._util.plurals import counted
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.views import Span, spans_of
from agentenv.errors import ConfigError
from agentenv.runs.display.conversation import number_text
from agentenv.view.texts import TokenTexts

LIMITS = (-0.1, -1.0, -3.0, -6.0)
"""Bounds of the shades of log-probabilities, as in `agentenv tokens show`."""
TITLES = {"prompt": "prompt", "action": "action", "close": "synthesized close", "feedback": "feedback"}


@dataclass(frozen=True, slots=True)
class ShownSpan:
    """A span with the text of each token."""

    segment: int
    span: Span
    texts: Sequence[str]
    logprobs: Sequence[float]
    """NaN where missing; empty unless the span is an action."""


def shown_spans(trajectory: Trajectory, texts: TokenTexts) -> Iterator[ShownSpan]:
    """Yield the spans of an episode, in order.

    Raises:
        ConfigError: the record has no token ids.
    """
    if any(turn.answer is not None for turn in trajectory.turns):
        raise ConfigError("--svg: expected an episode with token ids, got one recorded by --engine chat. Use --md.")
    for index, segment in enumerate(trajectory.segments):
        found, _ = texts.of(segment.token_ids)
        for span in spans_of(trajectory, index):
            logprobs = segment.logprobs[span.start : span.end] if span.kind == "action" else ()
            yield ShownSpan(index, span, found[span.start : span.end], logprobs)


def turn_facts(number: int, turn: Turn) -> str:
    """Return a line about a turn."""
    reward = number_text(turn.result.reward if turn.result else None)
    return f"turn {number} · reward {reward} · {counted(turn.num_tokens, 'token')} · finish {turn.finish_reason}"


def mean_logprob(trajectory: Trajectory, turn: Turn) -> float | None:
    """Return the mean of a turn's finite log-probabilities; None without any."""
    known = [v for v in trajectory.segments[turn.segment].logprobs[turn.start : turn.end] if math.isfinite(v)]
    return math.fsum(known) / len(known) if known else None


def probability_text(logprob: float) -> str:
    """Return the probability of a token for display."""
    return f"{math.exp(logprob):.2g}" if logprob > -9 else f"{math.exp(logprob):.0e}"
