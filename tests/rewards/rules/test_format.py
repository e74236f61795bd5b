"""Formats: which texts keep to them, and which nearly do."""

import time

import pytest

from agentenv.rewards.rules.format import ThinkFormatReward, ToolCallFormatReward, compute_format_reward
from agentenv.rewards.types import Response

GOOD = "<think>2 + 2</think><answer>4</answer>"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


async def kept(reward, text):
    result = await reward.grade(Response(text))
    return bool(result.score)


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        (GOOD, True, True),
        (f"{GOOD}<|im_end|>\n<|endoftext|>", True, True),
        ("<think>\n2 + 2\n</think>\n\n<answer>\n4\n</answer>", True, True),
        ("2 + 2</think><answer>4</answer>", False, True),
        ("<answer>4</answer><think>2</think>", True, False),
        (f"{GOOD} Hope this helps!", True, False),
        ("<think>a</think> b <answer>4</answer>", True, False),
        ("<think>a<think>b</think><answer>4</answer>", True, False),
        ("<think>a</think><answer><answer>4</answer>", True, False),
        ("<think>a</think><answer>\u200b\n\ufeff</answer>", True, False),
        ("<think>a</think><answer>👩\u200d🔬</answer>", True, True),
        ("<think>a<answer>4</answer></think>", True, False),
        ("<think>a</think>", False, False),
        ("<think>a</think><answer>4", False, False),
        ("</think><think><answer>4</answer>", False, False),
    ],
)
async def test_loose_and_strict(text, loose, strict):
    assert await kept(ThinkFormatReward(), text) is loose
    assert await kept(ThinkFormatReward(mode="strict"), text) is strict
    assert compute_format_reward([text, ""]) == [float(loose), 0.0]


@pytest.mark.parametrize(
    ("think_opened", "whole", "rest"), [(None, True, True), (False, True, False), (True, True, True)]
)
async def test_the_prompt_may_have_opened_the_thought(think_opened, whole, rest):
    think = ThinkFormatReward(mode="strict", think_opened=think_opened)
    tools = ToolCallFormatReward(think_opened=think_opened)
    for reward in (think, tools):
        assert await kept(reward, GOOD) is whole
        assert await kept(reward, GOOD.removeprefix("<think>")) is rest


async def test_rolls_scale_is_zero_and_minus_one():
    reward = ThinkFormatReward(mode="strict", passed=0.0, failed=-1.0)
    assert reward.bounds == (-1.0, 0.0)
    results = [await reward.grade(Response(text)) for text in (GOOD, "4")]
    assert [(result.reward, result.score) for result in results] == [(0.0, 1.0), (-1.0, 0.0)]


@pytest.mark.parametrize(
    ("text", "fits", "calls"),
    [
        (f"<think>a</think>{CALL}", True, 1),
        (f"a</think>{CALL}", True, 1),
        (GOOD, True, 0),
        (f"{GOOD}{CALL}", False, 0),
        (f"<think>a</think>{CALL}<answer>4</answer>", False, 0),
        (CALL, False, 0),
        (f"<think>a</think>{CALL} text", False, 0),
        (f"<think>a {CALL}</think>", False, 0),
        ('<think>a</think><tool_call>{"name": "\u200b", "arguments": {}}</tool_call>', False, 0),
        ('<think>a</think><tool_call>{"name": "\\u200b", "arguments": {}}</tool_call>', False, 0),
        ("<think>a</think><tool_call>{}</tool_call>", False, 0),
        ('<think>a</think><tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>', False, 0),
        ('<think>a</think><tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', False, 0),
        ('<think>a</think><tool_call>{"name": "f", "arguments": {"x": 1' + "0" * 5000 + "}}</tool_call>", False, 0),
        (f"<think>a</think>{CALL}<tool_call>no</tool_call>", False, 1),
        ("<think>a</think><tool_call>" + "[" * 8000 + "</tool_call>", False, 0),
    ],
)
async def test_tool_calls(text, fits, calls):
    result = await ToolCallFormatReward().grade(Response(text))
    assert result.reward == result.score == float(fits)
    assert result.components["tool_calls"] == calls
    assert bool(result.feedback) is not fits


async def test_a_long_tool_call_is_read_in_a_thread_and_the_same():
    call = '<tool_call>{"name": "write", "arguments": {"text": "' + "x" * 50_000 + '"}}</tool_call>'
    for text, fits in ((f"<think>a</think>{call}", True), (f"<think>a</think>{call}!", False)):
        assert await kept(ToolCallFormatReward(), text) is fits


@pytest.mark.parametrize(
    "text", ["<think>" * 50_000, "<think></think>" * 20_000, "<answer>" * 50_000, "<" * 10**6, CALL * 9000]
)
async def test_hostile_texts_cost_little_and_fail(text):
    started = time.process_time()
    assert not await kept(ThinkFormatReward(mode="strict"), text)
    assert not await kept(ThinkFormatReward(), text)
    assert not await kept(ToolCallFormatReward(), text)
    assert time.process_time() - started < 30.0  # some 20 ms; quadratic time would take minutes
