"""Engines in Ray actors: `open_pool` starts N of them, on this machine or a cluster, as one engine.

Each actor runs an HFEngine or a VLLMEngine; only token ids and completions are transferred.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from agentenv._util.ray import cluster
from agentenv._util.ray.cluster import ActorDemand, ClusterConfig
from agentenv._util.version import __version__
from agentenv.core.engine import Engine, EngineOptions, checked_errors
from agentenv.core.types import Completion, SamplingParams
from agentenv.engines.pool import EngineDead, EnginePool, PoolPolicy
from agentenv.engines.weights import Offer, SharedWeights, WeightFile, WeightSender, here, share_bytes, share_weights
from agentenv.errors import AgentEnvError, ConfigError, EngineError

if TYPE_CHECKING:
    import numpy as np

EngineBackend = Literal["hf", "vllm_local"]

_CLOSE_TIMEOUT_S = 20.0
_NUM_CONTROL_CALLS = 16
"""Concurrent calls of an actor besides its requests: pause, weights, close."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The number, backend and resources of engine actors."""

    num_engines: int = 1
    backend: EngineBackend = "hf"
    """Engine inside each actor."""
    cpus: float = 1.0
    """CPU cores of each engine."""
    gpus: float | None = None
    """GPUs of each engine. None: as many as it computes on if the cluster has any, otherwise 0."""
    pool: PoolPolicy = field(default_factory=PoolPolicy)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.num_engines < 1:
            raise ConfigError(f"--num_engines: expected an integer >= 1, got {self.num_engines!r}.")
        if not self.cpus >= 0 or (self.gpus is not None and not self.gpus >= 0):
            raise ConfigError(f"--engine_cpus, --engine_gpus: expected numbers >= 0, got {self.cpus!r}, {self.gpus!r}.")


