"""Where Molt itself is, and Python with it on the path: in processes of their own, so that nobody else sees it."""

import importlib.util
import tempfile
from pathlib import Path

import pytest

from tests.peers import where
from tests.peers.where import ROOT, folder_of

__all__ = ["FOLDER", "ROOT", "needs_molt", "python"]

FOLDER = folder_of("molt")
"""Made by `pip install --no-deps --target .venv/molt molt-rl==0.2.1`."""

needs_molt = pytest.mark.skipif(
    not (FOLDER / "molt/agents/base.py").is_file()
    or any(importlib.util.find_spec(name) is None for name in ("vllm", "ray", "aiohttp")),
    reason=f"Molt is not in {FOLDER}, or vLLM, Ray or aiohttp is not installed: make test-slow installs them",
)


def python(*arguments, **options):
    """As `where.python`, without the package `tests` that Molt's wheel brings."""
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "molt").symlink_to(FOLDER / "molt")
        return where.python("molt", *arguments, folder=alone, **options)
