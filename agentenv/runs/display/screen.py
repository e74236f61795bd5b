"""RunScreen: shows the progress of a run and its result."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from agentenv._util.plurals import counted
from agentenv._util.terminal import wide_console
from agentenv.runs.config import RunConfig
from agentenv.runs.display.progress import JSONProgress, LiveProgress, PlainProgress, Progress, write_event
from agentenv.runs.display.report import FailureKinds, environments_table, final_table, header, result_rows
from agentenv.runs.metrics import Metrics, Summary
from agentenv.runs.prepare import Job
from agentenv.runs.run_log import RunLog


class RunScreen:
    """Shows a run: a header, the progress of its log, the first failure of each kind, and the result.

    The header shows the flags of `config`, as the user gave them; what `job` adds to them is among its facts.
    """

    def __init__(self, config: RunConfig, job: Job, log: RunLog, *, stdout: TextIO) -> None:
        self.config, self.log, self.stdout = config, log, stdout
        own = [next(iter(getattr(part.source, "datasets", {})), "") for part in job.parts]
        data = [(part.name, part.config.dataset.data or first) for part, first in zip(job.parts, own, strict=True)]
        self._data = ", ".join(f"{name} {each}".strip() for name, each in data)
        self.console, self.notes = wide_console(), wide_console(stderr=True)
        self._failures = FailureKinds()
        self.progress: Progress
        mode = config.output.progress
        if config.output.json:
            self.progress = JSONProgress(log.stats, stdout)
        elif mode == "none":
            self.progress = Progress(log.stats)
        elif mode == "live" or (mode == "auto" and self.notes.is_terminal):
            self.progress = LiveProgress(log.stats, self.notes)
        else:
            self.progress = PlainProgress(log.stats, sys.stderr)

    def report_damage(self) -> None:
        """Show what a resumed run could not read in the record."""
        if self.log.damage:
            self.note(f"{self.log.out}: {self.log.damage}; their episodes run again")

    def launch(self, facts: Mapping[str, str], flags: Mapping[str, Any]) -> None:
        """Show what is about to run: `facts` on the screen, with all `flags` in JSON."""
        config = self.config
        self.report_damage()
        header_facts = {
            "env": config.source,
            "data": f"{self._data}: {counted(self.log.num_tasks, 'task')} × {config.n}",
            "model": config.model,
            **facts,
            "out": str(self.log.out),
        }
        if config.output.json:
            write_event(self.stdout, "launch", {**header_facts, "config": flags})
        else:
            self.console.print(header(config, header_facts))

    def show(self, summary: Summary) -> None:
        """Show an episode that the log has counted."""
        self.progress.update()
        line = self._failures.first(summary)
        if line and (self.config.output.progress != "none" or self.log.out):
            self.note(line)

    def note(self, text: str) -> None:
        """Show a line on stderr; stdout stays clean."""
        self.notes.print(text, soft_wrap=True, highlight=False, markup=False)

    def show_result(self, metrics: Metrics) -> None:
        """Show the final table, or print the JSON event."""
        if self.config.output.json:
            write_event(self.stdout, "done", {"out": str(self.log.out), "metrics": metrics.to_dict()})
        else:
            self.console.print(final_table(result_rows(metrics, is_priced=self.config.prices is not None)))
            if metrics.environments:
                self.console.print(environments_table(metrics.environments))
            lines = [
                f"run directory: {self.log.out}",
                f"see the episodes: agentenv view {shlex.quote(str(self.log.out))}",
            ]
            if metrics.num_infra_errors + metrics.num_env_errors:
                lines.append(f"failed episodes: agentenv show {shlex.quote(str(self.log.out))} --failed")
            self.console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
