"""The loop: what happens in which order, what is written down when, and what is left when something stops it."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch

from agentenv._util.calls import run_to_completion
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Group
from agentenv.core.types import Limits, SamplingParams, StepResult, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.errors import EngineError, InfraError, RunStopped
from agentenv.runs.records.directory import RunWriter, read_trajectories
from agentenv.runs.records.index import read_index
from agentenv.runs.records.steps import read_steps
from agentenv.runs.records.token_stats import TOKEN_STATS, hash_actions, read_token_stats, sampled_tokens
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.training.algorithm.batch import LearnedTokens
from agentenv.training.best_model import BestModel, EarlyStop
from agentenv.training.checkpoint import Checkpoints
from agentenv.training.config import TrainConfig
from agentenv.training.evaluation import Evaluation
from agentenv.training.logs.journal import Journal, read_metrics
from agentenv.training.logs.records import Records
from agentenv.training.logs.samples import cut_evaluations, groups_to_keep, keep_evaluation, tasks_to_keep
from agentenv.training.logs.screen import TrainScreen
from agentenv.training.loop import Loop
from agentenv.training.rollouts import FixedSamplingEngine, Rollouts
from agentenv.training.task_order import TaskOrder
from tests.training.worlds import episode

LIMIT_S = 30.0
"""For what must happen at once; a machine that is busy may need a while."""


class Judge(AgentInstance):
    """One turn; the label says what it is worth, or that it fails."""

    async def step(self, states):
        if states["label"] == "raises":
            raise InfraError("nobody there")
        score = float(states["label"])
        return StepResult(reward=score, score=score, terminated=True)


class Counts:
    """A learner whose only weight is the number of its train steps; it notes each of its calls."""

    def __init__(self, events, *, wrong_at=None, during=lambda: None):
        self.events, self.wrong_at, self.during = events, wrong_at, during
        self.weight = torch.zeros(1)
        self.batches, self.refused = [], []
        self.step_completed, self.learned = True, None

    @property
    def num_steps(self):
        return int(self.weight)

    def train_step(self, batch):
        self.during()
        step = int(self.weight) + 1
        if step == self.wrong_at:
            self.refused.append(batch)
            raise RunStopped(f"train step {step}: expected a finite loss, got nan.")
        self.weight = self.weight + 1
        self.batches.append(batch)
        self.events.append(f"train {step}")
        return {"loss": 1.0 / step, "num_tokens": float(len(batch.token_ids_N))}

    def weights(self, *, layout):
        assert layout == "checkpoint"
        yield "w", self.weight

    def save_model(self, folder, tokenizer):
        folder.mkdir()
        (folder / "weight").write_text(str(float(self.weight)))

    def state(self):
        return {"weight": self.weight}

    def load_state(self, state):
        self.weight = state["weight"]


class NotedEngine(ScriptedEngine):
    """Notes the weights it gets, and what it is asked for."""

    def __init__(self, events, tokenizer, *, refuses=None, **options):
        super().__init__(["x"], tokenizer, **options)
        self.events, self.refuses = events, refuses

    @property
    def num_restarts(self):
        return self.policy_version  # as if each update had taken one

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        self.events.append(f"{'evaluate' if request_id.startswith('held') else 'sample'} {self.policy_version}")
        return await super().generate(prompt_token_ids, sampling, request_id=request_id)

    async def update_weights(self, named_tensors, policy_version):
        ((_, weight),) = named_tensors
        if policy_version == self.refuses:
            raise EngineError("engine: expected to take the weights, got none. Restart it.")
        assert float(weight) == policy_version, "the weights of that version"
        self.events.append(f"update {policy_version}")
        await super().update_weights(named_tensors, policy_version)


class NotedCheckpoints(Checkpoints):
    """Notes each checkpoint with the last line that the journal had by then."""

    def __init__(self, events, folder, **options):
        super().__init__(folder, **options)
        self.events = events

    def save(self, step, state, trajectories):
        lines = read_metrics(self.folder.parent)
        self.events.append(f"save {step} after line {lines[-1]['step'] if lines else None}")
        return super().save(step, state, trajectories)


class Scene:
    """A loop over all real parts but the learner and the engine, and what happened in it."""

    def __init__(
        self, folder, *, labels="0101", steps=3, ahead=0, held_out="", resume=False, learner=None, engine=None,
        error_share=1.0, retry_wait_s=None, early_stop=None, **flags,
    ):  # fmt: skip
        self.events, self.folder, self.tokenizer = [], folder, CharTokenizer()
        self.may_go_on = threading.Event()
        self.config = TrainConfig.from_flags(
            env="math_retry", rollout_batch_size=1, n=2, progress="none", advantage_estimator="reinforce",
            **({"async_train": True, "async_queue_size": ahead} if ahead else {}),
            **({"eval_dataset": "held", "eval_n_samples_per_prompt": 2} if held_out else {}), **flags,
        )  # fmt: skip
        self.learner = Counts(self.events, **(learner or {}))
        self.engine = NotedEngine(self.events, self.tokenizer, **(engine or {}))
        policy = ErrorPolicy(
            max_retries=int(retry_wait_s is not None), retry_wait_s=retry_wait_s or 0.0, max_error_share=error_share,
            min_episodes=2,
        )  # fmt: skip

        def runner():
            limits = Limits(max_length=60, max_turns=3)
            sampling = SamplingParams(seed=0)
            setup = EpisodeSetup(FixedSamplingEngine(self.engine, sampling), Chat(self.tokenizer), sampling, limits)
            return EpisodeRunner(EnvSource(Judge), setup, policy=policy)

        def tasks(labels, name):
            return [Task("q", label=each, task_id=f"{name}{index}") for index, each in enumerate(labels)]

        self.checkpoints = NotedCheckpoints(self.events, folder / "checkpoints", keep=2)
        newest = self.checkpoints.newest() if resume else None
        samples = RunWriter.open(folder, {}, resume=resume)
        journal = Journal(folder, resume_step=None if newest is None else Checkpoints.step_of(newest))
        best = BestModel(folder, read_metrics(folder), EarlyStop.parse(early_stop) if early_stop else None)
        order = TaskOrder(tasks([{"x": "raises"}.get(each, each) for each in labels], "t"), 0)
        sets = {"held": tasks(held_out, "held")}
        kept_tasks = tasks_to_keep(sets, self.config) if held_out else None
        self.loop = Loop(
            self.config,
            learner=self.learner,
            rollouts=Rollouts(runner(), order, self.config, num_batches=steps),
            evaluation=Evaluation(runner(), sets, 2, kept_tasks=kept_tasks) if held_out else None,
            records=Records(journal, self.checkpoints, samples, best, folder, newest),
            screen=TrainScreen(self.config),
            num_steps=steps,
        )

    async def run(self, *, resume=False):
        """Whether it came to its end."""
        records = self.loop.records
        try:
            if resume:
                await self.loop.resume()
            async with asyncio.timeout(LIMIT_S):
                return await self.loop.run()
        finally:
            await self.loop.rollouts.close()
            records.journal.close()
            records.samples.close()

    def lines(self, key):
        return [line.get(key) for line in read_metrics(self.folder)]

    def events_of(self, *names):
        return [event for event in self.events if event.startswith(names)]

    @property
    def saved(self):
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("by", "num"), [("all", 1), ("first", 2), ("spread", 3), ("random", 0)])
async def test_episodes_of_evaluations_are_kept_with_their_step_always_of_the_same_tasks(tmp_path, by, num):
    scene = Scene(tmp_path, steps=2, held_out="010", eval_steps=1, save_samples=num, save_samples_by=by)
    await scene.run()
    if not num:
        assert not (tmp_path / "eval").exists()
        return
    episodes = list(read_trajectories(tmp_path / "eval"))
    size = {"all": 6, "first": 2, "spread": 4}[by]
    assert len(episodes) == 3 * size
    tasks = [{each.task.task_id for each in episodes[k : k + size]} for k in range(0, 3 * size, size)]
    assert tasks[0] == tasks[1] == tasks[2]
    assert tasks[0] == {"all": {"held0", "held1", "held2"}, "first": {"held0"}}.get(by, tasks[0])
    for number, each in enumerate(episodes):
        step = number // size
        assert each.group_id == f"{each.task.task_id}@{step}"
        assert each.episode_id in (f"{each.group_id}/0", f"{each.group_id}/1")
    listed = {row[0]: row[1] for group in read_steps(tmp_path, "eval")[2]["groups"] for row in group["episodes"]}
    assert all(listed[each.episode_id.replace("@2", "")] == each.reward for each in episodes[-size:])


async def test_a_resume_removes_the_episodes_of_later_evaluations_and_of_one_that_is_done_again(tmp_path):
    scene = Scene(tmp_path, steps=3, held_out="0", eval_steps=1)
    await scene.run()

    def steps():
        return [each.group_id.partition("@")[2] for each in read_trajectories(tmp_path / "eval")][::2]

    assert steps() == ["0", "1", "2", "3"]
    kept = list(read_trajectories(tmp_path / "eval"))
    with (tmp_path / "eval/trajectories.jsonl").open("ab") as file:
        file.write(b'{"v":3,"crc":"torn')
    cut_evaluations(tmp_path, 1)
    assert steps() == ["0", "1"]
    keep_evaluation(tmp_path, 2, [replace(kept[0], group_id="held0", episode_id="held0/0")])
    assert [each.episode_id for each in read_trajectories(tmp_path / "eval")][4:] == ["held0@2/0"]
    keep_evaluation(tmp_path, 0, [replace(kept[0], group_id="held0", episode_id="held0/7")])
    assert [each.episode_id for each in read_trajectories(tmp_path / "eval")] == ["held0@0/7"]
    assert [row[2] for row in read_index(tmp_path / "eval")] == ["held0@0/7"]


async def test_without_async_each_batch_is_sampled_trained_on_and_delivered_before_the_next(tmp_path):
    scene = Scene(tmp_path, steps=2)
    assert await scene.run()
    assert scene.events == [
        "sample 0", "sample 0", "train 1", "update 1",
        "sample 1", "sample 1", "train 2", "update 2",
        "save 2 after line 2",
    ]  # fmt: skip
    assert scene.lines("rollout/staleness_max") == [0.0, 0.0]
    assert scene.lines("rollout/num_engine_restarts") == [None, 1]


@pytest.mark.parametrize(("correction", "num_left_out"), [("off", 0), ("tis", 2)])
async def test_tokens_without_log_probabilities_are_left_out_where_a_correction_needs_them(
    tmp_path, correction, num_left_out
):
    scene = Scene(tmp_path, steps=1, is_correction=correction)
    generate = scene.engine.generate

    async def forgetful(*args, request_id):
        completion = await generate(*args, request_id=request_id)
        return replace(completion, logprobs=None) if request_id == "t0/0/0" else completion

    scene.engine.generate = forgetful
    assert await scene.run()
    (batch,) = scene.learner.batches
    assert (~batch.trained_N).sum() == num_left_out


async def test_with_async_the_next_batch_is_sampled_while_the_learner_trains(tmp_path):
    asked = []

    def during():
        """Wait for the samples of the next batch; only the event loop, which must not be blocked, can bring them."""
        deadline = time.monotonic() + LIMIT_S
        wanted = min(2 * (len(asked) + 2), 6)
        while len(scene.engine.requests) < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        asked.append(len(scene.engine.requests))

    scene = Scene(tmp_path, ahead=1, learner={"during": during})
    assert await scene.run()
    assert asked == [4, 6, 6], "a batch ahead, and none after the last"
    assert scene.events_of("train", "update") == ["train 1", "update 1", "train 2", "update 2", "train 3", "update 3"]
    assert scene.lines("rollout/staleness_max") == [0.0, 1.0, 1.0]
    assert scene.lines("rollout/staleness_mean") == [0.0, 1.0, 1.0]


@pytest.mark.long
@pytest.mark.parametrize(("every", "evaluated"), [(-1, [0, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (100, [0, 5])], ids=str)
async def test_evaluation_is_before_training_every_so_often_and_at_the_end(tmp_path, every, evaluated):
    scene = Scene(tmp_path, steps=5, held_out="01", eval_steps=every)
    assert await scene.run()
    assert scene.lines("step") == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in read_metrics(tmp_path) if "eval/score" in line] == evaluated
    assert {line for line in scene.lines("eval/score") if line is not None} == {0.5}
    assert scene.events_of("evaluate") == [f"evaluate {step}" for step in evaluated for _ in range(4)]
    assert "rollout/reward" not in read_metrics(tmp_path)[0], "nothing was trained yet"


@pytest.mark.long
@pytest.mark.parametrize(("every", "saved"), [(-1, [5]), (2, [2, 4, 5]), (1, [1, 2, 3, 4, 5])], ids=str)
async def test_a_checkpoint_is_written_after_the_line_of_its_step_and_never_twice(tmp_path, every, saved):
    scene = Scene(tmp_path, steps=5, save_steps=every)
    await scene.run()
    assert scene.events_of("save") == [f"save {step} after line {step}" for step in saved]
    assert scene.saved == [f"step-{step:08d}" for step in saved[-2:]]


async def test_too_many_failures_leave_a_checkpoint_of_the_steps_before(tmp_path):
    scene = Scene(tmp_path, labels="11111xx", steps=20, error_share=0.1)
    order = [scene.loop.rollouts.order.task(number).label for number in range(7)]
    with pytest.raises(RunStopped, match="nobody there"):
        await scene.run()
    done = order.index("raises")
    assert done > 0, order
    assert scene.lines("step") == list(range(1, done + 1))
    assert scene.events_of("save") == [f"save {done} after line {done}"]


async def test_an_engine_that_takes_no_weights_ends_it_and_what_was_learned_is_kept(tmp_path):
    first = Scene(tmp_path, steps=4, engine={"refuses": 2})
    with pytest.raises(RunStopped, match="expected to take the weights"):
        await first.run()
    assert first.events_of("train", "save") == ["train 1", "train 2", "save 2 after line 2"]
    second = Scene(tmp_path, steps=4, resume=True)
    assert await second.run(resume=True)
    assert second.events[:3] == ["update 2", "sample 2", "sample 2"]
    assert second.lines("step") == [1, 2, 3, 4]


@pytest.mark.parametrize("kept", [0, 2])
async def test_the_learners_numbers_are_kept_for_each_sampled_token_of_the_episodes_that_are_kept(tmp_path, kept):
    scene = Scene(tmp_path, save_samples=kept, save_samples_by="first")
    scene.learner.train_step = lambda batch, train=scene.learner.train_step: note(scene.learner, batch, train)
    await scene.run()
    stored = {trajectory.episode_id: trajectory for trajectory in read_trajectories(tmp_path)}
    found = read_token_stats(tmp_path)
    assert list(found) == list(stored)
    assert len(found) == len(scene.learner.batches) * kept
    for episode_id, stats in found.items():
        (step,) = (k for k, batch in enumerate(scene.learner.batches, start=1) if episode_id in batch.episode_ids)
        sampled = stored[episode_id].segments[0]
        assert stats.step == step
        assert stats.action_hash == hash_actions(sampled_tokens(stored[episode_id]))
        assert list(stats.advantages) == [step / 2] * sum(sampled.action_mask)
        assert list(stats.logprobs) == [
            sampled.logprobs[k] + 0.25 for k in range(len(sampled)) if sampled.action_mask[k]
        ]


async def test_without_save_token_stats_there_are_none(tmp_path):
    scene = Scene(tmp_path, save_token_stats=False)
    scene.learner.train_step = lambda batch, train=scene.learner.train_step: note(scene.learner, batch, train)
    await scene.run()
    assert not (tmp_path / TOKEN_STATS).exists()


def rows_of(line):
    return [
        dict(zip(line["episode_fields"], episode, strict=True), rejected=group["rejected"], group_id=group["group_id"])
        for group in line["groups"]
        for episode in group["episodes"]
    ]


async def test_the_line_of_a_step_has_the_groups_that_it_learned_from_and_those_that_were_rejected(tmp_path):
    scene = Scene(tmp_path, labels="01x", steps=3, dynamic_filtering=True, dynamic_filtering_reward_range=(0.5, 2.0))
    scene.learner.train_step = lambda batch, train=scene.learner.train_step: note(scene.learner, batch, train)
    assert await scene.run()
    lines = read_steps(tmp_path, "train")
    assert list(lines) == [1, 2, 3]
    for step, batch in enumerate(scene.learner.batches, start=1):
        rows = rows_of(lines[step])
        assert [row["episode_id"] for row in rows if row["rejected"] is None] == list(batch.episode_ids)
        for row in (row for row in rows if row["rejected"] is None):
            assert (row["reward"], row["advantages"]) == (1.0, [step / 2])
            assert (row["staleness_max"], row["logprob_diff"]) == (0, 0.25)
        rejected = [row for row in rows if row["rejected"] is not None]
        assert len(rejected) == 2 * sum(scene.lines(f"rollout/num_rejected_{why}")[step - 1] or 0 for why in REASONS)
        assert {(row["rejected"], row["reward"]) for row in rejected} <= {("low", 0.0), ("failed", None)}
    thrown_away = [sum(group["rejected"] is not None for group in line["groups"]) for line in lines.values()]
    assert any(thrown_away)
    assert scene.lines("rollout/rejection_rate") == [num / (num + 1) for num in thrown_away]
    assert (lines[1]["version"], lines[1]["estimator"], lines[1]["credit"]) == (0, "reinforce", "turn")


REASONS = ("low", "high", "failed", "stale")


async def test_the_tasks_that_are_left_out_are_counted_for_their_environment(tmp_path):
    scene = Scene(tmp_path, steps=2)
    tasks = [Task("q", label="raises", task_id="b", env="broken"), Task("q", label="1", task_id="w", env="whole")]
    scene.loop.rollouts.order = TaskOrder(tasks, 0, {"broken": 3.0, "whole": 1.0})
    assert await scene.run()
    counts = scene.lines("rollout/num_rejected_failed")
    assert sum(counts) == 5
    assert scene.lines("rollout/env/broken/num_rejected_failed") == counts
    assert scene.lines("rollout/env/whole/num_rejected_failed") == [None, None]


def note(learner, batch, train):
    """Train, with advantages and log-probabilities as a learner has them."""
    numbers = train(batch)
    ones_N = torch.ones(len(batch.token_ids_N))
    learner.learned = LearnedTokens(ones_N * learner.num_steps / 2, batch.logprobs_N.nan_to_num(0.0) + 0.25)
    return numbers


def group_of(name, *rewards):
    return Group(name, tuple(episode([(1, reward)], group=name) for reward in rewards))


def test_the_groups_to_keep_are_the_widest_and_some_at_random_or_the_first_or_all():
    groups = [group_of(f"g{index}", 0.0, float(index == 5), 0.0) for index in range(8)]

    def kept(by, num, step=1):
        config = TrainConfig.from_flags(env="math_retry", n=3, save_samples=num, save_samples_by=by, progress="none")
        chosen = groups_to_keep(groups, config, step)
        assert chosen == [each for group in groups if group.trajectories[0] in chosen for each in group.trajectories]
        return [each.group_id for each in chosen[::3]]

    assert kept("first", 6) == ["g0", "g1"]
    assert kept("first", 4) == ["g0", "g1"]
    assert kept("all", 1) == [group.group_id for group in groups]
    assert kept("random", 0) == []
    assert len(kept("random", 6)) == 2
    assert kept("random", 6) == kept("random", 6)
    assert all("g5" in kept("spread", num, step) for num in (1, 6, 9) for step in range(5))
    assert len({tuple(kept("spread", 6, step)) for step in range(20)}) > 2


def test_the_samples_of_a_mixture_are_of_its_environments_and_sets_in_turn():
    config = TrainConfig.from_flags(env="math_retry", n=2, save_samples=4, progress="none", eval_n_samples_per_prompt=1)
    envs = {f"g{index}": env for index, env in enumerate("aaaaaabbc")}
    groups = []
    for name, env in envs.items():
        rewards = {"g1": (0.0, 9.0), "g7": (0.0, 2.0)}.get(name, (0.0, 1.0))
        made = group_of(name, *rewards).trajectories
        groups.append(Group(name, tuple(replace(each, task=replace(each.task, env=env)) for each in made)))
    chosen = [{each.group_id for each in groups_to_keep(groups, config, step)} for step in range(9)]
    assert all(len({envs[name] for name in each}) == 2 for each in chosen)
    one = config.with_flags(save_samples=2)
    chosen = [groups_to_keep(groups, one, step)[0].group_id for step in range(9)]
    assert [{*chosen[at : at + 3]} for at in (0, 3, 6)] == [{"g1", "g7", "g8"}] * 3, (
        "each the widest of its environment"
    )
    assert len({tuple(chosen[at : at + 3]) for at in (0, 3, 6)}) > 1, "not always in the same order"
    sets = {env: [Task("?", task_id=f"{env}/{index}") for index in range(num)] for env, num in (("a", 40), ("b", 1))}
    for by in ("spread", "first"):
        few, many = (tasks_to_keep(sets, config.with_flags(save_samples=num, save_samples_by=by)) for num in (1, 9))
        assert sorted(each[0] for each in few) == ["a", "b"], "one of each, although one task would fill --save_samples"
        assert few < many
        assert len(many) == 9


@pytest.mark.long
async def test_a_line_says_where_the_seconds_went_and_what_was_learned(tmp_path):
    scene = Scene(tmp_path, held_out="1", eval_steps=1, save_steps=1, learner={"during": lambda: time.sleep(0.05)})
    await scene.run()
    for number, line in enumerate(read_metrics(tmp_path)):
        parts = [line[f"time/{name}_s"] for name in ("wait", "train", "sync", "eval", "save")]
        assert all(seconds >= 0 for seconds in parts)
        assert sum(parts) <= line["time/wall_s"] + 1e-3
        if number:
            assert line["time/train_s"] >= 0.05
            assert line["time/eval_s"] > 0
            assert line["train/loss"] == 1.0 / number
            assert line["throughput/samples_per_s"] == pytest.approx(2 / line["time/wall_s"])
    saves = scene.lines("time/save_s")
    assert saves[1] == 0.0, "a checkpoint is written after the line, so the next line has its time"
    assert saves[2] > 0


@pytest.mark.long
async def test_a_training_that_ends_in_a_failure_keeps_the_steps_before_and_the_batch_that_failed(tmp_path):
    def during():
        if len(first.learner.batches) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    first = Scene(tmp_path, steps=4, labels="01010101", learner={"during": during})
    with pytest.raises(RuntimeError, match="CUDA error"):
        await first.run()
    assert first.events_of("save") == ["save 2 after line 2"]
    failed = [r.episode_id for r in first.engine.requests[-2:]]
    second = Scene(tmp_path, steps=4, labels="01010101", resume=True)
    assert await second.run(resume=True)
    assert second.lines("step") == [1, 2, 3, 4]
    assert sorted(second.learner.batches[0].episode_ids) == sorted(failed), "handed out again"


@pytest.mark.parametrize(
    ("save_steps", "ahead", "wrong_at"),
    [(1, 0, 3), *(pytest.param(*each, marks=pytest.mark.long) for each in ((-1, 1, 3), (-1, 0, 1)))],
)
async def test_a_batch_that_the_learner_refuses_is_left_out_when_training_continues(
    tmp_path, ahead, save_steps, wrong_at
):
    """Were it the batch's fault, and were it handed out again, no restart would ever get past it."""
    options = {"steps": 4, "labels": "01010101", "ahead": ahead, "save_steps": save_steps}
    first = Scene(tmp_path, **options, learner={"wrong_at": wrong_at})
    with pytest.raises(RunStopped, match="expected a finite loss"):
        await first.run()
    assert first.saved[-1].startswith(f"step-{wrong_at - 1:08d}")
    failed = first.learner.refused[0].episode_ids
    second = Scene(tmp_path, **options, resume=True)
    assert await second.run(resume=True)
    assert second.lines("step") == [1, 2, 3, 4]
    trained_on = [i for scene in (first, second) for batch in scene.learner.batches for i in batch.episode_ids]
    assert not set(failed) & set(trained_on)
    assert len(set(trained_on)) == len(trained_on) == 8, "others take its place"


