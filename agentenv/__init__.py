"""agentenv: multi-step agent environments for RLHF. Write an environment once, run it everywhere RLHF happens.

PYTEST_DONT_REWRITE: the package has a pytest plugin, so pytest would warn of every program that has imported it before.
"""

import logging

from agentenv.agent import AgentInstance
from agentenv.types import Completion, Limits, SamplingParams, StepResult, StopReason, Task

__version__ = "0.1.0"

__all__ = [
    "AgentInstance",
    "Completion",
    "Limits",
    "SamplingParams",
    "StepResult",
    "StopReason",
    "Task",
    "__version__",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
