"""Engines in Ray actors: `open_pool` starts N of them, here or on a cluster, as one engine that outlives their deaths.

What runs inside an actor is HFEngine or VLLMEngine as ever; only token ids and completions travel. Nothing of Ray is
written to stdout, and only what was started here is shut down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentenv import __version__
from agentenv.agent import Tokenizer
from agentenv.engines.pool import EngineDead, EnginePool, PoolPolicy
from agentenv.errors import AgentEnvError, ConfigError, EngineError, MissingDependency
from agentenv.types import Completion, SamplingParams

EngineBackend = Literal["hf", "vllm_local"]

_LOCAL_STORE_BYTES = 256 << 20
"""Ray's object store on this machine; completions are small and go past it."""
_CLOSE_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 10.0
_NUM_CONTROL_CALLS = 16
"""Calls that an actor takes at once besides its requests: pause, weights, close."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Where the actors run and what each gets."""

    num_engines: int = 1
    backend: EngineBackend = "hf"
    """What runs inside each actor."""
    address: str | None = None
    """None: RAY_ADDRESS where it is set, else a Ray of our own on this machine; "auto", "ray://HOST:10001", …"""
    cpus: float = 1.0
    """CPU cores of each engine."""
    gpus: float | None = None
    """GPUs of each engine; None: as many as it computes on where the cluster has them, else 0."""
    pool: PoolPolicy = field(default_factory=PoolPolicy)

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

    Raises:
        MissingDependency: Ray is not installed, here or on a node what runs inside an actor.
        ConfigError: no cluster is at the address, this machine lacks the resources, or an engine refuses its arguments.
        EngineError: an engine could not start.
    """
    with ray_session(config):
        options = _actor_options(spec, config)

        def make(_index: int) -> RayEngine:
            """One more engine of the same kind."""
            return RayEngine(spec, options)

        pool = EnginePool([make(index) for index in range(config.num_engines)], make=make, policy=config.pool)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()


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

    async def start(self) -> None:
        """Place the actor and load the model in it."""
        ray = _ray()
        # Ray's own restarts would bring an actor back without its engine; the pool makes a whole new one.
        cls = ray.remote(EngineActor).options(max_restarts=0, max_task_retries=0, **self._options)
        self._actor = cls.remote(self._spec)
        self.pid, self.policy_version, version = await self._ask("start")
        if version != __version__:
            raise ConfigError(
                f"--engine ray: expected agentenv {__version__} on every node, got {version}. Install the same there."
            )

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

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """See the engine's own; the tensors travel through Ray's object store, once per engine."""
        tensors = [(name, tensor.detach().cpu()) for name, tensor in named_tensors]
        await self._ask("update_weights", tensors, policy_version)
        self.policy_version = policy_version

    async def close(self) -> None:
        """Close the engine where it still answers, then end the actor's process."""
        actor, ray = self._actor, _ray()
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
        ray = _ray()
        if self._actor is None:
            raise EngineDead("RayEngine: expected a started engine, got none or a closed one. Make a new one.")
        try:
            answer = getattr(self._actor, method).remote(*args)
            try:
                return await answer
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
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

    async def start(self) -> tuple[int, int, str]:
        """Load the model; process id, policy version, and the version of agentenv."""
        from agentenv.engines import make_engine

        spec = self._spec
        self._engine = make_engine(
            spec.backend, spec.model, spec.tokenizer, device=spec.device, dtype=spec.dtype, args=dict(spec.args)
        )
        if hasattr(self._engine, "start"):
            await self._engine.start()
        return os.getpid(), self._engine.policy_version, __version__

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

    async def update_weights(self, named_tensors: list[tuple[str, Any]], policy_version: int) -> None:
        """Pass it on."""
        with _death_told():
            await self._engine.update_weights(named_tensors, policy_version)

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
    first = str(error).strip().partition("\n")[0]
    said = str(error)
    if "ModuleNotFoundError" in said and "agentenv" in said:
        return ConfigError(
            f"--engine ray: expected agentenv {__version__} on every node, got one without it. "
            f"Install it there: pip install 'agentenv[ray]=={__version__}'"
        )
    return EngineDead(f"RayEngine.{method}: expected a living actor, got {type(error).__name__}: {first}")


@contextmanager
def ray_session(config: RayConfig) -> Iterator[None]:
    """A running Ray: the one that is there already, else the one at the address, else one of our own, ended after.

    Raises:
        MissingDependency: Ray is not installed.
        ConfigError: nothing answers at the address.
    """
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": _runtime_env()}
    if address == "local":
        options |= {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(config.num_engines * config.cpus)),
            "include_dashboard": False,
            "object_store_memory": _LOCAL_STORE_BYTES,
            # vLLM's processes end with their actor, however that ends.
            "_system_config": {"kill_child_processes_on_worker_exit_with_raylet_subreaper": True},
        }
    try:
        _knock(address)
        with _own_sigterm():
            ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--ray_address: expected a Ray cluster at {address!r}, got {type(error).__name__}: {first} "
            "Start one (ray start --head), or leave the flag out for one of our own."
        ) from error
    _keep_stdout_clean()
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Fail at once where nothing listens; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray sets its own handler, which ends the process at once; ours stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _keep_stdout_clean() -> None:
    """Ray prints the death of a worker on stdout even where it was told not to log to the driver."""
    from ray._private import worker

    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


def _runtime_env() -> dict[str, Any]:
    """Actors find this package as this process did; an installed one is expected on every node, like Ray itself."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(root), *filter(None, known)]))}}


def _actor_options(spec: ActorSpec, config: RayConfig) -> dict[str, Any]:
    """Resources of one actor, where they can be had."""
    ray = _ray()
    there = ray.cluster_resources()
    wanted, gpus = config.num_engines, config.gpus
    if gpus is None:
        each = int(spec.args.get("tensor_parallel_size", 1)) if spec.device != "cpu" else 0
        gpus = float(each) if there.get("GPU", 0.0) >= each * wanted else 0.0
    elif len(ray.nodes()) == 1 and there.get("GPU", 0.0) < gpus * wanted:
        raise ConfigError(
            f"--engine_gpus: expected {gpus * wanted:g} GPUs for {wanted} engines, got {there.get('GPU', 0.0):g}. "
            "Use fewer engines, or a share of a GPU each."
        )
    return {
        "num_cpus": config.cpus,
        "num_gpus": gpus,
        "max_concurrency": config.pool.max_in_flight + _NUM_CONTROL_CALLS,
    }


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingDependency(
            f"--engine ray: expected Ray, got {error}. Install it: pip install 'agentenv[ray]'"
        ) from error
    return ray
