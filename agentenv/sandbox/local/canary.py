"""Quick escape attempts, made whenever a sandbox is opened: a level that permits one of them is not used."""

from __future__ import annotations

import json

from agentenv.sandbox.local.execution import LocalExecution, Program
from agentenv.sandbox.local.zygote_client import Zygote, ZygoteLost
from agentenv.sandbox.types import ExecLimits, ExecStatus, Isolation

_LIMITS = ExecLimits(cpu_s=10.0, wall_s=30.0)
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
    attempted = await _run(zygote, isolation, _ATTEMPTS, -1)
    if attempted[0] is not ExecStatus.OK:
        return 0, [f"run a program ({attempted[1]})"]
    try:
        count, done = json.loads(attempted[1])
    except ValueError:
        return 0, ["execute"]  # another program than ours ended with code 0
    forbidden = await _run(zygote, isolation, _FORBIDDEN, -2)
    if forbidden[0] is not ExecStatus.POLICY:
        done.append("trace a process")
    return count + 1, [name for name in done if name not in _PERMITTED.get(isolation, ())]


async def _run(zygote: Zygote, isolation: Isolation, source: str, number: int) -> tuple[ExecStatus, str]:
    header: dict[str, object] = {"argv": None, "files": []}
    execution = LocalExecution(Program(header, (), source.encode(), (), b"", "pure", _LIMITS, ""), isolation)
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
