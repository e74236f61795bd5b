"""The targets that the host provides for an attack, and its checks afterwards, which no program can forge.

`World` has files, listeners and a process with secrets, a new set for each attack. `judge` returns the problems, first
those that the host problems, then those in the program's report.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentenv._util.paths import PACKAGE
from agentenv.sandbox.types import ExecResult, ExecStatus
from tests.sandbox.escapes.cases import EscapeCase

SECRET = "sk-canary-"
"""Prefix of every secret; no result may contain a secret."""


def plant_environment() -> dict[str, str]:
    """Return environment variables with secrets, like a trainer's; set them before the sandbox starts."""
    return {name: SECRET + secrets.token_hex(12) for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_SETTING")}


class World:
    """Files, listeners and a victim process for one attack, and the checks that they are unchanged."""

    def __init__(self, case: EscapeCase) -> None:
        self.nonce = "n" + secrets.token_hex(6)
        self.root = Path(tempfile.mkdtemp(prefix="escape-"))
        self.victim: subprocess.Popen[bytes] | None = None
        self.sockets: list[tuple[str, socket.socket]] = []
        self.root.chmod(0o755)
        (self.root / "writable").mkdir()
        (self.root / "writable").chmod(0o777)
        for name, mode in {"canary": 0o644, "owned": 0o600, "open": 0o666, "writable/victim": 0o666}.items():
            path = self.root / name
            path.write_text(SECRET + secrets.token_hex(12))
            path.chmod(mode)
        (self.root / "link").symlink_to("/" + SECRET + secrets.token_hex(12))
        with contextlib.suppress(OSError):
            os.setxattr(self.root / "canary", "user.secret", (SECRET + secrets.token_hex(12)).encode())
        self.facts: dict[str, Any] = {
            "nonce": self.nonce,
            "skip": 0,
            "secret_prefix": SECRET,
            "root": str(self.root),
            "canary": str(self.root / "canary"),
            "owned": str(self.root / "owned"),
            "open_file": str(self.root / "open"),
            "writable": str(self.root / "writable"),
            "link": str(self.root / "link"),
            "host_pid": os.getpid(),
            "victim": 0,
            "victim_memory": 0,
            "hosts_line": _hosts_line(),
            "host_name": os.uname().nodename,
            "suid": "",
            "package": str(PACKAGE),
            "envs": os.path.dirname(getattr(find_spec("agentenv_envs.math_retry"), "origin", None) or str(PACKAGE)),
            "cwd": os.getcwd(),
        }
        if "victim" in case.needs:
            self._start_victim()
        if "net" in case.needs:
            self._listen()
        if "suid" in case.needs:
            self.facts["suid"] = os.environ.get("ESCAPE_SUID") or str(self.root / "suid")
            if not os.environ.get("ESCAPE_SUID"):
                shutil.copyfile("/usr/bin/id", self.root / "suid")
                (self.root / "suid").chmod(0o4755)
        self._before = self._look()

    def _start_victim(self) -> None:
        secret = SECRET + secrets.token_hex(12)
        with open(self.root / "canary", "rb") as canary:
            self.victim = subprocess.Popen(
                [secret, "900"],
                executable=shutil.which("sleep"),
                env={"S": secret},
                stdin=canary,
                start_new_session=True,
            )
        pid = self.victim.pid
        deadline = time.monotonic() + 30  # before exec, it still has the memory of this process
        while SECRET not in Path(f"/proc/{pid}/cmdline").read_text() and time.monotonic() < deadline:
            time.sleep(0.002)
        self.facts["victim"] = pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        self.facts["victim_memory"] = int(fields[45])  # arg_start, field 48 of proc(5)

    def _listen(self) -> None:
        places: list[tuple[str, int, int, Any]] = [
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("unix", socket.AF_UNIX, socket.SOCK_STREAM, str(self.root / "unix")),
            ("unix_dgram", socket.AF_UNIX, socket.SOCK_DGRAM, str(self.root / "unix_dgram")),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.nonce),
            ("abstract_dgram", socket.AF_UNIX, socket.SOCK_DGRAM, "\0" + self.nonce + "d"),
        ]
        for name, family, kind, address in places:
            self.facts[name] = 1
            listener = socket.socket(family, kind)
            try:
                listener.bind(address)
            except OSError:  # for example, no IPv6
                listener.close()
                continue
            if kind == socket.SOCK_STREAM:
                listener.listen()
            listener.setblocking(False)
            where = listener.getsockname()
            self.facts[name] = where[1] if isinstance(where, tuple) else str(address).lstrip("\0")
            if isinstance(address, str) and not address.startswith("\0"):
                os.chmod(address, 0o777)
            self.sockets.append((name, listener))

    def _look(self) -> dict[str, tuple[Any, ...]]:
        seen = {}
        for folder, folders, files in os.walk(self.root):
            for name in [*folders, *files]:
                path = os.path.join(folder, name)
                info = os.lstat(path)
                content = Path(path).read_bytes() if stat.S_ISREG(info.st_mode) else b""
                xattrs = tuple(os.listxattr(path, follow_symlinks=False))
                times = () if stat.S_ISDIR(info.st_mode) else (info.st_mtime_ns, info.st_nlink)
                seen[path] = (info.st_mode, info.st_uid, info.st_gid, info.st_ino, content, xattrs, *times)
        return seen

    def breaches(self, results: list[ExecResult], planted: dict[str, str]) -> list[str]:
        """Return the breaches that the host can observe."""
        problems = []
        after = self._look()
        for path in sorted(self._before.keys() | after.keys()):
            if self._before.get(path) != after.get(path):
                problems.append(f"{os.path.relpath(path, self.root)} was changed, made or removed")
        for name, listener in self.sockets:
            with contextlib.suppress(BlockingIOError):
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(1)
                problems.append(f"the listener {name} was reached")
        if self.victim is not None and self.victim.poll() is not None:
            problems.append(f"the victim was killed ({self.victim.returncode})")
        elif self.victim is not None:
            lines = Path(f"/proc/{self.victim.pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            problems += [f"the victim is {status['State']}"] if status["State"][0] not in "SDR" else []
            problems += ["the victim is traced"] if status["TracerPid"] != "0" else []
        for result in results:
            problems += _secrets_in(result, self.facts, planted)
        for place in ("/usr", "/usr/lib", "/usr/local/lib", "/etc", "/"):
            if os.path.lexists(os.path.join(place, self.nonce)):
                problems.append(f"a file was made in {place}")
        return problems

    def close(self) -> None:
        """Remove the targets."""
        if self.victim is not None:
            with contextlib.suppress(ProcessLookupError):
                self.victim.send_signal(signal.SIGCONT)
            self.victim.kill()
            self.victim.wait()
        for _, listener in self.sockets:
            listener.close()
        shutil.rmtree(self.root, ignore_errors=True)


def _hosts_line() -> str:
    """Return the line of /etc/hosts with this machine's name."""
    with contextlib.suppress(OSError):
        for line in Path("/etc/hosts").read_text().splitlines():
            if socket.gethostname() in line:
                return line
    return "no such line " + secrets.token_hex(4)


def _secrets_in(result: ExecResult, facts: dict[str, Any], planted: dict[str, str]) -> list[str]:
    """Return where a result contains a complete secret; the program knows only the prefix."""
    places: dict[str, str] = {"stdout": result.stdout, "stderr": result.stderr, "detail": result.detail or ""}
    places["channel"] = result.channel.decode("latin-1")
    for name, data in result.files.items():
        places["file " + name] = data.decode("latin-1")
    problems = []
    for place, text in places.items():
        at = text.find(SECRET)
        while at >= 0:
            end = text[at + len(SECRET) : at + len(SECRET) + 24]
            if len(end) == 24 and all(letter in "0123456789abcdef" for letter in end):
                which = next((name for name, secret in planted.items() if secret.endswith(end)), "a canary")
                problems.append(f"{place} holds the secret of {which}")
            at = text.find(SECRET, at + 1)
    return problems


def judge(case: EscapeCase, world: World, results: list[ExecResult], planted: dict[str, str]) -> list[str]:
    """Return the problems of a case; empty if it was contained.

    Args:
        case: the attack.
        world: its targets.
        results: results of its program, and of `then` if there is one.
        planted: the secrets in the environment.
    """
    problems = world.breaches(results, planted)
    for result in results:
        if result.status is ExecStatus.INFRA:
            problems.append(f"infra: {result.detail}")
            continue
        # The program's report, which must not be missing.
        words = [line.split(" ", 2) for line in result.stdout.splitlines() if line.startswith(world.nonce + " ")]
        escapes = [f"it says: {' '.join(parts[1:])}" for parts in words if parts[1] == "ESCAPED"]
        problems += escapes
        tried = sum(parts[1] == "TRYING" for parts in words)
        answered = sum(parts[1] == "HELD" for parts in words)
        if not tried:
            problems.append(f"it never tried: {result.status} {result.detail or ''} {result.stderr[-300:]}")
        elif tried > answered and not escapes and result.status not in case.ends | case.must_end | {ExecStatus.POLICY}:
            problems.append(f"an attempt has no answer: {result.status} {result.stderr[-300:]}")
    first = results[0]
    if case.must_end and first.status not in case.must_end:
        ended = f"{first.status} {first.detail or ''}".strip()
        problems.append(f"it ended with {ended}, not with one of {sorted(case.must_end)}")
    if case.check is not None and first.status not in (ExecStatus.INFRA, ExecStatus.POLICY):
        problem = case.check(first, world.facts)
        problems += [problem] if problem else []
    return list(dict.fromkeys(problems))
