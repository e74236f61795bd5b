"""`agentenv show`: what a person reads, and what a terminal never gets."""

import contextlib
import os
import sys
from dataclasses import replace

import pytest

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.index import TRAJECTORIES
from tests.drivers import command

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "a = 1\\nprint(a)", "n": 2}}\n</tool_call>'
HOSTILE = "clear \x1b[2J\x9b31m title \x1b]0;x\x07 back\x08\r\u202eright\u200b \U000e0041 \ttab"


def record(episode_id, actions, replies, *, prompt="Q", reward=0.5, error=None, bridge="exact"):
    task = Task([{"role": "user", "content": prompt}], label="42", task_id=episode_id.split("/")[0])
    trajectory = Trajectory(task, 10**6, episode_id, task.task_id, prompt=task.prompt)
    trajectory.tools = ({"type": "function", "function": {"name": "python"}},)
    trajectory.append_observation([1, 2])
    for action, reply in zip(actions, replies, strict=True):
        trajectory.append_turn(Completion((3, 4), logprobs=(0.0, 0.0)), action)
        if reply is not None:
            trajectory.set_result(StepResult(reply, reward=reward, info={"outcome": "wrong"}))
            trajectory.append_observation([5], bridge=bridge)
    trajectory.finish(StopReason.ERROR if error else StopReason.TERMINATED, error)
    return trajectory


@pytest.fixture
def run(tmp_path):
    error = EpisodeError("env", "KeyError", "'x'", "step", "/e/env.py:3", 'Traceback:\n  File "/e/env.py"\n\x1b[0m')
    with RunWriter.open(tmp_path / "run", {}) as writer:
        tool = [{"role": "tool", "name": "python", "content": "one\n  two"}]
        writer.append(record("a/0", [CALL, "Done."], [tool, "Right."]))
        writer.append(record("a/1", [HOSTILE], [HOSTILE], prompt=HOSTILE))
        writer.append(record("b/0", ["first", "second"], ["next", None], error=error))
    return tmp_path / "run"


def shown(capsys, *args):
    code = command(["show", *args])
    return code, *capsys.readouterr()


def test_a_conversation_has_roles_line_ends_calls_results_and_rewards(run, capsys):
    code, text, _ = shown(capsys, run, "--episode", "a/0")
    assert code == 0
    assert (
        text
        == """\
━━ episode a/0 · stop reason terminated · reward 1 · 2 turns · 8 tokens
task a · label 42
tools python

[user]
Q

[assistant] turn 0 · reward 0.5 · 2 tokens
<tool_call>
{"name": "python", "arguments": {"code": "a = 1\\nprint(a)", "n": 2}}
</tool_call>
→ python
    code:
      a = 1
      print(a)
    n: 2
info outcome=wrong

[tool python]
one
  two

[assistant] turn 1 · reward 0.5 · 2 tokens
Done.
info outcome=wrong

[user]
Right.

"""
    )


@pytest.mark.parametrize("odd", [{"function": None}, {"function": "f"}, None, "f", 3])
def test_calls_and_tools_of_any_shape_are_shown(tmp_path, capsys, odd):
    made = record("a/0", ["call"], [[{"role": "assistant", "content": "said", "tool_calls": [odd]}]])
    made.tools = (odd,)
    with RunWriter.open(tmp_path / "run", {}) as writer:
        writer.append(made)
    code, text, errors = shown(capsys, tmp_path / "run")
    assert (code, errors) == (0, "")
    assert "tools None\n" in text
    assert "said\n→ None\n" in text


@pytest.mark.parametrize(("bridge", "role"), [("exact", "user"), ("text", "environment")])
def test_feedback_is_a_users_message_unless_the_model_got_it_raw(tmp_path, capsys, bridge, role):
    with RunWriter.open(tmp_path / "run", {}) as writer:
        writer.append(record("a/0", ["first", "second"], ["More.", ""], bridge=bridge))
    assert f"\n[{role}]\nMore.\n" in shown(capsys, tmp_path / "run")[1]


def test_an_error_has_its_place_and_traceback(run, capsys):
    code, text, _ = shown(capsys, run, "--failed")
    assert code == 0
    assert text.endswith("""
[assistant] turn 1 · reward unknown · 2 tokens
second

error (env) in step at /e/env.py:3: KeyError: 'x'
Traceback:
  File "/e/env.py"
\\x1b[0m

""")
    assert text.count("━━ episode") == 1


