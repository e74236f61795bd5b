"""A user's Python function as a reward: plain in threads, async as it is, or in a worker process that can be killed."""

from __future__ import annotations

import asyncio
import copy
import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards._functions import argument_names, arguments, as_result, load_function
from agentenv.rewards._threads import Threads
from agentenv.rewards.pool import WorkerTimeout, shared_pool
from agentenv.rewards.types import Response, RewardResult, Status

_Bounds = tuple[float, float]


class FunctionReward:
    """A function as a reward, called by keyword with what its parameters name.

    These are `response`, `prompt`, `label` and `metadata`, or verl's `data_source`, `solution_str`, `ground_truth` and
    `extra_info`, and those of `kwargs`. It gives a number, a dict with `reward` or `score` and further columns, or a
    RewardResult (see `_functions.as_result`). What it is given are copies.

    A plain function runs in one of `num_threads` long-lived threads, an async one on the loop, both for `limit_s`
    seconds from their beginning. Nothing can end a thread: a call that takes longer is left behind in it and counted
    (`num_abandoned`). With `killable`, a function given as `FILE.py:name` or `module:name` runs in a worker process
    instead, arguments and answer as JSON: it may compute for `limit_s` seconds and wait for ten times that, 30 s at
    least. Where it computes longer the reward is `timeout_reward`, if there is one, and a failure else.

    Raises:
        ConfigError: no such function, or one that cannot be called so; a number is none.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        *,
        killable: bool = False,
        limit_s: float = 60.0,
        kwargs: Mapping[str, Any] | None = None,
        bounds: _Bounds = (float("-inf"), float("inf")),
        timeout_reward: float | None = None,
        num_threads: int = 16,
    ) -> None:
        if killable and not isinstance(function, str):
            raise ConfigError(f"function: expected FILE.py:name or module:name to kill, got {function!r}. Name it.")
        if timeout_reward is not None and not killable:
            raise ConfigError("timeout_reward: expected None without killable, got a number. Set killable=True.")
        if not (isinstance(bounds, tuple | list) and len(bounds) == 2 and bounds[0] <= bounds[1]):
            raise ConfigError(f"bounds: expected a lowest and a highest reward, got {bounds!r}. Give both.")
        if timeout_reward is not None and not bounds[0] <= timeout_reward <= bounds[1]:
            raise ConfigError(f"timeout_reward: expected a reward in {bounds}, got {timeout_reward!r}. Change it.")
        if not isinstance(function, str) and not callable(function):
            raise ConfigError(f"function: expected a function or its name, got {function!r}. Pass one.")
        self._options: dict[str, Any] = {
            "killable": killable, "limit_s": number("limit_s", limit_s, low=1e-3), "kwargs": dict(kwargs or {}),
            "bounds": bounds, "num_threads": whole_number("num_threads", num_threads, low=1),
            "timeout_reward": None if timeout_reward is None else number("timeout_reward", timeout_reward),
        }  # fmt: skip
        self._given, self.bounds = function, bounds
        self._function = load_function(function) if isinstance(function, str) else function
        self._names = argument_names(self._function, self._options["kwargs"])
        self._where = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
        self._threads = Threads(num_threads)

    def __reduce__(self) -> tuple[Any, ...]:
        """A function given by name travels as that name, so its module need not be pickled."""
        return partial(type(self), **self._options), (self._given,)

    @property
    def num_abandoned(self) -> int:
        """Threads whose call was given up and has not returned yet."""
        return self._threads.num_abandoned

    async def grade(self, response: Response) -> RewardResult:
        """What the function says of the response.

        Raises:
            DataError: the function says so, or a column is none that it can be given.
            InfraError: it took longer than it may, raised, or gave what is no reward.
        """
        try:
            given = copy.deepcopy(arguments(response, self._names) | self._options["kwargs"])
        except (TypeError, RecursionError) as error:
            raise DataError(f"row: expected values that can be copied, got {error}. Mend its columns.") from error
        if self._options["killable"]:
            return await self._in_worker(given)
        limit_s = self._options["limit_s"]
        call = partial(self._function, **given)
        try:
            if inspect.iscoroutinefunction(self._function):
                value = await _within(limit_s, call())
            else:
                value = await self._threads.run(call, limit_s=limit_s)
                value = await _within(limit_s, value) if inspect.isawaitable(value) else value
        except AgentEnvError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:400]
            raise InfraError(f"{self._where}: expected a reward, got {said} ({_place(error)})") from error
        return as_result(value, self._where)

    async def _in_worker(self, given: dict[str, Any]) -> RewardResult:
        request = {"task": "call", "function": self._given, "arguments": given}
        try:
            fields = await shared_pool("functions").run(
                request, cpu_limit_s=self._options["limit_s"], memory_limit_bytes=None
            )
        except WorkerTimeout as error:
            reward = self._options["timeout_reward"]
            if reward is None:
                raise InfraError(f"{self._where}: {error}. Raise limit_s, or set timeout_reward.") from error
            return RewardResult(reward, status=Status.TIMEOUT, detail=str(error))
        return RewardResult(**{**fields, "status": Status(fields["status"])})


def _place(error: Exception) -> str:
    """The file and line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


async def _within(limit_s: float, value: Any) -> Any:
    try:
        async with asyncio.timeout(limit_s) as deadline:
            return await value
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise InfraError(f"function: expected an answer within {limit_s:g} s, got none. Raise limit_s.") from error
