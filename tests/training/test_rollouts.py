"""Rollouts: which groups are in flight when, how stale a batch is, what is rejected, and what a checkpoint holds."""

import asyncio
import random
from collections import Counter
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, SamplingParams, StepResult, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, EngineError, InfraError, RunStopped
from agentenv.rewards.types import RewardResult
from agentenv.runs.config import GroupOptions
from agentenv.runs.group_rewards import GroupGrader
from agentenv.runs.records.lines import trajectory_from_dict, trajectory_to_dict
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.training.config import TrainConfig
from agentenv.training.evaluation import Evaluation
from agentenv.training.rollouts import Rollouts
from agentenv.training.task_order import TaskOrder


class Judge(AgentInstance):
    """Scores by the label: the n-th sample of a task gets 1.0 when the sampled text is in it."""

    async def step(self, states):
        if "raises" in (states["label"], states["action_text"]):
            raise InfraError("nobody there")
        score = float(states["action_text"] in str(states["label"]))
        return StepResult(reward=score, score=score, terminated=True)


def make_tasks(labels):
    return [Task("q", label=label, task_id=f"t{index}") for index, label in enumerate(labels)]


def make_rollouts(
    tasks, *, script=("x",), latency_s=0.0, on_episode=lambda _: None, max_error_share=1.0, grader=None, seed=0,
    weights=MappingProxyType({}), curriculum=None, max_ahead=0, between=None, num_batches=None, **flags,
):  # fmt: skip
    tokenizer, limits = CharTokenizer(), Limits(max_length=60, max_turns=3)
    engine = ScriptedEngine(script, tokenizer, latency_s=latency_s)
    policy = ErrorPolicy(max_retries=0, retry_wait_s=0.0, max_error_share=max_error_share)
    setup = EpisodeSetup(engine, Chat(tokenizer), SamplingParams(seed=0), limits)
    runner = EpisodeRunner(EnvSource(Judge), setup, policy=policy)
    defaults = {"rollout_batch_size": 2, "n": 2, "concurrency": 8, "advantage_estimator": "reinforce"}
    ahead = {"async_train": True, "async_queue_size": max_ahead} if max_ahead else {}
    filters = {"dynamic_filtering": True, "dynamic_filtering_reward_range": between} if between else {}
    config = TrainConfig(**(defaults | ahead | filters | flags))
    order = TaskOrder(tasks, seed, weights, curriculum)
    return Rollouts(runner, order, config, on_episode, grader, num_batches=num_batches)


def ids(groups):
    return [group.group_id for group in groups]


def versions(groups):
    return {v for group in groups for t in group.trajectories for v in t.segments[0].policy_versions if v >= 0}


async def steps(rollouts, num, *, start=0):
    """What `num` train steps got, each followed by an update."""
    batches = []
    for step in range(start, start + num):
        batches.append(await rollouts.take())
        await rollouts.update_weights([], step + 1)
    await rollouts.close()
    return batches


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 4),
    max_ahead=st.integers(0, 3),
    partial=st.booleans(),
    num_extra=st.integers(0, 3),
    filtered=st.booleans(),
)
async def test_no_batch_is_staler_than_allowed_and_no_group_comes_twice(
    seed, batch, max_ahead, partial, num_extra, filtered
):
    draw = random.Random(seed)
    labels = ["x" if draw.random() < 0.6 else "y" for _ in range(7)] + ["x"]

    async def script(request):
        for _ in range(draw.choice([0, 0, 1, 5, 30])):
            await asyncio.sleep(0)
        return "x"

    rollouts = make_rollouts(
        make_tasks(labels), script=script, rollout_batch_size=batch, max_ahead=max_ahead, partial_rollout=partial,
        vllm_generate_batch_size=batch + (num_extra if max_ahead else 0), between=(0.0, 2.0) if filtered else None,
        concurrency=3, seed=seed,
    )  # fmt: skip
    seen = []
    for step in range(8):
        groups = await rollouts.take()
        assert len(groups) == batch
        assert all(step - max_ahead <= version <= step for version in versions(groups))
        if filtered:
            assert {group.trajectories[0].task.label for group in groups} == {"x"}
        seen += ids(groups)
        for _ in range(draw.choice([0, 3, 20])):
            await asyncio.sleep(0)
        await rollouts.update_weights([], step + 1)
    await rollouts.close()
    assert len(set(seen)) == len(seen) == 8 * batch


