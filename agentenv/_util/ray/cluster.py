"""Ray clusters: `ray_session` connects to one or starts one, `reserve` reserves resources for actors.

Nothing of Ray is written to stdout, and only a cluster that was started here is shut down.
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
from traceback import walk_tb
from typing import Any, Literal

from agentenv._util.calls import retrieve_exception
from agentenv._util.paths import PACKAGE
from agentenv._util.version import __version__
from agentenv.errors import AgentEnvError, ConfigError, MissingDependency

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_LOCAL_STORE_BYTES = 256 << 20
"""Size of a local cluster's object store; completions are small and bypass it."""
_CONNECT_TIMEOUT_S = 10.0
_CLIENT_ATTEMPTS = 3
_OWN = "agentenv_own"
"""Resource that marks a cluster that was started here, which never grows."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_LOGS = "The logs of actors are on their nodes, in /tmp/ray/session_latest/logs."
_TOKEN = (
    "If it asks for a token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token; if not: "
    "RAY_AUTH_MODE=disabled."
)


def import_ray(who: str = "--engine ray, --env_actors") -> Any:
    """Return the module `ray`, which `who` needs.

    Raises:
        MissingDependency: Ray is not installed.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        message = f"{who}: expected Ray, got {error}. Install it: pip install 'agentenv-rl[ray]'"
        raise MissingDependency(message) from error
    return ray


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The Ray cluster, and the placement of actors on it."""

    address: str | None = None
    """"auto", HOST:6379 or "ray://HOST:10001"; None uses RAY_ADDRESS if set, else starts a cluster on this machine."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment: `working_dir`, `py_modules`, `pip`, `env_vars`."""
    placement: Placement = "PACK"
    """Ray's placement strategy for the actors of one kind: on few nodes, or spread over them."""
    wait_s: float = 60.0
    """Longest wait for resources; a cluster that grows on demand needs minutes."""
    cpus: float = 0.0
    """CPU cores of all actors together; a cluster started here offers at least as many."""

    def __post_init__(self) -> None:
        if not self.wait_s >= 0:
            raise ConfigError(f"--ray_wait_s: expected seconds >= 0, got {self.wait_s!r}.")


@contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """Connect this process to Ray: keep its connection, else use the address, else start a cluster and end it after.

    Raises:
        MissingDependency: Ray is not installed.
        ConfigError: nothing answers at the address, or it needs a token.
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
            # vLLM's processes end with their actor, even if that is killed. Actors have the priority of this process:
            # with Ray's own niceness of 15, environments that compute here leave an engine 3 % of a core.
            "_system_config": {"kill_child_processes_on_worker_exit_with_raylet_subreaper": True, "worker_niceness": 0},
        }
    try:
        # Fail at once if nothing listens at the address; Ray itself tries for minutes.
        host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
        if host and port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        with _own_sigterm(), _own_children(), _token_mode(address):
            _init(ray, address, options)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"--ray_address: expected a Ray cluster at {address!r}, got {type(error).__name__}: {_first_line(error)} "
            f"Start one (ray start --head), or omit the flag to start a local one. {_TOKEN}"
        ) from error
    # Ray prints worker deaths to stdout, which `log_to_driver` does not cover.
    from ray._private import worker

    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class ActorDemand:
    """The resources that actors of one kind need."""

    flags: str
    """Flags that set them, for messages."""
    num: int
    cpus: float
    gpus: float = 0.0

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one actor, by Ray's names."""
        return {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value > 0}


@asynccontextmanager
async def reserve(need: ActorDemand, config: ClusterConfig) -> AsyncIterator[list[dict[str, Any]]]:
    """Reserve resources for all actors until the end, and return one dict of options for each actor.

    The reservation outlasts the death of an actor, and moves to another node if its node is lost.

    Raises:
        ConfigError: the resources are not free within `wait_s`; a cluster that was started here is checked only once.
    """
    ray = import_ray()
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    each = {"num_cpus": need.cpus, "num_gpus": need.gpus}
    if not need.bundle:
        yield [dict(each) for _ in range(need.num)]
        return
    total = ray.cluster_resources()
    if _OWN in total and any(total.get(name, 0.0) < value * need.num for name, value in need.bundle.items()):
        raise _no_room(need, 0.0)
    group = placement_group([need.bundle] * need.num, strategy=config.placement)
    try:
        deadline = asyncio.get_running_loop().time() + config.wait_s
        while not await asyncio.to_thread(group.wait, 0.5):  # short waits, so that a cancellation takes effect
            if asyncio.get_running_loop().time() >= deadline:
                raise _no_room(need, config.wait_s)
        yield [
            each | {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)} for index in range(need.num)
        ]
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            remove_placement_group(group)


def _no_room(need: ActorDemand, wait_s: float) -> ConfigError:
    ray = import_ray()
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node.get("Alive")]
    largest = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)), default={})
    waited = f" within {wait_s:g} s" if wait_s else ""
    total, free = _resource_text(ray.cluster_resources()), _resource_text(ray.available_resources())
    return ConfigError(
        f"{need.flags}: expected room for {need.num} times {_resource_text(need.bundle)} on the cluster{waited}, got "
        f"{len(nodes)} nodes with {total} together, {free} of it free, the largest with {_resource_text(largest)}. "
        "Ask for less, or raise --ray_wait_s if the cluster grows on demand."
    )


def _resource_text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in ("CPU", "GPU"))


