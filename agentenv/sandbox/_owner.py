"""Whose a container or a virtual machine is, written on it: what nobody owns any more may be removed."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path


def owner() -> dict[str, str]:
    """Labels that tell this process from all others: a number is used again, one with its start in its boot is not."""
    return {
        "agentenv.pid": str(os.getpid()),
        "agentenv.started": _started("self"),
        "agentenv.boot": _read("/proc/sys/kernel/random/boot_id"),
        "agentenv.pids": _link("/proc/self/ns/pid"),
        "agentenv.host": socket.gethostname(),
    }


def is_gone(labels: Mapping[str, str]) -> bool:
    """Whether a container's owner is surely gone; one whose processes we cannot see may be there."""
    ours = owner()
    same = {key: labels.get(key) == value for key, value in ours.items()}
    if not labels.keys() >= ours.keys() or not (same["agentenv.host"] or same["agentenv.boot"]):
        return False
    if not same["agentenv.boot"]:
        return True  # of this machine, before it was started anew
    return same["agentenv.pids"] and labels["agentenv.started"] != _started(labels["agentenv.pid"])


def _started(pid: str) -> str:
    """When a process began, in ticks since boot; "" where there is none."""
    return "".join(_read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19:20])


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
