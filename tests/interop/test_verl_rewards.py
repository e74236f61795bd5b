"""Our managers on batches of verl's shape; `tests/with_verl/test_rewards.py` has verl itself.

Rows are those of the table of what RM-Gallery's tutorial for verl promises.
"""

import asyncio
import copy
import logging
import math
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.interop import _data_proto as proto
from agentenv.interop.verl.judges import judge_of, response_of
from agentenv.interop.verl.reward_manager import GroupGatherer, SampleRewardManager
from agentenv.interop.verl.rewards import RMGalleryRewardManager, compute_score
from agentenv.rewards.types import Response, RewardResult
from tests.interop.protos import PAD, Tokenizer, batch_of


def lengths(prompt, responses, extras=None, **kwargs):
    """The tutorial's form of a function: a score per response."""
    scores = [float(len(text)) for text in responses]
    return scores, {"comparison_score": scores}


def manager(compute_score=lengths, **options):
    return RMGalleryRewardManager(Tokenizer(), compute_score=compute_score, **options)


def simple(responses=("aa", "b", "cc", "dddd"), prompts=("p", "p", "q", "q"), **columns):
    columns.setdefault("extra_info", [{} for _ in responses])
    columns.setdefault("data_source", ["somewhere"] * len(responses))
    return batch_of(prompts, responses, **columns)


def nonzero(tensor):
    return {(row, col): tensor[row, col].item() for row, col in torch.nonzero(tensor).tolist()}


# --- row 4: the entry ------------------------------------------------------------------------------------------------


def test_row_4_it_is_called_without_a_loop_and_within_one():
    judge, data = manager(), simple()
    alone = judge(data)

    async def inside():
        return judge(data), await judge.acall(data)

    called, awaited = asyncio.run(inside())
    assert torch.equal(alone, called)
    assert torch.equal(alone, awaited)


