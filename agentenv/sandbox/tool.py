"""The tool `python`: code of a model in an isolated interpreter that stays between the calls of an episode.

Example::

    self.tool = PythonTool(sandbox)  # in `reset`, one for each episode
    {"observation": question, "tools": [schema_of(self.tool.python)]}  # what `reset` returns
    await answer_calls(states["tool_calls"], {"python": self.tool.python})  # in `step`
    await self.tool.aclose()  # in `close`
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.local import LocalSandbox
from agentenv.sandbox.session import Session, TurnResult
from agentenv.sandbox.types import ExecLimits, Status

_GONE = "[The interpreter has ended: variables and files are gone, the next call starts a new one.]"
_EXPIRED = "[A new interpreter: the last one had ended, its variables and files are gone.]"


class PythonTool:
    """Runs code in a `Session` of a sandbox, opened at the first call; used from one event loop."""

    def __init__(
        self, sandbox: LocalSandbox, *, limits: ExecLimits | None = None, max_chars: int = 4000, tenant: str = ""
    ) -> None:
        """Nothing is started yet.

        Args:
            sandbox: where it runs; many tools may share one.
            limits: of one call; memory and disk, of all calls together. The sandbox's own when None.
            max_chars: of an answer; of a longer one the middle is left out.
            tenant: whose turn it is when programs wait for a core, such as the episode's id.

        Raises:
            ConfigError: the sandbox has no sessions, as one over HTTP.
        """
        if not hasattr(sandbox, "session"):
            raise ConfigError(
                f"PythonTool: expected a sandbox with sessions, got {type(sandbox).__name__}, which has none. "
                "Use a LocalSandbox, or the backend docker, ray or e2b."
            )
        self._sandbox, self._limits, self._tenant = sandbox, limits or sandbox.limits, tenant
        self._max_chars = max_chars
        self._session: Session | None = None
        self._one_call = asyncio.Lock()

    async def python(self, code: str) -> str:
        """Run Python code in an interpreter that keeps its variables and files between calls, without network.

        Args:
            code: The code. What it prints is returned, and the value of a last expression.
        """
        async with self._one_call:
            expired = self._session is not None and self._session.over
            session = await self._opened()
            turn = await session.run(code)
        if turn.status is Status.INFRA:
            raise InfraError(f"python: expected the sandbox to run the code, got {turn.detail}. Try the episode again.")
        parts = [_EXPIRED * expired, turn.stdout, turn.stderr, turn.traceback or turn.value or "", self._limit(turn)]
        parts.append(_GONE * turn.ended)
        text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
        return _shortened(text or "[No output.]", self._max_chars)

    async def aclose(self) -> None:
        """End the interpreter; again is harmless, and a later call starts a new one."""
        session, self._session = self._session, None
        if session is not None:
            await session.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()

    async def _opened(self) -> Session:
        if self._session is None or self._session.over:
            session = self._sandbox.session(limits=self._limits, tenant=self._tenant)
            await session.open()
            self._session = session
        return self._session

    def _limit(self, turn: TurnResult) -> str:
        """Which limit ended the code, and how much it is."""
        limits = self._limits
        said = {
            Status.CPU_TIMEOUT: f"it used {limits.cpu_s:g} s of CPU",
            Status.WALL_TIMEOUT: f"it ran for {limits.wall_s:g} s",
            Status.MEMORY: f"it used {limits.memory_mb} MiB of memory",
            Status.OUTPUT_LIMIT: "it printed far too much",
            Status.DISK_LIMIT: f"its files took {limits.disk_mb} MiB",
            Status.POLICY: "it made a system call that is not allowed",
        }
        what = said.get(turn.status)
        return f"[The code was ended: {what}.]" if what else ""


def _shortened(text: str, max_chars: int) -> str:
    """The beginning and the end, where the text is longer."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
