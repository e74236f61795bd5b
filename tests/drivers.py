"""The command line as tests drive it: in this process, or in one that may be killed.

Processes are forked from a server that has imported transformers once: killing a run ten times takes seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.cli.main import main

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["transformers.models.auto.tokenization_auto", "agentenv.runs.run"])


def command(argv: Iterable[object]) -> int:
    """Run a command in this process; `--help` exits, which counts as its code. The last of equal flags holds."""
    try:
        return main(overriding(*argv))
    except SystemExit as stopped:
        return int(stopped.code or 0)


def overriding(*argv: object) -> list[str]:
    """Return a command line in which the last of equal flags replaces the others, which `agentenv` refuses."""
    flags: dict[str, list[str]] = {}
    place = ""
    for word in map(str, argv):
        if word.startswith("--"):
            place = word.partition("=")[0]
            flags.pop(place, None)
        flags.setdefault(place, []).append(word)
    return [word for words in flags.values() for word in words]


@dataclass
class Running:
    """A command in a process of its own."""

    process: Any
    stdout_path: Path
    stderr_path: Path

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def signal_until_dead(self, number: signal.Signals, timeout_s: float = 60.0) -> None:
        """Send it again and again, as an impatient person does; two that come at once count as one."""
        deadline = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < deadline:
            self.signal(number)
            self.process.join(0.3)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code."""
        self.process.join(timeout_s)
        assert not self.alive, f"expected an end within {timeout_s:g} s; stderr: {self.stderr}"
        return int(self.process.exitcode)

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until something holds; the process must not end before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.alive, f"ended with {self.process.exitcode}; stderr: {self.stderr}"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s; stderr: {self.stderr}"
            time.sleep(0.002)


@contextmanager
def forked(argv: Iterable[object], cwd: Path) -> Iterator[Running]:
    """Run a command in another process; what is left of it at the end is killed."""
    number = len(list(cwd.glob("stdout-*")))
    running = Running(None, cwd / f"stdout-{number}", cwd / f"stderr-{number}")
    for path in (running.stdout_path, running.stderr_path):
        path.touch()
    arguments = (overriding(*argv), str(cwd), str(running.stdout_path), str(running.stderr_path))
    running.process = _FORK.Process(target=_in_child, args=arguments)
    running.process.start()
    try:
        yield running
    finally:
        running.process.kill()
        running.process.join()
        running.process.close()


def _in_child(argv: list[str], cwd: str, stdout: str, stderr: str) -> None:
    os.chdir(cwd)
    # As from a shell: other tests' folders are on no path, and no signal is ignored, as pytest's may be (nohup).
    sys.path[:] = [entry for entry in sys.path if "pytest-of-" not in entry]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for path, number in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.exit(main(argv))


def lines(run: Path) -> list[dict[str, Any]]:
    """The episodes of a run directory as plain JSON, torn and broken lines left out."""
    path = run / "trajectories.jsonl"
    raw = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["episode"] for line in raw]


def ids(run: Path) -> list[str]:
    return sorted(episode["episode_id"] for episode in lines(run))


def without_times(episodes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Episodes in the order of their ids, without the fields that say when something began and how long it took."""

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if not key.endswith("_s")}

    ordered = sorted(episodes, key=lambda episode: episode["episode_id"])
    return [kept(episode) | {"turns": [kept(turn) for turn in episode["turns"]]} for episode in ordered]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
