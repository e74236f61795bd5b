"""Tools for tests of environments. Every name is loaded at its first use, so importing this package is cheap.

A scripted policy, tokenizers that need no download, episodes run from plain tests, a virtual clock, the contract
suite. The pytest plugin with the same tools loads automatically. `agentenv.testing.strategies` needs hypothesis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.engines.scripted import Request, ScriptedEngine, solves
    from agentenv.gym.checks import check_gym
    from agentenv.testing.audit.auditing import AuditOptions, audit_env
    from agentenv.testing.audit.policies import AuditPolicy, View, all_policies
    from agentenv.testing.clock import VirtualClock, run_virtual
    from agentenv.testing.contract import EnvContract, check_env
    from agentenv.testing.diffs import assert_same_trajectory, trajectory_diff
    from agentenv.testing.episodes import Setup, play, play_all
    from agentenv.testing.golden import Golden
    from agentenv.testing.simulation import Simulation, exponential, lognormal, simulate, uniform
    from agentenv.testing.tokenizers import (
        BosTokenizer,
        ByteFallbackTokenizer,
        CharTokenizer,
        LongPromptTokenizer,
        MergingTokenizer,
        OpenEndedTokenizer,
        RewritingTokenizer,
        ToollessTokenizer,
    )

__all__ = [
    "AuditOptions",
    "AuditPolicy",
    "BosTokenizer",
    "ByteFallbackTokenizer",
    "CharTokenizer",
    "EnvContract",
    "Golden",
    "LongPromptTokenizer",
    "MergingTokenizer",
    "OpenEndedTokenizer",
    "Request",
    "RewritingTokenizer",
    "ScriptedEngine",
    "Setup",
    "Simulation",
    "ToollessTokenizer",
    "View",
    "VirtualClock",
    "all_policies",
    "assert_same_trajectory",
    "audit_env",
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
__getattr__ = lazy_names(__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
