"""Stand-ins for wandb 0.31, mlflow 3 and trackio 0.43: the calls that trackers make, with the libraries' parameters.

Any other call, or another argument, is a TypeError or an AttributeError, as with the library.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace


class WandbRun:
    def __init__(self, module, options):
        self.module, self.options, self.rows, self.is_finished = module, options, [], False

    def log(self, data, step=None, commit=None):
        assert not self.is_finished
        self.rows.append((step, data))

    def finish(self, exit_code=None):
        self.is_finished = True


class TrackioRun(WandbRun):
    def __init__(self, module, options):
        super().__init__(module, options)
        self.name = options["name"]

    def log(self, metrics, step=None):
        super().log(metrics, step)

    def finish(self):
        super().finish()


def install_wandb(monkeypatch):
    module = ModuleType("wandb")
    module.runs = []

    class Error(Exception): ...

    def settings(*, silent, console, api_key):
        return SimpleNamespace(api_key=api_key)

    def init(
        entity=None, project=None, dir=None, id=None, name=None, config=None, group=None, resume=None, settings=None
    ):
        assert resume in ("allow", "never", "must", "auto", None)
        module.runs.append(WandbRun(module, locals()))
        return module.runs[-1]

    module.Error, module.Settings, module.init = Error, settings, init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def install_trackio(monkeypatch):
    module = ModuleType("trackio")
    module.runs = []

    def init(project, name=None, group=None, space_id=None, config=None, resume="never", embed=True):
        assert resume in ("must", "allow", "never")
        print("* Trackio project initialized")
        module.runs.append(TrackioRun(module, locals()))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


class MlflowClient:
    def __init__(self, tracking_uri=None, registry_uri=None):
        self.module = sys.modules["mlflow"]

    def get_experiment_by_name(self, name):
        return self.module.experiments.get(name)

    def create_experiment(self, name, artifact_location=None, tags=None):
        self.module.experiments[name] = SimpleNamespace(experiment_id=name)
        return name

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        self.module.runs.append(SimpleNamespace(rows=[], params={}, status="RUNNING", name=run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.module.runs) - 1)))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        run = self.module.runs[int(run_id)]
        run.rows += [(each.step, each.key, each.value) for each in metrics]
        run.params |= {each.key: each.value for each in params}

    def set_terminated(self, run_id, status=None, end_time=None):
        self.module.runs[int(run_id)].status = "FINISHED"


def install_mlflow(monkeypatch):
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.runs, module.experiments = [], {}

    class MlflowException(Exception): ...

    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, step=step)

    def param(key, value):
        return SimpleNamespace(key=key, value=value)

    module.MlflowException, module.MlflowClient = MlflowException, MlflowClient
    entities.Metric, entities.Param = metric, param
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return module
