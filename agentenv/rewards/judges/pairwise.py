"""Two responses compared in both orders of showing them, so that a judge's taste for a place decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from agentenv.rewards._judge_text import choice, prompt_text
from agentenv.rewards.judge import Asking, Judge
from agentenv.rewards.judges import templates
from agentenv.rewards.judges.voting import PATIENT, Voting, needed, poll
from agentenv.rewards.text import final_text
from agentenv.types import Message

_POINTS = {"a": 1.0, "tie": 0.5, "b": 0.0}


class DebiasedPairwise:
    """Which of two responses a judge prefers, whichever it is shown first: a `tournament.Comparer`.

    Both orders are asked for and count the same; a judge that prefers what it sees first, or last, in both has said
    nothing, and that is a tie. One order alone is no verdict: where the other one fails nobody knows. Give it to
    `Tournament(…, both_orders=False)`, which else has each pair compared twice once more.

    Args:
        judge: who is asked.
        criteria: what makes an answer better, for the judge; by default what `templates` says.
        voting: how often it is asked in each order; votes are averaged, whatever `combine` is.
        asking: how often and how long each vote is.

    `num_compared` pairs had a verdict, `num_flipped` of them opposite ones in the two orders: bias is their share.
    """

    def __init__(
        self, judge: Judge, *, criteria: str | None = None, voting: Voting | None = None, asking: Asking = PATIENT
    ) -> None:
        self.judge, self.voting, self.asking = judge, voting or Voting(), asking
        self._instructions = templates.filled(templates.COMPARE, criteria or templates.QUALITY)
        self.num_compared = self.num_flipped = 0

    async def compare(self, prompt: str | Sequence[Message], a: str, b: str) -> float:
        """1.0 where `a` is better, 0.5 for a tie, 0.0 where `b` is; the same the other way round.

        What they thought is not shown. One without an answer loses against one with, unasked; equal ones tie.

        Raises:
            InfraError: an order had too few verdicts.
        """
        first, second = final_text(a) or "", final_text(b) or ""
        if not first or not second or first == second:
            return 0.5 + 0.5 * (bool(first) - bool(second))
        question = prompt_text(prompt)
        orders = asyncio.gather(
            self._points(question, first, second), self._points(question, second, first), return_exceptions=True
        )
        ahead, behind = needed(await orders, 2)
        self.num_compared += 1
        self.num_flipped += (ahead - 0.5) * (behind - 0.5) > 0
        margin = ahead - behind
        return 0.5 + 0.5 * ((margin > 0) - (margin < 0))

    async def _points(self, question: str, first: str, second: str) -> float:
        """What the one that is shown first gets, from 0 to 1."""
        texts = templates.texts_of(question, response_a=first, response_b=second)
        ending = 'End with "Verdict: A", "Verdict: B" or "Verdict: TIE".'
        messages = templates.asking_about(self._instructions, texts, ending=ending, max_chars=self.asking.max_chars)
        votes = await poll(
            self.judge, messages, _points_of, asking=self.asking, voting=self.voting, expected="A, B or TIE"
        )
        return fmean(votes)


def _points_of(reply: str) -> float | None:
    verdict = choice(reply, tuple(_POINTS))
    return None if verdict is None else _POINTS[verdict]
