"""What this machine offers a sandbox, found out by doing it: each probe is ok, or failed with an errno and a mend."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from enum import StrEnum

from agentenv.sandbox._client import command, environment
from agentenv.sandbox._plan import Plan

TIMEOUT_S = 60.0


class Outcome(StrEnum):
    """How a probe went."""

    OK = "ok"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that was tried."""

    name: str
    outcome: Outcome
    errno: int | None = None
    detail: str = ""
    hint: str = ""
    """What mends it."""

    def __str__(self) -> str:
        code = f" {errno.errorcode.get(self.errno, self.errno)}" if self.errno else ""
        said = f": {self.detail}" if self.detail else ""
        return f"{self.name} {self.outcome}{code}{said}{f' ({self.hint})' if self.hint else ''}"


_CONTAINER = (
    "the container's seccomp profile or AppArmor forbids it: run with --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined, or be content with the landlock level"
)
_HINTS = {
    "processor": "x86-64 and aarch64 are supported; use a remote backend",
    "interpreter": "install Python 3.11 or newer",
    "seccomp": "the kernel needs CONFIG_SECCOMP_FILTER; use a remote backend",
    "landlock": "needs Linux 5.13 with landlock in the kernel's lsm= list, and a profile that lets it through",
    "user namespace": f"{_CONTAINER}; or sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0",
    "mount namespace": _CONTAINER,
    "pid namespace": _CONTAINER,
    "net, ipc and uts namespaces": _CONTAINER,
    "root of its own": _CONTAINER,
    "other users": "run as root with CAP_SETUID and CAP_SETGID and an interpreter that other users can reach; only the "
    "uid level, and landlock as root, need it",
    "openat2": "needs Linux 5.6, and a container profile that lets it through",
}


def run_probes(plan: Plan) -> tuple[Probe, ...]:
    """Try everything that the levels need, in a process of its own; a fraction of a second.

    Blocks: call it by `asyncio.to_thread` where an event loop runs.
    """
    try:
        ran = subprocess.run(
            command(plan.python, "_probes", asdict(plan), 1),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(plan),
            cwd="/",
            timeout=TIMEOUT_S,
            check=True,
        )
        found: dict[str, list[int | str] | None] = json.loads(ran.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="backslashreplace").strip().splitlines()[-1:]
        return (Probe("interpreter", Outcome.FAIL, None, "".join(last), f"{plan.python} cannot run the probes"),)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return (Probe("interpreter", Outcome.FAIL, getattr(error, "errno", None), str(error), "name another"),)
    return tuple(_probe(name, said) for name, said in found.items())


def _probe(name: str, said: list[int | str] | None) -> Probe:
    if said is None:
        return Probe(name, Outcome.OK)
    if name == "other users" and os.geteuid() != 0:
        return Probe(name, Outcome.SKIPPED, detail="not root")
    return Probe(name, Outcome.FAIL, int(said[0]) or None, str(said[1]), _HINTS.get(name, ""))
