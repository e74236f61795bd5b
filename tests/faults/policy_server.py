"""A policy server in its own process, which answers as vLLM does or breaks in one of the ways of MODES.

It speaks HTTP over raw sockets, so that it can break HTTP too. The address chooses the fault,
`http://127.0.0.1:PORT/ENDPOINT/WHEN/MODE`:

- ENDPOINT is `text` (/v1/completions) or `chat` (/chat/completions).
- WHEN is `always` (every generation), `once` (the first generation of each episode) or `start` (every request, also
  those of the look at the server).

It prints its port and a port on which nothing listens, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

KEEP, CLOSE, RESET, HANG = "keep", "close", "reset", "hang"
"""What becomes of the connection after a reply."""
UNKNOWN_ID = 0x110000 + 100_000
"""Beyond the vocabulary of CharTokenizer."""
DRIP_S = 0.1


def right(body: dict[str, Any], endpoint: str) -> dict[str, Any]:
    """Return a right completion, which depends on the prompt alone."""
    if endpoint == "chat":
        message = {"role": "assistant", "content": f"{len(body['messages'])}: {body['messages'][-1]['content']}"}
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 7}
        return {"model": body["model"], "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    prompt = body["prompt"]
    seed = sum(place * token for place, token in enumerate(prompt, 1))
    ids = [97 + (seed + place) % 26 for place in range(3 + seed % 3)]
    greedy = body.get("top_k") == 1  # only one token is left: its probability is 1
    logprobs = [0.0 if greedy else -0.25 * (1 + token % 7) for token in ids]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "stop_reason": None}
    answer: dict[str, Any] = {"model": body.get("model"), "choices": [choice]}
    names = [f"token_id:{token}" for token in ids]
    choice |= {"text": "".join(map(chr, ids)), "prompt_token_ids": prompt}
    choice["logprobs"] = {"tokens": names, "token_logprobs": logprobs}
    return {**answer, "id": f"cmpl-{body.get('request_id')}"}


@dataclass
class Exchange:
    """One request, and the connection to answer it on."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    endpoint: str
    path: str
    body: dict[str, Any]
    memory: dict[str, Any]
    """What the mode keeps from one request to the next."""

    @property
    def is_generation(self) -> bool:
        return bool(self.body)

    @property
    def right(self) -> tuple[int, dict[str, Any]]:
        """Status and content of the right answer."""
        if self.path in ("v1/models", "models"):
            return 200, {"data": [{"id": "the-model", "max_model_len": 4096}]}
        if self.is_generation:
            return 200, right(self.body, self.endpoint)
        return 404, {"error": {"message": "no such endpoint"}}

    async def send(self, data: bytes, then: str = KEEP) -> None:
        self.writer.write(data)
        await self.writer.drain()
        if then == HANG:
            await self.reader.read()  # until the client goes
        if then == RESET:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.writer.transport.abort()
        if then != KEEP:
            raise ConnectionError

    async def answer(self) -> None:
        """Answer right."""
        status, content = self.right
        await self.send(http(as_json(content), str(status)))


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def http(body: bytes, status: str = "200 OK", *headers: str, length: bool = True, version: str = "HTTP/1.1") -> bytes:
    """Return an answer as bytes."""
    lines = [f"{version} {status}", *headers, *([f"content-length: {len(body)}"] if length else [])]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(body: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:]))
    return http(b"", "200 OK", "transfer-encoding: chunked", length=False) + chunks + end


@functools.cache
def bomb() -> bytes:
    """Return a gigabyte."""
    return gzip.compress(gzip.compress(b" " * (1 << 20)) * 1000)


Serve = Callable[[Exchange], Awaitable[None]]
Change = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Mode:
    """A way to answer. `change` is there where it is another completion and nothing else."""

    expected: Literal["succeeds", "fails", "stops"]
    """Of its episodes, or the whole run: "stops" is a ConfigError."""
    serve: Serve
    change: Change | None = None


def raw(make: Callable[[bytes], bytes], then: str = KEEP) -> Serve:
    """Return a mode that sends bytes made of the right body."""

    async def serve(exchange: Exchange) -> None:
        await exchange.send(make(as_json(exchange.right[1])), then)

    return serve


def status(line: str, *headers: str, body: bytes = b'{"error": {"message": "scripted"}}') -> Serve:
    return raw(lambda _: http(body, line, *headers))


def content(make: Callable[[bytes], bytes]) -> Serve:
    return raw(lambda body: http(make(body)))


def changed(expected: Any, change: Change) -> Mode:
    """Return a mode that changes completions and answers everything else right."""

    async def serve(exchange: Exchange) -> None:
        if not exchange.is_generation:
            return await exchange.answer()
        answer = change(exchange.right[1])
        await exchange.send(http(as_json(answer)))

    return Mode(expected, serve, change)


