"""`agentenv sandbox serve`: the sandbox over HTTP, for SandboxFusion's clients and ours.

Exit codes: 0 stopped by Ctrl-C or SIGTERM, 2 usage, no isolation or no token where others can ask, 3 it cannot listen.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from agentenv.cli_flags import parse
from agentenv.errors import ConfigError
from agentenv.http_serving import require_server
from agentenv.sandbox.types import Isolation, Policy

if TYPE_CHECKING:
    from agentenv.sandbox.fusion_server import FusionServer, ServeOptions

TOKEN_VARIABLE = "AGENTENV_SANDBOX_TOKEN"


@dataclass(frozen=True)
class SandboxServeConfig:
    """Serve the sandbox over HTTP in SandboxFusion's form, to the clients of verl, ROLL, SkyRL and ours."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but this machine's own needs a token: in AGENTENV_SANDBOX_TOKEN, or --token_file."""
    port: int = 8080
    """Port; 0 takes a free one."""
    token_file: str | None = None
    """File with the token that clients must send, as Bearer or as the password in their address."""
    allowed_hosts: tuple[str, ...] = ()
    """Other names under which it is asked, such as node7 or node7:80; * is any. Needed with --host 0.0.0.0."""
    isolation: Literal["namespaces", "landlock", "uid"] | None = None
    """This level and no other; default: the strongest that works here, at least landlock."""
    preimport: tuple[str, ...] = ()
    """Packages of this environment that programs may import, such as numpy; pytest adds the language pytest."""
    policy: Policy = "pure"
    """Whether Python programs are one process (pure), or may start others (proc); bash may."""
    run_slots: int | None = None
    """Programs at a time; default: as many as there are cores."""
    max_waiting: int = 1024
    """Programs in the queue; one more is answered 429 with Retry-After."""
    max_queue_s: float = 120.0
    """Longest wait in the queue, in seconds; then a request is answered 504."""
    max_run_timeout: float = 120.0
    """Most seconds of CPU that a program gets, whatever it asks for; of wall time twice that."""
    max_memory_mb: int = 1024
    """Most memory that a program gets, in MiB, and what it gets when it asks for none."""
    max_body_mb: int = 8
    """Largest request, in MiB."""
    grace_s: float = 10.0
    """How long programs that run may take, in seconds, once the server is stopped."""


def serve(args: Sequence[str]) -> int:
    """Serve until a signal stops it; the second one ends what still runs."""
    config = parse(SandboxServeConfig, "sandbox serve", args)
    options = _options(config)
    try:
        asyncio.run(_serve(config, options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    return 0


def _options(config: SandboxServeConfig) -> ServeOptions:
    """The flags as the server's options.

    Raises:
        ConfigError: one of them cannot be.
        MissingDependency: what the server needs is not installed.
    """
    from agentenv.http_serving.doors import Doors, token_of
    from agentenv.sandbox._fusion_answers import MAX_LIMITS
    from agentenv.sandbox.fusion_server import ServeOptions

    require_server("sandbox serve")
    for name in ("max_waiting", "max_queue_s", "max_run_timeout", "max_memory_mb", "max_body_mb"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"--{name}: expected a number above 0, got {getattr(config, name)!r}. Raise it.")
    if not 0 <= config.port < 65536 or (config.run_slots is not None and config.run_slots < 1):
        raise ConfigError(
            f"--port, --run_slots: expected a port and 1 or more, got {config.port} and {config.run_slots}."
        )
    seconds = config.max_run_timeout
    caps = replace(MAX_LIMITS, cpu_s=seconds, wall_s=2 * seconds, memory_mb=config.max_memory_mb)
    return ServeOptions(
        doors=Doors(
            config.host, token_of(config.token_file, TOKEN_VARIABLE), config.allowed_hosts, variable=TOKEN_VARIABLE
        ),
        port=config.port,
        caps=caps,
        languages=("python", "bash", *(["pytest"] if "pytest" in config.preimport else [])),
        policy=config.policy,
        max_waiting=config.max_waiting,
        max_queue_s=config.max_queue_s,
        max_body_bytes=config.max_body_mb << 20,
        grace_s=max(config.grace_s, 0.0),
    )


async def _serve(config: SandboxServeConfig, options: ServeOptions) -> None:
    from agentenv.sandbox import LocalSandbox
    from agentenv.sandbox.fusion_server import FusionServer

    isolation = Isolation(config.isolation) if config.isolation else None
    local = LocalSandbox(isolation=isolation, preimport=config.preimport, run_slots=config.run_slots)
    async with local, FusionServer(local, options) as server:
        sys.stdout.write(f"serving {server.url}, isolation {local.isolation}, {local.run_slots} at a time\n")
        sys.stdout.flush()
        await _until_signal(server)


async def _until_signal(server: FusionServer) -> None:
    """Wait for the first signal, and stop; the second one cancels that."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def arrived() -> None:
        """Stop, or stop at once."""
        if stopped.is_set():
            task.cancel()
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, arrived)
    await stopped.wait()
    running = f"{server.running} program{' still runs' if server.running == 1 else 's still run'}"
    sys.stderr.write(f"agentenv: stopping; {running}. Once more ends what runs.\n")
    await server.close()
