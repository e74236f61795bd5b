"""Load the files that other frameworks run: agent functions and reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from agentenv._util.paths import place_of
from agentenv.core.agent import AgentInstance
from agentenv.engines.scripted import PlainTextTokenizer, ScriptedEngine
from agentenv.episode.registry import load_file
from agentenv.episode.source import as_agent
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.interop.molt.files import MoltFunc, Runner, molt_stand_in
from agentenv.interop.openrlhf.executor import AgentExecutor, AgentFunc, AgentInstanceBase
from agentenv.interop.openrlhf.reward_func import (
    TIMEOUT_S,
    AnswerJudge,
    RewardFunction,
    RewardServers,
    RewardSource,
    SingleTurnAgentExecutor,
)
from agentenv.interop.openrlhf.shim import openrlhf_stand_in

OPENRLHF_NAMES: Mapping[str, type] = {
    "AgentExecutorBase": AgentExecutor,
    "AgentInstanceBase": AgentInstanceBase,
    "MultiTurnAgentExecutor": AgentExecutor,
    "SingleTurnAgentExecutor": SingleTurnAgentExecutor,
}
"""What a file finds in `openrlhf.utils.agent`."""


def load_agent_func(path: str | Path) -> AgentFunc:
    """Return the `AgentExecutor` of an OpenRLHF agent_func.py, or the `AgentRunner` of a Molt file, ready for episodes.

    Neither framework has to be installed. While the file is loaded, our stand-ins replace `openrlhf.utils.agent` and
    `molt.agents`; afterwards an installed package is as before.

    Raises:
        ConfigError: the file is missing, cannot be imported, or defines neither class.
    """
    module = _load_with_stand_ins(path)
    executor = _executor_of(module)
    if not inspect.isclass(executor) or not callable(getattr(executor, "execute", None)):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        old = " A function `step` is the form of OpenRLHF 0.8.0 to 0.8.6, which agentenv does not run: write a class."
        raise ConfigError(
            f"{path}: expected a class AgentExecutor with an `execute` method, got the classes {classes}. "
            "Define `class AgentExecutor(AgentExecutor): agent_cls = YourEnvironment` (for Molt AgentRunner), or use "
            "--env FILE.py:Class." + old * inspect.isroutine(getattr(module, "step", None))
        )
    return MoltFunc(executor) if issubclass(executor, Runner) else AgentFunc(executor)


def _executor_of(module: ModuleType) -> Any:
    return getattr(module, "AgentExecutor", None) or getattr(module, "AgentRunner", None)


def load_func_agent(path: str) -> tuple[AgentFunc, type[AgentInstance]] | None:
    """Return a file's agent_func and the class of its environment; None if the path is of no file with an executor.

    Raises:
        ConfigError: as `load_agent_func`; or its executor cannot be constructed, or has no such class.
    """
    code = Path(path).read_text(errors="replace") if path.endswith(".py") and Path(path).is_file() else ""
    if "AgentExecutor" not in code and "AgentRunner" not in code:
        return None
    module = _load_with_stand_ins(path)
    executor = _executor_of(module)
    named = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    if getattr(executor, "__module__", "agentenv.").startswith("agentenv."):  # none, or one of ours that is imported
        is_for_trainer = "openrlhf.utils.agent" in code or "molt.agents" in code
        if not (is_for_trainer and any(inspect.isclass(each) and issubclass(each, AgentExecutor) for each in named)):
            return None
    func, tokenizer = load_agent_func(path), PlainTextTokenizer()
    try:
        cls = func.agent_class(ScriptedEngine([""], tokenizer), tokenizer)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{path}: expected a working AgentExecutor, got {type(error).__name__}: {error} at {place_of(error)}. "
            "Fix its constructor."
        ) from error
    if inspect.isclass(cls):
        return func, as_agent(cls)
    advice = "Set `agent_cls`, or pass the class to super().__init__."
    if not executor.execute.__module__.startswith("agentenv."):
        advice = f"A file that has only its own `execute` runs, with `agentenv run --agent_func_path {path}`."
    raise ConfigError(f"{path}: expected {executor.__name__} to have an agent class to call, got {cls!r}. {advice}")


def _load_with_stand_ins(path: str | Path) -> ModuleType:
    with openrlhf_stand_in(OPENRLHF_NAMES), molt_stand_in():
        return load_file(path)


def load_reward_source(
    spec: str, *, batch_size: int = 1, wait_s: float = 0.005, timeout_s: float = TIMEOUT_S
) -> RewardSource:
    """Return a source of one-turn episodes, judged by a file's `reward_func` or by reward servers.

    Args:
        spec: `FILE.py` or `http://…[,http://…]`, as for `--remote_rm_url`.
        batch_size: maximum number of samples in one call. 1, as in OpenRLHF since 0.9.1: a function that computes over
            its whole list, such as a mean, sees one sample, so that rewards do not depend on concurrent episodes. With
            a larger number, samples that arrive within `wait_s` are judged together, as until 0.9.0: for a model that
            is faster in batches.
        wait_s: longest wait for a batch to fill.
        timeout_s: deadline of one answer over HTTP, including all attempts.

    Raises:
        ConfigError: `spec` is neither a file nor addresses, or the file has no `reward_func` of three arguments.
    """
    if spec.startswith(("http://", "https://")):
        judge: AnswerJudge = RewardServers([url.strip() for url in spec.split(",")], timeout_s=timeout_s)
    elif spec.endswith(".py"):
        judge = RewardFunction(load_reward_func(spec), f"{spec}: reward_func")
    else:
        raise ConfigError(
            f"--remote_rm_url: expected FILE.py or http://HOST/get_reward[,http://…], got {spec!r}. "
            "Name a file with reward_func(queries, prompts, labels), or write http:// before the address."
        )
    return RewardSource(judge, batch_size=batch_size, wait_s=wait_s)


def load_reward_func(path: str | Path) -> Callable[..., Any]:
    """Return a file's `reward_func`; the file may import OpenRLHF's agent module even if OpenRLHF is not installed.

    Raises:
        ConfigError: the file is missing, cannot be imported, or has no `reward_func` of three arguments.
    """
    module = _load_with_stand_ins(path)
    function = getattr(module, "reward_func", None)
    advice = "Write `def reward_func(queries, prompts, labels)`."
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{path}: expected a function reward_func, got the functions {names}. {advice}")
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        raise ConfigError(
            f"{path}: expected reward_func to accept queries, prompts and labels as positional arguments, got "
            f"def reward_func{inspect.signature(function)} ({error}). {advice}"
        ) from error
    return function  # type: ignore[no-any-return]