@asynccontextmanager
async def open_pool(options: EngineOptions, config: RayConfig) -> AsyncIterator[EnginePool]:
    """Open a pool of started Ray engines; close it, and Ray if it was started here, at the end.

    New weights reach engines on this machine through shared memory, those on others through Ray's object store, and
    vLLM on GPUs by CUDA IPC or NCCL where `options.args["transfer"]` (VLLMEngine's) and the tensors' device allow it.

    Raises:
        MissingDependency: Ray is not installed, here or on a node what runs inside an actor.
        ConfigError: no cluster is at the address, this machine lacks the resources, or an engine refuses its arguments.
        EngineError: an engine could not start.
    """
    needed = replace(config.cluster, cpus=max(config.cluster.cpus, config.num_engines * config.cpus))
    world_size = math.prod(int(options.args.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline"))
    with cluster.ray_session(needed):
        gpus = config.gpus
        if gpus is None:
            on_cpu = options.device == "cpu" or not cluster.import_ray().cluster_resources().get("GPU", 0.0)
            gpus = 0.0 if on_cpu else float(world_size)
        need = ActorDemand("--num_engines, --engine_cpus, --engine_gpus", config.num_engines, config.cpus, gpus)
        async with cluster.reserve(need, needed) as places:
            is_vllm = config.backend == "vllm_local"
            if is_vllm and world_size > 1:  # it uses the GPUs of its actor; by default it would start an actor for each
                options = replace(options, args={"distributed_executor_backend": "mp", **options.args})
            calls = {"max_concurrency": config.pool.max_in_flight + _NUM_CONTROL_CALLS}

            def make(index: int) -> RayEngine:
                return RayEngine(config.backend, options, calls | places[index])

            engines = [make(index) for index in range(config.num_engines)]
            transfer = options.args.get("transfer", "auto") if is_vllm else "shm"
            sender = WeightSender(transfer, address=cluster.import_ray().util.get_node_ip_address(), keeps=True)

            pool = EnginePool(engines, make=make, policy=config.pool, send=sender.send)
            try:
                await pool.start()
                yield pool
            finally:
                await pool.close()
                sender.close()


class RayEngine(Engine):
    """An engine in a Ray actor; implements `agentenv.core.engine.Engine`. Ray must be running, see `ray_session`.

    Args:
        backend: name of the engine.
        options: the engine's.
        actor: options of the actor: `num_cpus`, `num_gpus`, `resources`, `scheduling_strategy`, `max_concurrency` …
    """

    constraint_problem = "RayEngine has not started"

    def __init__(self, backend: EngineBackend, options: EngineOptions, actor: Mapping[str, Any]) -> None:
        self._made_of, self._actor_options, self._actor = (backend, options), dict(actor), None
        self.pid = 0
        """Process id of the actor on its machine."""
        self._place = ""

    async def start(self) -> None:
        """Place the actor and load the model in it."""
        ray = cluster.import_ray()
        # Ray's own restarts would bring an actor back without its engine; the pool makes a whole new one.
        cls = ray.remote(EngineActor).options(max_restarts=0, max_task_retries=0, **self._actor_options)
        self._actor = cls.remote(*self._made_of)
        self.pid, self.policy_version, version, *where = await self._ask("start")
        cluster.check_node("--engine ray", version)
        self._place, self.devices, self.constraint_problem = where
        self.node = await self._ask("node")

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`. Cancelling it cancels it in the actor."""
        completion: Completion = await self._ask("generate", array("i", prompt_token_ids), sampling, request_id)
        return completion

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after those before it; see `Engine`."""
        return list(await self._ask("score", array("i", token_ids)))

    async def pause(self) -> None:
        """Call the engine's method in the actor."""
        await self._ask("call", "pause")

    async def resume(self) -> None:
        """Call the engine's method in the actor."""
        await self._ask("call", "resume")

    async def sleep(self) -> None:
        """Call the engine's method in the actor."""
        await self._ask("call", "sleep")

    async def wake_up(self) -> None:
        """Call the engine's method in the actor."""
        await self._ask("call", "wake_up")

    async def join_transfer(self, backend: str, info: Mapping[str, Any]) -> None:
        """Call the engine's method in the actor."""
        await self._ask("call", "join_transfer", backend, dict(info))

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Replace all weights through shared memory; see `agentenv.engines.weights`."""
        shared = await asyncio.to_thread(share_weights, named_tensors)
        try:
            await self.load_offer(shared, policy_version)
        finally:
            shared.close()

    async def load_offer(self, offer: SharedWeights | Offer, policy_version: int) -> None:
        """Load weights that a `WeightSender` offers."""
        if isinstance(offer, Offer):
            await self._ask("load_offer", offer, None, policy_version)
        elif offer.file.place == self._place:
            await self._ask("load_offer", offer.file, None, policy_version)
        else:
            if offer.elsewhere is None:  # Ray's reference to the bytes, which are put into the object store once
                import numpy as np

                content = np.asarray(np.memmap(offer.file.path, dtype=np.uint8, mode="r"))  # Ray stores no memmaps
                offer.elsewhere = asyncio.ensure_future(asyncio.to_thread(cluster.import_ray().put, content))
            await self._ask("load_offer", offer.file, await asyncio.shield(offer.elsewhere), policy_version)
        self.policy_version = policy_version

    async def close(self) -> None:
        """Close the engine if it answers, then end the actor's process."""
        actor = self._actor
        if actor is None:
            return
        try:
            with contextlib.suppress(AgentEnvError, TimeoutError):
                await asyncio.wait_for(self._ask("close"), _CLOSE_TIMEOUT_S)
        finally:
            self._actor = None
            cluster.kill_actor(actor)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the actor; raise Ray's errors as EngineError or EngineDead."""
        if self._actor is None:
            raise EngineDead("RayEngine: expected a started engine, got none or a closed one. Make a new one.")
        return await cluster.call_actor(
            "RayEngine", "--engine ray", self._actor, method, *args, failed=EngineError, died=EngineDead
        )


class EngineActor:
    """The actor's side: creates the engine and forwards calls to it. Its methods run on one event loop."""

    def __init__(self, backend: EngineBackend, options: EngineOptions) -> None:
        self._made_of = (backend, options)
        self._engine: Any = None

    async def start(self) -> tuple[int, int, str, str, tuple[str, ...], str]:
        """Load the model; return process id, policy version, agentenv's version, `here()`, the workers' devices and the
        engine's `constraint_problem`.
        """
        from agentenv.engines.factory import make_engine

        cluster.restore_sigchld()
        self._engine = make_engine(*self._made_of)
        await self._engine.start()
        version, devices = self._engine.policy_version, self._engine.devices
        return os.getpid(), version, __version__, here(), devices, self._engine.constraint_problem

    async def node(self) -> str:
        """Return the address and id of the node on which this actor runs."""
        ray = cluster.import_ray()
        return f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"

    async def generate(self, prompt: array[int], sampling: SamplingParams, request_id: str) -> Completion:
        """Sample one action."""
        with _engine_death(), checked_errors("generate"):
            completion: Completion = await self._engine.generate(prompt.tolist(), sampling, request_id=request_id)
        return completion

    async def score(self, token_ids: array[int]) -> array[float]:
        """Return [T] log-probabilities, NaN for the first."""
        with _engine_death(), checked_errors("score"):
            return array("d", await self._engine.score(token_ids.tolist()))

    async def call(self, method: str, *args: Any) -> None:
        """Call a method of the engine that returns nothing."""
        with _engine_death():
            await getattr(self._engine, method)(*args)

    async def load_offer(
        self, offer: WeightFile | Offer, content: np.ndarray[Any, Any] | None, policy_version: int
    ) -> None:
        """Load offered weights; `content` is the content of the file if it is on another machine."""
        copied = None
        if content is not None and isinstance(offer, WeightFile):
            copied = await asyncio.to_thread(share_bytes, offer, content.data)
            offer = copied.file
        try:
            with _engine_death():
                await self._engine.load_offer(offer, policy_version)
        finally:
            if copied is not None:
                copied.close()

    async def close(self) -> None:
        """Close the engine; the caller ends the process."""
        await self._engine.close()


@contextmanager
def _engine_death() -> Iterator[None]:
    """Raise EngineDead if vLLM's process died under a live actor, because Ray does not transfer causes of errors."""
    try:
        yield
    except EngineError as error:
        if type(error.__cause__).__name__ == "EngineDeadError":
            raise EngineDead(str(error)) from None
        raise
