"""Servers of programs that answer what a test says, byte for byte, and remember what they were asked."""

from contextlib import asynccontextmanager

from agentenv.sandbox import ExecResult, ExecStatus
from agentenv.sandbox.fusion.wire import result_body
from tests.rewards.models.rm_servers import http, in_turn, server

OK = result_body(ExecResult(ExecStatus.OK, exit_code=0, stdout="42\n", stdout_bytes=3))
"""Of a program that printed 42."""


def cut(body=OK):
    """An answer that ends before its end."""
    return http(body)[:-20]


@asynccontextmanager
async def scripted(*answers):
    """A running server: its health is answered, and others in turn, the last answer for all that follow; functions give
    what is awaited."""
    turn = in_turn(*answers)

    def reply(path, body):
        found = {} if path == "/health" else turn()
        return found() if callable(found) else found

    async with server(reply) as asked:
        yield asked
