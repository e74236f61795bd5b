"""Linux system calls through ctypes, for x86-64 and aarch64. Runs inside the sandbox; standard library only.

Other processors are not supported: `NUMBERS` is empty and `syscall` raises, because a filter needs the numbers.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Sequence

# Name, number on x86-64, number on aarch64 ("-" if it does not exist), from linux/include/uapi.
_TABLE = """
accept 43 202, accept4 288 242, access 21 -, acct 163 89, add_key 248 217, adjtimex 159 171, alarm 37 -,
arch_prctl 158 -, bind 49 200, bpf 321 280, brk 12 214, capget 125 90, capset 126 91, chdir 80 49, chmod 90 -,
chown 92 -, chroot 161 51, clock_adjtime 305 266, clock_getres 229 114, clock_gettime 228 113, clock_nanosleep
230 115, clock_settime 227 112, clone 56 220, clone3 435 435, close 3 57, close_range 436 436, connect 42 203,
copy_file_range 326 285, creat 85 -, delete_module 176 106, dup 32 23, dup2 33 -, dup3 292 24, epoll_create 213
-, epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441, epoll_wait 232 -, eventfd
284 -, eventfd2 290 19, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, faccessat 269 48,
faccessat2 439 439, fadvise64 221 223, fallocate 285 47, fanotify_init 300 262, fanotify_mark 301 263, fchdir 81
50, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25, fdatasync 75
83, fgetxattr 193 10, finit_module 313 273, flistxattr 196 13, flock 73 32, fork 57 -, fremovexattr 199 16,
fsconfig 431 431, fsetxattr 190 7, fsmount 432 432, fsopen 430 430, fspick 433 433, fstat 5 80, fstatfs 138 44,
fsync 74 82, ftruncate 77 46, futex 202 98, futex_waitv 449 449, futimesat 261 -, get_robust_list 274 100,
getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64 217 61, getegid 108 177, geteuid 107 175, getgid 104
176, getgroups 115 158, getitimer 36 102, getpeername 52 205, getpgid 121 155, getpgrp 111 -, getpid 39 172,
getppid 110 173, getpriority 140 141, getrandom 318 278, getresgid 120 150, getresuid 118 148, getrlimit 97 163,
getrusage 98 165, getsid 124 156, getsockname 51 204, getsockopt 55 209, gettid 186 178, gettimeofday 96 169,
getuid 102 174, getxattr 191 8, init_module 175 105, inotify_add_watch 254 27, inotify_init 253 -, inotify_init1
294 26, inotify_rm_watch 255 28, io_uring_setup 425 425, ioctl 16 29, ioperm 173 -, iopl 172 -, kcmp 312 272,
kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, kill 62 129, landlock_add_rule 445 445,
landlock_create_ruleset 444 444, landlock_restrict_self 446 446, lchown 94 -, lgetxattr 192 9, link 86 -, linkat
265 37, listen 50 201, listxattr 194 11, llistxattr 195 12, lookup_dcookie 212 18, lremovexattr 198 15, lseek 8
62, lsetxattr 189 6, lstat 6 -, madvise 28 233, membarrier 324 283, memfd_create 319 279, mincore 27 232, mkdir
83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33, mlock 149 228, mlock2 325 284, mlockall 151 230, mmap 9 222,
modify_ldt 154 -, mount 165 40, mount_setattr 442 442, move_mount 429 429, mprotect 10 226, mremap 25 216, msync
26 227, munlock 150 229, munlockall 152 231, munmap 11 215, nanosleep 35 101, newfstatat 262 79, open 2 -,
open_by_handle_at 304 -, open_tree 428 428, openat 257 56, openat2 437 437, pause 34 -, perf_event_open 298 241,
personality 135 92, pidfd_getfd 438 438, pidfd_open 434 434, pidfd_send_signal 424 424, pipe 22 -, pipe2 293 59,
pivot_root 155 41, poll 7 -, ppoll 271 73, prctl 157 167, pread64 17 67, preadv 295 69, preadv2 327 286,
prlimit64 302 261, process_madvise 440 440, process_vm_readv 310 270, process_vm_writev 311 271, pselect6 270
72, ptrace 101 117, pwrite64 18 68, pwritev 296 70, pwritev2 328 287, quotactl 179 60, read 0 63, readahead 187
213, readlink 89 -, readlinkat 267 78, readv 19 65, reboot 169 142, recvfrom 45 207, recvmmsg 299 243, recvmsg
47 212, removexattr 197 14, rename 82 -, renameat 264 38, renameat2 316 276, request_key 249 218,
restart_syscall 219 128, rmdir 84 -, rseq 334 293, rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14
135, rt_sigqueueinfo 129 138, rt_sigreturn 15 139, rt_sigsuspend 130 133, rt_sigtimedwait 128 137,
rt_tgsigqueueinfo 297 240, sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_getaffinity 204
123, sched_getparam 143 121, sched_getscheduler 145 120, sched_setaffinity 203 122, sched_setattr 314 274,
sched_setparam 142 118, sched_setscheduler 144 119, sched_yield 24 124, seccomp 317 277, select 23 -, sendfile
40 71, sendmmsg 307 269, sendmsg 46 211, sendto 44 206, set_robust_list 273 99, set_tid_address 218 96,
setdomainname 171 162, setfsgid 123 152, setfsuid 122 151, setgid 106 144, setgroups 116 159, sethostname 170
161, setitimer 38 103, setns 308 268, setpgid 109 154, setpriority 141 140, setregid 114 143, setresgid 119 149,
setresuid 117 147, setreuid 113 145, setrlimit 160 164, setsid 112 157, setsockopt 54 208, settimeofday 164 170,
setuid 105 146, setxattr 188 5, shutdown 48 210, sigaltstack 131 132, signalfd 282 -, signalfd4 289 74, socket
41 198, socketpair 53 199, stat 4 -, statfs 137 43, statx 332 291, swapoff 168 225, swapon 167 224, symlink 88
-, symlinkat 266 36, sysinfo 99 179, syslog 103 116, tgkill 234 131, time 201 -, timer_create 222 107,
timer_delete 226 111, timer_getoverrun 225 109, timer_gettime 224 108, timer_settime 223 110, timerfd_create 283
85, timerfd_gettime 287 87, timerfd_settime 286 86, times 100 153, tkill 200 130, truncate 76 45, umask 95 166,
umount2 166 39, uname 63 160, unlink 87 -, unlinkat 263 35, unshare 272 97, userfaultfd 323 282, utime 132 -,
utimensat 280 88, utimes 235 -, vfork 58 -, vhangup 153 58, wait4 61 260, waitid 247 95, write 1 64, writev 20
66
"""
MACHINE = os.uname().machine
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(MACHINE, 0)
"""Seccomp's number of this processor; 0 if unknown."""


