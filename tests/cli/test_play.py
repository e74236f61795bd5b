"""agentenv play: a person or a pipe in the policy's place; what is shown, recorded and closed."""

import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.cli import main as cli
from agentenv.core.types import StopReason
from agentenv.engines.models import resolve_model
from agentenv.runs.records.directory import read_trajectories
from tests.waits import wait_until

ROOT = Path(__file__).parents[2]
DOOR = '''\
import asyncio
from pathlib import Path
from agentenv import AgentInstance, StepResult

HERE = Path(__file__).parent


class Door(AgentInstance):
    """Opens when it is told to; says so when it is closed."""

    needs_label = False
    datasets = {"doors": HERE / "doors.jsonl"}

    def __init__(self, word="open"):
        self.word = word

    async def reset(self, states):
        tools = [{"type": "function", "function": {"name": "knock", "parameters": {}}}] if self.word == "knock" else []
        return {**states, **({"tools": tools} if tools else {})}

    async def step(self, states):
        said = states["action_text"]
        if said == "break":
            raise RuntimeError("splinters")
        with (HERE / "heard.txt").open("a") as file:
            file.write(repr(said) + chr(10))
        if said == "wait":
            await asyncio.sleep(3600)
        done = said == self.word
        return StepResult(f"It stays shut.\\x1b[2J\\x07 You said {said}.", reward=float(done) or -0.0,
                          score=float(done), terminated=done, info={"seed": states["seed"]})

    async def gold(self, states):
        if self.word == "lost":
            raise KeyError("no key")
        return None if states["turn_index"] > 2 else self.word

    async def close(self):
        with (HERE / "closed.txt").open("a") as file:
            file.write("closed" + chr(10))
'''


@pytest.fixture
def door(tmp_path):
    (tmp_path / "door.py").write_text(DOOR)
    rows = [
        {"prompt": "A door.", "task_id": "d0"},
        {"prompt": "Another\x1b]0;evil\x07 door.", "task_id": "d1", "seed": 5},
    ]
    (tmp_path / "doors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def play(door, said, monkeypatch, capsys, *flags):
    """The exit code, what was shown, what the door heard, and how often it was closed after its first trial."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    code = cli.main(["play", f"{door}/door.py:Door", *flags])
    out, err = capsys.readouterr()
    heard = list(_lines(door / "heard.txt"))
    return code, out, err, heard, len(_lines(door / "closed.txt")) - 1


def _lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_actions_from_a_pipe_are_played_and_what_they_bring_is_shown(door, monkeypatch, capsys):
    code, out, _, heard, closed = play(door, "hello\n\n  \nopen\n", monkeypatch, capsys)
    assert (code, heard, closed) == (0, ["'hello'", "'open'"], 1)
    assert "[user]\nA door.\n1> hello\nreward +0  score 0  seed=" in out
    assert "It stays shut.\\x1b[2J\\x07 You said hello.\n2> open\nreward +1  score 1" in out
    assert "end: terminated after 2 turns, reward 1, score 1\n" in out
    assert "\x1b" not in out


def test_a_block_of_lines_is_one_action_and_two_slashes_begin_one_with_a_slash(door, monkeypatch, capsys):
    blocks = ["first\n\n/quit", "/quit", "// a comment\nint x;"]
    said = "".join(f'"""\n{block}\n"""\n' for block in blocks) + "//open\n /nonsense\n/quit\nopen\n"
    code, out, _, heard, closed = play(door, said, monkeypatch, capsys)
    assert (code, heard, closed) == (0, [*map(repr, blocks), "'/open'"], 1)
    assert "/nonsense: expected a command, got another word." in out


def test_gold_is_shown_or_played_and_restart_begins_the_same_task_again(door, monkeypatch, capsys):
    code, out, _, heard, closed = play(
        door, "/gold\na\n/restart\n/gold!\n/restart \na\nb\nc\n/gold!\n", monkeypatch, capsys
    )
    assert (code, heard, closed) == (0, ["'a'", "'open'", "'a'", "'b'", "'c'"], 3)
    assert "gold: open\n1> a" in out
    assert "the environment knows no gold action." in out
    assert out.count("A door.") == 3


def test_next_plays_the_next_task_and_after_the_last_one_the_first(door, monkeypatch, capsys):
    said = "/next\n/label\nopen\n/next\nopen\n"
    code, out, _, heard, closed = play(door, said, monkeypatch, capsys, "--out", str(door / "run"))
    assert (code, heard, closed) == (0, ["'open'", "'open'"], 3)
    assert [word for word in out.split() if word in ("d0", "d1")] == ["d0", "d1", "d0"]
    assert "seed=5" in out
    assert "label: None" in out
    names = [each.episode_id for each in read_trajectories(door / "run")]
    assert names == ["d0/0", "d1/0", "d0/1"]


def test_an_environment_whose_gold_fails_is_reported_and_the_episode_continues(door, monkeypatch, capsys):
    flags = ("--env_kwargs", '{"word": "lost"}')
    code, out, _, heard, closed = play(door, "/gold!\n/gold\nlost\n", monkeypatch, capsys, *flags)
    assert (code, heard, closed) == (0, ["'lost'"], 1)
    assert out.count("gold failed: KeyError: 'no key' at ") == 2


@pytest.mark.parametrize("said", ["", "a\n", "/quit\n", '"""\nunfinished\n'])
def test_the_end_of_the_input_ends_cleanly(door, monkeypatch, capsys, said):
    code, _, err, heard, closed = play(door, said, monkeypatch, capsys)
    assert (code, err, closed) == (0, "", 1)
    assert heard == (["'a'"] if said == "a\n" else [])


def test_the_task_its_seed_and_the_arguments_are_chosen_by_flags(door, monkeypatch, capsys):
    code, out, *_ = play(door, "shut\n", monkeypatch, capsys, "--task", "1", "--env_kwargs", '{"word": "shut"}')
    assert code == 0
    assert "task d1 · seed 5" in out
    assert "Another\\x1b]0;evil\\x07 door." in out
    assert "seed=5" in out
    assert "seed=9" in play(door, "x\n", monkeypatch, capsys, "--task", "d1", "--seed", "9")[1]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--task", "2"], "--task: expected a task's id, such as d0, or its number from 0 to 1, got '2'"),
        (["--task", "-1"], "--task: expected a task's id, such as d0, or its number from 0 to 1, got '-1'"),
        (["--env_kwargs", '{"colour": 1}'], "env_kwargs: expected arguments of Door"),
        (["--max_turns", "0"], "max_turns: expected an integer >= 1"),
    ],
)
def test_wrong_flags_are_one_line_before_anything_is_played(door, monkeypatch, capsys, flags, error):
    code, out, err, heard, _ = play(door, "open\n", monkeypatch, capsys, *flags)
    assert (code, out, heard) == (2, "", [])
    assert error in err


