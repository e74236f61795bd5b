"""What tests of environments are made of; every name is loaded at its first use, so importing this costs nothing.

A scripted policy, tokenizers that need no download, episodes run from plain tests, a virtual clock, the contract
suite. The pytest plugin of the same parts loads itself. `agentenv.testing.strategies` needs hypothesis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.audit.auditing import AuditOptions, audit
    from agentenv.audit.policies import Policy, View, all_policies
    from agentenv.engines.scripted import Request, ScriptedEngine, solves
    from agentenv.gym.checks import check_gym
    from agentenv.testing.clock import VirtualClock, run_virtual
    from agentenv.testing.contract import EnvContract, check_env
    from agentenv.testing.diffs import assert_same_trajectory, trajectory_diff
    from agentenv.testing.episodes import Setup, play, play_all
    from agentenv.testing.golden import Golden
    from agentenv.testing.latency import exponential, lognormal, uniform
    from agentenv.testing.simulation import Simulation, simulate
    from agentenv.testing.tokenizers import (
        BosTokenizer,
        ByteFallbackTokenizer,
        CharTokenizer,
        LongPromptTokenizer,
        MergingTokenizer,
        OpenEndedTokenizer,
        RewritingTokenizer,
    )

_PLACES = {
    "agentenv.audit.auditing": ("AuditOptions", "audit"),
    "agentenv.audit.policies": ("Policy", "View", "all_policies"),
    "agentenv.engines.scripted": ("Request", "ScriptedEngine", "solves"),
    "agentenv.gym.checks": ("check_gym",),
    "agentenv.testing.clock": ("VirtualClock", "run_virtual"),
    "agentenv.testing.contract": ("EnvContract", "check_env"),
    "agentenv.testing.diffs": ("assert_same_trajectory", "trajectory_diff"),
    "agentenv.testing.episodes": ("Setup", "play", "play_all"),
    "agentenv.testing.golden": ("Golden",),
    "agentenv.testing.latency": ("exponential", "lognormal", "uniform"),
    "agentenv.testing.simulation": ("Simulation", "simulate"),
    "agentenv.testing.tokenizers": (
        "BosTokenizer", "ByteFallbackTokenizer", "CharTokenizer", "LongPromptTokenizer", "MergingTokenizer",
        "OpenEndedTokenizer", "RewritingTokenizer",
    ),
}  # fmt: skip
_PLACE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "AuditOptions",
    "BosTokenizer",
    "ByteFallbackTokenizer",
    "CharTokenizer",
    "EnvContract",
    "Golden",
    "LongPromptTokenizer",
    "MergingTokenizer",
    "OpenEndedTokenizer",
    "Policy",
    "Request",
    "RewritingTokenizer",
    "ScriptedEngine",
    "Setup",
    "Simulation",
    "View",
    "VirtualClock",
    "all_policies",
    "assert_same_trajectory",
    "audit",
    "check_env",
    "check_gym",
    "exponential",
    "lognormal",
    "play",
    "play_all",
    "run_virtual",
    "simulate",
    "solves",
    "trajectory_diff",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
