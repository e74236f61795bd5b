"""external_work tells an event loop with virtual time that threads or processes work for it.

The code that is sent to remote sandboxes includes this module.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext


def external_work() -> AbstractContextManager[object]:
    """Return a context during which threads or processes work for the running loop: virtual time stands still."""
    enter = getattr(asyncio.get_running_loop(), "external_work", None)
    return nullcontext() if enter is None else enter()
