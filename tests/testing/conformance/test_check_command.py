"""`agentenv check` shows each property in a line, and says in JSON what became of it."""

import json
import re

import pytest

from agentenv.testing.conformance.suite import PROPERTIES
from tests.drivers import command

ENV = """
from agentenv import AgentInstance, StepResult
class Agent(AgentInstance):
    said = []
    async def step(self, states):
        self.said.append(1)
        return StepResult(terminated=True)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(ENV)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return tmp_path


@pytest.mark.long
def test_each_property_is_a_line_and_each_problem_one_below_it(folder, capsys):
    assert command(["check", "agent.py:Agent"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if not line.startswith("  ")] == list(PROPERTIES)
    at = next(number for number, line in enumerate(lines) if line.startswith("✗ isolation"))
    assert lines[at + 1].startswith("  agent.py:4: Agent.said: expected a class attribute that episodes do not change")
    assert [line.split(": ")[1] for line in lines if line.startswith("–")] == [
        "every episode ends with its first turn", "it has no data; pass --data",
    ]  # fmt: skip
    assert last == (
        "agent.py:Agent: 1 contract error; skipped truncation: every episode ends with its first turn; "
        "skipped data: it has no data; pass --data"
    )


@pytest.mark.long
def test_properties_are_chosen_and_left_out_and_data_is_named(folder, capsys):
    assert command(["check", "agent.py:Agent", "--only", "data", "close", "--data", "rows.jsonl"]) == 0
    assert [line[:7] for line in capsys.readouterr().out.splitlines()] == ["✓ data ", "✓ close", "agent.p"]
    assert command(["check", "agent.py:Agent", "--skip", "isolation", "cancel"]) == 0
    assert "– isolation    skipped: --skip" in capsys.readouterr().out
    assert command(["check", "agent.py:Agent", "--only", "data", "--rows", "0"]) == 2
    assert "--rows" in capsys.readouterr().err
    assert command(["check", "agent.py:Agent", "--only", "close_twice"]) == 2
    assert "Did you mean 'close'" in capsys.readouterr().err


@pytest.mark.long
def test_json_has_the_problems_as_ever_and_the_properties(folder, capsys):
    assert command(["check", "agent.py:Agent", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (problem,) = told["problems"]
    assert {"file", "line", "where", "expected", "got", "fix", "property"} == set(problem)
    assert problem["property"] == "isolation"
    states = {one["name"]: one["state"] for one in told["properties"]}
    assert list(states) == list(PROPERTIES)
    assert (states["isolation"], states["data"], states["cancel"]) == ("broken", "skipped", "held")


@pytest.mark.long
def test_max_turns_is_the_flag_else_that_of_the_class_and_the_screen_says_which(folder, capsys):
    (folder / "long.py").write_text(
        "from agentenv import AgentInstance, StepResult\n"
        "class Long(AgentInstance):\n    max_turns = 20\n"
        "    async def step(self, states):\n"
        "        return StepResult('More.', terminated=states['turn_index'] == 14)\n"
    )
    only = ["check", "long.py", "--only", "ends"]
    assert command(only) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "long.py: no contract errors; max_turns 20 (the environment's)"
    assert command([*only, "--max_turns", "13"]) == 1
    *_, problem, last = capsys.readouterr().out.splitlines()
    assert "expected an end within 13 turns" in problem
    assert "set `max_turns` in the class" in problem
    assert last == "long.py: 1 contract error"
    assert command([*only, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_turns"] == 20


@pytest.mark.long
def test_a_note_is_shown_and_breaks_nothing(folder, capsys):
    (folder / "agent.py").write_text(
        "from agentenv import AgentInstance, StepResult\n\n\nclass Agent(AgentInstance):\n"
        "    async def step(self, states):\n"
        "        return StepResult('Again.', terminated=bool(states['tool_calls'].items))\n"
    )
    assert command(["check", "agent.py:Agent", "--only", "contract", "ends"]) == 0
    *_, note, last = capsys.readouterr().out.splitlines()
    assert note.startswith("  note: agent.py:5: Agent.step: expected an end within 12 turns, got none")
    assert last == "agent.py:Agent: no contract errors; 1 note"
    assert command(["check", "agent.py:Agent", "--only", "ends", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["problems"], len(told["properties"][0]["notes"])) == ([], 1)


OPPONENT = """
import random
from agentenv import AgentInstance, StepResult
class Agent(AgentInstance):
    async def step(self, states):
        if states["action_text"] != "knight to f3":
            return StepResult("No legal move.", terminated=states["turn_index"] == 1)
        move = random.choice(["e5", "c5"])
        return StepResult(f"I play {move}.", terminated=True)
