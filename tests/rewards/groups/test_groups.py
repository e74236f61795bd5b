"""Groups side by side: keys, deadlines, outcomes, functions. Rows are those of the table of RM-Gallery's defects."""

import asyncio
import copy
import logging
import threading
from types import SimpleNamespace

import pytest

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.groups.batch import (
    Each,
    GroupSizeError,
    check_group_sizes,
    grade_group,
    grade_groups,
    group_keys,
)
from agentenv.rewards.groups.function import FunctionGroupReward
from agentenv.rewards.types import Response, RewardResult, Status
from tests.rewards.judges.rule_judges import Rewarding
from tests.waits import until


class ByPrompt:
    """A group reward that does what `acts` says for the prompt of a group, and gives each response its length."""

    bounds = (0.0, 100.0)

    def __init__(self, **acts):
        self.acts, self.seen = acts, []

    async def grade_group(self, responses, reference=None):
        prompt = responses[0].prompt
        self.seen.append((prompt, [response.text for response in responses], reference))
        act = self.acts.get(prompt)
        if isinstance(act, BaseException):
            raise act
        if isinstance(act, list):
            return act
        if act is not None:
            await act()
        return [RewardResult(float(len(response.text)), components={prompt: 1.0}) for response in responses]


def rows(*prompts):
    return [Response("x" * index, prompt=prompt) for index, prompt in enumerate(prompts)]


async def forever():
    await asyncio.Event().wait()


@pytest.fixture
def in_virtual_time(virtual_clock, monkeypatch):
    """Runs a coroutine; the seconds of its groups are virtual too."""
    stopwatch = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("agentenv.rewards.groups.batch.time", stopwatch)
    return virtual_clock.run


async def test_results_come_in_the_order_of_the_responses():
    graded = await grade_groups(ByPrompt(), rows("a", "b", "a", "b"), ["a", "b", "a", "b"])
    assert [result.reward for result in graded.results] == [0.0, 1.0, 2.0, 3.0]
    assert [(group.key, group.indices) for group in graded.groups] == [("a", (0, 2)), ("b", (1, 3))]


def test_one_slow_and_one_raising_group_cost_the_others_nothing__row_3(in_virtual_time):
    reward = ByPrompt(slow=forever, broken=ValueError("boom"), label=DataError("no label"), down=InfraError("down"))
    keys = ["fine", "slow", "broken", "label", "down", "good"]
    graded = in_virtual_time(grade_groups(reward, rows(*keys), keys, limit_s=60.0))
    assert [group.status for group in graded.groups] == ["ok", "timeout", "error", "error", "error", "ok"]
    assert [result.status for result in graded.results] == [
        Status.OK, Status.INFRA, Status.ERROR, Status.LABEL, Status.INFRA, Status.OK,
    ]  # fmt: skip
    assert [result.reward for result in graded.results] == [0.0, None, None, None, None, 5.0]
    assert "within 60 s" in graded.groups[1].detail
    assert "ValueError: boom at " in graded.groups[2].detail
    assert [group.detail for group in graded.groups[3:5]] == ["no label", "InfraError: down"]
    metrics = {name.removeprefix("rewards/"): value for name, value in graded.metrics().items()}
    assert metrics.pop("slowest_group_s") >= 60.0
    assert metrics == {"num_groups": 6.0, "num_groups_timeout": 1.0, "num_groups_error": 3.0, "num_invalid": 4.0}


async def test_cancelling_the_batch_cancels_its_groups():
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def waits():
        begun.set()
        try:
            await forever()
        finally:
            cancelled.set()

    batch = asyncio.create_task(grade_groups(ByPrompt(a=waits), rows("a"), ["a"]))
    await begun.wait()
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert cancelled.is_set()


