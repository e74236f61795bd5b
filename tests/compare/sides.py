"""Runs for tests of comparisons: sides without a file, and run directories with an answer for each episode."""

from collections import defaultdict
from dataclasses import replace

from agentenv.compare.sides import EpisodeOutcome, Side
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.runs.metrics import summarize
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.steps import append_step, evaluation_row


def outcome(reward, *, stop="terminated", tokens=2, info=None, cost=None):
    """An episode that passed if its reward is 1; without a reward it failed."""
    passed = None if reward is None else reward >= 1
    return EpisodeOutcome(reward, reward, passed, stop, tokens, "infra" if reward is None else "", info or {}, cost)


def side(rewards, name="a", **values):
    """A side whose tasks have these rewards, or outcomes."""
    outcomes = defaultdict(list)
    for task, row in rewards.items():
        known = [each if isinstance(each, EpisodeOutcome) else outcome(each) for each in row]
        outcomes[task] = [replace(each, episode_id=f"{task}/{number}") for number, each in enumerate(known)]
    return Side(name, outcomes=outcomes, contents=dict.fromkeys(rewards, "?"), **values)


def trajectory(task_id, number, reward, *, prompt="?", metadata=None, score=None, info=None, num_tokens=2):
    """An episode of one turn, in a mixture of ENV/…; a reward of None is a failure of the infrastructure."""
    task = Task(prompt, label="1", task_id=task_id, metadata=metadata or {}, env=task_id.rpartition("/")[0])
    found = Trajectory(task, 10**6, f"{task_id}/{number}", task_id)
    found.append_observation([1, 2])
    tokens = tuple(range(3, 3 + num_tokens))
    found.append_turn(Completion(tokens, logprobs=(0.0,) * num_tokens), "answer")
    if reward is None:
        found.finish(StopReason.ERROR, EpisodeError("infra", "TimeoutError", "", "step", "env.py:3"))
    else:
        found.set_result(StepResult(reward=reward, score=score, terminated=True, info=info or {}))
        found.finish(StopReason.TERMINATED)
    return found


def write_run(path, rewards, *, flags=None, agent_file=None, **values):
    """Write a run directory whose tasks have these rewards, and return its path."""
    with RunWriter.open(path, {"flags": flags or {}, "resolved": {}, "agent_file": agent_file or {}}) as writer:
        for task, row in rewards.items():
            for number, reward in enumerate(row):
                writer.append(trajectory(task, number, reward, **values))
    return path


def write_training(path, evaluations, *, flags=None):
    """Write the directory of a training whose evaluations, by step, have these rewards by task, and return its path."""
    write_run(path, {"t": [0.0, 1.0], "t@1": [1.0, 1.0]}, flags={"rollout_batch_size": 1, **(flags or {})})
    for step, rewards in evaluations.items():
        episodes = [
            trajectory(task, i, each, info={"n": step}) for task, row in rewards.items() for i, each in enumerate(row)
        ]
        append_step(path, evaluation_row(step, [summarize(each) for each in episodes]))
    return path