def numbers(machine: str) -> dict[str, int]:
    """Return the system call numbers of a processor by name; empty if the processor is unknown."""
    column = {"x86_64": 1, "aarch64": 2}.get(machine)
    if column is None:
        return {}
    rows = [entry.split() for entry in _TABLE.replace("\n", " ").split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


NUMBERS = numbers(MACHINE)
"""System call numbers of this processor by name."""

CLONE_NEWTIME, CLONE_FILES, CLONE_THREAD = 0x00000080, 0x00000400, 0x00010000
CLONE_NEWNS, CLONE_NEWCGROUP = 0x00020000, 0x02000000
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (1 << bit for bit in (26, 27, 28, 29, 30))
CLONE_NEW = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_NAME, PR_GET_NAME = 1, 2, 3, 4, 15, 16
PR_SET_SECCOMP, PR_CAPBSET_READ, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_VMA = 22, 23, 36, 38, 0x53564D41
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 1, 2, 4, 8
_MOUNT_ATTRIBUTES = {MS_RDONLY: 1, MS_NOSUID: 2, MS_NODEV: 4, MS_NOEXEC: 8}
ENOSYS = 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class StepError(OSError):
    """A step of the setup failed; `strerror` begins with its name."""


def syscall(name: str, *arguments: object) -> int:
    """Call the kernel; integers are passed as longs, bytes as strings, ctypes objects unchanged.

    Raises:
        StepError: the call failed, or does not exist on this processor.
    """
    number = NUMBERS.get(name)
    if number is None:
        raise StepError(ENOSYS, f"{name}: no such call on {MACHINE}")
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        code = ctypes.get_errno()
        raise StepError(code, f"{name}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Move the calling process into new namespaces."""
    syscall("unshare", flags)


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, data: str = "") -> None:
    """Mount a file system, or change a mount."""
    try:
        syscall("mount", source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    except StepError as error:
        raise StepError(error.errno, f"mount {kind or source} on {target}: {os.strerror(error.errno or 0)}") from None


def bind(source: str, target: str, flags: int) -> None:
    """Bind-mount `source` at `target` with all mounts below it, under `flags` such as MS_RDONLY."""
    mount(source, target, flags=MS_BIND | MS_REC)
    restrict_mount(target, flags)


def restrict_mount(target: str, flags: int) -> None:
    """Add flags to a mount and all mounts below it; kernels before 5.12 change only the mount itself."""
    wanted = sum(bit for flag, bit in _MOUNT_ATTRIBUTES.items() if flags & flag)
    attributes = (ctypes.c_uint64 * 4)(wanted, 0, 0, 0)
    try:
        syscall("mount_setattr", AT_FDCWD, target.encode(), AT_RECURSIVE, ctypes.byref(attributes), 32)
    except StepError as error:
        if error.errno != ENOSYS:
            raise
        # Existing flags may be locked, so they are set again; statvfs uses the same bits.
        existing = os.statvfs(target).f_flag & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", target, flags=MS_REMOUNT | MS_BIND | flags | existing)


def pivot_to(new_root: str) -> None:
    """Make a mount the root, and unmount the old root."""
    os.chdir(new_root)
    syscall("pivot_root", b".", b".")
    syscall("umount2", b".", MNT_DETACH)
    os.chdir("/")


def prctl(option: int, *arguments: int) -> int:
    """Call prctl; missing arguments are 0."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    return syscall("prctl", option, *padded)


def drop_capabilities() -> None:
    """Drop all effective, permitted and inheritable capabilities."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def close_from(first: int) -> None:
    """Close every file descriptor from `first` on."""
    try:
        syscall("close_range", first, 0xFFFFFFFF, 0)
    except StepError:
        os.closerange(first, 1 << 16)  # RLIMIT_NOFILE is already the program's, so higher descriptors may be open


def open_beneath(directory: int, name: bytes | int) -> int:
    """Open a path below a folder for reading, or that at an address. Follow no link, cross no mount, never block."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
    how = (ctypes.c_uint64 * 3)(flags, 0, resolve)
    return syscall("openat2", directory, name, ctypes.byref(how), 24)


def write_at(directory: int, name: str, text: str) -> None:
    """Write a file of /proc, given an open /proc."""
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_at(directory: int, name: str) -> str:
    """Read a small file of /proc, given an open /proc. Names of processes in it may hold any bytes."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 8192).decode(errors="replace")
    finally:
        os.close(fd)


def map_ids(proc: int, pid: int | str, *, inside: int, outside: tuple[int, int], count: int = 1) -> None:
    """Map `count` users and groups of the user namespace of `pid`, starting at (uid, gid) `outside`."""
    if count == 1:
        write_at(proc, f"{pid}/setgroups", "deny")
    write_at(proc, f"{pid}/uid_map", f"{inside} {outside[0]} {count}")
    write_at(proc, f"{pid}/gid_map", f"{inside} {outside[1]} {count}")


def become(uid: int, gid: int) -> None:
    """Change to another user permanently."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def limit(pairs: Sequence[tuple[int, int]]) -> None:
    """Set resource limits, soft and hard, never above the current hard limit."""
    for kind, value in pairs:
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = hard if value == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
