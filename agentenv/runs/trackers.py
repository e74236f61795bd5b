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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from agentenv.errors import ConfigError, MissingDependency
from agentenv.runs.config import TrackerOptions

logger = logging.getLogger(__name__)

IDS = "trackers.json"
_RETRY_AFTER_S = 60.0
"""Pause after a tracker failed, because each attempt may hang."""
_EVERY_S = 5.0
"""Seconds between the updates of a run."""


class Tracker(Protocol):
    """A service that receives numbers."""

    name: str
    """Name in warnings."""
    failures: tuple[type[Exception], ...]
    """Exceptions of its methods if the service or disk fails. They stop nothing."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""

    def close(self) -> None:
        """Send pending numbers and end."""


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
    trackers: list[Tracker] = []
    if run.options.use_tensorboard:
        trackers.append(TensorBoard(run, resume_step=resume_step))
    if run.options.use_wandb:
        trackers.append(WandB(run))
    if run.options.use_mlflow:
        trackers.append(MLflow(run))
    if run.options.use_trackio:
        trackers.append(Trackio(run))
    return trackers


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


class TensorBoard:
    """Event files in --use_tensorboard, in a folder with the run's name.

    On resume, events after `resume_step` are hidden.
    """

    name = "TensorBoard"
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError)

    def __init__(self, run: Tracked, *, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("--use_tensorboard", "TensorBoard", "'agentenv-rl[train]'", error) from error
        path = Path(str(run.options.use_tensorboard)) / run.run_name
        try:
            self._writer = SummaryWriter(str(path), purge_step=None if resume_step is None else resume_step + 1)
        except OSError as error:
            raise _refused("--use_tensorboard", "a writable folder", error) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write pending events and end."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases. WANDB_MODE=offline writes it to the run's folder, for `wandb sync`.

    Steps that are repeated after a kill keep their first numbers, because a run accepts each step once.
    """

    name = "Weights & Biases"
    failures: tuple[type[Exception], ...]

    def __init__(self, run: Tracked) -> None:
        options, folder = run.options, run.folder
        try:
            import wandb
        except ImportError as error:
            raise _missing("--use_wandb", "Weights & Biases", "'agentenv-rl[wandb]'", error) from error
        self.failures = (wandb.Error, OSError)
        key = None if str(options.use_wandb).lower() == "true" else options.use_wandb
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=run.project_name,
                entity=options.wandb_org,
                group=options.wandb_group,
                name=run.run_name,
                config=dict(run.flags),
                dir=str(folder),
                id=_stored(folder, "wandb") or _store(folder, "wandb", uuid.uuid4().hex[:16]),
                resume="allow",
                settings=wandb.Settings(silent=True, console="off", api_key=key),
            )
        except self.failures as error:
            raise _refused("--use_wandb", "a run of Weights & Biases", error) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send pending numbers and end the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow in the experiment --wandb_project. `@` in keys becomes `_`, as MLflow requires."""

    name = "MLflow"
    failures: tuple[type[Exception], ...]

    def __init__(self, run: Tracked) -> None:
        options, folder = run.options, run.folder
        try:
            import mlflow
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise _missing("--use_mlflow", "MLflow", "'agentenv-rl[mlflow]'", error) from error
        self.failures = (mlflow.MlflowException, OSError)
        self._metric, project = Metric, run.project_name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._client = mlflow.MlflowClient(tracking_uri=options.use_mlflow)
            run_id = _stored(folder, "mlflow")
            if run_id is None:
                experiment = self._client.get_experiment_by_name(project)
                experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
                run_id = self._client.create_run(experiment_id, run_name=run.run_name).info.run_id
                flags = [Param(key, str(value)[:250]) for key, value in run.flags.items()]
                for start in range(0, len(flags), 100):  # MLflow's limit per request
                    self._client.log_batch(run_id, params=flags[start : start + 100])
                _store(folder, "mlflow", run_id)
        except self.failures as error:
            raise _refused("--use_mlflow", "a tracking URI that answers", error) from error
        self._run_id = run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(re.sub(r"[^\w./ -]", "_", key), value, now_ms, step) for key, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


class Trackio:
    """A run of trackio, on this machine (`trackio show`) or in a Space. Resumed runs continue under their name."""

    name = "trackio"
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)

    def __init__(self, run: Tracked) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing("--use_trackio", "trackio", "'agentenv-rl[trackio]'", error) from error
        space = run.options.use_trackio
        stored = _stored(run.folder, "trackio")
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self._run = trackio.init(
                    project=run.project_name,
                    name=stored or run.run_name,
                    group=run.options.wandb_group,
                    space_id=None if str(space).lower() == "true" else space,
                    config=dict(run.flags),
                    resume="allow" if stored else "never",
                    embed=False,
                )
        except self.failures as error:
            raise _refused("--use_trackio", "a Space, or True", error) from error
        if not stored:
            _store(run.folder, "trackio", str(self._run.name))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send pending numbers and end the run."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


def _stored(folder: Path, name: str) -> str | None:
    path = folder / IDS
    return json.loads(path.read_text()).get(name) if path.exists() else None


def _store(folder: Path, name: str, run_id: str) -> str:
    path = folder / IDS
    ids: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    temporary = path.with_name(f".{IDS}.tmp")
    temporary.write_text(json.dumps({**ids, name: run_id}))
    temporary.replace(path)
    return run_id


def _missing(flag: str, what: str, package: str, error: ImportError) -> MissingDependency:
    return MissingDependency(f"{flag}: expected {what}, got {error}. Install it: pip install {package}")


def _refused(flag: str, expected: str, error: Exception) -> ConfigError:
    return ConfigError(f"{flag}: expected {expected}, got {type(error).__name__}: {error}. Fix it, or leave it out.")
