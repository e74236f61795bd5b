"""LiveEpisode: an episode on the background loop that can be copied, pickled and forked, because it is played again."""

from __future__ import annotations

import os
import weakref
from typing import Any

from agentenv.errors import EpisodeFailed
from agentenv.gym.background import later, wait_for
from agentenv.gym.config import EpisodeMaker, Outcome, Start, Taken
from agentenv.stepping import SteppedEpisode
from agentenv.trajectory import Trajectory


class LiveEpisode:
    """One episode for plain calls, from `begin` over `act` to `close`.

    Its copies carry the start and the actions. Where a copy, or a forked process, first needs the episode, it is begun
    anew and the actions are taken again; what it says must be what it said. One that is over carries its record.
    """

    def __init__(self, maker: EpisodeMaker, start: Start) -> None:
        self._maker, self._start = maker, start
        self._actions: list[Taken] = []
        self._episode: SteppedEpisode | None = None
        self._pid = 0
        self._said: list[Any] = []
        """What the episode that this is a copy of said; empty in one that was begun here."""
        self._record: Trajectory | None = None
        """Of an episode that was over when it was copied."""

    @property
    def over(self) -> bool:
        """No action is asked for any more."""
        return self._ended is not None or self._here().over

    @property
    def trajectory(self) -> Trajectory:
        """The record so far.

        Raises:
            EpisodeFailed: this is a copy, and the episode went another way when it was played again.
        """
        return self._ended or self._here().trajectory

    def begin(self, former: LiveEpisode | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin, once; gives the first observation and info. `former` is closed before.

        Raises:
            EpisodeFailed: the environment failed.
        """
        episode, ending = self._make(), None if former is None else former.release()

        async def work() -> tuple[Any, dict[str, Any]]:
            """Both in one trip to the loop."""
            if ending is not None:
                await ending.aclose()
            return await self._maker.begin(episode)

        return wait_for(work())

    def act(self, action: Taken) -> Outcome:
        """Take an action of `EpisodeMaker.action`.

        Raises:
            ContractError: the episode is over.
            EpisodeFailed: the environment failed; the episode is over.
        """
        outcome = wait_for(self._maker.take(self._here(), action))
        self._actions.append(action)
        return outcome

    def close(self) -> None:
        """End the episode, wherever it is; again is harmless."""
        episode = self.release()
        if episode is not None:
            wait_for(episode.aclose())

    def release(self) -> SteppedEpisode | None:
        """The episode, if this process has to end it; this object forgets it."""
        episode, self._episode = self._episode, None
        return episode if episode is not None and self._pid == os.getpid() and not episode.over else None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_episode": None, "_pid": 0}
        if self._episode is not None:
            state |= {"_said": _said(self._episode), "_record": self._ended}
        return state | {"_actions": list(self._actions)}

    @property
    def _ended(self) -> Trajectory | None:
        """The record of an episode that is over, here or where this is a copy from."""
        episode = self._episode
        return self._record if episode is None or not episode.over else episode.trajectory

    def _make(self) -> SteppedEpisode:
        self._episode, self._pid = self._maker.episode(self._start), os.getpid()
        weakref.finalize(self, _abandon, self._episode, self._pid)
        return self._episode

    def _here(self) -> SteppedEpisode:
        """The episode in this process, played again where it is not here."""
        if self._episode is not None and self._pid == os.getpid():
            return self._episode
        if self._episode is not None:  # forked: the loop it lives on is the parent's
            self._said = _said(self._episode)
        episode = self._make()
        wait_for(self._play_again(episode))
        return episode

    async def _play_again(self, episode: SteppedEpisode) -> None:
        await episode.begin()
        for action in self._actions:
            await episode.act(action)
        if _said(episode) != self._said:
            await episode.aclose()
            raise EpisodeFailed(
                f"AgentEnv: expected the copied episode of task {self._start.task.task_id!r} to say what it said when "
                "its actions are taken again, got something else. The environment does not depend on its seed alone; "
                "call reset."
            )


def _said(episode: SteppedEpisode) -> list[Any]:
    """What the environment answered so far."""
    results = [turn.result for turn in episode.trajectory.turns if turn.result is not None]
    return [episode.trajectory.prompt, *((r.observation, r.reward, r.score, r.done) for r in results)]


def _abandon(episode: SteppedEpisode, pid: int) -> None:
    """Close an episode whose holder is gone."""
    if pid == os.getpid() and not episode.over:
        later(episode.aclose())
