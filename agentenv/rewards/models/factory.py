"""Specs of reward models, wherever they run.

    hf:PATH (or PATH)       a sequence classifier of transformers, in this process
    ray:PATH                the same in Ray actors
    http://…/get_reward     `agentenv rm serve`; OpenRLHF's reward server, for messages with the option `tokenizer`
    FILE.py, FILE.py:name   OpenRLHF's reward function, likewise
    classify:http://…       vLLM's server

Opening a spec imports what it needs; a model is loaded at its first score.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import construct
from agentenv.errors import ConfigError, MissingDependency
from agentenv.rewards.models.render import resolved
from agentenv.rewards.models.types import RewardScorer

SCORERS: Mapping[str, str] = {
    "hf": "agentenv.rewards.models.hf:HFScorer",
    "ray": "agentenv.rewards.models.ray_replicas:RayScorer",
    "get_reward": "agentenv.rewards.models.get_reward:GetRewardScorer",
    "classify": "agentenv.rewards.models.vllm_http:VLLMHTTPScorer",
    "function": "agentenv.rewards.models.get_reward:FunctionScorer",
}
"""The class of each kind of scorer; its first argument is the text after the colon."""
_LOADED_HERE = ("hf", "ray")


def open_scorer(spec: str, /, **options: Any) -> RewardScorer:
    """Return the reward model of a spec, which is loaded later and closed by the caller.

    Args:
        spec: see the module.
        options: arguments of its constructor.

    Raises:
        ConfigError: the spec, its folder or an option is unknown.
        MissingDependency: a package that it needs is not installed.
    """
    kind, target = parsed(spec)
    if kind not in SCORERS:
        raise unknown(spec, SCORERS)
    module, _, name = SCORERS[kind].partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingDependency(f"rm: expected the packages that {spec!r} needs, got {error}. Install them.") from error
    scorer: RewardScorer = construct(f"rm {spec}", cls, options, target)
    return scorer


def parsed(spec: str) -> tuple[str, str]:
    """Return the kind of a spec, known or not, and its target.

    Raises:
        ConfigError: the target is empty, or its folder is missing.
    """
    kind, colon, target = spec.partition(":")
    if kind in ("http", "https"):
        return "get_reward", spec
    if kind.endswith(".py"):
        return "function", spec
    if not colon:
        kind, target = "hf", spec
    if not target:
        raise unknown(spec, SCORERS)
    if kind not in _LOADED_HERE:
        return kind, target
    target = resolved(target)
    path = Path(target).expanduser()
    if path.exists():
        return kind, str(path)
    # Names that start with `/`, `.` or `~`, have several slashes, or are in an existing folder can only be paths.
    here = target.count("/") == 1 and path.parent.is_dir()
    if target.startswith(("/", ".", "~")) or target.count("/") > 1 or here:
        raise ConfigError(f"rm: expected a reward model's folder, got none at {target!r} ({spec!r}). Check the path.")
    return kind, target


def unknown(spec: str, kinds: Iterable[str]) -> ConfigError:
    """Return the error for a spec of an unknown kind."""
    kinds = list(kinds)
    kind, known = spec.partition(":")[0], ", ".join(f"{name}:…" for name in kinds)
    hint = did_you_mean(kind, kinds)
    if kind == "reward":
        hint = " A reward is not a model: serve a file with reward_func, such as agent_funcs/reward_math.py."
    return ConfigError(
        f"rm: expected a model's folder or name, http://…, FILE.py or one of {known}, got {spec!r}."
        f"{hint} Examples: hf:PATH, classify:http://HOST:8000 (vLLM's server)."
    )
