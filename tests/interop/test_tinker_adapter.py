"""Our environments as tinker-cookbook's Envs, without it: its types are stand-ins; tests/peers has its own rollouts."""

from types import SimpleNamespace

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, SamplingParams, StepResult
from agentenv.errors import ConfigError, DataError, EpisodeFailed
from agentenv.interop.tinker import EnvDatasetBuilder
from agentenv.testing.tokenizers import CharTokenizer
from tests.interop.protos import stand_in

ROWS = [{"prompt": [{"role": "user", "content": f"task {i}"}], "label": str(i)} for i in range(5)]


class Say(AgentInstance):
    """Pays 0.5, then 1 for the label; `fail` raises, `stop` asks for a stop string."""

    num_closed = 0

    async def reset(self, states):
        self.label = states["label"]
        return states

    async def step(self, states):
        text = states["action_text"]
        if text == "fail":
            raise RuntimeError("as asked")
        if text == "stop":
            return StepResult([{"role": "user", "content": "on"}], sampling=SamplingParams(stop=("x",)))
        if text == self.label:
            return StepResult(reward=1.0, score=0.75, info={"num": 2, "why": "right"}, terminated=True)
        sampling = SamplingParams(max_tokens=3, stop_token_ids=(7,)) if text == "short" else None
        return StepResult([{"role": "user", "content": "on"}], reward=0.5, sampling=sampling)

    async def on_truncate(self, states):
        return StepResult(reward=0.25)

    async def close(self):
        Say.num_closed += 1


class OwnLoop:
    """An agent with a loop of calls."""

    async def run(self, context):
        return 0.0


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """What the adapter imports of tinker and tinker-cookbook."""
    modules = {
        "tinker": {"ModelInput": SimpleNamespace(from_ints=list)},
        "tinker_cookbook": {},
        "tinker_cookbook.rl": {},
        "tinker_cookbook.rl.types": {"StepResult": SimpleNamespace},
        "tinker_cookbook.rl.rollout_limits": {"RolloutLimits": lambda: SimpleNamespace(max_turns=None)},
        "tinker_cookbook.tokenizer_utils": {"get_tokenizer": lambda name: CharTokenizer()},
    }
    stand_in(monkeypatch, modules)
    Say.num_closed = 0


async def group_of(**options):
    options = {"env": Say, "data": ROWS, "model": "", "group_size": 2, "batch_size": 2, **options}
    dataset, test_set = await EnvDatasetBuilder(**options)()
    assert test_set is None
    return dataset.get_batch(0)[0]


async def test_wrong_arguments_are_refused_by_their_names():
    for wrong, error in (({"group_size": 0}, "group_size"), ({"chat_options": {"histroy": ""}}, "chat_options")):
        with pytest.raises(ConfigError, match=rf"EnvDatasetBuilder\.{error}: expected"):
            await group_of(**wrong)


async def begun(**options):
    group = await group_of(**options)
    env, _ = await group.make_envs()
    observation, stops = await env.initial_observation()
    return group, env, observation, stops


def ids(text):
    return [*CharTokenizer().encode(text), CharTokenizer().eos_token_id]


async def test_each_observation_extends_the_last_one_and_its_action():
    group, env, first, stops = await begun()
    assert stops == [CharTokenizer().eos_token_id]
    step = await env.step(ids("no"), extra={"stop_reason": "stop"})
    assert (step.reward, step.episode_done, step.metrics, step.logs) == (0.5, False, {}, {})
    assert step.next_observation[: len(first) + 3] == first + ids("no")
    end = await env.step(ids(group.task.label))
    assert (end.reward, end.episode_done, end.next_observation) == (1.0, True, [])
    assert end.metrics == {"num": 2.0, "stop/completed": 1.0, "truncated": 0.0, "score": 0.75}
    assert end.logs == {"why": "right"}
    assert await group.compute_group_rewards([None, None], []) == [(0.0, {})] * 2


