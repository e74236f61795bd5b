"""EnginePool: several engines as one. Requests go to the least loaded engine; dead engines are replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.core.engine import CLOSE_S, Engine, close_engine
from agentenv.core.types import Completion, SamplingParams
from agentenv.errors import AgentEnvError, EngineError, RunStopped

logger = logging.getLogger(__name__)

_MAX_HOMES = 65_536
"""Number of episodes whose engine is remembered; the cached prefixes of older ones are gone anyway."""

SendWeights = Callable[..., Awaitable[Any]]
"""Signature of `WeightSender.send`."""


class EngineDead(EngineError):
    """The engine is gone, with its process or machine. A pool replaces it."""


class Restarts:
    """A budget of restarts within a window of time, so that a training of weeks survives many of them.

    Args:
        max_restarts: restarts of all workers within the window.
        wait_s: wait before a worker's first restart.
        window_s: how long a restart counts.
    """

    def __init__(self, max_restarts: int, *, wait_s: float = 0.0, window_s: float = 3600.0) -> None:
        self.num = 0
        """Restarts so far."""
        self._max = max_restarts
        self._window_s = window_s
        self._wait_s = wait_s
        self._recent: deque[tuple[float, int]] = deque()

    def spend(self, index: int = 0) -> float | None:
        """Return the wait in seconds before worker `index` restarts, None if the budget is spent.

        The wait doubles with each restart of the same worker within the window.
        """
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > self._window_s:
            self._recent.popleft()
        if len(self._recent) >= self._max:
            return None
        num_own = sum(worker == index for _, worker in self._recent)
        self._recent.append((now, index))
        self.num += 1
        return min(30.0, self._wait_s * 2.0**num_own)


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Limits of a pool: load, failures, restarts and timeouts."""

    max_in_flight: int = 256
    """Largest number of concurrent requests per engine. Others wait in the pool, in order."""
    max_skew: int = 8
    """A turn moves to another engine, without the cached prefix, if that has this many requests fewer."""
    max_failures: int = 3
    """An engine is replaced after this many consecutive failures of requests that another engine then served."""
    stall_s: float = 270.0
    """An engine counts as dead if a caller gives up after this time and the engine answered no request in that time."""
    max_restarts: int = 8
    """Restarts of all engines within an hour. One more stops the run."""
    restart_wait_s: float = 1.0
    """Wait before the first restart of an engine in an hour. Each further wait doubles, up to 30 s."""
    start_timeout_s: float = 600.0
    """Timeout for starting an engine and for loading weights."""
    close_timeout_s: float = CLOSE_S
    """Timeout for closing."""


@dataclass(slots=True, eq=False)
class EngineSlot:
    """The slot of an engine. A new engine takes the slot of a dead one."""

    index: int
    engine: Any
    """None while the engine is being replaced."""
    in_flight: int = 0
    num_served: int = 0
    num_blamed: int = 0
    answered_at: float = 0.0
    requests: dict[asyncio.Future[Any], asyncio.Task[Any]] = field(default_factory=dict)
    """Futures of callers, and the engine's calls behind them."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for a free engine."""

    episode: str
    avoid: EngineSlot | None
    place: asyncio.Future[EngineSlot]


