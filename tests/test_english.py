"""`.ci/english` finds the forms that it knows, names file and line, and leaves plain English alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def english(*paths):
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "english", *paths], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('raise ValueError("Mend the engine.")', "Mend"),
        ('HELP = "None where nobody knows"', "nobody"),
        ("# it is no JSON", "is no JSON"),
        ("# there is no JSON; it is no longer JSON", None),
        ("# begun\n", "begun"),
        ('def f():\n    """Whether it is open."""', 'opens with "Whether"'),
        ('@property\ndef f(self):\n    """The name."""', None),
        ('def f():\n    """Return the name."""', None),
        ('TEXT = """one\n\na loop of its own"""', "of its own"),
        ('PROMPT = "nobody"  # english: off', None),
        ("nobody = 1", None),
    ],
)
def test_a_form_in_python_is_found(tmp_path, text, form):
    file = tmp_path / "module.py"
    file.write_text(f"{text}\n")
    code, output = english(file)
    if form is None:
        assert (code, output) == (0, "")
    else:
        assert code == 1
        assert f"{file}:" in output
        assert form in output


def test_a_form_in_markdown_is_named_with_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n`mend` is code.\n<!-- english: off -->\nmend\n<!-- english: on -->\nIt is\nno tool.\n")
    assert english(page) == (1, f"{page}:7: is no tool. Write: is not a\n{page.parts[0]}: 1 forms, 0 allowed\n")
