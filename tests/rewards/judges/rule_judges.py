"""Judges, comparers and rewards for tests: small classes that answer by a rule and remember what they were asked."""

import asyncio
import re

from agentenv.errors import InfraError
from agentenv.rewards.types import RewardResult


def between(shown, name):
    """What stands between the tags of a text that a judge is shown; None where it is not."""
    found = re.search(rf"<({name}_[0-9a-f]+)>\n(.*?)\n</\1>", shown, re.DOTALL)
    return found and found[2]


def longer(shown):
    """The verdict of a judge that prefers the longer of two answers."""
    a, b = (len(between(shown, f"response_{name}")) for name in "ab")
    return "Verdict: " + ("TIE" if a == b else "A" if a > b else "B")


class ScriptedJudge:
    """Gives these replies in turn, the last one for ever; an exception among them is raised."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    async def complete(self, messages):
        self.asked.append(messages)
        await asyncio.sleep(0)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, BaseException):
            raise reply
        return reply


class RuleJudge:
    """Replies with what a function makes of the user's message."""

    def __init__(self, rule):
        self.rule, self.num_asked = rule, 0

    async def complete(self, messages):
        self.num_asked += 1
        await asyncio.sleep(0)
        return self.rule(messages[-1]["content"])


class Down:
    """A judge whose server is down."""

    async def complete(self, messages):
        raise InfraError("judge: expected a reply, got HTTP 503. Start it.")


class Comparing:
    """Compares with a function of two texts; counts, and remembers the pairs in order."""

    def __init__(self, function):
        self.function, self.asked = function, []

    async def compare(self, prompt, a, b):
        self.asked.append((a, b))
        await asyncio.sleep(0)
        return self.function(a, b)


class Rewarding:
    """A reward of fixed answers by text; an exception is raised."""

    def __init__(self, answers, bounds=(0.0, 1.0)):
        self.answers, self.bounds = answers, bounds

    async def grade(self, response):
        answer = self.answers[response.text] if isinstance(self.answers, dict) else self.answers
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, RewardResult):
            return answer
        return RewardResult(answer, answer if 0 <= answer <= 1 else None)
