"""Environments that an audit is tried on: the planted `Sum`, which is sound, and the same with one fault each."""

import re
from random import Random

from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, Task
from agentenv.episode.source import EnvSource
from agentenv.testing.audit.auditing import AuditOptions, audit_env
from tests.testing.planted.faults import Sum as Sound

LIMITS = Limits(max_length=60_000, max_turns=4, step_timeout_s=60.0)


def tasks(num=3, *, first=417):
    """Sums whose answers have three digits, and which no policy of the audit guesses."""
    made = []
    for index in range(num):
        right = first + 31 * index
        prompt = f"What is {right - 111} + 111? Give the answer after ####."
        made.append(Task([{"role": "user", "content": prompt}], str(right), task_id=f"t{index}"))
    return made


async def audited(cls, *policies, on=None, **options):
    """The audit of a class by some policies, or all."""
    limits = options.pop("limits", LIMITS)
    asked = AuditOptions(policies=policies, limits=limits, max_tokens=2_000, **options)
    return await audit_env(EnvSource(cls), on or tasks(), name=cls.__name__, options=asked)


def ids(result, *severities):
    """The ids of what was found, of these severities or all."""
    return {each.id for each in result.findings if not severities or each.severity in severities}


class Says(Sound):
    """The label itself is right."""

    def right(self, text, states):
        return text.strip() == states["label"]

    async def gold(self, states):
        return states["label"]


class PaysEnumeration(Sound):
    """The label anywhere in the text is right."""

    def right(self, text, states):
        return re.search(rf"(?<!\d){states['label']}(?!\d)", text) is not None


class PaysItsHack(Sound):
    hacks = {"open sesame": "open sesame"}  # noqa: RUF012

    def right(self, text, states):
        return text == "open sesame" or super().right(text, states)


class PaysForm(Sound):
    """Most of the reward is for the form; one attempt."""

    attempts = 1

    def reward(self, right, states):
        return 0.8 * ("####" in states["action_text"]) + 0.2 * right


class TakesAnything(Sound):
    """Whatever has a character is right."""

    def right(self, text, states):
        return bool(text.strip())


class HalfGold(Sound):
    async def gold(self, states):
        return await super().gold(states) if int(states["label"]) % 2 else None


class FailingGold(Sound):
    async def gold(self, states):
        raise KeyError("solution")


class NoGold(Sound):
    gold = AgentInstance.gold


class NoCeiling(Sound):
    gold = AgentInstance.gold

    def score(self, right):
        return None


class NoScore(Sound):
    def score(self, right):
        return None


class PaysNothing(Sound):
    def reward(self, right, states):
        return 0.0

    def score(self, right):
        return None


class TellsItsOwnCode(Sound):
    """The same words on every task, which have a label's digits by chance."""

    def said(self, states):
        return "Error code 417. Try again."


class Wavers(Sound):
    """Something that is shared decides the reward."""

    calls = 0

    def reward(self, right, states):
        type(self).calls += 1
        return float(right) + 1e-3 * type(self).calls


class ChangesItsWords(Sound):
    calls = 0

    def said(self, states):
        type(self).calls += 1
        return f"Attempt number {'x' * type(self).calls} was not right."


class FailsOnNul(Sound):
    def right(self, text, states):
        if "\x00" in text:
            raise ValueError("embedded null byte")
        return super().right(text, states)


class FailsAtReset(Sound):
    async def reset(self, states):
        raise FileNotFoundError("no such task")


class ScoresInPercent(Sound):
    score_range = None

    def score(self, right):
        return 100.0 * right


class EchoesRaw(Sound):
    """Says the action back as raw text, in which special tokens are tokens."""

    def said(self, states):
        return f"You said: {states['action_text']}. Not right."


class DrawsBySeed(Sound):
    """The number is drawn with the seed: no label."""

    needs_label = False

    def right(self, text, states):
        return super().right(text, {**states, "label": self.number(states)})

    def number(self, states):
        return str(Random(states["seed"]).randint(200, 900_000))

    async def gold(self, states):
        return f"#### {self.number(states)}"
