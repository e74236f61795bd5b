"""Attacks by system calls that no program needs, and on memory, disk, output and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentenv.sandbox.types import ExecStatus, Isolation
from tests.sandbox.escapes.cases import LIMITS, EscapeCase, case

ENDED = (ExecStatus.SIGNAL, ExecStatus.MEMORY, ExecStatus.DISK_LIMIT, ExecStatus.NONZERO)


def _surface(name: str, *calls: str, extra: str = "", also: str = "()", **options: Any) -> EscapeCase:
    """Return programs whose calls must be refused before the kernel processes them."""
    lines = "\n".join(f"surface({line!r}, lambda: {line}, *{also})" for line in calls)
    return case(name, extra + "\n" + lines, **options)


_INT80 = """
import mmap
def legacy():
    if ARM:
        refuse('not on this machine')
    code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20 (getpid); int 0x80; ret
    got = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    return got if got >= 0 else refuse(got)
"""

SYSTEM: list[EscapeCase] = [
    _surface(
        "kernel_interfaces",
        "call(425, 425, 4, (ctypes.c_char * 256)())",  # io_uring
        "call(426, 426, 0, 1, 0, 0, None, 0)",
        "call(427, 427, 0, 0, None, 0)",
        "call(321, 280, 0, (ctypes.c_uint32 * 20)(2, 4, 4, 1), 72)",  # bpf
        "call(321, 280, 5, (ctypes.c_uint32 * 40)(1, 0), 120) or True",
        "call(298, 241, (ctypes.c_uint32 * 30)(1, 112, 1), 0, -1, -1, 0)",  # perf_event_open
        "call(323, 282, 1)",  # userfaultfd
        "call(323, 282, 0)",
        "call(250, 219, 0, -3, 1)",  # keyrings
        "call(248, 217, b'user', b'k', b'v', 1, -3)",
        "call(249, 218, b'user', b'k', None, -3)",
        "call(312, 272, os.getpid(), os.getpid(), 0, 0, 1) or True",  # kcmp
        "call(300, 262, 0, 0)",  # watches of files
        "call(294, 26, 0)",
        "call(254, 27, call(294, 26, 0), W['root'].encode(), 0x100)",
        "call(135, 92, 0x0040000)",  # personality
        "call(154, None, 0, (ctypes.c_char * 64)(), 64)",  # modify_ldt
        "call(173, None, 0x80, 1, 1)",
        "call(172, None, 3)",
    ),
    _surface(
        "shared_memory_and_messages",
        "call(319, 279, b'm', 0)",  # memfd_create
        "call(447, 447, 0)",
        "call(29, 194, 0, 4096, 0o1600)",  # of System V
        "call(29, 194, 4711, 4096, 0o1666)",
        "call(64, 190, 0, 1, 0o1600)",
        "call(68, 186, 0, 0o1600)",
        "call(240, 180, W['nonce'].encode(), 0o102, 0o600, None)",
    ),
    _surface(
        "clock",
        "call(164, 170, (ctypes.c_long * 2)(int(__import__('time').time()), 0), None)",
        "__import__('time').clock_settime(0, __import__('time').time())",
        "call(159, 171, (ctypes.c_long * 26)(1, 0))",
        "call(305, 266, 0, (ctypes.c_long * 26)(1, 0))",
    ),
    _surface(
        "splices",
        "call(276, 77, r, w2, 1, 2)",
        "call(275, 76, r, None, w2, None, 1, 2)",
        "call(278, 75, w, (ctypes.c_size_t * 2)(ctypes.addressof(page), 4096), 1, 0)",
        extra="page = ctypes.create_string_buffer(4096)\nr, w = os.pipe()\nr2, w2 = os.pipe()\nos.write(w, b'xx')",
    ),
    _surface(
        "real_time",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "call(314, 274, 0, (ctypes.c_uint32 * 14)(56, 6, 0, 0, 0, 0, 100, 0, 200, 0, 200, 0), 0)",
        "os.setpriority(os.PRIO_PROCESS, 0, -20)",
        "os.setpriority(os.PRIO_PROCESS, W['victim'], 19)",
        "call(251, 30, 1, 0, (1 << 13) | 1)",
        "os.sched_setaffinity(W['victim'], {0})",
        needs=("victim",),
        also="(errno.ESRCH,)",
    ),
    _surface(
        "reboot",
        "call(169, 142, 0xfee1dead - 2 ** 32, 672274793, 0, None)",
        "call(246, 104, 0, 0, None, 0)",
        "call(175, 105, None, 0, b'')",
        "call(313, 273, 0, b'', 0)",
        "call(176, 106, b'loop', 0)",
        "call(103, 116, 3, (ctypes.c_char * 4096)(), 4096)",
        "call(170, 161, b'x', 1)",
        "call(171, 162, b'x', 1)",
        "call(153, 58)",
        "call(179, 60, 0x80000100, b'/', 0, None)",
    ),
    _surface(
        "x32",
        "call(0x40000000 | 39, None)",
        "call(0x40000000 | 521, None, 0, 0, 0, 0)",
        "call(512 + 25, None, 0, 0, 0)",
    ),
    _surface("int_80", "legacy()", extra=_INT80, ends=(ExecStatus.SIGNAL,)),
    _surface(
        "landlock_gaps",
        "os.setxattr(W['owned'], 'user.planted', b'x')",
        "os.getxattr(W['canary'], 'user.secret')",
        "os.listxattr(W['canary']) or refuse('none')",
        "os.listdir(W['root'])",
        "call(303, 264, -100, W['canary'].encode(), (ctypes.c_uint * 64)(128), (ctypes.c_int * 1)(), 0)",
        also="(errno.ENOENT, errno.ENODATA)",
        excepted=(Isolation.UID,),
    ),
    _surface(
        "metadata",
        "os.chdir(W['root'])",
        "os.readlink(W['link'])",
        "os.access(W['canary'], os.R_OK) or refuse('no')",
        "call(137, 43, W['root'].encode(), (ctypes.c_char * 256)())",
        also="(errno.ENOENT,)",
        # landlock has no hook for metadata of files outside, such as stat and links
        excepted=(Isolation.LANDLOCK, Isolation.UID),
    ),
    _surface(
        "of_other_processes",
        "call(274, 100, W['victim'], (ctypes.c_void_p * 1)(), (ctypes.c_size_t * 1)())",
        "call(302, 261, W['victim'], 7, None, (ctypes.c_ulong * 2)())",
        "call(302, 261, W['victim'], 7, (ctypes.c_ulong * 2)(10, 4096), None)",
        "call(279, 239, W['victim'], 0, None, None, None, 0) or True",
        "call(256, 238, W['victim'], 0, None, None) or True",
        "call(440, 440, call(434, 434, W['victim'], 0), None, 0, 20, 0) or True",
        "os.getpgid(W['victim'])",
        "os.sched_getaffinity(W['victim'])",
        "os.getpriority(os.PRIO_PROCESS, W['victim'])",
        needs=("victim",),
        also="(errno.ESRCH,)",
    ),
    _surface(
        "filters_on_sockets",
        "pair.setsockopt(1, 26, program)",
        "pair.setsockopt(1, 50, (0).to_bytes(4, 'little'))",
        "pair.setsockopt(1, 51, program)",
        "pair.setsockopt(1, 44, 1)",
        "pair.setsockopt(1, 32, 1 << 30)",
        "pair.setsockopt(1, 16, 1) and refuse('done')",
        "pair.getsockopt(1, 17, 12)",
        "pair.getsockopt(1, 31, 256)",
        "pair.getsockopt(1, 59, 256)",
        "pair.getsockopt(1, 77, 4)",
        extra="import socket, struct\npair = socket.socketpair()[0]\ncode = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0xffff), 8)\nprogram = struct.pack('HxxxxxxP', 1, ctypes.addressof(code))",
        also="(errno.ENOPROTOOPT,)",
    ),
    _surface(
        "commands_of_fcntl",
        "fcntl.fcntl(r, 8, W['victim'])",
        "fcntl.fcntl(r, 15, struct.pack('ii', 1, W['victim']))",
        "fcntl.fcntl(r, 10, 9)",
        "fcntl.fcntl(folder, 1026, 0x80000004)",
        "fcntl.fcntl(source, 1024, fcntl.F_RDLCK)",
        extra="import fcntl, struct\nr, w = os.pipe()\nfolder = os.open('.', os.O_RDONLY)\nsource = os.open(os.__file__, os.O_RDONLY)",
        needs=("victim",),
    ),
    _surface(
        "more_kernel",
        "call(317, 277, 1, 8, (ctypes.c_char * 16)())",
        "call(288, 242, 0, None, None, 0)",
        "call(206, 0, 16, (ctypes.c_ulong * 1)())",
        "call(212, 18, 0, None, 0)",
        "call(451, 451, 0, (ctypes.c_ulong * 2)(0, 4096), (ctypes.c_ulong * 8)(), 0) or True",
        "call(318 + 130, 448, call(434, 434, os.getpid(), 0), 0)",
        "call(157, 167, 36, 1, 0, 0, 0) or True",
        "call(157, 167, 35, 8, 0, 0, 0) or True",
        "call(157, 167, 59, 1, 0, 0, 0) or True",
    ),
    case(
        "bytearray",
        "def grow():\n    data = bytearray(400 << 20)\n    data[::4096] = b'x' * len(data[::4096])\n    return len(data)\nattempt('400 MB', grow)",
        limits=replace(LIMITS, cpu_s=3.0),
        ends=ENDED,
    ),
    case("pipe_buffers", """
