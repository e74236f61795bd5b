"""EnginePool: several engines as one; the least loaded is asked first, and the dead are replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.agent import Engine
from agentenv.engines._dispatch import Dispatch, Slot, settle
from agentenv.errors import AgentEnvError, ConfigError, EngineError, RunStopped
from agentenv.restarts import Restarts
from agentenv.types import Completion, SamplingParams

logger = logging.getLogger(__name__)


class EngineDead(EngineError):
    """The engine will never answer again: its process or machine is gone. A pool replaces it."""


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """When a pool spreads, gives up and replaces."""

    max_in_flight: int = 256
    """Requests that one engine gets at once; the others wait in the pool, first come, first served."""
    max_skew: int = 8
    """A turn leaves its episode's engine, and the prefix cached there, when another has this many requests less."""
    max_failures: int = 3
    """An engine is replaced after failing this often in a row at requests that another engine then served."""
    stall_s: float = 270.0
    """An engine counts as dead when a caller gives up after this long, in which it answered nobody."""
    max_restarts: int = 8
    """Of all engines together within an hour; the next death stops the run."""
    restart_wait_s: float = 1.0
    """Wait before an engine's first restart in an hour; doubled for each one after it, up to 30 s."""
    start_timeout_s: float = 600.0
    """Longest an engine may take to start, or to take new weights."""
    close_timeout_s: float = 30.0
    """Longest closing may take; what is left then is left."""


