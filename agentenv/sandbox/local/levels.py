"""The choice of a level of isolation: each level is tested, strongest first, by canary programs that try to escape.

If none works, probes of the features that the levels need say why; a failed one has an errno and a hint for a fix.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import subprocess
from dataclasses import dataclass, replace
from enum import StrEnum

from agentenv.errors import InfraError
from agentenv.sandbox.local.execution import LocalExecution, Program
from agentenv.sandbox.local.plan import Plan, interpreters, plans, user_ranges
from agentenv.sandbox.local.zygote_client import SetupFailed, Zygote, ZygoteLost, command, environment, plan_data
from agentenv.sandbox.types import ExecLimits, ExecStatus, Isolation, SandboxUnavailable

OPT_IN = "AGENTENV_ALLOW_UNSAFE_SANDBOX"
"""Environment variable; 1, together with `allow_unsafe=True`, permits programs without isolation."""
MAX_STARTS = 3
"""Attempts at a level whose zygote dies."""
PROBES_TIMEOUT_S = 60.0
_LOG = logging.getLogger(__name__)
_OF_NAMESPACES = ("user, pid, mount, net, ipc and uts namespaces", "read-only root", "tmpfs", "no /proc")


@dataclass(frozen=True)
class IsolationRequest:
    """The isolation that a caller requires."""

    min_isolation: Isolation
    exactly: Isolation | None
    preimport: tuple[str, ...]
    allow_unsafe: bool

    def levels(self) -> list[Isolation]:
        """Return the levels to try, strongest first."""
        local = [Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.UID]
        least = Isolation.UID if self.min_isolation is Isolation.NONE else self.min_isolation
        levels = [level for level in local if level.strength >= least.strength]
        if self.exactly is not None:
            levels = [level for level in local if level is self.exactly]
        if self.allow_unsafe and os.environ.get(OPT_IN) == "1" and self.exactly in (None, Isolation.NONE):
            levels.append(Isolation.NONE)
        return levels


@dataclass(frozen=True)
class IsolationLevel:
    """A level that works, with the zygote that proved it."""

    layers: tuple[str, ...]
    zygote: Zygote
    num_canaries: int


async def choose(request: IsolationRequest) -> IsolationLevel:
    """Return the strongest level that works.

    Raises:
        SandboxUnavailable: no level works; the message names each failure with its errno and a fix, or the package of
            `preimport` that is not installed.
    """
    failures: list[str] = []
    for isolation in request.levels():
        level = await attempt(isolation, request.preimport, failures)
        if level is None:
            continue
        if isolation is Isolation.NONE:
            _LOG.warning("LocalSandbox: programs run WITHOUT isolation (%s=1 and allow_unsafe)", OPT_IN)
        elif failures:
            _LOG.warning("LocalSandbox: %s is the strongest level here: %s", isolation, "; ".join(failures))
        return level
    # Blame a missing package instead of the isolation, if one made a level fail.
    matches = [re.search(r"\((\S+)\): .*No module named '([\w.]+)'", failure) for failure in failures]
    for match in filter(None, matches):
        if any(name.split(".")[0] == match[2].split(".")[0] for name in request.preimport):
            raise SandboxUnavailable(
                f"preimport: expected packages of {match[1]}, got no module {match[2]!r} there. "
                "Install it, or remove it from preimport"
            )
    required = repr(str(request.exactly)) if request.exactly else f"{str(request.min_isolation)!r} or stronger"
    failed: list[Probe] = []
    for probe in await asyncio.to_thread(run_probes):
        if probe.outcome is ProbeOutcome.FAIL:
            repeated = any(probe.hint == other.hint for other in failed)
            failed.append(replace(probe, hint="as above") if repeated else probe)
    if request.exactly is Isolation.NONE or (not failures and not failed):
        failures.append(f"running without isolation needs allow_unsafe=True and {OPT_IN}=1 in the environment")
    tried = "".join(f"\n- level {failure}" for failure in failures)
    probed = "".join(f"\n- probe {probe}" for probe in failed)
    raise SandboxUnavailable(
        f"sandbox: expected isolation {required}, got none here. "
        f"Fix a failure below, or use a remote backend:{tried}{probed}"
    )


async def attempt(isolation: Isolation, preimport: tuple[str, ...], failures: list[str]) -> IsolationLevel | None:
    """Test a level: start its zygote and run the canary programs. Reasons of failure are appended to `failures`."""
    candidates = await asyncio.to_thread(plans, isolation, preimport)
    if not candidates:
        failures.append(f"{isolation}: no users to run programs as, or no interpreter that they can reach")
    for plan in candidates:
        where = f"{isolation} ({plan.python})"
        for _ in range(MAX_STARTS):  # a zygote that died by chance must not weaken the level
            try:
                return await _prove(plan)
            except (InfraError, OSError) as error:
                failure = error
            if isinstance(failure, SetupFailed) or not isinstance(failure, ZygoteLost):
                break
        else:
            _LOG.warning("LocalSandbox: %s is not used: its zygote died %d times: %s", where, MAX_STARTS, failure)
        failures.append(f"{where}: {failure}")
    return None


async def _prove(plan: Plan) -> IsolationLevel:
    """Start the zygote of a level and run the canary programs.

    Raises:
        SetupFailed: this machine lacks what the level needs.
        ZygoteLost: the zygote died.
        InfraError: a canary program did what the level forbids.
    """
    zygote = await Zygote.start(plan)
    accepted = False
    try:
        count, escaped = await escapes(zygote, plan.isolation)
        if escaped:
            raise InfraError(f"canary programs could {', '.join(escaped)}")
        accepted = True
    finally:
        if not accepted:
            await zygote.close()
    layers = list(_OF_NAMESPACES) if plan.isolation is Isolation.NAMESPACES else []
    layers += [f"landlock {zygote.landlock}"] if zygote.landlock else []
    if plan.isolation is not Isolation.NONE:
        layers += ["seccomp", "no capabilities"]
    if plan.ids and plan.isolation is not Isolation.NONE:
        layers.append("own user")
    elif plan.isolation is Isolation.NAMESPACES:
        layers.append("own user namespace")
    return IsolationLevel((*layers, "rlimits"), zygote, count)


# --- canary programs --------------------------------------------------------------------------------------------------

_CANARY_LIMITS = ExecLimits(cpu_s=10.0, wall_s=30.0)
_ATTEMPTS = """
import ctypes, json, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def write(path):
    with open(path, 'x'):
        os.unlink(path)
