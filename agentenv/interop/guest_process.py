"""A process for a library that a process can have once: episodes exchange messages with it, as lines of JSON."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

from agentenv.errors import ConfigError


class GuestProcess:
    """A process of a library that answers messages, each by the `id` of its episode; it ends with this one.

    Messages are lines of JSON.
    """

    def __init__(self, module: str) -> None:
        self._waiting: dict[int, concurrent.futures.Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        command = [sys.executable, "-m", module]
        # Another session: Ctrl-C is for this process, whose end closes the pipe.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
        )
        threading.Thread(target=self._read, name=f"agentenv-{module}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def ask(self, message: dict[str, Any]) -> concurrent.futures.Future[dict[str, Any]]:
        """Send a message of an episode, by its `id`, and return the future of the next one that comes back.

        Raises:
            ConfigError: the arguments are not JSON.
        """
        future = concurrent.futures.Future[dict[str, Any]]()
        self._waiting[message["id"]] = future
        self._send(message)
        return future

    def end(self, number: int) -> None:
        """End an episode, which sends nothing more."""
        self._waiting.pop(number, None)
        self._send({"id": number, "cancel": True})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            text = json.dumps(message)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--env_kwargs: expected JSON, got {error}. Change them.") from error
        try:
            with self._lock:
                self._process.stdin.write(text + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):  # ended, or ended and closed
            self._fail()

    def _read(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer["id"], None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(answer)
        self._process.wait()
        self._process.stdout.close()
        with self._lock, contextlib.suppress(OSError):  # a message that it did not read
            self._process.stdin.close()
        self._fail()

    def _fail(self) -> None:
        for number in list(self._waiting):
            future = self._waiting.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(
                    {
                        "kind": "infra",
                        "error": f"expected its process to run, got its end, {self._process.returncode}. "
                        "Read what it printed.",
                    }
                )


_processes: dict[tuple[str, int], GuestProcess] = {}
_starting = threading.Lock()


def guest_process(module: str) -> GuestProcess:
    """Return the process that runs a module, started if need be; a forked process has its own."""
    key = module, os.getpid()
    with _starting:
        if key not in _processes or not _processes[key].is_alive:
            _processes[key] = GuestProcess(module)
        return _processes[key]
