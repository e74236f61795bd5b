"""`agentenv.rollout`: run episodes from Python, with the flags of `agentenv run`; `agentenv.load_run`: read a run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv._util.brief import brief
from agentenv._util.loop_thread import LoopThread, is_loop_running
from agentenv._util.plurals import counted
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.episode.registry import env_source
from agentenv.episode.runner import plan
from agentenv.errors import ConfigError, MissingDependency, RunStopped
from agentenv.runs.config import RunConfig
from agentenv.runs.display.progress import OnScreen
from agentenv.runs.display.report import quiet_transformers, run_html
from agentenv.runs.display.screen import RunScreen
from agentenv.runs.metrics import Metrics, Tally
from agentenv.runs.opening import open_runner
from agentenv.runs.prepare import load_parts, prepare
from agentenv.runs.records.directory import Outbox, RecordedEpisodes, read_config, read_trajectories
from agentenv.runs.records.scan import ReadReport
from agentenv.runs.records.tables import episode_row, turn_rows
from agentenv.runs.run import open_run, open_run_trackers, report_changes, run_missing
from agentenv.runs.run_log import RunLog
from agentenv.runs.view_process import ViewProcess

if TYPE_CHECKING:
    import datasets
    import pandas

_CLOSE_S = 5.0
Rows = Iterable[Mapping[str, Any] | Task]


@dataclass(frozen=True)
class Run:
    """The finished episodes of a rollout. It iterates over their trajectories."""

    trajectories: Sequence[Trajectory]
    """Of `rollout` in the order of the tasks; of `load_run` in that in which the episodes ended."""
    metrics: Metrics
    """Rewards, scores, pass@k, tokens, times and errors, as in metrics.json."""
    out: Path | None = None
    """The run directory, if one was written."""

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __repr__(self) -> str:
        mean = self.metrics.reward.mean
        reward = "unknown" if mean is None else f"{mean:.3f}"
        return f"Run({counted(len(self), 'episode')}, reward {reward}, out={self.out})"

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    def _repr_html_(self) -> str:
        """Return the results and the first task's episodes, for a notebook."""
        return run_html(self.trajectories, self.metrics, self.out)

    def view(self) -> ViewProcess:
        """Open the page of the run (`agentenv view`), which serves until it is closed or this process ends.

        Raises:
            ConfigError: the run was not written.
            InfraError: the page did not start; the message has the reason.
        """
        if self.out is None:
            raise ConfigError("Run.view: expected a run directory, got none. Pass out= to `rollout`.")
        return ViewProcess.start(self.out)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per episode; the columns are in docs/reference/tables.md."""
        return [episode_row(trajectory) for trajectory in self.trajectories]

    def turn_rows(self) -> list[dict[str, Any]]:
        """Return one row per turn; the columns are in docs/reference/tables.md."""
        return [row for trajectory in self.trajectories for row in turn_rows(trajectory)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per episode.

        Raises:
            MissingDependency: pandas is not installed.
        """
        return _data_frame(self.rows())

    def turns(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per turn.

        Raises:
            MissingDependency: pandas is not installed.
        """
        return _data_frame(self.turn_rows())

    def to_dataset(self) -> datasets.Dataset:
        """Return a Hugging Face dataset with one row per episode.

        Raises:
            MissingDependency: datasets is not installed.
        """
        try:
            from datasets import Dataset
        except ImportError as error:
            raise MissingDependency(
                "Run.to_dataset: expected datasets, got none. Run: pip install 'agentenv-rl[data]'"
            ) from error
        rows = self.rows()
        names = dict.fromkeys(name for row in rows for name in row)  # `from_list` takes the columns of the first row
        return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})


def rollout(
    env: str | PathLike[str] | type[Any] | Sequence[str | PathLike[str] | Mapping[str, Any]] | None = None,
    data: str | PathLike[str] | Rows | None = None,
    *,
    engine: str | Engine = "auto",
    **flags: Any,
) -> Run:
    """Run episodes of an environment with a model, as `agentenv run` does, and return them.

    Works in a script, a test and a notebook, whose event loop is already running; in async code, await `arollout`.

    Args:
        env: a class, an installed name, module:Attr or path/file.py[:Attr]; or a list of environments, each a text as
            for `--env` or an entry as a dict.
        data: a name, a file, a Hugging Face dataset, or rows: mappings or Tasks. Default: the environment's own data.
        engine: name of the engine, or an engine, which stays open. Its `tokenizer`, if any, replaces the model's;
            `config.json` then names a model only if you pass one.
        flags: every flag of `agentenv run` by its name: `model`, `n`, `max_turns`, `temperature`, `progress`, … With
            `out`, the run directory is written; without it, none. `group_reward` may also be a function, a reward, or
            settings as a dict.

    Example::

        run = agentenv.rollout("math_retry", model="tiny-math", n=4, limit=8, max_tokens=160)
        print(run.metrics.reward.mean, run.to_pandas().groupby("task_id").score.max())

    Raises:
        ConfigError: a flag is unknown or wrong; nothing has run.
        RunStopped: too many episodes failed; its `run` has those that ended.
    """
    work = arollout(env, data, engine=engine, **flags)
    if not is_loop_running():
        return asyncio.run(work)
    thread = LoopThread("agentenv-rollout")
    try:
        run = thread.run(work)
    except Exception:
        thread.close(_CLOSE_S)
        raise  # after Ctrl-C the loop stays open: it still closes the engine and the environments
    thread.close(_CLOSE_S)
    return run


async def arollout(
    env: str | PathLike[str] | type[Any] | Sequence[str | PathLike[str] | Mapping[str, Any]] | None = None,
    data: str | PathLike[str] | Rows | None = None,
    *,
    engine: str | Engine = "auto",
    **flags: Any,
) -> Run:
    """Run episodes in the running event loop; the arguments and errors are those of `rollout`."""
    config = _config(env, data, engine, flags)
    if config.output.log_level in ("warning", "error"):
        quiet_transformers()
    job = await prepare(
        config,
        parts=load_parts(config, env_source(env, config.env_kwargs)) if isinstance(env, type) else None,
        rows=None if isinstance(data, str | PathLike) else data,
        tokenizer=None if isinstance(engine, str) else engine.tokenizer,
    )
    if job.grader is not None:
        job.grader.check(job.tasks)
    out = None if config.output.out is None else Path(config.output.out)
    trajectories: dict[str, Trajectory] = {}
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_records_shown(config.output.log_level))
        outbox = await stack.enter_async_context(Outbox(open_run(job, out))) if out else None
        trackers = await stack.enter_async_context(open_run_trackers(job, out))
        log = RunLog(job, outbox, trackers)
        screen = RunScreen(config, job, log, stdout=sys.stdout)
        report_changes(log, job.config, screen.note)
        if out:
            screen.report_damage()
            trajectories = {each.episode_id: each for each in read_trajectories(out, report=ReadReport())}
        runner = await stack.enter_async_context(
            open_runner(job, engine=None if isinstance(engine, str) else engine, note=screen.note)
        )

        async def record(*ended: Trajectory) -> None:
            for summary in await log.record(*ended):
                screen.show(summary)
            trajectories.update({each.episode_id: each for each in ended})

        earlier, stopped = list(trajectories.values()), None
        screen.progress.start()
        try:
            await run_missing(job, runner, log, record, earlier)
            runner.check_error_share()
        except RunStopped as error:
            stopped = error
        finally:
            screen.progress.stop()
            metrics = await log.finish(runner.setup.engine)
    order = [each.episode_id for each in plan(job.tasks, config.n)]
    run = Run(tuple(trajectories[key] for key in order if key in trajectories), metrics, out)
    if stopped is not None:
        stopped.run = run
        raise stopped
    return run


@contextlib.contextmanager
def _records_shown(log_level: str) -> Iterator[None]:
    """Show log records from a level on stderr, unless a handler of the program gets all records of agentenv.

    Of rollouts at once, the first decides.
    """
    logger = logging.getLogger("agentenv")
    if logger.hasHandlers():
        yield
        return
    handler, before = OnScreen(), logger.level
    handler.setLevel(log_level.upper())
    logger.addHandler(handler)
    logger.setLevel(min(handler.level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _config(env: Any, data: Any, engine: str | Engine, flags: dict[str, Any]) -> RunConfig:
    """Return the config of a rollout with these arguments."""
    if isinstance(env, type):
        flags["env"] = f"{env.__module__}:{env.__qualname__}"
    elif env is not None and not isinstance(env, str | PathLike | Sequence):
        raise ConfigError(f"env: expected a class, a name or a list of them, got {brief(env, 80)}. Pass its class.")
    elif env is not None:
        flags["env"] = env
    if isinstance(data, str | PathLike):
        flags["data"] = data
    if not isinstance(engine, str) and engine.tokenizer is not None:
        flags.setdefault("model", "")  # readers would decode with the default model's tokenizer
    config = RunConfig.from_flags(**flags, engine=engine if isinstance(engine, str) else "scripted")
    if config.output.view:
        raise ConfigError("view: expected a flag of `rollout`, got one of the command. Call `Run.view` on the result.")
    return config


def load_run(path: str | Path) -> Run:
    """Return the episodes of a run directory, of `run` or `train`, in the order in which they ended.

    Each is read when it is first used, and stays in memory; `read_trajectories` yields one at a time. The metrics are
    those of these episodes; a record does not have the run's wall time.

    Raises:
        ConfigError: the run is missing.
        DataError: the record has another schema; or, when it is read, an episode whose values are not those of a
            trajectory.
    """
    config = read_config(path)["config"]
    trajectories = RecordedEpisodes(Path(path))
    sizes = Counter(each.group_id for each in trajectories.summaries)
    num_samples = max(sizes.values(), default=1)
    pass_scores = config.get("pass_scores", {})  # that of each environment of a mixture
    tally = Tally(num_samples, pass_score=(config.get("flags") or {}).get("pass_score"), pass_scores=pass_scores)
    for summary in trajectories.summaries:
        tally.add(summary)
    env_tasks = Counter(env for env, _ in {(each.env, each.group_id) for each in trajectories.summaries})
    metrics = tally.metrics(num_tasks=len(sizes), num_samples=num_samples, wall_s=0.0, env_tasks=env_tasks)
    return Run(trajectories, metrics, Path(path))


def _data_frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    try:
        import pandas
    except ImportError as error:
        raise MissingDependency(
            "Run.to_pandas: expected pandas, got none. Run: pip install 'agentenv-rl[data]'"
        ) from error
    return pandas.DataFrame(rows)
