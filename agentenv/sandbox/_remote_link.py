"""How a far host is asked, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.types import SandboxBusy, SandboxUnavailable

_ERRORS: dict[str, type[ConfigError | InfraError]] = {
    kind.__name__: kind for kind in (ConfigError, InfraError, SandboxBusy, SandboxUnavailable)
}


class LinkLost(InfraError):
    """The far side is gone, or not well; nothing is known of what it ran."""


class Link(Protocol):
    """How a far host is asked."""

    async def call(self, method: str, **arguments: Any) -> Any:
        """What a method of the far `Host` gives.

        Raises:
            LinkLost: it is gone.
            AgentEnvError: what the method raised.
            asyncio.CancelledError: after the far side has ended what it did for this call.
        """


def seen(future: asyncio.Future[Any]) -> None:
    """Ask a future for its exception, so that asyncio does not complain that nobody did: for `add_done_callback`."""
    if not future.cancelled():
        future.exception()


def value_of(answer: Mapping[str, Any]) -> Any:
    """What a far host answered.

    Raises:
        AgentEnvError: that it raised.
    """
    if "error" in answer:
        name, message = answer["error"]
        raise _ERRORS.get(str(name), InfraError)(str(message))
    return answer["value"]
