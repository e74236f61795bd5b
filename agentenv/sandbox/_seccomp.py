"""The filter of system calls: a list of what programs need; a search tree of BPF, assembled once per zygote.

Three answers to what is not on the list: an error that programs handle (EPERM, or ENOSYS, so that libraries take
another way), and the end of the process for what only an attack calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from agentenv.sandbox import _linux

Code = list[tuple[int, int, int, int]]
"""BPF: operation, jump if true, jump if false, constant."""
_LOAD, _JEQ, _JGE, _JSET, _JA, _RET = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, ENOTTY, EOPNOTSUPP = ERRNO | 1, ERRNO | 38, ERRNO | 25, ERRNO | 95
OWN_PID = 0x5EC0A11D
"""Stands for the process that the filter is for, until `install`."""

_ALWAYS = """
read write close fstat stat lstat newfstatat statx lseek mmap mprotect munmap brk mremap madvise msync mincore
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pread64 pwrite64
readv writev preadv pwritev preadv2 pwritev2 access faccessat faccessat2 pipe pipe2 select pselect6 poll ppoll
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 sched_yield dup dup2 dup3 pause nanosleep
clock_nanosleep getitimer setitimer alarm getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid
getgroups getpgid getpgrp getsid uname flock fsync fdatasync truncate ftruncate getdents getdents64 getcwd chdir
fchdir rename renameat renameat2 mkdir mkdirat rmdir creat link linkat unlink unlinkat symlink symlinkat readlink
readlinkat umask gettimeofday time clock_gettime clock_getres times getrusage getrlimit setrlimit sysinfo arch_prctl
set_tid_address set_robust_list get_robust_list futex futex_waitv sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min getcpu getpriority setpriority exit exit_group wait4 waitid
restart_syscall open openat openat2 statfs fstatfs getrandom rseq membarrier timer_create timer_settime timer_gettime
timer_delete timer_getoverrun timerfd_create timerfd_settime timerfd_gettime eventfd eventfd2 signalfd signalfd4
sendfile copy_file_range fallocate fadvise64 readahead
recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown getsockname getpeername getsockopt capget close_range
munlock munlockall setuid setgid setreuid setregid setresuid setresgid
"""
_CHANGES_METADATA = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat"
_XATTRS = """
setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
fremovexattr
"""
_SIGNALS = "kill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
_PROCESSES = "fork vfork execve execveat pidfd_open pidfd_send_signal"
_GROUPS = "setsid setpgid"
_REFUSED = """
socket connect bind listen accept accept4 clone mknod mknodat sched_setaffinity sched_setscheduler sched_setparam
sched_setattr setgroups setfsuid setfsgid capset personality seccomp mlock mlock2 mlockall tkill process_madvise
prctl prlimit64 socketpair sendto setsockopt fcntl
"""
_ATTACKS = """
ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd bpf perf_event_open userfaultfd keyctl add_key request_key
mount umount2 pivot_root move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr unshare setns chroot
open_by_handle_at init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff settimeofday
clock_settime adjtimex clock_adjtime iopl ioperm acct quotactl syslog fanotify_init fanotify_mark lookup_dcookie
vhangup modify_ldt sethostname setdomainname
"""
_IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, 0x5413)
"""TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TIOCGWINSZ."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1033, 1034)
"""Descriptors, flags, locks, the size of a pipe and seals; no signals, leases or notices to come."""
_SOCKET_OPTIONS = (2, 7, 8, 9, 13, 20, 21)
"""SO_REUSEADDR, buffers, SO_KEEPALIVE, SO_LINGER, timeouts; no filters and no credentials."""
_OF_PROCESSES = {
    "getpgid": 0, "getsid": 0, "sched_getaffinity": 0, "sched_getparam": 0, "sched_getscheduler": 0, "getpriority": 1,
    "setpriority": 1,
}  # fmt: skip
"""Calls that name a process, and which argument does."""
_PRCTLS = (
    _linux.PR_SET_NAME, _linux.PR_GET_NAME, _linux.PR_GET_DUMPABLE, _linux.PR_GET_PDEATHSIG, _linux.PR_CAPBSET_READ,
    _linux.PR_SET_VMA, _linux.PR_SET_PDEATHSIG,
)  # fmt: skip


def _load_argument(index: int, *, high: bool = False) -> Code:
    return [(_LOAD, 0, 0, 16 + 8 * index + 4 * high)]


def _if_one_of(index: int, values: Sequence[int], otherwise: int) -> Code:
    """Allow when the argument (its low half, which is all the kernel reads of an int) is one of these."""
    jumps: Code = [(_JEQ, len(values) - place, 0, value & 0xFFFFFFFF) for place, value in enumerate(values)]
    return [*_load_argument(index), *jumps, (_RET, 0, 0, otherwise), (_RET, 0, 0, ALLOW)]


def _unless_bits(index: int, bits: int, otherwise: int, *, required: int = 0) -> Code:
    """Allow when none of these bits is set, and the required one is."""
    test: Code = [(_JSET, 0, 1, bits), (_RET, 0, 0, otherwise)]
    need: Code = [(_JSET, 1, 0, required), (_RET, 0, 0, otherwise)] if required else []
    return [*_load_argument(index), *test, *need, (_RET, 0, 0, ALLOW)]


def _if_null(index: int, otherwise: int) -> Code:
    refuse: Code = [(_RET, 0, 0, otherwise)]
    both: Code = [*_load_argument(index), (_JEQ, 1, 0, 0), *refuse, *_load_argument(index, high=True), (_JEQ, 1, 0, 0)]
    return [*both, *refuse, (_RET, 0, 0, ALLOW)]


