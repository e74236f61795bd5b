"""Replies that were had once are not asked for again: by content, in memory and in a file that outlives the process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentenv.agent import call
from agentenv.errors import ConfigError, DataError
from agentenv.rewards._arguments import whole_number
from agentenv.rewards.judges.draws import Draw
from agentenv.rewards.judges.usage import Usage
from agentenv.rewards.per_loop import PerLoop
from agentenv.types import Message

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")


class CacheableJudge(Protocol):
    """A `draws.DrawingJudge` that says who it is, as those of this package do."""

    @property
    def identity(self) -> str:
        """What its replies depend on besides the messages: model and sampling."""

    async def complete(self, messages: Sequence[Message]) -> str:
        """Its reply."""

    async def draw(self, messages: Sequence[Message], draw: Draw) -> str:
        """That one of its replies."""

    async def close(self) -> None:
        """Free what it holds."""


class ReplyCache:
    """The last `max_entries` replies that were had; safe to use from several threads.

    With a `path` each is also written there as a line of JSON, and what stands there is read at the first need. Several
    processes may write to one file; each reads the others' lines when it starts. A line that a crash cut off is left
    out, and costs no other. Where the file cannot be written, that is said once and replies are kept in memory only.

    Raises:
        ConfigError: `max_entries` is no number of entries, or the path's folder is none.
    """

    def __init__(self, path: str | Path | None = None, *, max_entries: int = 100_000) -> None:
        self.max_entries = whole_number("ReplyCache.max_entries", max_entries, low=1)
        self.path = None if path is None else Path(path)
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise ConfigError(f"ReplyCache.path: expected a file in a folder, got {str(path)!r}. Make the folder.")
        self._replies: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()  # guards the replies, and that the file is read once
        self._read, self._broken = self.path is None, False
        self._writing = threading.Lock()  # guards the file, and that trouble with it is said once
        self._loading = PerLoop(asyncio.Lock)  # so that one thread reads, however many ask at once
        self.num_torn = 0
        """Lines of the file that could not be read."""

    async def get(self, key: str) -> str | None:
        """The reply of a key, or None."""
        if not self._read:
            async with self._loading.here():
                if not self._read:
                    await call(self._load)
        with self._lock:
            if key in self._replies:
                self._replies.move_to_end(key)
            return self._replies.get(key)

    async def drop(self, key: str) -> None:
        """Forget a reply, where there is one; when this returns that is in the file."""
        with self._lock:
            known = self._replies.pop(key, None)
        if known is not None and self.path is not None:
            await call(self._append, {"key": key, "forgotten": True})

    async def put(self, key: str, reply: str) -> None:
        """Keep a reply; when this returns it is in the file."""
        with self._lock:
            self._keep(key, reply)
        if self.path is not None:
            await call(self._append, {"key": key, "reply": reply})

    def _keep(self, key: str, reply: str) -> None:
        self._replies[key] = reply
        self._replies.move_to_end(key)
        while len(self._replies) > self.max_entries:
            self._replies.popitem(last=False)

    def _load(self) -> None:
        with self._lock:
            if self._read or self.path is None:
                return
            try:
                with self.path.open("rb") as file:
                    for line in file:
                        self._take(line)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._give_up(error)
            self._read = True

    def _take(self, line: bytes) -> None:
        """One line of the file: a reply, nothing, or what is left of one."""
        if not line.strip():
            return
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        key, reply = (found.get("key"), found.get("reply")) if isinstance(found, dict) else (None, None)
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            self.num_torn += 1
        elif isinstance(reply, str):
            self._keep(key, reply)
        elif found.get("forgotten") is True:
            self._replies.pop(key, None)
        else:
            self.num_torn += 1

    def _append(self, said: Mapping[str, object]) -> None:
        """One write, between two ends of lines: what others left unfinished stays on a line of its own."""
        assert self.path is not None
        line = b"\n" + json.dumps(said).encode() + b"\n"
        with self._writing:
            if self._broken:
                return
            try:
                file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                try:
                    written = os.write(file, line)
                finally:
                    os.close(file)
            except OSError as error:
                self._give_up(error)
            else:
                if written < len(line):
                    self._give_up(f"{written} of {len(line)} bytes could be written")

    def _give_up(self, problem: object) -> None:
        logger.warning("%s: expected a file to keep replies in, got %s. They stay in memory.", self.path, problem)
        self._broken = True


class CachedJudge:
    """A judge that is not asked twice for one reply: not later, and not by two at the same time.

    A reply belongs to the judge's model and sampling, the messages, and its draw: k votes are k replies, and after one
    without a verdict the next attempt is another one. Failures are not kept, and `forget` is for replies to a question
    that came to nothing. Who asks for what somebody else is asking
    for, on the same event loop, waits for that; the judge is let go of when nobody waits any more.

    Args:
        judge: who is asked for what is not known.
        cache: where replies are kept; by default in memory.
        usage: where `cached` and `shared` are counted; by default with the judge's other counts, where it has any.
    """

    def __init__(self, judge: CacheableJudge, cache: ReplyCache | None = None, *, usage: Usage | None = None) -> None:
        self.judge, self.cache = judge, cache or ReplyCache()
        given = usage or getattr(judge, "usage", None)
        self.usage: Usage = given if isinstance(given, Usage) else Usage()
        self._asked: PerLoop[dict[str, _Asked]] = PerLoop(dict)

    @property
    def identity(self) -> str:
        """The judge's."""
        return self.judge.identity

    async def complete(self, messages: Sequence[Message]) -> str:
        """Its reply; see `judge.Judge`."""
        return await self.draw(messages, Draw())

    async def draw(self, messages: Sequence[Message], draw: Draw) -> str:
        """That one of its replies.

        Raises:
            InfraError: none can be had.
            DataError: the messages are no JSON.
        """
        key = reply_key(self.judge.identity, messages, draw)
        known = await self.cache.get(key)
        if known is not None:
            self.usage.add(cached=1)
            return known
        asked = self._asked.here()
        shared = asked.get(key)
        if shared is None:
            shared = asked[key] = _Asked(asyncio.create_task(self._ask(key, messages, draw)))
        else:
            self.usage.add(shared=1)
        try:
            return await shared.reply()
        finally:
            if asked.get(key) is shared and shared.over:
                del asked[key]

    async def forget(self, messages: Sequence[Message], draw: Draw) -> None:
        """Ask the judge itself for that reply, the next time."""
        await self.cache.drop(reply_key(self.judge.identity, messages, draw))

    async def close(self) -> None:
        """Close the judge."""
        await self.judge.close()

    async def _ask(self, key: str, messages: Sequence[Message], draw: Draw) -> str:
        reply = await self.judge.draw(messages, draw)
        await self.cache.put(key, reply)
        return reply


class _Asked:
    """One question under way, and how many wait for the reply."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task, self.over = task, False
        self._num_waiting = 0

    async def reply(self) -> str:
        """The reply; where the last one who waits is cancelled, so is the question."""
        self._num_waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._num_waiting -= 1
            self.over = self.task.done() or not self._num_waiting
            if not self._num_waiting:
                self.task.cancel()


def reply_key(identity: str, messages: Sequence[Message], draw: Draw) -> str:
    """What a reply is kept under: the same in every process.

    Raises:
        DataError: the messages are no JSON.
    """
    try:
        content = json.dumps([identity, [dict(message) for message in messages], list(draw)], sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"judge: expected messages that are JSON, got {error}. Correct the row.") from error
    return hashlib.sha256(content.encode()).hexdigest()
