"""agentenv: multi-step agent environments for RLHF. Write an environment once, run it everywhere RLHF happens.

The first hour, in reading order: `core/types.py`, `core/trajectory.py`, `core/agent.py`, `episode/loop.py`, then the
environment `envs/agentenv_envs/math_retry` and `examples/hello.py`.

The rooms, from the ground up; imports point up this list only. The first line of each file says what is in it:
`head -n1 agentenv/ROOM/*.py` is the map of a room. `tests/ROOM` has its tests.

    errors.py   the tree of exceptions
    _util/      helpers that know nothing of episodes: calls with time limits, http/ (client, retries), ray/
    core/       what an episode is: types, trajectory, agent, step_dict (what `step` returns), engine, dataset
    chat/       messages to tokens and back: chat (bridges), dialogue (one episode), template, tool_calls/
    sandbox/    untrusted code: local/ (levels, verdicts), guest/ (runs inside: child, watch), grading/ (test suites)
    tools/      tools for environments: calling (answers to calls), toolset, mcp, python
    rewards/    text in, number out: registry (how to add one), rules/, groups/, judges/, models/, workers/
    engines/    what samples: scripted, hf/ (slot_model), vllm/, chat/ (API models), pool, ray_actor, weights
    episode/    loop; failures (errors as records); runner (many episodes: seeds, retries); registry; endpoint/
    gym/        Gymnasium, in both directions
    interop/    OpenRLHF, Molt, verl, ROLL, NeMo RL and other frameworks
    runs/       `agentenv run`: run, prepare, opening, config, mixture, records/ (resume), metrics, display/, watchdog,
                tokens/, rollout_workers, env_actors
    compare/    `agentenv diff`: two runs paired over tasks, with one interval that decides
    view/       `agentenv view`: the page that shows runs: server, single file, excerpts, dist/ (built from view_src/)
    training/   `agentenv train`: loop, rollouts, task_order, algorithm/ (batch to loss), learner/
    testing/    pytest plugin, conformance/ (`check`), audit/
    cli/        one file for each command; flags (parsing, help)

PYTEST_DONT_REWRITE: the package has a pytest plugin, and pytest would warn every program that imports it first.
"""

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names
from agentenv._util.version import __version__

if TYPE_CHECKING:
    from agentenv import errors
    from agentenv.chat.chat import Chat, ChatOptions
    from agentenv.core.agent import AgentInstance, ResetState, StepState
    from agentenv.core.trajectory import Group, Segment, Trajectory, Turn
    from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, StopReason, Task
    from agentenv.engines.scripted import ScriptedEngine
    from agentenv.episode.loop import run_episode
    from agentenv.episode.registry import load_env
    from agentenv.interop.openrlhf.executor import AgentExecutor
    from agentenv.runs.records.directory import read_trajectories
    from agentenv.runs.rollout import Run, arollout, load_run, rollout

__all__ = [
    "AgentExecutor",
    "AgentInstance",
    "Chat",
    "ChatOptions",
    "Completion",
    "Group",
    "Limits",
    "ResetState",
    "Run",
    "SamplingParams",
    "ScriptedEngine",
    "Segment",
    "StepResult",
    "StepState",
    "StopReason",
    "Task",
    "Trajectory",
    "Turn",
    "__version__",
    "arollout",
    "errors",
    "load_env",
    "load_run",
    "read_trajectories",
    "rollout",
    "run_episode",
]
__getattr__ = lazy_names(__name__)
