"""Tools for tests of environments. Every name is loaded at its first use, so importing this package is cheap.

A scripted policy, tokenizers that need no download, episodes run from plain tests, a virtual clock, the contract
suite. The pytest plugin with the same tools loads automatically.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.engines.scripted import Request as Request
    from agentenv.engines.scripted import ScriptedEngine as ScriptedEngine
    from agentenv.engines.scripted import solves as solves
    from agentenv.gym.checks import check_gym as check_gym
    from agentenv.testing.audit.auditing import AuditOptions as AuditOptions
    from agentenv.testing.audit.auditing import audit_env as audit_env
    from agentenv.testing.audit.policies import AuditPolicy as AuditPolicy
    from agentenv.testing.audit.policies import View as View
    from agentenv.testing.audit.policies import all_policies as all_policies
    from agentenv.testing.clock import VirtualClock as VirtualClock
    from agentenv.testing.clock import run_virtual as run_virtual
    from agentenv.testing.contract import EnvContract as EnvContract
    from agentenv.testing.contract import check_env as check_env
    from agentenv.testing.diffs import assert_same_trajectory as assert_same_trajectory
    from agentenv.testing.diffs import trajectory_diff as trajectory_diff
    from agentenv.testing.episodes import Setup as Setup
    from agentenv.testing.episodes import play as play
    from agentenv.testing.episodes import play_all as play_all
    from agentenv.testing.golden import Golden as Golden
    from agentenv.testing.simulation import Simulation as Simulation
    from agentenv.testing.simulation import lognormal as lognormal
    from agentenv.testing.simulation import simulate as simulate
    from agentenv.testing.tokenizers import BosTokenizer as BosTokenizer
    from agentenv.testing.tokenizers import ByteFallbackTokenizer as ByteFallbackTokenizer
    from agentenv.testing.tokenizers import CharTokenizer as CharTokenizer
    from agentenv.testing.tokenizers import LongPromptTokenizer as LongPromptTokenizer
    from agentenv.testing.tokenizers import MergingTokenizer as MergingTokenizer
    from agentenv.testing.tokenizers import OpenEndedTokenizer as OpenEndedTokenizer
    from agentenv.testing.tokenizers import RewritingTokenizer as RewritingTokenizer
    from agentenv.testing.tokenizers import ToollessTokenizer as ToollessTokenizer

__getattr__ = lazy_names(__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
