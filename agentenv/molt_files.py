"""Molt's agent files in `agentenv run --agent_func_path`: what they import from `molt.agents`, over our loop.

Source: molt/agents/{base,chat_agent}.py, 0.1.6 and 0.2.1. A file's `AgentRunner` is a StepEnvRunner, which runs an Env
in our loop, a ChatAgentRunner, whose agent asks our endpoint, or a Runner with an `execute` of its own. Anthropic's
wire is not offered, and such an `execute` may give one Trajectory, not several.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentenv.agent import AgentInstance, StepDict, StepState, call, create
from agentenv.chat import Chat
from agentenv.endpoint.agent import AgentContext, ChatAgentSource
from agentenv.engines.openrlhf import LLMEngine, RequestOutput
from agentenv.episode import EpisodeKey
from agentenv.errors import ContractError
from agentenv.executor import AgentExecutor, AgentFunc
from agentenv.openrlhf_module import LOADING
from agentenv.trajectory import Trajectory as Episode
from agentenv.agent import Engine
from agentenv.types import Limits, SamplingParams, Task


@dataclass
class Result:
    """As Molt's: what an Env's `step` and a ChatAgent's `run` give."""

    reward: Any = 0.0
    observation: str = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: Any = None
    images: list[Any] | None = None
    sampling_params: Any = None


def step_dict(result: Any, where: str) -> StepDict:
    """A Result in OpenRLHF's words, which `parse_step` reads; facts that are neither numbers nor text are left out.

    Raises:
        ContractError: it is none.
    """
    if not isinstance(result, Result):
        raise ContractError(f"{where}: expected molt.agents.Result, got {type(result).__name__}. Return one.")
    info = {name: _fact(value) for name, value in (result.info or {}).items()}
    return {
        "rewards": _first(result.reward),
        "scores": None if result.score is None else _first(result.score),
        "environment_feedback": result.observation,
        "done": bool(result.terminated or result.truncated),
        "truncated": bool(result.truncated),
        "extra_logs": {name: value for name, value in info.items() if value is not None},
        "sampling_params": result.sampling_params,
        "environment_images": result.images or (),
    }


def _first(value: Any) -> Any:
    """Molt takes the first of several numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list | tuple):
        value = value[0] if value else None
    return value


def _fact(value: Any) -> float | str | None:
    value = _first(value)
    return value if isinstance(value, int | float | str) else None


class Env(AgentInstance):
    """As Molt's: `step` gives a Result; a plain subclass is an environment of ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let `step` answer in the words that our loop reads."""
        super().__init_subclass__(**kwargs)
        if "step" in cls.__dict__:
            cls.step = _answering(cls.__dict__["step"])  # type: ignore[method-assign]


def _answering(step: Any) -> Any:
    async def answering(self: Env, state: StepState, **kwargs: Any) -> Any:
        """The step, with its Result in OpenRLHF's words; what a super().step gave is passed through."""
        return await call(step, self, state)

    return answering
