"""Compare two responses, without letting a judge's preference for a position decide."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from agentenv.core.arguments import one_of
from agentenv.core.types import Message
from agentenv.rewards.judges.protocol import Judge
from agentenv.rewards.judges.templates import COMPARE, QUALITY, answer_text, prompt_text
from agentenv.rewards.judges.verdicts import read_preference
from agentenv.rewards.judges.voting import JudgeRetry, Voting, VotingBase, successes


class PairwiseJudge(VotingBase):
    """A `tournament.Comparer` that asks a judge which of two responses it prefers.

    Args:
        judge: the judge.
        order: which response it sees first. "both": it is asked in both orders, which count the same; if it prefers
            the first, or the last, in both, that is a tie; if one fails, the verdict is missing. "drawn": one order,
            drawn from the texts and the seed, which does not depend on which one is `a`. "given": `a` first, for a
            `Tournament` that shows both orders itself; the others are for `both_orders=False`.
        seed: seed of the drawn order.
        criteria: what makes an answer better, as text for the judge; default: that of `templates`.
        voting: how often it is asked in each order; votes are averaged and `combine` is ignored.
        retry: attempts and time limit of each vote.

    `num_compared` counts pairs with a verdict; of those in both orders `num_flipped` had opposite verdicts, which is
    the judge's position bias.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        order: Literal["both", "drawn", "given"] = "both",
        seed: int = 0,
        criteria: str | None = None,
        voting: Voting | Mapping[str, Any] | None = None,
        retry: JudgeRetry | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, retry)
        self.order = one_of("PairwiseJudge.order", order, ("both", "drawn", "given"))
        self.seed = seed
        self._template = COMPARE.fill(criteria or QUALITY)
        self.num_compared = self.num_flipped = 0

    async def compare(self, prompt: str | Sequence[Message], a: str, b: str) -> float:
        """Return 1.0 if `a` is better, 0.5 for a tie, 0.0 if `b` is; symmetric except for "given".

        The judge does not see their thinking. A response without an answer loses against one with an answer, and equal
        ones tie; neither asks the judge.

        Raises:
            DataError: the prompt is invalid.
            InfraError: an order had too few verdicts.
        """
        first, second = answer_text(a), answer_text(b)
        if not first or not second or first == second:
            return 0.5 + 0.5 * (bool(first) - bool(second))
        question = prompt_text(prompt)
        if self.order == "drawn":
            content = repr((self.seed, question, *sorted((first, second)))).encode(errors="surrogatepass")
            orders = [(hashlib.sha256(content).digest()[0] & 1) != (first > second)]
        else:
            orders = [True, False][: 2 if self.order == "both" else 1]
        questions = [self._preference(question, first, second, straight=straight) for straight in orders]
        preferences = successes(await asyncio.gather(*questions, return_exceptions=True), len(questions))
        self.num_compared += 1
        self.num_flipped += self.order == "both" and preferences[0] * preferences[1] < 0
        total = sum(preferences)
        return 0.5 + 0.5 * ((total > 0) - (total < 0))

    async def _preference(self, question: str, a: str, b: str, *, straight: bool) -> float:
        """Return the votes' mean preference for `a`, from -1 to 1."""
        first, second = (a, b) if straight else (b, a)
        texts = {"question": question, "response_a": first, "response_b": second}
        votes = await self._votes(self._template, texts, read_preference)
        return fmean(2.0 * vote - 1.0 if straight else 1.0 - 2.0 * vote for vote in votes)
