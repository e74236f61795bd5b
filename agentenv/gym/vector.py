"""AgentVectorEnv: many concurrent environments on one event loop.

Plain `step` functions run in threads. A `step` therefore takes as long as the slowest environment, not as long as all
of them together, if they wait (for a sandbox, a grader, a service). Environments that compute in Python run in local
processes, one per core.
"""

from __future__ import annotations

import asyncio
import math
import operator
import os
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from copy import copy
from typing import Any, Literal, TypeVar, cast

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from agentenv._util.brief import brief
from agentenv._util.loop_thread import run_sync, submit, submit_detached
from agentenv.core.trajectory import Trajectory
from agentenv.episode.env_actors.actors import EnvActorConfig, check_kwargs
from agentenv.episode.env_actors.host import EnvSpec
from agentenv.episode.env_actors.local import LocalEnv, num_cores
from agentenv.errors import ConfigError, ContractError, EpisodeFailed
from agentenv.gym.config import Outcome, Start, Taken
from agentenv.gym.env import AgentEnv

T = TypeVar("T")
Info = dict[str, Any]
Observations = tuple[Any, ...]
Reset = tuple[Observations, Info]
Step = tuple[Observations, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], Info]
OnError = Literal["raise", "truncate"]


class BatchFailed(EpisodeFailed):
    """Some environments of a vector failed. The error holds the others' results; the vector can continue."""

    outcome: Any = None
    """Return value of the call; the failed environments are truncated in it, with the reward NaN."""
    errors: Mapping[int, str] = {}
    """Error messages by index of the environment."""


