"""Episodes that several properties look at, run once: each case alone, and each case with every call noted."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.check_watch import Seen
from agentenv.conformance.cases import Case, yielding
from agentenv.conformance.scene import Scene
from agentenv.trajectory import Trajectory


@dataclass(frozen=True)
class Noted:
    """One episode, and what the agent's methods gave in it."""

    case: Case
    trajectory: Trajectory
    seen: list[Seen]


def alone(scene: Scene) -> list[Trajectory]:
    """The record of each of `scene.cases`, one after the other."""
    cases = scene.cases

    async def run() -> list[Trajectory]:
        """In their order."""
        return [await scene.episode(case, engine=yielding(case, scene.tokenizer)) for case in cases]

    found: list[Trajectory] = scene.kept("alone", run)
    return found


def noted(scene: Scene) -> list[Noted]:
    """The same episodes, with the calls of the agent's methods."""
    cases = scene.cases

    async def run() -> list[Noted]:
        """In their order."""
        found = []
        for case in cases:
            seen: list[Seen] = []
            found.append(Noted(case, await scene.episode(case, source=scene.spied(seen)), seen))
        return found

    kept: list[Noted] = scene.kept("noted", run)
    return kept
