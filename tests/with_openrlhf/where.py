"""Where OpenRLHF itself is, and Python with it on the path: in processes of their own, so that nobody else sees it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("AGENTENV_OPENRLHF") or Path(sys.prefix) / "openrlhf")
"""Made by `pip install --no-deps --target .venv/openrlhf openrlhf==0.11.2`."""

needs_openrlhf = pytest.mark.skipif(
    not (FOLDER / "openrlhf/utils/agent.py").is_file() or importlib.util.find_spec("vllm") is None,
    reason=f"OpenRLHF is not in {FOLDER}, or vLLM is not installed: make test-slow installs both",
)


def python(*arguments, timeout=800, **variables):
    """What a Python with OpenRLHF on its path prints; its errors where it fails."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs"), str(FOLDER), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
