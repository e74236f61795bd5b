"""Servers of chat completions for tests: real ones, on a free port, that answer as they are told."""

import asyncio
import contextlib
import inspect
import json

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentenv._util.http.responses import UvicornServer


def completion(text, *, finish_reason="stop", usage=(10, 5), **message):
    """A chat completion's body."""
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "finish_reason": finish_reason,
            }
        ],
    }
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return body


class Asked:
    """The requests that a server got, and how many it works on at a time."""

    def __init__(self):
        self.bodies, self.headers, self.num_now, self.most = [], [], 0, 0
        self.url = ""


@contextlib.asynccontextmanager
async def chat_server(*answers):
    """Answers with these in turn, the last one for ever: text, a body, a Response, or a function of the body."""
    asked, left = Asked(), list(answers)

    async def handle(request: Request) -> Response:
        """One request."""
        body = json.loads(await request.body())
        asked.bodies.append(body)
        asked.headers.append(dict(request.headers))
        answer = left.pop(0) if len(left) > 1 else left[0]
        asked.num_now += 1
        asked.most = max(asked.most, asked.num_now)
        try:
            if callable(answer) and not isinstance(answer, Response):
                answer = answer(body)
            if inspect.isawaitable(answer) and not isinstance(answer, Response):
                answer = await answer
        finally:
            asked.num_now -= 1
        if isinstance(answer, Response):
            return answer
        return JSONResponse(completion(answer) if isinstance(answer, str) else answer)

    app = Starlette(routes=[Route("/v1/chat/completions", handle, methods=["POST"])])
    serving = UvicornServer("test judge", app)
    asked.url = f"http://127.0.0.1:{await serving.start('127.0.0.1', 0)}/v1"
    try:
        yield asked
    finally:
        await serving.close(within_s=0.1)


@contextlib.asynccontextmanager
async def raw_server(*answers):
    """Writes these bytes in turn, the last ones for ever, and hangs up; None hangs up at once, with a reset."""
    asked, left, tasks = Asked(), list(answers), set()

    async def handle(reader, writer):
        """One connection."""
        tasks.add(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        asked.bodies.append(json.loads(await reader.readexactly(length)))
        answer = left.pop(0) if len(left) > 1 else left[0]
        try:
            if answer is None:
                writer.transport.abort()
            elif callable(answer):
                await answer(writer)
            else:
                writer.write(answer)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    asked.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield asked
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def http(body, *, status="200 OK", length=None, headers=""):
    """An answer as bytes; `length` is what it says its body has."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n{headers}"
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data