def signal_parent():
    if os.getppid() == 0:
        raise OSError
    os.kill(os.getppid(), 0)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError
def descriptors():
    inherited = []
    for fd in range(3, 256):
        try:
            os.fstat(fd)
        except OSError:
            continue
        inherited.append(fd)
    if not inherited:
        raise OSError
def root():
    os.setuid(0)
def is_root():
    if 0 not in os.getresuid():
        raise OSError
def raise_limit():
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 1, soft + 1))
def fork():
    if os.fork() == 0:
        os._exit(0)
attempts = {
    'read /etc/passwd': lambda: open('/etc/passwd').close(),
    'list /proc': lambda: os.listdir('/proc'),
    'list /root': lambda: os.listdir('/root/.ssh'),
    'write /usr': lambda: write('/usr/agentenv-canary'),
    'write /var': lambda: write('/var/agentenv-canary'),
    'open an internet socket': lambda: socket.socket(),
    'open a unix socket': lambda: socket.socket(socket.AF_UNIX),
    'open a netlink socket': lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    'start a process': fork,
    'execute': lambda: os.execv('/bin/true', ['true']),
    'be root': is_root,
    'become root': root,
    'reach the parent process': signal_parent,
    'keep a descriptor': descriptors,
    'raise a limit': raise_limit,
    'memory outside the limit': lambda: call('memfd_create', b'x', 0),
}
done = []
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, AttributeError, ValueError):
        continue
    done.append(name)
