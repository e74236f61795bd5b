"""AgentVectorEnv: many concurrent environments on one event loop.

Plain `step` functions run in threads. A `step` therefore takes as long as the slowest environment, not as long as all
of them together, if they wait (for a sandbox, a grader, a service). Environments that compute in Python run in local
processes, one per core.
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

from agentenv._util.brief import brief
from agentenv._util.loop_thread import run_sync, submit, submit_detached
from agentenv.core.trajectory import Trajectory
from agentenv.episode.env_actors.actors import EnvActorConfig, check_kwargs
from agentenv.episode.env_actors.host import EnvSpec
from agentenv.episode.env_actors.local import LocalEnv, num_cores
from agentenv.errors import ConfigError, ContractError, EpisodeFailed
from agentenv.gym import batching, views
from agentenv.gym.batching import Info
from agentenv.gym.config import EpisodeMaker, GymConfig
from agentenv.gym.slots import Outcome, Slot

T = TypeVar("T")
Observations = tuple[Any, ...]
Reset = tuple[Observations, Info]
Step = tuple[Observations, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], Info]
OnError = Literal["raise", "truncate"]

_OPTIONS = ("reset_mask", "task")


class BatchFailed(EpisodeFailed):
    """Some environments of a vector failed. The error holds the others' results; the vector can continue."""

    outcome: Any = None
    """Return value of the call; the failed environments are truncated in it, with the reward NaN."""
    errors: Mapping[int, str] = {}
    """Error messages by index of the environment."""


