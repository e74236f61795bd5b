"""The properties by name, and how they are run: `run_suite`."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from agentenv.check_watch import CallWatch, Hung
from agentenv.conformance.blocking import blocking
from agentenv.conformance.cancelling import cancel
from agentenv.conformance.contract import contract, of_hung
from agentenv.conformance.data import data
from agentenv.conformance.determinism import determinism
from agentenv.conformance.feedback import feedback
from agentenv.conformance.isolation import isolation
from agentenv.conformance.lifecycle import close, constructor
from agentenv.conformance.mutation import mutation
from agentenv.conformance.outcomes import ends, rewards, truncation
from agentenv.conformance.pickling import pickling
from agentenv.conformance.problems import Problem
from agentenv.conformance.scene import NotApplicable, Options, Scene
from agentenv.errors import ConfigError

Property = Callable[[Scene], list[Problem]]
PROPERTIES: Mapping[str, Property] = {
    "contract": contract,
    "constructor": constructor,
    "rewards": rewards,
    "ends": ends,
    "truncation": truncation,
    "feedback": feedback,
    "determinism": determinism,
    "isolation": isolation,
    "mutation": mutation,
    "blocking": blocking,
    "close": close,
    "cancel": cancel,
    "pickling": pickling,
    "data": data,
}
"""In the order in which they are looked at; each says in its first sentence what holds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one property."""

    name: str
    state: Literal["held", "broken", "skipped"]
    problems: Sequence[Problem] = ()
    reason: str = ""
    """Why it was skipped."""
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line, and one for each problem."""
        mark = {"held": "✓", "broken": "✗", "skipped": "–"}[self.state]
        said = f"skipped: {self.reason}" if self.state == "skipped" else meaning(self.name)
        return "\n".join([f"{mark} {self.name:12} {said}", *(f"  {problem}" for problem in self.problems)])

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; of the problems their number."""
        return {
            "name": self.name, "state": self.state, "reason": self.reason, "num_problems": len(self.problems),
            "seconds": round(self.seconds, 3),
        }  # fmt: skip


def meaning(name: str) -> str:
    """What holds where the property does, in one sentence."""
    return (PROPERTIES[name].__doc__ or "").strip().splitlines()[0]


def run_suite(
    scene: Scene,
    *,
    only: Sequence[str] = (),
    skip: Mapping[str, str] | None = None,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Look at the properties one after the other.

    Where `contract` is broken the others are skipped, unless `only` names them: they would say the same again.

    Args:
        scene: what is checked.
        only: names of properties; all of them when empty.
        skip: names of properties, each with the reason.
        told: gets each outcome as soon as it is there.

    Raises:
        ConfigError: there is no such property, or the target cannot be loaded.
    """
    skip = skip or {}
    known_names(only, "--only")
    known_names(tuple(skip), "--skip")
    try:
        return list(_outcomes(scene, only, skip, told))
    finally:
        scene.close()


def _outcomes(
    scene: Scene, only: Sequence[str], skip: Mapping[str, str], told: Callable[[Outcome], None]
) -> Iterator[Outcome]:
    outcomes: list[Outcome] = []
    for name in only or PROPERTIES:
        stopped = next((one.name for one in outcomes if one.state == "broken" and stops(one, only)), None)
        if name in skip:
            outcome = Outcome(name, "skipped", reason=skip[name])
        elif stopped is not None:
            outcome = Outcome(name, "skipped", reason=f"mend `{stopped}` first")
        else:
            outcome = hold(scene, name)
        outcomes.append(outcome)
        told(outcome)
        yield outcome


def hold(scene: Scene, name: str) -> Outcome:
    """Look at one property; a call that hangs is its problem. Whoever looks at the last one closes the scene."""
    started = time.perf_counter()
    problems: list[Problem] = []
    try:
        problems = asyncio.run(scene.watch.over(partial(PROPERTIES[name], scene), name))
    except NotApplicable as reason:
        return Outcome(name, "skipped", reason=str(reason), seconds=time.perf_counter() - started)
    except Hung as hung:
        problems = [of_hung(scene, hung)]
    named = [replace(problem, property=name) for problem in problems]
    return Outcome(name, "broken" if named else "held", named, seconds=time.perf_counter() - started)


def known_names(names: Sequence[str], flag: str) -> None:
    """Refuse what is no property.

    Raises:
        ConfigError: with the nearest name.
    """
    for name in names:
        if name not in PROPERTIES:
            near = difflib.get_close_matches(name, PROPERTIES, n=1)
            meant = f"Did you mean {near[0]!r}?" if near else "Leave it out."
            raise ConfigError(f"{flag}: expected properties among {', '.join(PROPERTIES)}, got {name!r}. {meant}")


def stops(outcome: Outcome, only: Sequence[str] = ()) -> bool:
    """Whether a broken property is to be mended before the others are looked at, unless `only` names them."""
    hangs = any(problem.expected.startswith("an answer within") for problem in outcome.problems)
    return hangs or (outcome.name == "contract" and not only)


def scene_of(options: Options, tell: Callable[[str], None] = lambda line: None) -> Scene:
    """What `run_suite` looks at; `tell` shows a line about a call that takes long."""
    return Scene(options, CallWatch(tell))