@pytest.mark.parametrize(("between", "kept", "reason"), [((0.0, 2.0), "x", "low"), ((-1.0, 1.0), "y", "high")])
async def test_groups_on_the_edge_of_the_range_of_scores_are_refilled_and_counted(between, kept, reason):
    rollouts = make_rollouts(make_tasks("xyyxyx"), between=between, rollout_batch_size=3)
    groups = await rollouts.take()
    assert {t.task.label for g in groups for t in g.trajectories} == {kept}
    assert rollouts.rejected.keys() == {reason}
    await rollouts.close()


@pytest.mark.parametrize(
    ("estimator", "rewards", "rejected"),
    [("reinforce", [1.0, None], {}), ("group_norm", [1.0, 1.0], {"failed": 1})],
)
async def test_a_group_with_fewer_rewards_than_its_estimator_needs_is_rejected(estimator, rewards, rejected):
    answers = iter(["raises"])

    async def script(request):
        return next(answers, "x")

    rollouts = make_rollouts(make_tasks("xx"), script=script, rollout_batch_size=1, advantage_estimator=estimator)
    assert sorted(rewards_of(await rollouts.take()), key=str) == rewards
    assert rollouts.rejected == rejected
    await rollouts.close()


async def test_nothing_to_learn_from_ends_the_training_and_says_why():
    rollouts = make_rollouts(make_tasks("yy"), between=(0.0, 1.0))
    with pytest.raises(RunStopped, match=r"40 in a row without one\. Their scores are too low"):
        await rollouts.take()
    await rollouts.close()


async def test_draining_wakes_the_loop():
    rollouts = make_rollouts(make_tasks("xx"), latency_s=60.0)
    waiting = asyncio.ensure_future(rollouts.take())
    while len(rollouts.runner.setup.engine.requests) < 4:
        await asyncio.sleep(0.001)
    rollouts.runner.drain()
    rollouts.wake()
    assert await asyncio.wait_for(waiting, 60) is None
    await rollouts.close()
    assert rollouts.runner.setup.engine.num_cancelled == 4
    assert rollouts.runner.in_flight == {}


async def test_a_checkpoint_keeps_what_is_finished_and_samples_again_what_was_in_flight():
    async def script(request):
        if request.sampling.seed is not None and "t1" in request.episode_id:
            await asyncio.sleep(60)
        return "x"

    tasks = make_tasks("x" * 4)
    first = make_rollouts(tasks, script=script, max_ahead=1, rollout_batch_size=2)
    first._admit()
    async with asyncio.timeout(60):
        while len(first.state()[0]["ready"]) < 3:
            await asyncio.sleep(0.01)
    facts, trajectories = first.state()
    await first.close()
    assert len(facts["ready"]) == 3
    assert len(facts["again"]) == 1
    assert len(trajectories) == 6

    second = make_rollouts(tasks, max_ahead=1, rollout_batch_size=2)
    second.load_state(facts, trajectories)
    batches = await steps(second, 2)
    asked = [request.episode_id.split("/")[0] for request in second.runner.setup.engine.requests]
    assert not {"t0", "t2", "t3"} & set(asked), "the finished ones are not sampled again"
    assert sorted(ids(batches[0]) + ids(batches[1])) == ["t0", "t1", "t2", "t3"]


async def test_no_task_is_an_error():
    with pytest.raises(ConfigError, match="--data: expected at least one task"):
        make_rollouts([])


async def test_a_group_whose_sampling_failed_is_sampled_again_after_a_resume():
    tasks = [Task("q", label="raises", task_id=f"t{index}") for index in range(30)]
    rollouts = make_rollouts(tasks, max_error_share=0.2)
    with pytest.raises(RunStopped):
        await rollouts.take()
    facts, _ = rollouts.state()
    await rollouts.close()
    assert len(facts["again"]) + len(facts["ready"]) + rollouts.rejected.total() == facts["next"]


