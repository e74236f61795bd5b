"""A sandbox of each level that this machine gives; where it gives one not, its tests are skipped with the reason."""

import os
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.sandbox import Isolation, LocalSandbox, SandboxUnavailable

LEVELS = (Isolation.NAMESPACES, Isolation.LANDLOCK)


async def opened(**options):
    """An open sandbox, or a skip that says why there is none."""
    sandbox = LocalSandbox(**options)
    try:
        await sandbox.open()
    except SandboxUnavailable as error:
        pytest.skip("; ".join(line for line in str(error).splitlines() if line.startswith("- level")))
    return sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS, ids=str)
async def sandbox(request):
    """One for all tests of a module, by level; tests say `pytest.mark.asyncio(loop_scope="module")`."""
    async with await opened(isolation=request.param) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local():
    """One of the strongest level for all tests of a module."""
    async with await opened() as sandbox:
        yield sandbox


@pytest.fixture
def own_temporary_folder(monkeypatch):
    """Where temporary files go in this test, and no other test's; users of the sandbox pass through it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest_asyncio.fixture(params=LEVELS, ids=str)
async def own_sandbox(request, own_temporary_folder):
    """One for this test alone, by level: it may be broken."""
    async with await opened(isolation=request.param) as sandbox:
        yield sandbox


@pytest_asyncio.fixture
async def strongest(own_temporary_folder):
    """The same at the strongest level alone: for what is the trainer's side, and alike at all of them."""
    async with await opened() as sandbox:
        yield sandbox
