"""What a hostile answer might do if it got past the list of what is data; run by a worker, in `confined.in_child`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from agentenv_envs.reasoning_gym.confined import TookTooMuch, in_child


def walls():
    """Whether this kernel has what the second wall is made of."""
    if sys.platform != "linux" or not Path("/proc/sys/kernel/seccomp").exists():
        return False
    from agentenv.sandbox.guest import landlock

    try:
        return landlock.abi() > 0
    except OSError:
        return False


def _told(function):
    try:
        function()
    except (OSError, MemoryError) as error:
        return type(error).__name__
    return "did it"


def writes(path):
    Path(path).write_text("x")


def removes(path):
    os.unlink(path)


def connects(port):
    socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()


def starts(path):
    subprocess.run([sys.executable, "-c", f"open({path!r}, 'w')"], check=True)


def kills(pid):
    os.kill(int(pid), 9)


def fills(_):
    return len(bytearray(8 << 30))


def leaves(_):
    os._exit(7)


def loops(_):
    while True:
        pass


def handle(request):
    function = globals()[request["attack"]]
    try:
        return {"said": in_child(lambda: _told(lambda: function(request["argument"])), cpu_s=1.0)}
    except TookTooMuch as error:
        return {"said": f"TookTooMuch: {error}"}