def test_tools_that_are_offered_are_shown(door, monkeypatch, capsys):
    _, out, *_ = play(door, "knock\n", monkeypatch, capsys, "--env_kwargs", '{"word": "knock"}')
    assert '"name": "knock"' in out
    assert "<tool_call>" in out


def test_a_played_episode_is_recorded_with_the_tokens_of_a_model(door, monkeypatch, capsys):
    out_dir = door / "run"
    said = "a\n/restart\nb\nopen\n"
    code, *_ = play(door, said, monkeypatch, capsys, "--out", str(out_dir))
    first, second = read_trajectories(out_dir)
    assert (code, first.stop_reason, second.stop_reason) == (0, StopReason.ABORTED, StopReason.TERMINATED)
    assert [turn.action for turn in second.turns] == ["b", "open"]
    assert (second.episode_id, second.reward) == ("d0/1", 1.0)
    assert json.loads((out_dir / "metrics.json").read_text())["num_episodes"] == 2
    assert cli.main(["tokens", "show", str(out_dir), "d0/1"]) == 0
    assert "open‹<|im_end|>›" in capsys.readouterr().out
    again = play(door, "open\n", monkeypatch, capsys, "--out", str(out_dir))
    assert again[0] == 2
    assert "expected an empty run directory" in again[2]


def test_an_environment_that_fails_is_named_recorded_and_closed(door, monkeypatch, capsys):
    code, _, err, _, closed = play(door, "break\nopen\n", monkeypatch, capsys, "--out", str(door / "run"))
    assert (code, closed) == (2, 1)
    assert "RuntimeError: splinters" in err
    assert next(iter(read_trajectories(door / "run"))).error.message == "splinters"


def test_limits_end_an_episode_as_they_do_in_a_run(door, monkeypatch, capsys):
    _, out, *_ = play(door, "a\nb\nc\n", monkeypatch, capsys, "--max_turns", "2")
    assert "end: max_turns after 2 turns, reward 0, score 0" in out


