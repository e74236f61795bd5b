import pytest_asyncio

from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.types import ExecStatus, SandboxUnavailable
from tests.sandbox.grading.plain import PlainSandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    """Where graded programs run: confined where this machine can."""
    try:
        opened = LocalSandbox()
        await opened.open()
    except SandboxUnavailable:
        opened = PlainSandbox()
    async with opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox_with_pytest():
    """The same with pytest in it, where the environment's packages can be shown inside."""
    try:
        opened = LocalSandbox(preimport=("pytest",))
        await opened.open()
        imports = await opened.run("import _pytest._argcomplete")
        if imports.status is not ExecStatus.OK:
            await opened.aclose()
            opened = PlainSandbox()
    except SandboxUnavailable:
        opened = PlainSandbox()
    async with opened:
        yield opened
