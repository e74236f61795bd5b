"""Several responses ranked at once, in several orders of showing them."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from agentenv.rewards._arguments import whole_number
from agentenv.rewards._judge_text import numbers, prompt_text
from agentenv.rewards.judge import Asking, Judge, ask
from agentenv.rewards.judges import templates
from agentenv.rewards.judges.draws import Drawn
from agentenv.rewards.judges.voting import PATIENT, needed
from agentenv.rewards.text import final_text
from agentenv.types import Message


class ListwiseJudge:
    """Ranks responses to one question; their places are averaged over several orders of showing them.

    Orders are shuffled by the seed and the texts, so that it does not matter how the responses came; each second one is
    the one before it backwards, so that with an even number every response is shown early as often as late.

    Args:
        judge: who is asked, once for each order.
        orders: how many rankings are asked for.
        min_orders: as many must come, or nobody knows; by default all of them.
        criteria: what makes an answer better, for the judge; by default what `templates` says.
        asking: how often and how long each order is.
        seed: of the orders.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        orders: int = 2,
        min_orders: int | None = None,
        criteria: str | None = None,
        asking: Asking = PATIENT,
        seed: int = 0,
    ) -> None:
        self.judge, self.criteria, self.asking, self.seed = judge, criteria or templates.QUALITY, asking, seed
        self.orders = whole_number("ListwiseJudge.orders", orders, low=1)
        self.min_orders = self.orders
        if min_orders is not None:
            self.min_orders = whole_number("ListwiseJudge.min_orders", min_orders, low=1, high=orders)

    async def rank(self, prompt: str | Sequence[Message], responses: Sequence[str]) -> list[float]:
        """How well each response does, in the order given: 1.0 is the best place, 0.0 the last, evenly spaced between.

        Equal texts are shown once and share their place. One without an answer comes last, unseen. Where fewer than two
        answers differ nothing is asked: all that have an answer have 1.0.

        Raises:
            InfraError: too few rankings could be had.
        """
        texts = [final_text(response) or "" for response in responses]
        distinct = sorted({text for text in texts if text})
        places = await self._places(prompt_text(prompt), distinct, last=len(distinct) - ("" not in texts))
        return [places[text] if text else 0.0 for text in texts]

    async def _places(self, question: str, texts: Sequence[str], *, last: int) -> dict[str, float]:
        """How well each of some texts does that all differ, where the best place is 0."""
        if len(texts) < 2:
            return dict.fromkeys(texts, 1.0)
        asked = [self._ranking(question, order, vote) for vote, order in enumerate(self._shuffled(texts))]
        rankings = needed(await asyncio.gather(*asked, return_exceptions=True), self.min_orders)
        return {text: fmean(1.0 - ranking.index(text) / last for ranking in rankings) for text in texts}

    def _shuffled(self, texts: Sequence[str]) -> list[list[str]]:
        drawn = random.Random(hashlib.sha256(repr((self.seed, texts)).encode(errors="surrogatepass")).digest())
        orders: list[list[str]] = []
        while len(orders) < self.orders:
            order = drawn.sample(texts, len(texts))
            orders += [order, order[::-1]]
        return orders[: self.orders]

    async def _ranking(self, question: str, texts: Sequence[str], vote: int) -> list[str]:
        """The texts from the best to the worst."""
        number = len(texts)
        example = " > ".join(f"[{place}]" for place in range(number, 0, -1))
        instructions = templates.filled(templates.RANK, self.criteria, number=number, example=example)
        shown = {f"response_{place}": text for place, text in enumerate(texts, 1)}
        messages = templates.asking_about(
            instructions,
            templates.texts_of(question, **shown),
            ending=f'End with a ranking of all {number}: "Ranking: {example}" or in another order.',
            max_chars=self.asking.max_chars,
        )
        read = partial(ranking, number=number)
        order = await ask(Drawn(self.judge, vote), messages, read, self.asking, expected=f"a ranking of {number}")
        return [texts[place - 1] for place in order]


def ranking(reply: str, number: int) -> list[int] | None:
    """The ranking of a reply whose last line names each of 1..`number` once, the best first; else None."""
    found = numbers(reply, ">")
    return found if found is not None and sorted(found) == list(range(1, number + 1)) else None
