"""Servers of SandboxFusion that answer what a test says, byte for byte, and remember what they were asked."""

from contextlib import asynccontextmanager

from tests.rewards.models.rm_servers import http, in_turn, server

OK = {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {"status": "Finished", "execution_time": 0.01, "return_code": 0, "stdout": "42\n", "stderr": ""},
    "executor_pod_name": None,
    "files": {},
}


def answer(run=None, **more):
    """A body of status 200, of a program that printed 42 but for what is given."""
    return {**OK, "run_result": {**OK["run_result"], **(run or {})}, **more}


def cut(body=OK):
    """An answer that ends before its end."""
    return http(body)[:-20]


@asynccontextmanager
async def scripted(*answers):
    """A running server: pings are answered, and others in turn, the last answer for all that follow; functions give
    what is awaited."""
    turn = in_turn(*answers)

    def reply(path, body):
        found = "pong" if path == "/v1/ping" else turn()
        return found() if callable(found) else found

    async with server(reply) as asked:
        yield asked
