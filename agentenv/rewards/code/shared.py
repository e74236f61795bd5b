"""The sandbox that all graders of a process share: one per event loop, opened when it is first asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.deadlines import waiting
from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.grading import PytestSuite, TestSuite
from agentenv.sandbox.opening import open_sandbox
from agentenv.sandbox.types import ExecLimits, Sandbox, SandboxUnavailable

LIMITS = ExecLimits(cpu_s=2.0)
"""Of one test, unless said otherwise."""


@dataclass(slots=True)
class _Held:
    """One open sandbox, or the place of one that is being opened."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # guards the two below: one opens, the others wait
    sandbox: Sandbox | None = None
    holder: AsyncGenerator[Sandbox, None] | None = None


_held: dict[asyncio.AbstractEventLoop, dict[str, _Held]] = {}


async def shared_sandbox(options: Mapping[str, Any] | None = None) -> Sandbox:
    """The sandbox of the running event loop with these options of `open_sandbox`; it is closed when the loop is.

    Raises:
        ConfigError: there is no such backend, or it has no such options.
        SandboxUnavailable: no isolation that is strong enough can be had here.
        InfraError: a sandbox elsewhere is not to be had now, as where no endpoint answers.
        MissingDependency: the backend needs a package that is not installed.
    """
    for loop in [loop for loop in _held if loop.is_closed()]:
        del _held[loop]
    key = json.dumps(dict(options or {}), sort_keys=True, default=repr)
    held = _held.setdefault(asyncio.get_running_loop(), {}).setdefault(key, _Held())
    async with held.lock:
        if held.sandbox is None:
            # An event loop closes the generators that are still open before it ends: nobody else could do it in time.
            holder = _opened(options or {})
            held.sandbox, held.holder = await anext(holder), holder
    return held.sandbox


async def sandbox_for(suite: TestSuite, own: Mapping[str, Any] | Sandbox | None) -> Sandbox:
    """The sandbox for the tests of a suite: `own`, or the shared one with these options. As `shared_sandbox` else."""
    if own is not None and not isinstance(own, Mapping):
        return own
    options = dict(own or {})
    if isinstance(suite, PytestSuite):
        options["preimport"] = ["pytest", *options.get("preimport", ())]
    return await shared_sandbox(options)


def exec_limits(
    where: str, fields: Mapping[str, Any] | ExecLimits | None, *, default: ExecLimits = LIMITS
) -> ExecLimits:
    """The limits of one test: the default ones with these fields, or those given.

    Raises:
        ConfigError: there are no such fields.
    """
    if isinstance(fields, ExecLimits):
        return fields
    try:
        return replace(default, **(fields or {}))
    except TypeError as error:
        raise ConfigError(
            f"{where}.limits: expected fields of ExecLimits, got {fields!r:.200}: {error}. Change them."
        ) from error


def checked(options: Mapping[str, Any]) -> Sandbox:
    """A sandbox with these options of `open_sandbox`, of which nothing is started.

    Raises:
        ConfigError: there is no such backend, or it has no such options.
        MissingDependency: the backend needs a package that is not installed.
    """
    # Whoever waits for a slot behind others' programs is not to be late for it.
    own = {"waiting": waiting} if options.get("backend", "local") in ("local", "sandbox_fusion") else {}
    return open_sandbox(**{**options, **own})


async def _opened(options: Mapping[str, Any]) -> AsyncGenerator[Sandbox, None]:
    try:
        async with checked(options) as sandbox:
            yield sandbox
    except SandboxUnavailable as error:
        if options.get("backend", "local") == "local":
            raise
        # What is down elsewhere may be there again: it is tried once more, and is nobody's mistake.
        raise InfraError(f"sandbox: {error}") from error
