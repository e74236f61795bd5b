"""Where Molt itself is, and Python with it on the path: in processes of their own, so that nobody else sees it."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("AGENTENV_MOLT") or Path(sys.prefix) / "molt")
"""Made by `pip install --no-deps --target .venv/molt molt-rl==0.2.1`."""

needs_molt = pytest.mark.skipif(
    not (FOLDER / "molt/agents/base.py").is_file()
    or any(importlib.util.find_spec(name) is None for name in ("vllm", "ray", "aiohttp")),
    reason=f"Molt is not in {FOLDER}, or vLLM, Ray or aiohttp is not installed: make test-slow installs them",
)


def python(*arguments, timeout=800, **variables):
    """What a Python with Molt on its path prints; its errors where it fails."""
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "molt").symlink_to(FOLDER / "molt")  # without the package `tests` that Molt's wheel brings
        path = os.pathsep.join([str(ROOT), str(ROOT / "envs"), alone, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=timeout
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
