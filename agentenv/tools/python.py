"""The tool `python`: runs a model's code in an isolated interpreter that persists across the calls of an episode.

Example::

    self.tool = PythonTool(sandbox)  # in `reset`, one for each episode
    {"observation": question, "tools": [schema_of(self.tool.python)]}  # what `reset` returns
    await answer_calls(states["tool_calls"], {"python": self.tool.python})  # in `step`
    await self.tool.aclose()  # in `close`
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from agentenv.errors import InfraError
from agentenv.sandbox.fusion.client import FusionSandbox, FusionSession
from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.local.session import InterpreterSession
from agentenv.sandbox.types import ExecLimits, ExecStatus
from agentenv.tools.toolset import shortened

_GONE = "[The interpreter has ended: variables and files are gone, the next call starts a new one.]"
_EXPIRED = "[A new interpreter: the last one had ended, its variables and files are gone.]"


class PythonTool:
    """Runs code in an `InterpreterSession` of a sandbox, opened at the first call; for use from one event loop."""

    def __init__(
        self, sandbox: LocalSandbox | FusionSandbox, *, limits: ExecLimits | None = None, max_chars: int = 4000
    ) -> None:
        """Store the settings; nothing is started.

        Args:
            sandbox: where the code runs; tools may share one.
            limits: of one call; memory and disk: of all calls together. None: the sandbox's own limits.
            max_chars: maximum length of an answer; the middle of a longer one is omitted.
        """
        self._sandbox, self._limits = sandbox, limits or sandbox.limits
        self._max_chars = max_chars
        self._session: InterpreterSession | FusionSession | None = None
        self._one_call = asyncio.Lock()

    async def python(self, code: str) -> str:
        """Run Python code in an interpreter that keeps its variables and files between calls, without network.

        Args:
            code: The code. What it prints is returned, and the value of a last expression.
        """
        async with self._one_call:
            expired = self._session is not None and self._session.over
            if self._session is None or self._session.over:
                session = self._sandbox.session(limits=self._limits)
                await session.open()
                self._session = session
            turn = await self._session.run(code)
        if turn.status is ExecStatus.INFRA:
            raise InfraError(f"python: expected the sandbox to run the code, got {turn.detail}. Try the episode again.")
        limits = self._limits
        reasons = {
            ExecStatus.CPU_TIMEOUT: f"it used {limits.cpu_s:g} s of CPU",
            ExecStatus.WALL_TIMEOUT: f"it ran for {limits.wall_s:g} s",
            ExecStatus.MEMORY: f"it used {limits.memory_mb} MiB of memory",
            ExecStatus.OUTPUT_LIMIT: "it printed too much",
            ExecStatus.DISK_LIMIT: f"its files took {limits.disk_mb} MiB",
            ExecStatus.POLICY: "it made a system call that is not allowed",
        }
        ended = f"[The code was ended: {reasons[turn.status]}.]" if turn.status in reasons else ""
        parts = [_EXPIRED * expired, turn.stdout, turn.stderr, turn.traceback or turn.value or "", ended]
        parts.append(_GONE * turn.ended)
        text = "\n".join(part.rstrip("\n") for part in parts if part.strip()) or "[No output.]"
        return shortened(text, self._max_chars)

    async def aclose(self) -> None:
        """End the interpreter; safe to call again. A later call starts a new interpreter."""
        session, self._session = self._session, None
        if session is not None:
            await session.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()
