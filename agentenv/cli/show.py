"""`agentenv show`: episodes of a run as conversations."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Annotated

from rich.console import Console
from rich.style import Style

from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL
from agentenv.errors import ConfigError


@dataclass(frozen=True)
class ShowRunConfig:
    """Read the episodes of a run as conversations: roles, texts, tool calls, rewards, errors with their traceback.

    All conditions must hold. On a terminal the text is paged by $PAGER, or else `less`. A run or a training that still
    continues can be read.
    """

    run: Annotated[str, POSITIONAL]
    """Run directory, of `run` or `train`."""
    failed: bool = False
    """Only episodes that failed."""
    worst: int | None = None
    """Only the N episodes with the lowest rewards, the lowest first."""
    best: int | None = None
    """Only the N episodes with the highest rewards, the highest first."""
    task: str | None = None
    """Only episodes of this task: its id, of a training's eval/ also ID@STEP, or its number if the data has no ids."""
    episode: str | None = None
    """Only this episode: its id, a prefix that no other id has, or a number, which is an index: 0 is the first episode
    that ended, -1 the last."""
    where: str | None = None
    """Only episodes for which a filter holds, such as 'reward<1 -stop=terminated info.outcome=wrong "apples"'."""
    grep: str | None = None
    """Only episodes in whose prompt, actions or observations this regular expression is found."""


def show(args: Sequence[str]) -> int:
    """Read the episodes of a run as conversations."""
    config = parse(ShowRunConfig, "show", args)
    from agentenv.core.trajectory import Trajectory
    from agentenv.runs.display.conversation import conversation
    from agentenv.runs.records.directory import check_run, read_trajectories
    from agentenv.runs.records.filters import parse_filter
    from agentenv.runs.records.scan import ReadReport
    from agentenv.runs.records.selection import Selection, select
    from agentenv.runs.tokens.view import load_episode

    for name, num in (("worst", config.worst), ("best", config.best)):
        if num is not None and num < 1:
            raise ConfigError(f"--{name}: expected a number of episodes >= 1, got {num}.")
    if config.worst is not None and config.best is not None:
        raise ConfigError(f"--worst: expected no --best with it, got --best {config.best}. Leave one out.")
    try:
        grep = None if config.grep is None else re.compile(config.grep, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"--grep: expected a regular expression, got {config.grep!r}: {error}.") from error
    where = None if config.where is None else parse_filter(config.where)
    selection = Selection(config.failed, config.task, where, grep, config.worst, config.best)
    if config.episode is not None and selection != Selection():
        others = [flag for arg in args if (flag := arg.partition("=")[0]).startswith("--") and flag != "--episode"]
        raise ConfigError(f"--episode: expected no other condition, got {', '.join(others)}. Leave the others out.")
    check_run(config.run)
    report, is_empty, was_quit = ReadReport(), True, True
    one = None if config.episode is None else load_episode(config.run, config.episode, report=report)
    console = Console()
    has_color = console.color_system is not None and not console.no_color
    with _paged() as (stream, check):
        chosen: Iterable[Trajectory] = [one] if one else select(config.run, selection, report=report, check=check)
        for trajectory in chosen:
            stream.writelines(_styled(*piece) if has_color else piece[0] for piece in conversation(trajectory))
            is_empty = False
        was_quit = False
    if is_empty and not was_quit:
        if where:
            environments = (each.task.env for each in read_trajectories(config.run, report=ReadReport()))
            where.check_environments(config.run, environments)
        found = report.num_lines - report.num_superseded
        sys.stderr.write(f"agentenv show: none of the {found} episodes of {config.run} is shown\n")
    if report.damage:
        sys.stderr.write(f"agentenv: {config.run}: {report.damage}\n")
    return int(bool(report.damage))


@contextlib.contextmanager
def _paged() -> Iterator[tuple[IO[str], Callable[[], None]]]:
    """Yield the pager's input on a terminal, else stdout, and a check; the end of the pager ends the block.

    The end is noticed where the block writes or calls the check.

    Raises:
        ConfigError: $PAGER cannot be split into words.
    """
    command = os.environ.get("PAGER", "less")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"PAGER: expected a command line, got {command!r}: {error}. Correct the variable.") from error
    if not sys.stdout.isatty() or not words:
        yield sys.stdout, lambda: None
        return
    environment = {"LESS": "FRX", **os.environ}
    try:
        pager = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, errors="replace", env=environment)
    except OSError:  # it is not installed
        yield sys.stdout, lambda: None
        return

    def check() -> None:
        if pager.poll() is not None:
            raise BrokenPipeError

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the pager
    try:
        with contextlib.suppress(BrokenPipeError), pager:  # the reader quit
            assert pager.stdin is not None
            yield pager.stdin, check
    finally:
        signal.signal(signal.SIGINT, before)


def _styled(text: str, style: str) -> str:
    """Return the text with a terminal's codes around each line: a pager may begin at any."""
    lines = text.split("\n")
    return "\n".join(Style.parse(style).render(line) if line else "" for line in lines)
