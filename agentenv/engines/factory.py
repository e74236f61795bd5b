"""The engines by name. `open_engine` makes, starts and closes one; a plugin's engine is found by its entry point."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from agentenv.core.engine import Engine, EngineOptions, Tokenizer, close_engine
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.engines.ray_actor import RayConfig

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
    """Return an engine in this process, not yet started; see `open_engine`."""
    cls = engine_class(name)
    try:
        return cls.from_options(options)
    except TypeError as error:
        given = dict(options.args)
        raise ConfigError(f"--engine_args: expected arguments of the {name} engine, got {given!r}: {error}.") from error


@asynccontextmanager
async def open_engine(
    name: str,
    model: str,
    tokenizer: Tokenizer,
    *,
    base_url: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    args: Mapping[str, Any] | None = None,
    ray: RayConfig | None = None,
) -> AsyncIterator[Engine]:
    """Open the named engine with the model loaded; close it at the end.

    Args:
        name: one of `engine_names()` but "auto".
        model: path or Hugging Face id; for vllm_http and chat the server's name of the model.
        tokenizer: the model's.
        base_url: URL of the server, for vllm_http and chat.
        device: device for hf.
        dtype: data type for hf and vllm_local.
        args: further arguments of the engine's constructor.
        ray: the actors, for ray.

    Raises:
        ConfigError: the engine is unknown, refuses the arguments, or the server serves another model.
        MissingDependency: its library is not installed.
    """
    options = EngineOptions(model, tokenizer, base_url or "", device, dtype, dict(args or {}))
    if name == "ray":
        from agentenv.engines.ray_actor import RayConfig, open_pool

        async with open_pool(options, ray or RayConfig()) as pool:
            yield pool
        return
    engine = make_engine(name, options)
    try:
        await engine.start()
        yield engine
    finally:
        await close_engine(engine)
