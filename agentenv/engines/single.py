"""Make one engine in this process, which Ray's actors do too, and close one."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
from typing import Any, Literal, get_args

from agentenv.core.engine import Tokenizer
from agentenv.errors import ConfigError

logger = logging.getLogger(__name__)

EngineName = Literal["auto", "hf", "vllm_local", "vllm_http", "ray", "chat", "scripted"]


ENGINES = get_args(EngineName)[1:]
CLOSE_S = 30.0
"""Deadline for closing an engine."""


def make_engine(
    name: str,
    model: str,
    tokenizer: Tokenizer,
    *,
    base_url: str = "",
    device: str = "auto",
    dtype: str = "auto",
    args: dict[str, Any],
) -> Any:
    """Return an engine in this process, not yet started; see `open_engine`."""
    try:
        if name == "hf":
            from agentenv.engines.hf.engine import HFEngine

            return HFEngine(model, tokenizer=tokenizer, device=device, dtype=dtype, **args)
        if name == "vllm_local":
            from agentenv.engines.vllm.local import VLLMEngine

            own = {key: args.pop(key) for key in inspect.signature(VLLMEngine).parameters if key in args}
            return VLLMEngine(model, dtype=dtype, **{**own, "engine_args": {**own.get("engine_args", {}), **args}})
        if name == "vllm_http":
            from agentenv.engines.vllm.http import VLLMHTTPEngine

            engine = VLLMHTTPEngine(base_url, **args)
            engine.tokenizer = tokenizer
            return engine
        if name == "chat":
            from agentenv.engines.chat.engine import ChatEngine

            return ChatEngine(base_url, model, **args)
        if name == "scripted":
            from agentenv.engines.scripted import ScriptedEngine

            script = args.pop("script", ["#### 42"])
            if isinstance(script, str):  # the name of a function, instead of replies
                module, _, function = script.partition(":")
                try:
                    script = getattr(importlib.import_module(module), function)
                except (ImportError, AttributeError, ValueError) as error:
                    raise ConfigError(
                        "--engine_args: script: expected a list of replies or module:function, got "
                        f"{script!r}: {error}. Correct it."
                    ) from error
            return ScriptedEngine(script, **{"tokenizer": tokenizer, "keeps_requests": False, **args})
    except TypeError as error:
        raise ConfigError(f"--engine_args: expected arguments of the {name} engine, got {args!r}: {error}.") from error
    raise ConfigError(f"--engine: expected one of {', '.join(ENGINES)} or auto, got {name!r}. Change the flag.")


async def close_engine(engine: Any, limit_s: float | None = None) -> None:
    """Close an engine that may be dead or hang, within `limit_s` (default: CLOSE_S); log it if that fails."""
    if not hasattr(engine, "close"):
        return
    limit_s = CLOSE_S if limit_s is None else limit_s
    closing = asyncio.ensure_future(engine.close())
    done, _ = await asyncio.wait([closing], timeout=limit_s)
    error: BaseException | None = TimeoutError(f"close took longer than {limit_s:g} s")
    if not done:
        closing.cancel()
    else:
        error = None if closing.cancelled() else closing.exception()
    if error is not None:
        name, kind = type(engine).__name__, type(error).__name__
        logger.warning("%s: expected to close, got %s: %s. Its processes may still run.", name, kind, error)
