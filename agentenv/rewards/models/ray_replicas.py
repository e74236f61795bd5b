"""RayScorer: replicas of a reward model in Ray actors, on the policy's GPUs or on their own.

Example:
    >>> scorer = RayScorer("my-rm", num_replicas=2, num_gpus=0.2, max_length=4096)
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from agentenv._util.ray.cluster import (
    ActorDemand,
    ClusterConfig,
    Placement,
    call_actor,
    check_node,
    kill_actor,
    ray_session,
    reserve,
    restore_sigchld,
)
from agentenv._util.ray.library import import_ray
from agentenv._util.version import __version__
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.rewards.models.actor_lifecycle import LoopScorer, WorkerDied
from agentenv.rewards.models.replicas import Replica, ReplicaPool, ScoreOutcome
from agentenv.rewards.models.types import Conversation, RewardScorer, Scored, closed_error

_MAX_CALLS = 10_000
"""Concurrent calls of an actor."""
_START_LIMIT_S, _CLOSE_TIMEOUT_S = 3600.0, 20.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The scorer that an actor makes; sent to the actor."""

    backend: str
    model: str
    args: Mapping[str, Any]

    def scorer(self) -> RewardScorer:
        """Return the scorer, without loading the model.

        Raises:
            ConfigError: an argument is unknown.
        """
        cls: Any
        if self.backend == "hf":
            from agentenv.rewards.models.hf import HFScorer as cls
        else:
            from agentenv.rewards.models.vllm_local import VLLMScorer as cls
        taken = list(inspect.signature(cls).parameters)[1:]
        wrong = [name for name in self.args if name not in taken]
        if wrong:
            raise ConfigError(
                f"RayScorer: expected its arguments or those of {cls.__name__} ({', '.join(taken)}), got {wrong[0]!r}."
            )
        scorer: RewardScorer = cls(self.model, **self.args)
        return scorer


