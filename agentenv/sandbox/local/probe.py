"""Probes of the features that the levels need. A failed probe has an errno and a hint for a fix."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from dataclasses import dataclass
from enum import StrEnum

from agentenv.sandbox.local.plan import Plan
from agentenv.sandbox.local.zygote_client import command, environment, plan_data

TIMEOUT_S = 60.0


class ProbeOutcome(StrEnum):
    """The outcome of a probe."""

    OK = "ok"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one probe."""

    name: str
    outcome: ProbeOutcome
    errno: int | None = None
    detail: str = ""
    hint: str = ""
    """How to fix a failure."""

    def __str__(self) -> str:
        code = f" {errno.errorcode.get(self.errno, self.errno)}" if self.errno else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.name} {self.outcome}{code}{detail}{f' ({self.hint})' if self.hint else ''}"


_CONTAINER = (
    "the container's seccomp profile or AppArmor forbids it: run with --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined, or use the landlock level"
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
    "separate root": _CONTAINER,
    "other users": "run as root with CAP_SETUID and CAP_SETGID and an interpreter that other users can reach; only the "
    "uid level, and landlock as root, need it",
    "openat2": "needs Linux 5.6, and a container profile that lets it through",
}


def run_probes(plan: Plan) -> tuple[Probe, ...]:
    """Probe all features that the levels need, in a separate process; takes a fraction of a second.

    Blocks: call it through `asyncio.to_thread` from an event loop.
    """
    try:
        process = subprocess.run(
            command(plan.python, "probes", 1),
            input=plan_data(plan),
            capture_output=True,
            env=environment(plan),
            cwd="/",
            timeout=TIMEOUT_S,
            check=True,
        )
        failures: dict[str, list[int | str] | None] = json.loads(process.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="backslashreplace").strip().splitlines()[-1:]
        return (Probe("interpreter", ProbeOutcome.FAIL, None, "".join(last), f"{plan.python} cannot run the probes"),)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        code = getattr(error, "errno", None)
        return (Probe("interpreter", ProbeOutcome.FAIL, code, str(error), "use another interpreter"),)
    probes = []
    for name, failure in failures.items():
        if failure is None:
            probes.append(Probe(name, ProbeOutcome.OK))
        elif name == "other users" and os.geteuid() != 0:
            probes.append(Probe(name, ProbeOutcome.SKIPPED, detail="not root"))
        else:
            code, message = int(failure[0]) or None, str(failure[1])
            probes.append(Probe(name, ProbeOutcome.FAIL, code, message, _HINTS.get(name, "")))
    return tuple(probes)