def one_of_verls(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form of a function."""
    return float(len(solution_str))


@pytest.mark.parametrize("options", [{}, {"compute_score": one_of_verls}, {"compute_score": None, "reward": "length"}])
def test_row_4_it_may_be_sent_to_another_process_before_and_after_it_was_used(options):
    """verl <= 0.6 pickles its manager for `launch_reward_fn_async`."""
    judge, data = manager(**options), simple()
    fresh = pickle.loads(pickle.dumps(judge))
    expected = judge(data)
    assert torch.equal(fresh(data), expected)
    assert torch.equal(pickle.loads(pickle.dumps(judge))(data), expected)


# --- row 5: scores that are there ------------------------------------------------------------------------------------


def test_row_5_scores_that_are_there_are_given_back_with_their_extras():
    data = simple(acc=[1.0, 0.0, 1.0, 0.0])
    data.batch["rm_scores"] = torch.ones(4, 7)
    judge = manager(compute_score=lambda **_: pytest.fail("graded"))
    assert judge(data) is data.batch["rm_scores"]
    for keys in (["acc"], None):
        data.meta_info["reward_extra_keys"] = keys
        answer = judge(data, return_dict=True)
        assert answer["reward_tensor"] is data.batch["rm_scores"]
        extra = {name: list(values) for name, values in answer["reward_extra_info"].items()}
        assert extra == ({"acc": [1.0, 0.0, 1.0, 0.0]} if keys else {})


# --- rows 6, 7: texts ------------------------------------------------------------------------------------------------


def test_row_6_and_7_only_tokens_that_are_not_padding_are_decoded():
    tokenizer, seen = Tokenizer(), []

    def score(prompt, responses, extras):
        seen.append((prompt, responses))
        return [0.0] * len(responses), {}

    data = simple(prompts=("long prompt", "long prompt", "q", "q"))
    RMGalleryRewardManager(tokenizer, compute_score=score)(data)
    assert sorted(seen) == [("long prompt", ["aa", "b"]), ("q", ["cc", "dddd"])]
    assert len(tokenizer.decoded) == 8
    assert all(PAD not in row for row in tokenizer.decoded)


def test_row_6_special_tokens_are_not_text():
    texts = proto.read_texts(simple(responses=("aa<|im_end|>", "b", "c", "d")), Tokenizer())
    assert texts.responses[0] == "aa"
    assert texts.num_tokens[0] == 3


def test_row_6_tags_that_a_tokenizer_counts_among_its_special_tokens_are_text():
    """Else what was thought would read as the answer."""

    stand_ins = {"<think>": "\ue000", "</think>": "\ue001"}  # a character, and so a token, each

    class Counts(Tokenizer):
        def __init__(self):
            super().__init__()
            ends = {id: SimpleNamespace(content="<|im_end|>", special=True) for id in self.all_special_ids}
            tags = {self.encode(tag)[0]: SimpleNamespace(content=tag, special=True) for tag in stand_ins}
            self.added_tokens_decoder = ends | tags
            self.all_special_ids += tags

        def encode(self, text):
            for tag, character in stand_ins.items():
                text = text.replace(tag, character)
            return super().encode(text)

        def decode(self, ids, *, skip_special_tokens=False):
            text = super().decode(ids, skip_special_tokens=skip_special_tokens)
            for tag, character in stand_ins.items():
                text = text.replace(character, tag)
            return text

    tokenizer = Counts()
    data = batch_of(["2+2?<|im_end|><think>"], ["so</think>4<|im_end|>"], tokenizer=tokenizer)
    texts = proto.read_texts(data, tokenizer)
    assert (texts.prompts, texts.responses) == (["2+2?<think>"], ["so</think>4"])


def test_row_7_declared_lengths_hold_if_prompts_are_padded_on_the_right():
    """verl pads a sample's several outputs on the right; its own managers then grade an empty text."""
    tokenizer = Tokenizer()
    (padding,) = tokenizer.encode("!")  # what verl pads with, 0, is that of Qwen
    prompts, responses = ["longer prompt", "p"], ["a", "bbbbbbbb"]
    ids = [[tokenizer.encode(text) for text in texts] for texts in (prompts, responses)]
    wide = [max(map(len, rows)) for rows in ids]
    batch = {
        name: torch.tensor([row + [padding] * (width - len(row)) for row in rows])
        for name, rows, width in zip(("prompts", "responses"), ids, wide, strict=True)
    }
    both = [len(a) + len(b) for a, b in zip(*ids, strict=True)]
    batch["attention_mask"] = torch.tensor([[1] * n + [0] * (max(both) - n) for n in both])
    said = {"prompt_len": np.array([13, 1]), "response_len": np.array([1, 8])}
    texts = proto.read_texts(type(simple())(batch, said), tokenizer)
    assert (texts.prompts, texts.responses, texts.num_tokens) == (prompts, responses, [1, 8])


def test_row_7_a_mask_may_be_of_floats_and_without_one_the_padding_is_what_the_tokenizer_pads_with():
    data = simple()
    data.batch["attention_mask"] = data.batch["attention_mask"].float()
    assert nonzero(manager()(data)) == {(0, 1): 2.0, (1, 0): 1.0, (2, 1): 2.0, (3, 3): 4.0}
    del data.batch["attention_mask"]
    texts = proto.read_texts(data, Tokenizer())
    assert (texts.prompts, texts.responses) == (["p", "p", "q", "q"], ["aa", "b", "cc", "dddd"])


# --- rows 8, 9: groups -----------------------------------------------------------------------------------------------


def grouping(data, **options):
    """The groups that a function is called with."""
    seen = []

    def score(prompt, responses, extras):
        seen.append(tuple(responses))
        return [0.0] * len(responses), {}

    manager(score, **options)(data)
    return sorted(seen)


def test_row_8_groups_are_of_a_uid_where_there_is_one():
    """The tutorial's manager merges a prompt that is twice in a batch, and dies: sizes [4, 2]."""
    data = batch_of(["p"] * 4 + ["q"] * 2, list("abcdef"), uid=["1", "1", "2", "2", "3", "3"], extra_info=[{}] * 6)
    assert grouping(data) == [("a", "b"), ("c", "d"), ("e", "f")]


def test_row_8_groups_are_of_the_prompts_tokens_else():
    prompts = ["p", "p", "p<|im_end|>", "p<|im_end|>"]  # equal as text
    assert grouping(batch_of(prompts, list("abcd"), extra_info=[{}] * 4)) == [("a", "b"), ("c", "d")]


def test_row_8_a_groups_samples_need_not_stand_together():
    data = simple(uid=["1", "2", "1", "2"])
    assert grouping(data) == [("aa", "cc"), ("b", "dddd")]
    answer = manager()(data)
    assert answer.sum(dim=1).tolist() == [2.0, 1.0, 2.0, 4.0]


def test_row_9_groups_of_different_sizes_are_refused_unless_an_option_takes_them():
    data = simple(prompts=("p", "p", "p", "q"))
    with pytest.raises(AssertionError, match="Sample count must be same per group"):
        manager()(data)
    assert grouping(data, group_size="any") == [("aa", "b", "cc"), ("dddd",)]


# --- rows 10, 11 through the manager ---------------------------------------------------------------------------------


def test_rows_10_and_11_each_response_is_compared_with_the_reference():
    contents = ["xx", "of another", "sample"]  # the first sample's counts
    extras = [{"y": np.array([{"content": content}], dtype=object)} for content in contents]
    before = copy.deepcopy(extras)
    data = batch_of(["p"] * 3, ["aaa", "bb", "c"], extra_info=extras, data_source=["s"] * 3)
    info = manager(is_val_mode=True)(data, return_dict=True)["reward_extra_info"]
    assert info["win"] == [1.0, 0.0, 0.0]
    assert info["win_and"] == [1.0, 1.0, 0.0]
    assert info["comparison_score"] == [3.0, 2.0, 1.0]
    assert all(np.array_equal(a["y"], b["y"]) for a, b in zip(before, extras, strict=True))


@pytest.mark.parametrize("extra", [{}, {"y": []}, {"y": [{}]}, {"y": [{"content": ""}]}, {"y": None}, {"y": "text"}])
def test_row_10_without_a_reference_nothing_is_compared(extra):
    data = batch_of(
        ["p", "p", "q", "q"], ["aaa", "bb", "c", "d"], extra_info=[extra] * 2 + [{"y": [{"content": "xx"}]}] * 2
    )
    info = manager(is_val_mode=True)(data, return_dict=True)["reward_extra_info"]
    assert [math.isnan(each) for each in info["win"]] == [True, True, False, False]


# --- row 12: statistics ----------------------------------------------------------------------------------------------


def test_row_12_the_groups_figures_are_there_and_the_mean_deviation_goes_to_the_next_batch():
    given = []

    def score(prompt, responses, extras, **kwargs):
        given.append(kwargs)
        return [float(len(text)) for text in responses], {}

    judge = manager(score, timeout=60.0, temperature=0.5)
    info = judge(simple(), return_dict=True)["reward_extra_info"]
    assert info["reward_mean"] == [1.5, 1.5, 3.0, 3.0]
    assert info["reward_std"] == [0.5, 0.5, 1.0, 1.0]
    assert (info["reward_min"], info["reward_max"]) == ([1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 4.0, 4.0])
    judge(simple())
    data = simple()
    data.meta_info["last_reward_info"] = {"reward_std": [3.0, math.nan, 5.0]}
    judge(data)
    told = {"timeout": 60.0, "temperature": 0.5}
    assert given == [told] * 2 + [told | {"last_mean_std": 0.75}] * 2 + [told | {"last_mean_std": 4.0}] * 2


def test_row_12_statistics_may_be_left_out():
    info = manager(return_statistics=False)(simple(), return_dict=True)["reward_extra_info"]
    assert sorted(info) == ["comparison_score", "reward_valid"]


# --- row 13: placement -----------------------------------------------------------------------------------------------


def test_row_13_the_reward_is_at_the_last_token_and_an_empty_response_has_none(caplog):
    """The tutorial writes the reward of an empty response to the last token of its padding, and so does verl."""
    judge = manager(lambda prompt, responses, extras: ([7.0] * len(responses), {}))
    data = simple(responses=("aa", "", "cc", "dddd"))
    tensor = judge(data)
    assert nonzero(tensor) == {(0, 1): 7.0, (2, 1): 7.0, (3, 3): 7.0}
    assert (tensor.dtype, tensor.shape) == (torch.float32, data.batch["responses"].shape)
    assert judge.num_empty == 1
    assert "1 of 4 responses are empty" in caplog.text


def test_row_13_the_per_sample_manager_places_scores_so_too():
    data = simple(responses=("aa", "", "cc", "dddd"))
    tensor = SampleRewardManager.assemble_rm_scores(data, [7.0, 7.0, 7.0, 7.0])
    assert nonzero(tensor) == {(0, 1): 7.0, (2, 1): 7.0, (3, 3): 7.0}


# --- row 14: extra info ----------------------------------------------------------------------------------------------


def test_row_14_columns_are_equal_no_matter_what_groups_say():
    def uneven(prompt, responses, extras):
        if prompt == "q":
            raise RuntimeError("down")
        return [1.0] * len(responses), {"reward_format": torch.tensor([0.5] * len(responses))}

    info = manager(uneven)(simple(), return_dict=True)["reward_extra_info"]
    assert info["reward_format"][:2] == [0.5, 0.5]
    assert all(math.isnan(each) for each in info["reward_format"][2:])
    assert info["reward_valid"] == [1.0, 1.0, 0.0, 0.0]
    assert {len(values) for values in info.values()} == {4}
    assert all(isinstance(value, float) for values in info.values() for value in values)


def test_row_14_no_column_is_called_reward():
    """verl's validation counts such a one twice."""
    judge = manager(lambda prompt, responses, extras: ([1.0] * len(responses), {"reward": [2.0] * len(responses)}))
    info = judge(simple(), return_dict=True)["reward_extra_info"]
    assert info["reward_raw"] == [2.0] * 4
    assert "reward" not in info


# --- rows 15, 16: what is stored and given back ----------------------------------------------------------------------


@pytest.mark.parametrize("key", ["acc", "score_of_ours"])
def test_row_15_the_batch_gets_the_rewards(key):
    data = simple()
    manager(acc_key=key)(data)
    assert data.batch[key].tolist() == [2.0, 1.0, 2.0, 4.0]
    assert data.batch[key].dtype is torch.float32


# --- row 17: samples in the log --------------------------------------------------------------------------------------


def test_row_17_samples_of_each_data_source_are_logged_and_nothing_is_printed(caplog, capsys):
    data = simple(data_source=["one", "one", "two", "two"])
    with caplog.at_level(logging.INFO, logger="agentenv.interop.verl.rewards"):
        judge = manager(num_examine=1)
        judge(data)
        judge(data)
    shown = [record.getMessage() for record in caplog.records]
    assert [line.split("\n")[0] for line in shown] == ["data source one", "data source two"]
    assert "prompt: p" in shown[0]
    assert "response: aa" in shown[0]
    assert "reward: 2.0" in shown[0]
    assert capsys.readouterr() == ("", "")


# --- row 18: the constructor -----------------------------------------------------------------------------------------


def test_row_18_the_constructor_is_the_tutorials():
    judge = RMGalleryRewardManager(
        Tokenizer(), num_examine=3, is_val_mode=True, compute_score=lengths, max_workers=8, timeout=300.0,
        use_group_reward=True, return_details=False, return_statistics=True,
    )  # fmt: skip
    assert (judge.num_examine, judge.is_val_mode, judge.compute_score) == (3, True, lengths)
    assert (judge.reward_fn_key, judge.max_workers, judge.timeout) == ("data_source", 8, 300.0)
    assert judge.reward_kwargs["return_statistics"] is True


def test_row_18_without_a_function_the_default_composition_works(caplog):
    good = "<think>one two</think><answer>four</answer>"
    answer = RMGalleryRewardManager(Tokenizer())(simple(responses=(good, "b", good, "d")), return_dict=True)
    assert torch.isfinite(answer["reward_tensor"]).all()
    assert {"reward_format", "reward_ngram", "thought_lengths"} <= answer["reward_extra_info"].keys()
    assert answer["reward_extra_info"]["reward_format"][:2] == [1.0, 0.0]
    assert "format, length and repetition" in caplog.text


def test_row_18_the_default_composition_asks_a_judge_where_there_is_one():
    def grader(prompt, responses, extras=None, **_):
        return [1.0 if "four" in text else 0.0 for text in responses], [{}] * len(responses)

    extras = [{"y": [{"content": "<answer>five</answer>"}]}] * 2
    data = batch_of(["2+2?"] * 2, ["<answer>four</answer>", "<answer>3</answer>"], extra_info=extras)
    info = RMGalleryRewardManager(Tokenizer(), is_val_mode=True, grader=grader)(data, return_dict=True)
    assert info["reward_extra_info"]["reward_principle"] == [1.0, 0.0]
    assert (info["reward_extra_info"]["win"], info["reward_extra_info"]["win_and"]) == ([1.0, 0.0], [1.0, 1.0])


def test_row_18_rules_alone_win_against_no_reference():
    extras = [{"y": [{"content": "reference"}]}] * 2
    data = batch_of(["p"] * 2, ["a", "b"], extra_info=extras)
    info = RMGalleryRewardManager(Tokenizer(), is_val_mode=True)(data, return_dict=True)["reward_extra_info"]
    assert all(map(math.isnan, info["win"] + info["win_and"]))


def test_row_18_verls_own_form_of_a_function_works():
    """verl <= 0.6 gives a manager its `default_compute_score`, of one response."""
    seen = []

    def score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(solution_str == ground_truth), "acc": 1, "pred": "text"}

    columns = {"reward_model": [{"ground_truth": "a"}] * 2, "my_source": ["s"] * 2, "extra_info": [{"index": 0}] * 2}
    judge = manager(score, reward_fn_key="my_source")
    assert judge(batch_of(["p"] * 2, ["a", "b"], **columns)).sum(dim=1).tolist() == [1.0, 0.0]
    assert sorted(seen) == [("s", "a", "a", {"index": 0}), ("s", "b", "a", {"index": 0})]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_workers": 0}, "max_workers: expected a whole number"),
        ({"group_size": "loose"}, "group_size: expected one of strict, warn, any, got 'loose'"),
        ({"reward": "math"}, "expected no compute_score with it"),
        ({"compute_score": 3}, "expected a reward or a function, got 3"),
    ],
)
def test_row_18_wrong_options_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        manager(**{"compute_score": lengths} | options)


