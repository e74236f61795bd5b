"""`agentenv check --actions` and `--model`: texts to try in every property, and the chat template of a model."""

import json

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError
from agentenv.testing.conformance.cases import read_actions
from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.suite import check_property, make_context
from tests.drivers import command

OPENS = """
from agentenv import AgentInstance, StepResult
class Opens(AgentInstance):
    async def reset(self, states):
        return {{**states, {tools}}}
    async def step(self, states):
        said = states["action_text"]
        if said.startswith("open"):
            {does}
        return StepResult("Again.", terminated=states["turn_index"] == 1)
"""
TOOL = '"tools": [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]'


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(does="pass", tools=""):
        (tmp_path / "opens.py").write_text(OPENS.format(does=does, tools=tools))
        (tmp_path / "actions.txt").write_text("look\n\nopen the door\n")
        (tmp_path / "actions.jsonl").write_text('"look"\n{"action": "open\\nit"}\n')
        return ["check", "opens.py"]

    return write


def test_actions_are_read_from_lines_of_text_or_json(write, tmp_path):
    write()
    assert read_actions("actions.txt") == ("look", "open the door")
    assert read_actions("actions.jsonl") == ("look", "open\nit")
    for text in ("[1]\n", '{"actions": ["a"]}\n', "open\n"):
        (tmp_path / "wrong.jsonl").write_text(f'"a"\n{text}')
        with pytest.raises(ConfigError, match=r"--actions: wrong\.jsonl:2: expected a JSON text or \{.action.: TEXT\}"):
            read_actions("wrong.jsonl")
    with pytest.raises(ConfigError, match=r"--actions: expected a file of actions, got 'gone\.txt'"):
        read_actions("gone.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"--actions: expected at least one action"):
        read_actions("empty.txt")


@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "broken"),
    [
        ("raise ValueError('door')", "contract"),
        ("return StepResult('', score=None, reward=1e300)", "rewards"),
        ("return StepResult([{'role': 'door', 'content': 'Open.'}])", "feedback"),
        ("import random; random.random()", "determinism"),
        ("import time; time.sleep(0.07)", "blocking"),
    ],
)
def test_given_actions_are_tried_in_the_properties(write, does, broken, capsys):
    only = [*write(does), "--only", "contract", "rewards", "feedback", "determinism", "blocking"]
    assert command(only) == 0
    capsys.readouterr()
    assert command([*only, "--actions", "actions.jsonl"]) == 1
    assert f"✗ {broken}" in capsys.readouterr().out


def test_a_file_of_actions_that_does_not_exist_is_one_line(write, capsys):
    assert command([*write(), "--actions", "gone.txt"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


class Prompts(AgentInstance):
    """Keeps the text of its conversation."""

    def __init__(self, seen):
        self.seen = seen

    async def step(self, states):
        self.seen.append(states["observation_text"])
        return StepResult("Again.", terminated=states["turn_index"] == 1)


@pytest.mark.long
@pytest.mark.parametrize("is_named", [False, True])
def test_the_chat_template_is_that_of_the_model_if_one_is_named(is_named, no_tools_model):
    seen = []
    context = make_context(ConformanceOptions(Prompts, {"seen": seen}, model=no_tools_model if is_named else None))
    for name in ("contract", "rewards", "determinism", "blocking", "feedback"):
        assert check_property(context, name).state == "held"
    assert {text.startswith("Conversation:\n") for text in seen} == {is_named}


@pytest.mark.long
def test_a_model_that_renders_no_tools_is_a_problem_of_tools_for_this_model_only(
    write, tmp_path, capsys, no_tools_model
):
    only = [*write(tools=TOOL), "--only", "contract"]
    assert command(only) == 0
    assert command([*only, "--model", no_tools_model]) == 1
    assert "expected no tools for a chat template that renders none" in capsys.readouterr().out
    assert command([*only, "--model", str(tmp_path / "gone")]) == 2


@pytest.mark.long
def test_a_model_is_found_by_its_relative_path_in_another_working_directory_too(write, capsys, no_tools_model):
    assert command([*write(), "--only", "portability", "--model", "model"]) == 0, capsys.readouterr().out


@pytest.mark.long
def test_a_reward_is_found_by_its_relative_file_in_another_working_directory_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def last(response, label):\n    return float(response.split()[-1:] == [label])\n")
    parts = {"bare": {"reward": "own.py:last"}, "with options": {"reward": {"own.py:last": {"limit_s": 5}}}}
    kwargs = json.dumps({"reward": {"sum": parts}})
    only = ["check", "verify", "--data", "word_problems", "--only", "portability"]
    assert command([*only, "--env_kwargs", kwargs]) == 0, capsys.readouterr().out


@pytest.fixture
def no_tools_model(tmp_path):
    from agentenv.testing import chats

    folder = tmp_path / "model"
    chats.of_model("tiny-math").tokenizer.save_pretrained(folder)
    template = "Conversation:\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for path in folder.glob("*.jinja"):
        path.write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return str(folder)