def test_a_groups_time_starts_when_its_work_starts__row_1(in_virtual_time):
    """The seed's clock runs in the queue: four groups of 40 s, one at a time, do not fit into its 60 s."""

    async def work():
        await asyncio.sleep(40)

    keys = [f"g{index}" for index in range(4)]
    reward = ByPrompt(**dict.fromkeys(keys, work))
    graded = in_virtual_time(grade_groups(reward, rows(*keys), keys, limit_s=60.0, max_concurrent=1))
    assert {group.status for group in graded.groups} == {"ok"}
    assert [group.seconds for group in graded.groups] == [pytest.approx(40.0)] * 4


@pytest.mark.parametrize("answer", [[], [RewardResult(1.0)] * 3, [1.0, 2.0], ["no", "results"]])
async def test_an_answer_that_is_not_a_result_for_each_response_is_not_a_reward(answer):
    graded = await grade_groups(ByPrompt(a=answer), rows("a", "a"), ["a", "a"])
    assert [result.status for result in graded.results] == [Status.ERROR] * 2
    assert "expected 2 results" in graded.groups[0].detail


async def test_a_reward_outside_its_bounds_is_not_a_reward():
    graded = await grade_groups(ByPrompt(a=[RewardResult(101.0), RewardResult(100.0)]), rows("a", "a"), ["a", "a"])
    assert [result.reward for result in graded.results] == [None, 100.0]


async def test_all_responses_have_the_same_components__row_14():
    graded = await grade_groups(ByPrompt(c=ValueError("boom")), rows("a", "b", "c"), ["a", "b", "c"])
    components = [{"a": 1.0, "b": None}, {"a": None, "b": 1.0}, {"a": None, "b": None}]
    assert [dict(result.components) for result in graded.results] == components


async def test_each_group_gets_its_own_reference_and_an_empty_one_is_none__row_10():
    reward = ByPrompt()
    await grade_groups(reward, rows("a", "b", "c"), ["a", "b", "c"], references={"a": "best", "b": ""})
    assert reward.seen == [("a", [""], "best"), ("b", ["x"], None), ("c", ["xx"], None)]


async def test_each_response_on_its_own_as_a_group():
    reward = Each(Rewarding({"good": 1.0, "bad": 0.0, "unknown": InfraError("down")}))
    grade = await grade_group(reward, [Response("good"), Response("bad"), Response("unknown")])
    assert ([result.reward for result in grade.results], reward.bounds) == ([1.0, 0.0, None], (0.0, 1.0))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"limit_s": 0}, "limit_s"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"references": {"a": {"content": "best"}}}, "references: expected texts, got"),
        ({"keys": [[1, 5]]}, r"keys: expected values that can be compared, got \[1, 5\].* group_keys"),
    ],
)
async def test_wrong_arguments_are_named__row_10(arguments, named):
    with pytest.raises((ConfigError, DataError), match=named):
        await grade_groups(ByPrompt(), rows("a"), **{"keys": ["a"]} | arguments)


# --- keys and sizes -------------------------------------------------------------------------------------------------


async def test_the_same_prompt_twice_in_a_batch_is_two_groups__row_8():
    """The seed groups by decoded text: two rows that ask the same are one group of both."""
    reward = ByPrompt()
    await grade_groups(reward, rows("same", "same", "same"), group_keys(["u1", "u2", "u1"], []))
    assert [texts for _, texts, _ in reward.seen] == [["", "xx"], ["x"]]


def test_prompts_are_distinguished_by_their_ids_where_there_are_no_uids__row_8():
    """Ids 1 and 2 may both decode to nothing, as special tokens do."""
    assert group_keys(None, [[1, 5], (2, 5), [1, 5]]) == [(1, 5), (2, 5), (1, 5)]


def test_an_invalid_uid_is_an_error():
    for uid in (None, float("nan"), ["a"]):
        with pytest.raises(DataError, match="uid"):
            group_keys(["u", uid], [])


def test_the_check_of_sizes_may_only_warn_or_say_nothing__row_9(caplog):
    with caplog.at_level(logging.WARNING):
        check_group_sizes(["a", "a", "b"], "any")
        assert caplog.records == []
        check_group_sizes(["a", "a", "b"], "warn")
    assert "between 1 and 2" in caplog.text


