"""Engines, one file each behind `agent.Engine`; `open_engine` picks one by name and closes it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from agentenv.agent import Engine, Tokenizer
from agentenv.errors import ConfigError
from agentenv.types import SamplingParams

if TYPE_CHECKING:
    from agentenv.engines.ray_actor import RayConfig

EngineName = Literal["auto", "hf", "vllm_local", "vllm_http", "ray", "scripted"]
ENGINES = get_args(EngineName)[1:]


@runtime_checkable
class Scorer(Protocol):
    """What gives log-probabilities of tokens that are there already; all engines with a model are one."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """[T] log-probability of each token after those before it: the model's own, at temperature 1, nothing cut off.

        NaN for the first token, which nothing comes before, and where the engine has none. Safe to call from many tasks
        of one event loop, while it samples. `token_ids` is read before the call returns and never changed.

        Raises:
            EngineError: the tokens cannot be scored.
        """


def is_plain(sampling: SamplingParams) -> bool:
    """Whether sampled tokens have the model's own log-probabilities: nothing was scaled, cut off or forbidden.

    Greedy ones do too: engines report them as at temperature 1.
    """
    untouched = sampling.temperature == 1.0 and sampling.top_p == 1.0 and sampling.top_k <= 0 and sampling.min_p == 0.0
    return (untouched or sampling.temperature == 0.0) and sampling.min_tokens == 0


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
    ray: RayConfig | None = None,
) -> AsyncIterator[Engine]:
    """The engine of that name with the model loaded, closed at the end.

    Args:
        name: one of ENGINES.
        model: path or Hugging Face id; for vllm_http what the server is expected to serve.
        tokenizer: the model's.
        base_url: of the server, for vllm_http.
        device: for hf.
        dtype: for hf and vllm_local.
        args: further arguments of the engine's constructor.
        ray: where the actors run and what runs inside them, for ray.

    Raises:
        ConfigError: no such engine, it does not take these arguments, or the server serves another model.
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
            _check_served(model, engine.served_names)
        yield engine
    finally:
        await engine.close()


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
    """An engine of this process, not yet started; see `open_engine`."""
    try:
        if name == "hf":
            from agentenv.engines.hf import HFEngine

            return HFEngine(model, tokenizer=tokenizer, device=device, dtype=dtype, **args)
        if name == "vllm_local":
            from agentenv.engines.vllm_local import VLLMEngine

            own = {key: args.pop(key) for key in inspect.signature(VLLMEngine).parameters if key in args}
            return VLLMEngine(model, dtype=dtype, **{**own, "engine_args": {**own.get("engine_args", {}), **args}})
        if name == "vllm_http":
            from agentenv.engines.vllm_http import VLLMHTTPEngine

            return VLLMHTTPEngine(base_url, **args)
        if name == "scripted":
            from agentenv.engines.scripted import ScriptedEngine

            script = _script(args.pop("script", ["#### 42"]))
            return ScriptedEngine(script, **{"tokenizer": tokenizer, **args})
    except TypeError as error:
        raise ConfigError(f"--engine_args: expected arguments of the {name} engine, got {args!r}: {error}.") from error
    raise ConfigError(f"--engine: expected one of {', '.join(ENGINES)} or auto, got {name!r}. Change the flag.")


def _script(value: Any) -> Any:
    """A list of replies as it is, or the function that a text names as module:function."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--engine_args: script: expected a list of replies or module:function, got {value!r}: {error}. Correct it."
        ) from error


def _check_served(model: str, served: tuple[str, ...]) -> None:
    """Refuse a server of another model: its ids would be read with the wrong tokenizer."""
    names = {Path(name).name for name in served}
    if served and Path(model).name not in names:
        raise ConfigError(
            f"--model: expected what the server serves ({' or '.join(dict.fromkeys(served))}), got {model!r}. "
            'Change --model; where the server only calls it otherwise, add --engine_args \'{"model": "ITS NAME"}\'.'
        )
