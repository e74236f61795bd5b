"""Cache replies of judges by content, in memory and in a file that outlives the process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv._util.per_loop import PerLoop
from agentenv.core.arguments import whole_number
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.judges.protocol import JudgeUsage, ReplyIndex
from agentenv.rewards.workers.threads import Threads

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
