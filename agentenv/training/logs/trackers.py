"""Optional trackers of a training run: TensorBoard, Weights & Biases, MLflow.

`trackers.json` in the run's folder stores the ids of the trackers' runs, so that a resumed training run continues them.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from agentenv.errors import ConfigError, MissingDependency
from agentenv.training.config import TrainConfig

IDS = "trackers.json"


class Tracker(Protocol):
    """A service that receives the numbers of train steps."""

    name: str
    """Name in warnings."""
    failures: tuple[type[Exception], ...]
    """Exceptions of its methods if the service or disk fails. They do not stop training."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a train step."""

    def close(self) -> None:
        """Send pending numbers and end."""


def open_trackers(config: TrainConfig, folder: Path, *, resume_step: int | None = None) -> list[Tracker]:
    """Return the trackers that the flags enable. On resume they continue their runs.

    Raises:
        MissingDependency: a tracker's library is not installed.
        ConfigError: a tracker cannot be reached, or refuses its flags.
    """
    trackers: list[Tracker] = []
    if config.use_tensorboard:
        trackers.append(TensorBoard(config, folder, resume_step=resume_step))
    if config.use_wandb:
        trackers.append(WandB(config, folder))
    if config.use_mlflow:
        trackers.append(MLflow(config, folder))
    return trackers


class TensorBoard:
    """Event files in --use_tensorboard, in a folder with the run's name.

    On resume, events after `resume_step` are hidden.
    """

    name = "TensorBoard"
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError)

    def __init__(self, config: TrainConfig, folder: Path, *, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("--use_tensorboard", "TensorBoard", "tensorboard", error) from error
        path = Path(str(config.use_tensorboard)) / _run_name(config, folder)
        try:
            self._writer = SummaryWriter(str(path), purge_step=None if resume_step is None else resume_step + 1)
        except OSError as error:
            raise _refused("--use_tensorboard", "a writable folder", error) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a train step."""
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

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("--use_wandb", "Weights & Biases", "wandb", error) from error
        self.failures = (wandb.Error, OSError)
        key = None if str(config.use_wandb).lower() == "true" else config.use_wandb
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_org,
                group=config.wandb_group,
                name=_run_name(config, folder),
                config=config.to_dict(),
                dir=str(folder),
                id=_stored(folder, "wandb") or _store(folder, "wandb", uuid.uuid4().hex[:16]),
                resume="allow",
                settings=wandb.Settings(silent=True, console="off", api_key=key),
            )
        except self.failures as error:
            raise _refused("--use_wandb", "a run of Weights & Biases", error) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a train step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send pending numbers and end the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow in the experiment --wandb_project. `@` in keys becomes `_`, as MLflow requires."""

    name = "MLflow"
    failures: tuple[type[Exception], ...]

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        try:
            import mlflow
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise _missing("--use_mlflow", "MLflow", "mlflow", error) from error
        self.failures = (mlflow.MlflowException, OSError)
        self._metric, project = Metric, config.wandb_project
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._client = mlflow.MlflowClient(tracking_uri=config.use_mlflow)
            run_id = _stored(folder, "mlflow")
            if run_id is None:
                experiment = self._client.get_experiment_by_name(project)
                experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
                run_id = self._client.create_run(experiment_id, run_name=_run_name(config, folder)).info.run_id
                flags = [Param(key, str(value)[:250]) for key, value in config.to_dict().items()]
                for start in range(0, len(flags), 100):  # MLflow's limit per request
                    self._client.log_batch(run_id, params=flags[start : start + 100])
                _store(folder, "mlflow", run_id)
        except self.failures as error:
            raise _refused("--use_mlflow", "a tracking URI that answers", error) from error
        self._run_id = run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a train step."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(re.sub(r"[^\w./ -]", "_", key), value, now_ms, step) for key, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


def _run_name(config: TrainConfig, folder: Path) -> str:
    return config.wandb_run_name or folder.resolve().name


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
