"""A sandbox on a host that is out of memory."""

from agentenv.errors import InfraError
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation


class BrokenSandbox:
    """Fails at each program."""

    isolation, backend, limits, run_slots = Isolation.NONE, "broken", ExecLimits(), 2

    async def run(self, program, **_):
        return ExecResult(ExecStatus.INFRA, detail="no memory for another process")

    async def start(self, program, **_):
        raise InfraError("sandbox: expected a process, got none. Retry.")