import fcntl
held = []
def pipes():
    while len(held) < 300:
        r, w = os.pipe()
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(w, False)
        try:
            while True:
                os.write(w, b'x' * 65536)
        except BlockingIOError:
            pass
        held.append((r, w))
    return len(held)
attempt('300 full pipes', pipes)
""", limits=replace(LIMITS, cpu_s=3.0), ends=ENDED),
    case("disk_by_unlinked_files", """
import time
kept = []
def write():
    for index in range(40):
        file = open('gone', 'wb', 0)
        os.unlink('gone')
        file.write(b'x' * (4 << 20))
        kept.append(file)
        time.sleep(0.1)
    return f'{len(kept) * 4} MB in files without a name'
attempt('40 of 4 MB', write)
""", limits=replace(LIMITS, cpu_s=3.0), ends=ENDED),
    case("dev_shm", """
def write():
    with open('/dev/shm/' + W['nonce'], 'wb') as file:
        for _ in range(100):
            file.write(b'x' * (1 << 20))
    size = os.stat('/dev/shm/' + W['nonce']).st_size
    os.unlink('/dev/shm/' + W['nonce'])
    return size
attempt('100 MB', write)
""", ends=ENDED, excepted=(Isolation.UID,)),
    case("locked_folders", """
say('TRYING', 'folders that cannot be removed')
for name in ('a', 'a/b', 'a/b/c'):
    os.mkdir(name)
open('a/b/c/file', 'w').write('x')
for deed in (lambda: os.chmod('a/b/c/file', 0), lambda: os.chmod('a/b/c', 0), lambda: os.chmod('a/b', 0), lambda: os.chmod('a', 0), lambda: os.chmod('.', 0)):
    try:
        deed()
    except OSError:
        pass
try:
    import fcntl
    fcntl.ioctl(os.open('.', os.O_RDONLY), 0x40086602, (ctypes.c_long * 1)(0x10))  # FS_IOC_SETFLAGS, immutable
except OSError:
    pass
say('HELD', 'if the next run works')
""", then="say('TRYING')\nsay('ESCAPED' if os.path.exists('a') else 'HELD')"),
    case(
        "stdout_flood",
        "say('TRYING')\nsay('HELD', 'so far')\nwhile True:\n    os.write(1, b'x' * 65536)",
        must_end=(ExecStatus.OUTPUT_LIMIT, ExecStatus.CPU_TIMEOUT, ExecStatus.WALL_TIMEOUT),
        check=lambda result, facts: (
            "" if len(result.stdout) <= LIMITS.stdout_kb * 1024 * 4 else f"kept {len(result.stdout)}"
        ),
    ),
]  # fmt: skip
