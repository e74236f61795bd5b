"""What the host puts up around an attack, and what it sees afterwards: evidence that no program can forge.

`World` holds files, listeners and a process with secrets, one set for each attack; `judge` says what went wrong, of the
host's own seeing first and of the program's report second.
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
from pathlib import Path
from typing import Any

import agentenv
import agentenv_envs.math_retry
from agentenv.sandbox.types import ExecResult, Status
from tests.sandbox.escapes import Case

SECRET = "sk-canary-"
"""Every secret begins so; no result may hold one."""


def plant_environment() -> dict[str, str]:
    """Secrets as a trainer's environment has them; to be set before the sandbox starts."""
    return {name: SECRET + secrets.token_hex(12) for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_SETTING")}


class World:
    """Files, listeners and a victim for one attack, and whether they are as they were."""

    def __init__(self, case: Case) -> None:
        self.nonce = "n" + secrets.token_hex(6)
        self.root = Path(tempfile.mkdtemp(prefix="escape-"))
        self.victim: subprocess.Popen[bytes] | None = None
        self.sockets: list[tuple[str, socket.socket]] = []
        self._files()
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
            "suid": "",
            "package": os.path.dirname(agentenv.__file__),
            "envs": os.path.dirname(agentenv_envs.math_retry.__file__),
            "cwd": os.getcwd(),
        }
        if "victim" in case.needs:
            self._start_victim()
        if "net" in case.needs:
            self._listen()
        if "suid" in case.needs:
            self.facts["suid"] = self._suid()
        self._before = self._look()

    def _files(self) -> None:
        self.root.chmod(0o755)
        (self.root / "writable").mkdir()
        (self.root / "writable").chmod(0o777)
        contents = {"canary": 0o644, "owned": 0o600, "open": 0o666, "writable/victim": 0o666}
        for name, mode in contents.items():
            path = self.root / name
            path.write_text(SECRET + secrets.token_hex(12))
            path.chmod(mode)
        (self.root / "link").symlink_to("/" + SECRET + secrets.token_hex(12))
        with contextlib.suppress(OSError):
            os.setxattr(self.root / "canary", "user.secret", (SECRET + secrets.token_hex(12)).encode())

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
        deadline = time.monotonic() + 30  # Until it has become sleep, its memory is ours.
        while SECRET not in Path(f"/proc/{pid}/cmdline").read_text() and time.monotonic() < deadline:
            time.sleep(0.002)
        self.facts["victim"] = pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        self.facts["victim_memory"] = int(fields[45])  # arg_start, field 48 of proc(5).

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
            except OSError:  # As IPv6 where there is none.
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

    def _suid(self) -> str:
        """A program that is root's for everybody, where this process may make one."""
        if made := os.environ.get("ESCAPE_SUID"):
            return made
        path = self.root / "suid"
        shutil.copyfile("/usr/bin/id", path)
        path.chmod(0o4755)
        return str(path)

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
        """What the host sees for itself."""
        found = []
        after = self._look()
        for path in sorted(self._before.keys() | after.keys()):
            if self._before.get(path) != after.get(path):
                found.append(f"{os.path.relpath(path, self.root)} was changed, made or removed")
        for name, listener in self.sockets:
            with contextlib.suppress(BlockingIOError):
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(1)
                found.append(f"the listener {name} was reached")
        if self.victim is not None:
            found += self._victim_breaches()
        for result in results:
            found += _secrets_in(result, self.facts, planted)
        for place in ("/usr", "/usr/lib", "/usr/local/lib", "/etc", "/"):
            if os.path.lexists(os.path.join(place, self.nonce)):
                found.append(f"a file was made in {place}")
        return found

    def _victim_breaches(self) -> list[str]:
        assert self.victim is not None
        if self.victim.poll() is not None:
            return [f"the victim was killed ({self.victim.returncode})"]
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{self.victim.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        wrong = [f"the victim is {status['State']}"] if status["State"][0] not in "SDR" else []
        return wrong + (["the victim is traced"] if status["TracerPid"] != "0" else [])

    def close(self) -> None:
        """Everything is put away."""
        if self.victim is not None:
            with contextlib.suppress(ProcessLookupError):
                self.victim.send_signal(signal.SIGCONT)
            self.victim.kill()
            self.victim.wait()
        for _, listener in self.sockets:
            listener.close()
        shutil.rmtree(self.root, ignore_errors=True)


def _hosts_line() -> str:
    """A line of /etc/hosts that is this machine's own."""
    with contextlib.suppress(OSError):
        for line in Path("/etc/hosts").read_text().splitlines():
            if socket.gethostname() in line:
                return line
    return "no such line " + secrets.token_hex(4)


def _secrets_in(result: ExecResult, facts: dict[str, Any], planted: dict[str, str]) -> list[str]:
    """A secret's prefix with something behind it, anywhere; the program knows the bare prefix."""
    places: dict[str, str] = {"stdout": result.stdout, "stderr": result.stderr, "detail": result.detail or ""}
    places["channel"] = result.channel.decode("latin-1")
    for name, data in result.files.items():
        places["file " + name] = data.decode("latin-1")
    found = []
    for place, text in places.items():
        at = text.find(SECRET)
        while at >= 0:
            end = text[at + len(SECRET) : at + len(SECRET) + 24]
            if len(end) == 24 and all(letter in "0123456789abcdef" for letter in end):
                which = next((name for name, secret in planted.items() if secret.endswith(end)), "a canary")
                found.append(f"{place} holds the secret of {which}")
            at = text.find(SECRET, at + 1)
    return found


def _reported(case: Case, result: ExecResult, nonce: str) -> list[str]:
    """What the program says; that it was heard at all is asked for too."""
    words = [line.split(" ", 2) for line in result.stdout.splitlines() if line.startswith(nonce + " ")]
    found = [f"it says: {' '.join(parts[1:])}" for parts in words if parts[1] == "ESCAPED"]
    tried = sum(parts[1] == "TRYING" for parts in words)
    answered = sum(parts[1] == "HELD" for parts in words)
    if not tried:
        found.append(f"it never tried: {result.status} {result.detail or ''} {result.stderr[-300:]}")
    elif tried > answered and not found and result.status not in case.ends | case.must_end | {Status.POLICY}:
        found.append(f"an attempt has no answer: {result.status} {result.stderr[-300:]}")
    return found


def judge(case: Case, world: World, results: list[ExecResult], planted: dict[str, str]) -> list[str]:
    """All that is wrong with how the sandbox dealt with a case; nothing when it was contained.

    Args:
        case: the attack.
        world: where it took place.
        results: of its program, and of `then`'s where it has one.
        planted: the secrets of the environment.
    """
    found = world.breaches(results, planted)
    for result in results:
        if result.status is Status.INFRA:
            found.append(f"infra: {result.detail}")
        else:
            found += _reported(case, result, world.nonce)
    first = results[0]
    if case.must_end and first.status not in case.must_end:
        found.append(f"it ended with {first.status}, not with one of {sorted(case.must_end)}")
    if case.check is not None and first.status not in (Status.INFRA, Status.POLICY):
        wrong = case.check(first, world.facts)
        found += [wrong] if wrong else []
    return list(dict.fromkeys(found))
