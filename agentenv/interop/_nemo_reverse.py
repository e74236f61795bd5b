"""FromNemo: an environment of NeMo RL's as one of ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from agentenv.agent import AgentInstance, ResetState, StepState
from agentenv.errors import ConfigError, ContractError
from agentenv.openrlhf import scalar
from agentenv.types import SamplingParams, StepResult


class FromNemo(AgentInstance):
    """One row of an `EnvironmentInterface` of NeMo RL's, stepped alone.

    The class is taken out of its Ray actor, and one object of it, made in this process, serves all episodes; its
    `shutdown` is not called.

    Args:
        environment: its place, as `nemo_rl.environments.math_environment.MathEnvironment`.
        config: its constructor's only argument; None makes it without one.
        concurrent: whether several threads may call its `step`; otherwise they take turns.

    The row's label is `ground_truth` of the metadata, beside the row's other columns. Rewards in parts are summed, and
    are in `info` too.
    """

    def __init__(self, environment: str, config: Mapping[str, Any] | None = None, *, concurrent: bool = False) -> None:
        self._shared = _shared(environment, json.dumps(config, sort_keys=True))
        self._concurrent = concurrent
        self._log: list[Any] = []
        self._metadata: Any = None

    async def reset(self, states: ResetState) -> ResetState:
        """Begin the message log with the prompt."""
        prompt = states["observation"]
        self._log = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        self._metadata = {"ground_truth": states.get("label"), **(states.get("metadata") or {})}
        return states

    def step(self, states: StepState) -> StepResult:  # type: ignore[override]  # plain: it runs in a thread
        """Its answer to an action.

        Raises:
            ContractError: the answer is none of NeMo RL's interface, or its reward no number.
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
        reward, parts = _reward(answer.rewards)
        done = bool(answer.terminateds[0])
        return StepResult(
            "" if done else str(observation["content"]),
            reward=reward,
            terminated=done,
            info=parts,
            sampling=_sampling(states.get("sampling_params"), answer.next_stop_strings),
        )


def _reward(rewards: Any) -> tuple[float, dict[str, float | str]]:
    if not isinstance(rewards, Mapping):
        return scalar(rewards[0], "EnvironmentReturn.rewards"), {}
    parts: dict[str, float | str] = {
        name: scalar(column[0], f"EnvironmentReturn.rewards[{name!r}]") for name, column in rewards.items()
    }
    return sum(map(float, parts.values())), parts


def _sampling(now: Any, stops: Any) -> SamplingParams | None:
    stop = stops[0] if stops else None
    return replace(now, stop=tuple(stop)) if stop is not None and isinstance(now, SamplingParams) else None


@lru_cache(maxsize=8)
def _shared(place: str, config: str) -> tuple[Any, threading.Lock]:
    """The object of a class by its place, and the lock under which it takes its turns."""
    module, _, name = place.rpartition(".")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"environment: expected the place of a class, got {place!r}: {error}. Correct it.") from error
    arguments = json.loads(config)
    return undecorated(found)(*([] if arguments is None else [arguments])), threading.Lock()


def undecorated(cls: Any) -> type[Any]:
    """The class behind Ray's `@ray.remote`, or the class itself.

    Raises:
        ContractError: it is no class with `step`.
    """
    ray_side = getattr(cls, "__ray_metadata__", None)
    plain = (
        cls if ray_side is None else getattr(ray_side.modified_class, "__ray_actor_class__", ray_side.modified_class)
    )
    if not isinstance(plain, type) or not callable(getattr(plain, "step", None)):
        raise ContractError(f"environment: expected an EnvironmentInterface, got {cls!r:.200}. Name another class.")
    return plain
