"""`agentenv new`: what it writes is a whole plugin. That it passes its own tests once installed is `.ci/wheel`'s."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from agentenv import load_run
from agentenv.cli.main import main
from agentenv.cli.scaffold.plugin import PluginKind, make_plugin
from agentenv.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=get_args(PluginKind))
def any_plugin(request, tmp_path):
    return make_plugin("word-sort", tmp_path / "word_sort", kind=request.param)


@pytest.fixture
def plugin(tmp_path):
    return make_plugin("word-sort", tmp_path / "word_sort")


def test_every_placeholder_is_filled_and_no_name_of_the_template_is_left(any_plugin):
    plugin = any_plugin
    assert len(plugin.files) == 9
    for path in plugin.files:
        text = (plugin.folder / path).read_text()
        assert not any(word in text for word in ("@package@", "@Class@", "@dist@", "@about@", "@logs@")), path
        assert not any(word in str(path) for word in (".tmpl", "dot-", "package/", "test_package")), path
    assert {".gitignore", "src/word_sort/py.typed", "tests/test_word_sort.py"} <= set(map(str, plugin.files))
    assert (plugin.name, plugin.class_name) == ("word_sort", "WordSort")


@pytest.mark.parametrize("name", ["my_test_package", "package", "tests_package"])
def test_a_name_like_one_of_the_template_is_a_name_like_others(name, tmp_path):
    found = {str(path) for path in make_plugin(name, tmp_path / "new").files}
    assert {f"src/{name}/env.py", f"src/{name}/data/tasks.jsonl", f"tests/test_{name}.py", ".gitignore"} <= found


def test_its_entry_point_names_its_class_and_its_packages_are_there(any_plugin):
    plugin = any_plugin
    project = tomllib.loads((plugin.folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["agentenv.envs"] == {"word_sort": "word_sort:WordSort"}
    assert project["project"]["dependencies"] == ["agentenv-rl>=0.1"]
    (package,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (plugin.folder / package / "__init__.py").is_file()


def test_its_rows_are_in_disorder_and_their_labels_in_order(plugin):
    rows = [json.loads(line) for line in (plugin.folder / "src/word_sort/data/tasks.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    for row in rows:
        words = row["prompt"].removesuffix(".").split(": ")[1].split()
        assert row["label"].split() == sorted(words) != words


@pytest.mark.long
def test_it_is_clean_to_the_linter_and_the_type_checker_of_this_project(any_plugin):
    plugin = any_plugin
    src, settings = str(plugin.folder / "src"), ["--config", "pyproject.toml"]
    for tool in (
        ["ruff", "check", *settings, "--config", f"src=['{src}']", "--ignore", "D,ANN", str(plugin.folder)],
        ["ruff", "format", "--check", *settings, str(plugin.folder)],
        ["mypy", "--config-file", "pyproject.toml", src],  # its cache is that of `make lint`, which spares two minutes
    ):
        done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_says_what_it_made_and_what_comes_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "word_sort"]) == 0
    said = capsys.readouterr().out
    assert "  src/word_sort/env.py\n" in said
    assert "  agentenv check word_sort && agentenv audit word_sort\n" in said
    assert main(["new", "word_sort", "--out", "elsewhere", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["folder"], made["env"], made["class"]) == ("elsewhere", "word_sort", "WordSort")
    assert all((tmp_path / "elsewhere" / path).is_file() for path in made["files"])


@pytest.mark.long
def test_it_passes_its_own_tests_its_check_and_its_audit(any_plugin):
    path = f"{any_plugin.folder / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    entry = any_plugin.folder / "src" / "word_sort-0.1.0.dist-info"  # as pip would install it
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: word-sort\nVersion: 0.1.0\n")
    (entry / "entry_points.txt").write_text("[agentenv.envs]\nword_sort = word_sort:WordSort\n")
    for command in (
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        ["-m", "agentenv.cli", "check", "word_sort"],
        ["-m", "agentenv.cli", "audit", "word_sort"],
        ["-m", "agentenv.cli", "check", "agent_func.py"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=any_plugin.folder, capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", ["Word", "1word", "word__sort", "word sort", "../word", "", "wörd", "-"])
def test_input_that_is_not_a_name_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="lower-case letters"):
        make_plugin(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["class", "true"])
def test_a_keyword_is_no_name(name, tmp_path):
    with pytest.raises(ConfigError, match=f"got {name!r}, a keyword of Python"):
        make_plugin(name, tmp_path / "new")


def test_a_name_that_no_file_can_have_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "a" * 300]) == 2
    assert "agentenv new: expected a name of at most 64 characters, got" in capsys.readouterr().err
    assert main(["new", "a" * 65]) == 2
    assert list(tmp_path.iterdir()) == []
    assert main(["new", "a" * 64]) == 0


@pytest.mark.parametrize(
    ("name", "what"),
    [("math_retry", "an installed environment"), ("math-retry", "an installed environment"), ("json", "an importable"),
     ("tests", "an importable"), ("pytest", "an importable"), ("agentenv", "an importable"),
     ("step_result", "class would be StepResult"),
     ("agent_executor", "class would be AgentExecutor")],
)  # fmt: skip
def test_a_name_that_means_something_already_is_refused(name, what, tmp_path):
    with pytest.raises(ConfigError, match=what):
        make_plugin(name, tmp_path / "new")


def test_nothing_that_is_there_is_written_over(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="new or empty folder"):
        make_plugin("word_sort", tmp_path)
    with pytest.raises(ConfigError, match="new or empty folder"):
        make_plugin("word_sort", tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


GUESS = """
from agentenv import AgentInstance, StepResult

