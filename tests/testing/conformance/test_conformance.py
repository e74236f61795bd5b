"""Each property finds the environment that breaks it, names its line, and says nothing of any other."""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from typing import ClassVar

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult, Task
from agentenv.episode.failures import FAILED_SERVICE
from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.reach import filled
from agentenv.testing.conformance.suite import PROPERTIES, check_property, make_context, run_suite
from agentenv.testing.tool_calls import call_text
from agentenv.tools import answer_calls, schema_of
from tests.testing.conformance.broken_envs import ALSO, BROKEN, HEAD, SLOW

ROWS = "".join(f'{{"prompt": "Say {n}.", "label": "{label}"}}\n' for n, label in enumerate(["a", "b", "c", "bad", "d"]))


def write(folder, body):
    text = HEAD + textwrap.dedent(body)
    (folder / "agent.py").write_text(text)
    (folder / "agent.py.jsonl").write_text(ROWS)
    return next((number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# HERE")), None)


def checked(target, *args, name, **options):
    """The outcome of one property."""
    return check_property(make_context(ConformanceOptions(target, *args, **options)), name)


def double(n: int) -> int:
    """Double a number.

    Args:
        n: The number.
    """
    return 2 * n


def end_processes(pids):
    """End those that are left, and have what held them collected here, not in the middle of another test."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for thread in threading.enumerate():
        if pids and "waitpid" in thread.name:
            thread.join()
    if pids:
        gc.collect()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the process that one leaves
@pytest.mark.parametrize("kind", BROKEN)
def test_a_breach_of_a_property_is_named_with_its_line_and_breaks_no_other(kind, tmp_path, monkeypatch):
    name, body, where, expected = BROKEN[kind]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentenv.testing.conformance.cancellation._SETTLE_S", 0.1)
    line = write(tmp_path, body)
    context = make_context(ConformanceOptions("agent.py:Agent"))
    skip = {} if name == "portability" else {"portability": "it starts a process"}
    outcomes = run_suite(context, only=(name, "rewards", "ends") if kind in SLOW else (), skip=skip)
    module = sys.modules[context.agent_cls.__module__]
    end_processes(getattr(module, "PIDS_CACHE", ()))
    broken = {one.name: one for one in outcomes if one.state == "broken"}
    assert set(broken) == {name} | ALSO.get(kind, set()), [str(one) for one in broken.values()]
    (problem,) = broken[name].problems
    assert (problem.file, problem.line, problem.where) == ("agent.py", line, f"Agent.{where}"), str(problem)
    assert expected in problem.expected
    assert problem.property == name
    assert "\n" not in str(problem)


@pytest.mark.long
@pytest.mark.parametrize("fails", ["partial(exec, \"raise InfraError('down')\")", "partial(os._exit, 3)"])
def test_other_rows_that_fail_do_not_keep_portability_from_an_answer(fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = f"""
        from functools import partial
        class Agent(Two):
            datasets = {{"mine": f"{{__file__}}.jsonl"}}
            async def step(self, states):
                what = states["label"], os.environ.get("PYTHONHASHSEED")  # the seed of the last process
                {{("c", "3"): {fails}}}.get(what, int)()
                return StepResult(reward=1.0, terminated=True)
        """
    write(tmp_path, f"from agentenv.errors import InfraError{textwrap.dedent(body)}")
    outcome = checked("agent.py:Agent", name="portability")
    assert outcome.state == "held", str(outcome)


class Text(AgentInstance):
    """Begins with a text."""

    async def reset(self, states):
        return {"observation": f"New: {states['observation'][0]['content']}"}

    async def step(self, states):
        return StepResult(score=0.0, terminated=True)


def test_a_text_of_reset_for_a_task_of_messages_is_noted():
    outcome = checked(Text, name="feedback")
    (note,) = outcome.notes
    assert outcome.state == "held"
    assert "Text.reset: expected messages, as the task has, got the text 'New: " in str(note)
    assert "which gets no chat template" in note.got


class Races(AgentInstance):
    """Differs from episode to episode after an action of two calls, as its right one is."""

    count_cache = itertools.count()

    async def step(self, states):
        several = states["action_text"].count("<tool_call>") > 1
        return StepResult(score=1.0, info={"n": several and next(self.count_cache)}, terminated=True)

    def gold(self, states):
        return 2 * '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def test_calls_that_run_at_the_same_time_are_named_where_episodes_of_several_calls_differ():
    (problem,) = checked(Races, name="determinism").problems
    assert "`async def` tools that one action calls run at the same time" in problem.fix


@pytest.mark.long
def test_a_file_that_a_class_opens_for_the_step_of_another_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base_of_shop.py").write_text(HEAD)
    (tmp_path / "shop.py").write_text(SHOP)
    (problem,) = checked("shop.py:Shop", name="isolation").problems
    assert (problem.file, problem.line) == ("shop.py", 5)
    assert problem.got == "'shop.db', which episodes of all seeds write"


SHOP = """\
import sqlite3
from base_of_shop import Two
class Shop(Two):
    async def reset(self, states):
        self.db = sqlite3.connect("shop.db", isolation_level=None, check_same_thread=False)
        self.db.execute("CREATE TABLE IF NOT EXISTS sold (task TEXT)")
        self.db.execute("INSERT INTO sold VALUES ('a')")
        return states
    def close(self):
        if hasattr(self, "db"):
            self.db.close()
"""


@pytest.mark.long
@pytest.mark.parametrize(("max_turns", "broken"), [(None, {"contract", "ends", "cancel"}), (6, {"cancel"})])
def test_an_episode_without_an_end_needs_a_limit_of_the_class_and_hides_no_other_breach(max_turns, broken):
    class Talks(AgentInstance):
        open_cache: ClassVar[list] = []

        async def step(self, states):
            self.open_cache.append(open(os.devnull))  # noqa: SIM115
            return StepResult("More.")

    Talks.max_turns = max_turns
    skip = {"portability": "it starts a process", "pickling": "a local class has no name"}
    outcomes = run_suite(make_context(ConformanceOptions(Talks)), skip=skip)
    for file in Talks.open_cache:
        file.close()
    assert {one.name for one in outcomes if one.state == "broken"} == broken
    assert not [one for one in outcomes if one.reason.startswith("fix `contract`")]


class Desk(AgentInstance):
    """Ends only with a call of `submit`, or at the limit of a run."""

    def submit(self, answer: str) -> str:
        """Submit the answer.

        Args:
            answer: The answer.
        """
        self.answer = answer
        return "Submitted."

    answer = None

    async def reset(self, states):
        return {**states, "tools": [schema_of(self.submit)]}

    async def step(self, states):
        if not states["tool_calls"].items:
            return StepResult([{"role": "user", "content": "Call a tool."}])
        replies = await answer_calls(states["tool_calls"], [self.submit])
        right = float(self.answer == states["label"])
        return StepResult(replies, reward=right, score=right, terminated=self.answer is not None)


class TextDesk(Desk):
    """The same, with the tools in words."""

    async def reset(self, states):
        return states

    async def step(self, states):
        if not states["tool_calls"].items:
            return StepResult("Call a tool.")
        return StepResult(terminated=True)


class EveryCall(Desk):
    """Answers whatever is called, for as long as it is called."""

    async def step(self, states):
        return StepResult(await answer_calls(states["tool_calls"], [self.submit]) or "Call a tool.")


@pytest.mark.long
@pytest.mark.parametrize("env", [Desk, TextDesk, EveryCall])
def test_an_environment_with_tools_may_leave_the_end_to_the_limit_of_a_run(env):
    context = make_context(ConformanceOptions(env))
    outcomes = {name: check_property(context, name) for name in ("contract", "ends", "truncation")}
    assert {one.state for one in outcomes.values()} == {"held"}, [*map(str, outcomes.values())]
    assert [len(outcomes[name].notes) for name in ("ends", "truncation")] == [1, 0]
    assert "  note: " in str(outcomes["ends"])
    assert "Set `max_turns` in the class" in str(outcomes["ends"].notes[0])


@pytest.mark.long
def test_the_end_of_an_environment_with_tools_is_demanded_with_the_flag_and_set_by_the_class():
    assert checked(Desk, max_turns=5, name="ends").state == "broken"
    limited = type("Limited", (Desk,), {"max_turns": 5, "__module__": __name__})
    outcome = checked(limited, name="ends")
    assert (outcome.state, outcome.notes) == ("held", [])


def test_every_property_has_an_environment_that_breaks_it():
    assert {name for name, *_ in BROKEN.values()} == set(PROPERTIES)


def test_a_policy_that_is_given_is_tried_too():
    class Boo(AgentInstance):
        async def step(self, states):
            assert states["action_text"] != "boo"
            return StepResult(terminated=True)

    assert checked(Boo, name="rewards").state == "held"
    outcome = checked(Boo, policy=lambda prompt: "boo" if "6 times 7" in prompt else "", name="rewards")
    assert [problem.where for problem in outcome.problems] == ["Boo.step"]


def test_an_argument_that_is_not_json_or_cannot_be_pickled_is_named():
    class Takes(AgentInstance):
        def __init__(self, one=None, other=None):
            self.one, self.other = one, other

        async def step(self, states):
            return StepResult(terminated=True)

    outcome = checked(Takes, {"one": {1: 2}, "other": lambda: 1}, name="pickling")
    expected = {problem.expected for problem in outcome.problems}
    assert expected == {
        "a class that can be pickled", "an argument 'one' that is JSON", "an argument 'other' that can be pickled",
    }  # fmt: skip


def test_an_argument_that_episodes_change_is_named():
    outcome = checked(Eats, {"words": ["a"] * 99}, name="mutation")
    (problem,) = outcome.problems
    assert problem.expected == "the argument 'words' unchanged"


class Eats(AgentInstance):
    def __init__(self, words):
        self.words = words

    async def step(self, states):
        self.words.pop()
        return StepResult(terminated=True)


class Shares(AgentInstance):
    """What all episodes share belongs to an event loop; the counter of the class is nobody's business."""

    num_made = 0
    loop_cache = None

    async def reset(self, states):
        cls = type(self)
        cls.num_made += 1
        cls.loop_cache = cls.loop_cache or asyncio.get_running_loop()
        return states

    async def step(self, states):
        future = type(self).loop_cache.create_future()  # as the connections of a client
        type(self).loop_cache.call_soon(future.set_result, None)
        await future
        return StepResult("Again.", terminated=states["turn_index"] == 1)


@pytest.mark.long
def test_what_episodes_share_stays_on_one_event_loop_and_may_count():
    outcomes = run_suite(make_context(ConformanceOptions(Shares)))
    assert [str(one) for one in outcomes if one.state == "broken"] == []
    assert Shares.loop_cache.is_closed()


class Crowded(AgentInstance):
    """Fails where many are at work."""

    at_work_cache: ClassVar[list[int]] = []
    error = RuntimeError

    async def step(self, states):
        self.at_work_cache.append(1)
        await asyncio.sleep(0.001)
        try:
            if len(self.at_work_cache) > 1:
                raise self.error("too many")
        finally:
            self.at_work_cache.pop()
        return StepResult("Again.", terminated=states["turn_index"] == 1)


class CrowdedService(Crowded):
    error = ConnectionError


def test_a_failure_only_among_other_episodes_is_reported_by_its_error():
    (problem,) = checked(Crowded, name="isolation").problems
    assert problem.got.startswith("error: None alone, 'env error in step: RuntimeError: too many' among 32")
    assert "or open a session per episode, where a service keeps it" in problem.fix
    assert checked(CrowdedService, name="isolation").problems[0].fix == FAILED_SERVICE


class Throttled(AgentInstance):
    """A service behind it is too busy each fifth time."""

    count_cache = itertools.count()

    async def step(self, states):
        if next(self.count_cache) % 5 == 4:
            raise TimeoutError("busy")
        return StepResult(terminated=True)


def test_episodes_that_differ_by_an_error_of_a_service_are_told_of_it():
    assert {problem.fix for problem in checked(Throttled, name="determinism").problems} == {FAILED_SERVICE}


@pytest.mark.parametrize(("holds", "state"), [(True, "broken"), (False, "held")])
def test_what_an_episode_holds_between_its_turns_is_held_while_others_act(holds, state):
    class Shelf(AgentInstance):
        lock, has = threading.Lock(), False

        def step(self, states):
            if states["turn_index"]:
                return StepResult(terminated=True)
            self.has = self.lock.acquire(timeout=0.5)
            said = "Written." if self.has else "Locked."
            if not holds:
                self.close()
            return StepResult(said)

        def close(self):
            if self.has:
                self.lock.release()
            self.has = False

    assert checked(Shelf, name="isolation").state == state


def odd_tool(word: str) -> object:
    """Look a word up.

    Args:
        word: The word.
    """
    return "right" + 1 if word == "bug" else {"object": object()}[word]


@pytest.mark.parametrize(
    ("word", "state", "expected"),
    [
        ("object", "broken", ["odd_tool: text, numbers, lists or dicts"]),
        ("bug", "held", ["no exception of the tool odd_tool"]),
        ("nothing", "held", []),  # a KeyError may be meant for the policy
    ],
)
def test_a_tool_that_fails_for_the_gold_call_is_named(word, state, expected):
    class Asks(AgentInstance):
        async def step(self, states):
            if states["tool_calls"].items:
                return StepResult(await answer_calls(states["tool_calls"], [odd_tool]))
            return StepResult(score=0.0, terminated=True)

        def gold(self, states):
            return "Done." if states["turn_index"] else call_text("odd_tool", {"word": word})

    outcome = checked(Asks, name="feedback")
    found = [each.expected for each in (*outcome.problems, *outcome.notes)]
    assert (outcome.state, found) == (state, [*expected, "gold actions whose calls are answered"])


def test_the_last_word_of_an_example_is_replaced_whole():
    actions = filled("Go.", ["ten"], ["move 3.5"])
    assert {"move 1", "move ten"} <= {*actions}
    assert "move 3.1" not in actions


def test_what_is_filled_once_for_each_action_or_argument_is_noted_and_what_is_loaded_once_is_not(tmp_path):
    (tmp_path / "agent.py").write_text(FILLED)
    outcome = checked(str(tmp_path / "agent.py"), name="isolation")
    assert (outcome.state, [f"{note.where}: {note.expected}" for note in outcome.notes]) == (
        "held",
        [
            "Agent.found: a class attribute that episodes do not change",
            "Agent.step: `SAID` of the module unchanged by episodes",
        ],
    )


FILLED = """
import functools, re
from agentenv import AgentInstance, StepResult
from agentenv.tools import answer_calls, schema_of
SAID, CACHE, ROWS, LEVELS = {}, {}, {}, {}
def find(words: str) -> str:
    \"\"\"Find words.

    Args:
        words: The words.
    \"\"\"
    return Agent.found.setdefault(words, "none")
@functools.lru_cache
def size(text):
    return len(text)
class Agent(AgentInstance):
    max_turns = 3
    found = {}
    async def reset(self, states):
        ROWS.update(loaded=[1, 2])
        LEVELS.setdefault(states["label"], [3])
        return {**states, "tools": [schema_of(find)]} if states["renders_tools"] else states
    async def step(self, states):
        if states["tool_calls"].items:
            return StepResult(await answer_calls(states["tool_calls"], [find]))
        text = states["action_text"]
        CACHE[text] = re.compile(re.escape(text)), size(text)
        SAID.setdefault(text, states["turn_index"])
        return StepResult("Noted.", terminated=SAID[text] < 0)
"""


@pytest.mark.parametrize("renders", [True, False])
def test_tools_are_called_whether_or_not_the_template_renders_them(renders):
    """An environment may need a template that renders tools, or describe them in words for another."""
    seen, schema = [], schema_of(double)

    class Tools(AgentInstance):
        async def reset(self, states):
            if not (renders or states["renders_tools"]):
                return states
            return {**states, "tools": [schema]}

        async def step(self, states):
            if states["tool_calls"].items:
                seen.extend(states["tool_calls"].items)
                return StepResult(await answer_calls(states["tool_calls"], {"double": double}))
            return StepResult(score=0.0, terminated=True)

    others = [name for name in PROPERTIES if name not in ("portability", "pickling", "data")]  # of a class in a module
    outcomes = run_suite(make_context(ConformanceOptions(Tools)), only=others)
    assert [str(one) for one in outcomes if one.state != "held"] == []
    notes = [note.expected for note in outcomes[0].notes]
    assert notes == ["no tools for a chat template that renders none"] * renders
    names = {call.name for call in seen}
    assert {"double", "no_such_tool"} <= names
    assert {"n": 1} in [getattr(call, "arguments", None) for call in seen]


def test_an_environment_may_call_its_own_methods():
    """A plain method that calls another must reach it, not a coroutine that nothing awaits."""

    class Plain(AgentInstance):
        num_open = 0

        def reset(self, states):
            self.num_open = 1
            return states

        def step(self, states):
            self.close()
            return StepResult(reward=float(self.num_open), terminated=True)

        def close(self):
            self.num_open = 0

    outcomes = run_suite(make_context(ConformanceOptions(Plain)), only=("rewards", "ends", "close", "cancel"))
    assert [str(one) for one in outcomes if one.state == "broken"] == []


def test_a_property_that_takes_long_is_reported_while_it_continues(monkeypatch):
    monkeypatch.setattr("agentenv.testing.conformance.call_watch.NOTIFY_CHECK_EVERY_S", 0.0)
    told = []
    check_property(make_context(ConformanceOptions(Shares), told.append), "rewards")
    assert re.fullmatch(r"rewards: \d+ s so far\.", told[0])


class Solvable(AgentInstance):
    async def step(self, states):
        if states["action_text"] != "go":
            return StepResult("No.", terminated=True)
        return StepResult("Go on.", terminated=states["turn_index"] == 19)

    async def gold(self, states):
        return "go"


class EndsOnItsLastTurn(AgentInstance):
    max_turns = 3

    async def reset(self, states):
        return {"observation": states["observation"]}

    async def step(self, states):
        return StepResult("Again.", terminated=states["turn_index"] == 2, score=0.0)


@pytest.mark.parametrize("name", ["contract", "ends"])
def test_an_episode_may_end_on_the_last_turn_that_is_allowed(name):
    assert checked(EndsOnItsLastTurn, name=name).state == "held"


def test_a_reset_that_needs_its_states_leaves_no_error_behind(caplog):
    assert checked(EndsOnItsLastTurn, name="close").state == "held"
    gc.collect()
    assert caplog.text == ""


def test_solving_a_task_may_take_more_turns_than_failing_at_it():
    assert checked(Solvable, name="ends").state == "held"


def test_raw_text_that_repeats_what_a_policy_said_may_forge_tokens():
    class Echo(AgentInstance):
        async def step(self, states):
            return StepResult(f"You said {states['action_text']}", terminated=states["turn_index"] == 1)

    assert checked(Echo, name="feedback").state == "held"  # messages protect it
    (problem,) = checked(Echo, task=Task("Say it: ", "x", task_id="t"), name="feedback").problems
    assert problem.expected == "text of a policy that stays text"


def test_rows_of_data_are_tried_in_messages_as_a_run_gives_them():
    assert [task.prompt[0]["role"] for task in make_context(ConformanceOptions("math_retry")).tasks] == ["user", "user"]


def test_rows_of_data_are_tried_as_text_in_a_file_for_openrlhf_as_a_run_gives_them(tmp_path):
    write(
        tmp_path,
        """
        from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
        class Agent(AgentInstanceBase):
            async def reset(self, states, **kwargs):
                return {"observation": states["observation"] + "Room: "}
            async def step(self, states, **kwargs): ...
        class AgentExecutor(MultiTurnAgentExecutor):
            def __init__(self):
                super().__init__(Agent)
    """,
    )
    assert checked(str(tmp_path / "agent.py"), data=str(tmp_path / "agent.py.jsonl"), name="data").problems == []


def test_metadata_that_openrlhf_leaves_out_is_noted_for_its_file_alone(tmp_path):
    write(
        tmp_path,
        """
        from agentenv import AgentExecutor as Executor
        class Agent(AgentInstance):
            async def step(self, states):
                return StepResult(reward=float(states["metadata"].get("bonus", 0)), terminated=True)
        class AgentExecutor(Executor):
            agent_cls = Agent
    """,
    )
    path = str(tmp_path / "agent.py")
    (tmp_path / "more.jsonl").write_text('{"prompt": "p", "label": "l", "metadata": {"bonus": 1}}\n')
    (note,) = checked(path, data=str(tmp_path / "more.jsonl"), name="data").notes
    assert note.got == "'metadata', which is empty in OpenRLHF"
    for target, rows in ((path, "agent.py.jsonl"), (f"{path}:Agent", "more.jsonl")):
        assert checked(target, data=str(tmp_path / rows), name="data").notes == []


def test_an_attribute_of_an_executor_that_is_misspelled_is_noted(tmp_path):
    line = write(
        tmp_path,
        """
        from agentenv import AgentExecutor as Executor
        class Agent(AgentInstance):
            async def step(self, states):
                return StepResult(terminated=True)
        class AgentExecutor(Executor):
            agent_cls = Agent
            rounds, max_retries = 2, 1
            max_retrys = 3  # HERE
    """,
    )
    (note,) = checked(str(tmp_path / "agent.py"), name="contract").notes
    assert (note.line, note.where) == (line, "AgentExecutor.max_retrys")
    assert note.fix == "Did you mean 'max_retries'?"


def test_a_log_of_an_executor_that_no_turn_has_as_a_number_is_noted(tmp_path):
    line = write(
        tmp_path,
        """
        from agentenv import AgentExecutor as Executor
        class Agent(AgentInstance):
            async def step(self, states):
                return StepResult(terminated=True, info={"right": 1.0, "mood": "sad"})
        class AgentExecutor(Executor):
            agent_cls = Agent
            logs = {"right": "last", "rigth": "last", "mood": "last"}  # HERE
    """,
    )
    (note,) = checked(str(tmp_path / "agent.py"), name="rewards").notes
    assert (note.line, note.where, note.got) == (line, "AgentExecutor.logs", "['mood', 'rigth'], which no episode had")


HANGS = {
    "blocks the event loop": "threading.Event().wait(8)  # HERE",
    "never answers": "await asyncio.Event().wait()  # HERE",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", HANGS)
def test_an_action_that_hangs_is_named_and_the_other_properties_are_judged_without_it(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentenv.testing.conformance.call_watch._GRACE_S", 1.5)  # more than a cancelled call is given
    line = write(tmp_path, f"""
        class Agent(Two):
            async def step(self, states):
                if states["action_text"] == "hang":
                    {HANGS[kind]}
                self.asked = states["seed"], random.random()
                return await super().step(states)
    """)  # fmt: skip
    context = make_context(ConformanceOptions("agent.py:Agent", actions=["hang"], step_timeout_s=2.0))
    skip = {"portability": "it starts a process", "blocking": "it measures time"}
    outcomes = {one.name: one for one in run_suite(context, skip=skip)}
    (problem,) = outcomes["contract"].problems
    assert (problem.line, problem.expected) == (line, "an answer within 2 s")
    assert problem.got == "none after the action 'hang'"
    broken = [one.name for one in outcomes.values() if one.state == "broken"]
    assert broken == ["contract", "determinism"], [str(one) for one in outcomes.values()]
    assert not [one for one in outcomes.values() if one.reason.startswith("fix")]


@pytest.mark.long
def test_a_call_that_blocks_without_any_action_to_avoid_skips_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentenv.testing.conformance.call_watch._GRACE_S", 0.2)
    write(tmp_path, """
        class Agent(Two):
            async def reset(self, states):
                threading.Event().wait(2)
                return states
    """)  # fmt: skip
    context = make_context(ConformanceOptions("agent.py:Agent", step_timeout_s=0.3))
    outcomes = {one.name: one for one in run_suite(context, only=("constructor", "rewards", "ends"))}
    assert outcomes["rewards"].state == "broken"
    assert outcomes["ends"].reason == "fix `rewards` first"


@pytest.mark.long
def test_a_long_sleep_in_async_code_is_named_with_its_seconds_and_action_and_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = write(tmp_path, """
        class Agent(Two):
            async def step(self, states):
                if states["action_text"].startswith("9"):
                    time.sleep(86_400)  # HERE
                return await super().step(states)
    """)  # fmt: skip
    context = make_context(ConformanceOptions("agent.py:Agent"))
    outcomes = run_suite(context, skip={"portability": "it starts a process"})
    (outcome,) = [one for one in outcomes if one.state == "broken"]
    (problem,) = outcome.problems
    assert (outcome.name, problem.line) == ("blocking", line)
    assert problem.got.startswith("time.sleep(86400) after the action '999")


@pytest.mark.long
def test_the_line_of_a_method_that_blocks_is_the_one_that_it_is_at_for_longest_not_the_last_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = """
        import time

        class Agent(Two):
            async def step(self, states):
                for blocks_s in (0.12, 0.02):
                    until = time.thread_time() + blocks_s
                    if blocks_s == 0.12:
                        while time.thread_time() < until: pass  # HERE
                    else:
                        while time.thread_time() < until: pass
                return await super().step(states)
    """
    line = write(tmp_path, body)
    options = ConformanceOptions("agent.py:Agent", policy=["seven"])
    (problem,) = check_property(make_context(options), "blocking").problems
    assert (problem.line, problem.where) == (line, "Agent.step")


def test_time_in_which_a_busy_machine_has_no_core_for_a_call_does_not_block(monkeypatch):
    class Sleeps(AgentInstance):
        async def step(self, states):
            threading.Event().wait(0.07)
            return StepResult(terminated=True)

    monkeypatch.setattr("agentenv.testing.conformance.blocking._waited_for_a_core_s", time.perf_counter)
    options = ConformanceOptions(Sleeps, policy=["seven"])
    assert check_property(make_context(options), "blocking").state == "held"


def test_a_plain_method_may_hold_the_interpreter_in_its_thread():
    class Plain(AgentInstance):
        def step(self, states):
            ctypes.PyDLL(None).usleep(70_000)  # as a sort of many values does
            return StepResult(terminated=True)

    assert checked(Plain, policy=["seven"], name="blocking").state == "held"


def test_a_delay_that_comes_to_another_call_in_each_try_is_the_machines():
    class Delayed(AgentInstance):
        num = 0

        async def step(self, states):
            Delayed.num += 1
            if Delayed.num in (2, 12, 22, 32):  # nine calls a try: never the same one twice
                threading.Event().wait(0.07)
            return StepResult(terminated=True)

    context = make_context(ConformanceOptions(Delayed, policy=["seven"]))
    context.reached = []  # looking for cases would count too
    assert check_property(context, "blocking").state == "held"


COUNTER = """
import time
from agentenv import AgentInstance, StepResult


class Agent(AgentInstance):
    datasets = {"mine": f"{__file__}.jsonl"}

    async def step(self, states):
        verb, _, what = states["action_text"].partition(" ")
        if verb == "close" and what == states["label"][1]:
            return StepResult(f"Closed at {time.time()}.", terminated=states["turn_index"] == 1)
        return StepResult("No.", reward=float(states["action_text"] == " ".join(states["label"])), terminated=True)

    async def gold(self, states):
        return " ".join(states["label"])
"""


@pytest.mark.long
@pytest.mark.parametrize("rows", [range(4, 7), range(3, 24, 4)], ids=["rows in order", "rows in turn"])
def test_a_fault_that_only_gold_actions_of_some_rows_reach_is_found(rows, tmp_path):
    (tmp_path / "counter.py").write_text(COUNTER)
    tasks = [{"prompt": "Go on.", "label": ["close" if row in rows else "count", f"n{row}"]} for row in range(24)]
    (tmp_path / "counter.py.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    outcome = checked(f"{tmp_path}/counter.py:Agent", name="determinism")
    assert "got turns[0].result.observation: 'Closed at " in str(outcome)
