"""The terminal: help, completion and version as commands, plain text without colors, and lines that are not broken."""

import io
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from agentenv import __version__
from agentenv._util.terminal import wide_console
from agentenv.cli.completion import CLASSES, config_class
from agentenv.cli.main import COMMANDS, main, summary_of
from agentenv.runs.display.progress import LiveProgress, describe
from agentenv.runs.metrics import Tally
from agentenv.runs.run_log import Stats
from tests.drivers import command

FACTS = {
    "done": 1024, "total": 4096, "reward": 0.4231, "score": 0.4123, "env_errors": 0, "infra_errors": 0,
    "episodes_per_s": 12.34, "tokens_per_s": 3213.0, "elapsed_s": 65.0, "eta_s": 185.0,
}  # fmt: skip


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["run"], ["tokens", "show"], ["sandbox", "run"]])
def test_help_of_a_command_is_its_help(words, capsys):
    assert command(["help", *words]) == 0
    shown = capsys.readouterr().out
    assert command([*words, "--help"]) == 0
    assert shown == capsys.readouterr().out
    assert shown.startswith(f"usage: agentenv {' '.join(words)}")


def test_help_alone_is_the_list_of_commands_and_of_no_command_an_error(capsys):
    assert main(["help"]) == 0
    assert "agentenv COMMAND" in capsys.readouterr().out
    assert main(["help", "rnu"]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["version"], ["--version"]])
def test_the_version_is_shown(argv, capsys):
    assert main(argv) == 0
    assert capsys.readouterr().out == f"agentenv {__version__}\n"
    assert main([*argv, "word"]) == 2


def test_every_command_can_be_completed():
    assert {name.split()[0] for name in CLASSES} == set(COMMANDS)
    assert all(config_class(path) for path in CLASSES.values())


def test_the_list_of_commands_has_the_first_line_of_each_docstring():
    for name, (sentence, path) in COMMANDS.items():
        described = config_class(CLASSES.get(name, path))
        assert sentence == summary_of(described), name


HEAVY = {"torch", "transformers", "vllm", "ray", "pandas", "yaml", "wandb"}


@pytest.mark.parametrize(
    ("command", "heavy"), [("--help", {"tyro", "rich", "numpy"}), ("version", {"numpy"}), ("list", HEAVY)]
)
def test_a_command_imports_no_other_command(command, heavy):
    code = f"import sys; from agentenv.cli.main import main; main([{command!r}]); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert heavy.isdisjoint(loaded)


@pytest.mark.long
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell, capsys):
    assert command(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("agentenv", "--temperature", "vllm_http", "certify", "--config"))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_flags_values_and_files_where_nothing_else_fits(tmp_path, capsys):
    assert command(["completion", "bash"]) == 0
    (tmp_path / "script.sh").write_text(capsys.readouterr().out)
    code = "source $0; complete -p agentenv; COMP_WORDS=(agentenv $@) COMP_CWORD=$#; _tyro_agentenv; echo $COMPREPLY"
    for line, expected in {
        "to": "tokens", "run --temp": "--temperature", "run --env math": "math_retry", "check my_": "",
        "run --engine vllm_h": "vllm_http",
    }.items():  # fmt: skip
        argv = ["bash", "-c", code, tmp_path / "script.sh", *line.split()]
        told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        assert (told[0], told[1:]) == ("complete -o default -F _tyro_agentenv agentenv", [expected]), line


@pytest.mark.long
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_to_complete_files_where_nothing_else_fits(shell, tmp_path, capsys):
    assert command(["completion", shell]) == 0
    script = capsys.readouterr().out
    if shell == "fish":
        assert "$python_cmd -c" not in script, "an argument has at most 128 KiB"
        script = re.sub(r"\\(.)", r"\1", script)  # it stands in double quotes
    code = script[script.index("COMPLETION_SPEC = ") : script.rindex("    main()")] + "    main()"
    for words, expected in [(["check", "my_"], "__TYRO_COMPLETE_FILES__"), (["run", "--env", "math"], "math_retry")]:
        argv = [sys.executable, "-", "agentenv", *words, str(len(words))]
        done = subprocess.run(argv, input=code, capture_output=True, text=True, check=True)
        assert done.stdout.split("\t")[0].strip() == expected


# --- colors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["run", "--help"], ["train", "-h"], ["check", "--help"], ["list"], ["--help"]])
def test_no_color_is_honored(argv, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert command(argv) == 0
    assert not re.search(r"\x1b\[[\d;]*(3[0-8]|4[0-8]|9\d)", capsys.readouterr().out)


def test_names_between_colons_are_no_emoji():
    console = wide_console()
    with console.capture() as shown:
        console.print("guess.py:One: :smile:")
    assert shown.get().strip() == "guess.py:One: :smile:"


# --- widths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["run --help", "train --help", "check --help", "tokens show --help", "run -h", "train -h", "--help", "rm --help"],
)
def test_help_fits_into_the_terminal(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert command(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


def test_list_on_a_pipe_has_one_line_for_each_name(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r" (kind|env|data|model) ", line) for line in lines)
    assert any("agentenv_envs.gymnasium_text:GymnasiumText" in line for line in lines)
    assert any(re.search(r"/word_problems\.jsonl\s*$", line) for line in lines)


@pytest.mark.parametrize("columns", [80, 60, 30])
def test_live_progress_is_one_line(columns, monkeypatch):
    console = Console(width=columns, file=io.StringIO())
    monkeypatch.setattr(Stats, "facts", lambda stats: FACTS)
    progress = LiveProgress(Stats(4096, Tally()), console)
    console.print(progress._draw())
    assert len(console.file.getvalue().splitlines()) == 1


def test_what_matters_least_is_left_out_of_a_narrow_line():
    assert describe(FACTS) == (
        "1024/4096 episodes · reward 0.423 so far · score 0.412 so far · errors 0 env, 0 infra · "
        "12.3 episodes/s, 3213 tokens/s · elapsed 1m05s · ETA 3m05s"
    )
    assert describe(FACTS, 63) == "1024/4096 episodes · reward 0.423 · score 0.412 · ETA 3m05s"
    failed = FACTS | {"env_errors": 2}
    assert describe(failed, 63) == "1024/4096 episodes · errors 2 env, 0 infra · ETA 3m05s"
