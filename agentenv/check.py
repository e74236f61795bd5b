"""`check`: run an agent against a scripted policy, watch every call, and name what breaks the contract.

An agent with a loop of its own is run against an endpoint of that policy; its errors are those of its record. This is
the property `contract` of `conformance/`, alone: what `agentenv check --quick` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from agentenv.check_watch import CallWatch, Hung
from agentenv.config import parse_json_object
from agentenv.conformance.cases import LABEL, PROMPT
from agentenv.conformance.contract import contract, of_hung
from agentenv.conformance.problems import Problem
from agentenv.conformance.scene import Options, Scene
from agentenv.types import Task

__all__ = ["STEP_TIMEOUT_S", "Problem", "check", "task_of"]
STEP_TIMEOUT_S = 30.0


def check(
    target: str,
    *,
    env_kwargs: str = "{}",
    prompt: str = "",
    label: Any = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Problem]:
    """The contract errors of an agent_func.py or an environment; none when it may be trained with.

    One call of its methods may take `step_timeout_s`, a loop of its own twice as long; `tell` shows a line to the
    person who waits, about a call that takes long.

    Raises:
        ConfigError: the target cannot be loaded at all.
    """
    arguments = parse_json_object("--env_kwargs", env_kwargs)
    options = Options(target, arguments, task_of(prompt, label), step_timeout_s=step_timeout_s)
    scene = Scene(options, CallWatch(tell))
    try:
        problems: list[Problem] = asyncio.run(scene.watch.over(partial(contract, scene)))
    except Hung as hung:
        problems = [of_hung(scene, hung)]
    finally:
        scene.close()
    return problems


def task_of(prompt: str, label: Any) -> Task | None:
    """The task that a person gives; None where both are ours, so that an environment with data is tried on that."""
    if prompt in ("", PROMPT) and label in (None, LABEL):
        return None
    return Task([{"role": "user", "content": prompt or PROMPT}], label, task_id="check")
