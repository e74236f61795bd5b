"""Calls between two ends: each call has an outcome, and nothing of it is left behind."""

import asyncio
import pickle

import pytest

from agentenv.episode.env_actors.process import Calls
from agentenv.errors import EngineError


class Ends:
    """Two ends without a socket; `near` calls, and `far` answers with an exception that the method names."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.near = Calls(lambda *frame: loop.call_soon(self.far.receive, *frame), self.answer, first=2)
        self.far = Calls(lambda *frame: loop.call_soon(self.near.receive, *frame), self.answer, first=1)
        self.answered = []

    async def answer(self, method, args):
        class Local(EngineError):
            pass

        self.answered.append(method)
        if method != "return":
            raise {"local": Local, "cancelled": asyncio.CancelledError, "of agentenv": EngineError}[method](
                "it is down"
            )
        return args

    async def call(self, method):
        async with asyncio.timeout(60):
            return pickle.loads(await self.near.call(pickle.dumps((method, 1))))


@pytest.mark.parametrize(
    ("method", "outcome"),
    [
        ("return", ("returned", 1)),
        ("local", ("unpicklable", "Local: it is down")),
        ("cancelled", ("unpicklable", "CancelledError: it is down")),
    ],
)
async def test_each_call_has_an_outcome_whatever_the_function_raises(method, outcome):
    assert await Ends().call(method) == outcome


async def test_an_error_of_the_tree_keeps_its_class():
    status, error = await Ends().call("of agentenv")
    assert (status, type(error), str(error)) == ("raised", EngineError, "it is down")


async def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing():
    ends = Ends()
    ends.far.receive(200, pickle.dumps(("return", 1)))
    ends.far.receive(200, b"")
    for _ in range(5):
        await asyncio.sleep(0)
    assert (ends.answered, ends.far._answering) == ([], {})
