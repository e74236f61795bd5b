"""What a problem says to do fits its cause: a missing key is named, and an action is blamed only if it is at fault."""

import subprocess
import sys
import threading

import pytest

from agentenv._util.calls import StepTimeout
from agentenv.core.agent import AgentInstance
from agentenv.testing.conformance.problems import exception_problem, read_message
from agentenv.testing.conformance.reach import recorded_instructions
from tests.drivers import command

AGENT = """
from agentenv import AgentInstance, StepResult
class Agent(AgentInstance):
    async def step(self, states):
        metadata = states["metadata"]
        {line}
        return StepResult(terminated=True)
"""
BLAME = "Handle every action"
SERVICE = "If a service failed, raise agentenv.errors.InfraError from it: the episode runs again. It happens with every"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('said = states["action"]', "`states` has no 'action'. It has action_ids, action_text,"),
        ('tests = states["metadata"]["tests"]', "The task has no metadata: name rows that have it with --data; in"),
        ('tests = metadata.get("tests") + 1', "It happens with every action. The task has no metadata: name rows that"),
        ('found = {}["x"]', "It happens with every action."),
        ("StepResult().reward += 0.1", "It is frozen: return a copy that `dataclasses.replace` has changed."),
        ('found = {"7": 1}[states["action_text"][:1] or "7"]', BLAME),
        ('import urllib.request; urllib.request.urlopen("http://127.0.0.1:9", timeout=9)', SERVICE),
        ('import urllib.error; raise urllib.error.HTTPError("", 503, "busy", {}, None)', SERVICE),
        (
            'import urllib.error; raise urllib.error.HTTPError("", 404, "gone", {}, None)',
            "It happens with every action.",
        ),
        ('import httpx; raise httpx.RemoteProtocolError("Server disconnected")', SERVICE),
        ('import httpx; httpx.Response(500, request=httpx.Request("GET", "http://a")).raise_for_status()', SERVICE),
        ('import httpx; httpx.Response(200, text="<html>").json()', SERVICE),
        ('import json; json.loads("<html>")', "It happens with every action."),
        ("raise TimeoutError", SERVICE),
        ("import subprocess; raise subprocess.TimeoutExpired([], 1)", "It happens with every action."),
        (
            'if (said := states["action_text"]) and not said.strip(".,!?"): return StepResult(reward=float("nan"))',
            "StepResult.reward: a finite number, got nan",
        ),
        ('found = 1 / (len(states["action_text"]) - 4_999)', "no contract errors"),
        ('found = 1 / (len(states["action_text"]) - 5_000)', BLAME),
    ],
)
def test_the_advice_fits_the_cause(tmp_path, monkeypatch, capsys, line, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT.format(line=line))
    command(["check", "agent.py", "--label", "7", "--quick"])
    out = capsys.readouterr().out
    assert says in out
    assert (BLAME in out) == (says == BLAME)
    assert (SERVICE in out) == (says == SERVICE)


def test_a_method_that_takes_too_long_is_no_service():
    error = StepTimeout("close: expected an answer within 60 s, got none.")
    assert exception_problem(AgentInstance, "close", error).fix == "Fix it."


def test_a_service_that_fails_in_close_is_to_be_handled_there():
    assert "does not run again" in exception_problem(AgentInstance, "close", ConnectionError("refused")).fix


def test_an_agent_with_its_own_loop_is_told_of_a_service_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("class Own:\n    async def run(self, context):\n        raise ConnectionError\n")
    command(["check", "own.py:Own", "--quick"])
    assert "If a service failed, raise agentenv.errors.InfraError from it" in capsys.readouterr().out


def test_a_column_that_rows_lack_is_named_with_those_that_they_have(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT.format(line='tests = states["metadata"]["tests"]'))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b", "test": "c", "level": 1}\n')
    command(["check", "agent.py", "--data", "rows.jsonl", "--quick"])
    assert "The row has no column 'tests'. Did you mean 'test'? It has level, test." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "parts"),
    [("E.step: expected a number, got 'x'.", ("a number", "'x'", "")),
     ("E.step: expected a number, got 'x'. Convert it.", ("a number", "'x'", "Convert it.")),
     ("E.step: rewards: expected a number, got 'a. b'.", ("rewards: a number", "'a. b'", ""))],
)  # fmt: skip
def test_a_contract_error_is_shown_by_what_it_expected_and_got_with_and_without_a_fix(message, parts):
    assert read_message(message, "E.step") == parts


def test_the_instructions_of_a_thread_with_a_run_of_its_own_are_recorded():
    class Own(threading.Thread):
        def run(self):
            self.has_run = True

    with recorded_instructions([__file__]) as recording:
        thread = Own()
        thread.start()
        thread.join()
    assert Own.run.__code__ in {code for code, _ in recording.seen}


AT_ONCE = """
import sys, threading, time
from agentenv.testing.conformance.reach import recorded_instructions

sys.addaudithook(lambda event, _: time.sleep(0.001) if event == "sys.settrace" else None)
ran = []
with recorded_instructions([]):
    threads = [threading.Thread(target=ran.append, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(ran))
"""


@pytest.mark.long
def test_threads_that_start_at_once_all_run_while_instructions_are_recorded():
    ended = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.stderr) == ("50\n", "")
