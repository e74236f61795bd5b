"""Toolsets: tools of functions and classes, their limits, and an answer to every call that was tried."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv._util import calls
from agentenv._util.calls import bounded
from agentenv._util.task_bound import TaskBoundContext
from agentenv.errors import ConfigError, InfraError
from agentenv.tools.calling import MalformedCall, ToolCall, ToolError, ToolFormat
from agentenv.tools.toolset import Tool, Toolset, shortened


def add(a: int, b: int = 0) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


async def fail(kind: str) -> str:
    """Fail.

    Args:
        kind: How.
    """
    if kind == "cancelled":
        raise asyncio.CancelledError
    raise {"told": ToolError("no luck."), "infra": InfraError("down"), "value": ValueError("odd")}[kind]


def choose(colour: str) -> str:
    """Choose.

    Args:
        colour: Which. (choices: ["red", "green"])
    """
    return colour


async def hang() -> str:
    """Hang."""
    await asyncio.sleep(1000)
    return ""


def call(name, index=0, **arguments):
    return ToolCall(name, arguments, f"c{index:08}", "")


async def said(tools, *calls):
    return [message["content"] for message in (await tools.answer(calls)).messages]


@asynccontextmanager
async def begun(*sources, **options):
    tools = await Toolset(*sources, **options).begin()
    try:
        yield tools
    finally:
        await tools.aclose()


# --- functions --------------------------------------------------------------------------------------------------------


async def test_an_error_in_a_call_is_its_answer_and_counted():
    broken = ToolFormat().parse("<tool_call>{").items[0]
    items = [call("add", a=1), call("sub"), call("add", c=1), call("fail", kind="value"), call("fail", kind="told")]
    async with begun(add, fail) as tools:
        answers = await tools.answer([*items, broken])
    contents = [message["content"] for message in answers.messages]
    assert contents[0] == "1"
    assert contents[1].startswith("Error: unknown tool 'sub'. Tools: add, fail.")
    assert contents[2].startswith(
        "Error: wrong arguments for add: got an unexpected keyword argument 'c'. It takes (a:"
    )
    assert contents[3:5] == ["Error: ValueError: odd", "Error: no luck."]
    assert contents[5].startswith("Error: this call cannot be read")
    assert [r.problem for r in answers.results] == ["", "unknown", "arguments", "raised", "raised", "malformed"]
    assert answers.info == {"num_calls": 5.0, "num_errors": 4.0, "num_malformed": 1.0, "num_not_run": 0.0}


async def test_a_choice_that_a_docstring_names_is_the_only_one():
    async with begun(choose) as tools:
        found = await said(tools, call("choose", colour="blue"))
    assert found == ["Error: wrong arguments for choose: colour must be one of 'red', 'green', got 'blue'."]


async def test_a_call_that_cancels_itself_is_reported_and_the_others_have_their_results():
    async with begun(add, fail) as tools:
        found = await said(tools, call("fail", kind="cancelled"), call("add", a=1))
    assert found == ["Error: asyncio.exceptions.CancelledError", "1"]


async def test_calls_start_as_written_and_plain_ones_run_one_after_another():
    ran, meeting = [], asyncio.Barrier(2)

    def plain(n: int, among: list[int] = []) -> None:  # noqa: B006 - reading a list takes more turns of the loop
        """Note.

        Args:
            n: Which.
            among: Others.
        """
        ran.append(f"plain {n} begins")
        time.sleep(0.01)
        ran.append(f"plain {n} ends")

    async def waits(n: int) -> None:
        """Meet.

        Args:
            n: Which.
        """
        ran.append(f"waits {n} begins")
        await asyncio.wait_for(meeting.wait(), 30)

    async with begun(plain, waits) as tools:
        items = [call("waits", n=0), call("plain", 1, n=1, among=[1]), call("plain", 2, n=2), call("waits", 3, n=3)]
        await said(tools, *items)
    assert ran[0] == "waits 0 begins"
    assert [each for each in ran if "plain" in each] == [
        f"plain {n} {does}" for n in (1, 2) for does in ("begins", "ends")
    ]
    assert ran.index("plain 2 begins") < ran.index("waits 3 begins")


async def test_no_plain_tool_starts_beside_one_that_exceeded_its_limit(monkeypatch):
    monkeypatch.setattr(calls, "_CANCEL_GRACE_S", 0.01)
    over, ran = threading.Event(), []

    def wait() -> None:
        """Wait."""
        over.wait(30)

    def note() -> None:
        """Note."""
        ran.append("plain")

    async def go_on() -> str:
        """Go on."""
        return "went on"

    async with begun(wait, note, go_on, timeout_s=0.05) as tools:
        answers = await tools.answer([call("wait"), call("note", 1), call("go_on", 2)])
    over.set()
    assert [result.content for result in answers.results] == [
        "Error: wait returned no result within 0.05 s.", "Error: not run: wait has not ended.", "went on",
    ]  # fmt: skip
    assert ran == []
    assert answers.info["num_not_run"] == 1.0


async def test_a_plain_function_that_returns_an_awaitable_blocks_no_other_while_it_is_awaited():
    meeting = asyncio.Barrier(2)

    async def meet() -> str:
        await asyncio.wait_for(meeting.wait(), 30)
        return "met"

    def wrapped() -> object:
        """Meet."""
        return meet()

    def hung() -> object:
        """Hang."""
        return hang()

    async with begun(wrapped, add) as tools:
        assert await said(tools, call("wrapped"), call("wrapped", 1)) == ["met", "met"]
    async with begun(hung, add, timeout_s=0.05) as tools:
        assert (await said(tools, call("hung"), call("add", 1, a=1)))[1] == "1"


async def test_plain_tools_have_one_limit_together_which_is_less_than_the_rest_of_the_step():
    def work() -> str:
        """Work."""
        time.sleep(0.15)
        return "worked"

    async with begun(work, timeout_s=0.4) as tools:
        found = await said(tools, *[call("work", n) for n in range(8)])
    assert found[0] == "worked"
    assert found[-1].startswith("Error: not run: ")
    async with begun(work) as tools:
        found = await bounded(said, tools, *[call("work", n) for n in range(8)], limit_s=0.9)
    assert found[0] == "worked"
    assert found[-1].startswith("Error: not run: ")


async def test_the_smaller_of_a_tools_and_the_toolsets_limit_counts_and_the_default_is_30_seconds():
    tools = [Tool.of(hang, timeout_s=60), Tool.of(add, timeout_s=0.5), choose]
    for options, expected in (({}, [60, 0.5, 30.0]), ({"timeout_s": 2}, [2, 0.5, 2])):
        async with begun(*tools, **options) as opened:
            assert [tool.timeout_s for tool in opened.tools.values()] == expected
    async with begun(Tool.of(hang, timeout_s=60), add, timeout_s=0.05) as opened:
        found = await said(opened, call("hang"), call("add", a=2))
        assert found == ["Error: hang returned no result within 0.05 s.", "2"]


# --- limits -----------------------------------------------------------------------------------------------------------


async def test_calls_over_the_limit_of_a_turn_or_an_episode_are_not_run():
    run = []

    def note(n: int) -> str:
        """Note.

        Args:
            n: What.
        """
        run.append(n)
        return str(n)

    async with begun(note, max_calls=3, max_calls_per_turn=2) as tools:
        first = await tools.answer([call("note", i, n=i) for i in range(3)])
        broken = MalformedCall("x", "none", "c00000009")
        second = await tools.answer([call("note", n=3), broken, call("note", n=4)])
    assert sorted(run) == [0, 1, 3]
    over = "Error: not run: no more than 2 calls can be made at a time."
    assert [r.content for r in first.results] == ["0", "1", over]
    assert [r.problem for r in second.results] == ["", "malformed", "limit"]
    assert "no more than 3 calls" in second.results[2].content
    assert (first.calls_left, second.calls_left) == (1, 0)
    assert second.info == {"num_calls": 1.0, "num_errors": 0.0, "num_malformed": 1.0, "num_not_run": 1.0}


@given(st.text(max_size=80), st.integers(1, 90))
@settings(max_examples=100, deadline=None)
def test_a_shortened_text_keeps_its_ends_and_says_how_much_is_gone(text, most):
    short = shortened(text, most)
    if len(text) <= most:
        assert short == text
    else:
        head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
        assert short == f"{head}\n[… {len(text) - most} characters left out …]\n{tail}"


async def test_a_huge_result_is_cut_in_the_middle_of_any_kind():
    def huge(kind: str) -> object:
        """Much.

        Args:
            kind: What.
        """
        return {"text": "x" * 10**6, "list": list(range(10**5)), "error": None}[kind]

    async with begun(huge, max_chars=100) as tools:
        found = await said(tools, call("huge", kind="text"), call("huge", kind="list"), call("huge", kind="no" * 999))
    assert all(len(text) < 150 and "characters left out" in text for text in found)
    assert found[1].startswith("[0, 1, 2")


# --- sources ----------------------------------------------------------------------------------------------------------


class Counter:
    """Counts; one for each episode."""

    closed = 0

    def __init__(self):
        self.number = 0

    def count(self) -> int:
        """Count."""
        self.number += 1
        return self.number

    async def close(self):
        type(self).closed += 1


async def test_a_class_is_made_for_each_episode_and_closed():
    Counter.closed = 0
    toolset = Toolset(Counter, add)
    one, other = await toolset.begin(), await toolset.begin()
    assert list(one.tools) == ["count", "add"]
    assert [await said(one, call("count")), await said(one, call("count"))] == [["1"], ["2"]]
    assert await said(other, call("count")) == ["1"]
    await one.aclose()
    await one.aclose()
    assert Counter.closed == 1
    await other.aclose()
    assert Counter.closed == 2


async def test_two_tools_of_one_name_are_refused_and_named():
    with pytest.raises(ConfigError, match=r"got 'add' from \S*test_toolsets:add and from \S*test_toolsets:add"):
        Toolset(add, add)


async def test_a_toolset_is_a_source_of_another_with_its_subset():
    inner = Toolset(add, fail, Counter, allowed=["add", "count"], timeout_s=7)
    async with begun(inner, hang) as tools:
        assert list(tools.tools) == ["add", "count", "hang"]
        assert [tool.timeout_s for tool in tools.tools.values()] == [7, 7, 30.0]
    with pytest.raises(ConfigError, match="different names, got 'add'"):
        await Toolset(inner, add).begin()


async def test_an_allowed_tool_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"among \['add'\], got \['sub'\]"):
        await Toolset(add, allowed=["sub"]).begin()


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"max_calls": -1}, {"max_chars": 10.5}, {"allowed": "add"}])
def test_invalid_limits_are_refused(options):
    with pytest.raises(ConfigError, match=f"Toolset.{next(iter(options))}: expected"):
        Toolset(add, **options)


async def test_a_source_that_cannot_open_closes_those_before_it():
    class Broken:
        @asynccontextmanager
        async def open(self):
            raise InfraError("down")
            yield

    Counter.closed = 0
    with pytest.raises(InfraError, match="down"):
        await Toolset(Counter, Broken()).begin()
    assert Counter.closed == 1


# --- held -------------------------------------------------------------------------------------------------------------


async def test_what_is_held_is_left_where_the_opener_is_cancelled_at_that_moment():
    left = []

    @asynccontextmanager
    async def manager():
        try:
            yield "value"
        finally:
            left.append(True)

    held = TaskBoundContext(manager())
    opening = asyncio.create_task(held.open())
    held._value.add_done_callback(lambda _: opening.cancel())
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert left == [True]
    assert held.task.done()


async def test_what_breaks_down_while_it_is_held_ends_its_task_and_is_reported_when_it_is_closed():
    @asynccontextmanager
    async def manager():
        async with asyncio.TaskGroup() as group:
            group.create_task(breaks())
            yield "value"

    async def breaks():
        await asyncio.sleep(0)
        raise OSError("gone")

    held = TaskBoundContext(manager())
    assert await held.open() == "value"
    await asyncio.wait({held.task})
    assert isinstance((await held.aclose()).exceptions[0], OSError)


def test_a_schema_by_hand_needs_no_type_hints():
    tool = Tool("any", {"type": "function", "function": {"name": "any"}}, lambda **given: json.dumps(given))

    async def run():
        async with begun(tool) as tools:
            return await said(tools, call("any", x=[1]))

    assert asyncio.run(run()) == ['{"x": [1]}']