async def test_weights_in_the_middle_of_a_step_are_not_kept(tmp_path):
    scene = Scene(tmp_path, steps=4, learner={"wrong_at": 3})
    scene.learner.step_completed = False
    with pytest.raises(RunStopped):
        await scene.run()
    assert scene.events_of("save") == []


@pytest.mark.long
async def test_a_tracker_that_hangs_does_not_hold_the_event_loop_up(tmp_path):
    loop, were_free = asyncio.get_running_loop(), []

    class Slow:
        name, failures = "slow", ()

        def log(self, step, numbers):
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            were_free.append(turned.wait(LIMIT_S))

        def close(self):
            pass

    scene = Scene(tmp_path, steps=2)
    scene.loop.records.journal._trackers.trackers.append(Slow())
    assert await scene.run()
    assert were_free == [True, True]


# --- cancelled, as by the second Ctrl-C ------------------------------------------------------------------------------


async def cancelled(scene, when):
    """Run it and cancel it, twice, as soon as `when` holds."""
    running = asyncio.ensure_future(scene.run())
    while not when() and not running.done():
        await asyncio.sleep(0.001)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.02)
    scene.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running


async def goes_on(scene, step):
    """The training comes to its end from the step after `step`, of which it has a checkpoint, and misses no line."""
    assert scene.saved == [f"step-{step:08d}"]
    _, state, _ = scene.checkpoints.load(scene.checkpoints.newest())
    assert float(state["learner"]["weight"]) == step
    again = Scene(scene.folder, steps=scene.loop.num_steps, resume=True)
    assert await again.run(resume=True)
    assert again.events_of("train") == [f"train {number}" for number in range(step + 1, scene.loop.num_steps + 1)]
    assert again.lines("step") == list(range(1, scene.loop.num_steps + 1))
    trained_on = [i for each in (scene, again) for batch in each.learner.batches for i in batch.episode_ids]
    assert len(set(trained_on)) == len(trained_on), "no episode is trained on twice"


