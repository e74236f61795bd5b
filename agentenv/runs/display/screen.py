"""RunScreen: records each episode of a run, shows its progress, and reports the result."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from agentenv._util.jsonable import jsonable
from agentenv._util.plurals import counted
from agentenv._util.terminal import wide_console
from agentenv.core.trajectory import Trajectory
from agentenv.runs.config import RunConfig
from agentenv.runs.display.progress import JSONProgress, LiveProgress, PlainProgress, Progress, Stats
from agentenv.runs.display.report import FailureKinds, environments_table, final_table, header
from agentenv.runs.metrics import Metrics, Summary, Tally, TimeCounts, summarize
from agentenv.runs.prepare import Job
from agentenv.runs.records.async_writer import Outbox
from agentenv.runs.records.directory import METRICS
from agentenv.runs.trackers import Trackers


class RunScreen:
    """Takes the episodes of a run: each goes to the run directory, if there is one, and to the progress line.

    The header shows the flags of `config`, as the user gave them; what `job` adds to them is among its facts.
    """

    def __init__(
        self, config: RunConfig, job: Job, outbox: Outbox | None, *, stdout: TextIO, trackers: Trackers
    ) -> None:
        self.config = config
        self.num_tasks = len(job.tasks)
        data = [(part.name, part.config.data or "built-in") for part in job.parts]
        self._data = ", ".join(f"{name} {each}".strip() for name, each in data)
        self._env_tasks = dict.fromkeys(job.pass_scores, 0) | Counter(task.env for task in job.tasks if task.env)
        self.outbox = outbox
        self.stdout = stdout
        self.trackers = trackers
        self.out: Path | None = outbox.writer.path if outbox else None
        self.tally = (
            outbox.writer.tally
            if outbox
            else Tally(config.n, pass_score=job.config.pass_score, pass_scores=job.pass_scores)
        )
        self.console, self.notes = wide_console(), wide_console(stderr=True)
        self._session = TimeCounts()
        self._failures = FailureKinds()
        self.progress: Progress
        stats, mode = Stats(self.num_tasks * config.n, self.tally), config.output.progress
        if config.output.json:
            self.progress = JSONProgress(stats, stdout)
        elif mode == "none":
            self.progress = Progress(stats)
        elif mode == "live" or (mode == "auto" and self.notes.is_terminal):
            self.progress = LiveProgress(stats, self.notes)
        else:
            self.progress = PlainProgress(stats, sys.stderr)

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return f"agentenv run --resume --out {shlex.quote(str(self.out))}"

    def first_attempts(self) -> dict[str, int]:
        """Return for each episode that failed in an earlier session the attempt to resume from.

        After an infrastructure failure the next attempt samples again, like a retry; other failures
        repeat the same attempt.
        """
        return {key: summary.attempt + (summary.error_kind == "infra") for key, summary in self.tally.failed.items()}

    def report_damage(self) -> None:
        """Show what a resumed run could not read in the record."""
        if self.outbox and self.outbox.writer.report.damage:
            self.note(f"{self.out}: {self.outbox.writer.report.damage}; their episodes run again")

    def launch(self, facts: Mapping[str, str], flags: Mapping[str, Any]) -> None:
        """Show what is about to run: `facts` on the screen, with all `flags` in JSON."""
        config = self.config
        self.report_damage()
        header_facts = {
            "env": config.source,
            "data": f"{self._data}: {counted(self.num_tasks, 'task')} × {config.n}",
            "model": config.model,
            **facts,
            "out": str(self.out),
        }
        if config.output.json:
            self._event("launch", {**header_facts, "config": flags})
        else:
            self.console.print(header(config, header_facts))

    async def record(self, *trajectories: Trajectory) -> None:
        """Write finished episodes, then show them: what the screen counts is on the disk."""
        summaries = await self.outbox.append_all(trajectories) if self.outbox else list(map(summarize, trajectories))
        for summary in summaries:
            if self.outbox is None:
                self.tally.add(summary)
            self._show(summary)
        if self.trackers.is_due:
            facts = self.progress.stats.facts()
            await self.trackers.update(facts["done"], facts)

    async def hold(self, trajectory: Trajectory) -> None:
        """Write an episode that ended and waits for its group; nothing is counted yet."""
        if self.outbox:
            await self.outbox.append(trajectory)

    def _show(self, summary: Summary) -> None:
        self._session.add(summary)
        self.progress.update(summary)
        line = self._failures.first(summary)
        if line and (self.config.output.progress != "none" or self.outbox):
            self.note(line)

    def note(self, text: str) -> None:
        """Show a line on stderr; stdout stays clean."""
        self.notes.print(text, soft_wrap=True, highlight=False, markup=False)

    async def finish(self) -> Metrics:
        """Return the metrics of the run and write them to `metrics.json`; speed and time are those of this session."""
        if self.outbox:
            await self.outbox.settle()
        counts: dict[str, Any] = {"num_tasks": self.num_tasks, "num_samples": self.config.n}
        wall_s = self.progress.stats.facts()["elapsed_s"]
        metrics = self.tally.metrics(**counts, wall_s=wall_s, env_tasks=self._env_tasks)
        metrics = replace(metrics, time=self._session.time(wall_s))
        if self.outbox:
            try:
                stored = json.loads((self.outbox.writer.path / METRICS).read_bytes())
            except (OSError, ValueError):
                stored = None
            now = jsonable(metrics.to_dict())
            # A session without episodes leaves a file that differs only in the times.
            if (
                self._session.num_episodes
                or not isinstance(stored, dict)
                or stored | {"time": None} != now | {"time": None}
            ):
                await self.outbox.write_metrics(metrics.to_dict())
        await self.trackers.finish(metrics.num_episodes, metrics.to_dict())
        return metrics

    def show_result(self, metrics: Metrics) -> None:
        """Show the final table, or print the JSON event."""
        if self.config.output.json:
            self._event("done", {"out": str(self.out), "metrics": metrics.to_dict()})
        else:
            self.console.print(final_table(metrics))
            if metrics.environments:
                self.console.print(environments_table(metrics.environments))
            lines = [f"run directory: {self.out}", f"see the episodes: agentenv view {shlex.quote(str(self.out))}"]
            if metrics.num_infra_errors + metrics.num_env_errors:
                lines.append(f"failed episodes: agentenv show {shlex.quote(str(self.out))} --failed")
            self.console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)

    def _event(self, name: str, facts: Mapping[str, Any]) -> None:
        self.stdout.write(json.dumps({"event": name, **facts}) + "\n")
        self.stdout.flush()
