import pytest_asyncio

from agentenv.sandbox.types import ExecStatus
from tests.sandbox.conftest import opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    """Where graded programs run."""
    async with await opened() as sandbox:
        yield sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox_with_pytest():
    """The same with pytest in it."""
    async with await opened(preimport=("pytest",)) as sandbox:
        assert (await sandbox.run("import _pytest._argcomplete")).status is ExecStatus.OK
        yield sandbox


class Wrapped:
    """A sandbox that passes programs on to another one; tests change what they want to."""

    def __init__(self, inner):
        self.inner = inner
        self.isolation = inner.isolation
        self.limits, self.run_slots = inner.limits, inner.run_slots
        self.turn = inner.turn

    async def run(self, program, **options):
        return await self.inner.run(program, **options)

    async def start(self, program, **options):
        return await self.inner.start(program, **options)
