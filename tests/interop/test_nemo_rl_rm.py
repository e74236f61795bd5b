"""Reward models as NeMo RL's environment: its configuration, its traps, and the same numbers as `agentenv rm eval`."""

import asyncio
import math

import pytest
import torch

from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.interop.nemo_rl import EnvironmentUnavailable, RewardModelEnvironment, RowsFailed
from agentenv.rewards.evaluation.evaluate import evaluate, open_rm
from tests.interop.nemo_stub import BatchedDataDict
from tests.rewards.evaluation.scorers import Scripted, pair
from tests.rewards.models.tiny import tiny_rm

QUESTION = {"role": "user", "content": "What is 12 + 30?"}
NEMO_CONFIG = {
    "enabled": True,
    "model_name": "MODEL",
    "tokenizer": {"name": "MODEL"},
    "precision": "float32",
    "batch_size": 4,
    "checkpoint_path": None,
    "max_model_len": 512,
    "logprob_batch_size": 4,
    "offload_optimizer_for_logprob": False,
    "resources": {"gpus_per_node": 1, "num_nodes": 1},
    "reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"},
    "dtensor_cfg": {"_v2": True, "enabled": True, "cpu_offload": False},
    "dynamic_batching": {"enabled": False},
    "sequence_packing": {"enabled": False},
    "max_grad_norm": None,
    "generation": None,
}
"""The keys of its example grpo_rm_1B.yaml."""


@pytest.fixture
def made():
    environments = []

    def make(config=None, **kwargs):
        environments.append(RewardModelEnvironment(config or {}, **kwargs))
        return environments[-1]

    yield make
    for environment in environments:
        environment.shutdown()


def log(answer, *before):
    return [*(before or [QUESTION]), {"role": "assistant", "content": answer}]


async def test_the_environment_and_rm_eval_produce_the_same_scores_under_nemos_own_keys(made):
    items = [pair(f"yes {i}", f"no {i}" * i, index=i, prompt="What is 12 + 30?") for i in range(1, 4)]
    rm = open_rm(f"hf:{tiny_rm()}")
    outcomes = await evaluate(rm, items)
    await rm.close()
    environment = made(NEMO_CONFIG | {"model_name": f"hf:{tiny_rm()}"})
    logs = [log(candidate.text, *candidate.prompt) for item in items for candidate in item.candidates]
    rewards = (await asyncio.to_thread(environment.step, logs, [{}] * len(logs))).rewards
    expected = [score for outcome in outcomes for score in outcome.scores]
    assert (rewards.shape, rewards.dtype) == ((6,), torch.float32)
    assert rewards.tolist() == pytest.approx(expected, abs=1e-4)


def test_all_rows_end_and_their_answers_are_given(made):
    answer = made(reward=Scripted()).step([log("a"), log("bb")], [{}, {}])
    assert answer.rewards.tolist() == [1.0, 2.0]
    assert (answer.terminateds.dtype, answer.terminateds.tolist()) == (torch.bool, [True, True])
    assert (answer.answers, answer.metadata, answer.next_stop_strings) == (["a", "bb"], [None] * 2, [None] * 2)
    assert [o["content"] for o in answer.observations] == ["Environment: 1", "Environment: 2"]


def test_rows_of_one_step_are_asked_about_together(made):
    scorer = Scripted()
    made(reward=scorer).step([log("a")] * 16, [{}] * 16)
    assert scorer.most == 16


# --- double templating, NeMo RL's #854 --------------------------------------------------------------------------------


TEMPLATED = {"role": "user", "content": "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"}


def test_a_prompt_that_the_policys_template_has_been_at_is_refused(made):
    with pytest.raises(RowsFailed, match="raw_prompt"):
        made(reward=Scripted()).step([log("a", TEMPLATED)], [{}])


@pytest.mark.parametrize(
    "raw", ["What?", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]]
)
def test_the_raw_prompt_of_the_metadata_goes_before_the_rendering(made, raw):
    scorer = Scripted()
    made(reward=scorer).step([log("a", TEMPLATED)], [{"raw_prompt": raw}])
    asked = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
    assert [dict(m) for m in scorer.asked[0]] == [*asked, {"role": "assistant", "content": "a"}]


def test_the_actions_of_several_turns_are_scored_after_the_raw_prompt(made):
    scorer = Scripted()
    said = [{"role": "assistant", "content": "a"}, {"role": "environment", "content": "no"}]
    made(reward=scorer).step([[TEMPLATED, *said, {"role": "assistant", "content": "b"}]], [{"raw_prompt": "What?"}])
    assert [(m["role"], m["content"]) for m in scorer.asked[0]] == [
        ("user", "What?"), ("assistant", "a"), ("user", "no"), ("assistant", "b"),
    ]  # fmt: skip


