"""`agentenv sandbox serve`: the sandbox over HTTP, for clients of SandboxFusion and for `FusionSandbox`.

Exit codes: 0 stopped by Ctrl-C or SIGTERM; 2 usage error, no isolation, or a public address without a token; 3 it
cannot listen.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from agentenv._util.http.responses import require_server
from agentenv.cli.flags import parse
from agentenv.errors import ConfigError
from agentenv.runs.shutdown import stop_event
from agentenv.sandbox.types import Isolation, Policy

if TYPE_CHECKING:
    from agentenv.sandbox.fusion.server import FusionServeOptions

TOKEN_VARIABLE = "AGENTENV_SANDBOX_TOKEN"


@dataclass(frozen=True)
class SandboxServeConfig:
    """Serve the sandbox over SandboxFusion's HTTP API, for the clients of verl, ROLL, SkyRL and agentenv."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs a token, in AGENTENV_SANDBOX_TOKEN or --token_file."""
    port: int = 8080
    """Port; 0 chooses a free one."""
    token_file: str | None = None
    """File with the token that clients must send, as a bearer token or as the password in the address."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names of this server, such as node7 or node7:80; * permits any. Needed with --host 0.0.0.0."""
    isolation: Literal["namespaces", "landlock", "uid"] | None = None
    """Use exactly this level; default: the strongest that works here, at least landlock."""
    preimport: tuple[str, ...] = ()
    """Packages of this environment that programs may import, such as numpy; pytest also enables the language pytest."""
    policy: Policy = "pure"
    """Policy of Python programs: one process (pure), or several (proc). Bash programs may always start processes."""
    run_slots: int | None = None
    """Number of concurrent programs; default: the number of cores."""
    max_waiting: int = 1024
    """Size of the queue; further requests are answered with 429 and Retry-After."""
    max_queue_s: float = 120.0
    """Longest wait in the queue, in seconds; then a request is answered with 504."""
    max_run_timeout: float = 120.0
    """Largest CPU time of a program, in seconds; the limit of wall time is twice that."""
    max_memory_mb: int = 1024
    """Largest memory of a program, in MiB, and the default of requests without a limit."""
    max_body_mb: int = 8
    """Largest request, in MiB."""
    grace_s: float = 10.0
    """Time that running programs have after the server is stopped, in seconds."""


def serve(args: Sequence[str]) -> int:
    """Serve until a signal; a second signal ends the running programs."""
    config = parse(SandboxServeConfig, "sandbox serve", args)
    options = _options(config)
    try:
        asyncio.run(_serve(config, options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    return 0


def _options(config: SandboxServeConfig) -> FusionServeOptions:
    """Return the server's options from the flags.

    Raises:
        ConfigError: a flag has an invalid value.
        MissingDependency: a package of the server is not installed.
    """
    from agentenv._util.http.access import AccessPolicy, read_token
    from agentenv.sandbox.fusion.run_code import MAX_LIMITS
    from agentenv.sandbox.fusion.server import FusionServeOptions

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
    return FusionServeOptions(
        access=AccessPolicy(
            config.host, read_token(config.token_file, TOKEN_VARIABLE), config.allowed_hosts, variable=TOKEN_VARIABLE
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


async def _serve(config: SandboxServeConfig, options: FusionServeOptions) -> None:
    from agentenv.sandbox import LocalSandbox
    from agentenv.sandbox.fusion.server import FusionServer

    isolation = Isolation(config.isolation) if config.isolation else None
    local = LocalSandbox(isolation=isolation, preimport=config.preimport, run_slots=config.run_slots)
    async with local, FusionServer(local, options) as server:
        stopped = stop_event()
        sys.stdout.write(f"serving {server.url}, isolation {local.isolation}, {local.run_slots} at a time\n")
        sys.stdout.flush()
        await stopped.wait()
        running = f"{server.running} program{' still runs' if server.running == 1 else 's still run'}"
        sys.stderr.write(f"agentenv: stopping; {running}. Press Ctrl-C again to end running programs.\n")
        await server.close()
