"""What an environment raises that would end the event loop: an error of its own, but for the user's own interrupt."""

import asyncio
import threading

import pytest

from agentenv import AgentInstance
from agentenv._util.calls import call, create
from agentenv.errors import ContractError
from tests.gymnasium_env.vector_worlds import Fragile

STOPS = list(Fragile.stops.values())
ELSEWHERE = [pytest.param(True, id="in a thread"), pytest.param(False, id="in the main thread")]


def returns(coroutine):
    """A plain function that gives something to await."""
    return lambda: coroutine()


def run(work, *, in_thread):
    """What a coroutine raises on a loop of its own."""
    raised = []

    def runs():
        try:
            asyncio.run(work)
        except BaseException as error:
            raised.append(error)

    if in_thread:
        thread = threading.Thread(target=runs)
        thread.start()
        thread.join(60)
    else:
        runs()
    return raised[0]


@pytest.mark.parametrize("in_thread", ELSEWHERE)
@pytest.mark.parametrize("way", ["async", "awaitable", "constructor", "async constructor"])
@pytest.mark.parametrize("stop", STOPS)
def test_all_but_an_interrupt_in_the_main_thread_is_a_contract_error(stop, way, in_thread):
    async def stops():
        await asyncio.sleep(0)
        raise stop

    class Stops(AgentInstance):
        def __init__(self):
            raise stop

    class StopsLater(AgentInstance):
        async def __init__(self):
            await stops()

    works = {
        "async": lambda: call(stops), "awaitable": lambda: call(returns(stops)),
        "constructor": lambda: create(Stops, {}), "async constructor": lambda: create(StopsLater, {}),
    }  # fmt: skip
    error = run(works[way](), in_thread=in_thread)
    if stop is KeyboardInterrupt and not in_thread and way != "constructor":  # a plain one has a thread
        assert type(error) is KeyboardInterrupt
    else:
        assert type(error) is ContractError
        assert f"expected a return value, got {stop.__name__}()" in str(error)
        assert type(error.__cause__) is stop
