"""Use a Python function as a reward: plain in threads, async on the loop, or in a worker that can be killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentenv.core.arguments import number, whole_number
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.loading import argument_names, arguments, as_result, copied, failure_of, load_function
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerTimeout, shared_pool
from agentenv.rewards.workers.threads import Threads

_Bounds = tuple[float, float]


class FunctionReward:
    """A function as a reward, called by keyword with the arguments that its parameters name.

    These are `response`, `prompt`, `label` and `metadata`, or verl's `data_source`, `solution_str`, `ground_truth` and
    `extra_info`, and those of `kwargs`. It returns a number, a dict with `reward` or `score` and further columns, or a
    RewardResult (see `loading.as_result`). Its arguments are copies.

    A plain function runs in one of `num_threads` long-lived threads, an async one on the event loop, both for up to
    `limit_s` seconds. A thread cannot be killed: a call that takes longer is abandoned and counted (`num_abandoned`).
    With `killable`, a function named `FILE.py:name` or `module:name` runs in a worker process instead, with arguments
    and result as JSON: it may compute for `limit_s` seconds, and wait for ten times that, at least 30 s. If it computes
    longer the reward is `timeout_reward`, or a failure without one.

    Raises:
        ConfigError: the function is missing or cannot be called like this; a number is out of range.
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
            raise ConfigError(f"timeout_reward: expected a reward in {bounds}, got {timeout_reward!r}.")
        if not isinstance(function, str) and not callable(function):
            raise ConfigError(f"function: expected a function or its name, got {function!r}.")
        self._options: dict[str, Any] = {
            "killable": killable,
            "limit_s": number("limit_s", limit_s, low=1e-3),
            "kwargs": dict(kwargs or {}),
            "bounds": bounds,
            "num_threads": whole_number("num_threads", num_threads, low=1),
            "timeout_reward": None if timeout_reward is None else number("timeout_reward", timeout_reward),
        }
        self.bounds = bounds
        self._spec = function
        self._function = load_function(function) if isinstance(function, str) else function
        self._names = argument_names(self._function, self._options["kwargs"])
        self._where = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
        self._threads = Threads(num_threads)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a function that was given by name as its name, so that its module need not be pickled."""
        return partial(type(self), **self._options), (self._spec,)

    @property
    def num_abandoned(self) -> int:
        """Abandoned calls that have not returned yet."""
        return self._threads.num_abandoned

    async def grade(self, response: Response) -> RewardResult:
        """Return the function's result for the response.

        Raises:
            DataError: the function raised it, or a column cannot be copied.
            ContractError: the function raised something else, or did not return a reward; the message of what it raised
                has the file and line in its code.
            InfraError: the function exceeded its time limit, or the machine or a service failed; see
                `loading.failure_of`.
        """
        keywords = copied(arguments(response, self._names) | self._options["kwargs"])
        if self._options["killable"]:
            request = {"task": "agentenv.rewards.loading:handle", "function": self._spec, "arguments": keywords}
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
        limit_s = self._options["limit_s"]
        call = partial(self._function, **keywords)
        try:
            value = await self._threads.call(self._function, call, limit_s=limit_s)
        except Exception as error:
            raise failure_of(error, self._where) from error
        return as_result(value, self._where)
