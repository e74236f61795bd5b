"""Engines in Ray actors: `open_pool` starts N of them, here or on a cluster, as one engine that outlives their deaths.

What runs inside an actor is HFEngine or VLLMEngine as ever; only token ids and completions travel.
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

from agentenv import __version__
from agentenv.agent import Tokenizer
from agentenv.cluster import (
    ClusterConfig,
    Need,
    answer_of,
    check_node,
    death_said,
    hear_of_children,
    ray_session,
    reserve,
    without_package,
)
from agentenv.engines._vllm_weights import Offer, Shipment, WeightSender
from agentenv.engines._weights import SharedWeights, WeightFile, here, share_bytes, share_weights
from agentenv.engines.pool import EngineDead, EnginePool, PoolPolicy, can_sleep
from agentenv.errors import AgentEnvError, ConfigError, EngineError
from agentenv.ray_import import import_ray
from agentenv.types import Completion, SamplingParams

if TYPE_CHECKING:
    import numpy as np

EngineBackend = Literal["hf", "vllm_local"]

_CLOSE_TIMEOUT_S = 20.0
_NUM_CONTROL_CALLS = 16
"""Calls that an actor takes at once besides its requests: pause, weights, close."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    """What the actors run, and what each gets of the cluster."""

    num_engines: int = 1
    backend: EngineBackend = "hf"
    """What runs inside each actor."""
    cpus: float = 1.0
    """CPU cores of each engine."""
    gpus: float | None = None
    """GPUs of each engine; None: as many as it computes on where the cluster has any, else 0."""
    pool: PoolPolicy = field(default_factory=PoolPolicy)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.num_engines < 1:
            raise ConfigError(f"--num_engines: expected an integer >= 1, got {self.num_engines!r}. Change the value.")
        if not self.cpus >= 0 or (self.gpus is not None and not self.gpus >= 0):
            raise ConfigError(
                f"--engine_cpus, --engine_gpus: expected numbers >= 0, got {self.cpus!r}, {self.gpus!r}. Change them."
            )


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What an actor needs to make its engine; travels to it."""

    backend: EngineBackend
    model: str
    tokenizer: Tokenizer
    device: str
    dtype: str
    args: Mapping[str, Any]


@asynccontextmanager
async def open_pool(spec: ActorSpec, config: RayConfig) -> AsyncIterator[EnginePool]:
    """A pool of started Ray engines, closed at the end together with the Ray that was started for it.

    New weights reach engines on this machine through shared memory, those on others through Ray's object store, and
    vLLM on GPUs by CUDA IPC or NCCL where `spec.args["transfer"]` (as VLLMEngine's) and the tensors' device allow it.

    Raises:
        MissingDependency: Ray is not installed, here or on a node what runs inside an actor.
        ConfigError: no cluster is at the address, this machine lacks the resources, or an engine refuses its arguments.
        EngineError: an engine could not start.
    """
    cluster = replace(config.cluster, cpus=max(config.cluster.cpus, config.num_engines * config.cpus))
    with ray_session(cluster):
        need = Need("--num_engines, --engine_cpus, --engine_gpus", config.num_engines, config.cpus, _gpus(spec, config))
        async with reserve(need, cluster) as places:
            spec = _computing_here(spec)
            calls = {"max_concurrency": config.pool.max_in_flight + _NUM_CONTROL_CALLS}

            def make(index: int) -> RayEngine:
                """One more engine of the same kind, in the place of that index."""
                return RayEngine(spec, calls | places[index])

            engines = [make(index) for index in range(config.num_engines)]
            transfer = spec.args.get("transfer", "auto") if spec.backend == "vllm_local" else "shm"
            sender = WeightSender(transfer, address=import_ray().util.get_node_ip_address(), keeps=True)

            async def share(named_tensors: Iterable[tuple[str, Any]]) -> Shipment:
                """New weights where all engines find them."""
                return await sender.load(named_tensors, pool.engines)

            pool = EnginePool(engines, make=make, policy=config.pool, share=share)
            try:
                await pool.start()
                yield pool
            finally:
                await pool.close()
                sender.close()