class EnginePool:
    """Engines behind one `generate`; itself an `agentenv.agent.Engine`.

    A request that fails is sent once more, to another engine and with the same seed: a generation has no side effects.
    An engine that raises `EngineDead`, stalls, or keeps failing where others do not is taken out; what it had in flight
    fails over at once, and `make` gives its successor. All methods belong to one event loop.

    Example::

        async with asyncio.timeout(600):
            pool = EnginePool([make(0), make(1)], make=make)
            await pool.start()
        completion = await pool.generate(prompt_ids, SamplingParams(max_tokens=64), request_id="episode-0/0")
        await pool.close()

    Args:
        engines: the engines, at least one.
        make: a new engine for the place of that index, not yet started, with the weights that the pool has now unless
            they are shared; None leaves the place of a dead engine empty.
        policy: its numbers.
        share: brings new weights, as (name, tensor) pairs, where all engines find them; what it gives is what their
            `update_weights` get, and is kept for successors. A `Shipment` goes to them its own way.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        make: Callable[[int], Engine] | None = None,
        policy: PoolPolicy = PoolPolicy(),
        share: Callable[[Iterable[tuple[str, Any]]], Awaitable[Any]] | None = None,
    ) -> None:
        self._slots = [Slot(index, engine) for index, engine in enumerate(engines)]
        if not self._slots:
            raise ValueError("EnginePool: expected at least one engine, got none. Pass some.")
        self._dispatch = Dispatch(self._slots, max_in_flight=policy.max_in_flight, max_skew=policy.max_skew)
        self._make, self.policy, self._share = make, policy, share
        self._weights: Any = None  # the last that were shared
        self.policy_version = getattr(self._slots[0].engine, "policy_version", 0)
        """Version of the weights of all engines; set by `update_weights`."""
        self._budget = Restarts(policy.max_restarts, wait_s=policy.restart_wait_s)
        self._calls: set[asyncio.Task[Any]] = set()
        self._restarts: set[asyncio.Task[None]] = set()
        self._control = asyncio.Lock()  # no engine joins between two halves of an update
        self._paused = self._asleep = self._closed = False
        self._lost: str | None = None

    @property
    def num_alive(self) -> int:
        """Engines that take requests now."""
        return len(self.engines)

    @property
    def num_restarts(self) -> int:
        """So far, those that failed among them."""
        return self._budget.num

    @property
    def engines(self) -> list[Any]:
        """Those that live now."""
        return [slot.engine for slot in self._slots if slot.engine is not None]

    @property
    def in_flight(self) -> list[int]:
        """Requests at each engine now."""
        return [slot.in_flight for slot in self._slots]

    async def start(self) -> None:
        """Start all engines at once; when one cannot, close all and raise what it raised."""
        try:
            async with asyncio.timeout(self.policy.start_timeout_s), asyncio.TaskGroup() as starts:
                for slot in self._slots:
                    starts.create_task(_start(slot.engine))
        except TimeoutError as error:
            await self.close()
            raise EngineError(
                f"EnginePool: expected {len(self._slots)} engines within {self.policy.start_timeout_s:g} s, got "
                "fewer. Look whether the cluster has room for them, or use fewer."
            ) from error
        except ExceptionGroup as group:
            await self.close()
            raise group.exceptions[0] from None
        self.policy_version = getattr(self._slots[0].engine, "policy_version", 0)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.agent.Engine`. Cancelling it cancels it at its engine.

        Raises:
            EngineError: two engines could not, or the only one could not.
            RunStopped: the engines died more often than `max_restarts`, or none is left.
        """

        def ask(engine: Any) -> Coroutine[Any, Any, Completion]:
            """The request, at one engine."""
            answer: Coroutine[Any, Any, Completion] = engine.generate(prompt_token_ids, sampling, request_id=request_id)
            return answer

        completion: Completion = await self._serve(ask, request_id.rpartition("/")[0] or request_id)
        return completion

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token after those before it; see `agentenv.engines.Scorer`."""
        logprobs: list[float] = await self._serve(lambda engine: engine.score(token_ids), "")
        return logprobs

    async def pause(self) -> None:
        """Stop sampling at all engines; see their `pause`. A successor starts paused."""
        async with self._control:
            self._paused = True
            await self._everywhere(lambda engine: engine.pause())

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._control:
            self._paused = False
            await self._everywhere(lambda engine: engine.resume())

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """New weights for all engines; what they sample afterwards carries `policy_version`.

        Raises:
            EngineError: an engine could not take them; one that died of it is replaced instead.
        """
        async with self._control:
            shared: Any = list(named_tensors) if self._share is None else await self._share(named_tensors)
            if hasattr(shared, "send"):
                await shared.send(self.engines, self._everywhere, policy_version)
            else:
                await self._everywhere(lambda engine: engine.update_weights(shared, policy_version))
            self.policy_version = policy_version
            self._weights = shared if self._share is not None else None

    async def sleep(self) -> None:
        """Have all engines leave their GPUs to the trainer until `wake_up`; ConfigError where they cannot."""
        async with self._control:
            await self._everywhere(lambda engine: can_sleep(engine).sleep())
            self._asleep = True

    async def wake_up(self) -> None:
        """Have all engines take their GPUs back, and go on."""
        async with self._control:
            await self._everywhere(lambda engine: can_sleep(engine).wake_up())
            self._asleep = False

    async def close(self) -> None:
        """Fail what is in flight and close all engines; again is harmless."""
        if self._closed:
            return
        self._closed, self._weights = True, None
        self._stop("EnginePool: expected an open pool, got a closed one. Close it after the last episode.")
        left = [*self._restarts, *self._calls]
        for task in left:
            task.cancel()
        closings = [asyncio.ensure_future(self._let_go(engine)) for engine in self.engines]
        if left or closings:
            await asyncio.wait([*left, *closings], timeout=self.policy.close_timeout_s + 1.0)

    # --- one request ------------------------------------------------------------------------------------------------

    async def _serve(self, ask: Callable[[Any], Coroutine[Any, Any, Any]], episode: str) -> Any:
        """Ask an engine, and once more another one; where that succeeds, the failure was the first engine's."""
        self._check_lost()
        slot = await self._dispatch.enter(episode)
        engine = slot.engine
        try:
            return await self._ask(slot, ask)
        except EngineError as error:
            self._check_lost()
            alive = any(other.engine is not None and other is not slot for other in self._slots)
            dead = engine is None or slot.engine is not engine
            if not dead and not alive:
                raise
            logger.info("EnginePool: engine %d failed a request, it is sent once more: %s", slot.index, error)
        answer = await self._ask(await self._dispatch.enter(episode, avoid=None if dead else slot), ask)
        if not dead:
            self._blame(slot, engine)
        return answer

    async def _ask(self, slot: Slot, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """One request at an engine, no longer than that lives; its place is taken already."""
        engine, loop = slot.engine, asyncio.get_running_loop()
        started_at, outcome = loop.time(), loop.create_future()
        try:
            if engine is None:
                raise EngineDead(f"EnginePool: expected engine {slot.index} to be alive, got a dead one. Try again.")
            task = asyncio.ensure_future(ask(engine))
            slot.requests[outcome] = task
            self._calls.add(task)
            task.add_done_callback(lambda ended: _carry_over(ended, outcome))
            task.add_done_callback(self._calls.discard)
            answer = await outcome
        except asyncio.CancelledError:
            waited_s = loop.time() - started_at
            if (
                waited_s >= self.policy.stall_s
                and not (self._paused or self._asleep)
                and slot.answered_at <= started_at
            ):
                self._lose(slot, engine, f"it answered nobody for {waited_s:.0f} s")
            raise
        except EngineDead as error:
            self._lose(slot, engine, str(error))
            raise
        finally:
            if (given_up := slot.requests.pop(outcome, None)) is not None:
                given_up.cancel()
            self._dispatch.leave(slot)
        slot.answered_at, slot.num_blamed = loop.time(), 0
        return answer

    def _blame(self, slot: Slot, engine: Any) -> None:
        slot.num_blamed += 1
        if slot.num_blamed >= self.policy.max_failures:
            self._lose(slot, engine, f"it failed {slot.num_blamed} requests in a row that others served")

    # --- life and death ---------------------------------------------------------------------------------------------

    def _lose(self, slot: Slot, engine: Any, reason: str) -> None:
        """Take an engine out, fail over what it had in flight, and have it replaced."""
        if slot.engine is not engine or engine is None:
            return  # others noticed before
        slot.engine = None
        logger.warning("EnginePool: engine %d is taken out: %s", slot.index, reason)
        failure = f"EnginePool: expected engine {slot.index} to live, got its death: {reason} Try again."
        for outcome in list(slot.requests):
            settle(outcome, EngineDead(failure))
        if self._lost is not None:
            return
        self._dispatch.wake()  # who waited for this engine may go back to the one that failed
        restart = asyncio.ensure_future(self._replace(slot, engine, reason))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)
        restart.add_done_callback(self._replaced)

    async def _replace(self, slot: Slot, dead: Any, reason: str) -> None:
        """Put a new engine into a place, with ever longer waits between trials."""
        await self._let_go(dead)
        if self._make is None:
            if not self.num_alive:
                self._stop(f"EnginePool: expected an engine, got the death of the last one: {reason} See its log.")
            return
        while slot.engine is None:
            if (wait_s := self._budget.spend(slot.index)) is None:
                return self._stop(
                    f"EnginePool: expected at most {self.policy.max_restarts} restarts of engines in an hour, got one "
                    f"more death (engine {slot.index}): {reason} Find out why they die, then --resume."
                )
            await asyncio.sleep(wait_s)
            engine = self._make(slot.index)
            try:
                async with asyncio.timeout(self.policy.start_timeout_s):
                    await _start(engine)
                    async with self._control:
                        await self._join(slot, engine)
            except (EngineError, TimeoutError) as error:
                reason = str(error) or f"no start within {self.policy.start_timeout_s:g} s."
                logger.warning("EnginePool: engine %d did not start again: %s", slot.index, reason)
                await self._let_go(engine)
            except BaseException:
                await self._let_go(engine)
                raise
        logger.warning("EnginePool: engine %d is back", slot.index)
        self._dispatch.wake()

    async def _join(self, slot: Slot, engine: Any) -> None:
        version = getattr(engine, "policy_version", self.policy_version)
        if version != self.policy_version and self._weights is not None:
            await engine.update_weights(self._weights, self.policy_version)
            version = self.policy_version
        if version != self.policy_version:
            raise EngineError(
                f"EnginePool: expected a new engine with weights of version {self.policy_version}, got {version}. "
                "Let `make` load the weights that the pool has."
            )
        if self._paused:
            await engine.pause()
        if self._asleep:
            await engine.sleep()
        slot.engine, slot.num_blamed = engine, 0

    def _replaced(self, restart: asyncio.Task[None]) -> None:
        """What cannot be mended by trying again ends the run."""
        if not restart.cancelled() and (error := restart.exception()) is not None:
            whole = str(error) if isinstance(error, AgentEnvError) else f"{type(error).__name__}: {error}"
            self._stop(f"EnginePool: expected a new engine for a dead one, got {whole}")

    def _stop(self, message: str) -> None:
        """Serve nobody any more."""
        if self._lost is None:
            self._lost = message
        for slot in self._slots:
            for outcome in list(slot.requests):
                settle(outcome, self._loss())
        self._dispatch.fail_waiting(self._loss)

    def _loss(self) -> AgentEnvError:
        return (EngineError if self._closed else RunStopped)(self._lost or "")

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise self._loss()

    async def _everywhere(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        """Ask all engines that live; those that die of it are replaced, any other failure is raised."""
        alive = [slot for slot in self._slots if slot.engine is not None]
        for slot in alive:
            slot.in_flight += 1
        try:
            async with asyncio.timeout(self.policy.start_timeout_s):
                answers = await asyncio.gather(*(self._ask(slot, ask) for slot in alive), return_exceptions=True)
        except TimeoutError as error:
            limit_s = self.policy.start_timeout_s
            raise EngineError(f"EnginePool: expected all engines to answer within {limit_s:g} s, got less.") from error
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDead):
                raise answer

    async def _let_go(self, engine: Any) -> None:
        """Close an engine that may be dead or deaf, and wait no longer than the policy says."""
        closing = asyncio.ensure_future(engine.close()) if hasattr(engine, "close") else None
        if closing is None:
            return
        done, _ = await asyncio.wait([closing], timeout=self.policy.close_timeout_s)
        if not done:
            closing.cancel()
        error = closing.exception() if done and not closing.cancelled() else None
        if error is not None:
            logger.warning("EnginePool: an engine could not be closed: %s: %s", type(error).__name__, error)


def can_sleep(engine: Any) -> Any:
    """The engine, which has `sleep` and `wake_up`; else ConfigError."""
    if not hasattr(engine, "sleep"):
        raise ConfigError(
            f"--vllm_enable_sleep: expected vLLM on GPUs, got {type(engine).__name__}. Leave the flag out."
        )
    return engine


async def _start(engine: Any) -> None:
    if hasattr(engine, "start"):
        starting: Awaitable[None] = engine.start()
        await starting


def _carry_over(task: asyncio.Task[Any], outcome: asyncio.Future[Any]) -> None:
    """What an engine's call came to, for the caller, who may be gone."""
    if task.cancelled():
        settle(outcome, EngineError("EnginePool: expected a completion, got a call that its engine cancelled. Retry."))
    elif (error := task.exception()) is not None:
        settle(outcome, error)
    elif not outcome.done():
        outcome.set_result(task.result())