@pytest.mark.parametrize("color", [{}, {"FORCE_COLOR": "1"}])
def test_nothing_that_a_model_writes_reaches_the_terminal_as_a_control(run, capsys, monkeypatch, color):
    for name, value in color.items():
        monkeypatch.setenv(name, value)
    _, text, _ = shown(capsys, run, "--task", "a")
    for ours in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[1;36m", "\x1b[1;32m", "\x1b[1;33m", "\x1b[1;34m"):
        text = text.replace(ours, "") if color else text
    assert {char for char in text if not char.isprintable()} == {"\n", "\t"}
    assert text.count("clear \\x1b[2J\\x9b31m title \\x1b]0;x\\x07 back\\x08\\r\\u202eright\\u200b \\U000e0041 ") == 3


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--worst", "1"], "got 'nothing'"),
        (["--worst", "0"], "--worst: expected a number of episodes >= 1, got 0"),
        (["--worst", "1", "--best", "1"], "--worst: expected no --best with it"),
        (["--grep", "("], "--grep: expected a regular expression, got '('"),
        (["--where", "rewad=1"], "Did you mean 'reward'?"),
        (["--episode", "0", "--failed"], "--episode: expected no other condition, got --failed. Leave"),
        (["--where=score=0", "--episode=0"], "--episode: expected no other condition, got --where. Leave"),
    ],
)
def test_wrong_flags_are_one_line(run, capsys, args, expected):
    code, text, errors = shown(capsys, *([run] if "nothing" not in expected else ["nothing"]), *args)
    assert (code, text) == (2, "")
    assert expected.replace("got 'nothing'", "nothing: expected a run directory") in errors


def test_no_episode_is_told_and_so_is_a_folder_that_is_no_run(run, capsys, tmp_path):
    assert shown(capsys, run, "--grep", "no such text") == (
        0, "", f"agentenv show: none of the 3 episodes of {run} is shown\n",
    )  # fmt: skip
    (tmp_path / "empty").mkdir()
    code, _, errors = shown(capsys, tmp_path / "empty")
    assert code == 2
    assert "expected a run directory, got no config.json in it" in errors


def test_an_environment_that_a_run_does_not_have_is_an_error_that_names_the_nearest(tmp_path, capsys):
    with RunWriter.open(tmp_path / "run", {}) as writer:
        for env in ("sorting", "dates"):
            episode = record(f"{env}/0", ["A"], ["B"])
            episode.task = replace(episode.task, env=env)
            writer.append(episode)
    for name, advice in (("sort", "Did you mean 'sorting'?"), ("xyz", "There are dates, sorting.")):
        code, _, err = shown(capsys, tmp_path / "run", "--where", f"env={name}")
        assert (code, advice in err) == (2, True)
    assert "expected an environment of" in err
    for text in ("env=dates reward>9", "env:xyz*"):
        code, _, err = shown(capsys, tmp_path / "run", "--where", text)
        assert (code, "none of the 2 episodes" in err) == (0, True)
    assert shown(capsys, tmp_path / "run", "--where", "env=xyz or env=dates")[0] == 0


def test_a_run_that_goes_on_is_read_and_a_torn_line_is_told(run, capsys):
    log = run / TRAJECTORIES
    with RunWriter.open(run, {}, resume=True) as writer:
        writer.append(record("d/0", ["new"], ["ok"]))
        assert "new" in shown(capsys, run, "--task", "d")[1]
    with log.open("ab") as file:
        file.write(log.read_bytes()[:100])
    code, text, errors = shown(capsys, run, "--task", "d")
    assert (code, "new" in text) == (1, True)
    assert "100 bytes of a torn last line" in errors


@contextlib.contextmanager
def terminal(monkeypatch):
    """Make stdout a terminal; yields its other side."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        yield ours
    os.close(ours)


def test_a_terminal_gets_a_pager(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGER", f"tee {tmp_path / 'paged'}")
    with terminal(monkeypatch):
        assert command(["show", run, "--episode", "a/0"]) == 0
    assert "episode a/0" in (tmp_path / "paged").read_text()


def test_a_pager_that_is_quit_ends_the_command(run, monkeypatch):
    with RunWriter.open(run, {}, resume=True) as writer:
        for number in range(40):
            writer.append(record(f"x{number}/0", ["word " * 5000], ["ok"]))
    monkeypatch.setenv("PAGER", "head -c 10")
    with terminal(monkeypatch):
        assert command(["show", run]) == 0


def test_a_pager_that_is_no_command_line_is_an_error(run, monkeypatch, capsys):
    monkeypatch.setenv("PAGER", "less 'x")
    code, _, errors = shown(capsys, run)
    assert code == 2
    assert """PAGER: expected a command line, got "less 'x": No closing quotation. Correct the variable.""" in errors


def test_without_the_pager_the_text_is_printed(run, monkeypatch):
    monkeypatch.setenv("PAGER", "no-such-pager")
    with terminal(monkeypatch) as other_side:
        assert command(["show", run, "--episode", "b/0"]) == 0
        assert b"episode b/0" in os.read(other_side, 10_000)
