"""Agents with a loop of their own on real vLLM: what the endpoint wrote down replays exactly, on vLLM and elsewhere."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from agentenv.runs.records.directory import read_trajectories
from tests.drivers import write_rows
from tests.episode.endpoint.test_endpoint_run import AGENTS
from tests.with_openrlhf.where import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
BOTH = '''

class Both(Compacting):
    """One run for two kinds of agents: vLLM starts once."""

    async def run(self, context):
        return await (Retry if int(context.label) % 2 else Compacting).run(self, context)
'''
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


def test_tokens_that_vllm_sampled_for_agents_replay_exactly(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS + BOTH)
    rows = [{"prompt": f"What is {number} plus 2?", "label": str(number + 2)} for number in range(8)]
    write_rows(tmp_path / "tasks.jsonl", rows)
    agentenv(
        tmp_path, "run", "--env", "agents.py:Both", "--data", "tasks.jsonl", "--n", 2, "--max_tokens", 40,
        "--max_length", 512, "--dtype", "float32", "--out", "run", "--progress", "none", *VLLM,
    )  # fmt: skip
    trajectories = list(read_trajectories(tmp_path / "run"))
    assert {t.error for t in trajectories} == {None}
    retrying = [t for t in trajectories if int(t.task.label) % 2]
    compacting = [t for t in trajectories if not int(t.task.label) % 2]
    assert (len(retrying), len(compacting)) == (8, 8)
    assert sum(len(t.turns) for t in retrying) > 8
    assert all(len(t.segments) > 1 for t in compacting)
    for engine in (VLLM, ["--engine", "hf"]):
        agentenv(tmp_path, "tokens", "replay", "run", "--tolerance", 1e-4, *engine)
