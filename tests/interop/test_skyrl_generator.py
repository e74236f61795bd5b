"""EnvGenerator without SkyRL: a scripted client and SkyRL's settings; tests/peers has SkyRL's own trainer."""

from types import SimpleNamespace

import pytest

from agentenv.core.types import SamplingParams, Task
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.interop.skyrl import EnvGenerator, dataset, generator
from tests.interop.protos import stand_in
from tests.interop.test_trl_rollout import Guess, Short, Tokenizer

PARAMS = {"temperature": 0.5, "logprobs": 1, "max_tokens": 20}


class Client:
    """SkyRL's client: answers texts in turn, and keeps what it was asked."""

    weight_version = 3

    def __init__(self, *texts, logprobs=True, reason="stop"):
        self.tokenizer, self.texts, self.asked, self.finished = Tokenizer(), list(texts), [], []
        self.logprobs, self.reason = logprobs, reason

    async def generate(self, asked, model):
        self.asked.append({**asked, "model": model})
        ids = [*self.tokenizer.encode(self.texts.pop(0)), self.tokenizer.eos_token_id]
        ids = ids[: asked["sampling_params"]["max_tokens"]]
        logprobs = [[-0.5] * len(ids)] if self.logprobs else None
        return {"response_ids": [ids], "stop_reasons": [self.reason], "response_logprobs": logprobs}

    async def finish_session(self, session):
        self.finished.append(session)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """What the generator imports of SkyRL."""
    utils = {"get_rollout_metrics": lambda responses, rewards, loss_masks: {"generate/num": len(responses)}}
    packages = {"skyrl": {}, "skyrl.train": {}, "skyrl.train.generators": {}}
    stand_in(monkeypatch, {**packages, "skyrl.train.generators.utils": utils})


def generator_with(client, step_wise=False, max_input=100, settings=None, **options):
    known = {
        "max_turns": 2, "max_input_length": max_input, "sampling_params": SimpleNamespace(max_generate_length=20),
        "chat_template_kwargs": {}, "use_cache_salt": True, "step_wise_trajectories": step_wise, "batched": False,
        "use_conversation_multi_turn": True, "vision_language_generator": False, "apply_overlong_filtering": False,
        "zero_reward_on_non_stop": False, "chat_template": SimpleNamespace(name_or_path=None),
        "inference_engine": SimpleNamespace(enable_return_routed_experts=False),
    }  # fmt: skip
    config = SimpleNamespace(**{**known, **(settings or {})})
    given = {"env": Guess, "model": "policy", "max_retries": 0, **options}
    return EnvGenerator(config, client, client.tokenizer, **given)


def asked(num=1, phase="train", labels=("1",), **row):
    """SkyRL's GeneratorInput: `num` siblings of a row for each label."""
    ids = [SimpleNamespace(instance_id=label, repetition_id=i) for label in labels for i in range(num)]
    return {
        "prompts": [[{"role": "user", "content": "one"}] for _ in ids],
        "env_extras": [{"reward_spec": {"ground_truth": each.instance_id}, **row} for each in ids],
        "trajectory_ids": ids, "sampling_params": PARAMS, "batch_metadata": SimpleNamespace(training_phase=phase),
    }  # fmt: skip


async def test_a_row_has_the_tokens_that_were_asked_after_and_each_turns_reward_at_its_end():
    client = Client("half", "1")
    made = await generator_with(client).generate(asked())
    first, second = (each["prompt_token_ids"][0] for each in client.asked)
    (response,), (rewards,), (mask,) = made["response_ids"], made["rewards"], made["loss_masks"]
    assert made["prompt_token_ids"] == [first]
    assert first + response[: len(second) - len(first)] == second
    assert [reward for reward in rewards if reward] == [0.25, 1.0]
    assert (rewards[len("half")], rewards[-1]) == (0.25, 1.0)
    assert {value for value, chosen in zip(made["rollout_logprobs"][0], mask, strict=True) if chosen} == {-0.5}
    assert 0 in mask
    assert (made["stop_reasons"], made["trajectory_ids"], made["is_last_step"]) == (["stop"], None, None)
    told = {"environment/avg_truncated": 0.0, "environment/avg_failed": 0.0}
    assert made["rollout_metrics"] == {"generate/num": 1, **told}


async def test_the_client_gets_skyrls_parameters_one_session_and_the_salt_of_the_weights():
    client = Client("half", "1")
    await generator_with(client).generate(asked())
    assert client.finished == ["1/0"]
    for each in client.asked:
        assert each["sampling_params"] == PARAMS
        assert (each["session_ids"], each["model"], each["cache_salt"]) == (["1/0"], "policy", "policy@3")


async def test_skyrls_settings_limit_the_turns_and_the_tokens_of_an_episode():
    made = await generator_with(Client("half", "half", "1")).generate(asked())
    assert (made["rollout_metrics"]["environment/avg_truncated"], sum(made["rewards"][0])) == (1.0, 0.5)
    client = Client("half", "x" * 90)
    num_prompt = len((await generator_with(Client("1")).generate(asked()))["prompt_token_ids"][0])
    made = await generator_with(client, max_input=num_prompt).generate(asked())
    assert len(made["prompt_token_ids"][0]) + len(made["response_ids"][0]) <= num_prompt + 20
    assert made["stop_reasons"] == ["length"]