class _Member(AgentEnv):
    """One environment of a vector, which runs all of them concurrently; `reset` and `step` only return what came."""

    def __init__(self, env: str, *, render_mode: str | None = None, **settings: Any) -> None:
        super().__init__(env, render_mode=render_mode, **settings)
        self.results: list[Any] = []
        self.error: str | None = None
        """Message of the first failure in this call of the vector."""
        self.ended: Trajectory | None = None
        """Record of the last episode that ended."""

    def twin(self) -> _Member:
        """Return another one, with the same tasks."""
        other = copy(self)
        other.results = []
        return other

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Return what `begin` got."""
        first: tuple[Any, Info] = self.results.pop(0)
        return first

    def step(self, action: Any) -> Outcome:
        """Return what `act` got."""
        outcome: Outcome = self.results.pop(0)
        return outcome

    async def begin(self, start: Start) -> None:
        """Begin an episode. If that fails, the observation is empty, and the next step returns NaN, truncated."""
        try:
            self.results.append(await self._begin(start))
        except EpisodeFailed as failed:
            self.results.append((self._maker.empty_observation(), self._failed(str(failed))))

    async def act(self, action: Taken, *, autoreset: bool) -> None:
        """Take an action; with `autoreset`, begin the next episode at the end."""
        episode = self._running("step")
        if episode.over:
            info = self._failed("step: expected an episode, got none: its reset had failed.")
            outcome = (self._maker.empty_observation(), math.nan, False, True, info)
        else:
            try:
                outcome = await self._maker.take(episode, action)
                self.ended = episode.trajectory if episode.over else self.ended
            except EpisodeFailed as failed:
                outcome = (self._maker.observation(episode), math.nan, False, True, self._failed(str(failed)))
        self.results.append(outcome)
        if autoreset and (outcome[2] or outcome[3]):
            await self.begin(self._draw(None, None))

    def _failed(self, message: str) -> Info:
        """Return the info of a call that failed."""
        self.error, self.ended = self.error or message, self._running("step").trajectory
        return {"error": message}

    async def aclose(self) -> None:
        """End the current episode, if any."""
        episode = self._release()
        if episode is not None:
            await episode.aclose()


class AgentVectorEnv(SyncVectorEnv):
    """`num_envs` environments of one class as one `gymnasium.vector.VectorEnv`, on one event loop.

    A class with `cpu_bound = True` runs in local processes, one per core; see `env_actors`.

    Observations are tuples [num_envs], rewards float64, terminations and truncations bool. Seeds, infos, `reset_mask`
    and the autoreset modes are those of Gymnasium's SyncVectorEnv, except that the environments run concurrently and
    that the default mode wastes no action.

    SAME_STEP: the next episode starts in the call in which one ends; the last observation and info of the ended one
    are in `infos["final_obs"]` and `infos["final_info"]`. DISABLED: `reset(options={"reset_mask": ended})` starts the
    next. NEXT_STEP: the step after the end only resets and ignores its action (None is allowed).

    If an environment fails (raises, or exceeds `step_timeout_s`), the others' results stay valid. The failed one is
    truncated, its reward is NaN, and `infos["error"]` (or that of `final_info`) holds the message. `on_error="raise"`
    raises BatchFailed with these values in `outcome`; "truncate" returns them. An environment whose reset fails has
    the empty observation, and its next step is truncated with NaN in the same way.

    `areset`, `astep` and `aclose` are the same for async callers, on any event loop. Concurrent calls wait for each
    other; a call that is cancelled ends all episodes.

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
            raise ConfigError(f"AgentVectorEnv.num_envs: expected an integer >= 1, got {num_envs!r}.")
        if on_error not in ("raise", "truncate"):
            raise ConfigError(f"AgentVectorEnv.on_error: expected raise or truncate, got {on_error!r}.")
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"AgentVectorEnv.render_mode: expected None or ansi, got {render_mode!r}.")
        self.on_error = on_error
        first = _Member(env, render_mode=render_mode, **settings)
        self.maker = first._maker
        num, config = env_actors, self.maker.config
        if num is not None and (not isinstance(num, int) or isinstance(num, bool) or num < 0):
            raise ConfigError(f"AgentVectorEnv.env_actors: expected None or an integer >= 0, got {brief(num)}.")
        if num is None:
            num = num_cores() if self.maker.cls.cpu_bound else 0
        self._elsewhere: LocalEnv | None = None
        """What makes agents in processes; None if this process does."""
        if num:
            spec = EnvSpec(config.env, os.getcwd())
            spec.check()
            check_kwargs(config.env_kwargs, "AgentEnv.env_kwargs")
            limits = EnvActorConfig.of(config.step_timeout_s)
            self._elsewhere = LocalEnv(spec, config.env_kwargs, min(num, int(num_envs)), limits)
            first._make_agent = self._elsewhere.make
            weakref.finalize(self, _let_go, self._elsewhere, os.getpid())
        super().__init__([first.twin] * int(num_envs), copy=False, autoreset_mode=autoreset_mode)
        self._members = cast(list[_Member], self.envs)
        self._turn = asyncio.Lock()
        self._working: asyncio.Task[Any] | None = None
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
            ContractError: a seed, a mask or a list of tasks does not fit.
            ConfigError: an option is unknown or names an unknown task.
        """
        return run_sync(self._reset(seed, options))

    def step(self, actions: Sequence[Any]) -> Step:
        """Take one action per environment; return observations, rewards, terminations, truncations and infos.

        Raises:
            BatchFailed: environments failed, and `on_error` is "raise".
            ContractError: the actions do not fit, or an episode that ended was not reset; no environment was stepped.
        """
        return run_sync(self._step(actions))

    async def areset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> Reset:
        """Run `reset` without blocking the caller's loop."""
        return await _awaited(self._reset(seed, options))

    async def astep(self, actions: Sequence[Any]) -> Step:
        """Run `step` without blocking the caller's loop."""
        return await _awaited(self._step(actions))

    async def aclose(self) -> None:
        """Run `close` without blocking the caller's loop."""
        if not self.closed:
            self.closed = True
            await _awaited(self._close())

    def close_extras(self, **_: Any) -> None:
        """Cancel a running call, end all episodes and close their environments; `close` calls it once."""
        self.closed = True
        run_sync(self._close())

    @property
    def records(self) -> tuple[Trajectory | None, ...]:
        """[num_envs] full record of the last episode that ended in each environment; None before the first."""
        return tuple(env.ended for env in self._members)

    # --- on the background loop --------------------------------------------------------------------------------------

    async def _reset(self, seed: Any, options: Mapping[str, Any] | None) -> Reset:
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        mask = np.ones(self.num_envs, np.bool_) if mask is None else mask
        is_bool = isinstance(mask, np.ndarray) and (mask.shape, mask.dtype) == ((self.num_envs,), np.bool_)
        if not is_bool or not mask.any():
            raise ContractError(
                f"reset: options['reset_mask']: expected a bool array of shape ({self.num_envs},) with a True, got "
                f"{mask!r:.200}. Pass `terminations | truncations`."
            )
        if seed is None or isinstance(seed, int | np.integer):
            seed = [None if seed is None else seed + index for index in range(self.num_envs)]
        seeds = self._one_each("seed", seed)
        try:  # Gymnasium takes integers of Python alone
            seeds = [None if one is None else operator.index(one) for one in seeds]
        except TypeError as error:
            raise ContractError(f"reset: seed: expected integers or None, got {seed!r:.200}.") from error
        task = given.pop("task", None)
        tasks = self._one_each(
            "options['task']", task if isinstance(task, list | tuple | np.ndarray) else [task] * self.num_envs
        )
        async with self._turn:
            self._check_open("reset")
            each = [(env, seeds[i], {**given, "task": tasks[i]}) for i, env in enumerate(self._members) if mask[i]]
            starts = [(env, env._draw(one, own)) for env, one, own in each]
            await self._together("reset", [env.begin(start) for env, start in starts])
            first: Reset = self._or_raise("reset", super().reset(seed=seeds, options={"reset_mask": mask}))
            return first

    async def _step(self, actions: Any) -> Step:
        listed = self._one_each("actions", actions)
        async with self._turn:
            self._check_open("step")
            for env in self._members:
                env._running("step")
            over = self._autoreset_envs
            if over.any() and self.autoreset_mode is AutoresetMode.DISABLED:
                raise ContractError(
                    f"AgentVectorEnv.step: expected running episodes, got none in {np.flatnonzero(over).tolist()}. "
                    "Call reset with options={'reset_mask': terminations | truncations}."
                )
            again = over & (self.autoreset_mode is AutoresetMode.NEXT_STEP)
            taken = [None if again[i] else self.maker.action(action) for i, action in enumerate(listed)]
            autoreset = self.autoreset_mode is AutoresetMode.SAME_STEP
            work = [
                env.begin(env._draw(None, None)) if action is None else env.act(action, autoreset=autoreset)
                for env, action in zip(self._members, taken, strict=True)
            ]
            await self._together("step", work)
            step: Step = self._or_raise("step", super().step(tuple(listed)))
            return step

    def _one_each(self, name: str, values: Any) -> list[Any]:
        """Return a list of one value per environment."""
        if not isinstance(values, list | tuple | np.ndarray) or len(values) != self.num_envs:
            raise ContractError(
                f"AgentVectorEnv: {name}: expected one per environment ({self.num_envs}), got {brief(values)}. "
                "Pass a list of that many."
            )
        return list(values)

    async def _together(self, where: str, work: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run all; if the call is cancelled, end every episode, as some have taken their action and some have not."""
        for env in self._members:
            env.results, env.error = [], None
        tasks = [asyncio.ensure_future(each) for each in work]
        self._working = asyncio.current_task()
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            await self._end(tasks)
            self._check_open(where)
            raise
        finally:
            self._working = None

    def _check_open(self, where: str) -> None:
        if self.closed:
            raise ContractError(
                f"AgentVectorEnv.{where}: expected an open one, got a closed one. Make a new one."
            ) from None

    async def _end(self, tasks: Sequence[asyncio.Task[None]] = ()) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(env.aclose() for env in self._members))

    async def _close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await self._end()
        if self._elsewhere is not None:
            await self._elsewhere.close()

    def _or_raise(self, where: str, result: Any) -> Any:
        errors = {index: env.error for index, env in enumerate(self._members) if env.error is not None}
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

    def _add_info(self, vector_infos: Info, env_info: Info, env_num: int) -> Info:
        """Add an info as Gymnasium does; a column of numbers also takes a text, such as the message of a failure."""
        for key, value in env_info.items():
            if isinstance(value, str) and key in vector_infos and vector_infos[key].dtype != object:
                vector_infos[key] = vector_infos[key].astype(object)
        infos: Info = super()._add_info(vector_infos, env_info, env_num)
        return infos


def _let_go(elsewhere: LocalEnv, pid: int) -> None:
    """End the processes of a vector that was garbage-collected without `close`."""
    if pid == os.getpid():
        submit_detached(elsewhere.close())


async def _awaited(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(submit(work))
