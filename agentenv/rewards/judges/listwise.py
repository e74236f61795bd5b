"""Rewards of a group from a judge that ranks all of its responses at once. No ranking is no reward.

Source: RM-Gallery's listwise evaluator, 1 - 2 * place / (n - 1); there a judge that failed ranks them as they came.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from agentenv.rewards._arguments import shown, whole_number
from agentenv.rewards.groups import against_reference
from agentenv.rewards.judges.asking import Asker, Asking, ask, needed
from agentenv.rewards.judges.draws import Drawn, Judge
from agentenv.rewards.judges.templates import QUALITY, RANK, prompt_text
from agentenv.rewards.judges.verdicts import ranking
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status


class ListwiseReward(Asker):
    """1.0 for the response that is ranked first, -1.0 for the last, evenly spaced between; a GroupReward.

    Orders of showing them are shuffled by the seed and the texts, so that it does not matter how the responses came;
    each second one is the one before it backwards, so that with an even number every response is shown early as often
    as late. The reward is the mean over the orders.

    Args:
        judge: who is asked, once for each order.
        orders: how many rankings are asked for.
        min_orders: as many must come, or nobody knows; by default all of them.
        criteria: what makes an answer better, for the judge; by default what `templates` says.
        asking: how often and how long each order is.
        seed: of the orders.

    Equal texts are shown once and share their rank. A response without an answer comes last, unseen. A reference takes
    part. Where fewer than two answers differ there is nothing to rank, and those share their place.

    Components: `comparison_score`, the reward; `n_valid`, the rankings that were had; `win` and `win_and` against the
    reference, None without one.

    Raises:
        ConfigError: an argument is none of its kind.
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
        asking: Asking | Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(judge, None, asking)
        self.criteria, self.seed = criteria or QUALITY, seed
        self.orders = self.min_orders = whole_number("ListwiseReward.orders", orders, low=1)
        if min_orders is not None:
            self.min_orders = whole_number("ListwiseReward.min_orders", min_orders, low=1, high=orders)

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """One result per response, in order.

        Raises:
            DataError: the prompt is none.
            InfraError: too few rankings could be had.
        """
        if not responses:
            return []
        texts = [final_text(response.text) or "" for response in responses]
        judged = (final_text(reference) or "") if reference else ""
        competitors = {*texts, judged} if judged else set(texts)
        rankings = await self._rankings(prompt_text(responses[0].prompt), sorted(competitors - {""}))
        places = [[*ranked, *([""] if "" in competitors else [])] for ranked in rankings]
        scores = {text: fmean(_score(each, text) for each in places) for text in competitors}
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

    async def _rankings(self, question: str, texts: Sequence[str]) -> list[list[str]]:
        """The texts from the best to the worst, by each ranking that was had."""
        if len(texts) < 2:
            return [list(texts)]
        asked = [self._ranking(question, order, vote=vote) for vote, order in enumerate(self._shuffled(texts))]
        return needed(await asyncio.gather(*asked, return_exceptions=True), self.min_orders)

    def _shuffled(self, texts: Sequence[str]) -> list[list[str]]:
        drawn = random.Random(hashlib.sha256(repr((self.seed, texts)).encode(errors="surrogatepass")).digest())
        orders: list[list[str]] = []
        while len(orders) < self.orders:
            order = drawn.sample(texts, len(texts))
            orders += [order, order[::-1]]
        return orders[: self.orders]

    async def _ranking(self, question: str, texts: Sequence[str], *, vote: int) -> list[str]:
        number = len(texts)
        example = " > ".join(f"[{place}]" for place in range(number, 0, -1))
        template = RANK.filled(self.criteria, number=number, example=example)
        named = {"question": question} | {f"response_{place}": text for place, text in enumerate(texts, 1)}
        messages, read = await self._messages(template, named), partial(ranking, number=number)
        order = await ask(Drawn(self.judge, vote), messages, read, self.asking, expected=template.expected)
        return [texts[place - 1] for place in order]


def _score(ranked: Sequence[str], text: str) -> float:
    return 1.0 - 2.0 * ranked.index(text) / (len(ranked) - 1) if len(ranked) > 1 else 0.0
