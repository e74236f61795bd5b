"""`agentenv run`: flags in, a run directory out: prepare, open, run the episodes, report."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from agentenv._util.disk import write_json
from agentenv._util.plurals import counted
from agentenv.core.trajectory import Trajectory
from agentenv.engines.models import load_stop_token_ids
from agentenv.episode.runner import EpisodeRunner, plan
from agentenv.errors import ConfigError
from agentenv.runs.config import FREE_ON_RESUME, RunConfig, TrackerOptions, parsed_reward
from agentenv.runs.display.report import LastingStream, quiet_transformers
from agentenv.runs.display.screen import RunScreen
from agentenv.runs.group_rewards import OpenGroups, Recorder
from agentenv.runs.metrics import Tally
from agentenv.runs.opening import open_runner
from agentenv.runs.prepare import Job, changed_files, code_digests, prepare
from agentenv.runs.records.directory import (
    CONFIG,
    METRICS,
    Outbox,
    RunWriter,
    new_run_directory,
    read_config,
    read_trajectories,
)
from agentenv.runs.records.scan import ReadReport
from agentenv.runs.records.tokenizer import keep_tokenizer
from agentenv.runs.rescore import RecordedActions, Recording
from agentenv.runs.run_log import RunLog
from agentenv.runs.shutdown import then_end, until_signal
from agentenv.runs.trackers import Tracked, Trackers, open_trackers
from agentenv.runs.view_process import PageBeside
from agentenv.runs.watchdog import Watchdog, end_process

_SWITCH_S = 0.0005
"""How long a thread holds the interpreter while others wait. Python's 5 ms slow the loop down when environments
compute in threads."""


def run(config: RunConfig, recording: Recording | None = None) -> int:
    """Run the episodes that the flags ask for and return the exit code: 0, or 130 and 143 when a signal ended it early.

    With `recording`, they are its episodes, graded again.

    Raises:
        ConfigError: a flag or file is wrong; nothing has run.
        RunStopped: too many episodes failed; what ended before is in the run directory.
    """
    if config.output.log_level in ("warning", "error"):
        quiet_transformers()
    stdout, stderr = cast(TextIO, LastingStream(sys.stdout)), cast(TextIO, LastingStream(sys.stderr))
    sys.setswitchinterval(_SWITCH_S)
    # What environments print must not end up between the JSON lines.
    with (
        PageBeside(config.output.view) as page,
        contextlib.redirect_stdout(stderr if config.output.json else stdout),
        contextlib.redirect_stderr(stderr),
    ):
        code = asyncio.run(then_end(_run(config, recording, stdout, page), stdout))
        if code == 0:
            page.wait()
        return code


async def _run(config: RunConfig, recording: Recording | None, stdout: TextIO, page: PageBeside) -> int:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Ctrl-C interrupts an import or the load of a model immediately; asyncio's own handler waits for its end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    job = await (recording.prepare(config) if recording else prepare(config))
    engine = RecordedActions(recording, job.tokenizer, 4 * config.concurrency) if recording else None
    if job.grader is not None:
        job.grader.check(job.tasks)
    name = ("rescored-" if recording else "") + Path(config.source or "run").stem.replace(":", "-")
    out = Path(config.output.out or new_run_directory(f"{name}-{Path(config.model).name}"))
    errors = config.errors
    async with (
        Outbox(open_run(job, out, recording.facts if recording else None)) as outbox,
        open_run_trackers(job, out) as trackers,
    ):
        log = RunLog(job, outbox, trackers)
        shown = config.with_flags(prices=None) if recording else config  # the policy is not paid again
        screen = RunScreen(shown, job, log, stdout=stdout)
        screen.launch(job.facts, job.config.to_dict())
        await page.open(out, screen.note)
        report_changes(log, job.config, screen.note)
        async with open_runner(job, engine=engine, note=screen.note, only_records=job.grader is None) as runner:
            if recording:
                runner.fix = "Let the environment ask what it asked then, or fix what raised,"
            # Only episodes that the run directory does not hold yet; the share of failed ones is that of the whole run.
            earlier = read_trajectories(out, report=ReadReport())  # damage was told when the directory was opened

            async def record(*ended: Trajectory) -> None:
                for summary in await log.record(*ended):
                    screen.show(summary)

            work = asyncio.ensure_future(run_missing(job, runner, log, record, earlier))
            watchdog = Watchdog(
                runner,
                folder=out,
                stall_timeout_s=errors.stall_timeout_s,
                tell=screen.note,
                end=end_process,
                grading_s=config.groups.group_timeout_s if job.grader else 0.0,
            )
            screen.progress.start()
            try:
                signals = await until_signal(work, watchdog, runner.drain, grace_s=errors.grace_s)
            finally:
                screen.progress.stop()
                metrics = await log.finish(runner.setup.engine)
                screen.show_result(metrics)
            if signals:
                kept = f"{counted(metrics.num_episodes, 'episode is', 'episodes are')} kept"
                command = f"agentenv run --resume --out {shlex.quote(str(out))}"
                command = "the same command and --resume" if recording else command
                screen.note(f"interrupted: {kept}. Resume with: {command}")
                return 128 + signals[0]
            runner.check_error_share()
    return 0


async def run_missing(
    job: Job, runner: EpisodeRunner, log: RunLog, record: Recorder, earlier: Iterable[Trajectory]
) -> None:
    """Run the episodes of a job that have no record yet; `earlier` are the records of the run directory.

    Raises:
        RunStopped: too many episodes failed, or the disk is full.
    """
    over, groups = log.tally.finished, None
    if job.grader is not None:
        groups = OpenGroups(runner, job.grader, job.config.n, record=record, hold=log.hold)
        over = over | await asyncio.to_thread(groups.take_up, earlier)  # it reads the whole record
    planned = plan(job.tasks, job.config.n, finished=over, attempts=log.first_attempts())
    runner.num_done = len(over)
    await (runner.run(planned, record) if groups is None else groups.run(planned))


def open_run(job: Job, out: Path, facts: Mapping[str, Any] | None = None) -> RunWriter:
    """Open the run directory of a job, new or resumed; its config.json has `facts` too.

    Raises:
        ConfigError: it holds another run, or cannot be written.
    """
    config = job.config
    stored = {
        "flags": config.to_dict(),
        "resolved": job.digests,
        "agent_file": code_digests(config, _reward_of(facts)),
        **(facts or {}),
    }
    if job.is_mixture:
        stored["pass_scores"] = job.pass_scores
    free = ["agent_file", "pass_scores", "rescored.run", *(f"flags.{name}" for name in FREE_ON_RESUME)]
    tally = Tally(config.n, pass_score=config.pass_score, pass_scores=job.pass_scores)
    writer = RunWriter.open(out, stored, resume=config.output.resume, may_differ=free, tally=tally)
    if job.engine != "chat":
        keep_tokenizer(out, job.tokenizer, load_stop_token_ids(job.model))
    return writer


def open_run_trackers(job: Job, out: Path | None) -> Trackers:
    """Open the trackers that a job's flags enable.

    Raises:
        ConfigError: a tracker cannot be reached, or it lacks a run directory.
        MissingDependency: a tracker's library is not installed.
    """
    options = job.config.trackers
    if out is not None:
        return Trackers(open_trackers(Tracked(options, job.config.to_dict(), out, "agentenv_run")), out / METRICS)
    if options != TrackerOptions():
        raise ConfigError("out: expected a run directory for a tracker, got none. Name one.")
    return Trackers([], Path())


def _reward_of(stored: Mapping[str, Any] | None) -> Any:
    """Return the settings of --reward of `agentenv rescore` in the `config` of config.json; None without it."""
    return parsed_reward("--reward", ((stored or {}).get("rescored") or {}).get("reward"))


def report_changes(log: RunLog, config: RunConfig, note: Callable[[str], None]) -> None:
    """Note and store in config.json if --prices, the file of the agent or that of a reward changed before a resume.

    Nothing is stored if no episode is left to run, or without a run directory.

    Raises:
        ConfigError: config.json cannot be written.
    """
    if log.out is None or log.stats.num_earlier == log.stats.total:
        return
    document = read_config(log.out)
    stored = document["config"]
    now = code_digests(config, _reward_of(stored))
    before, is_repriced = stored.get("agent_file"), stored["flags"].get("prices") != config.prices
    if is_repriced:
        note("changed on resume: --prices; episodes that have ended keep their cost")
        stored["flags"]["prices"] = config.prices
    if changed := changed_files(before, now):
        note(f"changed on resume: {', '.join(changed)}; episodes from here on are judged by the new code")
        document["changed"] = [*document.get("changed", []), [before, now]]
    if not is_repriced and before == now:
        return
    stored["agent_file"] = now
    try:
        write_json(log.out / CONFIG, document)
    except OSError as error:
        raise ConfigError(f"{log.out / CONFIG}: expected to be written, got {error}. Make room, or fix it.") from error
