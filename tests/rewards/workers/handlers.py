"""Handlers for tests of the pool: what it runs here is light, so that a worker starts in a fraction of a second."""

import contextlib
import ctypes
import os
import signal
import sys
import time

from agentenv.errors import DataError, InfraError

prepared = []


def prepare(request):
    prepared.append(request["task"])
    if "slow_to_load" in request["task"]:
        while time.process_time() < 1.0:
            pass
    if "broken_to_load" in request["task"]:
        raise ImportError("pip install something")


def echo(request):
    return {"said": request["say"], "pid": os.getpid(), "prepared": prepared}


slow_to_load = broken_to_load = echo


def spin(request):
    while time.process_time() < request.get("until_cpu_s", 1e9):
        pass
    return {"pid": os.getpid()}


def never_polls(request):
    return {"sum": sum(range(10**13))}


def swallows(request):
    while True:
        with contextlib.suppress(BaseException):  # as a finalizer or a careless library does
            spin(request)


def sleep(request):
    time.sleep(request["seconds"])
    return {"pid": os.getpid()}


def eat(request):
    held = bytearray(request["bytes"])
    for start in range(0, len(held), 4096):
        held[start] = 1
    if request.get("keep"):
        prepared.append(held)
    return {"pid": os.getpid()}


def raises(request):
    kind = request["kind"]
    if kind == "exit":
        sys.exit("bye")
    raise {"data": DataError, "infra": InfraError, "value": ValueError, "memory": MemoryError}[kind]("of mine")


def dies(request):
    if request.get("flag") and os.path.exists(request["flag"]):
        return {"pid": os.getpid()}
    if request.get("flag"):
        open(request["flag"], "w").close()
    if request.get("segfault"):
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)


def prints(request):
    print("hello " * 1000, flush=True)
    os.write(2, b"noise")
    return {"read": sys.stdin.read()}