async def test_the_classs_limits_count_where_they_are_less_than_skyrls():
    made = await generator_with(Client("half", "1"), env=Short).generate(asked())
    assert (made["rollout_metrics"]["environment/avg_truncated"], sum(made["rewards"][0])) == (1.0, 0.25)
    made = await generator_with(Client("x" * 90), env=Short).generate(asked())
    assert len(made["prompt_token_ids"][0]) + len(made["response_ids"][0]) <= Short.max_length


async def test_without_log_probabilities_the_whole_column_is_none():
    made = await generator_with(Client("1", logprobs=False)).generate(asked())
    assert made["rollout_logprobs"] is None


async def test_a_failed_episode_raises_where_skyrl_needs_its_row():
    client = Client("bang")
    with pytest.raises(InfraError, match=r"EnvGenerator: expected an episode to train on, got '1/0', which failed"):
        await generator_with(client).generate(asked())
    assert client.finished == ["1/0"]


async def test_under_step_wise_trajectories_a_failed_episode_has_no_row():
    made = await generator_with(Client("1", "bang", "x"), step_wise=True).generate(asked(3))
    assert [each.repetition_id for each in made["trajectory_ids"]] == [0, 2]
    assert made["is_last_step"] == [True, True]
    assert [sum(rewards) for rewards in made["rewards"]] == [1.0, 0.0]
    assert made["rollout_metrics"]["environment/avg_failed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("texts", [("1", "bang"), ("bang", "bang")])
async def test_a_task_with_fewer_than_two_of_its_episodes_is_refused_in_training(texts):
    with pytest.raises(InfraError, match=r"two episodes of each task that did not fail, got [01] of 2 in row 1"):
        await generator_with(Client(*texts), step_wise=True).generate(asked(2))


async def test_an_evaluation_leaves_failed_episodes_out_until_none_is_left():
    made = await generator_with(Client("bang", "2"), step_wise=True).generate(asked(1, "eval", ("1", "2")))
    assert [each.instance_id for each in made["trajectory_ids"]] == ["2"]
    with pytest.raises(InfraError, match="got 0 of 1 in row 1"):
        await generator_with(Client("bang"), step_wise=True).generate(asked(1, "eval"))


async def test_the_last_row_has_the_rewards_of_all_segments_and_one_row_is_never_several(monkeypatch):
    original = generator.segment_rows
    monkeypatch.setattr(generator, "segment_rows", lambda *given: original(*given) + original(*given))
    made = await generator_with(Client("half", "1", "1"), step_wise=True).generate(asked(2))
    assert [sum(rewards) for rewards in made["rewards"]] == [0.0, 2.5, 0.0, 2.0]
    assert made["rewards"][1][-1] == 2.25
    with pytest.raises(ContractError, match=r"one segment with actions, got 2.*step_wise_trajectories=true"):
        await generator_with(Client("1")).generate(asked())


async def test_stops_of_the_episode_go_to_the_client_and_a_grammar_is_refused():
    client = Client("1", "1")
    engine = generator.SkyRLEngine(client, PARAMS, None, None)
    await engine.generate([1], SamplingParams(max_tokens=4, stop=("x",), stop_token_ids=(7,)), request_id="a/0/1")
    (given,) = client.asked
    assert given["sampling_params"] == {**PARAMS, "max_tokens": 4, "stop": ["x"], "stop_token_ids": [7]}
    assert given["session_ids"] == ["a/0"]
    with pytest.raises(ConfigError, match=r"interop\.skyrl: expected no structural_tag"):
        await engine.generate([1], SamplingParams(structural_tag="{}"), request_id="a/0/1")


async def test_a_row_of_the_dataset_is_the_whole_task_again():
    (row,) = dataset([Task("one", "2", "a", metadata={"depth": [{"x": 1.5}]})])
    client = Client("2")
    given = asked(1, **{key: row[key] for key in ("reward_model", "extra_info")})
    made = await generator_with(client).generate(given)
    assert sum(made["rewards"][0]) == 1.0
    assert client.finished == ["a/0"]


@pytest.mark.parametrize(
    ("name", "value"), [("apply_overlong_filtering", True), ("chat_template", SimpleNamespace(name_or_path="x"))]
)
def test_a_setting_that_only_skyrls_own_generator_follows_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"EnvGenerator.config: expected generator.{name}.*Remove it"):
        generator_with(Client(), settings={name: value})


@pytest.mark.parametrize(
    "wrong", [{"max_retries": -1}, {"chat_options": {"histroy": ""}}, {"limits": {"step_timeout": 1}}]
)
def test_wrong_arguments_are_refused_by_their_names(wrong):
    with pytest.raises(ConfigError, match=rf"EnvGenerator\.{next(iter(wrong))}: expected"):
        generator_with(Client(), **wrong)
