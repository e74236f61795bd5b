"""Sandboxes at one level each, for the tests of escapes."""

from __future__ import annotations

from typing import Any

from agentenv.sandbox.types import Isolation


def open_sandbox(level: Isolation) -> Any:
    """A sandbox at exactly this level.

    Raises:
        SandboxUnavailable: when entered, where this level is not to be had.
    """
    if level is Isolation.NONE:
        from tests.sandbox.escapes_run import Bare

        class _Opened(Bare):
            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *exc: Any) -> None:
                return None

        return _Opened()
    from agentenv.sandbox.local import LocalSandbox

    return LocalSandbox(isolation=level)
