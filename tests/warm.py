"""The command `agentenv` in tests of the documentation: a process forked from a server that has imported what it needs.

Imports are most of what a short command computes. The process has the caller's folder, environment, files and signals.

    python tests/warm.py FOLDER    # serves at FOLDER/socket until it is killed; FOLDER/agentenv is the command
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

PRELOADED = ("agentenv.cli.main", "agentenv.runs.run", "agentenv.engines.hf.engine", "agentenv.training.train",
             "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.modeling_auto")  # fmt: skip
LEFT_A_PROCESS = 97
GRACE_S = 30.0
"""Longest time that processes of a command may live after it."""
_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
COMMAND = """#!{python} -SE
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: server.send(b"%d" % number))
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
socket.send_fds(server, [request.encode()], [0, 1, 2])
sys.exit(int(server.recv(9)))
"""


def main(folder: Path) -> None:
    """Write the command, import, and fork a process for each call."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "socket"))
    command = folder / "agentenv"
    command.write_text(COMMAND.format(python=sys.executable, path=str(folder / "socket")))
    command.chmod(0o755)
    listener.listen()
    sys.path[0] = str(Path(sys.executable).parent)  # as for a console script
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(connection)
        connection.close()


def run(connection: socket.socket) -> None:
    """Run the command that is asked for, pass signals on, and answer with its exit code."""
    request, files, _, _ = socket.recv_fds(connection, 1 << 18, 3)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not (pid := os.fork()):
        connection.close()
        argv, cwd, environment = json.loads(request)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["agentenv", *argv]
        sys.exit(sys.modules["agentenv.cli.main"].main())
    for file in files:
        os.close(file)
    connection.settimeout(0.02)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        with contextlib.suppress(TimeoutError):
            os.kill(pid, int(connection.recv(9) or signal.SIGKILL))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    end = time.monotonic() + GRACE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        code = LEFT_A_PROCESS
    connection.send(b"%d" % (code % 256))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
