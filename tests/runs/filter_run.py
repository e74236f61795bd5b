"""The run on which the language of filters is tested, in Python and in the page."""

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Answer, Completion, StepResult, StopReason, Task
from agentenv.runs.records.directory import RunWriter


def episode(episode_id, prompt, *turns, stop=StopReason.TERMINATED, error=None, version=1, **values):
    """An episode with (action, reward, info) for each turn; a reward of None is a step that failed."""
    task = episode_id.split("/")[0]
    row = Task([{"role": "user", "content": prompt}], f"of {task}", task_id=task, env=prompt.split()[-1].rstrip("?"))
    trajectory = Trajectory(row, 10**6, episode_id, task, **values)
    trajectory.prompt = trajectory.task.prompt
    trajectory.append_observation([1, 2])
    for number, (action, reward, info) in enumerate(turns):
        finish = "length" if number == 1 else "stop"
        trajectory.append_turn(Completion((3, 4), finish, logprobs=(0.0, 0.0), policy_version=version), action)
        if reward is not None:
            trajectory.set_result(StepResult(reward=reward, info=info))
    trajectory.finish(stop, error)
    return trajectory


def answered(episode_id, *turns):
    """An episode of an API model, with (input tokens, output tokens) for each turn; None where the server sent none."""
    trajectory = Trajectory(Task("Why?", task_id="d"), 10**6, episode_id, "d")
    for num_input, num_output in turns:
        cost = None if num_input is None else 0.5
        answer = Answer("So.", model="m", num_input_tokens=num_input, num_output_tokens=num_output, cost_usd=cost)
        trajectory.append_turn(Completion((), answer=answer, num_request_retries=2, num_failovers=1), "So.", 0.5)
        trajectory.count_retry("EngineError")
        trajectory.set_result(StepResult("Go on.", 0.25, score=0.75), 0.25)
    trajectory.finish(StopReason.TERMINATED)
    return trajectory


def write_filter_run(path):
    """The episodes that filters.json is about."""
    error = EpisodeError("env", "KeyError", "'x'", "step", "env.py:3")
    with RunWriter.open(path, {}) as writer:
        writer.append(episode("a/0", "How many apples?", ("3", 1.0, {"outcome": "right"}), version=13))
        writer.append(episode("a/1", "How many apples?", ("4", 0.0, {"outcome": "wrong"})))
        turns = ("hm", -0.25, {"n": 1}), ("My final answer", 0.5, {"n": 2, "outcome": "wrong"})
        writer.append(episode("b/0", "How many pears?", *turns, stop=StopReason.MAX_TURNS))
        retried = ["InfraError (ConnectError)", "InfraError (ConnectError)", "EngineError"]
        writer.append(episode("b/1", "How many pears?", ('a "quote"', 1.0, {}), attempt=1, seed=7, retried=retried))
        writer.append(episode("c/0", "?", ("boom", None, {}), stop=StopReason.ERROR, error=error))
        writer.append(answered("d/0", (None, None), (20, 5)))
        writer.append(answered("d/1", (10, 3), (None, 4)))
        writer.append(answered("d/2", (10, 3), (16, 4)))
    return path
