"""Plain functions that wait for what is async, wherever they are called."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentenv._util.loop_thread import run_sync
from agentenv.errors import ContractError


async def double(number):
    await asyncio.sleep(0)
    return 2 * number


async def test_inside_of_a_running_loop__row_4():
    """The seed's asyncio.run raises here."""
    work = double(2)
    with pytest.raises(RuntimeError, match="running event loop"):
        asyncio.run(work)
    work.close()
    assert run_sync(double(2)) == 4


def test_all_calls_share_one_loop_from_any_thread():
    async def which():
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(5) as threads:
        assert len(set(threads.map(lambda _: run_sync(which()), range(5)))) == 1


def test_on_its_own_loop_it_refuses_instead_of_waiting_for_itself():
    async def nested():
        return run_sync(double(1))

    with pytest.raises(ContractError, match="Await it"):
        run_sync(nested())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_there_is_a_new_loop():
    assert run_sync(double(2)) == 4
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # one that waits for a loop that is not there ends all the same
        try:
            code = run_sync(double(3))
        except BaseException:
            code = 99  # and not the rest of the tests, twice
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
