"""Isolated execution of untrusted code: `LocalSandbox` here, others by `open_sandbox`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.sandbox.types import (
    ExecLimits,
    ExecResult,
    Execution,
    Isolation,
    Policy,
    Sandbox,
    SandboxBusy,
    SandboxUnavailable,
    Status,
)

if TYPE_CHECKING:
    from agentenv.sandbox.local import LocalSandbox
    from agentenv.sandbox.opening import open_sandbox

__all__ = [
    "ExecLimits",
    "ExecResult",
    "Execution",
    "Isolation",
    "LocalSandbox",
    "Policy",
    "Sandbox",
    "SandboxBusy",
    "SandboxUnavailable",
    "Status",
    "open_sandbox",
]


def __getattr__(name: str) -> object:
    # When first asked for: its modules import this package themselves.
    if name == "LocalSandbox":
        from agentenv.sandbox.local import LocalSandbox

        return LocalSandbox
    if name == "open_sandbox":
        from agentenv.sandbox.opening import open_sandbox

        return open_sandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
