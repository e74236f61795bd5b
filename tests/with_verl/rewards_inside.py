"""Checks against verl itself, in a process whose path begins with what verl needs; `test_rewards.py` runs it.

It prints, as JSON, each check's name and what went wrong in it, or null. Rows are of RM-Gallery's tutorial for verl.
"""

import asyncio
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "interop"))
warnings.simplefilter("ignore")

CHECKS = {}


def check(function):
    """One of the checks."""
    CHECKS[function.__name__] = function
    return function


def config_of(*overrides):
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose(
            "ppo_trainer", [f"actor_rollout_ref.model.path={ROOT / 'agentenv/_assets/tiny-math'}", *overrides]
        )


BY_NAME = ("reward.reward_manager.name=agentenv",)
BY_PATH = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.name=AgentEnvRewardManager",
    "reward.reward_manager.module.path=pkg://agentenv.interop.verl.rewards",
)


def rows(responses, prompts=None, tokenizer=None, **columns):
    from protos import batch_of
    from verl import DataProto

    n = len(responses)
    columns = {
        "data_source": ["openai/gsm8k"] * n,
        "extra_info": [{"split": "train"} for _ in range(n)],
        "reward_model": [{"style": "rule", "ground_truth": "4"}] * n,
        "uid": ["u"] * n,
    } | columns
    return batch_of(prompts or ["2+2"] * n, responses, proto=DataProto, tokenizer=tokenizer, **columns)


def worker_of(*overrides):
    from verl.experimental.reward_loop import RewardLoopWorker

    return RewardLoopWorker(config_of(*overrides))


class OfModel:
    """The tiny model's own tokenizer, for batches."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


# --- the batch manager -----------------------------------------------------------------------------------------------


def batch_manager(function=None, **options):
    from protos import Tokenizer

    from agentenv.interop.verl.rewards import RMGalleryRewardManager

    return RMGalleryRewardManager(Tokenizer(), compute_score=function, **options)


def lengths(prompt, responses, extras=None, **kwargs):
    return [float(len(text)) for text in responses], {"comparison_score": [float(len(text)) for text in responses]}


@check
def test_rows_4_to_16_the_batch_manager_on_verls_dataproto():
    import torch

    data = rows(["aa", "", "c", "dddd"], ["p", "p", "q", "q"], uid=["1", "1", "2", "2"])
    judge = batch_manager(lengths)
    answer = judge(data, return_dict=True)
    tensor, info = answer["reward_tensor"], answer["reward_extra_info"]
    assert tensor.shape == data.batch["responses"].shape
    assert tensor.sum(dim=1).tolist() == [2.0, 0.0, 1.0, 4.0]
    assert tensor[1].abs().max() == 0
    assert [tensor[0, 1].item(), tensor[2, 0].item(), tensor[3, 3].item()] == [2.0, 1.0, 4.0]
    assert judge.num_empty == 1
    assert data.batch["acc"].tolist() == [2.0, 0.0, 1.0, 4.0]
    assert {len(values) for values in info.values()} == {4}

    async def inside():
        return judge(data)

    assert torch.equal(asyncio.run(inside()), tensor)
    data.batch["rm_scores"] = tensor
    data.non_tensor_batch["acc"] = data.non_tensor_batch["uid"]
    data.meta_info["reward_extra_keys"] = ["acc"]
    assert batch_manager(lengths)(data, return_dict=True)["reward_extra_info"]["acc"].tolist() == ["1", "1", "2", "2"]


@check
def test_row_18_the_default_function_of_verls_old_trainer_judges_through_our_manager():
    from verl.utils.reward_score import default_compute_score

    data = rows(["#### 4", "#### 5"])
    assert batch_manager(default_compute_score)(data).sum(dim=1).tolist() == [1.0, 0.0]


# --- row 24: known to verl -------------------------------------------------------------------------------------------


@check
def test_row_24_the_entry_point_makes_both_names_known_and_imports_nothing():
    assert "verl.experimental.reward_loop" not in sys.modules
    assert "verl.workers.reward_manager" not in sys.modules
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
    from verl.workers.reward_manager import get_reward_manager_cls as older

    from agentenv.interop.verl.rewards import AgentEnvRewardManager, RMGalleryRewardManager

    assert get_reward_manager_cls("agentenv") is AgentEnvRewardManager
    assert issubclass(AgentEnvRewardManager, RewardManagerBase)
    assert older("RMGalleryRewardManager") is RMGalleryRewardManager


@check
def test_row_24_verl_loads_the_manager_by_its_name_and_by_its_path():
    from protos import Tokenizer
    from verl.trainer.ppo.reward import load_reward_manager

    from agentenv.interop.verl.rewards import AgentEnvRewardManager

    for overrides in (BY_NAME, BY_PATH):
        judge = load_reward_manager(config_of(*overrides), Tokenizer())
        assert type(judge) is AgentEnvRewardManager
        assert judge.compute_score is None, "verl's default function is not the user's"


# --- the manager of single samples -----------------------------------------------------------------------------------


async def scored(worker, data):
    answers = await worker.compute_score_batch(data)
    assert len({tuple(each["reward_extra_info"]) for each in answers}) == 1, "verl takes the keys of the first"
    return [each["reward_score"] for each in answers]


@check
async def test_verls_reward_worker_grades_by_data_source():
    worker = worker_of(*BY_NAME)
    tokenizer = OfModel(worker.input_tokenizer)
    texts = ["#### 4", "#### 5", "", r"\boxed{8/2}"]
    data = rows(texts, tokenizer=tokenizer, data_source=["openai/gsm8k"] * 3 + ["math_dapo"])
    decoded = worker.input_tokenizer.batch_decode([tokenizer.encode(text) for text in texts])
    expected = [float("4" in text or "8/2" in text) for text in decoded]
    assert await scored(worker, data) == expected
    assert expected[:3] == [1.0, 0.0, 0.0], decoded


@check
async def test_verls_reward_worker_grades_with_a_named_reward_and_components():
    spec = "+reward.reward_kwargs.reward={sum:{answer:{reward:math},shape:{reward:length,weight:0.0}}}"
    worker = worker_of(*BY_PATH, spec, "+reward.reward_kwargs.components=[answer]")
    data = rows(["#### 4", "#### 5"], tokenizer=OfModel(worker.input_tokenizer))
    answers = await worker.compute_score_batch(data)
    assert [list(each["reward_extra_info"]) for each in answers] == [["score", "acc", "reward_valid", "answer"]] * 2
    assert [each["reward_extra_info"]["answer"] for each in answers] == [1.0, 0.0]


@check
async def test_our_compute_score_in_verls_own_manager():
    overrides = (
        "reward.custom_reward_function.path=pkg://agentenv.interop.verl.rewards",
        "reward.custom_reward_function.name=compute_score",
        "+reward.custom_reward_function.reward_kwargs.rewards.moon=math",
    )
    worker = worker_of(*overrides)
    data = rows(["#### 4", "#### 5"], tokenizer=OfModel(worker.input_tokenizer), data_source=["moon"] * 2)
    assert await scored(worker, data) == [1.0, 0.0]
    both = worker_of(*overrides, *BY_NAME)
    assert await scored(both, data) == [1.0, 0.0]


@check
async def test_samples_of_a_prompt_are_judged_together_in_verls_worker():
    file = Path(tempfile.mkdtemp()) / "rewards.py"
    file.write_text(
        "def relative(prompt, responses, extras=None):\n"
        "    shortest = min(map(len, responses))\n"
        "    return [float(len(text) - shortest) for text in responses], {}\n"
    )
    given = (f"+reward.reward_kwargs.reward='{file}:relative'", "actor_rollout_ref.rollout.n=3")
    worker = worker_of(*BY_NAME, *given, "reward.num_workers=1")
    data = rows(["1", "111", "11", "1111", "11", "1"], tokenizer=OfModel(worker.input_tokenizer), uid=list("aabbba"))
    assert await scored(worker, data) == [0.0, 2.0, 0.0, 2.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"reward.num_workers: expected 1, got 8"):
        worker_of(*BY_NAME, *given)


@check
async def test_row_7_the_last_of_several_outputs_is_graded_where_verls_own_manager_sees_an_empty_text():
    """The batch is made as verl 0.9.1's AgentLoopWorker makes it, padded on the right."""
    import numpy as np
    import torch
    from protos import objects
    from tensordict import TensorDict
    from torch.nn.utils.rnn import pad_sequence
    from verl import DataProto

    def outputs(tokenizer):
        pairs = [([1, 2, 3, 4, 5, 6, 7, 8], [5] * 9), ([1, 2], tokenizer.encode("#### 4", add_special_tokens=False))]
        both = [(torch.tensor(prompt), torch.tensor(response)) for prompt, response in pairs]
        batch = {
            "prompts": pad_sequence([prompt for prompt, _ in both], batch_first=True),
            "responses": pad_sequence([response for _, response in both], batch_first=True),
            "attention_mask": pad_sequence([torch.ones(len(p) + len(r)) for p, r in both], batch_first=True).long(),
        }
        columns = {
            "data_source": objects(["openai/gsm8k"] * 2),
            "reward_model": objects([{"ground_truth": "4"}] * 2),
            "extra_info": objects([{}, {}]),
            "prompt_len": np.array([len(p) for p, _ in both]),
            "response_len": np.array([len(r) for _, r in both]),
        }
        return DataProto(batch=TensorDict(batch, batch_size=2), non_tensor_batch=columns)

    theirs, ours = worker_of(), worker_of(*BY_NAME)
    assert (await theirs.compute_score(outputs(theirs.input_tokenizer)))["reward_score"] == 0, "verl has mended it"
    assert (await ours.compute_score(outputs(ours.input_tokenizer)))["reward_score"] == 1.0


