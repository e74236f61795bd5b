"""`agentenv launch prime-rl`: a package and a configuration; tests/peers has verifiers and prime-rl read both."""

import ast
import tomllib

import pytest

from agentenv.cli.main import main

NEEDED = ["--env", "math_retry", "--model", "some/model"]


def written(capsys, folder, *flags):
    assert main(["launch", "prime-rl", *NEEDED, "--out", str(folder), *flags]) == 0
    return capsys.readouterr().out


def arguments(module):
    """The arguments of env_package, of which one may be a name."""
    (call,) = [
        node
        for node in ast.walk(ast.parse(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "env_package"
    ]
    return [ast.unparse(each) for each in call.args]


def test_every_flag_is_in_the_package_or_in_the_configuration(capsys, tmp_path):
    commands = written(
        capsys, tmp_path / "made", "--data", "word_problems_train", "--env_kwargs", '{"max_attempts": 2}',
        "--max_length", "300", "--max_turns", "3", "--max_tokens", "60", "--n", "4", "--batch_size", "12",
        "--learning_rate", "0.5", "--temperature", "0.75", "--max_steps", "7", "--seed", "9", "--renderer", "default",
        "--tool_parser", "qwen3",
    )  # fmt: skip
    folder = tmp_path / "made"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "agentenv-math-retry"
    assert project["dependencies"] == ["agentenv-rl", "verifiers>=0.3.1.dev61"]
    module = (folder / "agentenv_math_retry/__init__.py").read_text()
    assert arguments(module) == ["'math_retry'", "DATA", "{'max_attempts': 2}"]
    assert "DATA = 'word_problems_train'" in module
    config = tomllib.loads((folder / "rl.toml").read_text())
    assert (config["max_steps"], config["seq_len"], config["model"]) == (7, 300, {"name": "some/model"})
    assert config["trainer"] == {"optim": {"lr": 0.5}}
    orchestrator = config["orchestrator"]
    assert (orchestrator["batch_size"], orchestrator["group_size"]) == (48, 4)
    assert orchestrator["renderer"] == {"name": "default", "tool_parser": "qwen3"}
    assert orchestrator["train"]["sampling"] == {"temperature": 0.75, "max_completion_tokens": 60}
    (source,) = orchestrator["train"]["source"]
    assert source["env"]["taskset"] == {"id": "agentenv-math-retry", "seed": 9}
    assert source["env"]["agent"]["harness"] == {"id": "agentenv-math-retry", "max_turns": 3, "max_length": 300}
    assert f"uv run rl @ {folder}/rl.toml" in commands


def test_our_own_renderer_is_named_by_its_import_path(capsys, tmp_path):
    written(capsys, tmp_path / "made", "--data", "word_problems_train", "--renderer", "agentenv")
    renderer = tomllib.loads((tmp_path / "made/rl.toml").read_text())["orchestrator"]["renderer"]
    assert renderer == {"name": "custom", "import_path": "agentenv.interop.verifiers_renderer.ChatRenderer"}


def test_a_file_of_tasks_travels_in_the_package(capsys, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "p", "label": "l"}\n')
    written(capsys, tmp_path / "made", "--data", str(tmp_path / "mine.jsonl"))
    package = tmp_path / "made/agentenv_math_retry"
    assert (package / "tasks.jsonl").read_text() == '{"prompt": "p", "label": "l"}\n'
    assert 'with_name("tasks.jsonl")' in (package / "__init__.py").read_text()


@pytest.mark.parametrize("change", ["file", "folder"])
def test_an_environment_in_a_file_and_a_folder_with_files_are_refused(capsys, tmp_path, change):
    (tmp_path / "env.py").write_text("from agentenv_envs.math_retry import MathRetry\n")
    env = f"{tmp_path}/env.py:MathRetry" if change == "file" else "math_retry"
    out = tmp_path / "made" if change == "file" else tmp_path
    flags = ["--env", env, "--model", "m", "--data", "word_problems_train", "--out", str(out)]
    assert main(["launch", "prime-rl", *flags]) == 2
    assert ("agentenv new" if change == "file" else "new or empty folder") in capsys.readouterr().err
