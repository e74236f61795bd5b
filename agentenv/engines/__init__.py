"""Engines, one file each behind `agent.Engine`; `open_engine` picks one by name and closes it."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agentenv.agent import Engine, Tokenizer
from agentenv.errors import ConfigError

ENGINES = ("hf", "vllm_local", "vllm_http", "scripted")


def choose_engine(name: str, *, base_url: str | None) -> str:
    """The engine that "auto" means here: vllm_http for a server, vllm_local with vLLM and a GPU, else hf."""
    if name != "auto":
        return name
    if base_url:
        return "vllm_http"
    if importlib.util.find_spec("vllm") is None:
        return "hf"
    import torch

    return "vllm_local" if torch.cuda.is_available() else "hf"


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
) -> AsyncIterator[Engine]:
    """The engine of that name with the model loaded, closed at the end.

    Args:
        name: one of ENGINES.
        model: path or Hugging Face id; for vllm_http the server's own name for it, or "" to ask the server.
        tokenizer: the model's.
        base_url: of the server, for vllm_http.
        device: for hf.
        dtype: for hf and vllm_local.
        args: further arguments of the engine's constructor.

    Raises:
        ConfigError: no such engine, or it does not take these arguments.
        MissingDependency: its library is not installed.
    """
    more = dict(args or {})
    engine: Any
    try:
        if name == "hf":
            from agentenv.engines.hf import HFEngine

            engine = HFEngine(model, tokenizer=tokenizer, device=device, dtype=dtype, **more)
        elif name == "vllm_local":
            from agentenv.engines.vllm_local import VLLMEngine

            engine = VLLMEngine(model, dtype=dtype, **more)
        elif name == "vllm_http":
            from agentenv.engines.vllm_http import VLLMHTTPEngine

            engine = VLLMHTTPEngine(base_url or "", model=model or None, **more)
        elif name == "scripted":
            from agentenv.engines.scripted import ScriptedEngine

            engine = ScriptedEngine(more.pop("script", ["#### 42"]), tokenizer, **more)
        else:
            raise ConfigError(f"--engine: expected one of {', '.join(ENGINES)} or auto, got {name!r}. Change the flag.")
    except TypeError as error:
        raise ConfigError(f"--engine_args: expected arguments of the {name} engine, got {more!r}: {error}.") from error
    try:
        yield engine
    finally:
        await engine.close()
