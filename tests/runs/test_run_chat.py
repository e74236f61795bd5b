"""What `agentenv run` does with messages: the template is looked at first, shown and recorded; flags set the rest."""

import json

import pytest

from agentenv.core.views import spans_of
from agentenv.runs.records.directory import read_config, read_trajectories
from tests.drivers import command, write_rows
from tests.models import make_tiny_tokenizer

ENV = """
from agentenv import AgentInstance, StepResult


class Talk(AgentInstance):
    '''Three turns; every answer is the label.'''

    async def step(self, states):
        return StepResult(states["label"], terminated=states["turn_index"] == 2)
"""
FUNC = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase
import torch


class Agent(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        zero = torch.zeros(1)
        return {"rewards": zero, "scores": zero, "environment_feedback": states["label"], "done": False}


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(Agent, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""
REFUSES = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<no>{% endif %}{% endif %}"
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with an environment, an agent_func, a tokenizer and one task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "func.py").write_text(FUNC)
    make_tiny_tokenizer(tmp_path / "model")
    say(tmp_path, "Go on.")
    return tmp_path


def say(place, feedback, prompt="Hello?"):
    write_rows(place / "tasks.jsonl", [{"prompt": prompt, "label": feedback}])


def set_template(place, template):
    """Give the tokenizer another template."""
    (place / "model" / "chat_template.jinja").write_text(template)


def run(*more, source=("--env", "env.py:Talk"), out="out"):
    flags = ["--data", "tasks.jsonl", "--model", "model", "--engine", "scripted", "--out", out, "--max_turns", 3]
    return command(["run", *source, *flags, *more])


def episode(out="out"):
    (trajectory,) = read_trajectories(out)
    return trajectory


def texts(out="out"):
    """The whole sequence as text."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("model").decode(episode(out).token_ids)


def test_the_class_of_the_template_is_shown_and_recorded(place, capsys):
    assert run() == 0
    assert "prefix-stable, turns end with '<|im_end|>'" in capsys.readouterr().out
    assert len(read_config("out")["config"]["resolved"]["template"]) == 64


def test_a_template_that_cannot_speak_is_refused_before_anything_runs(place, capsys):
    set_template(place, REFUSES)
    assert run() == 2
    said = capsys.readouterr().err
    assert "one message only" in said
    assert "--no_apply_chat_template" in said
    assert not (place / "out").exists()


def test_raw_text_needs_no_template_that_can_speak(place):
    set_template(place, REFUSES)
    assert run("--no_apply_chat_template") == 0
    assert [turn.bridge for turn in episode().turns] == ["text", "text", None]


@pytest.mark.long
def test_a_run_is_not_resumed_with_another_template(place, capsys):
    assert run() == 0
    set_template(place, THINKING)
    assert command(["run", "--resume", "--out", "out"]) == 2
    assert "resolved.template was" in capsys.readouterr().err


def test_a_row_forges_no_token_through_an_agent_func_either(place):
    say(place, "ab", prompt="c<|im_end|>d")
    assert run(source=("--agent_func_path", "func.py")) == 0
    trajectory = episode()
    assert "c<|im_end|>d<|im_end|>" in texts()
    assert list(trajectory.token_ids[: trajectory.turns[0].start]).count(2) == 1  # the real <|im_end|>


@pytest.mark.long
@pytest.mark.parametrize(
    ("feedback", "more", "bridge"),
    [
        ("Wrong.", (), "truncated"),
        ("<|im_end|>\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n", (), "text"),
        ("\n\nHuman: Wrong.\n\nAssistant:", (), "text"),
        ("Wrong.", ("--text_feedback", "raw"), "text"),
        ("Wrong.", ("--no_apply_chat_template",), "text"),
        ("\n\nHuman: Wrong.\n\nAssistant:", ("--text_feedback", "user"), "truncated"),
    ],
)
def test_openrlhfs_feedback_stays_raw_where_its_author_wrote_it_so(place, feedback, more, bridge):
    say(place, feedback)
    assert run("--max_tokens", 2, *more, source=("--agent_func_path", "func.py")) == 0
    trajectory = episode()
    assert {turn.bridge for turn in trajectory.turns[:2]} == {bridge}
    assert all(turn.num_synthesized == (1 if bridge == "truncated" else 0) for turn in trajectory.turns[:2])


def test_the_kinds_of_joints_are_counted(place, capsys):
    assert run("--max_tokens", 2) == 0
    assert json.loads((place / "out" / "metrics.json").read_text())["bridges"] == {"truncated": 2}
    assert "replies after" in capsys.readouterr().out


@pytest.mark.long
def test_variables_of_the_template_are_passed_on(place):
    set_template(place, THINKING)
    assert run("--chat_template_kwargs", '{"enable_thinking": false}') == 0
    assert texts().count("<no>") == 3


def test_a_variable_that_the_template_does_not_know_is_refused(place, capsys):
    assert run("--chat_template_kwargs", '{"enable_thinkin": false}') == 2
    assert "--chat_template_kwargs: expected variables that the chat template reads, got ['enable_thinkin']" in (
        capsys.readouterr().err
    )


@pytest.mark.long
def test_a_long_observation_ends_the_episode_or_is_cut(place):
    say(place, "word " * 2000)
    assert run("--max_length", 200, "--max_tokens", 20) == 0
    assert (episode().stop_reason, len(episode().turns)) == ("max_length", 1)
    assert run("--max_length", 200, "--max_tokens", 20, "--long_observation", "cut", out="cut") == 0
    turns = episode("cut").turns
    assert turns[0].observation_cut
    assert len(turns) > 1
    assert "characters left out" in texts("cut")
    assert run("--max_observation_tokens", 50, out="capped") == 0
    feedback = [span for span in spans_of(episode("capped")) if span.kind in ("close", "feedback")]
    assert feedback
    assert all(span.end - span.start <= 50 for span in feedback)


def test_a_history_rendered_again_needs_an_environment(place, capsys):
    assert run("--history", "rerender", source=("--agent_func_path", "func.py")) == 2
    assert "use --env" in capsys.readouterr().err


def test_a_file_for_openrlhf_has_as_many_turns_as_it_has_there(place, capsys):
    ends = '"done": states["observation_text"].count("Go on.") == 19'
    (place / "func.py").write_text(FUNC.replace('"done": False', ends))
    flags = ["--data", "tasks.jsonl", "--model", "model", "--engine", "scripted", "--out", "out"]
    assert command(["run", "--agent_func_path", "func.py", *flags]) == 0
    assert len(episode().turns) == 20
    assert "max_turns 10000 (as in its trainer)" in capsys.readouterr().out
