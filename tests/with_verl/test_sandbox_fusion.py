"""verl's own sandbox-fusion client, unmodified, against our server."""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from agentenv._util.http.access import AccessPolicy
from agentenv.sandbox import ExecResult, ExecStatus, Isolation, LocalSandbox, SandboxUnavailable
from agentenv.sandbox.fusion.server import FusionServeOptions, FusionServer

FOLDER = Path(os.environ.get("AGENTENV_VERL") or Path(sys.prefix) / "verl")
"""Made by `pip install --no-deps --target .venv/verl verl==0.9.1`."""
CLIENT = FOLDER / "verl/utils/reward_score/sandbox_fusion/__init__.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CLIENT.is_file() or importlib.util.find_spec("requests") is None,
        reason=f"verl is not in {FOLDER}, or requests is not installed: make test-slow installs both",
    ),
]
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
CASES = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7\n", "11"]}


@pytest.fixture(scope="module")
def verl():
    """Its module alone: importing verl itself would want torch and Ray set up."""
    spec = importlib.util.spec_from_file_location(
        "verl_sandbox_fusion", CLIENT, submodule_search_locations=[str(CLIENT.parent)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["verl_sandbox_fusion"] = module
    spec.loader.exec_module(module)
    yield module
    for name in ("verl_sandbox_fusion", "verl_sandbox_fusion.utils"):
        sys.modules.pop(name, None)


async def scored(verl, completion, cases, *, sandbox=None, userinfo="", timeout=10, **options):
    """verl's score, and what it keeps of each case."""
    own = LocalSandbox() if sandbox is None else None
    try:
        async with FusionServer(sandbox or own, FusionServeOptions(**options)) as server:
            if own is not None:
                await own.open()
            url = f"{server.url}/run_code".replace("//", f"//{userinfo}")
            return await asyncio.to_thread(
                verl.compute_score, url, None, 1024, completion, json.dumps(cases), timeout=timeout
            )
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    finally:
        if own is not None:
            await own.aclose()


@pytest.mark.parametrize(
    ("completion", "cases", "score", "statuses"),
    [
        (SUM, CASES, 1.0, ["success"] * 3),
        ("```python\nprint(7)\n```", CASES, 1 / 3, ["wrong_answer", "success", "wrong_answer"]),
        ("```python\nraise SystemExit(0)\n```", CASES, 0.0, ["wrong_answer"] * 3),
        ("```python\n1 / 0\n```", CASES, 0.0, ["runtime_error"] * 3),
        ("```python\nprint('x' * 300_000)\n```", {"inputs": [""], "outputs": ["x" * 300_000]}, 1.0, ["success"]),
        ("```python\nb = bytearray(3 << 30)\n```", {"inputs": [""], "outputs": [""]}, 0.0, ["runtime_error"]),
        (
            "```python\ndef f(a, b):\n    return [a, b]\n```",
            {"fn_name": "f", "inputs": ['1\n"x"', "2\nnull"], "outputs": ['[1, "x"]', "[2, null]"]},
            1.0,
            ["success"] * 2,
        ),
        (
            "```python\ndef f(a):\n    return a\n```",
            {"assert_case": ["assert f(1) == 1", "assert f(1) == 2"]},
            0.5,
            ["success", "runtime_error"],
        ),
    ],
)
async def test_verls_client_scores_programs_on_our_server(verl, completion, cases, score, statuses):
    got, told = await scored(verl, completion, cases)
    assert (got, [each["status"] for each in told]) == (score, statuses)


async def test_a_program_that_runs_out_of_time_is_its_timeout(verl):
    score, told = await scored(verl, "```python\nwhile True: pass\n```", {"inputs": [""], "outputs": [""]}, timeout=1)
    assert (score, told[0]["status"], told[0]["run_status"]) == (0.0, "timeout", "TimeLimitExceeded")


async def test_a_token_in_the_address_lets_it_in(verl):
    access = AccessPolicy(token="hush")
    assert (await scored(verl, SUM, CASES, access=access, userinfo="verl:hush@"))[0] == 1.0
    score, told = await scored(verl, SUM, CASES, access=access)
    assert (score, told[0]["status"]) == (0.0, "api_error")


class Failing:
    isolation, backend, run_slots = Isolation.NONE, "failing", 1

    async def run(self, program, **_):
        return ExecResult(ExecStatus.INFRA, detail="no memory for another process", isolation=Isolation.NONE)


async def test_a_failure_of_the_sandbox_is_its_sandbox_error(verl):
    _, told = await scored(verl, SUM, CASES, sandbox=Failing())
    assert [each["status"] for each in told] == ["sandbox_error"] * 3


class Slow:
    """One program takes longer than others may wait."""

    isolation, backend, run_slots = Isolation.NONE, "slow", 1

    def __init__(self):
        self.num = 0

    async def run(self, program, **_):
        self.num += 1
        await asyncio.sleep(1.0 if self.num == 1 else 0)
        return ExecResult(ExecStatus.OK, exit_code=0, stdout="3\n", stdout_bytes=2)


async def test_a_request_that_waits_too_long_is_retried_by_it(verl):
    cases = {"inputs": ["", ""], "outputs": ["3", "3"]}
    score, _ = await scored(verl, SUM, cases, sandbox=Slow(), max_queue_s=0.3)
    assert score == 1.0
