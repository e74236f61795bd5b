"""GEM's games and question sets: `--env gem:game:Sudoku-v0-easy`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.core.types import StepResult, as_flag
from agentenv.errors import ConfigError
from agentenv.interop.guest import Guest, clipped, guest_class, import_library

_RUNS_ANSWERS = ("CodeEnv", "MathEnv", "MathVisualEnv")
"""Their scorers run what the model writes: programs, and sympy's parsers, which are `eval`."""
_REASONING_GYM = "ReasoningGymEnv"


class GemEnv(Guest):
    """An environment of GEM.

    The policy sees each observation and, below it, the text that GEM puts after the last one. The rewards are GEM's;
    the score is their sum so far, in [0, 1].
    """

    def begin(self, seed: int) -> str:
        """Make and reset the environment, and return its rules."""
        self.env: Any = _gem().make(self.spec.partition(":")[2], **self.kwargs)
        observation, info = self.env.reset(seed=seed % 2**32)  # it seeds numpy, which takes no larger one
        self.total = 0.0
        return _shown(observation, info)

    def act(self, action: str) -> StepResult:
        """Play one action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        number = self.number(reward)
        self.total += number
        is_over = as_flag(terminated, f"{self.spec}: terminated")
        done = as_flag(truncated, f"{self.spec}: truncated") or is_over  # GEM ends a game at its last turn with both
        facts = {key: float(value) for key, value in info.items() if isinstance(value, bool | int | float)}
        return StepResult(
            "" if done else _shown(observation, info),
            reward=number,
            score=clipped(self.total),
            terminated=is_over,
            truncated=done and not is_over,
            info=facts | {"end": str(observation)} if done else facts,
        )


def _shown(observation: str, info: Mapping[str, Any]) -> str:
    parts = (info.get("prefix", ""), observation, info.get("suffix", ""))
    return "\n".join(part.strip("\n") for part in parts if part)


@functools.cache
def env_class(name: str) -> type[GemEnv]:
    """Return the class of an environment by its id in GEM.

    Raises:
        ConfigError: there is no such environment, or its scorer runs what the model writes.
        MissingDependency: GEM is not installed.
    """
    registry = _registry()
    if name not in registry:
        raise ConfigError(
            f"--env gem:{name}: expected an environment of GEM, got an unknown id.{did_you_mean(name, names())} "
            "`agentenv list --from gem` shows them."
        )
    kind = _class_name(registry[name])
    if kind == _REASONING_GYM:
        dataset = name.partition(":")[2]
        raise ConfigError(
            f"--env gem:{name}: expected an environment that agentenv does not have, got a dataset of reasoning-gym. "
            f"Write its rows with python -m agentenv_envs.reasoning_gym --datasets {dataset} --out rows.jsonl, and run "
            "--env reasoning_gym --data rows.jsonl: its scorers are confined."
        )
    if kind in _RUNS_ANSWERS:
        instead = "code_sandbox" if kind == "CodeEnv" else "verify"
        raise ConfigError(
            f"--env gem:{name}: expected an environment that only reads answers, got {kind}, whose scorer runs what "
            f"the model writes, unconfined. Use --env {instead} with rows of that dataset."
        )
    max_turns = 1 if kind == "QaEnv" else registry[name].kwargs.get("max_turns")
    return guest_class(GemEnv, f"gem:{name}", f"{_summary(registry[name])}.", max_turns)


def names() -> dict[str, str]:
    """Return the ids of the environments that run here, each with a summary: its class and its settings.

    Raises:
        MissingDependency: GEM is not installed.
    """
    refused = (_REASONING_GYM, *_RUNS_ANSWERS)
    return {name: _summary(spec) for name, spec in sorted(_registry().items()) if _class_name(spec) not in refused}


def _summary(spec: Any) -> str:
    settings = ", ".join(f"{key}={value!r}" for key, value in spec.kwargs.items())
    return f"GEM's {_class_name(spec).removesuffix('Env')}" + f" ({settings})" * bool(settings)


def _class_name(spec: Any) -> str:
    return str(spec.entry_point).rpartition(":")[2]


def _registry() -> Mapping[str, Any]:
    registry: Mapping[str, Any] = _gem().envs.registration.ENV_REGISTRY
    return registry


def _gem() -> Any:
    return import_library("gem", "gem", "--no-deps gem-llm==0.1.0; pip install reasoning-gym nltk")
