"""A server with OpenAI's chat completions on loopback, in a thread: what a test's function says, it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

Answer = dict[str, Any]


def called(*calls: tuple[str, Any], content: str | None = None) -> Answer:
    """Return a message with calls, given as names and arguments; arguments that are text stay as they are."""
    shaped = [
        {"id": f"call_{name}_{index}", "type": "function", "function": {"name": name, "arguments": as_text(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": shaped}


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def completion(message: str | Answer, *, finish_reason: str = "", usage: Any = (20, 5)) -> Answer:
    """Return a chat completion; `usage` is the tokens of prompt and answer."""
    message = {"role": "assistant", "content": message} if isinstance(message, str) else message
    reason = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    found = {
        "object": "chat.completion",
        "model": "the-model-2026-01-01",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }
    if usage:
        found["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return found


@dataclass
class Served:
    """A running server."""

    base_url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the completions that were asked for."""
    keys: list[str | None] = field(default_factory=list)
    """Their Authorization headers."""


@contextmanager
def served(answer: Callable[[dict[str, Any]], Any]) -> Iterator[Served]:
    """Serve what `answer` returns for a body: a message, text, a completion, or (status, headers, content)."""
    numbers, lock = count(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(200, {}, {"data": [{"id": "the-model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = next(numbers)
                here.requests.append(body)
                here.keys.append(self.headers.get("authorization"))
            found = answer(body)
            if isinstance(found, tuple):
                return self.reply(*found)
            whole = found if isinstance(found, dict) and "choices" in found else completion(found)
            self.reply(200, {}, {"id": f"chatcmpl-0123456789abcdef-{number}", **whole})

        def reply(self, status: int, headers: dict[str, str], content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    here = Served(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
