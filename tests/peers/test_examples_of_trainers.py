"""Examples with other trainers print the last line that their docstrings promise, in those trainers' own code."""

import ast

import pytest

from tests.peers.where import ROOT, folder_of, needs, python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

no_queue = pytest.mark.skipif(
    not (folder_of("verl") / "transfer_queue").is_dir(), reason="TransferQueue is not beside verl: make test-slow"
)
EXAMPLES = [
    pytest.param("trl_grpo", "trl", marks=needs("trl")),
    pytest.param("verl_agent_loop", "verl", marks=[needs("verl"), no_queue]),
    pytest.param("tinker_rollout", "tinker_cookbook", marks=needs("tinker_cookbook")),
    pytest.param("skyrl_generator", "skyrl", marks=needs("skyrl")),
    pytest.param("prime_rl_package", "verifiers", marks=needs("verifiers", "prime_sandboxes")),
]


@pytest.mark.parametrize(("example", "package"), EXAMPLES)
def test_an_example_prints_the_last_line_that_its_docstring_promises(example, package, tmp_path):
    path = ROOT / f"examples/interop/{example}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    (promised,) = [line for line in docstring.splitlines() if line.startswith("expected last line: ")]
    assert python(package, path, cwd=tmp_path).splitlines()[-1] == promised.removeprefix("expected last line: ")
