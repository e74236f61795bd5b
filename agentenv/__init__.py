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
from agentenv._util.version import __version__ as __version__

if TYPE_CHECKING:
    from agentenv import errors as errors
    from agentenv.chat.chat import Chat as Chat
    from agentenv.chat.chat import ChatOptions as ChatOptions
    from agentenv.core.agent import AgentInstance as AgentInstance
    from agentenv.core.agent import ResetState as ResetState
    from agentenv.core.agent import StepState as StepState
    from agentenv.core.trajectory import Group as Group
    from agentenv.core.trajectory import Segment as Segment
    from agentenv.core.trajectory import Trajectory as Trajectory
    from agentenv.core.trajectory import Turn as Turn
    from agentenv.core.types import Completion as Completion
    from agentenv.core.types import Limits as Limits
    from agentenv.core.types import SamplingParams as SamplingParams
    from agentenv.core.types import StepResult as StepResult
    from agentenv.core.types import StopReason as StopReason
    from agentenv.core.types import Task as Task
    from agentenv.engines.scripted import ScriptedEngine as ScriptedEngine
    from agentenv.episode.loop import run_episode as run_episode
    from agentenv.episode.registry import load_env as load_env
    from agentenv.interop.openrlhf.executor import AgentExecutor as AgentExecutor
    from agentenv.runs.records.directory import read_trajectories as read_trajectories
    from agentenv.runs.rollout import Run as Run
    from agentenv.runs.rollout import arollout as arollout
    from agentenv.runs.rollout import load_run as load_run
    from agentenv.runs.rollout import rollout as rollout

__getattr__ = lazy_names(__name__)
