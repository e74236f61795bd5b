"""A process that crashes or blocks for good is a problem that `agentenv check` names, not its silent end."""

import json
import os
import subprocess
import sys

import pytest

ENV = """
import ctypes, re
from agentenv import AgentInstance, StepResult
class Agent(AgentInstance):
    async def step(self, states):
        {}
        return StepResult(terminated=True)
"""


def checked(folder, line, *flags):
    (folder / "agent.py").write_text(ENV.format(line))
    command = [sys.executable, "-m", "agentenv.cli", "check", "agent.py:Agent", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no child process is forked here")
@pytest.mark.parametrize(
    ("line", "action"),
    [
        ('re.match(r"(w|w)*$", "w" * 99 + "!")', "I do"),
        ('re.fullmatch(r"[\\d*]+", states["action_text"]) and eval(states["action_text"])', "9**9**9"),
    ],
    ids=["a pattern", "a power"],
)
def test_a_call_that_holds_the_interpreter_is_named_with_its_action(line, action, tmp_path):
    done = checked(tmp_path, line, "--step_timeout_s", "1")
    first, problem, total = done.stdout.splitlines()
    assert done.returncode == 1
    assert first.startswith("✗ contract")
    assert problem.startswith(
        f"  agent.py:6: Agent.step: expected an answer within 1 s, got none after the action '{action}"
    )
    assert total == "agent.py:Agent: 1 contract error; the properties after it were not checked"


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no child process is forked here")
def test_a_crash_is_named_with_its_signal_and_the_stacks_of_its_threads(tmp_path):
    done = checked(tmp_path, "ctypes.string_at(0)", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert told["problems"][0]["line"] == 6
    assert told["problems"][0]["got"].startswith("its end by SIGSEGV after the action")
    assert [one["state"] for one in told["properties"]] == ["broken"]
    assert "Segmentation fault" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("line", "code"), [("pass", 0), ("raise ValueError", 1)])
def test_a_process_that_ends_by_itself_keeps_its_exit_code(line, code, tmp_path):
    assert checked(tmp_path, line, "--quick").returncode == code
