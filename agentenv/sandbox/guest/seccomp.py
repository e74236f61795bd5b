"""The system call filter: an allowlist as a BPF search tree, assembled once per zygote. Runs inside the sandbox.

A call that is not on the list returns EPERM or ENOSYS, which libraries handle, or kills the process if only attacks
use it.
"""

from __future__ import annotations

import ctypes
import resource
import signal
from collections.abc import Mapping, Sequence

from agentenv.sandbox.guest import linux

Code = list[tuple[int, int, int, int]]
"""BPF instructions: operation, jump if true, jump if false, constant."""
_LOAD, _JEQ, _JGE, _JSET, _JA, _RET = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, ENOTTY, ENOPROTOOPT, EOPNOTSUPP = (ERRNO | code for code in (1, 38, 25, 92, 95))
OWN_PID = 0x5EC0A11D
"""Placeholder for the process id, replaced by `install`."""

_ALWAYS = """
read write close fstat stat lstat newfstatat statx lseek mmap mprotect munmap brk mremap msync
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pread64 pwrite64
readv writev preadv pwritev pwritev2 access faccessat faccessat2 pipe pipe2 select pselect6 poll ppoll
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 dup dup2 dup3 pause nanosleep
clock_nanosleep getitimer setitimer alarm getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid
getgroups getpgid getpgrp getsid uname flock fsync fdatasync truncate ftruncate getdents getdents64 getcwd chdir
fchdir rename renameat renameat2 mkdir mkdirat rmdir creat link linkat unlink unlinkat symlink symlinkat readlink
readlinkat umask gettimeofday time clock_gettime clock_getres times getrusage getrlimit setrlimit sysinfo arch_prctl
set_tid_address set_robust_list get_robust_list futex futex_waitv sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min getcpu fallocate exit exit_group wait4 waitid
restart_syscall open openat openat2 statfs fstatfs getrandom rseq membarrier timer_create timer_settime timer_gettime
timer_delete timer_getoverrun timerfd_create timerfd_settime timerfd_gettime eventfd eventfd2 signalfd signalfd4
sendfile copy_file_range
recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown getsockname getpeername capget close_range
munlock munlockall madvise fadvise64 readahead preadv2 setuid setgid setreuid setregid setresuid setresgid
"""
_CHANGES_METADATA = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat"
_XATTRS = """
setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
fremovexattr
"""
_SIGNALS = "kill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
_PROCESSES = "fork vfork execve execveat pidfd_open pidfd_send_signal"
_GROUPS = "setsid setpgid"
_PRIORITIES = "getpriority setpriority"
_REFUSED = """
socket connect bind listen accept accept4 clone mknod mknodat sched_setaffinity sched_setscheduler sched_setparam
mincore sched_setattr setgroups setfsuid setfsgid capset personality seccomp mlock mlock2 mlockall tkill process_madvise
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
"""Descriptors, flags, locks, pipe sizes and seals; no signals, leases or notifications."""
_SOCKET_OPTIONS = (2, 7, 8, 9, 13, 20, 21)
"""SO_REUSEADDR, buffers, SO_KEEPALIVE, SO_LINGER, timeouts; no filters and no credentials."""
_READABLE_OPTIONS = (*_SOCKET_OPTIONS, 3, 4, 15, 30, 38, 39)
"""Also the type, error, domain and protocol; not who is at the other end."""
_PROCESS_ARGUMENTS = {
    "getpgid": 0, "getsid": 0, "sched_getaffinity": 0, "sched_getparam": 0, "sched_getscheduler": 0,
}  # fmt: skip
"""Calls that name a process, and the index of that argument."""
_PRCTLS = (
    linux.PR_SET_NAME, linux.PR_GET_NAME, linux.PR_GET_DUMPABLE, linux.PR_GET_PDEATHSIG, linux.PR_CAPBSET_READ,
    linux.PR_SET_VMA,
)  # fmt: skip


def _load_argument(index: int, *, high: bool = False) -> Code:
    return [(_LOAD, 0, 0, 16 + 8 * index + 4 * high)]


def _if_one_of(index: int, values: Sequence[int], otherwise: int) -> Code:
    """Allow if the argument is one of these values. Only its low half is compared, as the kernel does for an int."""
    jumps: Code = [(_JEQ, len(values) - place, 0, value & 0xFFFFFFFF) for place, value in enumerate(values)]
    return [*_load_argument(index), *jumps, (_RET, 0, 0, otherwise), (_RET, 0, 0, ALLOW)]


def _mknod(index: int) -> Code:
    """Allow regular files and FIFOs."""
    return [
        *_load_argument(index), (0x54, 0, 0, 0o170000), (_JEQ, 3, 0, 0o010000), (_JEQ, 2, 0, 0o100000), (_JEQ, 1, 0, 0),
        (_RET, 0, 0, EPERM), (_RET, 0, 0, ALLOW),
    ]  # fmt: skip


def _no_kill(table: Mapping[str, Code]) -> dict[str, Code]:
    """Return answers that leave a program no way to end by SIGKILL, so that only its host ends it so.

    In a pid namespace no signal from inside does it; there a lowered CPU limit does, which stays visible.
    """
    refuse = [(_RET, 0, 0, EPERM)]
    # Without effect: the sandbox's own limit holds.
    nothing, allow = [(_RET, 0, 0, ERRNO)], [(_RET, 0, 0, ALLOW)]
    kill_at = {"kill": 1, "tgkill": 2, "rt_sigqueueinfo": 1, "rt_tgsigqueueinfo": 2}
    answers = {
        name: [*_load_argument(index), (_JEQ, 0, 1, int(signal.SIGKILL)), *refuse, *table[name]]
        for name, index in kill_at.items()
    }
    cpu_limit = (_JEQ, 0, 1, resource.RLIMIT_CPU)
    changes = [*_load_argument(2), (_JEQ, 0, 2, 0), *_load_argument(2, high=True), (_JEQ, 1, 0, 0), *nothing, *allow]
    jump = [(_JEQ, 0, len(changes), resource.RLIMIT_CPU)]
    return answers | {
        # Any signal can be that of a timer, and a library always names one.
        "timer_create": refuse,
        "setrlimit": [*_load_argument(0), cpu_limit, *nothing, *allow],
        "prlimit64": [*_load_argument(0), (_JEQ, 1, 0, 0), *refuse, *_load_argument(1), *jump, *changes, *allow],
    }


def _answers(*, processes: bool, own_signals: bool, on_host: bool, metadata: int) -> dict[str, Code]:
    def answer(names: str, action: int) -> dict[str, Code]:
        return {name: [(_RET, 0, 0, action)] for name in names.split()}

    table = answer(_ALWAYS, ALLOW) | answer(_REFUSED, EPERM) | answer(_ATTACKS, KILL) | answer(_XATTRS, EOPNOTSUPP)
    table |= answer(_CHANGES_METADATA, metadata) | answer(_PROCESSES, ALLOW if processes else EPERM)
    table |= answer(_GROUPS, EPERM if on_host else ALLOW) | answer(_SIGNALS, ALLOW)
    if own_signals:
        # A pidfd is a descriptor, which does not show whose process it is.
        table |= {name: _if_one_of(0, [OWN_PID], EPERM) for name in _SIGNALS.split()}
        table |= answer("pidfd_send_signal", EPERM)
    if on_host:
        table |= {name: _if_one_of(index, [0, OWN_PID], EPERM) for name, index in _PROCESS_ARGUMENTS.items()}
    # The priority of a process; that of a user is also the host's.
    who = _if_one_of(1, [0, OWN_PID], EPERM) if on_host else [(_RET, 0, 0, ALLOW)]
    table |= {name: [*_load_argument(0), (_JEQ, 1, 0, 0), (_RET, 0, 0, EPERM), *who] for name in _PRIORITIES.split()}
    # A program that gives up its core would look as if the host kept it waiting for one.
    table |= answer("sched_yield", ERRNO)
    table["fcntl"] = _if_one_of(1, _FCNTLS, EPERM)
    table["setsockopt"] = _if_one_of(2, _SOCKET_OPTIONS, EPERM)
    table["getsockopt"] = _if_one_of(2, _READABLE_OPTIONS, ENOPROTOOPT)
    table["ioctl"] = _if_one_of(1, _IOCTLS, ENOTTY)
    table["prctl"] = _if_one_of(0, _PRCTLS, EPERM)
    table["prlimit64"] = _if_one_of(0, [0], EPERM)
    refuse, allow = [(_RET, 0, 0, EPERM)], [(_RET, 0, 0, ALLOW)]
    # Not CLOSE_RANGE_UNSHARE: a thread with its own table of files could hide what it has open.
    table["close_range"] = _if_one_of(2, [0, 4], EPERM)
    if on_host:
        # A library writes to each block instead, which takes the time in which the quota is checked. What is sent
        # along with a message is in no table of files.
        table |= answer("fallocate", EOPNOTSUPP) | answer("sendmsg sendmmsg", EPERM)
        if not processes:
            table |= _no_kill(table)
    if not processes:
        # MAP_ANONYMOUS only with MAP_PRIVATE: pages of a shared mapping stay when it is unmapped in part, uncounted.
        table["mmap"] = [
            *_load_argument(3), (_JSET, 0, 3, 0x20), (0x54, 0, 0, 0xF), (_JEQ, 1, 0, 2), *refuse, *allow,
        ]  # fmt: skip
    # No new namespaces, only threads unless processes are permitted, and threads only with the files of their process.
    process = allow if processes else refuse
    table["clone"] = [
        *_load_argument(0), (_JSET, 0, 1, linux.CLONE_NEW), *refuse, (_JSET, 1, 0, linux.CLONE_THREAD), *process,
        (_JSET, 1, 0, linux.CLONE_FILES), *refuse, *allow,
    ]  # fmt: skip
    # AF_UNIX stream and seqpacket pairs; a datagram socket could send to any name.
    table["socketpair"] = [
        *_load_argument(0), (_JEQ, 1, 0, 1), *refuse, *_load_argument(1), (0x54, 0, 0, 0xF), (_JEQ, 2, 0, 1),
        (_JEQ, 1, 0, 5), *refuse, *allow,
    ]  # fmt: skip
    # Without an address: both halves of the pointer are 0.
    table["sendto"] = [
        *_load_argument(4), (_JEQ, 1, 0, 0), *refuse, *_load_argument(4, high=True), (_JEQ, 1, 0, 0), *refuse, *allow,
    ]  # fmt: skip
    table["mknod"], table["mknodat"] = _mknod(1), _mknod(2)
    return table


def _tree(steps: Sequence[tuple[int, Code]]) -> Code:
    """Return a binary search for the last step that begins at or before the call number."""
    if len(steps) == 1:
        return steps[0][1]
    middle = len(steps) // 2
    low, high = _tree(steps[:middle]), _tree(steps[middle:])
    if len(low) <= 255:
        return [(_JGE, len(low), 0, steps[middle][0]), *low, *high]
    return [(_JGE, 0, 1, steps[middle][0]), (_JA, 0, 0, len(low)), *low, *high]


def assemble(*, processes: bool, own_signals: bool = False, on_host: bool = False, metadata: int = ALLOW) -> Code:
    """Return the code of the filter.

    Args:
        processes: permit fork and exec.
        own_signals: permit signals to the own process only; needed without landlock's signal scope or namespaces.
        on_host: the program has no namespaces: forbid leaving the process group, by which it is killed, queries about
            other processes, SIGKILL from inside where processes are not permitted, and what hides files from a disk
            quota that is watched.
        metadata: the answer to changes of mode, owner and times.

    Raises:
        StepError: the processor is unknown.
    """
    if not linux.AUDIT_ARCH:
        raise linux.StepError(38, f"seccomp: no system call table for {linux.MACHINE}")
    answers = _answers(processes=processes, own_signals=own_signals, on_host=on_host, metadata=metadata)
    numbered = {linux.NUMBERS[name]: code for name, code in answers.items() if name in linux.NUMBERS}
    head: Code = [(_LOAD, 0, 0, 4), (_JEQ, 1, 0, linux.AUDIT_ARCH), (_RET, 0, 0, KILL), (_LOAD, 0, 0, 0)]
    # x32 calls have this bit set.
    other_abi: Code = [(_JGE, 0, 1, 0x40000000), (_RET, 0, 0, KILL)]
    # Consecutive calls with the same answer are one step of the search.
    steps: list[tuple[int, Code]] = []
    for number in range(max(numbered) + 2):
        code = numbered.get(number, [(_RET, 0, 0, ENOSYS)])
        if not steps or code != steps[-1][1]:
            steps.append((number, code))
    return [*head, *other_abi, *_tree(steps)]


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


class Filter:
    """An assembled filter."""

    def __init__(self, code: Code) -> None:
        self._instructions = (_Instruction * len(code))(*(_Instruction(*line) for line in code))
        self._own = [place for place, instruction in enumerate(code) if instruction[3] == OWN_PID]
        self._program = _Program(len(code), self._instructions)

    def install(self, pid: int) -> None:
        """Install the filter in the calling process, whose id is `pid`. Needs no_new_privs."""
        for place in self._own:
            self._instructions[place].k = pid
        linux.syscall("prctl", linux.PR_SET_SECCOMP, 2, ctypes.byref(self._program), 0, 0)