@pytest.mark.parametrize("score", [one_of_verls, None])
def test_rows_1_and_18_the_timeout_is_that_of_single_responses_too(score):
    """Which would have a minute else, whatever the groups have."""
    reward = None if score else "math"
    judge = RMGalleryRewardManager(Tokenizer(), compute_score=score, reward=reward, timeout=250.0)
    assert judge.reward.limit_s == 250.0
    assert score is None or judge.reward.reward.limit_s == 250.0
    assert score is None or single(reward=f"{__name__}:one_of_verls", timeout=250.0)._reward.limit_s == 250.0


NUM_TOGETHER = 12
TOGETHER = threading.Barrier(NUM_TOGETHER, timeout=60.0)


def meets(prompt, responses, extras=None):
    """Raises where fewer groups than NUM_TOGETHER are judged at a time."""
    TOGETHER.wait()
    return [1.0] * len(responses), {}


def test_rows_2_and_18_as_many_groups_are_judged_at_a_time_as_max_workers_says():
    num = NUM_TOGETHER
    data = batch_of([f"p{n}" for n in range(num)], ["a"] * num, extra_info=[{}] * num)
    judge = manager(meets, max_workers=num)
    assert judge(data).sum().item() == num
    assert pickle.loads(pickle.dumps(judge))(data).sum().item() == num


