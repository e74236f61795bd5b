"""Episodes that several properties use, run once: every case by itself, with and without a record of the calls."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.trajectory import Trajectory
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import EpisodeCase, yielding
from agentenv.testing.conformance.context import ConformanceContext


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode, with the calls of the environment's methods."""

    case: EpisodeCase
    trajectory: Trajectory
    seen: list[MethodCall]


def separate_episodes(context: ConformanceContext) -> list[Trajectory]:
    """Return the trajectory of each of `context.cases`, run one after the other."""
    cases = context.cases

    async def run() -> list[Trajectory]:
        return [await context.episode(case, engine=yielding(case, context.tokenizer)) for case in cases]

    trajectories: list[Trajectory] = context.cached("separate", run)
    return trajectories


def recorded_episodes(context: ConformanceContext) -> list[RecordedEpisode]:
    """Return the same episodes with the calls of the environment's methods."""
    cases = context.cases

    async def run() -> list[RecordedEpisode]:
        episodes = []
        for case in cases:
            seen: list[MethodCall] = []
            trajectory = await context.episode(case, source=context.recording_source(seen))
            episodes.append(RecordedEpisode(case, trajectory, seen))
        return episodes

    recorded: list[RecordedEpisode] = context.cached("recorded", run)
    return recorded