class Guess(AgentInstance):
    async def reset(self, states):
        question = states["observation"][0]["content"]
        return {"observation": [{"role": "user", "content": f"{question} Answer with one number."}]}

    async def step(self, states):
        return StepResult(reward=float(states["action_text"] == states["label"]), terminated=True)
"""


@pytest.mark.parametrize("env", ["guess.py", "guess.py:Guess", "guess:Guess"])
def test_an_agent_func_file_is_written_for_an_environment_and_runs(env, tmp_path, monkeypatch, capsys, tiny_model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    Path("guess.py").write_text(GUESS)
    Path("rows.jsonl").write_text('{"prompt": "2 + 2?", "label": "4"}\n')
    assert main(["new", "agent_func.py", "--env", env]) == 0
    assert capsys.readouterr().out.startswith("agent_func.py\n")
    assert "from guess import Guess\n" in (written := Path("agent_func.py").read_text())
    assert "    agent_kwargs = {}" in written
    run = ["run", "--agent_func_path", "agent_func.py", "--data", "rows.jsonl", "--engine", "hf", "--out", "run"]
    assert main([*run, "--model", str(tiny_model), "--max_tokens", "4", "--progress", "none"]) == 0
    (episode,) = load_run("run")
    assert (episode.error, episode.prompt[0]["content"]) == (None, "2 + 2? Answer with one number.")


def test_an_agent_func_file_is_written_for_installed_environments_and_games(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "agent_func.py", "--env", "math_retry"]) == 0
    assert "import MathRetry\n" in Path("agent_func.py").read_text()
    assert main(["new", "agent_func.py", "--env", "math_retry"]) == 2
    assert "expected a new file, got 'agent_func.py', which exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["agent_func.py", "--env", "envs/guess.py"], "expected an importable file in the folder of 'agent_func.py'"),
        (["agent_func.py", "--env", "my-guess.py"], "expected an importable file in the folder of 'agent_func.py'"),
        (["agent_func", "--env", "math_retry"], "expected a file that ends in .py, got 'agent_func'"),
        (["no/agent_func.py", "--env", "math_retry"], "expected a file in a folder, got 'no/agent_func.py'"),
        (["agent_func.py", "--env", "math_retry", "--out", "x"], "--out: expected none with --env, got 'x'"),
    ],
)
def test_an_agent_func_file_that_could_not_import_its_environment_is_not_written(
    tmp_path, monkeypatch, capsys, arguments, error
):
    monkeypatch.chdir(tmp_path)
    Path("envs").mkdir()
    for place in ("envs/guess.py", "my-guess.py"):
        Path(place).write_text(GUESS)
    assert main(["new", *arguments]) == 2
    assert error in capsys.readouterr().err
    assert not [*Path().glob("agent_func*")]
