"""`agentenv audit`: flags, exit codes, files, and what cannot be audited."""

import json
import re
import subprocess
import sys

import pytest

from agentenv.cli.main import main

ENV = '''
from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult


class Sum(AgentInstance):
    """A sum."""

    def __init__(self, easy=False):
        self.easy = easy

    async def step(self, states):
        said = states["action_text"]
        right = said == states["label"] or (self.easy and states["label"] in said.split())
        return StepResult(reward=float(right), score=float(right), terminated=True)

    async def gold(self, states):
        return states["label"]
'''
POLICIES = ["--policies", "null", "constant", "enumeration", "gold"]


@pytest.fixture
def target(tmp_path):
    (tmp_path / "sums.py").write_text(ENV)
    rows = [{"id": f"t{n}", "prompt": f"What is {300 + n} + 111?", "label": str(411 + n)} for n in range(5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(tmp_path / "sums.py"), "--data", str(tmp_path / "sums.jsonl")]


EASY = ["--env_kwargs", '{"easy": true}']


@pytest.mark.long
def test_a_sound_environment_exits_with_0_and_a_hackable_one_with_1(target, capsys):
    assert main(["audit", *target, *POLICIES]) == 0
    assert "passed: 0 fail" in capsys.readouterr().out
    assert main(["audit", *target, *EASY, *POLICIES]) == 1
    said = capsys.readouterr().out
    assert "hack-earns:enumeration" in said
    assert "failed: 1 fail" in said


@pytest.mark.long
def test_throttling_is_logged(target, capsys, monkeypatch):
    assert main(["audit", *target, *POLICIES]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("agentenv.cli.audit._PROGRESS_EVERY_S", 0.0)
    assert main(["audit", *target, *POLICIES, "--tasks", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[0].startswith("agentenv audit: 1 of ")
    assert json.loads(said.out)["env"] == target[0]


@pytest.mark.long
def test_what_an_environment_prints_is_counted_and_not_shown(target, tmp_path, capsys):
    path = tmp_path / "sums.py"
    text = f"import os\nimport sys\n{path.read_text()}"
    prints = "        print('a step')\n        os.fstat(sys.stdout.fileno())\n"
    path.write_text(text.replace("        said =", f"{prints}        said =", 1))
    assert main(["audit", *target, "--policies", "null", "--tasks", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["env"] == target[0]
    assert re.fullmatch(r"agentenv audit: [\d,]+ characters printed by the environment, not shown\. .*\n", said.err)


@pytest.mark.long
def test_an_allowed_finding_no_longer_fails(target, tmp_path, capsys):
    allow_flags = ["--allow", "hack-earns=every number may be said", "flaky-*=never seen"]
    assert main(["audit", *target, *EASY, *POLICIES, *allow_flags]) == 0
    said = capsys.readouterr().out
    assert "allowed: every number may be said" in said
    assert "allowed, but without a finding: flaky-*" in said
    file = tmp_path / "allowed.json"
    file.write_text('{"hack-earns:enumeration": "every number may be said"}')
    assert main(["audit", *target, *EASY, *POLICIES, "--allow_file", str(file)]) == 0
    assert main(["audit", *target, *EASY, *POLICIES, "--allow", "hack-earns:format_only=another one"]) == 1


@pytest.mark.long
def test_strict_fails_for_warnings_too(target, tmp_path):
    (tmp_path / "sums.py").write_text(
        ENV.replace("score=float", "score=50 * float").replace("    def", "    score_range = None\n\n    def", 1)
    )
    assert main(["audit", *target, *POLICIES[:2]]) == 0
    assert main(["audit", *target, *POLICIES[:2], "--strict"]) == 1


@pytest.mark.long
def test_the_command_that_a_finding_names_plays_it_again(target, capsys):
    assert main(["audit", *target, *EASY, *POLICIES, "--seed", "3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"][0]
    words = found["reproduce"].split()
    assert words[:2] == ["agentenv", "audit"]
    assert found["evidence"][0]["task_id"] in words
    import shlex

    main(shlex.split(found["reproduce"])[1:])
    said = capsys.readouterr().out
    assert "reward 1, score 1.0" in said
    assert "The answer is 0 1 2" in said


@pytest.mark.long
def test_the_folder_has_data_plays_and_a_card(target, tmp_path):
    out = tmp_path / "audit"
    assert main(["audit", *target, *EASY, *POLICIES, "--out", str(out), "--tasks", "2"]) == 1
    data = json.loads((out / "audit.json").read_text())
    plays = [json.loads(line) for line in (out / "plays.jsonl").read_text().splitlines()]
    card = (out / "audit.md").read_text()
    assert data["num_plays"] == sum(play["task_id"] in data["tasks"] for play in plays)  # others are of gold
    assert {play["policy"].partition("/")[0] for play in plays} == {"null", "constant", "enumeration", "gold"}
    assert "fail    hack-earns:enumeration: " in card
    assert "gold " in card


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks", "0"], "expected num_tasks"),
        (["--task", "t9"], "--task: expected a task's id, such as t0"),
        (["--policies", "nobody"], "--policies: expected some of null"),
        (["--allow", "hack-earns"], "expected ID=REASON"),
        (["--allow_file", "/nowhere.json"], "--allow_file: expected a JSON object"),
        (["--reward_range", "1", "0"], "--reward_range: expected lowest and highest"),
        (["--max_tokens", "0"], "--max_tokens: expected an integer >= 1"),
        (["--env_kwargs", '{"hard": 1}'], "expected arguments of Sum"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_with_2(target, flags, words, capsys):
    assert main(["audit", *target, *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.long
def test_an_agent_func_is_audited_by_its_agent_class_with_its_arguments(tmp_path, target, capsys):
    file = tmp_path / "agent_func.py"
    file.write_text(
        "from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor\n\n\n"
        "class Instance(AgentInstanceBase):\n"
        "    def __init__(self, easy=False):\n        self.easy = easy\n\n"
        "    async def step(self, states, **kwargs):\n"
        "        right = self.easy and states['label'] in states['action_text']\n"
        "        return {'rewards': float(right), 'scores': float(right),\n"
        "                'environment_feedback': '', 'done': True}\n\n\n"
        "class AgentExecutor(MultiTurnAgentExecutor):\n"
        "    agent_kwargs = {'easy': True}\n\n"
        "    def __init__(self, *args):\n        super().__init__(Instance)\n"
    )
    assert main(["audit", str(file), *target[1:], *POLICIES]) == 1
    said = capsys.readouterr().out
    assert "hack-earns:enumeration" in said
    assert "no-gold" in said


def test_an_agent_with_its_own_loop_is_refused_with_what_to_do(tmp_path, target, capsys):
    file = tmp_path / "own.py"
    file.write_text("class Own:\n    async def run(self, context):\n        return 1.0\n")
    assert main(["audit", str(file), *target[1:]]) == 2
    assert "an agent with its own loop" in capsys.readouterr().err


BLOCKED = """
import sys
import agentenv.cli.audit as command
from agentenv.cli.main import main

command._MIN_BLOCK_S = 1.0
sys.exit(main(["audit", *sys.argv[1:]]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("while True: pass", "every call to return or await within 2 s, got a call that blocks .* at line 6"),
        ("os.kill(os.getpid(), 9)", "a process that continues, got its end by SIGKILL"),
    ],
)
def test_a_call_that_stops_the_audit_is_reported(tmp_path, call, said):
    (tmp_path / "stops.py").write_text(
        f"import os\n\nfrom agentenv import AgentInstance\nclass Stops(AgentInstance):\n"
        f"    async def step(self, states):\n        {call}\n"
    )
    (tmp_path / "one.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    flags = ["stops.py", "--data", "one.jsonl", "--step_timeout_s", "2"]
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 1, ran.stderr
    assert re.search(f"stops.py: expected {said}", ran.stdout), ran.stdout
