"""The protocol between a remote sandbox and its host."""

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
    """The remote host is gone or does not respond; the outcome of its programs is unknown."""


class Link(Protocol):
    """A connection to a remote host."""

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the remote `Host` and return its result.

        Raises:
            LinkLost: the host is gone.
            AgentEnvError: the method raised it.
            asyncio.CancelledError: after the host has stopped the work of this call.
        """


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future so that asyncio does not log it; for `add_done_callback`."""
    if not future.cancelled():
        future.exception()


def value_of(answer: Mapping[str, Any]) -> Any:
    """Return the value in an answer of a remote host.

    Raises:
        AgentEnvError: the answer holds an error instead.
    """
    if "error" in answer:
        name, message = answer["error"]
        raise _ERRORS.get(str(name), InfraError)(str(message))
    return answer["value"]