def choice(expected: Any, **fields: Any) -> Mode:
    return changed(expected, lambda answer: {**answer, "choices": [{**answer["choices"][0], **fields}]})


def without(*names: str) -> Change:
    def change(answer: dict[str, Any]) -> Any:
        kept = {name: value for name, value in answer["choices"][0].items() if name not in names}
        return {**answer, "choices": [kept]}

    return change


def ids(expected: Any, make: Callable[[list[int]], list[Any]]) -> Mode:
    """Return a mode with other token ids, whose log-probabilities are named after them."""

    def change(answer: dict[str, Any]) -> Any:
        old, new = answer["choices"][0], make(answer["choices"][0]["token_ids"])
        logprobs = {"tokens": [f"token_id:{token}" for token in new], "token_logprobs": [-1.0] * len(new)}
        return {**answer, "choices": [{**old, "token_ids": new, "logprobs": logprobs}]}

    return changed(expected, change)


async def drip(exchange: Exchange) -> None:
    for byte in http(as_json(exchange.right[1])):
        await exchange.send(bytes([byte]))
        await asyncio.sleep(DRIP_S)


async def endless(exchange: Exchange) -> None:
    await exchange.send(http(b"", "200 OK", "transfer-encoding: chunked", length=False))
    while True:
        await exchange.send(b"10000\r\n" + b" " * (1 << 16) + b"\r\n")


async def cached(exchange: Exchange) -> None:
    """Answer as if the first request of all had been this one."""
    if not exchange.is_generation:
        return await exchange.answer()
    body = {**exchange.body, "request_id": exchange.memory["first"]}
    await exchange.send(http(as_json(right(body, exchange.endpoint))))


def after(num: int, bad: Serve) -> Serve:
    """Return a mode that answers right from request `num` on, whatever asks."""

    async def serve(exchange: Exchange) -> None:
        exchange.memory["num"] = exchange.memory.get("num", 0) + 1
        await (bad(exchange) if exchange.memory["num"] <= num else exchange.answer())

    return serve


def ok(serve: Serve) -> Mode:
    return Mode("succeeds", serve)


def fails(serve: Serve) -> Mode:
    return Mode("fails", serve)


def stops(serve: Serve) -> Mode:
    return Mode("stops", serve)


CONNECTION = {
    "right": ok(Exchange.answer),
    "refused": fails(Exchange.answer),  # at the port on which nothing listens
    "reset-in-the-body": fails(raw(lambda body: http(body)[:-20], RESET)),
    "closed-without-a-byte": fails(raw(lambda _: b"", CLOSE)),
    "says-that-it-closes-and-does-not": ok(raw(lambda body: http(body, "200 OK", "connection: close"), HANG)),
    "never-answers": fails(raw(lambda _: b"", HANG)),
    "byte-by-byte-too-slow": fails(drip),
    "two-faults-then-right": ok(after(2, raw(lambda _: b"", RESET))),
}

HEAD = {
    "not-http": fails(raw(lambda _: b"220 mail.example ESMTP\r\n\r\n", CLOSE)),
    "chunked": ok(raw(chunked)),
    "chunked-without-end-of-data": fails(endless),
    "gzip-bomb": fails(raw(lambda _: http(bomb(), "200 OK", "content-encoding: gzip"))),
    "head-of-1-mib": fails(raw(lambda body: http(body, "200 OK", "x-padding: " + "x" * (1 << 20)))),
    "continue-then-silence": fails(raw(lambda _: b"HTTP/1.1 100 Continue\r\n\r\n", HANG)),
}

STATUS = {
    "301-to-itself": stops(status("301 Moved", "location: ")),
    "400-too-long": fails(status("400 Bad Request", body=b'{"error": {"message": "maximum context length is 9"}}')),
    "400-of-megabytes": fails(status("400 Bad Request", body=b"<br>\n" * 500_000)),
    "403": stops(status("403 Forbidden")),
    "404": stops(status("404 Not Found")),
    "429-for-a-moment": fails(status("429 Too Many Requests", "retry-after: 0.1")),
    "429-until-the-end": fails(status("429 Too Many Requests", f"retry-after: {10**400}")),
    "502-of-html": fails(status("502 Bad Gateway", body=b"<html>\r\n<body>nginx</body>\r\n</html>")),
    "503-twice-then-right": ok(after(2, status("503 Service Unavailable"))),
}

BODY = {
    "body-of-html": fails(content(lambda _: b"<html>\n<title>Sign in</title>\n</html>")),
    "body-cut": fails(content(lambda body: body[:-20])),
    "body-huge": fails(content(lambda body: b" " * (20 << 20) + body)),
    "body-bom": ok(content(lambda body: b"\xef\xbb\xbf" + body)),
    "body-after-an-error": fails(content(lambda _: b'{"error": {"message": "CUDA out of memory"}}')),
}

