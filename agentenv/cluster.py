"""A running Ray and room on it: `ray_session` starts or finds one, `reserve` holds places for actors.

Nothing of Ray is written to stdout, and only what was started here is shut down.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentenv import __version__
from agentenv.errors import ConfigError
from agentenv.ray_import import import_ray

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_LOCAL_STORE_BYTES = 256 << 20
"""Ray's object store on this machine; completions are small and go past it."""
_CONNECT_TIMEOUT_S = 10.0
_CLIENT_ATTEMPTS = 3
_OWN = "agentenv_own"
"""Resource that marks a Ray which was started here: it never grows."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_LOGS = "The logs of actors are on their nodes, in /tmp/ray/session_latest/logs."
_TOKEN = (
    "Where it asks for a token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token; where not: "
    "RAY_AUTH_MODE=disabled."
)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Which Ray, and how actors are placed on it."""

    address: str | None = None
    """None: RAY_ADDRESS where it is set, else a Ray of our own on this machine; "auto", HOST:6379, "ray://HOST:10001"."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's own: `working_dir`, `py_modules`, `pip`, `env_vars`."""
    placement: Placement = "PACK"
    """Ray's strategy for the actors of one kind: on few nodes, or spread over them."""
    wait_s: float = 60.0
    """Longest wait for room; a cluster that grows on demand needs minutes."""
    cpus: float = 0.0
    """CPU cores of all actors together; a Ray of our own says that it has as many."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if not self.wait_s >= 0:
            raise ConfigError(f"--ray_wait_s: expected seconds >= 0, got {self.wait_s!r}. Change the value.")


@contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """A running Ray: the one that is there already, else the one at the address, else one of our own, ended after.

    Raises:
        MissingDependency: Ray is not installed.
        ConfigError: nothing answers at the address, or it wants a token.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": _env(config)}
    if address == "local":
        options |= {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(config.cpus)),
            "resources": {_OWN: 1},
            "include_dashboard": False,
            "object_store_memory": _LOCAL_STORE_BYTES,
            # vLLM's processes end with their actor, however that ends.
            "_system_config": {"kill_child_processes_on_worker_exit_with_raylet_subreaper": True},
        }
    try:
        _knock(address)
        with _own_sigterm(), _own_children(), _token_mode(address):
            _init(ray, address, options)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"--ray_address: expected a Ray cluster at {address!r}, got {type(error).__name__}: {_first_line(error)} "
            f"Start one (ray start --head), or leave the flag out for one of our own. {_TOKEN}"
        ) from error
    _keep_stdout_clean()
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Need:
    """What actors of one kind ask for."""

    flags: str
    """That say so, for messages."""
    num: int
    cpus: float
    gpus: float = 0.0

    @property
    def bundle(self) -> dict[str, float]:
        """Of one actor, in Ray's words."""
        return {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value > 0}


@asynccontextmanager
async def reserve(need: Need, config: ClusterConfig) -> AsyncIterator[list[dict[str, Any]]]:
    """Options for the actors, one dict each, with room for all of them held until the end.

    What is held stays an actor's place when the actor dies, and moves where its node is lost.

    Raises:
        ConfigError: the cluster has no room within `wait_s`; a Ray of our own is asked only once.
    """
    ray = import_ray()
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    each = {"num_cpus": need.cpus, "num_gpus": need.gpus}
    if not need.bundle:
        yield [dict(each) for _ in range(need.num)]
        return
    there = ray.cluster_resources()
    if _OWN in there and any(there.get(name, 0.0) < value * need.num for name, value in need.bundle.items()):
        raise _no_room(need, 0.0)
    group = placement_group([need.bundle] * need.num, strategy=config.placement)
    try:
        await _room(group, need, config.wait_s)
        yield [
            each | {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)} for index in range(need.num)
        ]
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            remove_placement_group(group)