class AgentVectorEnv(VectorEnv[Observations, Any, np.ndarray[Any, Any]]):
    """`num_envs` environments of one class as one `gymnasium.vector.VectorEnv`, on one event loop.

    A class with `cpu_bound = True` runs in local processes, one per core; see `env_actors`.

    Observations are tuples [num_envs], rewards float64, terminations and truncations bool. Seeds, infos, `reset_mask`
    and the autoreset modes follow Gymnasium; the defaults waste no action.

    SAME_STEP: the next episode starts in the call in which one ends; the last observation and info of the ended one
    are in `infos["final_obs"]` and `infos["final_info"]`. DISABLED: `reset(options={"reset_mask": ended})` starts the
    next. NEXT_STEP: the step after the end only resets and ignores its action (None is allowed).

    Infos are arrays with a mask under `_key`, as `batch_infos` returns them; `infos["by_env"]` holds each
    environment's own info.

    If an environment fails (raises, or exceeds `step_timeout_s`), the others' results stay valid. The failed one is
    truncated, its reward is NaN, and `infos["error"]` (or that of `final_info`) holds the message. `on_error="raise"`
    raises BatchFailed with these values in `outcome`; "truncate" returns them. An environment whose reset fails has
    the empty observation, and its next step is truncated with NaN in the same way.

    `areset`, `astep` and `aclose` are the same for async callers, on any event loop.

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
        env_actors: int | None = None,
        **settings: Any,
    ) -> None:
        """Load the environment and its tasks; nothing runs before `reset`.

        Args:
            env: an installed environment's name, `module:Attr` or `file.py:Class`.
            num_envs: number of environments.
            autoreset_mode: SAME_STEP, DISABLED or NEXT_STEP; also as Gymnasium's text, such as "SameStep".
            on_error: "raise" or "truncate", see the class.
            render_mode: None or "ansi".
            env_actors: number of local processes that run the environments; 0 runs them in this one. None: one per
                core for a class with `cpu_bound = True`, else 0.
            **settings: the other fields of `agentenv.gym.GymConfig`.

        Raises:
            ConfigError: an argument is invalid.
            DataError: a row of the data is invalid.
        """
        self.closed = True  # until the constructor succeeds
        if not isinstance(num_envs, int | np.integer) or num_envs < 1:
            raise ConfigError(f"AgentVectorEnv.num_envs: expected an integer >= 1, got {num_envs!r}. Change it.")
        if on_error not in ("raise", "truncate"):
            raise ConfigError(f"AgentVectorEnv.on_error: expected raise or truncate, got {on_error!r}. Change it.")
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"AgentVectorEnv.render_mode: expected None or ansi, got {render_mode!r}. Change it.")
        self.num_envs, self.on_error, self.render_mode = int(num_envs), on_error, render_mode
        modes = [mode for mode in AutoresetMode if autoreset_mode in (mode, mode.value, mode.name)]
        if not modes:
            names = ", ".join(mode.name for mode in AutoresetMode)
            raise ConfigError(
                f"AgentVectorEnv.autoreset_mode: expected one of {names}, got {autoreset_mode!r}. Change it."
            )
        self.autoreset_mode = modes[0]
        self.metadata = {"render_modes": ["ansi"], "autoreset_mode": self.autoreset_mode}
        self.maker = EpisodeMaker(GymConfig.of(env, settings))
        self.single_observation_space = self.maker.observation_space
        self.single_action_space = self.maker.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._elsewhere = self._local_env(env_actors)
        make = None if self._elsewhere is None else self._elsewhere.make
        self._slots = [Slot(self.maker, make) for _ in range(self.num_envs)]
        self._adopt()
        self.closed = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> Reset:
        """Start an episode in every environment, or in those of `options["reset_mask"]`.

        Args:
            seed: None, an integer (`seed + index` for each), or one per environment.
            options: `reset_mask`, bool[num_envs]; `task`, the index or id of a row, one for all or a list.

        Raises:
            BatchFailed: environments failed, and `on_error` is "raise".
            ContractError: a seed or a mask does not fit, or another call is still running.
            ConfigError: an option is unknown or names an unknown task.
        """
        with self._call("reset"):
            return self._settled_reset(run_sync(self._reset(seed, options)))

    def step(self, actions: Sequence[Any]) -> Step:
        """Take one action per environment; return observations, rewards, terminations, truncations and infos.

        Raises:
            BatchFailed: environments failed, and `on_error` is "raise".
            ContractError: the actions do not fit, an episode that ended was not reset, or another call is still
                running; no environment was stepped.
        """
        with self._call("step"):
            return self._settled_step(run_sync(self._step(actions)))

    async def areset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> Reset:
        """Run `reset` without blocking the caller's loop."""
        with self._call("reset"):
            return self._settled_reset(await _awaited(self._reset(seed, options)))

    async def astep(self, actions: Sequence[Any]) -> Step:
        """Run `step` without blocking the caller's loop."""
        with self._call("step"):
            return self._settled_step(await _awaited(self._step(actions)))

    async def aclose(self) -> None:
        """Run `close` without blocking the caller's loop."""
        if not self.closed:
            self.closed = True
            await _awaited(self._close())

    def close_extras(self, **_: Any) -> None:
        """Cancel a running call, end all episodes and close their environments; `close` calls it once."""
        self.closed = True
        run_sync(self._close())

    def render(self) -> tuple[str, ...] | None:
        """Return each environment's episode so far as text with "ansi"; empty for an environment without an episode."""
        if self.render_mode is None:
            gymnasium.logger.warn("AgentVectorEnv.render: expected a render_mode, got None. Make it with 'ansi'.")
            return None
        running = [slot.episode for slot in self._slots]
        return tuple("" if episode is None else views.transcript(episode.trajectory) for episode in running)

    @property
    def records(self) -> tuple[Trajectory | None, ...]:
        """[num_envs] full record of the last episode that ended in each environment; None before the first."""
        return tuple(slot.ended for slot in self._slots)

    @property  # type: ignore[misc]  # read-only and a tuple, as gymnasium's own vector environments have it
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """[num_envs] generators that draw tasks and seeds."""
        return tuple(slot.generator() for slot in self._slots)

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """[num_envs] seeds of the generators."""
        _ = self.np_random
        return tuple(slot.np_random_seed for slot in self._slots)

    # --- in the caller's thread --------------------------------------------------------------------------------------

    def _local_env(self, num: int | None) -> LocalEnv | None:
        """Return what makes agents in processes; None if this process does."""
        if num is not None and (not isinstance(num, int) or isinstance(num, bool) or num < 0):
            raise ConfigError(
                f"AgentVectorEnv.env_actors: expected None or an integer >= 0, got {brief(num)}. Change it."
            )
        if num is None:
            num = num_cores() if self.maker.cls.cpu_bound else 0
        if not num:
            return None
        config = self.maker.config
        spec = EnvSpec(config.env, os.getcwd())
        spec.check()
        check_kwargs(config.env_kwargs, "AgentEnv.env_kwargs")
        limits = EnvActorConfig.of(config.step_timeout_s)
        return LocalEnv(spec, config.env_kwargs, min(num, self.num_envs), limits)

    def _adopt(self) -> None:
        """Drop the episodes after a fork, as they belong to the parent process."""
        self._pid, self._calling = os.getpid(), threading.Lock()
        self._working: asyncio.Task[Any] | None = None
        for slot in self._slots:
            slot.forget()
        if self._elsewhere is not None:
            self._elsewhere.forget()
        self._finalizer = weakref.finalize(self, _let_go, self._slots, self._elsewhere, self._pid)

    @contextmanager
    def _call(self, where: str) -> Iterator[None]:
        """Allow one call at a time, on an open vector."""
        if self.closed:
            raise ContractError(
                f"AgentVectorEnv.{where}: expected an open one, got one that is closed. Make a new one."
            )
        if self._pid != os.getpid():
            self._adopt()
        calling = self._calling
        if not calling.acquire(blocking=False):
            raise ContractError(
                f"AgentVectorEnv.{where}: expected one call at a time, got a concurrent one. Wait for the first."
            )
        try:
            yield
        finally:
            calling.release()

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

    def _or_raise(self, where: str, outcomes: Sequence[Outcome | None], result: T) -> T:
        errors = {index: o.error for index, o in enumerate(outcomes) if o is not None and o.error is not None}
        if not errors or self.on_error == "truncate":
            return result
        index, error = next(iter(errors.items()))
        failed = BatchFailed(
            f"AgentVectorEnv.{where}: expected a result of each environment, got none from {list(errors)}: environment "
            f"{index}: {error} The others' results are in this error's `outcome`; on_error='truncate' returns them."
        )
        failed.outcome = result
        failed.errors = errors
        raise failed

    # --- on the background loop --------------------------------------------------------------------------------------

    async def _alone(self) -> None:
        """Wait until a cancelled call has ended its episodes; otherwise it would end those of the next call."""
        if self._working is not None:
            await asyncio.wait({self._working})

    async def _reset(self, seed: Any, options: Mapping[str, Any] | None) -> list[Outcome | None]:
        await self._alone()
        unknown = dict(options or {})
        mask = batching.reset_mask(unknown.pop("reset_mask", None), self.num_envs)
        tasks = batching.task_list(unknown.pop("task", None), self.num_envs)
        if unknown:
            raise ConfigError(
                f"AgentVectorEnv.reset: expected options of {_OPTIONS}, got {list(unknown)}. Leave them out."
            )
        seeds = batching.seed_list(seed, self.num_envs)
        starts = {int(i): self._slots[i].draw(seeds[i], tasks[i]) for i in np.flatnonzero(mask)}
        outcomes = await self._together(
            "reset", [partial(self._slots[index].reset, start) for index, start in starts.items()]
        )
        by_index = dict(zip(starts, outcomes, strict=True))
        return [by_index.get(index) for index in range(self.num_envs)]

    async def _step(self, actions: Any) -> list[Outcome]:
        await self._alone()
        listed = batching.action_list(actions, self.num_envs)
        over = [index for index, slot in enumerate(self._slots) if not slot.ready]
        not_reset = [index for index in over if not self._slots[index].begun]
        if not_reset or (over and self.autoreset_mode is not AutoresetMode.NEXT_STEP):
            how = "" if not_reset else " with options={'reset_mask': terminations | truncations}"
            raise ContractError(
                f"AgentVectorEnv.step: expected running episodes, got none in {not_reset or over}. Call reset{how}."
            )
        autoreset = self.autoreset_mode is AutoresetMode.SAME_STEP
        work: list[Callable[[], Awaitable[Outcome]]] = [
            partial(slot.step, self.maker.action(action), autoreset=autoreset) if slot.ready else slot.reset
            for slot, action in zip(self._slots, listed, strict=True)
        ]
        return await self._together("step", work)

    async def _together(self, where: str, work: Sequence[Callable[[], Awaitable[Outcome]]]) -> list[Outcome]:
        """Run all; if the call is cancelled, end every episode, as some have taken their action and some have not."""
        closed = f"AgentVectorEnv.{where}: expected an open one, got one that was closed meanwhile. Make a new one."
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
        await _end(self._slots, self._elsewhere)


async def _end(slots: Sequence[Slot], elsewhere: LocalEnv | None = None) -> None:
    await asyncio.gather(*(slot.aclose() for slot in slots))
    if elsewhere is not None:
        await elsewhere.close()


def _let_go(slots: Sequence[Slot], elsewhere: LocalEnv | None, pid: int) -> None:
    """End the episodes of a vector that was garbage-collected without `close`, and its processes."""
    if pid == os.getpid() and (elsewhere is not None or any(slot.episode is not None for slot in slots)):
        submit_detached(_end(slots, elsewhere))


async def _awaited(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(submit(work))