"""
GOLD = """
    async def gold(self, states):
        return "knight to f3"
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["neither", "gold", "--actions"])
def test_lines_that_no_action_reaches_are_named_with_what_would_and_are_judged_by_it(how, folder, capsys):
    (folder / "agent.py").write_text(OPPONENT + GOLD * (how == "gold"))
    (folder / "actions.txt").write_text("knight to f3\n")
    flags = ["--only", "determinism", *(["--actions", "actions.txt"] if how == "--actions" else ())]
    assert command(["check", "agent.py:Agent", *flags]) == int(how != "neither")
    last = capsys.readouterr().out.splitlines()[-1]
    unreached = (
        "; no episode reached agent.py:8-9: write `gold`, name actions that do in a file for --actions "
        "(each is played alone), or pass other --env_kwargs"
    )
    assert last.removeprefix("agent.py:Agent: ") == {"neither": f"no contract errors{unreached}"}.get(
        how, "1 contract error"
    )
    command(["check", "agent.py:Agent", *flags, "--json"])
    assert json.loads(capsys.readouterr().out)["unreached"] == (["agent.py:8-9"] if how == "neither" else [])


SERVED = """
from agentenv import AgentInstance, StepResult
from agentenv.errors import InfraError
class Agent(AgentInstance):
    async def step(self, states):
        try:
            price = {"egg": 7}["egg"]
            if price < 0:
                raise InfraError("prices: expected a price, got less.")
            if not isinstance(price, int):
                raise ValueError(price)
        except (LookupError, ValueError) as error:
            raise InfraError(
                f"prices: expected a price, got {error!r}.", retry_step=True
            ) from error
        return StepResult(reward=float(price == 7), terminated=True)
"""


