"""FromNemo: one of NeMo RL's environments as an agent instance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.step_dict import scalar
from agentenv.core.types import SamplingParams, StepResult, as_flag
from agentenv.errors import ConfigError, ContractError


class FromNemo(AgentInstance):
    """One row of a NeMo RL `EnvironmentInterface`, stepped alone.

    The class is taken out of its Ray actor. One object of it, created in this process, serves all episodes; its
    `shutdown` is not called.

    Args:
        environment: path of the class, such as `nemo_rl.environments.math_environment.MathEnvironment`.
        config: the constructor's only argument; None calls it without one.
        concurrent: True if several threads may call `step`; otherwise they take turns.

    The row's label is `ground_truth` in the metadata, next to the row's other columns. Reward components are summed,
    and are also in `info`.
    """

    score_range = None

    def __init__(self, environment: str, config: Mapping[str, Any] | None = None, *, concurrent: bool = False) -> None:
        self._shared = _shared(environment, json.dumps(config, sort_keys=True))
        self._concurrent = concurrent
        self._log: list[Any] = []
        self._metadata: Any = None

    async def reset(self, states: ResetState) -> ResetState:
        """Start the message log with the prompt."""
        prompt = states["observation"]
        self._log = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        self._metadata = {"ground_truth": states.get("label"), **(states.get("metadata") or {})}
        return states

    def step(self, states: StepState) -> StepResult:  # type: ignore[override]  # plain: it runs in a thread
        """Return the environment's answer to an action.

        Raises:
            ContractError: the answer does not follow NeMo RL's interface, or its reward is not a number.
        """
        self._log.append({"role": "assistant", "content": states["action_text"]})
        environment, turn = self._shared
        if self._concurrent:
            answer = environment.step([list(self._log)], [self._metadata])
        else:
            with turn:
                answer = environment.step([list(self._log)], [self._metadata])
        observation, metadata = answer.observations[0], answer.metadata[0]
        self._log.append(dict(observation))
        self._metadata = self._metadata if metadata is None else metadata
        parts: dict[str, float | str] = {}
        if isinstance(answer.rewards, Mapping):
            for name, column in answer.rewards.items():
                parts[name] = scalar(column[0], f"EnvironmentReturn.rewards[{name!r}]")
            reward = sum(map(float, parts.values()))
        else:
            reward = scalar(answer.rewards[0], "EnvironmentReturn.rewards")
        done = as_flag(answer.terminateds[0], "EnvironmentReturn.terminateds")
        stop = answer.next_stop_strings[0] if answer.next_stop_strings else None
        sampling = states.get("sampling_params")
        next_sampling = None
        if stop is not None and isinstance(sampling, SamplingParams):
            next_sampling = replace(sampling, stop=tuple(stop))
        return StepResult(
            "" if done else str(observation["content"]),
            reward=reward,
            terminated=done,
            info=parts,
            sampling=next_sampling,
        )


@lru_cache(maxsize=8)
def _shared(place: str, config: str) -> tuple[Any, threading.Lock]:
    """Return the object of a class by its path, and the lock for its turns."""
    module, _, name = place.rpartition(".")
    try:
        cls: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"environment: expected the path of a class, got {place!r}: {error}. Correct it.") from error
    arguments = json.loads(config)
    return undecorated(cls)(*([] if arguments is None else [arguments])), threading.Lock()


def undecorated(cls: Any) -> type[Any]:
    """Return the class behind Ray's `@ray.remote`, or the class itself.

    Raises:
        ContractError: it is not a class with `step`.
    """
    ray_metadata = getattr(cls, "__ray_metadata__", None)
    plain = cls
    if ray_metadata is not None:
        plain = getattr(ray_metadata.modified_class, "__ray_actor_class__", ray_metadata.modified_class)
    if not isinstance(plain, type) or not callable(getattr(plain, "step", None)):
        raise ContractError(f"environment: expected an EnvironmentInterface, got {cls!r:.200}. Name another class.")
    return plain
