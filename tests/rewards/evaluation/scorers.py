"""Scorers without a model, for tests: what they say of a conversation is a function's."""

from __future__ import annotations

import asyncio

from agentenv.rewards.evaluation.evaluate import RewardModel
from agentenv.rewards.evaluation.rows import item_of
from agentenv.rewards.models.types import Scored


class Scripted:
    """Gives `value(last message's text)`; what that raises, it raises."""

    def __init__(self, value=len, *, drift=0.0):
        self.value, self.drift = value, drift
        self.asked = []
        self.now = self.most = 0
        self.closed = False

    async def score(self, conversation):
        self.asked.append(conversation)
        self.now += 1
        self.most = max(self.most, self.now)
        together = self.now
        try:
            await asyncio.sleep(0)
            together = max(together, self.now)
            text = conversation[-1]["content"]
            return Scored(float(self.value(text)) + self.drift * (together > 1), len(text.split()), "cut" in text)
        finally:
            self.now -= 1

    async def close(self):
        self.closed = True


def model(value=len, **kwargs):
    return RewardModel("scripted", scorer=Scripted(value, **kwargs))


def pair(chosen, rejected, *, index=0, prompt="q", **row):
    return item_of({"prompt": prompt, "chosen": chosen, "rejected": rejected, **row}, where="row", index=index)