@check
def test_row_13_verls_reward_loop_on_ray_places_scores_at_the_last_token():
    import ray
    from verl.experimental.reward_loop import RewardLoopManager

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        loop = RewardLoopManager(config_of(*BY_NAME, "reward.num_workers=1"))
        from verl.utils import hf_tokenizer

        tokenizer = OfModel(hf_tokenizer(str(ROOT / "agentenv" / "_assets" / "tiny-math")))
        data = rows(["#### 4", "", "#### 5"], tokenizer=tokenizer)
        scores = loop.compute_rm_score(data)
    finally:
        ray.shutdown()
    lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(dim=1).tolist()
    tensor = scores.batch["rm_scores"]
    assert tensor.sum(dim=1).tolist() == [1.0, 0.0, 0.0]
    assert tensor[0, lengths[0] - 1] == 1.0
    assert scores.meta_info["reward_extra_keys"] == ["score", "acc", "reward_valid"]


def outcome(function):
    started = time.perf_counter()
    try:
        answer = function()
        if asyncio.iscoroutine(answer):
            asyncio.run(answer)
    except BaseException:
        return {"error": traceback.format_exc(), "seconds": time.perf_counter() - started}
    return {"error": None, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    import verl  # noqa: F401 - loads its plugins

    first = "test_row_24_the_entry_point_makes_both_names_known_and_imports_nothing"
    wanted = [first, *(name for name in CHECKS if name != first)]
    found = {name: outcome(CHECKS[name]) for name in wanted if len(sys.argv) < 2 or sys.argv[1] in name}
    print("\n" + json.dumps(found))
