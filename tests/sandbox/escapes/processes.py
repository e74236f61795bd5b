"""Attacks on other processes, on limits of processes and time, and on the program's user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentenv.sandbox.types import ExecResult, ExecStatus
from tests.sandbox.escapes.cases import LIMITS, SHORT, EscapeCase, case

KILLED = (ExecStatus.SIGNAL, ExecStatus.CPU_TIMEOUT, ExecStatus.WALL_TIMEOUT, ExecStatus.MEMORY)
TIMED = (ExecStatus.CPU_TIMEOUT, ExecStatus.WALL_TIMEOUT)


def _before_it_ended(result: ExecResult, facts: dict[str, Any]) -> str:
    """Check that the result came before processes of the program ended by themselves, after 100 s or never."""
    return "" if facts["host_wall_s"] < 60 else f"the result came after {facts['host_wall_s']:.1f} s"


PROCESSES: list[EscapeCase] = [
    case("kill_victim", """
import signal
attempt('kill', lambda: os.kill(W['victim'], signal.SIGKILL))
attempt('tkill', lambda: call(200, 130, W['victim'], 9))
attempt('tgkill', lambda: call(234, 131, W['victim'], W['victim'], 9))
attempt('queue', lambda: call(129, 138, W['victim'], 9, (ctypes.c_char * 128)()))
attempt('probe', lambda: os.kill(W['victim'], 0))
attempt('pidfd', lambda: call(424, 424, call(434, 434, W['victim'], 0), 9, None, 0))
attempt('group', lambda: os.killpg(os.getpgid(W['victim']), 9))
""", needs=("victim",)),
    case("ptrace", """
attempt('attach', lambda: call(101, 117, 16, W['victim'], 0, 0))
attempt('seize', lambda: call(101, 117, 0x4206, W['victim'], 0, 0))
attempt('parent', lambda: call(101, 117, 0x4206, os.getppid() or W['host_pid'], 0, 0))
""", needs=("victim",)),
    case("read_memory_of_victim", """
class Iovec(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
data = ctypes.create_string_buffer(4096)
def vm(numbers):
    mine, theirs = Iovec(ctypes.addressof(data), 200), Iovec(W['victim_memory'], 200)
    got = call(*numbers, W['victim'], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    return data.raw[:got]
attempt('process_vm_readv', lambda: vm((310, 270)))
attempt('process_vm_writev', lambda: vm((311, 271)))
def by_file():
    with open(f"/proc/{W['victim']}/mem", 'rb', 0) as file:
        file.seek(W['victim_memory'])
        return file.read(200)
attempt('/proc/pid/mem', by_file)
""", needs=("victim",)),
    case("take_descriptor", """
def take():
    fd = call(438, 438, call(434, 434, W['victim'], 0), 0, 0)
    return os.read(fd, 100)
attempt('pidfd_getfd', take)
attempt('/proc/pid/fd', lambda: read(f"/proc/{W['victim']}/fd/0"))
attempt('of the parent', lambda: call(438, 438, call(434, 434, os.getppid() or 1, 0), 5, 0))
""", needs=("victim",)),
    case("fork_when_pure", """
def child(make):
    pid = make()
    if pid == 0:
        os._exit(0)
    return pid
attempt('fork', lambda: child(os.fork))
attempt('raw fork', lambda: child(lambda: call(57, None)))
attempt('raw clone', lambda: child(lambda: call(56, 220, 17, 0, 0, 0, 0)))
attempt('clone that is traced by none', lambda: child(lambda: call(56, 220, 0x00800000 | 17, 0, 0, 0, 0)))
attempt('clone with the parent of its parent', lambda: child(lambda: call(56, 220, 0x8000 | 17, 0, 0, 0, 0)))
args = (ctypes.c_ulonglong * 11)(0, 0, 0, 0, 17)
attempt('clone3', lambda: child(lambda: call(435, 435, args, 88)))
import subprocess
attempt('subprocess', lambda: subprocess.run(['true']).returncode, subprocess.SubprocessError)
"""),
    case("exec_when_pure", """
attempt('missing', lambda: call(59, 221, b'/nowhere', None, None) )
fd = os.open(os.__file__, os.O_RDONLY)
attempt('execveat', lambda: call(322, 281, fd, b'', None, None, 0x1000))
open('script', 'w').write('#!/bin/sh\\necho ESCAPED')
def run(path):
    say('HELD', 'not yet')
    os.execv(path, [path, '-c', 'print("%s ESCAPED exec")' % W['nonce']])
attempt('exec', lambda: run(sys.executable))
attempt('exec sh', lambda: run('/bin/sh'))
say('HELD')
"""),
    case("fork_bomb", """
say('TRYING', 'fork bomb')
made = 0
for _ in range(400):
    try:
        if os.fork() == 0:
            import time
            time.sleep(100)
            os._exit(0)
        made += 1
    except OSError:
        break
say('ESCAPED' if made > 40 else 'HELD', made)
os._exit(0)
""", "proc", ends=KILLED, limits=SHORT, check=_before_it_ended, census=True),
    case("thread_bomb", """
import threading, time
say('TRYING', 'threads')
made = 0
for _ in range(300):
    try:
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
        made += 1
    except (RuntimeError, MemoryError, OSError):
        break
say('ESCAPED' if made > 40 else 'HELD', made)
os._exit(0)
""", ends=KILLED),
    case("daemon_with_setsid", """
import time
say('TRYING', 'a daemon')
if os.fork() == 0:
    if os.fork():
        os._exit(0)
    try:
        os.setsid()
    except OSError:
        pass
    os.closerange(0, 4)
    time.sleep(100)
    os._exit(0)
time.sleep(0.1)
say('HELD', 'but for the census')
os._exit(0)
""", "proc", check=_before_it_ended, census=True),
    case("all_signals_ignored", """
import signal, time
say('TRYING', 'outlive the wall limit')
for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
say('HELD', 'so far')
while True:
    time.sleep(1)
""", must_end=TIMED, limits=SHORT, check=_before_it_ended),
    case("cpu_of_children", """
import time
say('TRYING', 'more CPU than the limit, each process less')
say('HELD', 'so far')
if os.fork():
    time.sleep(100)
while True:
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
    if os.fork():
        os._exit(0)
""", "proc", must_end=TIMED, limits=replace(LIMITS, wall_s=3.0), census=True),
    case("setrlimit_raise", """
import resource
def raised(which):
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    now = resource.getrlimit(which)
    # Where it was unlimited before (stack, locks), nothing was raised.
    return now if now[1] != hard else refuse('the same')
for name in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'NPROC', 'CORE', 'MEMLOCK', 'MSGQUEUE', 'NICE', 'RTPRIO', 'SIGPENDING'):
    attempt(name, lambda: raised(getattr(resource, 'RLIMIT_' + name)), ValueError)
def of_others(pid):
    limits = (ctypes.c_ulong * 2)(2 ** 64 - 1, 2 ** 64 - 1)
    return call(302, 261, pid, 9, limits, None)
attempt('AS by prlimit', lambda: of_others(0))
attempt('of the parent', lambda: of_others(os.getppid() or W['host_pid']))
"""),
    case("setrlimit_soft_to_hard", """
import resource
for name in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'NPROC', 'CORE'):
    which = getattr(resource, 'RLIMIT_' + name)
    hard = resource.getrlimit(which)[1]
    try:
        resource.setrlimit(which, (hard, hard))
    except (OSError, ValueError):
        pass
    # CPU: a second of grace, so that the limit is seen before it kills.
    most = {'AS': 2 ** 32, 'CPU': 4, 'FSIZE': 2 ** 25, 'NOFILE': 300, 'NPROC': 300, 'CORE': 1}[name]
    hard = resource.getrlimit(which)[0]
    attempt(name, lambda: (hard == resource.RLIM_INFINITY or hard > most) and hard or refuse('bounded'))
