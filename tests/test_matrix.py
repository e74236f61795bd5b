"""The matrix and the page on lost episodes say what their data says, and it comes from tests that passed and exist."""

import ast
import json
import re
import runpy
from types import SimpleNamespace

import pytest

from tests.peers.matrix import VARIABLE, pytest_runtest_logreport
from tests.peers.where import ROOT

MATRIX = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/matrix.py")))
CELLS = json.loads(MATRIX.DATA.read_text())
FIRST, SECOND = ({**CELLS[0], "test": f"tests/{name}.py::test_it"} for name in ("one", "two"))


def report(outcome, when="call"):
    return pytest.TestReport(
        "tests/one.py::test_it", ("", 1, ""), {}, outcome, None, when, user_properties=[("cell", FIRST), ("x", 1)]
    )


def test_the_pages_say_what_the_data_says():
    assert MATRIX.PAGE.read_text() == MATRIX.page()
    assert MATRIX.LOST_PAGE.read_text() == MATRIX.lost_page()
    assert MATRIX.DATA.read_text() == MATRIX.dumped(MATRIX.merged(CELLS, []))


@pytest.mark.parametrize("test", sorted({cell["test"] for cell in CELLS}))
def test_the_test_of_each_cell_exists_and_records_cells(test):
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    (function,) = [node for node in ast.walk(tree) if getattr(node, "name", "") == name]
    assert {"cell", "lost"} & {argument.arg for argument in function.args.args}


def test_each_cell_has_versions_and_something_that_was_compared():
    for cell in (each for each in CELLS if "figures" in each):
        assert cell["versions"].keys() >= {"torch", "transformers", "agentenv"}
        assert cell["figures"]["episodes"] > 0
        assert len(cell["figures"]) > 1


def test_the_siblings_of_a_lost_episode_have_no_advantage_and_would_have_one_with_a_reward_of_0():
    cells = [each for each in CELLS if "lost" in each]
    trainers = {"agentenv train", "Molt", "NeMo RL", "OpenRLHF", "prime-rl", "SkyRL", "tinker-cookbook", "TRL", "verl"}
    assert {each["trainer"] for each in cells} == trainers
    for cell in cells:
        assert all(cell[name] for name in ("gets", "again", "counted", "code", "lost"))
        for siblings, instead in cell["lost"].values():
            assert abs(siblings) < 1e-6
            assert instead > 0.2


def test_only_a_test_that_passed_writes_its_cells(tmp_path, monkeypatch):
    path = tmp_path / "cells"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    for outcome, when in (("failed", "call"), ("skipped", "call"), ("passed", "setup"), ("passed", "teardown")):
        pytest_runtest_logreport(report(outcome, when))
    assert not path.exists() or not path.read_text()
    pytest_runtest_logreport(report("passed"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [FIRST]


def test_cells_replace_those_of_the_same_test():
    new = {**FIRST, "date": "2030-01-01"}
    assert MATRIX.merged([FIRST, SECOND], [new]) == [new, SECOND]


def test_each_link_to_the_matrix_leads_to_a_heading():
    page = (ROOT / "docs/interop/matrix.md").read_text()
    headings = {f"#{title.lower().replace(' ', '-')}" for title in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    texts = [path.read_text() for path in (ROOT / "docs/interop").glob("*.md")]
    linked = {anchor for text in texts for anchor in re.findall(r"\(matrix\.md(#[\w-]+)\)", text)}
    assert linked
    assert linked <= headings


def test_each_test_that_a_pair_of_versions_names_exists():
    pairs = MATRIX.tomllib.loads(MATRIX.PAIRS.read_text())["pair"]
    for name in re.findall(r"`(tests/[\w/.]+)`", " ".join(pair["works"] for pair in pairs)):
        assert (ROOT / name).is_file(), name