def test_the_strict_check_says_what_the_seed_says_and_another_is_unknown__row_9():
    with pytest.raises(AssertionError) as raised:
        check_group_sizes(["a", "a", "b", "a", "b", "a"], "strict")
    assert str(raised.value) == "Sample count must be same per group, current group_sizes: [4, 2]"
    assert isinstance(raised.value, GroupSizeError)
    with pytest.raises(ConfigError, match="group_size"):
        check_group_sizes(["a"], "some")


# --- functions ------------------------------------------------------------------------------------------------------


def lengths(prompt, responses, extras, **kwargs):
    scores = [float(len(text)) for text in responses]
    return scores, {"comparison_score": scores}


async def one_group(reward, texts, reference=None, **limits):
    responses = [Response(text, prompt="p", metadata={"index": index}) for index, text in enumerate(texts)]
    references = {} if reference is None else {"k": reference}
    return await grade_groups(reward, responses, ["k"] * len(texts), references=references, **limits)


async def test_a_function_gets_what_the_seed_gives_it__row_1():
    calls = []

    def compute_score(prompt, responses, extras, **kwargs):
        calls.append((prompt, responses, extras, kwargs))
        return [1.0, 2.0], {"a": [3.0, 4.0]}, ["why", "why not"]

    reward = FunctionGroupReward(compute_score, kwargs={"max_workers": 8, "both": "old"})
    reward.meta_info.update({"last_mean_std": 0.5, "both": "new"})
    graded = await one_group(reward, ["x", "y"])
    kwargs = {"max_workers": 8, "last_mean_std": 0.5, "both": "new"}
    assert calls == [("p", ["x", "y"], [{"index": 0}, {"index": 1}], kwargs)]
    assert [(each.reward, dict(each.components), each.detail) for each in graded.results] == [
        (1.0, {"a": 3.0}, "why"),
        (2.0, {"a": 4.0}, "why not"),
    ]


async def test_a_function_may_be_async__row_1():
    loop = asyncio.get_running_loop()

    async def compute_score(prompt, responses, extras):
        assert asyncio.get_running_loop() is loop
        return [1.0] * len(responses), None

    for function in (compute_score, lambda prompt, responses, extras: compute_score(prompt, responses, extras)):
        graded = await one_group(FunctionGroupReward(function), ["x"])
        assert graded.results[0].reward == 1.0, graded.groups


async def test_wins_are_those_over_the_reference_for_every_response__row_11():
    """The seed compares response 0 with response 1, and gives the others 0.0."""
    graded = await one_group(FunctionGroupReward(lengths), ["xx", "xxxx", "xxx"], reference="yyy")
    assert [result.reward for result in graded.results] == [2.0, 4.0, 3.0]
    assert [result.components["win"] for result in graded.results] == [0.0, 1.0, 0.0]
    assert [result.components["win_and"] for result in graded.results] == [0.0, 1.0, 1.0]


async def test_the_reference_is_judged_last_with_the_first_rows_extras_and_has_no_result__row_10():
    seen = []

    def compute_score(prompt, responses, extras):
        seen.append((list(responses), list(extras)))
        responses.append("changed by the function")
        return [1.0, 2.0, 3.0], {"comparison_score": [1.0, 2.0, 3.0]}

    responses = [Response("x", metadata={"index": 0}), Response("y", metadata={"index": 1})]
    graded = await grade_groups(FunctionGroupReward(compute_score), responses, ["k", "k"], references={"k": "ref"})
    assert seen == [(["x", "y", "ref"], [{"index": 0}, {"index": 1}, {"index": 0}])]
    assert [result.reward for result in graded.results] == [1.0, 2.0]
    assert [response.text for response in responses] == ["x", "y"]


async def test_a_function_cannot_change_its_callers_rows__row_10():
    """The seed's manager hands its own lists out."""

    def compute_score(prompt, responses, extras):
        prompt[0]["content"] = responses[0] = "changed"
        extras[0]["y"][0].clear()
        extras[1].clear()
        return [1.0, 1.0], {}

    responses = [
        Response("x", prompt=[{"role": "user", "content": "q"}], metadata={"y": [{"content": "ref"}]}) for _ in range(2)
    ]
    before = copy.deepcopy(responses)
    graded = await grade_groups(FunctionGroupReward(compute_score), responses, ["k", "k"])
    assert ([group.status for group in graded.groups], responses) == (["ok"], before)


