"""Open an engine: make, start and close it, in this process or in Ray actors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agentenv.core.engine import Engine, EngineOptions, Tokenizer, close_engine
from agentenv.engines.factory import make_engine

if TYPE_CHECKING:
    from agentenv.engines.ray_actor import RayConfig


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
