"""`agentenv serve`: an environment as a server of OpenEnv, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from agentenv._util.http.responses import UvicornServer
from agentenv._util.plurals import counted
from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL
from agentenv.episode.tasks import TaskSource
from agentenv.errors import ConfigError
from agentenv.runs.config import RunConfig
from agentenv.runs.prepare import load_stepped
from agentenv.runs.shutdown import stop_event

_RUN_FLAGS = ("env", "env_kwargs", "max_length", "max_turns", "step_timeout_s")
_CLOSE_S = 10.0


@dataclass(frozen=True)
class ServeConfig:
    """Serve an environment to the clients of OpenEnv: TRL, ms-swift, SkyRL, Unsloth.

    A client's `reset` takes `index`, the row of a task, and `seed`. An action is `{"message": TEXT}`.
    """

    env: Annotated[str, POSITIONAL]
    """An agent_func.py, or an environment: installed (`agentenv list`), module:Attr, path/file.py[:Attr], KIND:NAME."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of arguments for the environment's constructor."""
    dataset: TaskSource = field(default_factory=TaskSource)
    """Tasks."""
    host: str = "127.0.0.1"
    """Address to listen on. OpenEnv has no access control: on another address, everyone who reaches it may play."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    max_sessions: int = 64
    """Maximum number of episodes at the same time; further clients get CAPACITY_REACHED."""
    max_length: int = 1_000_000
    """Maximum number of characters of an episode."""
    max_turns: int | None = None
    """Maximum number of turns of an episode. Default: the environment's own, or 16."""
    step_timeout_s: float = 60.0
    """Time limit of one call of the environment, in seconds."""


def serve(args: Sequence[str]) -> int:
    """Serve an environment to the clients of OpenEnv: TRL, ms-swift, SkyRL, Unsloth."""
    config = parse(ServeConfig, "serve", args)
    if config.max_sessions < 1:
        raise ConfigError(f"--max_sessions: expected a number >= 1, got {config.max_sessions}. Raise it.")
    flags = {name: value for name in _RUN_FLAGS if (value := getattr(config, name)) is not None}
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(config, RunConfig.from_flags(**flags, **vars(config.dataset))))
    return 0


async def _serve(config: ServeConfig, run: RunConfig) -> None:
    from agentenv.interop.openenv_server import ServedTasks, openenv_app

    source, tasks = await load_stepped(run)
    app = openenv_app(ServedTasks(source, tasks, run.limits.for_env(source.cls), config.max_sessions))
    server = UvicornServer("serve", app, ws="auto")
    stopped = stop_event()
    port = await server.start(config.host, config.port)
    try:
        sys.stdout.write(f"serving {config.env} at http://{config.host}:{port}, {counted(len(tasks), 'task')}\n")
        sys.stdout.flush()
        await stopped.wait()
    finally:
        await server.close(_CLOSE_S)