# --- failures and figures ---------------------------------------------------------------------------------------------


def fails(text):
    if text == "down":
        raise InfraError("as told")
    if text == "bug":
        raise ContractError("as written")
    return math.nan if text == "nan" else len(text)


@pytest.mark.parametrize(
    ("bad", "kind"), [("down", EnvironmentUnavailable), ("nan", EnvironmentUnavailable), ("bug", RowsFailed)]
)
def test_a_failed_row_is_not_a_zero(made, bad, kind):
    with pytest.raises(kind, match="row 1"):
        made(reward=Scripted(fails)).step([log("a"), log(bad)], [{}, {}])
    environment = made({"on_failure": "mask"}, reward=Scripted(fails))
    rewards = environment.step([log("a"), log(bad), log("ccc")], [{}] * 3).rewards
    assert rewards.tolist()[::2] == [1.0, 3.0]
    assert math.isnan(rewards[1])
    assert environment.metrics()["reward_model_env/num_failed"] == 1.0


@pytest.mark.parametrize("file", [None, "def reward_func(queries, prompts, labels):\n    return [0.0]\n"])
def test_a_reward_model_that_cannot_be_had_is_a_wrong_setting_and_not_tried_again(made, tmp_path, file):
    """A folder without a model; a function of texts without a tokenizer that makes texts of messages."""
    model = tmp_path / "rm.py" if file else tmp_path
    if file:
        model.write_text(file)
    environment = made({"model_name": str(model)})
    with pytest.raises(RowsFailed, match="ConfigError"):
        environment.step([log("a"), log("b")], [{}, {}])
    assert environment.metrics()["reward_model_env/num_failed"] == 2.0


def test_conversations_that_are_cut_are_counted(made):
    environment = made({"model_name": str(tiny_rm()), "max_model_len": 32, "overflow": "left"})
    environment.step([log("long " * 50), log("4")], [{}, {}])
    figures = environment.metrics()
    assert (figures["reward_model_env/num_samples"], figures["reward_model_env/num_truncated"]) == (2.0, 1.0)


def test_metrics_count_since_the_start_and_a_batch_has_figures_by_nemos_names(made):
    environment = made(reward=Scripted())
    environment.step([log("a"), log("bb")], [{}] * 2)
    environment.step([log("cccc")], [{}])
    assert environment.metrics()["reward_model_env/num_samples"] == 3.0
    figures = environment.global_post_process_and_metrics({"total_reward": torch.tensor([1.0, 2.0, 4.0])})[1]
    wanted = {"num_samples": 3.0, "mean_reward": 7 / 3, "min_reward": 1.0, "max_reward": 4.0}
    assert {name: figures[f"reward_model_env/{name}"] for name in wanted} == pytest.approx(wanted)
    assert figures["reward_model_env/std_reward"] == pytest.approx(torch.tensor([1.0, 2.0, 4.0]).std().item())


def test_a_masked_batch_comes_back_from_the_post_processing(made):
    environment = made({"on_failure": "mask"}, reward=Scripted(fails))
    rewards = environment.step([log("aa"), log("down")], [{}, {}]).rewards
    batch, figures = environment.global_post_process_and_metrics(
        BatchedDataDict(total_reward=rewards, idx=torch.tensor([3, 3]), loss_multiplier=torch.ones(2))
    )
    assert batch["total_reward"].tolist() == [2.0, 2.0]
    assert batch["loss_multiplier"].tolist() == [1.0, 0.0]
    assert figures["reward_model_env/num_no_reward"] == 1.0


def test_any_reward_of_ours_judges_by_the_label_of_the_row(made):
    environment = made({"reward": "math"})
    rewards = environment.step(
        [log("\\boxed{42}"), log("\\boxed{41}")], [{"label": "42"}, {"ground_truth": "42"}]
    ).rewards
    assert rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_name"),
        ({"model_name": "x", "reward_model_cfg": {"reward_model_type": "regression"}}, "bradley_terry"),
        ({"model_name": "x", "batchsize": 4}, "batchsize"),
        ({"reward": "math", "on_failure": "zero"}, "on_failure"),
        ({"model_name": "x", "precision": "int3"}, "dtype"),
    ],
)
def test_wrong_configurations_are_refused_at_once(config, message):
    with pytest.raises(ConfigError, match=message):
        RewardModelEnvironment(config)


def test_a_shutdown_leaves_a_callers_scorer_open_and_may_be_repeated(made):
    scorer = Scripted()
    environment = made(reward=scorer)
    environment.shutdown()
    environment.shutdown()
    assert not scorer.closed