# --- rows 3, 20 through the manager ----------------------------------------------------------------------------------


def half_dead(prompt, responses, extras):
    return [-999.0 if text == "b" else float(len(text)) for text in responses], {}


def test_row_20_a_response_that_could_not_be_graded_leaves_the_mask_which_is_not_changed_in_place():
    data = simple()
    before = torch.ones_like(data.batch["responses"])
    data.batch["response_mask"] = before
    tensor = manager(half_dead, invalid_policy="mask")(data)
    assert tensor.sum(dim=1).tolist() == data.batch["acc"].tolist() == [2.0, 0.0, 2.0, 4.0]
    assert before.min() == 1
    assert data.batch["response_mask"].sum(dim=1).tolist() == [7, 0, 7, 7]
    data = simple()
    manager(half_dead, invalid_policy="mask")(data)
    assert data.batch["response_mask"].sum(dim=1).gt(0).tolist() == [True, False, True, True]


def test_row_20_why_a_response_has_no_reward_is_in_the_log(caplog):
    manager(half_dead)(simple())
    assert "1 of 4 responses have no reward; the first: the function gave no score" in caplog.text


# --- one sample at a time --------------------------------------------------------------------------------------------


class Config(dict):
    """As OmegaConf's: names are attributes and keys."""

    def __getattr__(self, name):
        value = self[name]
        return Config(value) if isinstance(value, dict) else value


