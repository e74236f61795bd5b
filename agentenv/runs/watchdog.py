"""Watchdog of a run: reports what episodes wait for when none makes progress, and what blocks the event loop.

It reads `EpisodeRunner.in_flight`, where the loop publishes how far each episode is, a few times per
`stall_timeout_s`. Time in which the process was stopped (SIGSTOP, a suspended machine) does not count. Native code that
never releases the GIL stops every Python thread, this one too: then `faulthandler`, which needs no GIL, writes the
stacks to stderr; only SIGKILL ends such a process, and `--resume` continues its run.
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

from agentenv._util.paths import PACKAGE, is_own_import
from agentenv._util.plurals import counted
from agentenv.episode.runner import EpisodeRunner
from agentenv.episode.setup import EpisodeProgress
from agentenv.episode.source import EnvSource
from agentenv.errors import RunStopped

LAG_S = 1.0
"""Seconds for which the event loop may be blocked without a warning."""
WARN_EVERY_S = 60.0
_BEAT_S = 0.1
_CANCEL_GRACE_S = 5.0
_SAVE_GRACE_S = 5.0
"""Longest wait for a dump to be written: the disk may be the cause of the stall."""
_STDERR_FD = 2
_LIBRARY = str(PACKAGE)


class State(NamedTuple):
    """How far an episode in flight is; it makes progress when this changes."""

    episode_id: str
    attempt: int
    where: str
    """The value of its `Stage`."""
    turn_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """An episode in flight, its stack, and the time since it last made progress."""

    state: State
    seconds: float
    stack: str


class Watchdog:
    """Watches a runner; a context manager around `guard`, which awaits the runner's `run`.

    Example::

        with Watchdog(runner, folder=out, stall_timeout_s=600.0, tell=note) as watchdog:
            await watchdog.guard(asyncio.ensure_future(runner.run(planned, on_end)))

    Args:
        runner: the runner to watch.
        folder: gets `stall-<n>.txt`.
        stall_timeout_s: a stall is reported when no episode made progress for so long.
        tell: shows a line at the terminal; called from any thread.
        end: ends the process with a line that says why, from a thread: if code blocks the event loop forever, no
            deadline and no exception can end it. None leaves such a process running.
        grading_s: time limit of grading a group, for which episodes may wait.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        folder: Path,
        stall_timeout_s: float,
        tell: Callable[[str], None],
        end: Callable[[str], None] | None = None,
        grading_s: float = 0.0,
    ) -> None:
        self.runner = runner
        self.folder = folder
        self.stall_timeout_s = stall_timeout_s
        self.tell = tell
        self.end = end
        limits = runner.setup.limits
        # An agent with its own loop is visible from outside only: nothing but its episode's deadline ends it.
        whole_s = 0.0 if isinstance(runner.source, EnvSource) else limits.episode_timeout_s + 3 * limits.step_timeout_s
        deadlines = (limits.generate_timeout_s, limits.step_timeout_s, stall_timeout_s, whole_s, grading_s)
        # A stall that a deadline will end is left to the deadline.
        self.stop_after_s = stall_timeout_s + max(deadline for deadline in deadlines if deadline is not None)
        self.num_dumps = 0
        self._is_dumped = False  # the stall of the event loop that lasts now
        self._since: dict[str, tuple[State, float]] = {}
        self._lag = LagMonitor(tell, self._blocked)

    def __enter__(self) -> Self:
        self._lag.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lag.stop()

    async def guard(self, work: asyncio.Future[Any]) -> None:
        """Await `work`, the run of the runner, beside `watch`; cancelling this call cancels it.

        Raises:
            RunStopped: no episode made progress; `work` is cancelled, and abandoned if it ignores that.
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
        """Look at the runner periodically until cancelled.

        Raises:
            RunStopped: no episode made progress for one period after the report, and for longer than any deadline.
        """
        tick_s = self.stall_timeout_s / 8
        seen, last, idle_s, is_reported = -1, time.monotonic(), 0.0, False
        while True:
            self._lag.arm(3 * tick_s + self.stall_timeout_s)
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * tick_s), now
            before, self._since = self._since, {}
            for key, progress in self.runner.in_flight.items():
                state = state_of(key, progress)
                old, waited_s = before.get(key, (None, 0.0))
                self._since[key] = (state, waited_s + passed_s if state == old else 0.0)
            moved = before.keys() != self._since.keys() or any(not waited_s for _, waited_s in self._since.values())
            if moved or self.runner.num_done != seen or not self.runner.in_flight:
                seen, idle_s, is_reported = self.runner.num_done, 0.0, False
                continue
            idle_s += passed_s
            if idle_s >= self.stall_timeout_s and not is_reported:
                is_reported = True
                self.num_dumps += 1
                path, waiting = self.folder / f"stall-{self.num_dumps}.txt", self.waiting()
                found = f"{counted(len(waiting), 'episode')} in flight"
                saved = write_dump(path, f"{found}, none made progress for {idle_s:.1f} s", waiting)
                first = waiting[0].state
                self.tell(
                    f"stalled: {found} and none made progress for {idle_s:.1f} s; the first, "
                    f"{first.episode_id}, waits in {first.where} of turn {first.turn_index}. {saved}"
                )
            if idle_s >= self.stop_after_s:
                raise RunStopped(
                    f"run: expected an episode to make progress within {self.stop_after_s:g} s, got none of "
                    f"{len(self.runner.in_flight)} in flight. {self.folder / f'stall-{self.num_dumps}.txt'} shows what "
                    "they wait for; fix that and --resume."
                )

    def _blocked(self, lag_s: float, where: Callable[[], str]) -> None:
        """Write the stacks of a stall of the event loop once, and end the process if the loop stays blocked."""
        if lag_s <= self.stall_timeout_s:
            self._is_dumped = False
        elif not self._is_dumped:
            self._is_dumped = True
            self.num_dumps += 1
            path = self.folder / f"stall-{self.num_dumps}.txt"
            saved = write_dump(path, f"the event loop is blocked for {lag_s:.1f} s", [])
            self.tell(f"stalled: the event loop is blocked for {lag_s:.1f} s. {saved}")
        elif lag_s > self.stop_after_s and self.end is not None:
            self.end(
                f"run: expected the event loop to be free within {self.stop_after_s:g} s, got one "
                f"blocked {where()}. Fix that and --resume."
            )

    def waiting(self) -> list[Waiting]:
        """Return every episode in flight, the longest waiting first."""
        found = []
        for key, progress in self.runner.in_flight.items():
            state = state_of(key, progress)
            old, waited_s = self._since.get(key, (None, 0.0))
            stack = "".join(
                line for frame in frames_of(progress.task) for line in traceback.format_stack(frame, limit=1)
            )
            found.append(Waiting(state, waited_s if state == old else 0.0, stack))
        return sorted(found, key=lambda each: -each.seconds)


def end_process(reason: str) -> None:
    """End the process like the command when a run is stopped, from any thread and without waiting for others."""
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(f"agentenv: error: {reason}\n")
        sys.stderr.flush()
    os._exit(RunStopped.exit_code)


def write_dump(path: Path, title: str, waiting: list[Waiting]) -> str:
    """Write what episodes wait for and every thread's stack, and return a sentence with the path."""
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
    text, outcomes = "\n".join(lines) + "\n", list[str]()

    def save() -> None:
        try:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            outcomes.append(f"Stacks: {path}")
        except OSError as error:
            outcomes.append(f"{path} cannot be written ({error}).")

    try:
        thread = threading.Thread(target=save, name="agentenv-dump", daemon=True)
        thread.start()
    except RuntimeError as error:
        return f"{path} cannot be written ({error})."
    thread.join(_SAVE_GRACE_S)
    return outcomes[0] if outcomes else f"{path} cannot be written (the disk does not answer)."