print(json.dumps([len(attempts), done]))
"""
_FORBIDDEN = "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)"
_PERMITTED = {Isolation.UID: {"read /etc/passwd", "list /proc"}}
"""Attempts that may succeed on a level."""


async def escapes(zygote: Zygote, isolation: Isolation) -> tuple[int, list[str]]:
    """Run all attempts; return their number and the names of those that succeeded although the level forbids them.

    Raises:
        ZygoteLost: the zygote died, or the host kept it from running a program.
    """
    if isolation is Isolation.NONE:
        return 0, []
    attempted = await _run_canary(zygote, isolation, _ATTEMPTS, -1)
    if attempted[0] is not ExecStatus.OK:
        return 0, [f"run a program ({attempted[1]})"]
    try:
        count, done = json.loads(attempted[1])
    except ValueError:
        return 0, ["execute"]  # another program than ours ended with code 0
    forbidden = await _run_canary(zygote, isolation, _FORBIDDEN, -2)
    if forbidden[0] is not ExecStatus.POLICY:
        done.append("trace a process")
    return count + 1, [name for name in done if name not in _PERMITTED.get(isolation, ())]


async def _run_canary(zygote: Zygote, isolation: Isolation, source: str, number: int) -> tuple[ExecStatus, str]:
    header: dict[str, object] = {"argv": None, "files": []}
    execution = LocalExecution(Program(header, (), source.encode(), (), b"", "pure", _CANARY_LIMITS, ""), isolation)
    await execution.launch(zygote, number)
    try:
        result = await execution.finish()
    finally:
        execution.release()
    if result.status is ExecStatus.INFRA:
        raise ZygoteLost(str(result.detail))
    return (
        result.status,
        result.stdout if result.status is ExecStatus.OK else f"{result.status}: {result.detail}{result.stderr}",
    )


# --- probes -----------------------------------------------------------------------------------------------------------


class ProbeOutcome(StrEnum):
    """The outcome of a probe."""

    OK = "ok"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one probe."""

    name: str
    outcome: ProbeOutcome
    errno: int | None = None
    detail: str = ""
    hint: str = ""
    """How to fix a failure."""

    def __str__(self) -> str:
        code = f" {errno.errorcode.get(self.errno, self.errno)}" if self.errno else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.name} {self.outcome}{code}{detail}{f' ({self.hint})' if self.hint else ''}"


_CONTAINER = (
    "the container's seccomp profile or AppArmor forbids it: run with --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined, or use the landlock level"
)
_HINTS = {
    "processor": "x86-64 and aarch64 are supported; use a remote backend",
    "interpreter": "install Python 3.11 or newer",
    "seccomp": "the kernel needs CONFIG_SECCOMP_FILTER; use a remote backend",
    "landlock": "needs Linux 5.13 with landlock in the kernel's lsm= list, and a profile that lets it through",
    "user namespace": f"{_CONTAINER}; or sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0",
    "mount namespace": _CONTAINER,
    "pid namespace": _CONTAINER,
    "net, ipc and uts namespaces": _CONTAINER,
    "separate root": _CONTAINER,
    "other users": "run as root with CAP_SETUID and CAP_SETGID and an interpreter that other users can reach; only the "
    "uid level, and landlock as root, need it",
    "openat2": "needs Linux 5.6, and a container profile that lets it through",
}


def run_probes(python: str = "") -> tuple[Probe, ...]:
    """Probe all features that the levels need, in a process of an interpreter; takes a fraction of a second.

    Blocks: call it through `asyncio.to_thread` from an event loop.
    """
    plan = Plan(Isolation.NAMESPACES, user_ranges(), python or interpreters()[0])
    try:
        process = subprocess.run(
            command(plan.python, "probes", 1),
            input=plan_data(plan),
            capture_output=True,
            env=environment(plan),
            cwd="/",
            timeout=PROBES_TIMEOUT_S,
            check=True,
        )
        failures: dict[str, list[int | str] | None] = json.loads(process.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="backslashreplace").strip().splitlines()[-1:]
        return (Probe("interpreter", ProbeOutcome.FAIL, None, "".join(last), f"{plan.python} cannot run the probes"),)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        code = getattr(error, "errno", None)
        return (Probe("interpreter", ProbeOutcome.FAIL, code, str(error), "use another interpreter"),)
    probes = []
    for name, failure in failures.items():
        if failure is None:
            probes.append(Probe(name, ProbeOutcome.OK))
        elif name == "other users" and os.geteuid() != 0:
            probes.append(Probe(name, ProbeOutcome.SKIPPED, detail="not root"))
        else:
            code, message = int(failure[0]) or None, str(failure[1])
            probes.append(Probe(name, ProbeOutcome.FAIL, code, message, _HINTS.get(name, "")))
    return tuple(probes)