async def _room(group: Any, need: Need, wait_s: float) -> None:
    """Wait until the group is placed; in short looks, so that a cancellation is heard."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while not await asyncio.to_thread(group.wait, 0.5):
        if asyncio.get_running_loop().time() >= deadline:
            raise _no_room(need, wait_s)


def _no_room(need: Need, wait_s: float) -> ConfigError:
    ray = import_ray()
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node.get("Alive")]
    largest = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)), default={})
    waited = f" within {wait_s:g} s" if wait_s else ""
    return ConfigError(
        f"{need.flags}: expected room for {need.num} times {_said(need.bundle)} on the cluster{waited}, got "
        f"{len(nodes)} nodes with {_said(ray.cluster_resources())} together, {_said(ray.available_resources())} of it "
        f"free, the largest with {_said(largest)}. Ask for less, or raise --ray_wait_s where the cluster grows."
    )


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in ("CPU", "GPU"))


def _init(ray: Any, address: str, options: Mapping[str, Any]) -> None:
    """Connect; a few times where a busy head node's client server is not up when it has to be.

    Raises:
        ConnectionAbortedError: each time, for what its last line says.
    """
    for attempt in range(_CLIENT_ATTEMPTS):
        try:
            ray.init(address=address, **options)
            return
        except ConnectionAbortedError as error:
            if attempt + 1 == _CLIENT_ATTEMPTS:
                # The first line only says that the server's traceback follows.
                raise ConnectionAbortedError(str(error).strip().rpartition("\n")[2]) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


async def answer_of(ref: Any) -> Any:
    """What a call of an actor gives; cancelling this cancels the call.

    Raises:
        ray.exceptions.RayError: the actor failed or is gone.
    """
    # Ray's client complains on stderr about a future that was cancelled: it is only left alone.
    answer = asyncio.wrap_future(ref.future())
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        answer.add_done_callback(_forget)
        import_ray().cancel(ref)
        raise


def _forget(answer: asyncio.Future[Any]) -> None:
    # Of a call that was given up nobody asks for the exception, which asyncio would complain about.
    if not answer.cancelled():
        answer.exception()


def death_said(error: Exception) -> str:
    """What Ray says of an actor's death, and where more is found."""
    return f"{type(error).__name__}: {_first_line(error).rstrip('.')}. {_LOGS}"


def check_node(flag: str, version: str) -> None:
    """Refuse a node with another agentenv than this one.

    Raises:
        ConfigError: with the versions.
    """
    if version != __version__:
        raise ConfigError(f"{flag}: expected agentenv {__version__} on every node, got {version}. Install the same.")


def without_package(flag: str, error: Exception) -> ConfigError | None:
    """The error of an actor on whose node agentenv is not installed; None for any other."""
    said = str(error)
    if "ModuleNotFoundError" not in said or "agentenv" not in said:
        return None
    return ConfigError(
        f"{flag}: expected agentenv {__version__} on every node, got one without it. "
        f"Install it there: pip install 'agentenv[ray]=={__version__}'"
    )


def _knock(address: str) -> None:
    """Fail at once where nothing listens; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


@contextmanager
def _token_mode(address: str) -> Iterator[None]:
    """Show a cluster our token where we have one, as Ray does by itself for "auto" and its own command line only."""
    if address == "local" or os.environ.get("RAY_AUTH_MODE"):
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # before 2.60 tokens are off unless asked for
        yield
        return
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        yield
    finally:
        os.environ.pop("RAY_AUTH_MODE", None)


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


@contextmanager
def _own_children() -> Iterator[None]:
    """A Ray of our own would have this process adopt the orphans of its actors, which is the raylet's work."""
    if sys.platform != "linux":
        yield
        return
    prctl, adopts = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, adopts.value, 0, 0, 0)
        hear_of_children()


def hear_of_children() -> None:
    """Undo what our own Ray does to its processes, this one too: SIGCHLD ignored, every exit code reads 0.

    Actors call it as well. It goes through the C library since Python sets handlers in its main thread only.
    """
    signal_ = ctypes.CDLL(None).signal
    signal_.argtypes, signal_.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    ignored, default = 1, None
    if (before := signal_(signal.SIGCHLD, default)) not in (ignored, default):
        signal_(signal.SIGCHLD, before)


def _keep_stdout_clean() -> None:
    """Ray prints the death of a worker on stdout even where it was told not to log to the driver."""
    from ray._private import worker

    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


def _env(config: ClusterConfig) -> dict[str, Any]:
    """Actors find this package as this process did; an installed one is expected on every node, like Ray itself."""
    given = dict(config.runtime_env)
    root = Path(__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return given
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys([str(root), *filter(None, known)]))
    return given | {"env_vars": {"PYTHONPATH": path} | given.get("env_vars", {})}
