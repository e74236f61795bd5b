"""Attacks on what a program shares: the host user's quotas and priority, the host's names, and the zygote's memory."""

from __future__ import annotations

from dataclasses import replace

from agentenv.sandbox.types import Isolation
from tests.sandbox.escapes.cases import LIMITS, EscapeCase, case

SHARED: list[EscapeCase] = [
    case(
        "memory_of_an_earlier_program",
        # A comment of 60 KB, which a heap keeps after it was freed.
        f"#{'thgin yb rats eht dnif ' * 2600}\nsay('TRYING')\nsay('HELD', 'if the next run finds nothing')",
        fetch=("nothing",),
        then="""
_libc.sbrk.restype = _libc.memmem.restype = ctypes.c_void_p
line = b'find the star by night '[::-1]
end = _libc.sbrk(0) & ~4095
start = end
while _libc.msync(ctypes.c_void_p(start - 4096), ctypes.c_size_t(4096), 1) == 0:  # it is mapped
    start -= 4096
def scan():
    found, place = 0, start
    while at := _libc.memmem(ctypes.c_void_p(place), ctypes.c_size_t(end - place), line, ctypes.c_size_t(len(line))):
        found, place = found + 1, at + 1
    return found if found > 20 else refuse(found)
attempt('heap', scan)
""",
        limits=replace(LIMITS, cpu_s=3.0),
        bare="held",
    ),
    case(
        "priority_of_the_user",
        """
surface('user', lambda: os.setpriority(os.PRIO_USER, 0, 19))
surface('user by id', lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
surface('lowest of the user', lambda: os.getpriority(os.PRIO_USER, 0))
surface('with high bits', lambda: call(141, 140, 2 | 1 << 32, 0, 19))
""",
        bare="unsafe",
    ),
    case(
        "timers_of_the_user",
        """
def timers():
    timer = ctypes.c_void_p()
    for made in range(2000):
        if call(222, 107, 1, None, ctypes.byref(timer)):
            break
    return made
attempt('2000 timers', timers)
def signals():
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 5})
    info = (ctypes.c_int * 32)(signal.SIGRTMIN + 5, 0, -1, 0)
    for sent in range(2000):
        call(129, 138, os.getpid(), int(signal.SIGRTMIN + 5), info)
    return sent
attempt('2000 queued signals', signals)
""",
        limits=replace(LIMITS, cpu_s=3.0),
    ),
    case(
        "name_of_the_host",
        "attempt('uname', lambda: os.uname().nodename == W['host_name'] or refuse('another'))",
        # Without a UTS namespace, nothing hides it.
        excepted=(Isolation.LANDLOCK, Isolation.UID),
    ),
]