def config_of(num_workers=1, n=3, val_n=1, path=None, **reward_kwargs):
    return Config(
        reward={"num_workers": num_workers, "reward_kwargs": reward_kwargs, "custom_reward_function": {"path": path}},
        actor_rollout_ref={"rollout": {"n": n, "val_kwargs": {"n": val_n}}},
    )


def single(compute_score=None, **options):
    path = None if compute_score is None else "their.py"
    return SampleRewardManager(config_of(path=path, **options), Tokenizer(), compute_score)


def sample(response=r"\boxed{4}", label="4", **columns):
    given = {"data_source": "math", "extra_info": {"index": 1}, "reward_model": {"ground_truth": label}} | columns
    return batch_of(["2+2?"], [response], **{name: [value] for name, value in given.items()})


async def test_a_sample_is_graded_by_the_reward_of_its_source():
    answer = await single().run_single(sample())
    assert answer == {"reward_score": 1.0, "reward_extra_info": {"score": 1.0, "acc": 1.0, "reward_valid": 1.0}}
    assert (await single().run_single(sample(r"\boxed{5}")))["reward_score"] == 0.0


async def test_sources_that_verl_knows_have_a_reward_here():
    for source in ("openai/gsm8k", "lighteval/MATH", "math_dapo", "aime2024", "numina_olympiads"):
        assert (await compute_score(source, "#### 4", "4"))["score"] == 1.0


