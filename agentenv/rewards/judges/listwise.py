"""Reward a group by a judge that ranks all of its responses together. Without a ranking, the reward is missing.

Source: RM-Gallery's listwise evaluator, 1 - 2 * place / (n - 1), which keeps the input order if the judge fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from agentenv.core.arguments import shown, whole_number
from agentenv.rewards.groups.function import against_reference
from agentenv.rewards.judges.protocol import Judge, JudgeVote
from agentenv.rewards.judges.templates import QUALITY, RANK, answer_text, prompt_text
from agentenv.rewards.judges.verdicts import read_ranking
from agentenv.rewards.judges.voting import JudgeRetry, VotingBase, ask, successes
from agentenv.rewards.types import Response, RewardResult, Status


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
            questions = [self._ranking(question, order, vote=vote) for vote, order in enumerate(orders[: self.orders])]
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

    async def _ranking(self, question: str, texts: Sequence[str], *, vote: int) -> list[str]:
        number = len(texts)
        example = " > ".join(f"[{place}]" for place in range(number, 0, -1))
        template = RANK.fill(self.criteria, number=number, example=example)
        named = {"question": question} | {f"response_{place}": text for place, text in enumerate(texts, 1)}
        messages, read = await self._messages(template, named), partial(read_ranking, number=number)
        order = await ask(JudgeVote(self.judge, vote), messages, read, self.retry, expected=template.expected)
        return [texts[place - 1] for place in order]
