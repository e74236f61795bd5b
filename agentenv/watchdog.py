"""Watchdog of a run: says what episodes wait for when none goes on, and what holds the event loop up.

It reads the coroutines of the episodes in flight, a few times per `stall_timeout_s`, so that the loop itself keeps no
books. Time in which the process was stopped (SIGSTOP, a suspended machine) does not count. Native code that keeps the
GIL for ever stops every thread of Python, this one too: then `faulthandler`, which needs no GIL, writes the stacks to
stderr; only SIGKILL ends such a process, and `--resume` goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from agentenv.endpoint.agent import ChatAgentSource
from agentenv.episode import run_episode
from agentenv.errors import RunStopped
from agentenv.loading import EnvSource
from agentenv.runner import EpisodeRunner

LAG_S = 1.0
"""Longest time for which the event loop may be held up without a word."""
WARN_EVERY_S = 60.0
_BEAT_S = 0.1
_CANCEL_GRACE_S = 5.0
_SAVE_GRACE_S = 5.0
"""Longest wait for a dump to be written: what stalls may be the disk."""
_STDERR_FD = 2
_LIBRARY = str(Path(__file__).parent)
_OWN_LOOP = ChatAgentSource.episode.__code__


class State(NamedTuple):
    """How far an episode in flight has come; it goes on when this changes."""

    episode_id: str
    attempt: int
    where: str
    """What it waits for: create, reset, prompt, generate, step, on_truncate or close; "runner" between two attempts and
    while its record is written."""
    turn_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """An episode in flight, for how long nothing has changed in it, and its stack."""

    state: State
    seconds: float
    stack: str


class Watchdog:
    """Watches a runner; a context manager around `guard`, which awaits its `run`.

    Example::

        with Watchdog(runner, folder=out, stall_timeout_s=600.0, tell=note) as watchdog:
            await watchdog.guard(asyncio.ensure_future(runner.run(planned, on_end)))

    Args:
        runner: whose episodes are watched.
        folder: gets `stall-<n>.txt`.
        stall_timeout_s: a stall is told when no episode went on for so long.
        tell: shows a line to the person at the terminal; called from any thread.
        end: ends the process, with a line that says why, from a thread: where code blocks the event loop for good, no
            deadline and no exception can. None leaves such a process to whoever started it.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        folder: Path,
        stall_timeout_s: float,
        tell: Callable[[str], None],
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.runner, self.folder, self.stall_timeout_s, self.tell = runner, folder, stall_timeout_s, tell
        self.end = end
        limits = runner.limits
        # A loop of its own is seen from outside only: nothing but its episode's deadline ends it.
        whole_s = 0.0 if isinstance(runner.source, EnvSource) else limits.episode_timeout_s + 3 * limits.step_timeout_s
        deadlines = (limits.generate_timeout_s, limits.step_timeout_s, stall_timeout_s, whole_s)
        # What a deadline will end is left to it.
        self.stop_after_s = stall_timeout_s + max(deadline for deadline in deadlines if deadline is not None)
        self.num_dumps = 0
        self._since: dict[str, tuple[State, float]] = {}
        self._lag = _LagMonitor(self)

    def __enter__(self) -> Self:
        self._lag.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lag.stop()

    async def guard(self, work: asyncio.Future[Any]) -> None:
        """Await `work`, the runner's, while `watch` watches; cancelling this cancels it.

        Raises:
            RunStopped: no episode went on; `work` is cancelled, and given up if it ignores that.
        """
        watch = asyncio.ensure_future(self.watch())
        work.add_done_callback(_forget)
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
            return watch.result()
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
        finally:
            watch.cancel()

    async def watch(self) -> None:
        """Look again and again until cancelled.

        Raises:
            RunStopped: no episode went on, for one period more after it was told, and for longer than any deadline.
        """
        tick_s = self.stall_timeout_s / 8
        seen, last, idle_s, told = -1, time.monotonic(), 0.0, False
        while True:
            self._lag.arm(3 * tick_s + self.stall_timeout_s)
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * tick_s), now
            moved = self._look(passed_s)
            if moved or self.runner.num_done != seen or not self.runner.in_flight:
                seen, idle_s, told = self.runner.num_done, 0.0, False
                continue
            idle_s += passed_s
            if idle_s >= self.stall_timeout_s and not told:
                told = True
                self._tell_stall(idle_s)
            if idle_s >= self.stop_after_s:
                raise RunStopped(
                    f"run: expected an episode to go on within {self.stop_after_s:g} s, got none of "
                    f"{len(self.runner.in_flight)} in flight. {self.folder / f'stall-{self.num_dumps}.txt'} shows what "
                    "they wait for; mend that and --resume."
                )

    def _look(self, passed_s: float) -> bool:
        """Whether an episode went on since the last look, began or ended."""
        before, self._since = self._since, {}
        for key, task in self.runner.in_flight.items():
            state = state_of(key, task)
            old, waited_s = before.get(key, (None, 0.0))
            self._since[key] = (state, waited_s + passed_s if state == old else 0.0)
        return before.keys() != self._since.keys() or any(not waited_s for _, waited_s in self._since.values())

    def waiting(self) -> list[Waiting]:
        """Every episode in flight, the longest waiting first."""
        found = []
        for key, task in self.runner.in_flight.items():
            state = state_of(key, task)
            old, waited_s = self._since.get(key, (None, 0.0))
            stack = "".join(line for frame in frames_of(task) for line in traceback.format_stack(frame, limit=1))
            found.append(Waiting(state, waited_s if state == old else 0.0, stack))
        return sorted(found, key=lambda each: -each.seconds)

    def _tell_stall(self, idle_s: float) -> None:
        self.num_dumps += 1
        path = self.folder / f"stall-{self.num_dumps}.txt"
        waiting = self.waiting()
        saved = write_dump(path, f"{len(waiting)} episodes in flight, none went on for {idle_s:.1f} s", waiting)
        first = waiting[0].state
        self.tell(
            f"stalled: {len(waiting)} episodes in flight and none went on for {idle_s:.1f} s; the first, "
            f"{first.episode_id}, waits in {first.where} of turn {first.turn_index}. {saved}"
        )