COMPLETION = {
    "no-choices": changed("fails", lambda answer: {**answer, "choices": []}),
    "ids-beyond-the-vocabulary": ids("fails", lambda old: [*old, UNKNOWN_ID]),
    "ids-more-than-asked": ids("fails", lambda old: old * 1000),
    "ids-that-do-not-fit-the-text": choice("succeeds", text="something else"),
    "finish-reason-unknown": choice("fails", finish_reason="content_filter"),
    "finish-reason-abort": choice("fails", finish_reason="abort"),
    "length-with-fewer-tokens": choice("succeeds", finish_reason="length"),  # the server's context may be full
    "answer-to-another-request-with-its-prompt": fails(cached),
    "id-of-a-proxy": changed("succeeds", lambda answer: {**answer, "id": "b3c1", "request_id": "b3c1"}),
}

MODES = CONNECTION | HEAD | STATUS | BODY | COMPLETION


def message(expected: Any, **fields: Any) -> Mode:
    def change(answer: dict[str, Any]) -> Any:
        old = answer["choices"][0]
        return {**answer, "choices": [{**old, "message": {**old["message"], **fields}}]}

    return changed(expected, change)


def usage(expected: Any, value: Any) -> Mode:
    return changed(expected, lambda answer: {**answer, "usage": value})


def error(code: Any) -> Change:
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], "error": {"code": code}}]}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_CREDIT = b'{"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}'
CHAT = {
    "no-choices": COMPLETION["no-choices"],
    "choices-a-number": changed("fails", lambda answer: {**answer, "choices": 3}),
    "choice-with-an-error": changed("fails", error(502)),
    "message-missing": changed("fails", without("message")),
    "message-of-text": choice("fails", message="hello"),
    "content-missing": message("succeeds", content=None),  # all tokens were reasoning
    "content-of-parts": message("succeeds", content=[{"type": "text", "text": "hello"}]),
    "content-of-nonsense": message("fails", content=[1, None, {"type": "text", "text": 3}]),
    "reasoning-beside": message("succeeds", reasoning_content="Let me think."),
    "reasoning-a-number": message("fails", reasoning=7),
    "calls-of-text": message("fails", tool_calls="f()"),
    "calls-without-function": message("fails", tool_calls=[{"id": "a"}]),
    "calls-without-ids": message("succeeds", tool_calls=[{**CALL, "id": None}, {**CALL, "id": ""}]),
    "calls-with-one-id": message("succeeds", tool_calls=[CALL, CALL]),
    "calls-of-no-json": message("succeeds", tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{"}}]),
    "finish-reason-unknown": choice("fails", finish_reason="who knows"),
    "content-filter": choice("fails", finish_reason="content_filter"),
    "cut": choice("succeeds", finish_reason="length"),
    "usage-missing": usage("succeeds", None),
    "usage-negative": usage("succeeds", {"prompt_tokens": -1, "completion_tokens": -1}),
    "usage-enormous": usage("succeeds", {"prompt_tokens": 10**400, "completion_tokens": 10**400}),
    "usage-more-cached-than-read": usage(
        "succeeds",
        {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 99}},
    ),
    "same-answer-again": changed("fails", lambda answer: {**answer, "id": "chatcmpl-the-one-and-only-answer"}),
    "402": stops(status("402 Payment Required")),
    "429-without-credit": stops(status("429 Too Many Requests", body=NO_CREDIT)),
    "403": fails(status("403 Forbidden")),
}
"""What else, or in another way, can go wrong with chat completions."""

SHARED = ("right", "refused", "reset-in-the-body", "never-answers", "body-of-html", "body-cut")
"""Modes below the client of HTTP that both engines have: the policy server's tests try the others."""
CHAT_MODES = {name: MODES[name] for name in SHARED} | STATUS | CHAT


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: dict[str, Any]) -> None:
    """Answer the requests of one connection."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            size = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower()[:15] == b"content-length:"), 0)
            body = json.loads(await reader.readexactly(size)) if size else {}
            _, endpoint, when, name, path = head.split()[1].decode().split("/", 4)
            episode = body.get("request_id", "agentenv-look/").rpartition("/")[0]
            if "messages" in body:
                episode = body["messages"][0]["content"]
            kept = memory.setdefault(f"{endpoint}/{when}/{name}", {"seen": set()})
            exchange = Exchange(reader, writer, endpoint, path, body, kept)
            is_right = (when == "once" and episode in kept["seen"]) or (when != "start" and episode == "agentenv-look")
            kept["seen"].add(episode)
            if body:
                kept.setdefault("first", body.get("request_id"))
            modes = CHAT_MODES if endpoint == "chat" else MODES
            await (exchange.answer() if is_right else modes[name].serve(exchange))


async def main() -> None:
    memory: dict[str, Any] = {}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        server = await asyncio.start_server(lambda r, w: serve(r, w, memory), "127.0.0.1", 0, limit=1 << 24)
        print(server.sockets[0].getsockname()[1], taken.getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
