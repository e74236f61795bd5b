"""Isolated execution of untrusted code: `LocalSandbox` on this machine, other backends through `open_sandbox`.

Programs run inside what `guest` and `grading.guest` set up; all other modules run in the trainer's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names
from agentenv.sandbox.types import ExecLimits as ExecLimits
from agentenv.sandbox.types import ExecResult as ExecResult
from agentenv.sandbox.types import ExecStatus as ExecStatus
from agentenv.sandbox.types import Execution as Execution
from agentenv.sandbox.types import Isolation as Isolation
from agentenv.sandbox.types import Policy as Policy
from agentenv.sandbox.types import Sandbox as Sandbox
from agentenv.sandbox.types import SandboxBusy as SandboxBusy
from agentenv.sandbox.types import SandboxUnavailable as SandboxUnavailable

if TYPE_CHECKING:
    from agentenv.sandbox.factory import open_sandbox as open_sandbox
    from agentenv.sandbox.local.sandbox import LocalSandbox as LocalSandbox

# Imported on first use, because these modules import this package themselves.
__getattr__ = lazy_names(__name__)
