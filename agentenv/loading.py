"""Names to things: environments, agent_func files, built-in data and models. Nothing is guessed."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from zlib import crc32

from agentenv import molt_files
from agentenv.agent import AgentInstance, Engine, Tokenizer, as_agent, check_arguments, create
from agentenv.chat import Chat, stop_token_ids_of
from agentenv.endpoint.agent import ChatAgentSource, owns_its_loop
from agentenv.episode import EpisodeKey, run_episode
from agentenv.errors import ConfigError
from agentenv.executor import AgentExecutor, AgentFunc
from agentenv.molt_files import MoltFunc
from agentenv.openrlhf_module import stand_in
from agentenv.trajectory import Trajectory
from agentenv.types import Limits, SamplingParams, Task

ENTRY_POINT_GROUP = "agentenv.envs"
_MODELS = Path(__file__).parent / "models"


class EpisodeSource(Protocol):
    """What the runner asks for episodes: an environment, or an agent_func."""

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Trajectory:
        """Run one episode and give its record."""


@dataclass(frozen=True, slots=True)
class EnvSource:
    """Episodes of an environment class with fixed constructor arguments."""

    cls: type[AgentInstance]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse arguments that the constructor does not take, before the first episode."""
        check_arguments(self.cls, self.kwargs)

    @property
    def datasets(self) -> Mapping[str, str | Path]:
        """Data that comes with the environment, by name."""
        return self.cls.datasets

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Trajectory:
        """Run one episode; see `run_episode`."""
        make = partial(create, self.cls, self.kwargs)
        return await run_episode(make, task, engine=engine, chat=chat, sampling=sampling, limits=limits, key=key)


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """An installed environment, as `agentenv list` shows it; nothing of it is imported."""

    name: str
    value: str
    """module:Attr"""
    distribution: str


def installed_envs() -> dict[str, EnvEntry]:
    """Every environment that an installed package offers in the entry point group `agentenv.envs`, by name.

    Raises:
        ConfigError: two packages offer the same name.
    """
    found: dict[str, EnvEntry] = {}
    for entry in _offered():
        known = found.setdefault(entry.name, entry)
        if known != entry:
            raise ConfigError(
                f"environment {entry.name!r}: expected one package to offer it, got {known.distribution} "
                f"({known.value}) and {entry.distribution} ({entry.value}). Uninstall one, or name it as module:Attr."
            )
    return dict(sorted(found.items()))


def _offered() -> tuple[EnvEntry, ...]:
    return _read_offered(tuple((path, _changed(path)) for path in map(os.path.abspath, sys.path)))


@functools.lru_cache(maxsize=4)
def _read_offered(paths: tuple[tuple[str, int | None], ...]) -> tuple[EnvEntry, ...]:
    """Read once for each state of `sys.path`: reading all packages' metadata takes 10 ms."""
    # Sorted: metadata has them in the order of whichever tool built the package.
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    return tuple(EnvEntry(_normal(point.name), point.value, _distribution(point)) for point in points)


