"""RunLog: what a run records of its episodes as they end: the run directory, the tally, the trackers, the metrics."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv._util.jsonable import jsonable
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory, with_cause
from agentenv.runs.metrics import Metrics, Summary, Tally, Totals, summarize
from agentenv.runs.prepare import Job
from agentenv.runs.records.directory import METRICS, Outbox
from agentenv.runs.trackers import Trackers


class Stats:
    """Running counts of a run; the means are over tasks, as in the final table."""

    def __init__(self, total: int, tally: Tally) -> None:
        """Start with the finished episodes of an earlier session; the run adds its episodes to `tally` itself."""
        self.total = total
        self.num_earlier = len(tally.finished)
        self.num_done = self.num_errors = self.num_infra = self.num_tokens = 0
        self._tally = tally
        self._started = time.monotonic()

    def begin(self) -> None:
        """Start the clock, after the engine is loaded."""
        self._started = time.monotonic()

    def add(self, summary: Summary) -> None:
        """Count an episode that ended in this run."""
        self.num_done += 1
        self.num_tokens += summary.num_action_tokens
        self.num_infra += summary.error_kind == "infra"
        self.num_errors += summary.error_kind not in (None, "infra")

    def facts(self) -> dict[str, Any]:
        """Return the counts, means, rates and times; None where nothing is known yet."""
        elapsed_s = time.monotonic() - self._started
        rate = self.num_done / elapsed_s if elapsed_s > 0 else 0.0
        left = self.total - self.num_earlier - self.num_done
        reward, score = self._tally.means()
        return {
            "done": self.num_earlier + self.num_done,
            "total": self.total,
            "reward": reward,
            "score": score,
            "env_errors": self.num_errors,
            "infra_errors": self.num_infra,
            "episodes_per_s": rate,
            "tokens_per_s": self.num_tokens / elapsed_s if elapsed_s > 0 else 0.0,
            "elapsed_s": elapsed_s,
            "eta_s": left / rate if rate > 0 else None,
        }


class RunLog:
    """Takes the episodes of a run as they end. Without an outbox there is no run directory."""

    def __init__(self, job: Job, outbox: Outbox | None, trackers: Trackers) -> None:
        config = job.config
        self.outbox, self.trackers = outbox, trackers
        self.out: Path | None = outbox.writer.path if outbox else None
        self.num_tasks, self.num_samples = len(job.tasks), config.n
        new = Tally(config.n, pass_score=config.pass_score, pass_scores=job.pass_scores)
        self.tally = outbox.writer.tally if outbox else new
        self.stats = Stats(self.num_tasks * config.n, self.tally)
        self._env_tasks = dict.fromkeys(job.pass_scores, 0) | Counter(task.env for task in job.tasks if task.env)
        self._session = Totals()

    @property
    def damage(self) -> str:
        """What a resumed run could not read in the record; empty if it read all."""
        return self.outbox.writer.report.damage if self.outbox else ""

    def first_attempts(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Return for each episode that failed in an earlier session the attempt to resume from, and earlier errors.

        After an infrastructure failure the next attempt samples again, like a retry; other failures
        repeat the same attempt.
        """
        found = {}
        for key, failed in self.tally.failed.items():
            last = (with_cause(failed.error_type, failed.error_cause),) if failed.error_kind == "infra" else ()
            found[key] = failed.attempt + len(last), (*Counter(failed.retried).elements(), *last)
        return found

    async def record(self, *trajectories: Trajectory) -> list[Summary]:
        """Write finished episodes, then count them; return what to show of them."""
        summaries = await self.outbox.append_all(trajectories) if self.outbox else list(map(summarize, trajectories))
        for summary in summaries:
            if self.outbox is None:
                self.tally.add(summary)
            self._session.count(summary)
            self.stats.add(summary)
        if self.trackers.is_due:
            facts = self.stats.facts()
            await self.trackers.update(facts["done"], facts)
        return summaries

    async def hold(self, trajectory: Trajectory) -> None:
        """Write an episode that ended and waits for its group; nothing is counted yet."""
        if self.outbox:
            await self.outbox.append(trajectory)

    async def finish(self, engine: Engine) -> Metrics:
        """Return the metrics of the run and write them to `metrics.json`; speed and time are those of this session.

        `engine` knows how often it was started again.
        """
        if self.outbox:
            await self.outbox.settle()
        counts: dict[str, Any] = {"num_tasks": self.num_tasks, "num_samples": self.num_samples}
        wall_s = self.stats.facts()["elapsed_s"]
        metrics = self.tally.metrics(**counts, wall_s=wall_s, env_tasks=self._env_tasks)
        metrics = replace(metrics, time=self._session.time(wall_s), num_engine_restarts=engine.num_restarts)
        if self.outbox:
            stored = None
            if not self._session["num_episodes"]:
                with contextlib.suppress(OSError, ValueError):
                    stored = json.loads((self.outbox.writer.path / METRICS).read_bytes())
            of_session = {"time": None, "num_engine_restarts": None}  # other values than the stored ones mean nothing
            if not isinstance(stored, dict) or stored | of_session != jsonable(metrics.to_dict()) | of_session:
                await self.outbox.write_metrics(metrics.to_dict())
        await self.trackers.finish(metrics.num_episodes, metrics.to_dict())
        return metrics