class RayReplica(Replica):
    """A scorer in a Ray actor. Ray must be running.

    Args:
        spec: the actor's scorer.
        options: Ray's options of the actor: `num_cpus`, `num_gpus`, `scheduling_strategy` …
    """

    def __init__(self, spec: ReplicaSpec, options: Mapping[str, Any]) -> None:
        self._spec, self._options = spec, dict(options)
        self._actor: Any = None
        self.pid = 0
        """Process id of the actor on its machine."""

    async def start(self) -> None:
        """Place the actor and load the model in it."""
        # Ray's restarts would bring an actor back without its model; the pool makes a new replica instead.
        options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _MAX_CALLS, **self._options}
        try:
            self._actor = import_ray().remote(ReplicaActor).options(**options).remote(self._spec)
        except ValueError as error:
            raise ConfigError(f"RayScorer.placement: expected bundles that hold a replica, got {error}") from error
        try:
            self.pid, version = await asyncio.wait_for(self._ask("start"), _START_LIMIT_S)
        except TimeoutError as error:
            raise InfraError(
                f"RayScorer: expected a replica to start within {_START_LIMIT_S:g} s, got none. Check that the "
                "placement group has resources for all replicas."
            ) from error
        check_node("RayScorer", version)

    async def score(self, pickled: Sequence[bytes]) -> Sequence[ScoreOutcome]:
        """See Replica."""
        outcomes: Sequence[ScoreOutcome] = await self._ask("score", list(pickled))
        return outcomes

    async def close(self) -> None:
        """See Replica; the actor has some time to release the model."""
        with contextlib.suppress(AgentEnvError, TimeoutError):
            await asyncio.wait_for(self._ask("close"), _CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """See Replica."""
        actor, self._actor = self._actor, None
        if actor is not None:
            kill_actor(actor)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the actor and convert Ray's errors."""
        if self._actor is None:
            raise WorkerDied("RayScorer: expected a living replica, got one that was ended.")
        return await call_actor(
            "RayScorer", "RayScorer", self._actor, method, *args, failed=InfraError, died=WorkerDied
        )


class ReplicaActor:
    """The actor: a scorer on one event loop."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._scorer: Any = None

    async def start(self) -> tuple[int, str]:
        """Load the model; return the process id and the version of agentenv."""
        restore_sigchld()
        self._scorer = self._spec.scorer()
        await self._scorer.load()
        return os.getpid(), __version__

    async def score(self, pickled: Sequence[bytes]) -> list[ScoreOutcome]:
        """Return the score or the error of each conversation."""
        outcomes = await asyncio.gather(*map(self._one, pickled), return_exceptions=True)
        return [_outcome(outcome) for outcome in outcomes]

    async def _one(self, pickled: bytes) -> Scored:
        scored: Scored = await self._scorer.score(pickle.loads(pickled))
        return scored

    async def close(self) -> None:
        """Close the scorer; the caller ends the process."""
        if self._scorer is not None:
            await self._scorer.close()


def _outcome(outcome: Scored | BaseException) -> ScoreOutcome:
    """Return an outcome that can be pickled, without causes and notes."""
    if isinstance(outcome, Scored):
        return outcome
    if isinstance(outcome, AgentEnvError):
        return type(outcome)(str(outcome))
    return InfraError(f"RayScorer: expected a score, got {type(outcome).__name__}: {outcome}"[:500])


BACKENDS = ("hf", "vllm")
_SHARE_OF_A_GPU = 0.9
"""Share of its fraction of a GPU's memory that vLLM takes."""


class RayScorer(LoopScorer):
    """Scores conversations in Ray actors; implements `agentenv.rewards.models.types.RewardScorer`.

    Args:
        model: a folder, which every node has, or a Hugging Face id.
        num_replicas: actors, each with a complete model.
        backend: `hf` for HFScorer in each of them, `vllm` for VLLMScorer.
        num_gpus: GPUs per replica; a fraction (0.2) shares a GPU with other actors. None: as many as the model needs if
            the cluster has GPUs, else 0. On a fraction, vLLM takes nine tenths of that fraction's memory unless
            `options` sets another share.
        num_cpus: CPU cores per replica.
        placement: Ray's strategy, or a placement group whose bundles the replicas use in turn, such as the policy's.
        max_restarts: replacements of dead replicas within an hour.
        timeout_s: longest wait for a score. A replica that answers nothing for that long is replaced.
        scorer: arguments of the backend's scorer: `max_length`, `overflow`, `max_batch`, `dtype`, `label`, `options`,
            and `device` of HFScorer.

    Uses the Ray cluster that this process is connected to, else the one at RAY_ADDRESS, else starts one and ends it.
    Conversations are sent at once, a few per call, and each replica forms its own batches. Conversations of a dead
    replica go to another one; see ReplicaPool. Callers may use any event loop.

    `num_scored`, `num_failed`, `num_truncated`, `num_retried` and `num_restarts` count conversations and replicas.
    """

    counts = (*LoopScorer.counts, "num_retried", "num_restarts")

    def __init__(
        self,
        model: str | Path,
        *,
        num_replicas: int = 1,
        backend: str = "hf",
        num_gpus: float | None = None,
        num_cpus: float = 1.0,
        placement: Placement | Any = "PACK",
        max_restarts: int = 8,
        timeout_s: float = 600.0,
        **scorer: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"RayScorer: expected a folder or a name, got {type(model).__name__}. Save the model.")
        super().__init__("RayScorer", "agentenv-ray-rm")
        there = Path(model).expanduser()
        path = str(there.resolve()) if there.exists() else str(model)
        options = scorer.get("options") or {}
        if backend == "vllm" and num_gpus and num_gpus < 1 and isinstance(options, Mapping):
            scorer["options"] = {"gpu_memory_utilization": _SHARE_OF_A_GPU * num_gpus, **options}
        self._spec = ReplicaSpec(one_of("RayScorer.backend", backend, BACKENDS), path, scorer)
        self._spec.scorer()  # refuses wrong arguments
        self._num = whole_number("RayScorer.num_replicas", num_replicas, low=1)
        self._gpus = None if num_gpus is None else number("RayScorer.num_gpus", num_gpus, low=0.0)
        self._cpus = number("RayScorer.num_cpus", num_cpus, low=0.0)
        self._placement = placement
        if not hasattr(placement, "bundle_specs"):
            one_of("RayScorer.placement", placement, get_args(Placement))
        self._max_restarts = whole_number("RayScorer.max_restarts", max_restarts)
        self._timeout_s = number("RayScorer.timeout_s", timeout_s, low=1e-3)
        self._pool: ReplicaPool | None = None  # this and the next belong to the scorer's loop
        self._held = AsyncExitStack()

    @property
    def patience_s(self) -> float:
        """Longest time to a score if no replica dies."""
        return self._timeout_s

    @property
    def num_retried(self) -> int:
        """Repeated attempts after the death of a replica."""
        return 0 if self._pool is None else self._pool.num_retried

    @property
    def num_restarts(self) -> int:
        """Replacements of dead replicas."""
        return 0 if self._pool is None else self._pool.num_restarts

    async def load(self) -> None:
        """Start the actors and load the model unless they run; the deadline of an agent's step is paused.

        Raises:
            ConfigError: the cluster lacks resources, or a replica's scorer refuses its arguments.
            InfraError: a replica did not start, none is left, or the scorer was closed.
            MissingDependency: Ray is not installed, here or on a node.
        """
        await self._started()

    # --- on its loop --------------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> bool:
        return self._pool is not None and bool(self._pool.alive)

    async def _start(self) -> None:
        if self._pool is not None:
            await self._pool.ready()
            return
        try:
            config = ClusterConfig(cpus=self._num * self._cpus)
            if isinstance(self._placement, str):
                config = ClusterConfig(cpus=config.cpus, placement=self._placement)  # type: ignore[arg-type]
            self._held.enter_context(ray_session(config))
            if self._gpus is not None:
                gpus = self._gpus
            elif self._spec.args.get("device") == "cpu" or not import_ray().cluster_resources().get("GPU", 0.0):
                gpus = 0.0
            else:
                options = self._spec.args.get("options")
                size = options.get("tensor_parallel_size", 1) if isinstance(options, Mapping) else None
                gpus = float(getattr(options, "tensor_parallel_size", 1) if size is None else size)
            if isinstance(self._placement, str):
                need = ActorDemand("RayScorer.num_replicas, num_cpus, num_gpus", self._num, self._cpus, gpus)
                places = await self._held.enter_async_context(reserve(need, config))
            else:
                from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

                places = [
                    {
                        "num_cpus": self._cpus,
                        "num_gpus": gpus,
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(
                            self._placement, index % self._placement.bundle_count
                        ),
                    }
                    for index in range(self._num)
                ]
            pool = ReplicaPool(
                lambda index: RayReplica(self._spec, places[index]),
                self._num,
                max_restarts=self._max_restarts,
                timeout_s=self._timeout_s,
            )
            await pool.start()
        except BaseException:
            await self._held.aclose()
            raise
        self._pool = pool

    async def _scored(self, conversation: Conversation) -> Scored:
        if self._pool is None:
            raise closed_error("RayScorer")
        return await self._pool.score(conversation)

    async def _end(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await self._held.aclose()