@pytest.mark.long
def test_lines_that_only_raise_infra_errors_are_not_among_those_that_no_action_reaches(folder, capsys):
    (folder / "agent.py").write_text(SERVED)
    assert command(["check", "agent.py:Agent", "--only", "determinism"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "agent.py:Agent: no contract errors"


def test_quick_looks_at_the_contract_alone_and_its_json_is_a_list(folder, capsys):
    assert command(["check", "agent.py:Agent", "--quick"]) == 0
    assert capsys.readouterr().out == "agent.py:Agent: no contract errors\n"
    assert command(["check", "agent.py:Agent", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_if_the_contract_is_broken_nothing_else_is_tried(folder, capsys):
    (folder / "agent.py").write_text(ENV.replace("self.said.append(1)", "raise KeyError(1)"))
    assert command(["check", "agent.py:Agent"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("skipped: fix `contract` first" in line for line in lines) == len(PROPERTIES) - 1


@pytest.mark.long
def test_an_agent_with_its_own_loop_is_held_to_its_contract_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import httpx\nclass Own:\n    async def run(self, context):\n        async with httpx.AsyncClient() as http:\n"
        "            asked = {'messages': context.messages}\n"
        "            answer = await http.post(f'{context.base_url}/chat/completions', json=asked)\n"
        "        return float(answer.status_code == 200)\n"
    )
    assert command(["check", "own.py:Own"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✓ contract")
    assert sum("skipped: it runs its own loop" in line for line in lines) == len(PROPERTIES) - 2


@pytest.mark.long
def test_slow_actions_are_left_out_and_the_last_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("agentenv.testing.conformance.call_watch.SLOW_S", 0.2)
    monkeypatch.setattr("agentenv.testing.conformance.context._MAX_SLOW_S", 0.2)
    (tmp_path / "naps.py").write_text(
        "import asyncio\nfrom agentenv import AgentInstance, StepResult\nclass Naps(AgentInstance):\n"
        "    async def step(self, states):\n        await asyncio.sleep(0.3 * (states['action_text'] == 'nap'))\n"
        "        return StepResult(terminated=True)\n"
    )
    (tmp_path / "actions.txt").write_text("nap\n")
    flags = ["--actions", str(tmp_path / "actions.txt"), "--only", "contract", "rewards"]
    assert command(["check", f"{tmp_path / 'naps.py'}:Naps", *flags]) == 0
    assert re.search(r"; left out \d slow actions?, such as 'nap' \(\d s\)$", capsys.readouterr().out.splitlines()[-1])


GUESS = """
from agentenv import AgentInstance, StepResult
class Guess(AgentInstance):
    async def reset(self, states):
        if not 1 <= int(states["label"]) <= 9:
            raise ValueError("label: expected 1 to 9")
        return states
    async def step(self, states):
        return StepResult(terminated=True, **{KEYWORD})
"""


@pytest.fixture
def guess(folder):
    (folder / "guess.py").write_text(GUESS.replace("{KEYWORD}", "{}"))
    (folder / "typo.py").write_text(GUESS.replace("{KEYWORD}", '{"rewards": 1.0}'))
    (folder / "numbers.jsonl").write_text(
        '{"question": "Which?", "answer": "7"}\n{"question": "And?", "answer": "8"}\n'
    )
    (folder / "mixed.jsonl").write_text('{"prompt": "Which?", "label": "7"}\n' * 3 + '{"prompt": "", "label": "8"}\n')
    return folder


@pytest.mark.long
def test_columns_of_data_are_named_by_flags(guess, capsys):
    flags = ["--data", "numbers.jsonl", "--prompt_key", "question", "--label_key", "answer"]
    assert command(["check", "guess.py", *flags]) == 0
    assert "✓ data" in capsys.readouterr().out


def test_data_whose_columns_are_others_is_one_line_that_names_the_flag(guess, capsys):
    for flags in (["--quick"], []):
        assert command(["check", "guess.py", "--data", "numbers.jsonl", *flags]) == 2
        out, err = capsys.readouterr()
        assert "numbers.jsonl, line 1: expected key 'prompt', got keys ['question', 'answer']. Set --prompt_key" in err
        assert "reset" not in out + err


@pytest.mark.long
def test_a_row_that_cannot_be_read_is_shown_in_its_file(guess, capsys):
    assert command(["check", "guess.py", "--data", "mixed.jsonl"]) == 1
    out = capsys.readouterr().out
    assert (
        "  mixed.jsonl:4: data: expected data 'mixed.jsonl' that can be read, got mixed.jsonl, line 4, 'prompt'" in out
    )
    assert "Guess.reset" not in out


def test_a_refused_default_task_is_named_as_such(guess, capsys):
    assert command(["check", "guess.py"]) == 1
    hint = "The task was the built-in question with the label '42'; set another with --label or --data."
    assert hint in capsys.readouterr().out
    assert command(["check", "guess.py", "--label", "77"]) == 1
    assert "ValueError" in (out := capsys.readouterr().out)
    assert hint not in out


def test_a_misspelt_keyword_is_not_a_matter_of_actions(guess, capsys):
    assert command(["check", "typo.py", "--label", "7", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "got an unexpected keyword argument 'rewards'. Fix it." in out
    assert "Handle every action" not in out


def test_a_question_of_its_own_in_place_of_data_that_cannot_be_read_is_told(folder, capsys):
    (folder / "bare.py").write_text(
        ENV.replace("said = []", "datasets = {'bare': 'gone.jsonl'}").replace("self.said.append(1)", "")
    )
    assert command(["check", "bare.py", "--quick"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(
        "bare.py: no contract errors; the built-in question replaced its data: gone.jsonl: expected a"
    )
