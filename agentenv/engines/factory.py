"""The engines by name; a plugin's engine is found by its entry point. `opening.py` starts and closes one."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import entry_points

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


def engine_names() -> list[str]:
    """Return what `--engine` takes: our engines, those of installed packages, `ray` and `auto`."""
    return ["auto", *ENGINES, "ray", *sorted(entry.name for entry in entry_points(group=GROUP))]


def engine_class(name: str) -> type[Engine]:
    """Return the class of an engine. Its module is imported, its library is not.

    Raises:
        ConfigError: no engine has this name, or a plugin's module is not an engine.
    """
    if name in ENGINES:
        module, _, attribute = ENGINES[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        known = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in known:
            raise ConfigError(f"--engine: expected one of {', '.join(engine_names())}, got {name!r}. Change the flag.")
        found = known[name].load()
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ConfigError(f"--engine {name}: expected a subclass of agentenv.core.engine.Engine, got {found!r}.")
    return found


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
        given = dict(options.args)
        raise ConfigError(f"--engine_args: expected arguments of the {name} engine, got {given!r}: {error}.") from error
