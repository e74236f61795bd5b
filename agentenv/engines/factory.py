"""The engines by name; a plugin's engine is found by its entry point. `opening.py` starts and closes one."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from agentenv._util.suggest import did_you_mean
from agentenv.core.engine import Engine, EngineOptions
from agentenv.errors import ConfigError

ENGINES = {
    "hf": "agentenv.engines.hf.engine:HFEngine",
    "vllm_local": "agentenv.engines.vllm.local:VLLMEngine",
    "vllm_http": "agentenv.engines.vllm.http:VLLMHTTPEngine",
    "chat": "agentenv.engines.chat.engine:ChatEngine",
    "scripted": "agentenv.engines.scripted:ScriptedEngine",
}
"""Our engines: the name in `--engine`, and the class. A package adds its own by the entry point group GROUP."""
GROUP = "agentenv.engines"


@functools.cache
def _offered() -> EntryPoints:
    """Return what packages offer; reading the metadata of all of them takes 10 ms."""
    return entry_points(group=GROUP)


def engine_names() -> list[str]:
    """Return what `--engine` takes: our engines, those of installed packages, `ray` and `auto`."""
    ours = ["auto", *ENGINES, "ray"]
    return [*ours, *sorted({entry.name for entry in _offered()}.difference(ours))]


def engine_class(name: str) -> type[Engine]:
    """Return the class of an engine. Its module is imported, its library is not.

    Raises:
        ConfigError: no engine has this name or two have it, or a plugin cannot be imported or is not an engine.
    """
    offers = {entry.value: entry.dist.name if entry.dist else "?" for entry in _offered().select(name=name)}
    if name in ENGINES:
        offers = {ENGINES[name]: "agentenv-rl", **offers}
    if not offers:
        names = engine_names()
        advice = did_you_mean(name, names, "Change the flag.")
        raise ConfigError(f"--engine: expected one of {', '.join(names)}, got {name!r}.{advice}")
    found = " and ".join(f"{package} ({value})" for value, package in offers.items())
    if len(offers) > 1:
        raise ConfigError(f"--engine {name}: expected one package to offer it, got {found}. Uninstall one.")
    try:
        cls = EntryPoint(name, next(iter(offers)), GROUP).load()
    except Exception as error:
        raise ConfigError(
            f"--engine {name}: expected {found} to import, got {type(error).__name__}: {error}. Fix the package."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Engine)):
        raise ConfigError(f"--engine {name}: expected a subclass of agentenv.core.engine.Engine, got {cls!r}.")
    return cls


def choose_engine(name: str, *, base_url: str | None) -> str:
    """Return the engine for "auto": vllm_http with a server, vllm_local with vLLM and a GPU, otherwise hf."""
    if name != "auto":
        return name
    if base_url:
        return "vllm_http"
    if importlib.util.find_spec("vllm") is None:
        return "hf"
    import torch

    return "vllm_local" if torch.cuda.is_available() else "hf"


def make_engine(name: str, options: EngineOptions) -> Engine:
    """Return an engine in this process, not yet started; see `agentenv.engines.open_engine`."""
    cls = engine_class(name)
    try:
        return cls.from_options(options)
    except TypeError as error:
        if "argument" not in str(error):  # of a call; others are bugs of the engine
            raise
        names = ", ".join(inspect.signature(cls).parameters)
        got = str(error).rpartition("keyword argument ")[2]  # its name, where it is unknown
        raise ConfigError(
            f"--engine_args: expected arguments of the {name} engine, got {got}. It takes {names}."
        ) from error
