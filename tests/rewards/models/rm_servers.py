"""Servers of reward models for tests: real ones, on a free port, that answer, fail, drip and hang as they are told."""

import asyncio
import contextlib
import json
import math
from dataclasses import dataclass, field

TOGETHER = 60.0
"""For `max_wait_s`: who comes first waits until `max_batch` have come."""
RESET, HANG = object(), object()
"""Answers: the connection is reset; nothing comes until the client has gone."""


@dataclass
class Status:
    """An answer of another status than 200."""

    code: int
    body: object = "no"
    headers: dict = field(default_factory=dict)


@dataclass
class Asked:
    """What a server was asked; of POSTs only, but for `paths`."""

    url: str = ""
    paths: list = field(default_factory=list)
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    num_now: int = 0
    most: int = 0
    num_gone: int = 0
    """Clients that left while it hung."""


def http(body, *, code=200, headers=None):
    """An answer as bytes."""
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    head = {"Content-Length": len(data), "Connection": "close"} | dict(headers or {})
    lines = [f"HTTP/1.1 {code} X", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


@contextlib.asynccontextmanager
async def server(answer):
    """Answers with what `answer(path, body)` gives, or with what that awaits: an object, a Status, raw bytes, RESET,
    HANG, or an async function that writes to a StreamWriter."""
    asked, tasks = Asked(), set()

    async def one(reader, writer):
        path, headers, body = await _request(reader)
        asked.paths.append(path)
        if body is not None:
            asked.bodies.append(body)
            asked.headers.append(headers)
        asked.num_now += 1
        asked.most = max(asked.most, asked.num_now)
        try:
            await _answered(answer(path, body), reader, writer, asked)
        finally:
            asked.num_now -= 1

    async def handle(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await one(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=512)
    asked.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield asked
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.wait_closed()


async def _request(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    method, path, _ = head[0].split()
    body = json.loads(await reader.readexactly(int(headers["content-length"]))) if method == "POST" else None
    return path, headers, body


async def _answered(answer, reader, writer, asked):
    if asyncio.iscoroutine(answer):
        answer = await answer
    if answer is RESET:
        writer.transport.abort()
    elif answer is HANG:
        await reader.read()
        asked.num_gone += 1
    elif callable(answer):
        await answer(writer)
    else:
        if isinstance(answer, Status):
            answer = http(answer.body, code=answer.code, headers=answer.headers)
        writer.write(answer if isinstance(answer, bytes) else http(answer))
        await writer.drain()


def in_turn(*answers):
    """Each once, then what the last one says: None is the server's own answer."""
    left = list(answers)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def raw_value(ids):
    """What the fake model says of ids; negative or above 1 for all that a template renders."""
    return float(sum((place + 1) * token for place, token in enumerate(ids)) % 1009) - 504.5


class FakeVLLM:
    """As vLLM 0.32 answers, of a model whose head gives `raw(ids)`, a number or several.

    `first` gives answers instead, until it gives None; `switches` are the fields that turn the activation off, and
    `tokenizer` renders messages.
    """

    def __init__(
        self, raw=raw_value, *, first=lambda: None, switches=("use_activation",), max_length=512, tokenizer=None,
        models=("rm",),
    ):  # fmt: skip
        self.raw, self.first, self.switches, self.max_length = raw, first, switches, max_length
        self.tokenizer, self.models = tokenizer, models

    def __call__(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": name, "root": "org/rm", "max_model_len": self.max_length} for name in self.models]}
        answer = self.first()
        if answer is not None:
            return answer
        if path not in ("/classify", "/pooling"):
            return Status(404, {"detail": "Not Found"})
        if body["model"] not in self.models:
            return Status(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        given = body["input"] if "input" in body else [self.rendered(body["messages"])]
        given = [self.tokenizer.encode(each) if isinstance(each, str) else each for each in given]
        return self.refusal(given, body) or self.answered(path, given, body)

    def rendered(self, messages):
        ids = self.tokenizer.apply_chat_template(messages, tokenize=True)
        return list(ids["input_ids"] if hasattr(ids, "keys") else ids)

    def refusal(self, given, body):
        for index, ids in enumerate(given):
            if len(ids) > self.max_length and body.get("truncate_prompt_tokens") is not None:
                given[index] = ids[-self.max_length :] if body["truncation_side"] == "left" else ids[: self.max_length]
            elif len(ids) > self.max_length:
                return Status(400, {"error": {"message": f"maximum context length is {self.max_length} tokens"}})
        return None

    def answered(self, path, given, body):
        active = not any(body.get(name) is False for name in self.switches)
        rows = []
        for index, ids in enumerate(given):
            values = self.raw(ids)
            values = values if isinstance(values, list) else [values]
            if active:
                values = [1 / (1 + math.exp(-max(min(value, 700), -700))) for value in values]
            row = {"index": index, "object": "pooling", "data": values}
            if path == "/classify":
                row = {"index": index, "label": "LABEL_0", "probs": values, "num_classes": len(values)}
            rows.append(row)
        return {"object": "list", "data": rows, "usage": {"prompt_tokens": sum(map(len, given))}}
