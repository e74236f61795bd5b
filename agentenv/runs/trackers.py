"""Optional trackers of a run or a training: TensorBoard, Weights & Biases, MLflow, trackio.

`trackers.json` in the run's folder stores the ids of the trackers' runs, so that a resumed run continues them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentenv._util.disk import write_json
from agentenv.errors import ConfigError, MissingDependency
from agentenv.runs.config import TrackerOptions

logger = logging.getLogger(__name__)

IDS = "trackers.json"
_RETRY_AFTER_S = 60.0
"""Pause after a tracker failed, because each attempt may hang."""
_EVERY_S = 5.0
"""Seconds between the updates of a run."""
Failures = tuple[type[Exception], ...]
"""Exceptions of a library if its service or the disk fails. They stop nothing."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """A service that receives numbers."""

    name: str
    """Name in warnings."""
    failures: Failures
    log: Callable[[int, Mapping[str, float]], object]
    """Logs the numbers of a step."""
    close: Callable[[], object]
    """Sends pending numbers and ends."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """The run that trackers show."""

    options: TrackerOptions
    flags: Mapping[str, Any]
    """All flags, without keys of services."""
    folder: Path
    project: str
    """Name of the project if no flag gives one."""

    @property
    def project_name(self) -> str:
        """The project that the flags name, or the default one."""
        return self.options.wandb_project or self.project

    @property
    def run_name(self) -> str:
        """The name that the flags give, or that of the folder."""
        return self.options.wandb_run_name or self.folder.resolve().name


def open_trackers(run: Tracked, *, resume_step: int | None = None) -> list[Tracker]:
    """Return the trackers that the flags enable. On resume they continue their runs.

    Raises:
        MissingDependency: a tracker's library is not installed.
        ConfigError: a tracker cannot be reached, or refuses its flags.
    """
    opened = []
    for flag, name, extra, expected, load in _SERVICES:
        if not getattr(run.options, flag):
            continue
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            failures, open_run = load()
        except ImportError as error:
            raise MissingDependency(
                f"--{flag}: expected {name}, got {error}. Install it: pip install 'agentenv-rl[{extra}]'"
            ) from error
        try:
            log, close = open_run(run, resume_step)
        except failures as error:
            got = f"{type(error).__name__}: {error}"
            raise ConfigError(f"--{flag}: expected {expected}, got {got}. Fix it, or leave it out.") from error
        opened.append(Tracker(name, failures, log, close))
    return opened


class Trackers:
    """Several trackers, none of which stops the run: one that fails causes one warning and is tried again later.

    Args:
        trackers: what to update and to close.
        kept_in: where all numbers are, for the warning.
    """

    def __init__(self, trackers: Sequence[Tracker], kept_in: Path) -> None:
        self.trackers = list(trackers)
        self._kept_in = kept_in
        self._retry_at_s: dict[int, float] = {}
        self._guard = threading.Lock()  # an update may be in progress when the run ends
        self._is_updating = False
        self._updated_s = -math.inf

    @property
    def is_due(self) -> bool:
        """True if a running run should call `update`."""
        return bool(self.trackers) and not self._is_updating and time.monotonic() - self._updated_s >= _EVERY_S

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers to each tracker."""
        with self._guard:
            for index, tracker in enumerate(self.trackers):
                if time.monotonic() < self._retry_at_s.get(index, 0.0):
                    continue
                try:
                    tracker.log(step, numbers)
                except tracker.failures as error:
                    if index not in self._retry_at_s:
                        logger.warning(
                            "%s failed at step %d (%s: %s); the run continues, and all numbers are in %s",
                            tracker.name, step, type(error).__name__, error, self._kept_in,
                        )  # fmt: skip
                    self._retry_at_s[index] = time.monotonic() + _RETRY_AFTER_S

    async def update(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Log the numbers of a running run, beside the event loop."""
        self._is_updating = True
        try:
            await asyncio.to_thread(self.log, step, flat_numbers(numbers, "progress"))
        finally:
            self._is_updating, self._updated_s = False, time.monotonic()

    async def finish(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Log the numbers of the whole run."""
        if self.trackers:
            await asyncio.to_thread(self.log, step, flat_numbers(numbers))

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self.trackers:
            try:
                tracker.close()
            except tracker.failures as error:
                logger.warning("%s could not be closed: %s: %s", tracker.name, type(error).__name__, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.trackers:
            await asyncio.to_thread(self.close)


def flat_numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of a nested dict, each under its keys joined by "/"."""
    numbers: dict[str, float] = {}
    for key, value in tree.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, name)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[name] = value
    return numbers


def _tensorboard() -> tuple[Failures, Callable[[Tracked, int | None], Any]]:
    """Return what opens event files in --use_tensorboard; on resume, events after `resume_step` are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    def open_run(run: Tracked, resume_step: int | None) -> Any:
        path = Path(str(run.options.use_tensorboard)) / run.run_name
        writer = SummaryWriter(str(path), purge_step=None if resume_step is None else resume_step + 1)

        def log(step: int, numbers: Mapping[str, float]) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return log, writer.close

    return (OSError, RuntimeError), open_run


def _wandb() -> tuple[Failures, Callable[[Tracked, int | None], Any]]:
    """Return what opens a run of Weights & Biases. WANDB_MODE=offline writes it to the folder, for `wandb sync`.

    Steps that are repeated after a kill keep their first numbers, because a run accepts each step once.
    """
    import wandb

    def open_run(run: Tracked, resume_step: int | None) -> Any:
        options = run.options
        key = None if str(options.use_wandb).lower() == "true" else options.use_wandb
        opened = wandb.init(
            project=run.project_name,
            entity=options.wandb_org,
            group=options.wandb_group,
            name=run.run_name,
            config=dict(run.flags),
            dir=str(run.folder),
            id=_stored(run.folder, "wandb") or _store(run.folder, "wandb", uuid.uuid4().hex[:16]),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", api_key=key),
        )
        return lambda step, numbers: opened.log(dict(numbers), step=step), opened.finish

    return (wandb.Error, OSError), open_run


def _mlflow() -> tuple[Failures, Callable[[Tracked, int | None], Any]]:
    """Return what opens a run of MLflow in the experiment --wandb_project. `@` in keys becomes `_`, as it requires."""
    import mlflow
    from mlflow.entities import Metric, Param

    def open_run(run: Tracked, resume_step: int | None) -> Any:
        client = mlflow.MlflowClient(tracking_uri=run.options.use_mlflow)
        run_id = _stored(run.folder, "mlflow")
        if run_id is None:
            experiment = client.get_experiment_by_name(run.project_name)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project_name)
            run_id = client.create_run(experiment_id, run_name=run.run_name).info.run_id
            flags = [Param(key, str(value)[:250]) for key, value in run.flags.items()]
            for start in range(0, len(flags), 100):  # MLflow's limit per request
                client.log_batch(run_id, params=flags[start : start + 100])
            _store(run.folder, "mlflow", run_id)

        def log(step: int, numbers: Mapping[str, float]) -> None:
            now_ms = int(time.time() * 1000)
            names = {key: re.sub(r"[^\w./ -]", "_", key) for key in numbers}
            client.log_batch(run_id, metrics=[Metric(names[key], numbers[key], now_ms, step) for key in numbers])

        return log, lambda: client.set_terminated(run_id)

    return (mlflow.MlflowException, OSError), open_run


def _trackio() -> tuple[Failures, Callable[[Tracked, int | None], Any]]:
    """Return what opens a run of trackio, here (`trackio show`) or in a Space; a resumed run keeps its name."""
    import trackio

    def open_run(run: Tracked, resume_step: int | None) -> Any:
        space, stored = run.options.use_trackio, _stored(run.folder, "trackio")
        with contextlib.redirect_stdout(io.StringIO()):
            opened = trackio.init(
                project=run.project_name,
                name=stored or run.run_name,
                group=run.options.wandb_group,
                space_id=None if str(space).lower() == "true" else space,
                config=dict(run.flags),
                resume="allow" if stored else "never",
                embed=False,
            )
        _store(run.folder, "trackio", str(opened.name))

        def close() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                opened.finish()

        return lambda step, numbers: opened.log(dict(numbers), step=step), close

    return (OSError, RuntimeError, ValueError), open_run


_SERVICES = (
    ("use_tensorboard", "TensorBoard", "train", "a writable folder", _tensorboard),
    ("use_wandb", "Weights & Biases", "wandb", "a run of Weights & Biases", _wandb),
    ("use_mlflow", "MLflow", "mlflow", "a tracking URI that answers", _mlflow),
    ("use_trackio", "trackio", "trackio", "a Space, or True", _trackio),
)
"""The flag of each service, its name, the extra that installs it, what the flag expects, and what loads it."""


def _stored(folder: Path, name: str) -> str | None:
    path = folder / IDS
    return json.loads(path.read_text()).get(name) if path.exists() else None


def _store(folder: Path, name: str, run_id: str) -> str:
    path = folder / IDS
    write_json(path, {**(json.loads(path.read_text()) if path.exists() else {}), name: run_id})
    return run_id
