"""The sandbox that all graders of a process share: one per event loop, opened at first use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv._util.calls import waiting
from agentenv.errors import InfraError
from agentenv.sandbox.factory import open_sandbox
from agentenv.sandbox.grading import PytestSuite, TestSuite
from agentenv.sandbox.types import ExecLimits, Sandbox, SandboxUnavailable

LIMITS = ExecLimits(cpu_s=2.0)
"""Default limits of one test."""


@dataclass(slots=True)
class _SharedSandbox:
    """One sandbox, open or being opened."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # guards the two below: one opens, the others wait
    sandbox: Sandbox | None = None
    holder: AsyncGenerator[Sandbox, None] | None = None


_sandboxes: dict[asyncio.AbstractEventLoop, dict[str, _SharedSandbox]] = {}


async def shared_sandbox(options: Mapping[str, Any] | None = None) -> Sandbox:
    """Return the running event loop's sandbox with these options of `open_sandbox`; it closes with the loop.

    Raises:
        ConfigError: the backend or an option is unknown.
        SandboxUnavailable: no isolation of the required strength is available.
        InfraError: a remote sandbox is unavailable now, such as when no endpoint answers.
        MissingDependency: the backend needs a package that is not installed.
    """
    for loop in [loop for loop in _sandboxes if loop.is_closed()]:
        del _sandboxes[loop]
    key = json.dumps(dict(options or {}), sort_keys=True, default=repr)
    shared = _sandboxes.setdefault(asyncio.get_running_loop(), {}).setdefault(key, _SharedSandbox())
    async with shared.lock:
        if shared.sandbox is None:
            # An event loop closes open generators before it ends, which is the only hook that runs in time.
            holder = _keep_open(options or {})
            shared.sandbox, shared.holder = await anext(holder), holder
    return shared.sandbox


async def sandbox_for(suite: TestSuite, own: Mapping[str, Any] | Sandbox | None) -> Sandbox:
    """Return the sandbox for the tests of a suite: `own`, or the shared one with these options."""
    if own is not None and not isinstance(own, Mapping):
        return own
    options = dict(own or {})
    if isinstance(suite, PytestSuite) and options.get("backend", "local") == "local":
        options["preimport"] = ["pytest", *options.get("preimport", ())]
    return await shared_sandbox(options)


def configured_sandbox(options: Mapping[str, Any]) -> Sandbox:
    """Return a sandbox with these options of `open_sandbox`, without starting anything.

    Raises:
        ConfigError: the backend or an option is unknown.
        MissingDependency: the backend needs a package that is not installed.
    """
    # Waiting for a slot behind other programs must not count toward a caller's time limit.
    own = {"waiting": waiting} if options.get("backend", "local") in ("local", "sandbox_fusion") else {}
    return open_sandbox(**{**options, **own})


async def _keep_open(options: Mapping[str, Any]) -> AsyncGenerator[Sandbox, None]:
    try:
        async with configured_sandbox(options) as sandbox:
            yield sandbox
    except SandboxUnavailable as error:
        if options.get("backend", "local") == "local":
            raise
        # A remote backend may recover: InfraError makes the episode retry.
        raise InfraError(f"sandbox: {error}") from error
