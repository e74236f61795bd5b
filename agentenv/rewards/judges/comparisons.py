"""Compare two responses, or rank a group: neither a judge's preference for a position nor the input order decides.

Source of `ListwiseReward`: RM-Gallery's listwise evaluator, 1 - 2 * place / (n - 1), which keeps the input order if the
judge fails; here the reward is missing then.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Literal

from agentenv.core.arguments import one_of, shown, whole_number
from agentenv.core.types import Message
from agentenv.rewards.groups.function import against_reference
from agentenv.rewards.judges.asking import JudgeRetry, Voting, VotingBase, ask, successes
from agentenv.rewards.judges.protocol import Judge
from agentenv.rewards.judges.templates import (
    COMPARE,
    QUALITY,
    RANK,
    answer_text,
    prompt_text,
    read_preference,
    read_ranking,
)
from agentenv.rewards.types import Response, RewardResult, Status


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

        async def preference(straight: bool) -> float:
            # The votes' mean preference for `a`, from -1 to 1.
            shown_first, shown_second = (first, second) if straight else (second, first)
            texts = {"question": question, "response_a": shown_first, "response_b": shown_second}
            votes = await self._votes(self._template, texts, read_preference)
            return fmean(2.0 * vote - 1.0 if straight else 1.0 - 2.0 * vote for vote in votes)

        preferences = successes(await asyncio.gather(*map(preference, orders), return_exceptions=True), len(orders))
        self.num_compared += 1
        self.num_flipped += self.order == "both" and preferences[0] * preferences[1] < 0
        total = sum(preferences)
        return 0.5 + 0.5 * ((total > 0) - (total < 0))


class ListwiseReward(VotingBase):
    """1.0 for the response that is ranked first, -1.0 for the last, evenly spaced between; a GroupReward.

    The orders in which the judge sees the responses are shuffled by the seed and the texts, so that the input order
    does not matter. Every second order reverses the one before it, so that with an even number each response is shown
    early as often as late. The reward is the mean over the orders.

    Args:
        judge: the judge, asked once for each order.
        orders: number of rankings.
        min_orders: number of rankings that must succeed for a reward; default: all.
        criteria: what makes an answer better, as text for the judge; default: that of `templates`.
        retry: attempts and time limit of each order.
        seed: seed of the orders.

    Equal texts are shown once and share their rank. A response without an answer comes last, unseen. A reference takes
    part. If fewer than two answers differ there is nothing to rank, and they share their place.

    Components: `comparison_score`, the reward; `n_valid`, the number of rankings; `win` and `win_and` against the
    reference, None without one.

    Raises:
        ConfigError: an argument is invalid.
    """

    bounds = (-1.0, 1.0)
    component_names = ("comparison_score", "n_valid", "win", "win_and")

    def __init__(
        self,
        judge: Judge,
        *,
        orders: int = 2,
        min_orders: int | None = None,
        criteria: str | None = None,
        retry: JudgeRetry | Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(judge, None, retry)
        self.criteria = criteria or QUALITY
        self.seed = seed
        self.orders = self.min_orders = whole_number("ListwiseReward.orders", orders, low=1)
        if min_orders is not None:
            self.min_orders = whole_number("ListwiseReward.min_orders", min_orders, low=1, high=orders)

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """Return one result per response, in order.

        Raises:
            DataError: the prompt is invalid.
            InfraError: too few rankings succeeded.
        """
        if not responses:
            return []
        texts = [answer_text(response.text, response.prompt) for response in responses]
        judged = answer_text(reference) if reference else ""
        competitors = {*texts, judged} if judged else set(texts)
        candidates, question = sorted(competitors - {""}), prompt_text(responses[0].prompt)
        rankings = [candidates]
        if len(candidates) > 1:
            seed = repr((self.seed, candidates)).encode(errors="surrogatepass")
            rng = random.Random(hashlib.sha256(seed).digest())
            orders: list[list[str]] = []
            while len(orders) < self.orders:
                order = rng.sample(candidates, len(candidates))
                orders += [order, order[::-1]]
            questions = [self.ranking(question, order, vote=vote) for vote, order in enumerate(orders[: self.orders])]
            rankings = successes(await asyncio.gather(*questions, return_exceptions=True), self.min_orders)
        places = [[*ranked, *([""] if "" in competitors else [])] for ranked in rankings]
        last = len(competitors) - 1
        scores = {
            text: fmean(1.0 - 2.0 * ranked.index(text) / last for ranked in places) if last else 0.0
            for text in competitors
        }
        against = scores[judged] if judged else None
        return [
            RewardResult(
                scores[text],
                (scores[text] + 1) / 2,
                Status.OK if text else Status.NO_ANSWER,
                {"comparison_score": scores[text], "n_valid": float(len(rankings))}
                | against_reference(scores[text], against),
                extracted=shown(text) or None,
            )
            for text in texts
        ]

    async def ranking(self, question: str, texts: Sequence[str], *, vote: int) -> list[str]:
        """Return the texts as the judge ranks them, shown in this order.

        Raises:
            InfraError: it gave no ranking.
        """
        number = len(texts)
        example = " > ".join(f"[{place}]" for place in range(number, 0, -1))
        template = RANK.fill(self.criteria, number=number, example=example)
        named = {"question": question} | {f"response_{place}": text for place, text in enumerate(texts, 1)}
        messages, read = await self._messages(template, named), partial(read_ranking, number=number)
        order = await ask(self.judge, messages, read, self.retry, expected=template.expected, vote=vote)
        return [texts[place - 1] for place in order]