def state_of(episode_id: str, progress: EpisodeProgress) -> State:
    """Return how far an episode is, as it publishes it."""
    return State(episode_id, progress.attempt, progress.stage.value, progress.turn_index, progress.num_tokens)


def frames_of(task: asyncio.Task[Any] | None) -> Iterator[FrameType]:
    """Yield the frames of a task, outermost first, then those of the task that a function of agentenv awaits."""
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
    # asyncio would warn of an exception that is never retrieved: that of abandoned work is not.
    if not work.cancelled():
        work.exception()


class LagMonitor:
    """Beats on the event loop and listens in a thread, which sees what the loop does when a beat is late.

    Args:
        tell: shows a line; called from the thread.
        blocked: called from the thread at each beat with the seconds for which the loop is blocked, and by what.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        blocked: Callable[[float, Callable[[], str]], None] = lambda lag_s, where: None,
    ) -> None:
        self._tell, self._blocked = tell, blocked
        self._ended = threading.Event()
        self._beat_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._armed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start, on the running loop and in this thread."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._beat()
        thread = threading.Thread(target=self._listen, name="agentenv-watchdog", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._tell(f"the event loop is not watched, only the episodes are: {error}")
            return
        self._thread = thread

    def stop(self) -> None:
        """Stop; the thread has ended when this returns."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
        if self._thread is not None:
            self._thread.join()

    def arm(self, seconds: float) -> None:
        """Dump all stacks to stderr in so many seconds unless armed again, even if the GIL is never released."""
        with contextlib.suppress(ValueError, OSError, OverflowError):  # stderr is missing or closed
            faulthandler.dump_traceback_later(seconds, file=_STDERR_FD)
            self._armed = True

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _listen(self) -> None:
        warned, imported, last = -WARN_EVERY_S, -LAG_S, time.monotonic()
        while not self._ended.wait(_BEAT_S):
            now = time.monotonic()
            late_s, last = now - last, now
            if late_s > LAG_S / 2:  # the process was stopped, or this thread was blocked, too
                self._beat_at = max(self._beat_at, now - LAG_S / 2)
                continue
            lag_s = now - self._beat_at
            if lag_s > LAG_S / 2 and is_own_import(sys._current_frames().get(self._loop_thread)):
                imported = now  # it happens once, and no environment causes it
            if min(lag_s, now - imported) > LAG_S and now - warned >= WARN_EVERY_S:
                warned = now
                self._tell(
                    f"the event loop, on which all episodes run, is blocked for {lag_s:.1f} s {self._where()}. Make it "
                    "a plain `def` method, which runs in a thread, or await instead: no time limit can end it here."
                )
            self._blocked(lag_s, self._where)

    def _where(self) -> str:
        """Return the code that blocks the loop: the innermost frame outside agentenv and libraries."""
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