def slowly(scene, call, *, when):
    """A thread of the loop's that says when it is in there, and stays until the scene was cancelled."""

    def slow(*args):
        if when():
            scene.events.append("in there")
            scene.may_go_on.wait(LIMIT_S)
        return call(*args)

    return slow


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "steps", "save_steps", "step"),
    [("train_step", 6, -1, 4), ("log", 4, -1, 3), ("state", 2, -1, 2), ("state", 4, 2, 2)],
)
async def test_cancelled_amid_a_step_its_line_or_its_checkpoint_it_ends_with_that_step(
    tmp_path, method, steps, save_steps, step
):
    scene = Scene(tmp_path, steps=steps, save_steps=save_steps)
    owner = scene.loop.records.journal if method == "log" else scene.learner
    when = {
        "train_step": lambda: len(scene.learner.batches) == 3, "log": lambda: scene.loop.step == 3,
        "state": lambda: True,
    }  # fmt: skip
    setattr(owner, method, slowly(scene, getattr(owner, method), when=when[method]))
    await cancelled(scene, lambda: "in there" in scene.events)
    assert scene.lines("step") == list(range(1, step + 1))
    await goes_on(scene, step)


async def test_an_exception_of_what_is_not_left_in_its_middle_is_reported_although_it_was_cancelled():
    may_end = asyncio.Event()

    async def work():
        await may_end.wait()
        raise OSError("no space left")

    running = asyncio.ensure_future(run_to_completion(work()))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(OSError, match="no space left"):
        await running


