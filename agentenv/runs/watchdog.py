"""Watchdog of a run: reports what episodes wait for when none makes progress, and what blocks the event loop.

It reads `EpisodeRunner.in_flight`, where the loop publishes how far each episode is, a few times per
`stall_timeout_s`. Time in which the process was stopped (SIGSTOP, a suspended machine) does not count. While the event
loop is blocked for that long, `faulthandler` writes the stacks to stderr. Native code that never releases the GIL stops
every Python thread, this one too, but not `faulthandler`; only SIGKILL ends such a process, and `--resume` continues
its run.
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

from agentenv._util.calls import StepTimeout, bounded
from agentenv._util.paths import PACKAGE, current_frames, is_own_import
from agentenv._util.plurals import counted
from agentenv.episode.runner import EpisodeRunner
from agentenv.episode.setup import EpisodeProgress
from agentenv.episode.source import EnvSource
from agentenv.errors import InfraError, RunStopped

LAG_S = 1.0
"""Seconds for which the event loop may be blocked without a warning."""
WARN_EVERY_S = 60.0
_BEAT_S = 0.1
_CANCEL_GRACE_S = 5.0
_WRITE_S = 5.0
"""Time limit of writing a dump."""
_STDERR_FD = 2
_LIBRARY = str(PACKAGE)


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
        self.runner, self.folder, self.tell = runner, folder, tell
        self.stall_timeout_s = stall_timeout_s
        limits = runner.setup.limits
        # An agent with its own loop is visible from outside only: nothing but its episode's deadline ends it.
        whole_s = 0.0 if isinstance(runner.source, EnvSource) else limits.episode_timeout_s + 3 * limits.step_timeout_s
        deadlines = (limits.generate_timeout_s, limits.step_timeout_s, stall_timeout_s, whole_s, grading_s)
        # A stall that a deadline will end is left to the deadline.
        self.stop_after_s = stall_timeout_s + max(deadlines)
        self.num_dumps = 0
        self._lag = LagMonitor(tell, end_after_s=self.stop_after_s, end=end)

    def __enter__(self) -> Self:
        self._lag.start()
        return self

    def __exit__(self, *_: object) -> None:
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
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
                watch.result()
            work.result()
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
        before, last, idle_s = None, time.monotonic(), 0.0
        while True:
            self._lag.arm(3 * tick_s + self.stall_timeout_s)
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * tick_s), now
            in_flight = self.runner.in_flight
            state = self.runner.num_done, {key: state_of(progress) for key, progress in in_flight.items()}
            if state != before or not in_flight:
                before, idle_s = state, 0.0
                continue
            was_s, idle_s = idle_s, idle_s + passed_s
            if was_s < self.stall_timeout_s <= idle_s:
                self.num_dumps += 1
                path = self.folder / f"stall-{self.num_dumps}.txt"
                found = f"{counted(len(in_flight), 'episode')} in flight and none made progress for {idle_s:.1f} s"
                saved = f"Stacks: {path}"
                try:  # in a thread: the disk may be what the episodes wait for
                    await bounded(write_dump, path, found, waits_of(in_flight), limit_s=_WRITE_S)
                except (OSError, InfraError) as error:
                    saved = f"{path} cannot be written ({error})."
                except StepTimeout:
                    saved = f"{path} was not written within {_WRITE_S:g} s."
                key, first = next(iter(in_flight.items()))
                place = f"waits in {first.stage.value} of turn {first.turn_index}"
                self.tell(f"stalled: {found}; the first, {key}, {place}. {saved}")
            if idle_s >= self.stop_after_s:
                raise RunStopped(
                    f"episodes: expected one to make progress within {self.stop_after_s:g} s, got none of "
                    f"{len(in_flight)} in flight. {self.folder / f'stall-{self.num_dumps}.txt'} shows what "
                    "they wait for; fix that and --resume."
                )


def end_process(reason: str) -> None:
    """End the process like the command when a run is stopped, from any thread and without waiting for others."""
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(f"agentenv: error: {reason}\n")
        sys.stderr.flush()
    os._exit(RunStopped.exit_code)


def waits_of(in_flight: Mapping[str, EpisodeProgress]) -> str:
    """Return what episodes wait for, those at the same place together."""
    stacks = defaultdict[str, list[str]](list)
    for key, progress in in_flight.items():
        attempt, stage, turn_index, num_tokens = state_of(progress)
        stack = "".join(line for frame in frames_of(progress.task) for line in traceback.format_stack(frame, limit=1))
        stacks[stack].append(f"{key}: attempt {attempt}, {stage} of turn {turn_index}, {num_tokens} tokens")
    return "".join(
        "\n".join([f"{len(episodes)} wait here:", *episodes, stack, ""]) for stack, episodes in stacks.items()
    )


def write_dump(path: Path, title: str, waits: str) -> None:
    """Write what episodes wait for, and every thread's stack."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n\n{waits}")
        file.flush()
        faulthandler.dump_traceback(file)


def state_of(progress: EpisodeProgress) -> tuple[int, str, int, int]:
    """Return how far an episode is, as it publishes it: attempt, stage, turn and number of tokens."""
    return progress.attempt, progress.stage.value, progress.turn_index, progress.num_tokens


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
        end_after_s: calls `end`, if there is one, with the reason when the loop is blocked for so long.
        end: ends the process; called from the thread.
    """

    def __init__(
        self, tell: Callable[[str], None], *, end_after_s: float = 0.0, end: Callable[[str], None] | None = None
    ) -> None:
        self._tell, self._end_after_s, self._end = tell, end_after_s, end
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="agentenv-watchdog", daemon=True)

    def start(self) -> None:
        """Start, on the running loop and in this thread."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._beat()
        try:
            self._thread.start()
        except RuntimeError as error:
            self._tell(f"the event loop is not watched, only the episodes are: {error}")

    def stop(self) -> None:
        """Stop; the thread has ended when this returns."""
        self._ended.set()
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        if self._thread.ident is not None:
            self._thread.join()

    def arm(self, seconds: float) -> None:
        """Dump all stacks to stderr in so many seconds unless armed again, even if the GIL is never released."""
        with contextlib.suppress(ValueError, OSError, OverflowError):  # stderr is missing or closed
            faulthandler.dump_traceback_later(seconds, file=_STDERR_FD)

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
            if lag_s > LAG_S / 2 and is_own_import(current_frames().get(self._loop_thread)):
                imported = now  # it happens once, and no environment causes it
            if min(lag_s, now - imported) > LAG_S and now - warned >= WARN_EVERY_S:
                warned = now
                self._tell(
                    f"the event loop, on which all episodes run, is blocked for {lag_s:.1f} s {self._where()}. Make it "
                    "a plain `def` method, which runs in a thread, or await instead: no time limit can end it here."
                )
            if self._end is not None and lag_s > self._end_after_s:
                self._end(
                    f"event loop: expected it to be free within {self._end_after_s:g} s, got one "
                    f"blocked {self._where()}. Fix that and --resume."
                )

    def _where(self) -> str:
        """Return the code that blocks the loop: the innermost frame outside agentenv and libraries."""
        frame = current_frames().get(self._loop_thread)
        if frame is None:
            return "its thread is gone"
        stack = traceback.extract_stack(frame)
        libraries = (_LIBRARY, sys.base_prefix, sys.prefix, "<")
        own, inner = ([each for each in stack if not each.filename.startswith(libraries)] or stack)[-1], stack[-1]
        return f"by {own.name} at {own.filename}:{own.lineno} (now in {inner.name}, {inner.filename}:{inner.lineno})"