class Terminal:
    """`agentenv play` in a real terminal."""

    def __init__(self, *args):
        self.fd, child = pty.openpty()
        path = os.pathsep.join([str(ROOT), str(ROOT / "envs"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-m", "agentenv.cli", "play", *args]
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True, close_fds=True,
            preexec_fn=_own_the_terminal,
        )  # fmt: skip
        os.close(child)
        self.seen = ""

    def until(self, text, *, limit_s=60):
        """Read until the text is there; what came before it is done with."""
        ends = time.monotonic() + limit_s
        while text not in self.seen:
            assert time.monotonic() < ends, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode("utf-8", "replace")
                except OSError:  # the other side is gone
                    assert text in self.seen, f"no {text!r} in {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def types(self, text):
        os.write(self.fd, text.encode())


def _own_the_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.long
def test_a_session_in_a_real_terminal_has_a_history_and_ends_with_ctrl_c(door):
    terminal = Terminal(f"{door}/door.py:Door")
    try:
        shown = terminal.until("1> ")
        assert "[user]" in shown
        terminal.types("hello\n")
        assert "\\x1b[2J\\x07" in terminal.until("2> ")
        terminal.types("\x1b[A\n")  # the arrow up: the line before
        terminal.until("3> ")
        terminal.types("half a line")
        terminal.until("half a line")
        ends = time.monotonic() + 60
        while terminal.process.poll() is None and time.monotonic() < ends:
            terminal.types("\x03")  # Python's line editor misses one that comes just as it begins to wait
            with suppress(subprocess.TimeoutExpired):
                terminal.process.wait(timeout=2)
        assert terminal.process.returncode == 130
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)
    assert _lines(door / "heard.txt") == ["'hello'", "'hello'"]
    assert len(_lines(door / "closed.txt")) == 2


@pytest.mark.long
def test_ctrl_c_while_a_step_works_ends_the_session_and_closes_the_environment(door):
    terminal = Terminal(f"{door}/door.py:Door", "--step_timeout_s", "3600")
    try:
        terminal.until("1> ")
        terminal.types("wait\n")
        wait_until(lambda: _lines(door / "heard.txt") == ["'wait'"])
        terminal.types("\x03")
        assert terminal.process.wait(timeout=60) == 130
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)
    assert len(_lines(door / "closed.txt")) == 2


def test_columns_of_data_are_named_by_flags(door, monkeypatch, capsys):
    (door / "other.jsonl").write_text('{"question": "A gate.", "answer": "open"}\n')
    flags = ("--data", str(door / "other.jsonl"))
    code, _, err, *_ = play(door, "open\n", monkeypatch, capsys, *flags)
    assert code == 2
    assert "Set --prompt_key" in err
    code, out, *_ = play(
        door, "open\n", monkeypatch, capsys, *flags, "--prompt_key", "question", "--label_key", "answer"
    )
    assert code == 0
    assert "A gate." in out


def test_gold_that_is_not_text_is_reported_and_not_played(door, monkeypatch, capsys):
    flags = ("--env_kwargs", '{"word": ["open"]}')
    code, out, _, heard, _ = play(door, "/gold!\na\n", monkeypatch, capsys, *flags)
    assert (code, heard) == (0, ["'a'"])
    assert "gold failed: ContractError: Door.gold: expected text or None, got ['open']. " in out


@pytest.mark.parametrize(
    ("base", "prompt"),
    [
        ("agentenv AgentInstance", "[user]\nA door."),
        ("openrlhf.utils.agent AgentInstanceBase", "<|im_start|>user\nA door.<|im_end|>\n<|im_start|>assistant\nIn: "),
    ],
)
def test_a_file_for_openrlhf_is_played_with_its_arguments_and_the_prompt_that_it_gets_there(
    base, prompt, door, monkeypatch, capsys
):
    module, name = base.split()
    (door / "func.py").write_text(
        f"from {module} import {name}\nfrom openrlhf.utils.agent import MultiTurnAgentExecutor\n\n\n"
        f"class Gate({name}):\n    def __init__(self, word='open'):\n        self.word = word\n\n"
        "    async def reset(self, states):\n        given = states['observation']\n"
        "        return {'observation': given + 'In: ' if isinstance(given, str) else given}\n\n"
        "    async def step(self, states):\n        done = states['action_text'] == self.word\n"
        "        return {'rewards': float(done), 'environment_feedback': ' No. ', 'done': done}\n\n\n"
        "class AgentExecutor(MultiTurnAgentExecutor):\n    agent_cls, agent_kwargs = Gate, {'word': 'sesame'}\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("open\nsesame\n"))
    assert cli.main(["play", f"{door}/func.py", "--data", f"{door}/doors.jsonl", "--label_key", "prompt"]) == 0
    out = capsys.readouterr().out
    assert f"help\n{prompt}\n1> open\nreward +0\n" in out
    assert "end: terminated after 2 turns, reward 1" in out


def test_a_file_for_molt_is_played_with_the_text_that_it_gets_there(door, monkeypatch, capsys):
    (door / "func.py").write_text(
        "from molt.agents import Env, Result, StepEnvRunner\n\n\n"
        "class Gate(Env):\n    async def reset(self, states):\n"
        "        return {'observation': states['observation'] + 'In: '}\n\n"
        "    async def step(self, states):\n        return Result(1.0)\n\n\n"
        "class AgentRunner(StepEnvRunner):\n    def __init__(self):\n        super().__init__(Gate)\n"
    )
    flags = ["play", f"{door}/func.py", "--data", f"{door}/doors.jsonl", "--label_key", "prompt"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("open\n"))
    assert cli.main(flags) == 0
    assert "<|im_start|>assistant\nIn: \n1> open\nreward +1\n" in capsys.readouterr().out
    model = shutil.copytree(resolve_model("tiny-math"), door / "model")
    (model / "chat_template.jinja").write_text(
        "{% for each in messages %}{{ each.role }}: {{ each.content }}\nA: {% endfor %}"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("open\n"))
    assert cli.main([*flags, "--model", str(model)]) == 0
    assert "user: A door.\nA: In: \n1> open\n" in capsys.readouterr().out