async def test_a_source_without_a_reward_is_reported_once_and_clearly():
    said = r"data_source: expected one with a reward, got 'moon'.*rewards.my_source=math"
    with pytest.raises(ConfigError, match=said):
        await single().run_single(sample(data_source="moon"))
    with pytest.raises(ConfigError, match="got 'moon'"):
        await compute_score("moon", "text", "label")


async def test_a_source_without_a_reward_may_be_one_without_a_grade():
    unknown = sample(data_source="moon")
    with pytest.raises(DataError, match="data_source"):
        await single(on_unknown="invalid").run_single(unknown)
    answer = await single(on_unknown="invalid", invalid_policy="zero").run_single(unknown)
    assert answer["reward_extra_info"] == {"score": 0.0, "acc": 0.0, "reward_valid": 0.0}
    answer = await compute_score("moon", "text", "label", on_unknown="invalid", invalid_policy="keep")
    assert answer["score"] == -999.0
    assert math.isnan(answer["acc"])


async def test_sources_are_given_rewards_by_the_settings():
    settings = {"moon": {"math": {}}, "earth": "math"}
    assert (await single(rewards=settings).run_single(sample(data_source="moon")))["reward_score"] == 1.0
    assert (await compute_score("earth", "#### 4", "4", rewards=settings))["score"] == 1.0


@pytest.mark.parametrize("outcome", ["graded", "not graded"])
async def test_row_14_keys_are_the_same_no_matter_what_comes_of_a_sample(outcome):
    """verl reads them from the first sample of a batch: others with other keys end the step with a KeyError."""

    def score(data_source, solution_str, ground_truth, extra_info):
        if outcome == "not graded":
            raise RuntimeError("down")
        return {"score": 0.5, "acc": True, "reward": 9.0, "format": np.float32(0.25), "pred": "x"}

    answer = await single(score, components=["format"], invalid_policy="zero").run_single(sample())
    assert list(answer["reward_extra_info"]) == ["score", "acc", "reward_valid", "format"]
    graded = outcome == "graded"
    assert (answer["reward_score"], answer["reward_extra_info"]["acc"]) == ((0.5, 1.0) if graded else (0.0, 0.0))
    assert math.isnan(answer["reward_extra_info"]["format"]) != graded


@pytest.mark.parametrize(
    ("error", "kind"), [(ConnectionError("no route"), InfraError), (KeyError("no route"), ContractError)]
)
async def test_a_failed_grade_is_raised_by_default(error, kind):
    async def down(data_source, solution_str, ground_truth, extra_info):
        raise error

    with pytest.raises(kind, match="no route"):
        await single(down).run_single(sample())


async def test_verls_default_function_is_not_the_users():
    judge = SampleRewardManager(config_of(path=None), Tokenizer(), lambda **_: pytest.fail("asked"))
    assert (await judge.run_single(sample()))["reward_score"] == 1.0


async def test_a_users_function_gets_the_arguments_of_verls_manager_and_changes_nothing():
    seen = {}

    async def score(data_source, solution_str, ground_truth, extra_info):
        seen.update(extra_info, ground_truth=ground_truth)
        extra_info["mine"] = 1
        return 1

    data = sample(tool_extra_fields={"turn_scores": [0.5]}, __num_turns__=np.int32(4), label=np.array(["4", "5"]))
    await single(score).run_single(data)
    assert seen == {
        "index": 1, "turn_scores": [0.5], "num_turns": 4, "rollout_reward_scores": {}, "ground_truth": ["4", "5"]
    }  # fmt: skip
    assert data.non_tensor_batch["extra_info"][0] == {"index": 1}


