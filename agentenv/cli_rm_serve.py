"""`agentenv rm serve`: a reward model over HTTP, for OpenRLHF's `--reward.remote_url` and our own clients.

Exit codes: 0 stopped by Ctrl-C or SIGTERM; 2 usage, no such model, a port that is taken, no token where others can ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from agentenv.cli_flags import parse
from agentenv.errors import ConfigError
from agentenv.http_serving import require_server
from agentenv.signals import interruptible

if TYPE_CHECKING:
    from agentenv.rewards.models.types import Scorer
    from agentenv.rm.serve import RewardServer, ServeOptions

TOKEN_VARIABLE = "AGENTENV_RM_TOKEN"


@dataclass(frozen=True)
class RMServeConfig:
    """Serve a reward model over HTTP in OpenRLHF's form: POST /get_reward, and /health, /metrics."""

    rm: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A folder or name, or what `rm eval --rm` takes but for judges and rewards."""
    rm_args: str = "{}"
    """JSON object of further arguments of its constructor."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but this machine's own needs a token: in AGENTENV_RM_TOKEN, or --token_file."""
    port: int = 5000
    """Port; 0 takes a free one."""
    token_file: str | None = None
    """File with the token that clients must send, as Bearer or as the password in their address, which OpenRLHF's
    client sends too: http://rm:TOKEN@node7:5000/get_reward."""
    allowed_hosts: tuple[str, ...] = ()
    """Other names under which it is asked, such as node7 or node7:80; * is any. Needed with --host 0.0.0.0."""
    max_length: int | None = None
    """Most tokens of a conversation; default: what the model takes."""
    overflow: Literal["error", "left", "right"] | None = None
    """What becomes of longer ones: the request is answered 422, or they are cut at the beginning or the end; default:
    error."""
    device: str | None = None
    """As torch names it."""
    dtype: str | None = None
    """Of the weights; default: float32 on a CPU, the checkpoint's on a GPU."""
    max_batch: int | None = None
    """Most conversations that the model is asked about at once."""
    shift: float = 0.0
    """Added to the model's number; --shift -MEAN --scale 1/STD normalises as OpenRLHF's models do."""
    scale: float = 1.0
    """Multiplied with then."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward."""
    max_waiting: int = 4096
    """Conversations without an answer; one more is answered 429 with Retry-After."""
    max_items: int | None = None
    """Conversations of one request; more are answered 413. Default: 1024, and no more than --max_waiting."""
    max_body_mb: int = 8
    """Largest request, in MiB."""
    timeout_s: float = 170.0
    """Longest time to an answer, in seconds; then it is 503. OpenRLHF's client waits 180 s."""
    grace_s: float = 30.0
    """How long what is being scored may take, in seconds, once the server is stopped."""


def serve(args: Sequence[str]) -> int:
    """Serve until a signal stops it; the second one ends what is still being scored."""
    config = parse(RMServeConfig, "rm serve", args)
    options = _options(config)
    scorer = _scorer(config)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_serve(scorer, options))
    return 0


def _options(config: RMServeConfig) -> ServeOptions:
    """The flags as the server's options.

    Raises:
        ConfigError: one of them cannot be.
        MissingDependency: what the server needs is not installed.
    """
    from agentenv.http_serving.doors import Doors, token_of
    from agentenv.rm.serve import ServeOptions
    from agentenv.rm.serve_wire import Shaping

    require_server("rm serve")
    for name in ("max_waiting", "max_items", "max_body_mb", "timeout_s"):
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            raise ConfigError(f"--{name}: expected a number above 0, got {getattr(config, name)!r}. Raise it.")
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port: expected a port, got {config.port}. Change it.")
    return ServeOptions(
        doors=Doors(
            config.host,
            token_of(config.token_file, TOKEN_VARIABLE),
            config.allowed_hosts,
            without_token=("/health",),
            variable=TOKEN_VARIABLE,
        ),
        port=config.port,
        model=config.rm,
        shaping=Shaping(config.shift, config.scale, config.clip),
        max_waiting=config.max_waiting,
        max_items=min(1024, config.max_waiting) if config.max_items is None else config.max_items,
        max_body_bytes=config.max_body_mb << 20,
        timeout_s=config.timeout_s,
        grace_s=max(config.grace_s, 0.0),
    )


def _scorer(config: RMServeConfig) -> Scorer:
    from agentenv.rewards.models.opening import open_scorer

    try:
        args: Any = json.loads(config.rm_args)
    except ValueError:
        args = None
    if not isinstance(args, dict):
        raise ConfigError(f"--rm_args: expected a JSON object, got {config.rm_args!r}. Write it as '{{\"label\": 0}}'.")
    named = {name: getattr(config, name) for name in ("max_length", "overflow", "device", "dtype", "max_batch")}
    return open_scorer(config.rm, **{name: value for name, value in named.items() if value is not None}, **args)


async def _serve(scorer: Scorer, options: ServeOptions) -> None:
    from agentenv.rm.serve import RewardServer

    _raise_open_files()
    stopped = asyncio.Event()
    server = RewardServer(scorer, options)

    def drain() -> str:
        """Begin to stop; gives what is left."""
        stopped.set()
        return f"{server.waiting} conversation{'s' * (server.waiting != 1)}"

    try:
        async with server:
            _say(f"serving {server.url}/get_reward, model {options.model}")
            work = asyncio.ensure_future(_until(stopped, server))
            with interruptible(drain, work, options.grace_s, _say, closing_s=15.0):
                await work
    finally:
        await scorer.close()


async def _until(stopped: asyncio.Event, server: RewardServer) -> None:
    """Load the model, serve until the event, and end in order.

    Raises:
        AgentEnvError: the model cannot be loaded.
    """
    begun = time.monotonic()
    loading, stop = asyncio.ensure_future(server.load()), asyncio.ensure_future(stopped.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        _say(f"ready after {time.monotonic() - begun:.1f} s")
        await stop
    loading.cancel()
    await server.close()


def _say(line: str) -> None:
    sys.stderr.write(f"agentenv rm serve: {line}\n")
    sys.stderr.flush()


def _raise_open_files() -> None:
    """As many connections as the system lets this process have: every conversation may come on its own."""
    import resource  # not on every system

    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