def _init(ray: Any, address: str, options: Mapping[str, Any]) -> None:
    """Connect, with a few attempts: on a busy machine a client server or a local node may start late.

    Raises:
        ConnectionAbortedError: every attempt failed; with the last line of Ray's message.
    """
    for attempt in range(_CLIENT_ATTEMPTS):
        try:
            ray.init(address=address, **options)
            return
        except ConnectionAbortedError as error:
            if attempt + 1 == _CLIENT_ATTEMPTS:
                # The first line only says that the server's traceback follows.
                raise ConnectionAbortedError(str(error).strip().rpartition("\n")[2]) from error
        except Exception as error:
            # Ray waits 30 s for a node that it starts, and has no type for this error.
            if type(error) is not Exception or "timed out during startup" not in str(error):
                raise
            for frame, _ in walk_tb(error.__traceback__):  # only the node's constructor, which raised it, knows these
                end = getattr(frame.f_locals.get("self"), "kill_all_processes", None)
                if end is not None:
                    end(check_alive=False, allow_graceful=False)
            if attempt + 1 < _CLIENT_ATTEMPTS:
                continue
            raise ConnectionAbortedError(str(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


async def call_result(ref: Any) -> Any:
    """Return the result of an actor's call; cancelling this cancels the call.

    Raises:
        ray.exceptions.RayError: the actor failed or died.
    """
    # Ray's client complains on stderr about a cancelled future, so the future is shielded.
    answer = asyncio.wrap_future(ref.future())
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        answer.add_done_callback(retrieve_exception)
        import_ray().cancel(ref)
        raise


async def call_actor(
    who: str, flag: str, actor: Any, method: str, *args: Any, failed: type[AgentEnvError], died: type[AgentEnvError]
) -> Any:
    """Return the result of an actor's method.

    Args:
        who: name of the caller, for messages.
        flag: what the user asked for, for the message about a node without agentenv.
        actor: Ray's handle.
        method: name of the method.
        args: its arguments.
        failed: class of the error if the method raised, or was cancelled.
        died: class of the error if the actor is gone.

    Raises:
        AgentEnvError: the method's own, or one of these classes; ConfigError if the node lacks agentenv.
    """
    ray, where = import_ray(), f"{who}.{method}"
    try:
        return await call_result(getattr(actor, method).remote(*args))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AgentEnvError):
            raise error.cause from None
        raise failed(f"{where}: expected an answer, got {type(error.cause).__name__}: {error.cause}. Retry.") from error
    except ray.exceptions.TaskCancelledError as error:
        raise failed(f"{where}: expected an answer, got a cancelled call. Retry.") from error
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise actor_death(where, flag, error, died) from error


def actor_death(where: str, flag: str, error: Exception, died: type[AgentEnvError]) -> AgentEnvError:
    """Return the error to raise for Ray's `error` about an actor; see `call_actor`."""
    absent = missing_package_error(flag, error)
    return absent or died(f"{where}: expected a living actor, got {describe_death(error)}")


def kill_actor(actor: Any, *, restart: bool = False) -> None:
    """End an actor's process, which Ray starts again with `restart`; do nothing if it, or the cluster, is gone."""
    ray = import_ray()
    with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
        ray.kill(actor, no_restart=not restart)


def describe_death(error: Exception) -> str:
    """Return Ray's message about an actor's death, and the location of the logs."""
    return f"{type(error).__name__}: {_first_line(error).rstrip('.')}. {_LOGS}"


def check_node(flag: str, version: str) -> None:
    """Raise ConfigError if a node has another version of agentenv than this one."""
    if version != __version__:
        raise ConfigError(f"{flag}: expected agentenv {__version__} on every node, got {version}. Install the same.")


def missing_package_error(flag: str, error: Exception) -> ConfigError | None:
    """Return the error to raise if `error` means that an actor's node lacks agentenv, else None."""
    text = str(error)
    if "ModuleNotFoundError" not in text or "agentenv" not in text:
        return None
    return ConfigError(
        f"{flag}: expected agentenv {__version__} on every node, got one without it. "
        f"Install it there: pip install 'agentenv-rl[ray]=={__version__}'"
    )


@contextmanager
def _token_mode(address: str) -> Iterator[None]:
    """Send the token if there is one, which Ray itself does only for "auto" and its own command line."""
    if address == "local" or os.environ.get("RAY_AUTH_MODE"):
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # before 2.60, tokens are off unless RAY_AUTH_MODE is set
        yield
        return
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        yield
    finally:
        os.environ.pop("RAY_AUTH_MODE", None)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler, since Ray's ends the process at once."""
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
    """Keep this process from adopting the orphans of a local cluster's actors, which is the raylet's job."""
    if sys.platform != "linux":
        yield
        return
    prctl, adopts = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, adopts.value, 0, 0, 0)
        restore_sigchld()


def restore_sigchld() -> None:
    """Restore the handling of SIGCHLD, which a local cluster ignores in its processes: every exit code reads 0 then.

    Actors call it as well. It uses the C library because Python sets signal handlers only in its main thread.
    """
    signal_ = ctypes.CDLL(None).signal
    signal_.argtypes, signal_.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    ignored, default = 1, None
    if (before := signal_(signal.SIGCHLD, default)) not in (ignored, default):
        signal_(signal.SIGCHLD, before)


def _env(config: ClusterConfig) -> dict[str, Any]:
    """Return the runtime environment, with this package's path unless it is installed: then each node must have it."""
    env = dict(config.runtime_env)
    root = PACKAGE.parent
    if root.name in ("site-packages", "dist-packages"):
        return env
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys([str(root), *filter(None, paths)]))
    return env | {"env_vars": {"PYTHONPATH": path} | env.get("env_vars", {})}