async def test_the_last_of_several_outputs_is_graded():
    data = batch_of(
        ["p", "p"], [r"\boxed{5}", r"\boxed{4}"], data_source=["math"] * 2, reward_model=[{"ground_truth": "4"}] * 2
    )
    assert (await single().run_single(data))["reward_score"] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rewrad": "math"}, "reward_kwargs: expected options among"),
        ({"invalid_policy": "mask"}, "expected raise, zero or keep, got 'mask'"),
        ({"components": ["reward"]}, "list of names other than reward"),
        ({"components": "format"}, "list of names"),
        ({"think_opened": "yes"}, "think_opened: expected true, false or null, got 'yes'"),
        ({"rewards": {"moon": 3}}, "expected a name"),
    ],
)
def test_wrong_settings_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        single(**options)


async def test_wrong_options_of_compute_score_are_refused():
    with pytest.raises(ConfigError, match=r"got 'rewrads'"):
        await compute_score("math", "4", "4", rewrads={})
    with pytest.raises(ConfigError, match="expected JSON values"):
        await compute_score("math", "4", "4", rewards={"math": Relative()})
    assert (await compute_score("math", "#### 4", "4", reward_router_address="a:1", reward_model_tokenizer=None))[
        "score"
    ]


async def test_an_object_that_is_called_asynchronously_is_a_function():
    class Asks:
        async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
            return 0.5

    assert (await single(Asks()).run_single(sample()))["reward_score"] == 0.5


def test_a_manager_outlives_the_loop_that_it_was_asked_on():
    async def slow(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0.01)
        return 1.0

    judge = single(slow, max_concurrent=1)

    async def asked():
        return await asyncio.gather(*(judge.run_single(sample()) for _ in range(3)))

    for _ in range(2):
        assert [answer["reward_score"] for answer in asyncio.run(asked())] == [1.0] * 3


# --- a thought that the prompt begins ---------------------------------------------------------------------------------

CUT, WHOLE = r"so it is \boxed{4}, I gue", r"so it is 5</think>\boxed{4}"


def thinking(response, prompt="2+2?<think>\n", n=1, **columns):
    given = {"data_source": ["math"] * n, "extra_info": [{}] * n, "reward_model": [{"ground_truth": "4"}] * n}
    return batch_of([prompt] * n, [response] * n, **given, **columns)


@pytest.mark.parametrize(("text", "reward"), [(CUT, 0.0), (WHOLE, 1.0), ("<think>" + WHOLE, 1.0)])
async def test_a_cut_thought_that_the_prompt_began_is_not_an_answer(text, reward):
    assert (await single().run_single(thinking(text)))["reward_score"] == reward
    assert (await single().run_single(thinking(text, "2+2?")))["reward_score"] == 1.0
    assert (await single(think_opened=True).run_single(thinking(text, "2+2?")))["reward_score"] == reward
    assert (await single(think_opened=False).run_single(thinking(text)))["reward_score"] == 1.0
    judge = RMGalleryRewardManager(Tokenizer(), reward="math")
    assert (await judge.acall(thinking(text, n=2))).sum(dim=1).tolist() == [reward] * 2
    assert (await compute_score("math", text, "4", think_opened=True))["score"] == reward
    assert (await compute_score("math", text, "4"))["score"] == 1.0


def test_the_tutorials_functions_see_the_beginning_of_a_thought_and_verls_what_verl_shows_them():
    seen = []

    def group(prompt, responses, extras=None):
        seen.extend(responses)
        return [0.0] * len(responses), {}

    extras = [{"y": [{"content": "four"}]}]
    manager(group, is_val_mode=True)(batch_of(["2?<think>"], [WHOLE], extra_info=extras))
    assert seen == ["<think>" + WHOLE, "four"]

    def score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append(solution_str)
        return 0.0

    manager(score)(thinking(WHOLE))
    asyncio.run(single(score).run_single(thinking(WHOLE)))
    assert seen[2:] == [WHOLE] * 2


# --- groups of samples that come one by one --------------------------------------------------------------------------


class Relative:
    """Each response's length less the shortest one's; notes what it judged."""

    bounds = (-math.inf, math.inf)

    def __init__(self):
        self.judged = []

    async def grade_group(self, responses, reference=None):
        sizes = [len(each.text) for each in responses]
        self.judged.append(sorted(sizes))
        return [RewardResult(float(size - min(sizes))) for size in sizes]


def groups(reward=None, wait_s=60.0):
    return GroupGatherer(reward or Relative(), limit_s=60.0, wait_s=wait_s)