@pytest.mark.parametrize("label", ["raises", "fails"])
async def test_the_failed_episodes_that_end_a_training_are_shown_before_with_a_grader_too(label):
    rollouts, _, shown = grading([label] * 30, max_error_share=0.2)
    with pytest.raises(RunStopped):
        await rollouts.take()
    assert len([each for each in shown if each.error]) == rollouts.runner.num_failed >= 8
    await rollouts.close()


async def test_samples_that_a_lower_bound_makes_too_old_are_sampled_again():
    first = make_rollouts(make_tasks("x" * 12), max_ahead=3)
    await first.take()
    while len(first._ready) < 6:  # three batches ahead
        await asyncio.sleep(0.001)
    for version in (1, 2):
        await first.update_weights([], version)
        await first.take()
    facts, trajectories = first.state()
    await first.close()
    assert {version for _, version, _ in facts["ready"]} >= {0}
    second = make_rollouts(make_tasks("x" * 12))
    second.load_state({**facts, "version": 3, "num_consumed": 6}, trajectories)
    second.runner.setup.engine.policy_version = 3
    assert versions(await second.take()) == {3}
    await second.close()


async def test_a_checkpoint_keeps_count_of_what_was_rejected():
    first = make_rollouts(make_tasks("yyyyyyyx"), between=(0.0, 2.0), rollout_batch_size=1)
    await first.take()
    first.rejected, first._rejected_in_a_row = Counter(low=3), 17
    facts, trajectories = first.state()
    await first.close()
    second = make_rollouts(make_tasks("yyyyyyyx"), between=(0.0, 2.0), rollout_batch_size=1)
    second.load_state(facts, trajectories)
    assert (second.rejected, second._rejected_in_a_row) == (Counter(low=3), 17)
    second.load_state({key: facts[key] for key in facts if "rejected" not in key}, trajectories)  # of an older one


async def test_a_group_of_which_draining_cut_a_retry_short_is_sampled_again_and_not_taken_as_it_is():
    def script(request):
        return EngineError("gone") if request.episode_id.endswith("/1") else "x"

    rollouts = make_rollouts(make_tasks("x"), script=script, n=3, rollout_batch_size=1)
    rollouts.runner.policy = ErrorPolicy(max_retries=1, retry_wait_s=3600.0, max_error_share=1.0)
    waiting = asyncio.ensure_future(rollouts.take())
    while rollouts.runner.num_done < 2:
        await asyncio.sleep(0.001)
    rollouts.runner.drain()
    rollouts.wake()
    assert await waiting is None
    while rollouts._open:
        await asyncio.sleep(0.001)
    facts, trajectories = rollouts.state()
    await rollouts.close()
    assert (facts["again"], facts["ready"], trajectories) == ([0], [], [])


# --- rewards of groups ----------------------------------------------------------------------------------------------


class Compares:
    """Adds 10.0 to each answer of a group; waits for ever, or fails, for these labels."""

    bounds = (-100.0, 100.0)

    def __init__(self):
        self.graded, self.held = Counter(), asyncio.Event()

    async def grade_group(self, responses, reference=None):
        label = responses[0].label
        if label == "hangs":
            await self.held.wait()
        if label == "fails":
            raise InfraError("no judge")
        self.graded[label] += len(responses)
        return [RewardResult(10.0)] * len(responses)


def rewards_of(groups):
    return [trajectory.reward for group in groups for trajectory in group.trajectories]


def grading(labels, **options):
    compares, flags = Compares(), GroupOptions("a judge", group_timeout_s=options.pop("group_timeout_s", 300.0))
    shown = []
    rollouts = make_rollouts(
        make_tasks(labels), grader=GroupGrader(compares, flags, CharTokenizer()), on_episode=shown.append, **options
    )
    return rollouts, compares, shown