async def test_an_action_is_limited_by_the_room_or_by_what_the_environment_asks_for():
    group, env, first, _ = await begun(limits=Limits(max_length=100))
    assert env.rollout_limits.max_turn_tokens == 100 - len(first)
    assert env.rollout_limits.max_turns is None  # tinker's own default
    step = await env.step(ids("short"))
    assert env.rollout_limits.max_turn_tokens == 3
    assert step.next_stop_condition == sorted([7, CharTokenizer().eos_token_id])
    await group.cleanup()


async def test_a_limit_ends_the_episode_with_the_environments_last_word():
    _, env, _, _ = await begun(limits=Limits(max_turns=1))
    end = await env.step(CharTokenizer().encode("no"), extra={"stop_reason": "length"})
    assert (end.reward, end.episode_done, end.metrics) == (0.75, True, {"stop/max_turns": 1.0, "truncated": 1.0})
    assert env.episode.trajectory.turns[0].finish_reason == "length"
    assert env.rollout_limits.max_turn_tokens is None


async def test_a_failed_episode_raises_at_its_begin_and_at_a_step():
    with pytest.raises(EpisodeFailed, match="expected fewer than max_length=5"):
        await begun(limits=Limits(max_length=5))
    group, env, _, _ = await begun()
    with pytest.raises(EpisodeFailed, match="as asked"):
        await env.step(ids("fail"))
    await group.cleanup()


async def test_an_action_longer_than_the_room_is_refused_and_never_cut():
    _, env, _, _ = await begun(limits=Limits(max_length=100))
    with pytest.raises(EpisodeFailed, match="at most max_tokens=75 tokens, got 100"):
        await env.step(CharTokenizer().encode("x" * 100))
    assert env.episode.trajectory.turns == []


async def test_stop_strings_are_refused():
    group, env, _, _ = await begun()
    with pytest.raises(ConfigError, match="stop_token_ids"):
        await env.step(ids("stop"))
    await group.cleanup()


async def test_cleanup_closes_the_episodes_that_are_not_over():
    group, _, _, _ = await begun()
    assert Say.num_closed == 0
    await group.cleanup()
    assert (Say.num_closed, group.envs) == (1, [])
    await group.cleanup()


async def test_siblings_share_the_seed_of_the_environment_and_tasks_do_not():
    dataset, _ = await EnvDatasetBuilder(Say, ROWS, "", group_size=2, batch_size=5)()
    keys = [[env.episode._episode.key for env in await group.make_envs()] for group in dataset.get_batch(0)]
    assert all(first.seed == second.seed and first.episode_id != second.episode_id for first, second in keys)
    assert len({first.seed for first, _ in keys}) == len({first.group_id for first, _ in keys}) == 5


async def test_rows_without_the_label_that_the_environment_needs_are_refused():
    with pytest.raises(DataError, match="row 1: expected key 'label'"):
        await EnvDatasetBuilder(Say, [{"prompt": "q", "answer": "1"}], "", batch_size=1)()


async def test_batches_are_whole_and_their_order_depends_on_the_seed():
    made = [(await EnvDatasetBuilder(Say, ROWS, "", batch_size=2, seed=seed)())[0] for seed in (0, 0, 1)]
    orders = [[group.task.label for i in range(len(each)) for group in each.get_batch(i)] for each in made]
    assert [len(each) for each in made] == [2, 2, 2]
    assert orders[0] == orders[1] != orders[2]
    assert len(set(orders[0])) == 4
    assert made[0].groups[0].options.data == ()


async def test_what_cannot_be_trained_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match="from 1 to 5"):
        await group_of(batch_size=6)
    with pytest.raises(ConfigError, match="agentenv train"):
        await group_of(env=OwnLoop)
    with pytest.raises(ConfigError, match="no_such"):
        await group_of(env="no_such")
    with pytest.raises(DataError):
        await group_of(data=[{"text": "no prompt"}])


async def test_metrics_are_grouped_by_the_name_of_the_environment():
    assert (await group_of()).logging_tags() == ["Say"]
    assert (await group_of(env="math_retry")).logging_tags() == ["math_retry"]