def end_process(reason: str) -> None:
    """End the process as a run that was stopped, from any thread and whatever the others do: as the command would."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(f"agentenv: error: {reason}\n")
        sys.stderr.flush()
    os._exit(RunStopped.exit_code)


def write_dump(path: Path, title: str, waiting: list[Waiting]) -> str:
    """Write what episodes wait for, and every thread's stack; gives a sentence that says where it is."""
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}", ""]
    lines.append(f"{'episode':<32} {'attempt':>7} {'where':<12} {'turn':>4} {'tokens':>7} {'waits s':>8}")
    stacks: dict[str, list[str]] = {}
    for each in waiting:
        episode_id, attempt, where, turn_index, num_tokens = each.state
        lines.append(f"{episode_id:<32} {attempt:>7} {where:<12} {turn_index:>4} {num_tokens:>7} {each.seconds:>8.1f}")
        stacks.setdefault(each.stack, []).append(episode_id)
    for stack, ids in stacks.items():
        lines += ["", f"{len(ids)} wait here: {', '.join(ids[:8])}{', …' if len(ids) > 8 else ''}", stack.rstrip()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame)).rstrip()
        lines += ["", f"thread {names.get(ident, ident)}", stack]
    return _save(path, "\n".join(lines) + "\n")


def _save(path: Path, text: str) -> str:
    said: list[str] = []

    def save() -> None:
        """Write, in a thread that may never return."""
        try:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            said.append(f"Stacks: {path}")
        except OSError as error:
            said.append(f"{path} cannot be written ({error}).")

    try:
        thread = threading.Thread(target=save, name="agentenv-dump", daemon=True)
        thread.start()
    except RuntimeError as error:
        return f"{path} cannot be written ({error})."
    thread.join(_SAVE_GRACE_S)
    return said[0] if said else f"{path} cannot be written (the disk does not answer)."


def state_of(episode_id: str, task: asyncio.Task[Any] | None) -> State:
    """How far the episode that a task runs has come."""
    for frame in frames_of(task):
        if frame.f_code is run_episode.__code__ and (episode := frame.f_locals.get("episode")) is not None:
            trajectory = episode.trajectory
            num_tokens = sum(len(segment.token_ids) for segment in trajectory.segments)
            num_turns = len(trajectory.turns)
            # The turn of an action that the environment still judges is that action's.
            judged = num_turns == 0 or trajectory.turns[-1].result is not None
            return State(episode_id, trajectory.attempt, episode.where, num_turns - (not judged), num_tokens)
        if frame.f_code is _OWN_LOOP and (session := frame.f_locals.get("session")) is not None:
            return State(episode_id, session.key.attempt, "run", session.num_requests, 0)
    return State(episode_id, 0, "runner", 0, 0)


