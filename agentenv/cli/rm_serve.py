"""`agentenv rm serve`: a reward model over HTTP, for OpenRLHF's `--reward.remote_url` and this library's clients.

Exit codes: 0 stopped by Ctrl-C or SIGTERM; 2 wrong usage, unknown model, port in use, or missing token.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from agentenv._util.http.responses import require_server
from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL
from agentenv.errors import ConfigError
from agentenv.runs.shutdown import interruptible

if TYPE_CHECKING:
    from agentenv.rewards.models.types import RewardScorer
    from agentenv.rewards.serving.server import RewardServer, ServeOptions

TOKEN_VARIABLE = "AGENTENV_RM_TOKEN"


@dataclass(frozen=True)
class ModelFlags:
    """How a reward model reads conversations, and where it runs."""

    rm_args: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of further arguments for the model's constructor."""
    max_length: int | None = None
    """Maximum number of tokens per conversation. Default: the model's limit."""
    overflow: Literal["error", "left", "right"] | None = None
    """Treatment of longer conversations: `error` fails the item, or answers with status 422; `left` and `right` cut the
    beginning or the end. Default: error."""
    device: str | None = None
    """Torch device, such as cuda:0."""
    dtype: str | None = None
    """Dtype of the weights. Default: float32 on a CPU, the checkpoint's on a GPU."""
    max_batch: int | None = None
    """Maximum number of conversations per batch of the model."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the constructor: the flags that are given, and those of --rm_args."""
        flags = {name: value for name, value in vars(self).items() if name != "rm_args" and value is not None}
        return flags | dict(self.rm_args)


@dataclass(frozen=True)
class RMServeConfig:
    """Serve a reward model over HTTP in OpenRLHF's format: POST /get_reward, and GET /health and /metrics."""

    rm: Annotated[str, POSITIONAL]
    """Folder or name of a model, or any value of `rm eval --rm` except judges and rewards."""
    model: ModelFlags = field(default_factory=ModelFlags)
    """The model."""
    host: str = "127.0.0.1"
    """Address to listen on. All except the loopback address need a token, in AGENTENV_RM_TOKEN or --token_file."""
    port: int = 5000
    """Port to listen on; 0 takes a free one."""
    token_file: str | None = None
    """File with the token that clients must send, as Bearer or as the password in the address, which OpenRLHF's client
    supports: http://rm:TOKEN@node7:5000/get_reward."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of this server, such as node7 or node7:80; * allows any. Required with --host 0.0.0.0."""
    shift: float = 0.0
    """Added to the model's score; --shift -MEAN --scale 1/STD normalizes as OpenRLHF's models do."""
    scale: float = 1.0
    """Factor applied after --shift."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward."""
    max_waiting: int = 4096
    """Maximum number of conversations waiting for a score; further requests get status 429 with Retry-After."""
    max_items: int | None = None
    """Maximum number of conversations per request; larger ones get 413. Default: 1024, at most --max_waiting."""
    max_body_mb: int = 8
    """Largest request body, in MiB."""
    timeout_s: float = 170.0
    """Time limit per answer, in seconds; after it, the status is 503. OpenRLHF's client waits 180 s."""
    grace_s: float = 30.0
    """Time for conversations in progress after the server is stopped, in seconds."""


def serve(args: Sequence[str]) -> int:
    """Serve until a signal stops it; a second signal cancels conversations in progress."""
    config = parse(RMServeConfig, "rm serve", args)
    from agentenv._util.http.access import AccessPolicy, read_token
    from agentenv.rewards.models.factory import open_scorer
    from agentenv.rewards.serving.server import ServeOptions, Shaping

    require_server("rm serve")
    for name in ("max_waiting", "max_items", "max_body_mb", "timeout_s"):
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            raise ConfigError(f"--{name}: expected a number above 0, got {getattr(config, name)!r}. Raise it.")
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port: expected a port, got {config.port}.")
    options = ServeOptions(
        access=AccessPolicy(
            config.host,
            read_token(config.token_file, TOKEN_VARIABLE),
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
    scorer = open_scorer(config.rm, **config.model.options)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_serve(scorer, options))
    return 0


async def _serve(scorer: RewardScorer, options: ServeOptions) -> None:
    import resource  # missing on some systems

    from agentenv.rewards.serving.server import RewardServer

    with contextlib.suppress(ValueError, OSError):  # each conversation may need its own connection
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    stopped = asyncio.Event()
    server = RewardServer(scorer, options)

    def drain() -> str:
        stopped.set()
        return f"{server.waiting} conversation{'s' * (server.waiting != 1)}"

    try:
        async with server:
            _print(f"serving {server.url}/get_reward, model {options.model}")
            work = asyncio.ensure_future(_serve_until(stopped, server))
            with interruptible(drain, work, options.grace_s, _print, closing_s=15.0):
                await work
    finally:
        await scorer.close()


async def _serve_until(stopped: asyncio.Event, server: RewardServer) -> None:
    """Load the model, serve until the event is set, and close the server.

    Raises:
        AgentEnvError: the model cannot be loaded.
    """
    started = time.monotonic()
    loading = asyncio.ensure_future(server.load())
    stop = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        _print(f"ready after {time.monotonic() - started:.1f} s")
        await stop
    loading.cancel()
    await server.close()


def _print(line: str) -> None:
    sys.stderr.write(f"agentenv rm serve: {line}\n")
    sys.stderr.flush()