async def test_samples_of_a_group_are_judged_together_when_all_have_come():
    reward = Relative()
    gathering = groups(reward)
    texts = [("g", "aaa"), ("h", "b"), ("g", "a"), ("h", "bb"), ("h", "bbb"), ("g", "aa")]
    for _ in range(2):  # a group may come again under its key
        results = await asyncio.gather(*(gathering.grade(key, Response(text), 3) for key, text in texts))
        assert [result.reward for result in results] == [2.0, 0.0, 0.0, 1.0, 2.0, 1.0]
    assert reward.judged == [[1, 2, 3]] * 4


async def test_a_sibling_that_fails_does_not_hold_up_the_others():
    gathering = groups()
    waiting = [asyncio.create_task(gathering.grade("g", Response("a" * n), 3)) for n in (1, 2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert (await gathering.grade("g", Response("aaaa"), 3)).reward == 2.0
    assert (await waiting[1]).reward == 0.0
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_a_sibling_that_never_comes_is_given_up(caplog):
    gathering = groups(wait_s=0.05)
    results = await asyncio.gather(*(gathering.grade("g", Response("a" * n), 3) for n in (1, 2)))
    assert [result.reward for result in results] == [0.0, 1.0]
    assert "2 of 3 samples of g arrived" in caplog.text


async def test_as_many_groups_are_judged_at_a_time_as_max_concurrent_says():
    judge = single(reward=f"{__name__}:meets", n=1, max_concurrent=NUM_TOGETHER)
    answers = await asyncio.gather(*(judge.run_single(sample(uid=str(n))) for n in range(NUM_TOGETHER)))
    assert [answer["reward_score"] for answer in answers] == [1.0] * NUM_TOGETHER


async def test_group_rewards_come_through_the_manager_of_single_samples(tmp_path):
    file = tmp_path / "ours.py"
    file.write_text(
        "def relative(prompt, responses, extras=None):\n"
        "    shortest = min(map(len, responses))\n"
        "    return [float(len(text) - shortest) for text in responses], {}\n"
    )
    judge = single(reward=f"{file}:relative", n=3, val_n=1)
    asked = [judge.run_single(sample("x" * n, uid="u")) for n in (2, 1, 4)]
    assert [each["reward_score"] for each in await asyncio.gather(*asked)] == [1.0, 0.0, 3.0]
    of_batch, of_row = sample("xx", uid="v"), sample("xx", uid="v", extra_info={"split": "test"})
    of_batch.meta_info["validate"] = True
    for validated in (of_batch, of_row):  # verl's own loop of agents says neither
        assert (await judge.run_single(validated))["reward_score"] == 0.0
    with pytest.raises(DataError, match="uid"):
        await judge.run_single(sample("xx"))


def test_group_rewards_want_their_groups_in_one_process():
    with pytest.raises(ConfigError, match=r"reward.num_workers: expected 1, got 8"):
        SampleRewardManager(config_of(num_workers=8, reward=f"{__name__}:Relative"), Tokenizer())


# --- what judges -----------------------------------------------------------------------------------------------------


def test_judges_may_be_named_in_many_ways():
    kinds = {"math": "MathReward", f"{__name__}:Relative": "Relative", f"{__name__}:lengths": "FunctionGroupReward"}
    assert {name: type(judge_of(name)).__name__ for name in kinds} == kinds
    relative = Relative()
    assert judge_of(relative) is relative
    with pytest.raises(ConfigError, match="expected a class that needs no arguments"):
        judge_of("agentenv.rewards.groups.tournament:Tournament")


def test_rewards_of_ours_see_the_messages_and_all_columns_and_the_tutorials_functions_what_it_says():
    row = {"raw_prompt": [{"role": "user", "content": "hi"}], "extra_info": {"index": 1}, "data_source": "s"}
    seen = response_of(row, "text", "decoded", Relative())
    assert (seen.prompt, seen.metadata["index"], seen.metadata["data_source"]) == (row["raw_prompt"], 1, "s")
    seen = response_of(row, "text", "decoded", judge_of(lengths))
    assert (seen.prompt, seen.metadata) == ("decoded", {"index": 1})


async def test_an_invalid_score_is_an_error_of_the_function():
    judge = judge_of(lambda data_source, solution_str, ground_truth, extra_info: {"acc": 1.0})
    with pytest.raises(ContractError, match="compute_score: expected a number"):
        await judge.grade(Response("a"))
