"""Isolated execution of untrusted code: `LocalSandbox` on this machine, other backends through `open_sandbox`.

Programs run inside what `guest` and `grading.guest` set up; all other modules run in the trainer's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names
from agentenv.sandbox.types import (
    ExecLimits,
    ExecResult,
    ExecStatus,
    Execution,
    Isolation,
    Policy,
    Sandbox,
    SandboxBusy,
    SandboxUnavailable,
)

if TYPE_CHECKING:
    from agentenv.sandbox.factory import open_sandbox
    from agentenv.sandbox.local.sandbox import LocalSandbox

__all__ = [
    "ExecLimits",
    "ExecResult",
    "ExecStatus",
    "Execution",
    "Isolation",
    "LocalSandbox",
    "Policy",
    "Sandbox",
    "SandboxBusy",
    "SandboxUnavailable",
    "open_sandbox",
]
# Imported on first use, because these modules import this package themselves.
__getattr__ = lazy_names(
    __name__,
    {"LocalSandbox": "agentenv.sandbox.local.sandbox", "open_sandbox": "agentenv.sandbox.factory"},
)
