"""Runs for the tests of the page in a browser."""

import json

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.runs.metrics import Tally, summarize
from agentenv.runs.records.directory import RunWriter
from tests.view.viewed_runs import write_run

QUESTION = "How many apples are left?"


def play(tokenizer, episode_id, *turns, prompt=QUESTION, label=None, error=None, version=0):
    """An episode of turns (action, reward, observation, info), with real tokens; a log-probability for each of them."""
    task_id = episode_id.split("/")[0]
    messages = [{"role": "user", "content": prompt}]
    trajectory = Trajectory(Task(messages, label, task_id=task_id), 10**6, episode_id, task_id)
    trajectory.prompt = messages

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    trajectory.append_observation(encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"))
    for number, (action, reward, observation, info) in enumerate(turns):
        ids = tuple(encode(f"{action}<|im_end|>"))
        logprobs = tuple(-0.02 - 3.2 * (position % 5 == number) for position in range(len(ids)))
        trajectory.append_turn(Completion(ids, logprobs=logprobs, policy_version=version), action, generate_s=0.1)
        if error is None:
            trajectory.set_result(StepResult(observation, reward, terminated=not observation, score=reward, info=info))
        if observation:
            reply = f"\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"
            trajectory.append_observation(encode(reply), bridge="exact")
    trajectory.finish(StopReason.ERROR if error else StopReason.TERMINATED, error)
    return trajectory


def save(folder, episodes, *, flags=None, metrics=True):
    """A run directory of `agentenv run` with its metrics."""
    write_run(folder, *episodes, flags={"limit": 4, **(flags or {})})
    if metrics:
        num_tasks = len({each.group_id for each in episodes})
        tally = Tally()
        for each in episodes:
            tally.add(summarize(each))
        found = tally.metrics(num_tasks=num_tasks, num_samples=2, wall_s=2.0)
        (folder / "metrics.json").write_text(json.dumps(found.to_dict()))
    return folder


RIGHT = {"correct": 1.0, "outcome": "correct"}
WRONG = {"correct": 0.0, "outcome": "wrong"}


def small_run(tokenizer):
    """The episodes of filters.json: a solved, b with spread, c failed, d with an error."""
    return [
        play(tokenizer, "a/0", ("3", 1.0, "", RIGHT), label="say 3"),
        play(tokenizer, "a/1", ("4", 0.0, "Please try again.", WRONG), ("3", 1.0, "", RIGHT), label="say 3"),
        play(tokenizer, "b/0", ("There are three pears, so 3", 1.0, "", RIGHT)),
        play(tokenizer, "b/1", ("There are 7 apples", -0.5, "", WRONG)),
        play(tokenizer, "c/0", ("9", 0.0, "", WRONG)),
        play(tokenizer, "c/1", ('a "quoted" word', 0.0, "", WRONG), version=2),
        play(tokenizer, "d/0", ("3", None, "", {}), error=EpisodeError("env", "ValueError", "none", "env.py:3", "")),
    ]


def siblings_run(tokenizer):
    """One task: three siblings say the same, one parts in its first turn, one in its second."""
    again = "Please try again."
    first = ("28 * 4 = 108", 0.0, again, WRONG)
    return [
        play(tokenizer, "g/0", first, ("28 * 4 = 112", 1.0, "", RIGHT), label="112"),
        play(tokenizer, "g/1", first, ("28 * 4 = 112", 1.0, "", RIGHT), label="112"),
        play(tokenizer, "g/2", first, ("28 * 4 = 112", 1.0, "", RIGHT), label="112"),
        play(tokenizer, "g/3", ("28 * 4 = 112", 1.0, "", RIGHT), label="112"),
        play(tokenizer, "g/4", first, ("28 * 4 = 122", -0.3, "", WRONG), label="112"),
    ]


def train_run(folder, tokenizer):
    """A training of four steps, of which step 2 was done twice; each step a group of the task t, at its passes."""
    with RunWriter.open(folder, {"flags": {"model": "tiny-math"}}) as writer:
        for step in range(4):
            group = f"t@{step}" if step else "t"
            for sibling in range(2):
                reward = float(sibling <= step - 1)
                writer.append(play(tokenizer, f"{group}/{sibling}", (f"{reward:g}", reward, "", {}), version=step))
    lines, metrics = [], []
    for step in (1, 2, 2, 3, 4):
        group = f"t@{step - 1}" if step > 1 else "t"
        episodes = [[f"{group}/{k}", float(k <= step - 2), [0.5 - k], 0, 1, 3, True] for k in range(2)]
        fields = ["episode_id", "reward", "advantages", "staleness_min", "staleness_max", "trained_tokens", "kept"]
        groups = [{"group_id": group, "rejected": None, "episodes": episodes}]
        lines.append({"v": 1, "step": step, "kind": "train", "version": step, "estimator": "group_norm",
                      "credit": "turn", "episode_fields": fields, "groups": groups})  # fmt: skip
        metrics.append({"step": step, "rollout/reward": 0.25 * step + 0.01 * len(lines), "train/entropy": 0.5 / step})
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder
