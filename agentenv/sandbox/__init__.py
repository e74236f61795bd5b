"""Isolated execution of untrusted code: `LocalSandbox` here, other backends beside it."""

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
]


def __getattr__(name: str) -> object:
    # When first asked for: its modules import this package themselves.
    if name == "LocalSandbox":
        from agentenv.sandbox.local import LocalSandbox

        return LocalSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
