"""Programs that end themselves so that the end seems to be the host's fault, or that hide what they use.

The end of each must be a verdict: no program may make its own grade vanish.
"""

from __future__ import annotations

from dataclasses import replace

from agentenv.sandbox.types import ExecStatus, Isolation
from tests.sandbox.escapes.cases import LIMITS, SHORT, EscapeCase, case

_VERDICTS = frozenset(ExecStatus) - {ExecStatus.INFRA, ExecStatus.OK}

_DEATHS = {
    "lowered_cpu_limit": """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
while True: pass
""",
    "lowered_cpu_limit_reached_asleep": """
import resource, signal, time
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
while True: time.sleep(0.001)
""",
    "lowered_time_of_real_time": """
import resource
resource.setrlimit(resource.RLIMIT_RTTIME, (1, 1))
while True: pass
""",
    "kill_of_itself": "import signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "kill_of_its_thread": "call(234, 131, os.getpid(), call(186, 178), 9)",
    "kill_by_queue": "import struct\ncall(129, 138, os.getpid(), 9, struct.pack('iii116x', 9, 0, -1))",
    "kill_by_timer": """
import struct, time
timer = ctypes.c_int()
call(222, 107, 1, struct.pack('qii48x', 0, 9, 0), ctypes.byref(timer))  # SIGEV_SIGNAL with SIGKILL
call(223, 110, timer.value, 0, struct.pack('qqqq', 0, 0, 0, 1000), None)
time.sleep(0.2)
""",
    "kill_by_death_of_the_parent": """
call(157, 167, 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG
os._exit(1)
""",
    "kill_by_strict_seccomp": "ctypes.CDLL(None).prctl(22, 1, 0, 0, 0)\nos.getppid()",
    "every_signal": """
for number in [*range(1, 9), *range(10, 65)]:
    if number not in (19, 20, 21, 22):
        ctypes.CDLL(None).signal(number, None)
        try:
            os.kill(os.getpid(), number)
        except OSError:
            pass
""",
    "no_memory": """
import resource
resource.setrlimit(resource.RLIMIT_AS, (0, 0))
resource.setrlimit(resource.RLIMIT_DATA, (0, 0))
hoard = [bytearray(1 << 20) for _ in range(100)]
""",
    "nothing_open": "os.closerange(0, 1 << 16)\nos._exit(9)",
    "exit_code_of_a_kill": "os._exit(137)",
    "message_of_a_full_disk": "sys.exit('OSError: [Errno 28] No space left on device')",
    "stopped": "import signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
    "at_low_priority": "os.nice(9)\nwhile True: pass",
}

ENDS: list[EscapeCase] = [
    case(
        f"own_end_by_{name}",
        f"say('TRYING')\nsay('HELD', 'if this is a verdict')\n{program}\nos._exit(3)",
        must_end=_VERDICTS,
        limits=SHORT if name in ("stopped", "at_low_priority") else LIMITS,
    )
    for name, program in _DEATHS.items()
]

_HOARD = """
say('TRYING')
say('HELD', 'if it is killed')
import threading, time
def hoard():
    time.sleep(0.2)
    held = bytearray(b'x') * (40 << 20)
    time.sleep(60)
for _ in range(4):
    if os.fork() == 0:
        {hide}
        hoard()
time.sleep(60)
"""

HIDING: list[EscapeCase] = [
    *(
        case(
            f"hidden_memory_{name}",
            _HOARD.format(hide=hide),
            "proc",
            must_end=(ExecStatus.MEMORY,),
            limits=replace(LIMITS, cpu_s=10.0),  # to fill it costs more on a busy host
        )
        for name, hide in (
            ("by_name", "ctypes.CDLL(None).prctl(15, b'RssAnon: 0', 0, 0, 0)"),
            ("by_odd_name", "ctypes.CDLL(None).prctl(15, b'\\xff) R 1 \\xfe', 0, 0, 0)"),
            ("by_dead_leader", "threading.Thread(target=hoard).start(); call(60, 93, 0)"),
        )
    ),
    case("hidden_memory_unmapped", """
import mmap
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
size = 20 << 20
def hoard(flags, fd):
    for _ in range(20):
        place = libc.mmap(None, ctypes.c_size_t(size), 3, flags, fd, ctypes.c_long(0))
        if place in (None, ctypes.c_void_p(-1).value):
            refuse('no mapping')
        ctypes.memset(place, 1, size)
        libc.munmap(ctypes.c_void_p(place + 4096), ctypes.c_size_t(size - 4096))  # its pages stay
    return 'much memory'
attempt('anonymous', lambda: hoard(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1))
attempt('validated', lambda: hoard(3 | mmap.MAP_ANONYMOUS, -1))
attempt('a device', lambda: hoard(mmap.MAP_SHARED, os.open('/dev/zero', os.O_RDWR)))
attempt('a file in memory', lambda: hoard(mmap.MAP_SHARED, call(319, 279, b'x', 0)))
""", limits=replace(LIMITS, cpu_s=3.0), excepted=(Isolation.UID,)),
    *(
        case(
            f"hidden_disk_{name}",
            f"""
import threading, time
kept = []
def write():
    for index in range(40):
        file = os.open('gone', os.O_RDWR | os.O_CREAT)
        os.write(file, b'x' * (4 << 20))
        os.unlink('gone')
        {keep}
        time.sleep(0.1)  # for a busy host to look
    return '160 MB in files without a name'
{run}
""",
            limits=replace(LIMITS, cpu_s=3.0),
            ends=(ExecStatus.DISK_LIMIT,),
        )
        for name, keep, run in (
            (
                "by_dead_leader",
                "kept.append(file)",
                "threading.Thread(target=attempt, args=('open', write)).start(); call(60, 93, 0)",
            ),
            (
                "by_own_table",
                "kept.append(file)",
                "unshare = lambda: call(436, 436, 1000, 1001, 2) and None or write()\n"
                "threading.Thread(target=attempt, args=('unshared', unshare)).start()",
            ),
            (
                "in_a_message",
                "socket.send_fds(pair[0], [b'x'], [file]); os.close(file)",
                "import socket; pair = socket.socketpair(); attempt('sent', write)",
            ),
        )
    ),
    case("hidden_cpu_of_children", """
say('TRYING')
say('HELD', 'if it is killed')
import signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them, and adds their time to nobody's
while True:
    if os.fork() == 0:
        while time.process_time() < 0.04: pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
""", "proc", must_end=(ExecStatus.CPU_TIMEOUT,)),
]  # fmt: skip
