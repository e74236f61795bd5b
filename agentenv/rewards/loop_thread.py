"""One event loop in a thread of its own, for plain functions that need what is async: whoever calls them may have one.

`asyncio.run` is no way to do that: it refuses inside of a running loop, and ends with each call the loop that pools,
clients and semaphores live on.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentenv.errors import ContractError, InfraError

_T = TypeVar("_T")


class LoopThread:
    """An event loop that runs in a daemon thread until the process ends, which it never holds up."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine gives, run there; it is cancelled when the wait for it ends, as by Ctrl-C.

        Raises:
            ContractError: the caller is that loop, which would wait for itself.
            BaseException: what the coroutine raised.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise ContractError(f"{self._thread.name}: expected another thread, got the loop's own. Await it instead.")
        future = asyncio.run_coroutine_threadsafe(_carried(work), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # which does nothing to one that is done


async def _carried(work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` gives; what would end the loop of all callers ends this call alone."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise InfraError(f"run_sync: expected a result, got {error!r}. Raise another exception.") from error


_shared: LoopThread | None = None
_making = threading.Lock()  # guards _shared: several threads may call first


def run_sync(work: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine gives, from a plain function, whether or not an event loop runs in the caller's thread.

    All calls share one loop in a thread, started at the first of them and again after a fork.

    Raises:
        ContractError: called on that loop itself.
        BaseException: what the coroutine raised.
    """
    global _shared
    with _making:
        if _shared is None or _shared.pid != os.getpid():
            _shared = LoopThread("agentenv-rewards")
        thread = _shared
    return thread.call(work)
