"""Loads the target of a check: a class, an environment, or an agent_func.py."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv._util.paths import place_of
from agentenv.core.agent import AgentInstance
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.endpoint.agent import ChatAgentSource, owns_its_loop
from agentenv.episode.registry import env_source
from agentenv.episode.source import EnvSource, EpisodeSource, as_agent
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.interop.agent_files import load_agent_func
from agentenv.interop.openrlhf.executor import AgentFunc
from agentenv.testing.tokenizers import CharTokenizer


def load_target(target: str | type[Any], env_kwargs: Mapping[str, Any]) -> tuple[EpisodeSource, type[Any]]:
    """Return the source of a target's episodes, and the class of its environment or agent.

    Raises:
        ConfigError: the target cannot be loaded, or does not take the arguments.
    """
    if not isinstance(target, str):
        own = owns_its_loop(target)
        source: Any = (ChatAgentSource if own else EnvSource)(target if own else as_agent(target), env_kwargs)
        return source, source.cls
    path = Path(target)
    code = path.read_text(errors="replace") if path.suffix == ".py" and path.is_file() else ""
    if "AgentExecutor" in code or "AgentRunner" in code:
        func = load_agent_func(path)
        return func, _agent_class(func, target)
    source = env_source(target, env_kwargs)
    return source, source.cls


def _agent_class(func: AgentFunc, target: str) -> type[AgentInstance]:
    tokenizer = CharTokenizer()
    try:
        cls = func.agent_class(ScriptedEngine([""], tokenizer), tokenizer)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{target}: expected a working AgentExecutor, got {type(error).__name__}: {error} at "
            f"{place_of(error)}. Fix its constructor."
        ) from error
    if not inspect.isclass(cls):
        raise ConfigError(
            f"{target}: expected AgentExecutor to have an agent class, got {cls!r}. "
            "Set `agent_cls`, or pass the class to super().__init__."
        )
    return as_agent(cls)