def _gpus(spec: ActorSpec, config: RayConfig) -> float:
    """GPUs of each engine: asked for, or as many as it computes on where the cluster has any."""
    if config.gpus is not None:
        return config.gpus
    if spec.device == "cpu" or not import_ray().cluster_resources().get("GPU", 0.0):
        return 0.0
    return float(_world_size(spec))


def _world_size(spec: ActorSpec) -> int:
    return math.prod(int(spec.args.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline"))


def _computing_here(spec: ActorSpec) -> ActorSpec:
    """Have vLLM compute on the GPUs of its own actor: in a place that Ray holds, it would start an actor for each."""
    if spec.backend != "vllm_local" or _world_size(spec) == 1:
        return spec
    return replace(spec, args={"distributed_executor_backend": "mp", **spec.args})


async def _for_elsewhere(shared: SharedWeights) -> Any:
    """The bytes of shared weights in Ray's object store: put there once, fetched by every machine once."""
    if shared.elsewhere is None:
        import numpy as np

        content = np.asarray(np.memmap(shared.file.path, dtype=np.uint8, mode="r"))  # Ray knows plain ones
        shared.elsewhere = asyncio.ensure_future(asyncio.to_thread(import_ray().put, content))
    return await asyncio.shield(shared.elsewhere)


class RayEngine:
    """An engine in a Ray actor; implements `agentenv.agent.Engine`. Ray must be running, see `ray_session`.

    Args:
        spec: what the actor makes its engine of.
        options: of the actor: `num_cpus`, `num_gpus`, `resources`, `scheduling_strategy`, `max_concurrency` …
    """

    def __init__(self, spec: ActorSpec, options: Mapping[str, Any]) -> None:
        self._spec, self._options, self._actor = spec, dict(options), None
        self.policy_version = 0
        self.pid = 0
        """Of the actor's process, on its machine."""
        self.devices: tuple[str, ...] = ()
        """The GPU of each of vLLM's workers, or "cpu"."""
        self._place = ""

    async def start(self) -> None:
        """Place the actor and load the model in it."""
        ray = import_ray()
        # Ray's own restarts would bring an actor back without its engine; the pool makes a whole new one.
        cls = ray.remote(EngineActor).options(max_restarts=0, max_task_retries=0, **self._options)
        self._actor = cls.remote(self._spec)
        self.pid, self.policy_version, version, *where = await self._ask("start")
        check_node("--engine ray", version)
        self._place, self.devices = where

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.agent.Engine`. Cancelling it cancels it in the actor."""
        completion: Completion = await self._ask("generate", array("i", prompt_token_ids), sampling, request_id)
        return completion

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token after those before it; see `agentenv.engines.Scorer`."""
        return list(await self._ask("score", array("i", token_ids)))

    async def pause(self) -> None:
        """See the engine's own."""
        await self._ask("pause")

    async def resume(self) -> None:
        """See the engine's own."""
        await self._ask("resume")

    async def sleep(self) -> None:
        """See the engine's own."""
        await self._ask("sleep")

    async def wake_up(self) -> None:
        """See the engine's own."""
        await self._ask("wake_up")

    async def join_transfer(self, backend: str, info: Mapping[str, Any]) -> None:
        """See the engine's own."""
        await self._ask("join_transfer", backend, dict(info))

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, Any]] | Shipment | Offer, policy_version: int
    ) -> None:
        """See the engine's own; weights that are in shared memory already are taken from there."""
        given: Any = named_tensors.shared if isinstance(named_tensors, Shipment) else named_tensors
        if not isinstance(given, (SharedWeights, Offer)):
            given = await asyncio.to_thread(share_weights, given)
        if isinstance(given, Offer):
            await self._ask("update_weights", given, None, policy_version)
        else:
            content = None if given.file.place == self._place else await _for_elsewhere(given)
            await self._ask("update_weights", given.file, content, policy_version)
        self.policy_version = policy_version

    async def close(self) -> None:
        """Close the engine where it still answers, then end the actor's process."""
        actor, ray = self._actor, import_ray()
        if actor is None:
            return
        try:
            with contextlib.suppress(AgentEnvError, TimeoutError):
                await asyncio.wait_for(self._ask("close"), _CLOSE_TIMEOUT_S)
        finally:
            self._actor = None
            with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
                ray.kill(actor)

    async def _ask(self, method: str, *args: Any) -> Any:
        """A method of the actor, with Ray's errors as ours."""
        ray = import_ray()
        if self._actor is None:
            raise EngineDead("RayEngine: expected a started engine, got none or a closed one. Make a new one.")
        try:
            return await answer_of(getattr(self._actor, method).remote(*args))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, AgentEnvError):
                raise cause from None
            raise EngineError(
                f"RayEngine.{method}: expected an answer of the actor, got {type(cause).__name__}: {cause}. Retry."
            ) from error
        except ray.exceptions.TaskCancelledError as error:
            raise EngineError(
                f"RayEngine.{method}: expected an answer, got a call that was cancelled. Retry."
            ) from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise _as_death(method, error) from error


class EngineActor:
    """The actor's side: makes an engine of its spec and passes calls on. Its methods run on one event loop."""

    def __init__(self, spec: ActorSpec) -> None:
        self._spec = spec
        self._engine: Any = None

    async def start(self) -> tuple[int, int, str, str, tuple[str, ...]]:
        """Load the model; process id, policy version, agentenv's version, where it runs, and the workers' devices."""
        from agentenv.engines import make_engine

        hear_of_children()
        spec = self._spec
        self._engine = make_engine(
            spec.backend, spec.model, spec.tokenizer, device=spec.device, dtype=spec.dtype, args=dict(spec.args)
        )
        if hasattr(self._engine, "start"):
            await self._engine.start()
        devices = getattr(self._engine, "devices", ("cpu",))
        return os.getpid(), self._engine.policy_version, __version__, here(), devices

    async def generate(self, prompt: array[int], sampling: SamplingParams, request_id: str) -> Completion:
        """One action of the engine."""
        with _death_told():
            completion: Completion = await self._engine.generate(prompt.tolist(), sampling, request_id=request_id)
        return completion

    async def score(self, token_ids: array[int]) -> array[float]:
        """[T] log-probabilities, NaN for the first."""
        with _death_told():
            return array("d", await self._engine.score(token_ids.tolist()))

    async def pause(self) -> None:
        """Pass it on."""
        with _death_told():
            await self._engine.pause()

    async def resume(self) -> None:
        """Pass it on."""
        with _death_told():
            await self._engine.resume()

    async def sleep(self) -> None:
        """Pass it on."""
        with _death_told():
            await can_sleep(self._engine).sleep()

    async def wake_up(self) -> None:
        """Pass it on."""
        with _death_told():
            await can_sleep(self._engine).wake_up()

    async def join_transfer(self, backend: str, info: Mapping[str, Any]) -> None:
        """Pass it on."""
        with _death_told():
            await self._engine.join_transfer(backend, info)

    async def update_weights(
        self, weights: WeightFile | Offer, content: np.ndarray[Any, Any] | None, policy_version: int
    ) -> None:
        """Pass it on; `content` is that of the file, where this machine has no other way to it."""
        copied = None
        if content is not None and isinstance(weights, WeightFile):
            copied = await asyncio.to_thread(share_bytes, weights, content.data)
            weights = copied.file
        try:
            with _death_told():
                await self._engine.update_weights(weights, policy_version)
        finally:
            if copied is not None:
                copied.close()

    async def close(self) -> None:
        """End what the engine holds; the process is ended by the caller."""
        await self._engine.close()


@contextmanager
def _death_told() -> Iterator[None]:
    """Causes do not travel: say in the error's class that vLLM's process under a living actor is gone."""
    try:
        yield
    except EngineError as error:
        if type(error.__cause__).__name__ == "EngineDeadError":
            raise EngineDead(str(error)) from None
        raise


def _as_death(method: str, error: Exception) -> AgentEnvError:
    absent = without_package("--engine ray", error)
    return absent or EngineDead(f"RayEngine.{method}: expected a living actor, got {death_said(error)}")