@pytest.mark.long
@pytest.mark.parametrize(("num_failures", "lines"), [(1, [1, 2, 3]), (9, [1, 2])])
async def test_a_line_that_cannot_be_written_leaves_its_step_in_a_checkpoint(tmp_path, num_failures, lines):
    scene = Scene(tmp_path, steps=4)
    log, failures = scene.loop.records.journal.log, []

    def full(step, *rest):
        if step == 3 and len(failures) < num_failures:
            failures.append(step)
            raise RunStopped("metrics.jsonl: expected a line written, got no space left on device.")
        log(step, *rest)

    scene.loop.records.journal.log = full
    with pytest.raises(RunStopped, match="no space left"):
        await scene.run()
    assert (scene.lines("step"), scene.saved) == (lines, ["step-00000003"])


async def test_weights_of_a_step_that_the_loop_does_not_know_of_are_not_kept_as_another(tmp_path):
    """What fails in the learner after the weights were changed."""
    scene = Scene(tmp_path, steps=4)
    train_step = scene.learner.train_step

    def broken(batch):
        train_step(batch)
        return {"loss": 1 / (len(scene.learner.batches) < 3)}

    scene.learner.train_step = broken
    with pytest.raises(ZeroDivisionError):
        await scene.run()
    assert scene.events_of("save") == []


# --- the last evaluation ---------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_last_evaluation_that_was_cut_short_is_made_when_training_is_asked_to_continue(tmp_path):
    first = Scene(tmp_path, steps=2, held_out="01", engine={"latency_s": 0.3})
    running = asyncio.ensure_future(first.run())
    while first.loop.step < 2:
        await asyncio.sleep(0.001)
    for runner in (first.loop.rollouts.runner, first.loop.evaluation.runner):
        runner.drain()
    first.loop.rollouts.wake()
    assert await running
    assert first.lines("eval/score") == [0.5, None, None]
    before = read_metrics(tmp_path)

    second = Scene(tmp_path, steps=2, held_out="01", resume=True)
    assert await second.run(resume=True)
    assert second.lines("eval/score") == [0.5, None, 0.5]
    assert [{key: line[key] for key in old} for old, line in zip(before, read_metrics(tmp_path), strict=True)] == before
    third = Scene(tmp_path, steps=2, held_out="01", resume=True)
    assert await third.run(resume=True)
    assert third.events_of("evaluate") == [], "once is enough"