def _changed(path: str) -> int | None:
    """When something was last put into a folder, as a package that is installed is."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "?"


def _normal(name: str) -> str:
    return name.replace("-", "_")


def load_env(spec: str) -> type[Any]:
    """The class behind an id: an entry point's name, `path/file.py[:Attr]` or `module:Attr`.

    It is an AgentInstance, or an agent with a loop of its own (`run` and no `step`).

    Raises:
        ConfigError: there is none, or it is neither; names what was tried and the nearest name.
    """
    path, _, attribute = spec.partition(":")
    if path.endswith(".py"):
        return _env_class(_attribute(load_file(path), attribute, spec), spec)
    if attribute:
        return _env_class(_attribute(_import(path), attribute, spec), spec)
    envs = installed_envs()
    if _normal(spec) in envs:
        module, _, attribute = envs[_normal(spec)].value.partition(":")
        return _env_class(getattr(_import(module), attribute, None), spec)
    raise ConfigError(
        f"--env: expected an installed environment ({', '.join(envs) or 'none is installed'}), module:Attr or "
        f"path/file.py[:Attr], got {spec!r}.{nearest(spec, envs)} `agentenv list` shows what is installed."
    )


def env_source(spec: str, kwargs: Mapping[str, Any]) -> EnvSource | ChatAgentSource:
    """What runs the episodes of the class behind an id, made with these arguments.

    Raises:
        ConfigError: as `load_env`; or the constructor does not take the arguments.
        MissingDependency: an agent with a loop of its own needs a server, whose libraries are not installed.
    """
    cls = load_env(spec)
    return ChatAgentSource(cls, kwargs) if owns_its_loop(cls) else EnvSource(cls, kwargs)


def _attribute(module: ModuleType, attribute: str, spec: str) -> Any:
    if attribute:
        return getattr(module, attribute, None)
    classes: dict[Any, str] = {}
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            classes.setdefault(value, name)  # by the module's name for it: what makes a class may call it otherwise
    own = {c: name for c, name in classes.items() if issubclass(c, AgentInstance)}
    own = own or {c: name for c, name in classes.items() if owns_its_loop(c)}
    if len(own) == 1:
        return next(iter(own))
    names = list(own.values())
    raise ConfigError(
        f"--env: expected one AgentInstance in {spec}, or one class with `run`, got {names}. Write {spec}:ClassName."
    )


def _env_class(value: Any, spec: str) -> type[Any]:
    if owns_its_loop(value):
        cls: type[Any] = value
        return cls
    if inspect.isclass(value) and (issubclass(value, AgentInstance) or hasattr(value, "step")):
        return as_agent(value)
    raise ConfigError(
        f"--env: expected {spec!r} to name a class with a `step` method, got {value!r}. "
        "Give the class, a subclass of agentenv.AgentInstance, or one with `run` where the agent has a loop of its own."
    )


def load_agent_func(path: str | Path) -> AgentFunc:
    """The `AgentExecutor` of an OpenRLHF agent_func.py, or the `AgentRunner` of a Molt file, ready to run episodes.

    Neither has to be installed. While the file is loaded, `openrlhf.utils.agent` and `molt.agents` are our stand-ins;
    afterwards what is installed is as it was.

    Raises:
        ConfigError: no such file, it cannot be imported, or it defines neither class.
    """
    with stand_in(AgentExecutor, AgentInstance), molt_files.stand_in():
        module = load_file(path)
    executor = getattr(module, "AgentExecutor", None) or getattr(module, "AgentRunner", None)
    if not inspect.isclass(executor) or not callable(getattr(executor, "execute", None)):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        old = " A function `step` is the form of OpenRLHF 0.8.0 to 0.8.6, which agentenv does not run: write a class."
        raise ConfigError(
            f"{path}: expected a class AgentExecutor with an `execute` method, got the classes {classes}. "
            "Define `class AgentExecutor(AgentExecutor): agent_cls = YourEnvironment` (for Molt AgentRunner), or use "
            "--env FILE.py:Class." + old * inspect.isroutine(getattr(module, "step", None))
        )
    return MoltFunc(executor) if issubclass(executor, molt_files.Runner) else AgentFunc(executor)


def load_file(path: str | Path) -> ModuleType:
    """Import a Python file by path.

    It is put in `sys.modules`, which dataclasses and pickle need, and its folder at the end of `sys.path`, so that it
    may import its neighbours without hiding anybody's modules.

    Raises:
        ConfigError: no such file, not a .py file, or it raised while being imported.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"{path}: expected an existing .py file, got none. Check the path.")
    name = f"agentenv_file_{file.stem}_{crc32(str(file).encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python module, got a file that cannot be one. Check the path.")
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{_place(error, file)}: expected to import, got {_told(error)}. Mend the file.") from error
    return module