"""),
    case("setuid_root", """
attempt('setuid', lambda: (os.setuid(0), os.getuid()) if os.getuid() else refuse('0 within its own namespace'))
attempt('setresuid', lambda: os.setresuid(0, 0, 0) if os.getuid() else refuse('0 within'))
attempt('seteuid', lambda: os.seteuid(0) if os.getuid() else refuse('0 within'))
attempt('setgid', lambda: os.setgid(0) if os.getgid() else refuse('0 within'))
attempt('setgroups', lambda: os.setgroups([0, 6, 42]))
attempt('setfsuid', lambda: call(122, 151, 0) and refuse('%d' % call(122, 151, 0)) if os.getuid() else refuse('0 within'))
attempt('groups', lambda: set(os.getgroups()) & {0, 4, 6, 20, 27, 42, 999} if os.getuid() and set(os.getgroups()) & {0, 4, 6, 20, 27, 42, 999} else refuse('none'))
"""),
    case("setuid_binary", """
import subprocess
def euid(argv):
    text = subprocess.run(argv, capture_output=True, timeout=5).stdout.decode()
    return text if ('euid=0' in text or 'uid=0' in text) and os.geteuid() != 0 else refuse(text[:100])
for argv in ([W['suid']], ['su', '-c', 'id'], ['sudo', '-n', 'id'], ['pkexec', 'id'], ['newgrp']):
    attempt(argv[0], lambda: euid(argv), subprocess.SubprocessError)
""", "proc", needs=("suid",)),
    case("capabilities", """
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
def capabilities():
    call(125, 90, header, data)
    return list(data) if any(data) else refuse('none')
attempt('any', capabilities)
def ambient():
    return any(_libc.prctl(47, 1, cap, 0, 0) == 1 for cap in range(41)) or refuse('none')
attempt('ambient', ambient)
def set_all():
    call(126, 91, header, (ctypes.c_uint32 * 6)(*([2 ** 32 - 1] * 6)))
attempt('capset', set_all)
attempt('no_new_privs is off', lambda: _libc.prctl(39, 0, 0, 0, 0) == 0 or refuse('it is on'))
attempt('keepcaps', lambda: _libc.prctl(8, 1, 0, 0, 0) == 0 and any(data) or refuse('no'))
attempt('securebits', lambda: _libc.prctl(28, 0x3F, 0, 0, 0) == 0 or refuse('no'))
"""),
    case("unshare_user", """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
    attempt(hex(flag), lambda: call(272, 97, flag))
attempt('user and all', lambda: call(272, 97, 0x10000000 | 0x20000 | 0x40000000 | 0x20000000))
def enter():
    return call(308, 268, os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)
attempt('setns', enter)
attempt('setns by pidfd', lambda: call(308, 268, call(434, 434, os.getpid(), 0), 0x20000))
"""),
    case("clone_user", """
def child(make):
    pid = make()
    if pid == 0:
        os._exit(0)
    return pid
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x10000000 | 0x20000 | 0x20000000):
    attempt(hex(flag), lambda: child(lambda: call(56, 220, flag | 17, 0, 0, 0, 0)))
    # 2^32 above: the kernel reads 64 bits of flags, a filter that compares 32 may not.
    attempt('high ' + hex(flag), lambda: child(lambda: call(56, 220, (1 << 40) | flag | 17, 0, 0, 0, 0)))
args = (ctypes.c_ulonglong * 11)(0x10000000, 0, 0, 0, 17)
attempt('clone3', lambda: child(lambda: call(435, 435, args, 88)))
""", "proc", census=True),
]  # fmt: skip
