"""A judge behind any server with OpenAI's chat completions: vLLM, SGLang, or a paid service.

`CachedJudge` caches its replies by content, in memory or in a file that outlives the process.

Source: OpenAI's API reference, "Create chat completion"; vLLM's additions to it (top_k, min_p, reasoning_content).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentenv._util.calls import waiting
from agentenv._util.http.client import (
    AttemptFailure,
    HTTPClient,
    HTTPErrors,
    RetryPolicy,
    checked_url,
    excerpt,
    is_header_token,
)
from agentenv._util.http.json_bodies import parse_body, parse_json
from agentenv._util.per_loop import PerLoop
from agentenv.core.arguments import number, whole_number
from agentenv.core.types import Message, SamplingParams
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.judges.protocol import (
    JudgeMisaddressed,
    JudgeRefused,
    JudgeTimeout,
    JudgeTruncated,
    JudgeUnavailable,
    JudgeUnreadable,
    JudgeUsage,
    ReplyIndex,
)
from agentenv.rewards.workers.threads import Threads

JUDGING = SamplingParams(temperature=0.0, max_tokens=2048)
"""Default sampling of a judge; votes need a temperature above 0."""
_MAX_BODY_BYTES = 1 << 20
"""Longer answers are rejected without reading them to the end."""
_NO_KEY = "api_key_env of the judge to the name of a variable with the key"
_ERRORS = HTTPErrors(
    unavailable=JudgeUnavailable,
    timeout=JudgeTimeout,
    misaddressed=JudgeMisaddressed,
    refused=JudgeRefused,
    unreadable=JudgeUnreadable,
)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Deadlines, retries and concurrency of requests."""

    limit_s: float = 300.0
    """Time limit of one reply, with all attempts and the pauses between; waiting for a slot does not count."""
    request_s: float = 120.0
    """Time limit of one attempt."""
    max_retries: int = 5
    """Maximum number of attempts after the first."""
    first_pause_s: float = 0.5
    """Longest pause before the second attempt; it doubles before each further one, up to 30 s. A Retry-After of the
    server is always observed."""
    max_concurrent: int = 64
    """Maximum number of concurrent requests on each event loop; further ones wait."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range."""
        for name in ("limit_s", "request_s"):
            number(f"RequestOptions.{name}", getattr(self, name), low=0.001)
        number("RequestOptions.first_pause_s", self.first_pause_s, low=0.0)
        whole_number("RequestOptions.max_retries", self.max_retries)
        whole_number("RequestOptions.max_concurrent", self.max_concurrent, low=1)


