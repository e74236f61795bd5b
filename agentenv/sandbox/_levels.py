"""Which level of isolation this machine gives: each is tried, strongest first, by running programs in it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass, replace

from agentenv.errors import InfraError
from agentenv.sandbox import _canary, _plan
from agentenv.sandbox._client import Zygote
from agentenv.sandbox._plan import Plan
from agentenv.sandbox.probe import Outcome, Probe, run_probes
from agentenv.sandbox.types import Isolation, SandboxUnavailable

OPT_IN = "AGENTENV_ALLOW_UNSAFE_SANDBOX"
"""Set to 1, together with `allow_unsafe=True`: programs may run without isolation."""
_LOG = logging.getLogger(__name__)
_LAYERS = {
    Isolation.NAMESPACES: ("user, pid, mount, net, ipc and uts namespaces", "read-only root", "tmpfs", "no /proc"),
    Isolation.LANDLOCK: (),
    Isolation.UID: (),
    Isolation.NONE: (),
}


@dataclass(frozen=True)
class Wanted:
    """What isolation is asked for."""

    min_isolation: Isolation
    exactly: Isolation | None
    preimport: tuple[str, ...]
    allow_unsafe: bool

    def levels(self) -> list[Isolation]:
        """What to try, strongest first."""
        local = [Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.UID]
        least = Isolation.UID if self.min_isolation is Isolation.NONE else self.min_isolation
        levels = [level for level in local if level.strength >= least.strength]
        if self.exactly is not None:
            levels = [level for level in local if level is self.exactly]
        if self.allow_unsafe and os.environ.get(OPT_IN) == "1" and self.exactly in (None, Isolation.NONE):
            levels.append(Isolation.NONE)
        return levels


@dataclass(frozen=True)
class Level:
    """A level that works, and the zygote that showed it."""

    isolation: Isolation
    layers: tuple[str, ...]
    plan: Plan
    zygote: Zygote
    num_canaries: int


async def choose(wanted: Wanted) -> Level:
    """The strongest level that works.

    Raises:
        SandboxUnavailable: none does; the message names what failed, with its errno, and what mends it.
    """
    failures: list[str] = []
    for isolation in wanted.levels():
        level = await attempt(isolation, wanted.preimport, failures)
        if level is None:
            continue
        if isolation is Isolation.NONE:
            _LOG.warning("LocalSandbox: programs run WITHOUT isolation (%s=1 and allow_unsafe)", OPT_IN)
        elif failures:
            _LOG.info("LocalSandbox: %s is the strongest level here: %s", isolation, "; ".join(failures))
        return level
    _refuse_missing(wanted.preimport, failures)
    raise SandboxUnavailable(await _explain(wanted, failures))


def _refuse_missing(preimport: tuple[str, ...], failures: list[str]) -> None:
    """Where a package is not there it is not isolation that lacks, and no probe finds it.

    Raises:
        SandboxUnavailable: a level failed at the import of one.
    """
    lacks = [re.search(r"\((\S+)\): .*No module named '([\w.]+)'", failure) for failure in failures]
    for found in filter(None, lacks):
        if any(name.split(".")[0] == found[2].split(".")[0] for name in preimport):
            raise SandboxUnavailable(
                f"preimport: expected packages of {found[1]}, got no module {found[2]!r} there. "
                "Install it, or leave it out"
            )


async def attempt(isolation: Isolation, preimport: tuple[str, ...], failures: list[str]) -> Level | None:
    """A level, tried: its zygote runs and nothing gets out of it. What went wrong is added to `failures`."""
    plans = _plan.plans(isolation, preimport)
    if not plans:
        failures.append(f"{isolation}: no users to run programs as, or no interpreter that they can reach")
    for plan in plans:
        where = f"{isolation} ({plan.python})"
        zygote = None
        kept = False
        try:
            zygote = await Zygote.start(plan)
            count, escaped = await _canary.escapes(zygote, isolation)
            if not escaped:
                kept = True
                return Level(isolation, _layers(plan, zygote.landlock), plan, zygote, count)
            failures.append(f"{where}: canary programs could {', '.join(escaped)}")
        except (InfraError, OSError) as error:
            failures.append(f"{where}: {error}")
        finally:
            if zygote and not kept:
                await zygote.close()
    return None


def _layers(plan: Plan, landlock: int) -> tuple[str, ...]:
    layers = [*_LAYERS[plan.tier]]
    layers += [f"landlock {landlock}"] * bool(landlock)
    if plan.tier is not Isolation.NONE:
        layers += ["seccomp", "no capabilities", "own user" if plan.ids else "own user namespace"]
        if plan.tier is not Isolation.NAMESPACES and not plan.ids:
            layers.pop()
    return (*layers, "rlimits")


async def _explain(wanted: Wanted, failures: list[str]) -> str:
    asked = repr(str(wanted.exactly)) if wanted.exactly else f"{str(wanted.min_isolation)!r} or stronger"
    plan = Plan(Isolation.NAMESPACES, _plan.user_range(), _plan.interpreters()[0])
    probes = await asyncio.to_thread(run_probes, plan)
    failed: list[Probe] = []
    for probe in probes:
        if probe.outcome is Outcome.FAIL:
            told = any(probe.hint == other.hint for other in failed)
            failed.append(replace(probe, hint="as above") if told else probe)
    if wanted.exactly is Isolation.NONE or (not failures and not failed):
        failures.append(f"no isolation at all takes allow_unsafe=True and {OPT_IN}=1 in the environment")
    tried = "".join(f"\n- level {failure}" for failure in failures)
    probed = "".join(f"\n- probe {probe}" for probe in failed)
    return (
        f"sandbox: expected isolation {asked}, got none here. See what failed, or use a remote backend:{tried}{probed}"
    )
