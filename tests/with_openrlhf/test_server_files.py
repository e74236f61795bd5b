"""agent_func files that serve `llm_engine` over HTTP themselves and let an agent of OpenAI's SDK talk to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.runs.records.directory import read_trajectories
from tests.drivers import command
from tests.with_openrlhf.test_files import installed  # noqa: F401 - a fixture
from tests.with_openrlhf.where import ROOT

pytest.importorskip("openai")
FILE = ROOT / "tests/interop/agent_funcs/openai_server.py"


@pytest.mark.long
def test_a_file_with_its_own_server_runs_by_command(installed, tmp_path):  # noqa: F811 - the fixture
    path = [str(ROOT), str(ROOT / "envs"), *([str(installed)] if installed else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, str(Path(__file__).parent / "run_files.py"), str(tmp_path), "openai_server"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line.removeprefix("FILE ") for line in done.stdout.splitlines() if line.startswith("FILE ")]
    assert json.loads(line) == ["openai_server", 0, [[None, 2, 1.0, "terminated"]] * 2]


@pytest.mark.long
def test_its_tokens_are_those_that_the_engine_sampled_in_every_episode(tmp_path):
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "What is 6 x 7?", "label": "42"}) + "\n")
    flags = ["--data", tmp_path / "tasks.jsonl", "--n", 12, "--max_tokens", 16, "--progress", "none"]
    assert command(["run", "--agent_func_path", FILE, *flags, "--out", tmp_path / "run"]) == 0
    trajectories = list(read_trajectories(tmp_path / "run"))
    assert len(trajectories) == 12
    for trajectory in trajectories:
        segment = trajectory.segments[0]
        sampled = [i for turn in trajectory.turns for i in range(turn.start, turn.end)]
        assert sampled == [i for i, masked in enumerate(segment.action_mask) if masked]
        assert all(segment.logprobs[i] <= 0.0 for i in sampled)
    replayed = command(["tokens", "replay", tmp_path / "run", "--tolerance", 1e-4])
    assert replayed == 0
