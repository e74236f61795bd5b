"""Cache replies of judges by content, in memory and in a file that outlives the process."""

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

from agentenv._util.calls import call
from agentenv._util.per_loop import PerLoop
from agentenv.core.arguments import whole_number
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.judges.protocol import ReplyIndex
from agentenv.rewards.judges.usage import JudgeUsage

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")


class CacheableJudge(Protocol):
    """An `IndexedJudge` with an identity, as those of this package have."""

    @property
    def identity(self) -> str:
        """Model and sampling, on which replies depend besides the messages."""

    async def complete(self, messages: Sequence[Message]) -> str:
        """Return its reply."""

    async def reply_at(self, messages: Sequence[Message], index: ReplyIndex) -> str:
        """Return the reply with this index."""

    async def close(self) -> None:
        """Free its resources."""


class ReplyCache:
    """The last `max_entries` replies; safe to use from several threads.

    With a `path` each reply is also appended there as a line of JSON, and the file is read at first use. Several
    processes may write to one file; each reads the others' lines when it starts. A line that a crash cut off is skipped
    and damages no other. If the file cannot be written, a warning is logged once and replies stay in memory.

    Raises:
        ConfigError: `max_entries` is out of range, or the path is not in a folder.
    """

    def __init__(self, path: str | Path | None = None, *, max_entries: int = 100_000) -> None:
        self.max_entries = whole_number("ReplyCache.max_entries", max_entries, low=1)
        self.path = None if path is None else Path(path)
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise ConfigError(f"ReplyCache.path: expected a file in a folder, got {str(path)!r}. Make the folder.")
        self._replies: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()  # guards the replies, and that the file is read once
        self._read = self.path is None
        self._broken = False
        self._writing = threading.Lock()  # guards the file, so that its failure is logged once
        self._loading = PerLoop(asyncio.Lock)  # so that one thread reads for all callers
        self.num_torn = 0
        """Lines of the file that could not be read."""

    async def get(self, key: str) -> str | None:
        """Return the reply of a key, or None."""
        if not self._read:
            async with self._loading.here():
                if not self._read:
                    await call(self._load)
        with self._lock:
            if key in self._replies:
                self._replies.move_to_end(key)
            return self._replies.get(key)

    async def drop(self, key: str) -> None:
        """Remove a reply, if there is one; when this returns the file says so."""
        with self._lock:
            known = self._replies.pop(key, None)
        if known is not None and self.path is not None:
            await call(self._append, {"key": key, "forgotten": True})

    async def put(self, key: str, reply: str) -> None:
        """Add a reply; when this returns it is in the file."""
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
                    for line in filter(bytes.strip, file):
                        try:
                            found = json.loads(line)
                        except (ValueError, RecursionError):
                            found = None
                        entry = found if isinstance(found, dict) else {}
                        key, reply = entry.get("key"), entry.get("reply")
                        if not isinstance(key, str) or not _KEY.fullmatch(key):
                            self.num_torn += 1
                        elif isinstance(reply, str):
                            self._keep(key, reply)
                        elif entry.get("forgotten") is True:
                            self._replies.pop(key, None)
                        else:
                            self.num_torn += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                self._give_up(error)
            self._read = True

    def _append(self, entry: Mapping[str, object]) -> None:
        """Append an entry in one write, between two line ends, so that incomplete lines of others stay separate."""
        assert self.path is not None
        line = b"\n" + json.dumps(entry).encode() + b"\n"
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
    """A judge that is asked only once for each reply, also by concurrent callers.

    A reply is identified by the judge's model and sampling, the messages, and its index: k votes are k replies, and the
    attempt after a reply without a verdict is another one. Failures are not cached, and `forget` removes replies
    without a verdict. Concurrent callers of one reply on the same event loop share the request, which is cancelled when
    the last of them is.

    Args:
        judge: the judge to ask for replies that are not in the cache.
        cache: the cache; default: in memory.
        usage: where `cached` and `shared` are counted; default: with the judge's other counts, if it has any.
    """

    def __init__(
        self, judge: CacheableJudge, cache: ReplyCache | None = None, *, usage: JudgeUsage | None = None
    ) -> None:
        self.judge, self.cache = judge, cache or ReplyCache()
        given = usage or getattr(judge, "usage", None)
        self.usage: JudgeUsage = given if isinstance(given, JudgeUsage) else JudgeUsage()
        self._pending: PerLoop[dict[str, _PendingReply]] = PerLoop(dict)

    @property
    def identity(self) -> str:
        """Identity of the judge."""
        return self.judge.identity

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
        pending = self._pending.here()
        shared = pending.get(key)
        if shared is None:
            shared = pending[key] = _PendingReply(asyncio.create_task(self._ask(key, messages, index)))
        else:
            self.usage.add(shared=1)
        try:
            return await shared.reply()
        finally:
            if pending.get(key) is shared and shared.over:
                del pending[key]

    async def forget(self, messages: Sequence[Message], index: ReplyIndex) -> None:
        """Remove a reply, so that the judge is asked for it the next time."""
        await self.cache.drop(reply_key(self.judge.identity, messages, index))

    async def close(self) -> None:
        """Close the judge."""
        await self.judge.close()

    async def _ask(self, key: str, messages: Sequence[Message], index: ReplyIndex) -> str:
        reply = await self.judge.reply_at(messages, index)
        await self.cache.put(key, reply)
        return reply


class _PendingReply:
    """A request in progress, and the number of callers that wait for it."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task = task
        self.over = False
        self._num_waiting = 0

    async def reply(self) -> str:
        """Return the reply; if the last caller that waits is cancelled, so is the request."""
        self._num_waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._num_waiting -= 1
            self.over = self.task.done() or not self._num_waiting
            if not self._num_waiting:
                self.task.cancel()


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
