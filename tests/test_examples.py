"""Every example runs as its own docstring says."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN_ELSEWHERE = {
    "train_reward_model.py": "tests/rewards/evaluation/test_train_reward_model.py",
    "train_tiny_math.py": "tests/engines/test_tiny_math.py",
}
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in RUN_ELSEWHERE)


def test_examples_that_are_not_run_here_are_run_elsewhere():
    assert EXAMPLES
    for name, test in RUN_ELSEWHERE.items():
        assert (ROOT / "examples" / name).exists()
        assert name in (ROOT / test).read_text()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.name == "hello.py" else pytest.mark.long, id=path.name) for path in EXAMPLES],
)
def test_an_example_prints_the_last_line_that_its_docstring_promises(path, tmp_path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    (promised,) = [line for line in docstring.splitlines() if line.startswith("expected last line: ")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs")]), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == promised.removeprefix("expected last line: ")
    assert done.stderr == ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_how_it_is_started(path):
    assert f"python examples/{path.name}" in ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.long
def test_the_notebook_runs_from_its_first_cell_to_its_last_and_holds_no_output(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples/first_episode.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    assert "terminated with reward 1.0" in printed[4]
    assert "[7]" in printed[6]
    assert "over 32 episodes" in printed[8]
    assert printed[-2].startswith("turn 0, reward ")
