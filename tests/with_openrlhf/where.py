"""Where OpenRLHF itself is, and Python with it on the path: in processes of their own, so that nobody else sees it."""

import importlib.util
from functools import partial

import pytest

from tests.peers import where
from tests.peers.where import ROOT, folder_of

__all__ = ["FOLDER", "ROOT", "needs_openrlhf", "python"]

FOLDER = folder_of("openrlhf")
"""Made by `pip install --no-deps --target .venv/openrlhf openrlhf==0.11.2`."""
python = partial(where.python, "openrlhf")

needs_openrlhf = pytest.mark.skipif(
    not (FOLDER / "openrlhf/utils/agent.py").is_file() or importlib.util.find_spec("vllm") is None,
    reason=f"OpenRLHF is not in {FOLDER}, or vLLM is not installed: make test-slow installs both",
)
