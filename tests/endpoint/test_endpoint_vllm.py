"""Agents with a loop of their own on real vLLM: what the endpoint wrote down replays exactly, on vLLM and elsewhere."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from agentenv.record import read_trajectories
from tests.drivers import write_rows
from tests.endpoint.test_endpoint_run import AGENTS
from tests.with_openrlhf.where import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
VLLM = ["--engine", "vllm_local", "--engine_args", json.dumps({"enforce_eager": True})]


def agentenv(folder, *arguments):
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli", *map(str, arguments)],
        cwd=folder, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("agent", ["Retry", "Compacting"])
def test_what_vllm_sampled_for_an_agent_replays_exactly(agent, tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS)
    rows = [{"prompt": f"What is {number} plus 2?", "label": str(number + 2)} for number in range(8)]
    write_rows(tmp_path / "tasks.jsonl", rows)
    agentenv(
        tmp_path, "run", "--env", f"agents.py:{agent}", "--data", "tasks.jsonl", "--n", 2, "--max_tokens", 40,
        "--max_length", 512, "--dtype", "float32", "--out", "run", "--progress", "none", *VLLM,
    )  # fmt: skip
    trajectories = list(read_trajectories(tmp_path / "run"))
    assert len(trajectories) == 16
    assert {t.error for t in trajectories} == {None}
    assert sum(len(t.turns) for t in trajectories) > 16
    for engine in (VLLM, ["--engine", "hf"]):
        agentenv(tmp_path, "tokens", "replay", "run", "--tolerance", 1e-4, *engine)