def _place(error: BaseException, file: Path) -> str:
    """File and line of the user's code in which `error` arose."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{file}:{line}" if line else str(file)


def _told(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f'SystemExit: {error} (what calls sys.exit belongs under `if __name__ == "__main__":`)'
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--env: expected to import the module {module!r}, got {_told(error)}. Install it or fix PYTHONPATH."
        ) from error


def builtin_datasets() -> dict[str, Path]:
    """The data that installed environments ship, by name: the `datasets` of their classes.

    An environment that cannot be imported has none here: it stands in nobody else's way.
    """
    found: dict[str, Path] = {}
    for entry in _offered():
        with contextlib.suppress(ConfigError):
            own = getattr(load_env(entry.value), "datasets", {})
            found.update({_normal(key): Path(path) for key, path in own.items()})
    return found


def resolve_model(name: str) -> str:
    """A model's path when it ships with the package or is a folder; otherwise the name, for the Hugging Face cache."""
    if name in shipped_models():
        return str(_MODELS / name)
    path = Path(name).expanduser()
    return str(path) if name and path.exists() else name


def load_tokenizer(model: str) -> Tokenizer:
    """The Hugging Face tokenizer of a model.

    Raises:
        ConfigError: there is none; with the reason that transformers gives.
    """
    try:
        tokenizer: Tokenizer = _tokenizer_class(Path(model)).from_pretrained(model)
    except Exception as error:
        known, training = shipped_models(), _training(Path(model))
        if training is not None:
            raise ConfigError(f"--model: expected a model's folder, got {model!r}, {training}") from error
        is_path = len(Path(model).parts) > 2 or model.startswith((".", "~"))
        reason = "there is no such folder." if is_path and not Path(model).exists() else error
        raise ConfigError(
            f"--model: expected a model's folder, a Hugging Face id or one of {known}, got {model!r}: {reason}"
            f"{nearest(model, known)}"
        ) from error
    return tokenizer


def _training(path: Path) -> str | None:
    """What to do where a training's folder, or a checkpoint in it, is named in place of its model."""
    for folder in (path, path.parent, path.parent.parent):
        if not folder.name or not ((folder / "checkpoints").is_dir() and (folder / "metrics.jsonl").exists()):
            continue
        if (folder / "model").is_dir():
            return None if path == folder / "model" else f"of a training. Its model is {folder / 'model'}."
        return (
            f"of a training that was interrupted: {folder} has only checkpoints. Finish it with the same flags and "
            "--load_checkpoint; with --max_train_steps 1 as well, that leaves the model of the steps so far."
        )
    return None


def _tokenizer_class(folder: Path) -> Any:
    """The class that AutoTokenizer takes for a folder, where that is plain to see; else AutoTokenizer.

    Importing AutoTokenizer imports torch and takes seconds, which a run without a model of its own does not need.
    """
    import transformers

    asked = _read_json(folder / "tokenizer_config.json")
    is_plain = hasattr(transformers, "TokenizersBackend") and "auto_map" not in asked
    if is_plain and (folder / "tokenizer.json").is_file():
        config = _read_json(folder / "config.json")
        match asked.get("tokenizer_class"), config.get("model_type"):
            case "Qwen2Tokenizer" | "Qwen2TokenizerFast", "qwen2":
                return transformers.Qwen2Tokenizer
            case "TokenizersBackend", None if not (folder / "config.json").exists():
                return transformers.TokenizersBackend
    return transformers.AutoTokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object's content; empty where there is none: who asks goes on to what says why."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def load_stop_token_ids(model: str) -> tuple[int, ...]:
    """The ids that end a turn of this model by its generation config, where engines stop; empty where it has none."""
    return stop_token_ids_of(model, may_download=True)


def shipped_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(folder.name for folder in _MODELS.iterdir() if folder.is_dir()) if _MODELS.is_dir() else []


def nearest(name: str, names: Iterable[str]) -> str:
    """' Did you mean …?' for the nearest of `names`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
