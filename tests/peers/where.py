"""Where other trainers' packages are, and Python with one of them on its path: in processes of their own."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def folder_of(name):
    """The folder that `make test-slow` installs a package into."""
    return Path(os.environ.get(f"AGENTENV_{name.upper()}") or Path(sys.prefix) / name)


def needs(name, package=""):
    """Skip where the package of the folder's name, or another one, is not in the folder."""
    folder, package = folder_of(name), package or name
    return pytest.mark.skipif(
        not (folder / package / "__init__.py").is_file(), reason=f"{package} is not in {folder}: make test-slow"
    )


def versions(name, *packages):
    """Versions for a cell of the matrix: of packages in the folder or beside it, of torch, transformers, agentenv."""
    own = {each.name.lower().replace("_", "-"): each.version for each in distributions(path=[str(folder_of(name))])}
    named = {package: own.get(package.lower()) or version(package) for package in (*(packages or (name,)), "torch")}
    return {**named, "transformers": version("transformers"), "agentenv": version("agentenv-rl")}


def python(name, *arguments, cwd=None, folder=None, timeout=800, **variables):
    """What a Python with the package on its path, by its own folder or another, prints; its errors where it fails."""
    folder = folder or folder_of(name)
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs"), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def page_block(page, text):
    """The code block of a page of docs/interop that contains the text."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", (ROOT / "docs/interop" / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if text in block]
    return block


def answer(name, *arguments, cwd):
    """The JSON in the last line that a script of this folder prints."""
    return json.loads(python(name, *arguments, cwd=cwd).splitlines()[-1])


def trained(name, env, cwd):
    """Figures of ten steps of `agentenv train` on an environment, by a Python with the package on its path."""
    flags = "--model tiny-math --engine hf --no_ray --rollout_batch_size 2 --n 2 --max_tokens 8 --max_train_steps 10"
    python(name, "-m", "agentenv.cli", "train", "--env", env, *flags.split(), "--out", "out", cwd=cwd)
    steps = [json.loads(line) for line in (cwd / "out/metrics.jsonl").read_text().splitlines()]
    sums = {key: sum(int(step.get(f"rollout/{key}", 0)) for step in steps) for key in ("num_episodes", "num_failed")}
    gaps = [step["train/logprob_diff"] for step in steps if "train/logprob_diff" in step]
    return {
        "train_steps": max(step["step"] for step in steps),
        "episodes": sums["num_episodes"] - sums["num_failed"],
        "failed": sums["num_failed"],
        **({"largest_mean_logprob_difference": max(gaps)} if gaps else {}),
    }
