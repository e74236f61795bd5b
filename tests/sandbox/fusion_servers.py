"""Servers that answer what a test says, byte for byte, and remember what they were asked."""

import asyncio
import json
from contextlib import asynccontextmanager

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


def http(body, status=200, **headers):
    """A whole answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} -", f"content-length: {len(content)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def cut(body=OK):
    """An answer that ends before its end."""
    return http(body)[:-20]


class Scripted:
    """One server: an answer per request to `/run_code`, the last one for all that follow; None hangs."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        """(path, headers, body) of each."""
        self.in_flight = self.most_in_flight = self.num_gone = 0
        self.go_on = asyncio.Event()
        """Answers that are functions of the request wait for it."""
        self._tasks = set()

    @property
    def num_runs(self):
        return sum(path == "/run_code" for path, _, _ in self.asked)

    async def handle(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        try:
            await self._handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_gone += 1
        finally:
            writer.close()
            self._tasks.discard(asyncio.current_task())

    async def _handle(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        self.asked.append((path, headers, body))
        if path == "/v1/ping":
            writer.write(http("pong"))
            await writer.drain()
            return
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            reply = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if reply is None:
                await reader.read()  # until the client goes
                self.num_gone += 1
                return
            if callable(reply):
                await self.go_on.wait()
                reply = reply(json.loads(body))
            writer.write(reply)
            await writer.drain()
        finally:
            self.in_flight -= 1


@asynccontextmanager
async def scripted(*answers):
    """A running server; its address is `url`."""
    script = Scripted(*answers)
    server = await asyncio.start_server(script.handle, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for task in list(script._tasks):
            task.cancel()
        await asyncio.gather(*script._tasks, return_exceptions=True)
