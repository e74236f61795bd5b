"""Two responses compared, so that a judge's taste for a place decides nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from agentenv.rewards._arguments import one_of
from agentenv.rewards.judges.asking import Asker, Asking, Voting, needed
from agentenv.rewards.judges.draws import Judge
from agentenv.rewards.judges.templates import COMPARE, QUALITY, prompt_text
from agentenv.rewards.judges.verdicts import preferred
from agentenv.rewards.text import final_text
from agentenv.types import Message


class PairwiseJudge(Asker):
    """Which of two responses a judge prefers: a `tournament.Comparer`.

    Args:
        judge: who is asked.
        order: which one it is shown first. "both": it is asked in both orders, which count the same; a judge that
            prefers what it sees first, or last, in both has said nothing, and that is a tie; where one order fails
            nobody knows. "drawn": one order, drawn from the texts and the seed, the same whoever is `a`. "given": `a`,
            for a `Tournament` that shows them in both orders itself; the others are for `both_orders=False`.
        seed: of the order that is drawn.
        criteria: what makes an answer better, for the judge; by default what `templates` says.
        voting: how often it is asked in each order; votes are averaged, whatever `combine` is.
        asking: how often and how long each vote is.

    `num_compared` pairs had a verdict; of those in both orders `num_flipped` had opposite ones: bias is their share.

    Raises:
        ConfigError: an argument is none of its kind.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        order: Literal["both", "drawn", "given"] = "both",
        seed: int = 0,
        criteria: str | None = None,
        voting: Voting | Mapping[str, Any] | None = None,
        asking: Asking | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, asking)
        self.order, self.seed = one_of("PairwiseJudge.order", order, ("both", "drawn", "given")), seed
        self._template = COMPARE.filled(criteria or QUALITY)
        self.num_compared = self.num_flipped = 0

    async def compare(self, prompt: str | Sequence[Message], a: str, b: str) -> float:
        """1.0 where `a` is better, 0.5 for a tie, 0.0 where `b` is; but for "given" the same the other way round.

        What they thought is not shown. One without an answer loses against one with, unasked; equal ones tie.

        Raises:
            DataError: the prompt is none.
            InfraError: an order had too few verdicts.
        """
        first, second = final_text(a) or "", final_text(b) or ""
        if not first or not second or first == second:
            return 0.5 + 0.5 * (bool(first) - bool(second))
        question = prompt_text(prompt)
        orders = self._orders(question, first, second)
        asked = [self._leaning(question, first, second, straight=straight) for straight in orders]
        leanings = needed(await asyncio.gather(*asked, return_exceptions=True), len(asked))
        self.num_compared += 1
        self.num_flipped += self.order == "both" and leanings[0] * leanings[1] < 0
        total = sum(leanings)
        return 0.5 + 0.5 * ((total > 0) - (total < 0))

    def _orders(self, question: str, a: str, b: str) -> list[bool]:
        """Whether `a` is shown first, each time that the judge is asked."""
        if self.order == "drawn":
            content = repr((self.seed, question, *sorted((a, b)))).encode(errors="surrogatepass")
            return [(hashlib.sha256(content).digest()[0] & 1) != (a > b)]
        return [True, False][: 2 if self.order == "both" else 1]

    async def _leaning(self, question: str, a: str, b: str, *, straight: bool) -> float:
        """How far the votes lean to `a`, from -1 to 1."""
        shown = (a, b) if straight else (b, a)
        texts = {"question": question, "response_a": shown[0], "response_b": shown[1]}
        votes = await self._votes(self._template, texts, preferred)
        return fmean(2.0 * vote - 1.0 if straight else 1.0 - 2.0 * vote for vote in votes)
