"""`agentenv view`: runs in a browser, from a server or as one file; or an episode as Markdown or SVG."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from agentenv._util.http.access import LOOPBACK, read_token
from agentenv._util.terminal import safe
from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL
from agentenv.errors import ConfigError
from agentenv.view.foreign import end_by_signal
from agentenv.view.viewed import ViewedRun, find_runs

TOKEN_VARIABLE = "AGENTENV_VIEW_TOKEN"


@dataclass(frozen=True)
class ViewConfig:
    """Look at the episodes of runs in a browser: groups, tokens, training curves, also while they run.

    The page comes from a server on this machine, or is written as one file that opens without a server. What the page
    shows is what the runs hold, private labels included.
    """

    runs: Annotated[tuple[str, ...], POSITIONAL] = ()
    """Run directories, of `run` or `train`, folders of them, or records of prime-rl, NeMo Gym, verl or Harbor. Default:
    the newest in runs/."""
    host: str = "127.0.0.1"
    """Address to listen on. All except the loopback address need a token, in AGENTENV_VIEW_TOKEN or --token_file."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of this server, such as node7 or node7:80; * allows any. Required with --host 0.0.0.0."""
    token_file: str | None = None
    """File with the token that the page has to send. Default: a new one, which is in the printed address."""
    token: bool = True
    """Ask for a token. Without it, everyone on this machine can read the runs."""
    open: bool = True
    """Open the page in a browser, if this machine has one."""
    tokenizer: str | None = None
    """Folder of the tokenizer. Default: that of each run."""
    episode: str | None = None
    """Open the page at this episode: its id."""
    until_eof: bool = False
    """End when the standard input is closed, for programs that start this command."""
    task: str | None = None
    """Open the page at this task: its id."""
    html: str | None = None
    """Write the page and its data into this file, and start no server. It holds all that the runs hold, labels and
    flags included; see --redact."""
    max_mb: float = 50.0
    """Of --html: maximum size of the episodes in it, in megabytes. Beyond it whole tasks are left out."""
    where: str | None = None
    """Of --html: only episodes for which a filter holds, such as 'reward<1 -stop=terminated'."""
    redact: bool = False
    """Of --html: leave out folders, flags that may name machines and services, and in errors the names and addresses
    of machines. Texts of episodes stay."""
    labels: bool = True
    """Of --html: keep the labels of the tasks. Off: leave them out, the entries of a task's row (its metadata) that
    have the name of the label's column or that equal the label, and the values of `info` that equal it. Texts of
    episodes stay, such as a reply that says the answer."""
    md: str | None = None
    """Write the episode of --episode into this file as Markdown, and start no server; - is the screen."""
    svg: str | None = None
    """Write the episode of --episode into this file as SVG, with its tokens by probability; - is the screen."""


def view(args: Sequence[str]) -> int:
    """Look at the episodes of runs in a browser: groups, tokens, training curves, also while they run."""
    config = parse(ViewConfig, "view", args)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # ignored under nohup
            signal.signal(number, end_by_signal)
    runs = find_runs(config.runs)
    for run in filter(lambda each: each.said, runs):
        sys.stderr.write(f"{safe(run.said)}\n")
    _check(config, args)
    if config.html is not None:
        from agentenv.view.redaction import Redaction
        from agentenv.view.single_file import FileOptions, write_html

        redaction = Redaction(config.redact, not config.labels)
        options = FileOptions(
            config.max_mb, config.where, redaction, config.tokenizer, flag_defaults, go=_place(config)
        )
        sys.stdout.write(f"{write_html(runs, config.html, options)}\n")
        return 0
    if config.md is not None or config.svg is not None:
        from agentenv.runs.tokens.view import load_episode
        from agentenv.view.excerpts import episode_to_markdown, episode_to_svg
        from agentenv.view.texts import load_texts

        episode = load_episode(runs[0].folder, str(config.episode))
        if config.svg is not None:
            if any(turn.answer is not None for turn in episode.turns):
                raise ConfigError(
                    f"--svg: expected an episode with token ids, got {config.episode!r}, recorded by --engine chat, "
                    "which returns no token ids. Use --md."
                )
            _write(config.svg, episode_to_svg(episode, load_texts(runs[0], config.tokenizer)))
        if config.md is not None:
            try:
                texts = load_texts(runs[0], config.tokenizer)
            except ConfigError:  # it only names the least probable tokens
                texts = None
            _write(config.md, episode_to_markdown(episode, texts, runs[0].name))
        return 0
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_serve(config, runs))
    return 0


def flag_defaults(kind: str) -> Mapping[str, Any]:
    """Return the default of each flag of `run` or `train`, as config.json has it."""
    from agentenv.core.types import Limits
    from agentenv.runs.config import RunConfig
    from agentenv.training.config import TrainConfig

    config = RunConfig(env=("_",)) if kind == "run" else TrainConfig(env=("_",))
    return {**config.to_dict(), "max_length": Limits().max_length, "max_turns": Limits().max_turns}


def _check(config: ViewConfig, args: Sequence[str]) -> None:
    """Raise ConfigError for flags that have no effect."""
    given = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
    for name in ("max_mb", "where", "redact", "labels", "no_labels"):
        if name in given and config.html is None:
            raise ConfigError(f"--{name}: expected --html with it, got none. Add it, or leave --{name} out.")
    for name in ("md", "svg"):
        if name in given and config.episode is None:
            raise ConfigError(f"--{name}: expected --episode with it, got none. Name the episode.")
    if config.max_mb <= 0:
        raise ConfigError(f"--max_mb: expected a number above 0, got {config.max_mb:g}. Raise it.")


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: expected a file that can be written, got {error}.") from error


def _place(config: ViewConfig) -> str:
    """Return where the page opens; "" is its beginning."""
    if config.episode is not None:
        return f"/0/episode/{quote(config.episode, safe='')}"
    return "" if config.task is None else f"/0/task/{quote(config.task, safe='')}"


async def _serve(config: ViewConfig, runs: Sequence[ViewedRun]) -> None:
    from agentenv.view.server import ViewOptions, ViewServer, view_access

    token = read_token(config.token_file, TOKEN_VARIABLE)
    if token is None and config.token and config.host in LOOPBACK:
        token = secrets.token_urlsafe(24)
    if not config.token:
        if config.host not in LOOPBACK:
            raise ConfigError(f"--no_token: expected --host 127.0.0.1 with it, got {config.host!r}. Leave one out.")
        token = None
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port: expected a port, got {config.port}.")
    access = view_access(config.host, token, config.allowed_hosts, TOKEN_VARIABLE)
    options = ViewOptions(access, config.port, config.tokenizer, flag_defaults)
    async with ViewServer(runs, options) as server:
        address = server.address(_place(config))
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if config.open and has_screen:
            webbrowser.open(address)
        if config.until_eof:
            await asyncio.to_thread(sys.stdin.read)
            return
        sys.stderr.write("agentenv view: Ctrl-C ends it\n")
        await asyncio.Event().wait()