async def test_groups_are_taken_with_their_reward_and_every_episode_is_shown_with_it():
    rollouts, compares, shown = grading(["x1", "x2", "y3"], rollout_batch_size=3)
    assert sorted(rewards_of(await rollouts.take())) == [10.0] * 2 + [11.0] * 4
    assert compares.graded == Counter(x1=2, x2=2, y3=2)
    assert sorted(each.reward for each in shown) == [10.0] * 2 + [11.0] * 4
    await rollouts.close()


async def test_two_failures_of_a_small_evaluation_end_no_training():
    rollouts, compares, _ = grading(["x"], max_error_share=0.2)
    evaluation = Evaluation(rollouts.runner, {"held": make_tasks(["x1", "x2", "x3", "raises"])}, 2, rollouts._grader)
    assert (await evaluation.run())["num_failed"] == 2
    assert compares.graded == Counter(x1=2, x2=2, x3=2)


@pytest.mark.parametrize("partial", [False, True])
async def test_a_hanging_grader_holds_up_neither_other_groups_nor_new_weights(partial):
    rollouts, _, _ = grading(["hangs", *("x" * 9)], max_ahead=2, partial_rollout=partial, seed=7)
    batches = await asyncio.wait_for(steps(rollouts, 2), 60)
    labels = [group.trajectories[0].task.label for batch in batches for group in batch]
    assert labels == ["x"] * 4


async def test_a_batch_of_other_groups_does_not_wait_for_a_hanging_grader_even_without_steps_ahead():
    rollouts, compares, _ = grading(["hangs", "x", "x", "x"], vllm_generate_batch_size=4, max_ahead=0, seed=7)
    first = await asyncio.wait_for(rollouts.take(), 60)
    assert [group.trajectories[0].task.label for group in first] == ["x", "x"]
    await rollouts.update_weights([], 1)
    compares.held.set()
    second = await asyncio.wait_for(rollouts.take(), 60)
    assert all(group.trajectories[0].task.label == "x" for group in second), "graded too late for its weights"
    assert rollouts.rejected["stale"] >= 1
    await rollouts.close()


async def test_a_group_whose_grader_failed_or_took_too_long_is_rejected_and_another_one_sampled():
    rollouts, _, shown = grading(
        ["hangs", "fails", "x", "x"], rollout_batch_size=2, num_batches=1, group_timeout_s=0.05
    )
    assert rewards_of(await rollouts.take()) == [11.0] * 4
    assert rollouts.rejected == Counter(failed=sum(each.error is not None for each in shown) // 2)
    assert rollouts.runner.num_failed == 2 * rollouts.rejected["failed"]
    await rollouts.close()


async def test_a_checkpoint_holds_graded_groups_which_are_not_graded_again():
    first, _, _ = grading("xxxx", rollout_batch_size=1, n=2, max_ahead=1)
    await first.take()
    while len(first._ready) < 1:
        await asyncio.sleep(0.001)
    facts, trajectories = first.state()
    await first.close()
    second, compares, _ = grading("xxxx", rollout_batch_size=1, n=2, max_ahead=1)
    second.load_state(facts, [trajectory_from_dict(trajectory_to_dict(each)) for each in trajectories])
    second.runner.drain()  # samples nothing
    assert rewards_of(group for _, group in second._ready) == [11.0] * 2
    assert not compares.graded


async def test_a_curriculum_sees_the_groups_and_weighs_the_environments_of_the_next_step():
    seen = []

    def first_a(environments):
        seen.append({name: [group.reward for group in stats.groups] for name, stats in environments.items()})
        return {"a": float(len(seen) == 1), "b": float(len(seen) > 1)}

    tasks = [Task("q", label="x", task_id=f"{env}{index}", env=env) for env in "ab" for index in range(9)]
    rollouts = make_rollouts(tasks, rollout_batch_size=4, weights={"a": 1.0, "b": 1.0}, curriculum=first_a)
    first, second = await steps(rollouts, 2)
    assert {group.trajectories[0].task.env for group in first} == {"a"}
    assert {group.trajectories[0].task.env for group in second} == {"b"}
    assert seen[:2] == [{"a": [], "b": []}, {"a": [1.0] * 4, "b": []}]
