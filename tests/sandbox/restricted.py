"""Execute a command with less than this process has: as in a container with Docker's defaults, or as another user.

    python -m tests.sandbox.restricted --docker --uid 23456 -- python -m tests.sandbox.escapes landlock

`--docker` drops the capabilities that Docker drops and refuses what its default filter refuses: mounts, new namespaces,
io_uring, bpf and the like. `--no-landlock` refuses landlock too, as old kernels do, so that no isolation is left.
`--bind FROM TO` shows a folder at another place first, such as an interpreter that lies in root's home.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import struct
import sys

from agentenv.sandbox.guest.linux import NUMBERS

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
NEW_NAMESPACE = 0x7E020000
"""The flags of clone that make one."""

REFUSED = """
mount umount2 pivot_root unshare setns open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr swapon swapoff
reboot bpf perf_event_open add_key request_key keyctl userfaultfd io_uring_setup open_by_handle_at init_module
finit_module delete_module kexec_load acct settimeofday clock_settime quotactl lookup_dcookie syslog fanotify_init
sethostname setdomainname vhangup
"""
LANDLOCK = "landlock_create_ruleset landlock_add_rule landlock_restrict_self"
KEPT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""Docker's default capabilities, from CHOWN to SETFCAP."""

MAX_PROCESSES = 600

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _program(*, landlock: bool) -> bytes:
    """The filter, in classic BPF: a chain of comparisons of the call's number."""
    load_number, load_flags = (0x20, 0, 0, 0), (0x20, 0, 0, 16)
    steps = [load_number]

    def refuse(names: str, error: int) -> None:
        for name in names.split():
            if name in NUMBERS:
                steps.extend([(0x15, 0, 1, NUMBERS[name]), (0x06, 0, 0, ERRNO | error)])

    refuse(REFUSED, EPERM)
    refuse("clone3" if landlock else f"clone3 {LANDLOCK}", ENOSYS)
    # clone: its flags are the first argument on both machines.
    steps += [(0x15, 0, 3, NUMBERS["clone"]), load_flags, (0x45, 0, 1, NEW_NAMESPACE), (0x06, 0, 0, ERRNO | EPERM)]
    steps.append((0x06, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def refuse_calls(*, landlock: bool) -> None:
    """Install the filter, for this process and what it executes; without `no_new_privs` where it may."""
    program = _program(landlock=landlock)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    if _libc.prctl(22, 2, header, 0, 0) < 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        _check(_libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
        _check(_libc.prctl(22, 2, header, 0, 0), "seccomp")


def drop_capabilities() -> None:
    """Keep Docker's fourteen, in the bounding set and at hand."""
    for capability in range(64):
        if capability not in KEPT and _libc.prctl(23, capability, 0, 0, 0) == 1:  # PR_CAPBSET_READ
            _check(_libc.prctl(24, capability, 0, 0, 0), f"dropping capability {capability}")
    kept = sum(1 << capability for capability in KEPT)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)), "capset")


def become(uid: int) -> None:
    """Give up being root, for good; and have few processes, so that a bomb that gets loose stays small."""
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def bind(source: str, target: str) -> None:
    """Show a folder at another place, in a mount namespace of this process's own."""
    _check(_libc.unshare(0x00020000), "unshare")
    _check(_libc.mount(b"none", b"/", None, 0x44000, None), "private mounts")  # MS_REC | MS_PRIVATE
    os.makedirs(target, exist_ok=True)
    _check(_libc.mount(source.encode(), target.encode(), None, 0x5000, None), "bind")  # MS_BIND | MS_REC


def main() -> None:
    """Restrict this process as its flags say, then become the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docker", action="store_true")
    parser.add_argument("--no-landlock", action="store_true")
    parser.add_argument("--uid", type=int)
    parser.add_argument("--bind", nargs=2, metavar=("FROM", "TO"))
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    if asked.bind:
        bind(*asked.bind)
    if asked.docker or asked.no_landlock:
        refuse_calls(landlock=not asked.no_landlock)
    if asked.docker and os.getuid() == 0:
        drop_capabilities()
    if asked.uid is not None:
        become(asked.uid)
    os.execvp(asked.command[0], asked.command)


if __name__ == "__main__":
    sys.exit(main())
