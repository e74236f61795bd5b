"""What of Inspect's tasks needs no Inspect: their names in a file, and the messages of its process."""

import importlib.util
import sys

import pytest

from agentenv import load_env
from agentenv.errors import ConfigError, MissingDependency
from agentenv.interop.inspect_guest import GuestProcess, tasks_in

SOURCE = """
import inspect_ai
from inspect_ai import task

@task
def plain(): ...

@task(name="other")
def called(): ...

@inspect_ai.task
def dotted(): ...

@tool
def no_task(): ...

raise RuntimeError("never run")
"""


def test_tasks_of_a_file_are_what_its_decorators_mark_and_it_is_not_run(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(SOURCE)
    assert tasks_in(path) == ["plain", "called", "dotted"]


@pytest.mark.parametrize("text", [None, "def broken(:"])
def test_a_file_that_is_missing_or_is_no_python_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "tasks.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"tasks\.py: expected a Python file, got"):
        tasks_in(path)


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is not None, reason="Inspect is here")
def test_without_inspect_the_error_says_what_to_install():
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv-rl\[inspect\]'"):
        load_env("inspect:tasks.py@one")


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """A process that sends each message back, and ends at one that says so."""
    lines = (
        "import sys, json\nfor line in sys.stdin:\n    if 'exit' in line: sys.exit(3)\n    print(line, flush=True)\n"
    )
    (tmp_path / "echo_process.py").write_text(lines.replace("print(line,", "print(line.strip(),"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return GuestProcess("echo_process")


def test_answers_reach_the_episode_of_their_id_and_the_end_of_the_process_fails_the_others(echo):
    first, second = echo.ask({"id": 1, "text": "é"}), echo.ask({"id": 2})
    assert second.result(30) == {"id": 2}
    assert first.result(30) == {"id": 1, "text": "é"}
    failed = echo.ask({"id": 3, "exit": True}).result(30)
    assert failed["kind"] == "infra"
    assert "got its end" in failed["error"]
    assert not echo.is_alive
    assert echo.ask({"id": 4}).result(30)["kind"] == "infra"


def test_arguments_that_are_not_json_are_refused(echo):
    with pytest.raises(ConfigError, match=r"^env_kwargs: expected JSON"):
        echo.ask({"id": 1, "kwargs": {sys}})
    assert echo.ask({"id": 2, "exit": True}).result(30)["kind"] == "infra"
