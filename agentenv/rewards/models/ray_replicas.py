"""RayScorer: replicas of a reward model in Ray actors, on the policy's GPUs or on their own.

Example:
    >>> scorer = RayScorer("my-rm", num_replicas=2, num_gpus=0.2, max_length=4096)
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from agentenv._util.calls import waiting
from agentenv._util.loop_thread import submit
from agentenv._util.ray.cluster import (
    ActorDemand,
    ClusterConfig,
    Placement,
    call_actor,
    check_node,
    import_ray,
    kill_actor,
    ray_session,
    reserve,
    restore_sigchld,
)
from agentenv._util.version import __version__
from agentenv.core.arguments import construct, number, one_of, whole_number
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError, MissingDependency
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.models.types import Conversation, CountingScorer, Scored, closed_error

_MAX_CALLS = 10_000
"""Concurrent calls of an actor."""
_TASK_RETRIES = 2
"""How often Ray asks again about a conversation whose actor died."""
_START_LIMIT_S, _CLOSE_TIMEOUT_S = 3600.0, 20.0


class ReplicaDied(InfraError):
    """The actor is gone, or died each time that it was asked about a conversation."""


class ReplicaActor:
    """The actor: an HFScorer, which loads its model when it is first asked, also after Ray started the actor again."""

    def __init__(self, model: str, args: Mapping[str, Any]) -> None:
        restore_sigchld()
        self._scorer = HFScorer(model, **args)

    async def load(self) -> str:
        """Load the model; return the version of agentenv."""
        await self._scorer.load()
        return __version__

    async def score(self, pickled: bytes) -> tuple[int, Scored]:
        """Return the process id and the score of a conversation."""
        return os.getpid(), await self._scorer.score(pickle.loads(pickled))

    async def close(self) -> None:
        """Release the model; the caller ends the process."""
        await self._scorer.close()


@dataclass(eq=False, slots=True)
class _Replica:
    """One actor, as the scorer sees it."""

    actor: Any
    num_in_flight: int = 0
    pid: int = 0
    """Of the process that answered last; 0 before the first answer."""
    died: bool = False
    """True from a death that failed a score until the actor answers again."""
    answered: float = field(default_factory=time.monotonic)
    """Time of its last answer."""


class RayScorer(CountingScorer):
    """Scores conversations in Ray actors; implements `agentenv.rewards.models.types.RewardScorer`.

    Args:
        model: a folder, which every node has, or a Hugging Face id.
        num_replicas: actors, each with a complete model in an HFScorer.
        num_gpus: GPUs per replica; a fraction (0.2) shares a GPU with other actors. None: one if the cluster has GPUs,
            else 0.
        num_cpus: CPU cores per replica.
        placement: Ray's strategy, or a placement group whose bundles the replicas use in turn, such as the policy's.
        max_restarts: how often Ray starts each replica again.
        timeout_s: longest wait for a score. A replica that answers nothing for that long is started again.
        scorer: arguments of HFScorer.

    Uses the Ray cluster that this process is connected to, else the one at RAY_ADDRESS, else starts one and ends it. A
    conversation goes to the replica with the fewest in flight, and each replica forms its own batches. Ray starts dead
    replicas again and repeats their conversations. Callers may use any event loop.

    `num_scored`, `num_failed`, `num_truncated` and `num_restarts` count conversations and replicas.
    """

    counts = (*CountingScorer.counts, "num_restarts")

    def __init__(
        self,
        model: str | Path,
        *,
        num_replicas: int = 1,
        num_gpus: float | None = None,
        num_cpus: float = 1.0,
        placement: Placement | Any = "PACK",
        max_restarts: int = 8,
        timeout_s: float = 600.0,
        **scorer: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"RayScorer: expected a folder or a name, got {type(model).__name__}. Save the model.")
        super().__init__()
        there = Path(model).expanduser()
        self._model = str(there.resolve()) if there.exists() else str(model)
        construct(f"rm ray:{model}", HFScorer, scorer, self._model)  # refuses wrong arguments
        self._args = scorer
        self._num = whole_number("RayScorer.num_replicas", num_replicas, low=1)
        self._gpus = None if num_gpus is None else number("RayScorer.num_gpus", num_gpus, low=0.0)
        self._cpus = number("RayScorer.num_cpus", num_cpus, low=0.0)
        self._placement = placement
        if not hasattr(placement, "bundle_specs"):
            one_of("RayScorer.placement", placement, get_args(Placement))
        self._max_restarts = whole_number("RayScorer.max_restarts", max_restarts)
        self._timeout_s = number("RayScorer.timeout_s", timeout_s, low=1e-3)
        self.num_restarts = 0
        """Replicas that Ray started again, seen by the process that answers."""
        self._closed = False
        self._starting = asyncio.Lock()  # this and the next four belong to the background loop
        self._replicas: list[_Replica] = []
        self._refused: AgentEnvError | None = None
        self._held = AsyncExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Those that wait for an actor."""

    @property
    def patience_s(self) -> float:
        """Longest time to a score if no replica dies."""
        return self._timeout_s

    async def load(self) -> None:
        """Start the actors and load the model unless they run; the deadline of an agent's step is paused.

        Raises:
            ConfigError: the cluster lacks resources, or HFScorer refuses its arguments.
            InfraError: a replica did not start, or the scorer was closed.
            MissingDependency: Ray is not installed, here or on a node.
        """

        async def start_once() -> None:
            async with self._starting:
                if self._closed:
                    raise closed_error("RayScorer")
                if self._refused is not None:
                    raise self._refused
                if self._replicas:
                    return
                try:
                    self._replicas = await self._started()
                except BaseException as error:
                    await self._held.aclose()
                    if isinstance(error, ConfigError | MissingDependency):
                        self._refused = error
                    raise

        with waiting():
            await asyncio.wrap_future(submit(start_once()))

    async def score(self, conversation: Conversation) -> Scored:
        """Return the model's raw score of a conversation; cancelling it cancels the call.

        Raises:
            DataError: the conversation cannot be rendered or sent, or has a token unknown to the model.
            InfraError: the model failed or died, returned no finite number in time, or the scorer was closed.
            ConfigError: the model cannot be loaded.
        """
        if not self._replicas or self._closed:
            await self.load()
        try:
            return await asyncio.wrap_future(submit(self._counted(conversation)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):  # the call was cancelled, not the caller
                raise closed_error("RayScorer") from None
            raise

    async def close(self) -> None:
        """Fail waiting callers, end the actors, and Ray if it was started here; calling it again is harmless."""
        self._closed = True

        async def end() -> None:
            async with self._starting:
                replicas, self._replicas = self._replicas, []
                for task in self._tasks:
                    task.cancel()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        closing = (self._call(replica, "close") for replica in replicas)
                        await asyncio.gather(*closing, return_exceptions=True)
                await self._held.aclose()

        await asyncio.wrap_future(submit(end()))

    # --- on the background loop ---------------------------------------------------------------------------------------

    async def _started(self) -> list[_Replica]:
        strategy: Any = self._placement if isinstance(self._placement, str) else "PACK"
        config = ClusterConfig(cpus=self._num * self._cpus, placement=strategy)
        await asyncio.to_thread(self._held.enter_context, ray_session(config))
        ray = import_ray()
        gpus = self._gpus
        if gpus is None:
            gpus = float(self._args.get("device") != "cpu" and ray.cluster_resources().get("GPU", 0.0) > 0.0)
        if isinstance(self._placement, str):
            need = ActorDemand("RayScorer.num_replicas, num_cpus, num_gpus", self._num, self._cpus, gpus)
            places = await self._held.enter_async_context(reserve(need, config))
        else:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            bundles = [index % self._placement.bundle_count for index in range(self._num)]
            strategies = [PlacementGroupSchedulingStrategy(self._placement, bundle) for bundle in bundles]
            each = {"num_cpus": self._cpus, "num_gpus": gpus}
            places = [each | {"scheduling_strategy": strategy} for strategy in strategies]
        options = {
            "max_restarts": self._max_restarts,
            "max_task_retries": _TASK_RETRIES,
            "max_concurrency": _MAX_CALLS,
        }
        replicas: list[_Replica] = []
        try:
            for place in places:
                remote = ray.remote(ReplicaActor).options(**options, **place)
                replicas.append(_Replica(remote.remote(self._model, self._args)))
                self._held.callback(kill_actor, replicas[-1].actor)
        except ValueError as error:
            raise ConfigError(f"RayScorer.placement: expected bundles that hold a replica, got {error}") from error
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                versions = await asyncio.gather(*(self._call(replica, "load") for replica in replicas))
        except TimeoutError as error:
            raise InfraError(
                f"RayScorer: expected a replica to start within {_START_LIMIT_S:g} s, got none. Check that the "
                "placement group has resources for all replicas."
            ) from error
        for version in versions:
            check_node("RayScorer", version)
        return replicas

    async def _scored(self, conversation: Conversation) -> Scored:
        if self._closed:
            raise closed_error("RayScorer")
        try:
            pickled = pickle.dumps(conversation)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"conversation: expected text or messages that can be pickled, got {error}.") from None
        self._cancelled_at_end(asyncio.current_task())
        replica = min(self._replicas, key=lambda each: (each.died, each.num_in_flight))
        replica.num_in_flight += 1
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                pid, scored = await self._call(replica, "score", pickled)
        except TimeoutError as error:
            if replica.answered < began:
                kill_actor(replica.actor, restart=True)
            raise InfraError(
                f"RayScorer: expected a score within {self._timeout_s:g} s, got none. Score fewer at once, or raise "
                "timeout_s."
            ) from error
        except ReplicaDied:

            async def revive() -> None:
                # It scores again as soon as it answers, if Ray starts it again at all.
                with contextlib.suppress(AgentEnvError):
                    await self._call(replica, "load")
                    replica.died = False

            if not replica.died:
                replica.died = True
                self._cancelled_at_end(asyncio.create_task(revive()))
            raise
        finally:
            replica.num_in_flight -= 1
        self.num_restarts += replica.pid not in (0, pid)
        replica.pid, replica.answered = pid, time.monotonic()
        return scored  # type: ignore[no-any-return]

    def _cancelled_at_end(self, task: asyncio.Task[Any] | None) -> None:
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, replica: _Replica, method: str, *args: Any) -> Any:
        return await call_actor(
            "RayScorer", "RayScorer", replica.actor, method, *args, failed=InfraError, died=ReplicaDied
        )
