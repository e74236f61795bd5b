"""LiveEpisode: an episode on the background loop that can be copied, pickled and forked, by replaying its actions."""

from __future__ import annotations

import os
import weakref
from typing import Any

from agentenv._util.loop_thread import run_sync, submit_detached
from agentenv.core.trajectory import Trajectory
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import EpisodeFailed
from agentenv.gym.config import EpisodeMaker, Outcome, Start, Taken


class LiveEpisode:
    """One episode for plain calls: `begin`, then `act`, then `close`.

    A copy carries the start and the actions. When a copy or a forked process first needs the episode, it starts the
    episode again and replays the actions; the environment's replies must be the same. A finished episode carries its
    record instead.
    """

    def __init__(self, maker: EpisodeMaker, start: Start) -> None:
        self._maker, self._start = maker, start
        self._actions: list[Taken] = []
        self._episode: SteppedEpisode | None = None
        self._pid = 0
        self._replies: list[Any] = []
        """Replies of the episode that this is a copy of; empty in an original."""
        self._record: Trajectory | None = None
        """Record of an episode that was over when it was copied."""

    @property
    def over(self) -> bool:
        """True if the episode takes no further actions."""
        return self._ended is not None or self._here().over

    @property
    def trajectory(self) -> Trajectory:
        """Record of the episode so far.

        Raises:
            EpisodeFailed: this is a copy whose replayed episode differs from the original.
        """
        return self._ended or self._here().trajectory

    def begin(self, former: LiveEpisode | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the episode, once; return the first observation and info. Close `former` first.

        Raises:
            EpisodeFailed: the environment failed.
        """
        episode, ending = self._make(), None if former is None else former.release()

        async def work() -> tuple[Any, dict[str, Any]]:
            if ending is not None:
                await ending.aclose()
            return await self._maker.begin(episode)

        return run_sync(work())

    def act(self, action: Taken) -> Outcome:
        """Take an action that `EpisodeMaker.action` returned.

        Raises:
            ContractError: the episode is over.
            EpisodeFailed: the environment failed; the episode is over.
        """
        outcome = run_sync(self._maker.take(self._here(), action))
        self._actions.append(action)
        return outcome

    def close(self) -> None:
        """End the episode in any state. Repeated calls are harmless."""
        episode = self.release()
        if episode is not None:
            run_sync(episode.aclose())

    def release(self) -> SteppedEpisode | None:
        """Detach the episode; return it if this process has to close it."""
        episode, self._episode = self._episode, None
        return episode if episode is not None and self._pid == os.getpid() and not episode.over else None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_episode": None, "_pid": 0}
        if self._episode is not None:
            state |= {"_replies": _replies_of(self._episode), "_record": self._ended}
        return state | {"_actions": list(self._actions)}

    @property
    def _ended(self) -> Trajectory | None:
        """Record of an episode that is over, in this object or in the original of this copy."""
        episode = self._episode
        return self._record if episode is None or not episode.over else episode.trajectory

    def _make(self) -> SteppedEpisode:
        self._episode, self._pid = self._maker.episode(self._start), os.getpid()
        weakref.finalize(self, _abandon, self._episode, self._pid)
        return self._episode

    def _here(self) -> SteppedEpisode:
        """Return the episode of this process; replay it if this process does not run it yet."""
        if self._episode is not None and self._pid == os.getpid():
            return self._episode
        if self._episode is not None:  # forked: the episode's loop belongs to the parent
            self._replies = _replies_of(self._episode)
        episode = self._make()
        run_sync(self._play_again(episode))
        return episode

    async def _play_again(self, episode: SteppedEpisode) -> None:
        await episode.begin()
        for action in self._actions:
            await episode.act(action)
        if _replies_of(episode) != self._replies:
            await episode.aclose()
            raise EpisodeFailed(
                f"AgentEnv: expected the replay of the episode of task {self._start.task.task_id!r} to get the same "
                "replies, got others. The environment depends on more than its seed: fix that, or call reset."
            )


def _replies_of(episode: SteppedEpisode) -> list[Any]:
    """Return the environment's replies so far."""
    results = [turn.result for turn in episode.trajectory.turns if turn.result is not None]
    return [episode.trajectory.prompt, *((r.observation, r.reward, r.score, r.done) for r in results)]


def _abandon(episode: SteppedEpisode, pid: int) -> None:
    """Close an episode whose LiveEpisode was garbage-collected."""
    if pid == os.getpid() and not episode.over:
        submit_detached(episode.aclose())