def frames_of(task: asyncio.Task[Any] | None) -> Iterator[FrameType]:
    """The frames of a task from the outermost in, and on into the task that a function of agentenv awaits."""
    seen: set[int] = set()
    while task is not None and id(task) not in seen:
        seen.add(id(task))
        awaited: Any = task.get_coro()
        task = None
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
            if frame is None:
                break
            yield frame
            if frame.f_code.co_filename.startswith(_LIBRARY):
                own = [each for each in frame.f_locals.values() if isinstance(each, asyncio.Task) and not each.done()]
                task = own[0] if own else task
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)


def _forget(work: asyncio.Future[None]) -> None:
    # Of work that was given up nobody asks for the exception, which asyncio would complain about.
    if not work.cancelled():
        work.exception()


class _LagMonitor:
    """Beats on the event loop and listens from a thread, which sees what the loop is doing when a beat is late."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._ended = threading.Event()
        self._beat_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._armed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, on the running loop and in this thread."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._beat()
        thread = threading.Thread(target=self._listen, name="agentenv-watchdog", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._watchdog.tell(f"the event loop is not watched, only the episodes are: {error}")
            return
        self._thread = thread

    def stop(self) -> None:
        """End; the thread is gone when this returns."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
        if self._thread is not None:
            self._thread.join()

    def arm(self, seconds: float) -> None:
        """Have all stacks on stderr in so many seconds, even where the GIL is never let go; until armed again."""
        with contextlib.suppress(ValueError, OSError, OverflowError):  # no stderr: nobody who reads it
            faulthandler.dump_traceback_later(seconds, file=_STDERR_FD)
            self._armed = True

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _listen(self) -> None:
        warned = -WARN_EVERY_S
        dumped, last = False, time.monotonic()
        while not self._ended.wait(_BEAT_S):
            now = time.monotonic()
            late_s, last = now - last, now
            if late_s > LAG_S / 2:  # the process was stopped, or this thread was held up as well
                self._beat_at = max(self._beat_at, now - LAG_S / 2)
                continue
            lag_s = now - self._beat_at
            if lag_s > LAG_S and now - warned >= WARN_EVERY_S:
                warned = now
                self._warn(lag_s)
            if lag_s <= self._watchdog.stall_timeout_s:
                dumped = False
            elif not dumped:
                dumped = True
                self._dump(lag_s)
            elif lag_s > self._watchdog.stop_after_s and self._watchdog.end is not None:
                self._watchdog.end(
                    f"run: expected the event loop to be free within {self._watchdog.stop_after_s:g} s, got one held "
                    f"up {self._where()}. Mend it and --resume."
                )

    def _where(self) -> str:
        """Who holds the loop: the innermost code that is neither ours nor a library's."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "its thread is gone"
        stack = traceback.extract_stack(frame)
        libraries = (_LIBRARY, sys.base_prefix, sys.prefix, "<")
        own = [each for each in stack if not each.filename.startswith(libraries)] or stack
        inner = stack[-1]
        return (
            f"by {own[-1].name} at {own[-1].filename}:{own[-1].lineno} "
            f"(now in {inner.name}, {inner.filename}:{inner.lineno})"
        )

    def _warn(self, lag_s: float) -> None:
        self._watchdog.tell(
            f"the event loop, on which all episodes run, is held up for {lag_s:.1f} s {self._where()}. Make it a plain "
            "`def` method, which runs in a thread, or await instead: no time limit can end it here."
        )

    def _dump(self, lag_s: float) -> None:
        watchdog = self._watchdog
        watchdog.num_dumps += 1
        path = watchdog.folder / f"stall-{watchdog.num_dumps}.txt"
        saved = write_dump(path, f"the event loop is held up for {lag_s:.1f} s", [])
        watchdog.tell(f"stalled: the event loop is held up for {lag_s:.1f} s. {saved}")