async def test_a_row_that_cannot_be_copied_is_the_rows_fault():
    row = Response("x", metadata={"lock": threading.Lock()})
    graded = await grade_groups(FunctionGroupReward(lengths), [row], ["k"])
    assert [result.status for result in graded.results] == [Status.LABEL]


@pytest.mark.parametrize("reference", [None, ""])
async def test_without_a_reference_nothing_wins__row_10(reference):
    graded = await one_group(FunctionGroupReward(lengths), ["x", "xx"], reference=reference)
    assert [result.components["win"] for result in graded.results] == [None, None]
    assert [result.components["win_and"] for result in graded.results] == [None, None]


@pytest.mark.parametrize("score", [-999.0, None, float("nan"), float("inf")])
async def test_an_invalid_score_is_not_a_reward_and_the_others_keep_theirs__row_20(score):
    def compute_score(prompt, responses, extras):
        return [1.0, score], {"part": [score, 2.0]}

    graded = await one_group(FunctionGroupReward(compute_score), ["x", "y"])
    assert [result.status for result in graded.results] == [Status.OK, Status.INFRA]
    assert [dict(result.components) for result in graded.results] == [{"part": None}, {"part": 2.0}]


async def test_scores_may_come_in_arrays__row_14():
    import numpy

    def compute_score(prompt, responses, extras):
        return numpy.array([1.0, 2.0], dtype=numpy.float32), {"n": numpy.array([1, 2]), "b": [True, numpy.float64(0.5)]}

    graded = await one_group(FunctionGroupReward(compute_score), ["x", "y"])
    assert [result.reward for result in graded.results] == [1.0, 2.0]
    assert [dict(result.components) for result in graded.results] == [{"n": 1.0, "b": 1.0}, {"n": 2.0, "b": 0.5}]


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (None, "expected (scores, reward_info"),
        (([1.0], {}), "scores: expected a list of 2 numbers"),
        (("ab", {}), "scores: expected a list of 2 numbers"),
        (([1.0, "2"], {}), "scores: expected numbers"),
        (([1.0, 2.0], {"a": [1.0, 2.0, 3.0]}), "reward_info['a']: expected a list of 2"),
        (([1.0, 2.0], {"a": [1.0, {}]}), "reward_info['a']: expected numbers"),
    ],
)
async def test_an_answer_that_cannot_be_read_says_what_is_wrong__row_14(answer, named):
    graded = await one_group(FunctionGroupReward(lambda prompt, responses, extras: answer), ["x", "y"])
    assert graded.groups[0].status == "error"
    assert named in graded.groups[0].detail


@pytest.mark.long
async def test_a_timeout_does_not_wait_for_the_stuck_call__row_2():
    """The seed's pool joins its threads: its 0.3 s took as long as the stuck call."""
    release = threading.Event()

    def compute_score(prompt, responses, extras):
        if responses == ["stuck"]:
            release.wait()
        return [1.0] * len(responses), {}

    reward = FunctionGroupReward(compute_score, max_threads=1)
    try:
        graded = await grade_groups(reward, [Response("stuck"), Response("fine")], ["a", "b"], limit_s=2.0)
        assert [group.status for group in graded.groups] == ["timeout", "ok"]
        assert reward.num_abandoned == 1
    finally:
        release.set()
    await until(lambda: not reward.num_abandoned)


@pytest.mark.parametrize(
    "arguments",
    [
        {"function": 3},
        {"function": lengths, "max_threads": 0},
        {"function": lambda p, r, e: ([], {})},
        {"function": dict.fromkeys},
        {"function": lengths, "kwargs": {"responses": []}},
    ],
)
def test_functions_that_cannot_be_called_are_refused(arguments):
    with pytest.raises(ConfigError):
        FunctionGroupReward(**arguments)
