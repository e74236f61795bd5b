"""Create engines by name. `open_engine` also starts and closes them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.core.engine import Engine, Tokenizer
from agentenv.engines.single import close_engine, make_engine
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.engines.ray_actor import RayConfig


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
        name: one of ENGINES.
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
    if name == "ray":
        from agentenv.engines.ray_actor import ActorSpec, RayConfig, open_pool

        config = ray or RayConfig()
        async with open_pool(
            ActorSpec(config.backend, model, tokenizer, device, dtype, dict(args or {})), config
        ) as pool:
            yield pool
        return
    engine = make_engine(
        name, model, tokenizer, base_url=base_url or "", device=device, dtype=dtype, args=dict(args or {})
    )
    try:
        if hasattr(engine, "start"):
            await engine.start()
        if name == "vllm_http" and "model" not in (args or {}):
            served = engine.served_names  # the tokenizer of another model would differ
            if served and Path(model).name not in {Path(name).name for name in served}:
                raise ConfigError(
                    f"--model: expected the served model ({' or '.join(dict.fromkeys(served))}), got {model!r}. "
                    "Change --model; where the server only calls it otherwise, add "
                    '--engine_args \'{"model": "ITS NAME"}\'.'
                )
        yield engine
    finally:
        await close_engine(engine)