class OpenAIJudge:
    """A judge that sends `POST {base_url}/chat/completions`; several event loops may ask it.

    It retries on the statuses 408, 409, 429 and 500 and above, connection failures, attempts that take too long and
    answers that are not a chat completion, but not on other statuses. A reply that was cut off at `max_tokens` is a
    failure. Reasoning that the server reports separately is not part of the reply. Proxies of the environment are not
    used, and redirects are not followed.

    Example::

        judge = OpenAIJudge("http://localhost:8000/v1", "Qwen/Qwen3-8B")
        await PointwiseReward(judge).grade(Response("4", label="4", prompt="2 + 2?"))
        await judge.close()

    Args:
        base_url: the part before `/chat/completions`, as for the openai package.
        model: the served model's name.
        api_key_env: the environment variable that holds the key, read by the constructor; None sends no key.
        sampling: sampling parameters; the seed is varied for each vote and attempt.
        extra_body: more fields of the request, which override ours; None removes a field.
        request_options: deadlines, retries, concurrency.
        usage: the counts to add to; default: its own, `judge.usage`.

    Raises:
        ConfigError: the address is invalid, the variable is not set, or an argument is out of range.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        sampling: SamplingParams = JUDGING,
        extra_body: Mapping[str, Any] | None = None,
        request_options: RequestOptions | None = None,
        usage: JudgeUsage | None = None,
    ) -> None:
        self.url = f"{checked_url('OpenAIJudge.base_url', base_url, path='/v1')}/chat/completions"
        if not isinstance(model, str) or not model:
            raise ConfigError(f"OpenAIJudge.model: expected a name, got {model!r}. Pass the served model's.")
        self.model = model
        self.sampling = sampling
        self.extra_body = dict(extra_body or {})
        self.request_options = request_options or RequestOptions()
        self.usage = usage or JudgeUsage()
        api_key = None if api_key_env is None else os.environ.get(api_key_env, "").strip()
        if api_key is not None and not is_header_token(api_key):
            raise ConfigError(
                f"OpenAIJudge.api_key_env: expected a key in the environment variable {api_key_env!r}, got "
                f"{'other characters than a header may hold' if api_key else 'none'}."
            )
        self._http = HTTPClient(self.url, api_key=api_key, key_name=api_key_env or _NO_KEY, errors=_ERRORS)
        self._policy = RetryPolicy(
            max_attempts=self.request_options.max_retries + 1,
            timeout_s=self.request_options.limit_s,
            first_pause_s=self.request_options.first_pause_s,
        )
        self._free = PerLoop(partial(asyncio.Semaphore, self.request_options.max_concurrent))
        self._starting = PerLoop(asyncio.Lock)
        self._closed = False
        request_bytes(model, [], sampling, self.extra_body)

    @property
    def identity(self) -> str:
        """Model and sampling, on which replies depend besides the messages; for `CachedJudge`."""
        return json.dumps([self.model, sampling_fields(self.sampling) | self.extra_body], sort_keys=True)

    async def complete(self, messages: Sequence[Message]) -> str:
        """Return its reply.

        Raises:
            InfraError: there is none; of the class in `protocol.py` for the reason.
            DataError: the messages are not JSON.
        """
        return await self.reply_at(messages, ReplyIndex())

    async def reply_at(self, messages: Sequence[Message], index: ReplyIndex) -> str:
        """Return the reply with this index; if the sampling has a seed, it is varied by the index. See `complete`."""
        sampling = replace(self.sampling, seed=index.seed(self.sampling.seed))
        content = request_bytes(self.model, messages, sampling, self.extra_body)

        async def attempt(number: int) -> str | AttemptFailure:
            self.usage.add(requests=1, retries=int(number > 1), failures=0)
            async with self._starting.here():
                await asyncio.sleep(0)  # one per round of the loop: 64 that start in the same round block it for 0.1 s
            timeout_s = self.request_options.request_s
            answer = await self._http.attempt("", content, timeout_s=timeout_s, max_bytes=_MAX_BODY_BYTES)
            if isinstance(answer, AttemptFailure):
                return replace(answer, retryable=answer.retryable and not self._closed)
            reply: ChatReply = await parse_body(answer.body, partial(read_chat_reply, where=self.url))
            if reply.whole:
                tokens = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
                self.usage.add(replies=1, uncounted=int(not reply.counted), **tokens)
            if reply.failure is None:
                return reply.text
            return AttemptFailure(reply.failure, retryable=not reply.whole)

        try:
            async with AsyncExitStack() as slot:
                with waiting():
                    await slot.enter_async_context(self._free.here())
                if self._closed:
                    raise JudgeRefused(f"{self.url}: expected an open judge, got one that was closed. Make a new one.")
                limit_s = self.request_options.limit_s
                late = f"{self.url}: expected a reply within {limit_s:g} s, got none. Check the server's load."
                return await self._policy.run(attempt, JudgeTimeout(late))
        except InfraError as error:
            self.usage.fail(error)
            raise

    async def close(self) -> None:
        """Stop asking, and end the requests of this loop. Calling it again does nothing."""
        self._closed = True
        await self._http.close()


MAX_SHOWN = 300
"""Maximum number of characters of an answer in an error message."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A server's answer: a reply, or why it has none; and its tokens."""

    text: str
    failure: InfraError | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counted: bool = False
    """True if the server reported the tokens."""
    whole: bool = True
    """True if it is a chat completion; False for a proxy's page or an incomplete body."""


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling fields of a request; those that only vLLM has are included only if set."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    beyond = {"top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0, "min_tokens": sampling.min_tokens > 0}
    beyond |= {"max_tokens": sampling.max_tokens is not None, "seed": sampling.seed is not None}
    fields |= {name: getattr(sampling, name) for name, given in beyond.items() if given}
    fields |= {"stop": list(sampling.stop)} if sampling.stop else {}
    return fields | ({"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {})


def request_bytes(
    model: str, messages: Sequence[Message], sampling: SamplingParams, extra_body: Mapping[str, Any]
) -> bytes:
    """Return a request's body; fields of `extra_body` replace the others, and None removes a field.

    Raises:
        DataError: the messages are not JSON.
    """
    body = {"model": model, "messages": [dict(message) for message in messages], **sampling_fields(sampling)}
    body = {name: value for name, value in (body | dict(extra_body)).items() if value is not None}
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"judge: expected messages that are JSON, got {error}. Correct the row.") from error


def read_chat_reply(body: bytes, where: str) -> ChatReply:
    """Read a body of status 200; nothing in it raises."""
    got = excerpt(body)
    try:
        found = parse_json(body)
    except ValueError as error:
        found, got = None, excerpt(body, error)
    choices = found.get("choices") if isinstance(found, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(found, dict) or not isinstance(choice, dict) or not isinstance(message, dict):
        failure = JudgeUnreadable(f"{where}: expected a chat completion, got {got}. Check the address.")
        return ChatReply("", failure, whole=False)
    content = message.get("content")
    if isinstance(content, list):  # reasoning is not a reply
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") != "thinking"]
        text = "".join(part for part in parts if isinstance(part, str))
    else:
        text = content if isinstance(content, str) else ""
    reason = choice.get("finish_reason")
    problem: InfraError | None = None
    if reason == "length":
        problem = JudgeTruncated(
            f"{where}: expected a whole reply, got one that was cut off (finish_reason 'length'): {text[-80:]!r}. "
            "Raise max_tokens, or let the judge think less."
        )
    elif reason == "content_filter":
        problem = JudgeRefused(f"{where}: expected a reply, got finish_reason 'content_filter'. Use another judge.")
    elif not text.strip() and message.get("refusal"):
        problem = JudgeRefused(f"{where}: expected a reply, got the refusal {str(message['refusal'])[:MAX_SHOWN]!r}.")
    elif not text.strip():
        thought = message.get("reasoning_content") or message.get("reasoning")
        got = "reasoning and nothing after it" if thought else f"no text (finish_reason {reason!r:.40})"
        problem = JudgeUnreadable(f"{where}: expected a reply, got {got}. Look at the judge's chat template.")
    usage: Any = found.get("usage")
    given = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
    counts = [num for num in given if type(num) is int and 0 <= num < 1 << 53]
    prompt, completion = counts if len(counts) == 2 else (0, 0)
    return ChatReply("" if problem else text, problem, prompt, completion, counted=len(counts) == 2)


# --- the cache --------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""Longest wait for the disk, or for other processes."""


class ReplyCache:
    """The last `max_entries` replies, in memory or in a file of SQLite, which several processes may use.

    If the file cannot be used, a warning is logged once and replies stay in memory. Safe to use from several threads.

    Raises:
        ConfigError: `max_entries` is out of range, or the path is not in a folder.
    """

    def __init__(self, path: str | Path | None = None, *, max_entries: int = 100_000) -> None:
        self.max_entries = whole_number("ReplyCache.max_entries", max_entries, low=1)
        self.path = None if path is None else Path(path)
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise ConfigError(f"ReplyCache.path: expected a file in a folder, got {str(path)!r}. Make the folder.")
        self._thread = Threads(1)
        self._database: sqlite3.Connection | None = None  # this and the next belong to the thread
        self._pid = 0

    async def get(self, key: str) -> str | None:
        """Return the reply of a key, or None."""
        found = await self._run("SELECT reply FROM replies WHERE key = ?", key)
        return json.loads(found[0][0]) if found else None

    async def drop(self, key: str) -> None:
        """Remove a reply, if there is one."""
        await self._run("DELETE FROM replies WHERE key = ?", key)

    async def put(self, key: str, reply: str) -> None:
        """Add a reply; when this returns it is in the file."""
        await self._run("INSERT OR REPLACE INTO replies (key, reply) VALUES (?, ?)", key, json.dumps(reply))
        await self._run("DELETE FROM replies WHERE rowid <= (SELECT max(rowid) FROM replies) - ?", self.max_entries)

    async def _run(self, statement: str, *values: str | int) -> list[tuple[str]]:
        found: list[tuple[str]] = await self._thread.run(lambda: self._execute(statement, values), limit_s=_PATIENCE_S)
        return found

    def _execute(self, statement: str, values: tuple[str | int, ...]) -> list[tuple[str]]:
        if self._pid != os.getpid():  # a connection is of one process
            self._database, self._pid = None, os.getpid()
        try:
            if self._database is None:
                path = self.path or ":memory:"
                self._database = sqlite3.connect(path, timeout=_PATIENCE_S, check_same_thread=False)
                with self._database:
                    self._database.execute("PRAGMA journal_mode = WAL")
                    self._database.execute(
                        "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
                    )
            with self._database:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            if self.path is None:
                raise
            logger.warning("%s: expected a file to keep replies in, got %s. They stay in memory.", self.path, error)
            self.path, self._database = None, None
            return self._execute(statement, values)


class CachedJudge:
    """A judge that is asked only once for each reply, also by concurrent callers.

    A reply is identified by the judge's model and sampling, the messages, and its index: k votes are k replies, and the
    attempt after a reply without a verdict is another one. Failures are not cached, and `forget` removes replies
    without a verdict. Concurrent callers of one reply on the same event loop share the request, which is cancelled when
    the last of them is.

    Args:
        judge: the judge to ask for replies that are not in the cache: an `IndexedJudge` with a `close`, and with an
            `identity`: model and sampling, on which replies depend besides the messages.
        cache: the cache; default: in memory.
        usage: where `cached` and `shared` are counted; default: with the judge's other counts, if it has any.
    """

    def __init__(self, judge: Any, cache: ReplyCache | None = None, *, usage: JudgeUsage | None = None) -> None:
        self.judge, self.cache = judge, cache or ReplyCache()
        given = usage or getattr(judge, "usage", None)
        self.usage: JudgeUsage = given if isinstance(given, JudgeUsage) else JudgeUsage()
        self._pending: PerLoop[dict[str, _PendingReply]] = PerLoop(dict)

    @property
    def identity(self) -> str:
        """Identity of the judge."""
        return str(self.judge.identity)

    async def complete(self, messages: Sequence[Message]) -> str:
        """Return its reply; see `protocol.Judge`."""
        return await self.reply_at(messages, ReplyIndex())

    async def reply_at(self, messages: Sequence[Message], index: ReplyIndex) -> str:
        """Return the reply with this index.

        Raises:
            InfraError: there is none.
            DataError: the messages are not JSON.
        """
        key = reply_key(self.judge.identity, messages, index)
        cached = await self.cache.get(key)
        if cached is not None:
            self.usage.add(cached=1)
            return cached

        async def ask() -> str:
            reply: str = await self.judge.reply_at(messages, index)
            await self.cache.put(key, reply)
            return reply

        pending = self._pending.here()
        shared = pending.get(key)
        if shared is None:
            shared = pending[key] = _PendingReply(asyncio.create_task(ask()))
        else:
            self.usage.add(shared=1)
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if pending.get(key) is shared and (shared.task.done() or not shared.num_waiting):
                del pending[key]
            if not shared.num_waiting:
                shared.task.cancel()

    async def forget(self, messages: Sequence[Message], index: ReplyIndex) -> None:
        """Remove a reply, so that the judge is asked for it the next time."""
        await self.cache.drop(reply_key(self.judge.identity, messages, index))

    async def close(self) -> None:
        """Close the judge."""
        await self.judge.close()


@dataclass(eq=False, slots=True)
class _PendingReply:
    """A request in progress, and the number of callers that wait for it; when the last one leaves, it is cancelled."""

    task: asyncio.Task[str]
    num_waiting: int = 0


def reply_key(identity: str, messages: Sequence[Message], index: ReplyIndex) -> str:
    """Return the cache key of a reply: the same in every process.

    Raises:
        DataError: the messages are not JSON.
    """
    try:
        content = json.dumps([identity, [dict(message) for message in messages], list(index)], sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"judge: expected messages that are JSON, got {error}. Correct the row.") from error
    return hashlib.sha256(content.encode()).hexdigest()
