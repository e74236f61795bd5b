"""The choice of a level of isolation: each level is tested, strongest first, by canary programs that try to escape.

If none works, the error names the step that failed on each level, with its errno and a hint for a fix.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from dataclasses import dataclass

from agentenv.errors import InfraError
from agentenv.sandbox.local.execution import LocalExecution, Program
from agentenv.sandbox.local.plan import Plan, plans
from agentenv.sandbox.local.zygote_client import SetupFailed, Zygote, ZygoteLost
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, SandboxUnavailable

OPT_IN = "AGENTENV_ALLOW_UNSAFE_SANDBOX"
"""Environment variable; 1, together with `allow_unsafe=True`, permits programs without isolation."""
MAX_STARTS = 3
"""Attempts at a level whose zygote dies."""
_LOG = logging.getLogger(__name__)
_OF_NAMESPACES = ("user, pid, mount, net, ipc and uts namespaces", "read-only root", "tmpfs", "no /proc")
_HINTS = (
    ("no such call|no system call table", "x86-64 and aarch64 are supported; use a remote backend"),
    ("landlock", "needs Linux 5.13 with landlock in the kernel's lsm= list, and a profile that lets it through"),
    (
        "unshare|mount|pivot_root|uid_map|setgroups|sethostname",
        "the container's seccomp profile or AppArmor forbids it: run with --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined; or sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    ("prctl|trace a process", "the kernel needs CONFIG_SECCOMP_FILTER; use a remote backend"),
    ("users", "run as root with CAP_SETUID and CAP_SETGID, and with an interpreter that other users can reach"),
)
"""What fixes a failure, by a word of its text."""


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
    if request.exactly is Isolation.NONE or not failures:
        failures.append(f"running without isolation needs allow_unsafe=True and {OPT_IN}=1 in the environment")
    tried = "".join(f"\n- level {failure}" for failure in failures)
    raise SandboxUnavailable(
        f"sandbox: expected isolation {required}, got none here. Fix a failure below, or use a remote backend:{tried}"
    )


async def attempt(isolation: Isolation, preimport: tuple[str, ...], failures: list[str]) -> IsolationLevel | None:
    """Test a level: start its zygote and run the canary programs. Reasons of failure are appended to `failures`."""

    def fail(where: str, why: object) -> None:
        hints = [hint for words, hint in _HINTS if re.search(words, str(why))]
        failures.append(f"{where}: {why}{f' ({hints[0]})' if hints else ''}")

    candidates = await asyncio.to_thread(plans, isolation, preimport)
    if not candidates:
        fail(str(isolation), "no users to run programs as, or no interpreter that they can reach")
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
        fail(where, failure)
    return None


async def _prove(plan: Plan) -> IsolationLevel:
    """Start the zygote of a level and run the canary programs.

    Raises:
        SetupFailed: this machine lacks what the level needs.
        ZygoteLost: the zygote died.
        InfraError: a canary program did what the level forbids.
    """
    zygote = await Zygote.start(plan)
    try:
        count, escaped = await escapes(zygote, plan.isolation)
        if escaped:
            raise InfraError(f"canary programs could {', '.join(escaped)}")
    except BaseException:
        await zygote.close()
        raise
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
def check(condition):
    if not condition:
        raise OSError
def write(path):
    with open(path, 'x'):
        os.unlink(path)
def signal_parent():
    check(os.getppid())
    os.kill(os.getppid(), 0)
def is_open(fd):
    try:
        return os.fstat(fd)
    except OSError:
        return None
def raise_limit():
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 1, soft + 1))
attempts = {
    'read /etc/passwd': lambda: open('/etc/passwd').close(),
    'list /proc': lambda: os.listdir('/proc'),
    'list /root': lambda: os.listdir('/root/.ssh'),
    'write /usr': lambda: write('/usr/agentenv-canary'),
    'write /var': lambda: write('/var/agentenv-canary'),
    'open an internet socket': lambda: socket.socket(),
    'open a unix socket': lambda: socket.socket(socket.AF_UNIX),
    'open a netlink socket': lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    'start a process': lambda: os.fork() or os._exit(0),
    'execute': lambda: os.execv('/bin/true', ['true']),
    'be root': lambda: check(0 in os.getresuid()),
    'become root': lambda: os.setuid(0),
    'reach the parent process': signal_parent,
    'keep a descriptor': lambda: check(any(map(is_open, range(3, 256)))),
    'raise a limit': raise_limit,
    'memory outside the limit': lambda: check(libc.memfd_create(b'x', 0) >= 0),
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
    if attempted.status is not ExecStatus.OK:
        return 0, [f"run a program ({attempted.status}: {attempted.detail}{attempted.stderr})"]
    try:
        count, done = json.loads(attempted.stdout)
    except ValueError:
        return 0, ["execute"]  # another program than ours ended with code 0
    forbidden = await _run_canary(zygote, isolation, _FORBIDDEN, -2)
    if forbidden.status is not ExecStatus.POLICY:
        done.append("trace a process")
    return count + 1, [name for name in done if name not in _PERMITTED.get(isolation, ())]


async def _run_canary(zygote: Zygote, isolation: Isolation, source: str, number: int) -> ExecResult:
    program = Program({"argv": None, "files": []}, (), source.encode(), (), b"", "pure", _CANARY_LIMITS, "")
    execution = LocalExecution(program, isolation)
    await execution.launch(zygote, number)
    try:
        result = await execution.finish()
    finally:
        execution.release()
    if result.status is ExecStatus.INFRA:
        raise ZygoteLost(str(result.detail))
    return result