class RequestDispatcher:
    """Assigns requests to engines: `enter` takes a place, `leave` frees it."""

    def __init__(self, slots: Sequence[EngineSlot], *, max_in_flight: int, max_skew: int) -> None:
        self._slots, self._max_in_flight, self._max_skew = slots, max_in_flight, max_skew
        self._homes: OrderedDict[str, EngineSlot] = OrderedDict()
        self._waiting: deque[_Waiter] = deque()

    async def enter(self, episode: str, *, avoid: EngineSlot | None = None) -> EngineSlot:
        """Take a place for a turn of an episode; wait in order if all engines are full."""
        if not self._waiting and (slot := self._pick(episode, avoid)) is not None:
            return slot
        waiter = _Waiter(episode, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self.wake()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.place.cancelled() and waiter.place.exception() is None:
                self.leave(waiter.place.result())  # assigned at the moment of cancellation
            raise

    def leave(self, slot: EngineSlot) -> None:
        """Free a place."""
        slot.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Assign free places to waiting requests, in order."""
        kept: deque[_Waiter] = deque()
        while self._waiting:
            waiter = self._waiting.popleft()
            if waiter.place.done():
                continue
            if (slot := self._pick(waiter.episode, waiter.avoid)) is not None:
                waiter.place.set_result(slot)
                continue
            kept.append(waiter)
            if waiter.avoid is None:
                break  # all engines are full
        self._waiting.extendleft(reversed(kept))

    def fail_waiting(self, error: Callable[[], Exception]) -> None:
        """Fail all waiting requests."""
        while self._waiting:
            settle(self._waiting.popleft().place, error())

    def _pick(self, episode: str, avoid: EngineSlot | None) -> EngineSlot | None:
        """Return the episode's engine unless it is much busier, otherwise the least busy; None if all are full."""
        alive = [slot for slot in self._slots if slot.engine is not None]
        others = [slot for slot in alive if slot is not avoid] or alive  # the engine that failed may be the only one
        free = [slot for slot in others if slot.in_flight < self._max_in_flight]
        if not free:
            return None
        chosen = min(free, key=lambda slot: (slot.in_flight, slot.num_served))
        home = self._homes.get(episode)
        if home in free and home.in_flight <= chosen.in_flight + self._max_skew:
            chosen = home
        if episode:
            self._homes[episode] = chosen
            self._homes.move_to_end(episode)
            if len(self._homes) > _MAX_HOMES:
                self._homes.popitem(last=False)
        chosen.in_flight += 1
        chosen.num_served += 1
        return chosen


class EnginePool(Engine):
    """Engines behind one `generate`; itself an `agentenv.core.engine.Engine`.

    A failed request is sent once more, to another engine with the same seed. An engine that raises `EngineDead`,
    stalls, or keeps failing where others do not is removed: its requests fail over immediately, and `make` returns a
    new engine. Use the pool from one event loop.

    Example::

        async with asyncio.timeout(600):
            pool = EnginePool([make(0), make(1)], make=make)
            await pool.start()
        completion = await pool.generate(prompt_ids, SamplingParams(max_tokens=64), request_id="episode-0/0")
        await pool.close()

    Args:
        engines: the engines, at least one.
        make: returns a new engine for a slot, not yet started. Without `send` it must have the pool's weights. None
            leaves slots of dead engines empty.
        policy: limits.
        send: sends new weights to all engines, as `WeightSender.send`. New engines load what it returns by
            `load_offer`. None calls each engine's `update_weights`.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        make: Callable[[int], Engine] | None = None,
        policy: PoolPolicy = PoolPolicy(),
        send: SendWeights | None = None,
    ) -> None:
        self._slots = [EngineSlot(index, engine) for index, engine in enumerate(engines)]
        if not self._slots:
            raise ValueError("EnginePool: expected at least one engine, got none. Pass some.")
        self._dispatch = RequestDispatcher(self._slots, max_in_flight=policy.max_in_flight, max_skew=policy.max_skew)
        self.policy = policy
        self._make = make
        self._send = send
        self._weights: Any = None  # returned by the last `send`
        self.policy_version = self._slots[0].engine.policy_version
        """Version of the weights of all engines."""
        self._budget = Restarts(policy.max_restarts, wait_s=policy.restart_wait_s)
        self._calls: set[asyncio.Task[Any]] = set()
        self._restarts: set[asyncio.Task[None]] = set()
        self._control = asyncio.Lock()  # no engine joins during an update
        self._paused = self._asleep = self._closed = False
        self._lost: str | None = None

    @property
    def num_alive(self) -> int:
        """Number of live engines."""
        return len(self.engines)

    @property
    def constraint_problem(self) -> str:
        """See `Engine`; all engines are of one kind."""
        return self.engines[0].constraint_problem if self.engines else ""

    @property
    def num_restarts(self) -> int:
        """Number of restarts so far, including failed ones."""
        return self._budget.num

    @property
    def engines(self) -> list[Engine]:
        """The live engines."""
        return [slot.engine for slot in self._slots if slot.engine is not None]

    @property
    def in_flight(self) -> list[int]:
        """Number of requests at each engine."""
        return [slot.in_flight for slot in self._slots]

    async def start(self) -> None:
        """Start all engines. If one fails, close all and raise its error."""
        try:
            async with asyncio.timeout(self.policy.start_timeout_s), asyncio.TaskGroup() as starts:
                for slot in self._slots:
                    starts.create_task(slot.engine.start())
        except TimeoutError as error:
            await self.close()
            raise EngineError(
                f"EnginePool: expected {len(self._slots)} engines within {self.policy.start_timeout_s:g} s, got "
                "fewer. Check that the cluster has room for them, or use fewer."
            ) from error
        except ExceptionGroup as group:
            await self.close()
            raise group.exceptions[0] from None
        self.policy_version = self._slots[0].engine.policy_version

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `Engine`. Cancelling it cancels it at its engine.

        Raises:
            EngineError: two engines failed, or the only one.
            RunStopped: engines died more often than `max_restarts`, or none is left.
        """

        def ask(engine: Engine) -> Coroutine[Any, Any, Completion]:
            return engine.generate(prompt_token_ids, sampling, request_id=request_id)

        completion: Completion = await self._serve(ask, request_id.rpartition("/")[0] or request_id)
        return completion

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after those before it; see `Engine`."""
        logprobs: list[float] = await self._serve(lambda engine: engine.score(token_ids), "")
        return logprobs

    async def pause(self) -> None:
        """Pause all engines. New engines start paused."""
        async with self._control:
            self._paused = True
            await self._everywhere(lambda engine: engine.pause())

    async def resume(self) -> None:
        """Resume all engines."""
        async with self._control:
            self._paused = False
            await self._everywhere(lambda engine: engine.resume())

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Send new weights to all engines. Tokens sampled afterwards have `policy_version`.

        Raises:
            EngineError: an engine could not load them. An engine that dies is replaced instead.
        """
        async with self._control:
            if self._send is None:
                tensors = list(named_tensors)
                await self._everywhere(lambda engine: engine.update_weights(tensors, policy_version))
            else:
                self._weights = await self._send(named_tensors, self.engines, self._everywhere, policy_version)
            self.policy_version = policy_version

    async def sleep(self) -> None:
        """Free the GPUs of all engines until `wake_up`; ConfigError if they cannot."""
        async with self._control:
            await self._everywhere(lambda engine: engine.sleep())
            self._asleep = True

    async def wake_up(self) -> None:
        """Let all engines take their GPUs back."""
        async with self._control:
            await self._everywhere(lambda engine: engine.wake_up())
            self._asleep = False

    async def close(self) -> None:
        """Fail requests in flight and close all engines. May be called again."""
        if self._closed:
            return
        self._closed, self._weights = True, None
        self._stop("EnginePool: expected an open pool, got a closed one. Close it after the last episode.")
        left = [*self._restarts, *self._calls]
        for task in left:
            task.cancel()
        closings = [asyncio.ensure_future(close_engine(engine, self.policy.close_timeout_s)) for engine in self.engines]
        if left or closings:
            await asyncio.wait([*left, *closings], timeout=self.policy.close_timeout_s + 1.0)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _serve(self, ask: Callable[[Any], Coroutine[Any, Any, Any]], episode: str) -> Any:
        """Ask an engine and, if it fails, another one. If that succeeds, the first engine is to blame."""
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
            logger.info("EnginePool: engine %d failed a request, which is sent once more: %s", slot.index, error)
        answer = await self._ask(await self._dispatch.enter(episode, avoid=None if dead else slot), ask)
        if not dead:
            slot.num_blamed += 1
            if slot.num_blamed >= self.policy.max_failures:
                self._lose(slot, engine, f"it failed {slot.num_blamed} requests in a row that others served")
        return replace(answer, num_failovers=1) if isinstance(answer, Completion) else answer

    async def _ask(self, slot: EngineSlot, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Run a request at an engine while that is alive. Its place is already taken."""
        engine, loop = slot.engine, asyncio.get_running_loop()
        started_at, outcome = loop.time(), loop.create_future()

        def carry_over(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                error = "EnginePool: expected a completion, got a call that its engine cancelled. Retry."
                settle(outcome, EngineError(error))
            elif (failed := task.exception()) is not None:
                settle(outcome, failed)
            elif not outcome.done():
                outcome.set_result(task.result())

        try:
            if engine is None:
                raise EngineDead(f"EnginePool: expected engine {slot.index} to be alive, got a dead one. Try again.")
            task = asyncio.ensure_future(ask(engine))
            slot.requests[outcome] = task
            self._calls.add(task)
            task.add_done_callback(carry_over)
            task.add_done_callback(self._calls.discard)
            answer = await outcome
        except asyncio.CancelledError:
            waited_s = loop.time() - started_at
            is_well = self._paused or self._asleep or slot.answered_at > started_at
            if waited_s >= self.policy.stall_s and not is_well:
                self._lose(slot, engine, f"it answered no request for {waited_s:.0f} s")
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

    # --- replacement -------------------------------------------------------------------------------------------------

    def _lose(self, slot: EngineSlot, engine: Any, reason: str) -> None:
        """Remove an engine, fail over its requests, and start its replacement."""
        if slot.engine is not engine or engine is None:
            return  # already removed
        slot.engine = None
        logger.warning("EnginePool: engine %d is removed: %s", slot.index, reason)
        failure = f"EnginePool: expected engine {slot.index} to live, got its death: {reason} Try again."
        for outcome in list(slot.requests):
            settle(outcome, EngineDead(failure))
        if self._lost is not None:
            return
        self._dispatch.wake()  # waiting requests may now use an engine that they avoided
        restart = asyncio.ensure_future(self._replace(slot, engine, reason))
        self._restarts.add(restart)

        def over(restart: asyncio.Task[None]) -> None:
            self._restarts.discard(restart)
            if not restart.cancelled() and (error := restart.exception()) is not None:
                why = str(error) if isinstance(error, AgentEnvError) else f"{type(error).__name__}: {error}"
                self._stop(f"EnginePool: expected a new engine for a dead one, got {why}")

        restart.add_done_callback(over)

    async def _replace(self, slot: EngineSlot, dead: Any, reason: str) -> None:
        """Start a new engine in a slot, with longer waits between attempts."""
        await close_engine(dead, self.policy.close_timeout_s)
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
                    await engine.start()
                    async with self._control:
                        if engine.policy_version != self.policy_version:
                            await self._catch_up(engine)
                        if self._paused:
                            await engine.pause()
                        if self._asleep:
                            await engine.sleep()
                        slot.engine, slot.num_blamed = engine, 0
            except (EngineError, TimeoutError) as error:
                reason = str(error) or f"no start within {self.policy.start_timeout_s:g} s."
                logger.warning("EnginePool: engine %d did not restart: %s", slot.index, reason)
                await close_engine(engine, self.policy.close_timeout_s)
            except BaseException:
                await close_engine(engine, self.policy.close_timeout_s)
                raise
        where = f", on node {engine.node}" if engine.node else ""
        logger.warning("EnginePool: engine %d is back%s", slot.index, where)
        self._dispatch.wake()

    async def _catch_up(self, engine: Engine) -> None:
        if self._weights is None:
            raise EngineError(
                f"EnginePool: expected a new engine with weights of version {self.policy_version}, got "
                f"{engine.policy_version}. Let `make` load the weights that the pool has."
            )
        await engine.load_offer(self._weights, self.policy_version)

    def _stop(self, message: str) -> None:
        """Fail all requests from now on."""
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
        """Call all live engines. Engines that die are replaced; other errors are raised."""
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


def settle(outcome: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future unless it is done."""
    if not outcome.done():
        outcome.set_exception(error)
