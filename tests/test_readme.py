"""README.md as a newcomer follows it: every block is run, in order, in an empty folder.

A block is marked in the line before it: `run` executes it, `run: file NAME` writes it to NAME, `run: slow, vllm` runs
it with the slow tests where vLLM is installed, `run: slow, ray` where Ray is, `run: slow, transformers` anywhere. The
folder has `examples` as a checkout has it.
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentenv.cli import CheckConfig
from agentenv.cli_audit import AuditConfig
from agentenv.cli_flags import parse
from agentenv.cli_new import NewConfig
from agentenv.cli_play import PlayConfig
from agentenv.cli_rm import RMCheckConfig, RMEvalConfig
from agentenv.cli_rm_serve import RMServeConfig
from agentenv.cli_sandbox import SandboxBenchConfig, SandboxDoctorConfig, SandboxRunConfig
from agentenv.cli_sandbox_serve import SandboxServeConfig
from agentenv.cli_tokens import CertifyConfig, DiffConfig, ReplayConfig, ShowConfig
from agentenv.config import ALIASES, RunConfig
from agentenv.dataset import read_tasks
from agentenv.loading import builtin_datasets
from agentenv.sandbox import ExecLimits
from agentenv.trainer.launch import LaunchConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCK = re.compile(
    r"^(?:<!-- (run[^>]*?) -->\n)?```(bash|python|sh|console|shell|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    mark: str | None
    language: str
    text: str
    line: int

    @property
    def slow(self) -> bool:
        return "slow" in (self.mark or "")


BLOCKS = [
    Block(found[1], found[2], found[3], README.count("\n", 0, found.start(3))) for found in BLOCK.finditer(README)
]


def named(blocks):
    return [pytest.param(block, id=f"line{block.line}") for block in blocks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def test_every_block_says_how_it_is_run():
    assert len(BLOCKS) >= 8
    assert README.count("```") % 2 == 0
    for block in BLOCKS:
        assert re.fullmatch(r"run|run: slow, (vllm|ray|transformers)|run: file [\w.]+", block.mark or ""), block
        assert block.language in ("bash", "python"), block


@pytest.mark.parametrize("block", named(block for block in BLOCKS if not block.slow))
def test_a_block_does_what_it_says(block, folder):
    if block.mark.startswith("run: file "):
        (folder / block.mark.removeprefix("run: file ")).write_text(block.text)
        return
    said = execute(block, folder, timeout_s=280)
    if "--resume" in block.text:
        assert "here nothing is left to do" not in block.text or said.count("64/64 episodes") == 2
    if "agentenv check" in block.text:
        assert "no contract errors" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", named(block for block in BLOCKS if block.slow))
def test_a_slow_block_does_what_it_says(block, tmp_path):
    needed = block.mark.rpartition(" ")[2]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    execute(block, tmp_path, timeout_s=600)


SHORTER_STARTS = ("TORCHDYNAMO_DISABLE", "VLLM_USE_AOT_COMPILE")


def execute(block, folder, *, timeout_s):
    """What the block prints; it must succeed and leave no process behind."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # What shortens vLLM's start in the slow tests is not what a reader has: a training goes without it.
    left_out = SHORTER_STARTS if "agentenv train" in block.text else ()
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    options = ["-euo", "pipefail", "-c"] if block.language == "bash" else ["-c"]
    running = subprocess.Popen(
        ["bash" if block.language == "bash" else sys.executable, *options, block.text],
        cwd=folder, env={**inherited, "PATH": path, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    left = True
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.communicate(timeout=timeout_s)
            left = alive_after(running.pid, 30.0)
    finally:
        ended = running.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        said, _ = running.communicate()
    assert ended, f"README.md:{block.line}: no end within {timeout_s} s: {said}"
    assert running.returncode == 0, f"README.md:{block.line}: {said}"
    assert not left, f"README.md:{block.line}: a process of this block goes on"
    return said


def alive_after(group, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def test_every_make_command_that_the_readme_names_is_there():
    targets = set(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.MULTILINE))
    named_targets = set(re.findall(r"(?:`|^    )make ([a-z][\w-]*)", README, re.MULTILINE))
    assert {"demo", "test"} <= named_targets <= targets


def test_make_demo_runs_as_many_episodes_as_the_readme_says():
    flags = re.search(r"^demo:.*\n\t.*agentenv run (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    config = parse(RunConfig, "run", flags)
    num_tasks = len(read_tasks("word_problems", builtin=builtin_datasets()))
    assert (config.env, config.limit, config.data) == ("math_retry", None, None)
    assert f"runs {num_tasks * config.n} episodes of {config.env}" in README


def test_every_flag_that_the_readme_names_exists():
    flags = set(
        re.findall(
            r"(?<![\w-])--([a-z_]+)\b(?!-)",
            re.sub(
                r"vllm serve.*|torchrun.* -m|python -m (?:vllm|agentenv_envs)(.*\\\n)*.*|\| 0\.\d+\.\d+.*", "", README
            ),
        )
    )
    configs = (
        RunConfig, LaunchConfig, CheckConfig, CertifyConfig, ShowConfig, DiffConfig, ReplayConfig, SandboxDoctorConfig,
        SandboxRunConfig, SandboxBenchConfig, SandboxServeConfig, ExecLimits, RMCheckConfig, RMEvalConfig,
        RMServeConfig, AuditConfig, NewConfig, PlayConfig,
    )  # fmt: skip
    known = {"help", *ALIASES} | {name for config in configs for name in config.__dataclass_fields__}
    assert flags - {f"no_{name}" for name in known} <= known


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`((?:examples|agent_funcs|benchmarks|envs|tests)/[\w/.-]+|[A-Z]+\.md)`", README):
        assert (ROOT / name).exists(), name
