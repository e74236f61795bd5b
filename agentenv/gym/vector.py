"""AgentVectorEnv: many environments at once in one process, each waiting on its own.

A `step` takes as long as the slowest environment, not as long as all of them, as long as they wait (for a sandbox, a
grader, a service) and do not compute: it is one event loop, in which plain `step` functions run in threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from agentenv.errors import ConfigError, ContractError, EpisodeFailed
from agentenv.gym import batching, views
from agentenv.gym.background import later, submit, wait_for
from agentenv.gym.batching import Info
from agentenv.gym.config import EpisodeMaker, GymConfig, Start
from agentenv.gym.slots import Outcome, Slot
from agentenv.trajectory import Trajectory

T = TypeVar("T")
Observations = tuple[Any, ...]
Reset = tuple[Observations, Info]
Step = tuple[Observations, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], Info]
OnError = Literal["raise", "truncate"]

_OPTIONS = ("reset_mask", "task")


class BatchFailed(EpisodeFailed):
    """Some environments of a vector failed; what the others gave is here, and the vector goes on."""

    outcome: Any = None
    """What the call would have returned; in it the failed environments are truncated, with the reward NaN."""
    errors: Mapping[int, str] = {}
    """What failed, by the index of the environment."""


class AgentVectorEnv(VectorEnv[Observations, Any, np.ndarray[Any, Any]]):
    """`num_envs` environments of one kind, as one `gymnasium.vector.VectorEnv`; asyncio in one process.

    Observations are tuples [num_envs], rewards float64, ends bool. Seeds, infos, `reset_mask` and the autoreset modes
    are gymnasium's; the defaults are those under which no action is wasted.

    SAME_STEP: an episode that ends is followed by the next one in the same call; its last observation and info are in
    `infos["final_obs"]` and `infos["final_info"]`. DISABLED: `reset(options={"reset_mask": ended})` begins the next.
    NEXT_STEP: the step after the end only resets, and its action is not looked at (None will do).

    Infos are arrays with a mask under `_key`, as `batch_infos` makes them; each environment's own is in
    `infos["by_env"]`.

    Where an environment fails (raises, hangs longer than `step_timeout_s`) the others' results stand. It is truncated,
    its reward is NaN, since nobody knows it, and `infos["error"]` (or that of `final_info`) says what happened.
    `on_error="raise"` then raises BatchFailed, with all of this in `outcome`; "truncate" returns it. An environment
    whose reset fails shows the empty observation, and its next step is truncated with NaN in the same way.

    `areset`, `astep` and `aclose` are the same for a caller with an event loop of its own, whichever that is.

    Example::

        envs = AgentVectorEnv("math_retry", num_envs=64)
        observations, infos = envs.reset(seed=0)
        observations, rewards, terminations, truncations, infos = envs.step(["The answer is 4."] * 64)
        envs.close()
    """

    def __init__(
        self,
        env: str,
        *,
        num_envs: int = 1,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        on_error: OnError = "raise",
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        """Load the environment and its tasks; nothing runs before `reset`.

        Args:
            env: an installed environment's name, `module:Attr` or `file.py:Class`.
            num_envs: how many there are.
            autoreset_mode: SAME_STEP, DISABLED or NEXT_STEP; also as gymnasium's text, such as "SameStep".
            on_error: "raise" or "truncate", see the class.
            render_mode: None or "ansi".
            **settings: the other fields of `agentenv.gym.GymConfig`.

        Raises:
            ConfigError: one of them cannot be used.
            DataError: a row of the data cannot be used.
        """
        self.closed = True  # until there is something to close
        if not isinstance(num_envs, int | np.integer) or num_envs < 1:
            raise ConfigError(f"AgentVectorEnv.num_envs: expected an integer >= 1, got {num_envs!r}. Change it.")
        if on_error not in ("raise", "truncate"):
            raise ConfigError(f"AgentVectorEnv.on_error: expected raise or truncate, got {on_error!r}. Change it.")
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"AgentVectorEnv.render_mode: expected None or ansi, got {render_mode!r}. Change it.")
        self.num_envs, self.on_error, self.render_mode = int(num_envs), on_error, render_mode
        self.autoreset_mode = _mode(autoreset_mode)
        self.metadata = {"render_modes": ["ansi"], "autoreset_mode": self.autoreset_mode}
        self.maker = EpisodeMaker(GymConfig.of(env, settings))
        self.single_observation_space = self.maker.observation_space
        self.single_action_space = self.maker.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._slots = [Slot(self.maker) for _ in range(self.num_envs)]
        self._adopt()
        self.closed = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> Reset:
        """Begin an episode in every environment, or in those of `options["reset_mask"]`.

        Args:
            seed: None, an integer (`seed + index` for each), or one per environment.
            options: `reset_mask`, bool[num_envs]; `task`, the index or id of a row, for all or a list of one for each.

        Raises:
            BatchFailed: environments failed, and `on_error` is "raise".
            ContractError: a seed or a mask that does not fit, or another call is not back yet.
            ConfigError: an option is unknown or names no task.
        """
        with self._call("reset"):
            return self._settled_reset(wait_for(self._reset(seed, options)))

    def step(self, actions: Sequence[Any]) -> Step:
        """Take one action in each environment: observations, rewards, terminations, truncations, infos.

        Raises:
            BatchFailed: environments failed, and `on_error` is "raise".
            ContractError: actions that do not fit, an episode that ended and was not reset, or another call is not
                back yet; nothing was stepped.
        """
        with self._call("step"):
            return self._settled_step(wait_for(self._step(actions)))

    async def areset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> Reset:
        """`reset`, awaited."""
        with self._call("reset"):
            return self._settled_reset(await _awaited(self._reset(seed, options)))

    async def astep(self, actions: Sequence[Any]) -> Step:
        """`step`, awaited: the caller's loop does other work meanwhile."""
        with self._call("step"):
            return self._settled_step(await _awaited(self._step(actions)))

    async def aclose(self) -> None:
        """`close`, awaited."""
        if not self.closed:
            self.closed = True
            await _awaited(self._close())

    def close_extras(self, **_: Any) -> None:
        """End a call that is not back yet and all episodes, and close their environments; `close` calls it once."""
        self.closed = True
        wait_for(self._close())

    def render(self) -> tuple[str, ...] | None:
        """With "ansi" each environment's episode so far as text, empty where there is none."""
        if self.render_mode is None:
            gymnasium.logger.warn("AgentVectorEnv.render: expected a render_mode, got None. Make it with 'ansi'.")
            return None
        running = [slot.episode for slot in self._slots]
        return tuple("" if episode is None else views.transcript(episode.trajectory) for episode in running)

    @property
    def records(self) -> tuple[Trajectory | None, ...]:
        """[num_envs] the record of the episode that ended last in each environment, tokens and all; None before."""
        return tuple(slot.ended for slot in self._slots)

    @property  # type: ignore[misc]  # read-only and a tuple, as gymnasium's own vector environments have it
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """[num_envs] the generators that tasks and seeds are drawn with."""
        return tuple(slot.generator() for slot in self._slots)

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """[num_envs] what the generators were seeded with."""
        _ = self.np_random
        return tuple(slot.np_random_seed for slot in self._slots)

    # --- in the caller's thread --------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Be of this process, without episodes: after a fork they are the parent's."""
        self._pid, self._calling = os.getpid(), threading.Lock()
        self._working: asyncio.Task[Any] | None = None
        for slot in self._slots:
            slot.forget()
        self._finalizer = weakref.finalize(self, _let_go, self._slots, self._pid)

    @contextmanager
    def _call(self, where: str) -> Iterator[None]:
        """One call at a time, on what is open and is this process's."""
        if self.closed:
            raise ContractError(f"AgentVectorEnv.{where}: expected an open one, got one that is closed. Make another.")
        if self._pid != os.getpid():
            self._adopt()
        calling = self._calling
        if not calling.acquire(blocking=False):
            raise ContractError(
                f"AgentVectorEnv.{where}: expected one call at a time, got a second one meanwhile. Wait for the first."
            )
        try:
            yield
        finally:
            calling.release()

    def _to_begin(self, seed: Any, options: Mapping[str, Any] | None) -> dict[int, Start]:
        """What the episodes of a reset begin with, by the index of their environment."""
        given = dict(options or {})
        mask = batching.reset_mask(given.pop("reset_mask", None), self.num_envs)
        tasks = batching.task_list(given.pop("task", None), self.num_envs)
        if given:
            raise ConfigError(
                f"AgentVectorEnv.reset: expected options of {_OPTIONS}, got {list(given)}. Leave them out."
            )
        seeds = batching.seed_list(seed, self.num_envs)
        return {int(i): self._slots[i].draw(seeds[i], tasks[i]) for i in np.flatnonzero(mask)}

    def _taken(self, actions: Any) -> list[Any]:
        """Actions as `Slot.step` takes them; None where an environment only resets."""
        listed = batching.action_list(actions, self.num_envs)
        over = [index for index, slot in enumerate(self._slots) if not slot.ready]
        unbegun = [index for index in over if not self._slots[index].begun]
        if unbegun or (over and self.autoreset_mode is not AutoresetMode.NEXT_STEP):
            how = "" if unbegun else " with options={'reset_mask': terminations | truncations}"
            raise ContractError(
                f"AgentVectorEnv.step: expected episodes that go on, got none in {unbegun or over}. Call reset{how}."
            )
        return [None if index in over else self.maker.action(action) for index, action in enumerate(listed)]

    def _settled_reset(self, outcomes: Sequence[Outcome | None]) -> Reset:
        observations = tuple(
            slot.observation() if outcome is None else outcome.observation
            for slot, outcome in zip(self._slots, outcomes, strict=True)
        )
        infos = batching.batch_infos([None if outcome is None else outcome.info for outcome in outcomes])
        return self._or_raise("reset", outcomes, (observations, infos))

    def _settled_step(self, outcomes: Sequence[Outcome]) -> Step:
        observations = tuple(outcome.observation for outcome in outcomes)
        infos = batching.batch_infos([outcome.info for outcome in outcomes])
        ended = [outcome.final_info for outcome in outcomes]
        if any(info is not None for info in ended):
            infos["final_obs"] = batching.objects([outcome.final_obs for outcome in outcomes])
            infos["final_info"] = batching.batch_infos(ended)
            infos["_final_obs"] = np.array([info is not None for info in ended], dtype=np.bool_)
            infos["_final_info"] = infos["_final_obs"].copy()
        rewards = np.array([outcome.reward for outcome in outcomes], dtype=np.float64)
        terminations = np.array([outcome.terminated for outcome in outcomes], dtype=np.bool_)
        truncations = np.array([outcome.truncated for outcome in outcomes], dtype=np.bool_)
        return self._or_raise("step", outcomes, (observations, rewards, terminations, truncations, infos))

    def _or_raise(self, where: str, outcomes: Sequence[Outcome | None], made: T) -> T:
        errors = {index: o.error for index, o in enumerate(outcomes) if o is not None and o.error is not None}
        if not errors or self.on_error == "truncate":
            return made
        index, error = next(iter(errors.items()))
        failed = BatchFailed(
            f"AgentVectorEnv.{where}: expected a result of each environment, got none of {list(errors)}: environment "
            f"{index}: {error} The others' results are in this error's `outcome`; on_error='truncate' returns them."
        )
        failed.outcome, failed.errors = made, errors
        raise failed

    # --- on the background loop --------------------------------------------------------------------------------------

    async def _alone(self) -> None:
        """Wait until a call that was given up has ended its episodes: it would end those that begin here."""
        if self._working is not None:
            await asyncio.wait({self._working})

    async def _reset(self, seed: Any, options: Mapping[str, Any] | None) -> list[Outcome | None]:
        await self._alone()
        starts = self._to_begin(seed, options)
        begun = await self._together(
            "reset", [partial(self._slots[index].reset, start) for index, start in starts.items()]
        )
        by_index = dict(zip(starts, begun, strict=True))
        return [by_index.get(index) for index in range(self.num_envs)]

    async def _step(self, actions: Any) -> list[Outcome]:
        await self._alone()
        autoreset = self.autoreset_mode is AutoresetMode.SAME_STEP
        return await self._together(
            "step",
            [
                partial(slot.step, action, autoreset=autoreset) if slot.ready else slot.reset
                for slot, action in zip(self._slots, self._taken(actions), strict=True)
            ],
        )

    async def _together(self, where: str, work: Sequence[Callable[[], Awaitable[Outcome]]]) -> list[Outcome]:
        """What all give; where the call is given up, all episodes end: some had their action and some had not."""
        closed = f"AgentVectorEnv.{where}: expected an open one, got one that was closed meanwhile. Make another."
        if self.closed:
            raise ContractError(closed)
        self._working = asyncio.current_task()
        tasks = [asyncio.ensure_future(begin()) for begin in work]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await _end(self._slots)
            if self.closed and isinstance(error, asyncio.CancelledError):
                raise ContractError(closed) from None
            raise
        finally:
            self._working = None

    async def _close(self) -> None:
        self._finalizer.detach()
        if self._pid != os.getpid():  # after a fork: the episodes are the parent's
            return
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await _end(self._slots)


async def _end(slots: Sequence[Slot]) -> None:
    await asyncio.gather(*(slot.aclose() for slot in slots))


def _let_go(slots: Sequence[Slot], pid: int) -> None:
    """End the episodes of a vector that nobody holds and nobody closed."""
    if pid == os.getpid() and any(slot.episode is not None for slot in slots):
        later(_end(slots))


async def _awaited(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(submit(work))


def _mode(mode: AutoresetMode | str) -> AutoresetMode:
    for known in AutoresetMode:
        if mode in (known, known.value, known.name):
            return known
    names = ", ".join(known.name for known in AutoresetMode)
    raise ConfigError(f"AgentVectorEnv.autoreset_mode: expected one of {names}, got {mode!r}. Change it.")