def _socketpair() -> Code:
    """AF_UNIX, and stream or seqpacket: a datagram's could be sent to any name."""
    kinds = (0xF, 1, 5)
    return [
        *_load_argument(0), (_JEQ, 1, 0, 1), (_RET, 0, 0, EPERM), *_load_argument(1), (0x54, 0, 0, kinds[0]),
        (_JEQ, 2, 0, kinds[1]), (_JEQ, 1, 0, kinds[2]), (_RET, 0, 0, EPERM), (_RET, 0, 0, ALLOW),
    ]  # fmt: skip


def _make_node(index: int) -> Code:
    """Regular files and FIFOs."""
    return [
        *_load_argument(index), (0x54, 0, 0, 0o170000), (_JEQ, 3, 0, 0o010000), (_JEQ, 2, 0, 0o100000), (_JEQ, 1, 0, 0),
        (_RET, 0, 0, EPERM), (_RET, 0, 0, ALLOW),
    ]  # fmt: skip


def _answers(*, processes: bool, own_signals: bool, own_groups: bool, metadata: int) -> dict[str, Code]:
    def answer(names: str, action: int) -> dict[str, Code]:
        """The same for all of them."""
        return {name: [(_RET, 0, 0, action)] for name in names.split()}

    table = answer(_ALWAYS, ALLOW) | answer(_REFUSED, EPERM) | answer(_ATTACKS, KILL) | answer(_XATTRS, EOPNOTSUPP)
    table |= answer(_CHANGES_METADATA, metadata) | answer(_PROCESSES, ALLOW if processes else EPERM)
    table |= answer(_GROUPS, EPERM if own_groups else ALLOW) | answer(_SIGNALS, ALLOW)
    if own_signals:
        table |= {name: _if_one_of(0, [OWN_PID], EPERM) for name in _SIGNALS.split()}
    if own_groups:
        table |= {name: _if_one_of(index, [0, OWN_PID], EPERM) for name, index in _OF_PROCESSES.items()}
    table["fcntl"] = _if_one_of(1, _FCNTLS, EPERM)
    table["setsockopt"] = _if_one_of(2, _SOCKET_OPTIONS, EPERM)
    table["ioctl"] = _if_one_of(1, _IOCTLS, ENOTTY)
    table["prctl"] = _if_one_of(0, _PRCTLS, EPERM)
    table["prlimit64"] = _if_one_of(0, [0], EPERM)
    table["clone"] = _unless_bits(0, _linux.CLONE_NEW, EPERM, required=0 if processes else _linux.CLONE_THREAD)
    table["socketpair"] = _socketpair()
    table["sendto"] = _if_null(4, EPERM)
    table["mknod"], table["mknodat"] = _make_node(1), _make_node(2)
    return table


def _tree(steps: Sequence[tuple[int, Code]]) -> Code:
    """A search for the last step that begins at or before the number."""
    if len(steps) == 1:
        return steps[0][1]
    middle = len(steps) // 2
    low, high = _tree(steps[:middle]), _tree(steps[middle:])
    if len(low) <= 255:
        return [(_JGE, len(low), 0, steps[middle][0]), *low, *high]
    return [(_JGE, 0, 1, steps[middle][0]), (_JA, 0, 0, len(low)), *low, *high]


def _steps(table: dict[int, Code], default: Code) -> Iterable[tuple[int, Code]]:
    previous: Code = []
    for number in range(max(table) + 2):
        code = table.get(number, default)
        if code != previous:
            yield number, code
        previous = code


def assemble(*, processes: bool, own_signals: bool = False, own_groups: bool = False, metadata: int = ALLOW) -> Code:
    """The filter.

    Args:
        processes: may fork and execute.
        own_signals: signals reach its own process only, where nothing else keeps them in.
        own_groups: it may not leave its process group, where that is what it is killed by, nor ask about the processes
            of others, where it can see their numbers.
        metadata: the answer to changes of mode, owner and times, where nothing else keeps them in.

    Raises:
        StepError: the processor is unknown.
    """
    if not _linux.AUDIT_ARCH:
        raise _linux.StepError(38, f"seccomp: no system call table for {_linux.MACHINE}")
    answers = _answers(processes=processes, own_signals=own_signals, own_groups=own_groups, metadata=metadata)
    numbered = {_linux.NUMBERS[name]: code for name, code in answers.items() if name in _linux.NUMBERS}
    head: Code = [(_LOAD, 0, 0, 4), (_JEQ, 1, 0, _linux.AUDIT_ARCH), (_RET, 0, 0, KILL), (_LOAD, 0, 0, 0)]
    # x32, and whatever else sets the high bit.
    other_abi: Code = [(_JGE, 0, 1, 0x40000000), (_RET, 0, 0, KILL)]
    return [*head, *other_abi, *_tree(list(_steps(numbered, [(_RET, 0, 0, ENOSYS)])))]


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


class Filter:
    """A filter that is ready to be installed."""

    def __init__(self, code: Code) -> None:
        self._instructions = (_Instruction * len(code))(*(_Instruction(*line) for line in code))
        self._own = [place for place, instruction in enumerate(code) if instruction[3] == OWN_PID]
        self._program = _Program(len(code), self._instructions)

    def install(self, pid: int) -> None:
        """Filter the calling process from now on; it is `pid`. Needs no_new_privs."""
        for place in self._own:
            self._instructions[place].k = pid
        _linux.syscall("prctl", _linux.PR_SET_SECCOMP, 2, ctypes.byref(self._program), 0, 0)
