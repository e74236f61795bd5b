"""A question that one asks of a run, answered by clicks in the page; the record says what the answer is."""

from collections import defaultdict
from statistics import fmean

import pytest

from agentenv.runs.records.directory import read_trajectories
from tests.view.browser.conftest import serving
from tests.view.page_runs import RIGHT, WRONG, play, save

pytestmark = pytest.mark.slow


FAILURES = {"boxes": 1, "coins": 2, "eggs": 1, "pens": 3, "shells": 2, "trees": 2}
"""How many of the four siblings of a task fail."""


def attempt(tokenizer, task, sibling):
    """An episode that is right at once, or wrong twice and longer, if it fails."""
    if sibling < 4 - FAILURES[task]:
        return play(tokenizer, f"{task}/{sibling}", ("28 * 4 = 112", 1.0, "", RIGHT), label="112")
    wrong = ("28 * 4 = 108", 0.0, "Write the number behind ####." if task == "pens" else "No.", WRONG)
    return play(tokenizer, f"{task}/{sibling}", wrong, ("28 * 4 = 122, I think", 0.0, "", WRONG), label="112")


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    return save(
        tmp_path_factory.mktemp("questions"), [attempt(tokenizer, task, k) for task in FAILURES for k in range(4)]
    )


@pytest.fixture
def page(watched, run):
    with serving(run) as address:
        page = watched().open(address, "/0/overview")
        page.wait_for_selector(".task-row[data-task]")
        yield page


def groups_of(folder):
    groups = defaultdict(list)
    for each in read_trajectories(folder):
        groups[each.group_id].append(each)
    return groups


def number_of(text):
    return float(text.replace("−", "-").replace("+", ""))


def test_did_length_pay(page, run):
    pairs, everything = [], list(read_trajectories(run))
    for siblings in groups_of(run).values():
        lengths = [sum(turn.num_tokens for turn in each.turns) for each in siblings]
        rewards = [each.reward for each in siblings]
        pairs += [(x - fmean(lengths), y - fmean(rewards)) for x, y in zip(lengths, rewards, strict=True)]
    over = sum(x * y for x, y in pairs) / (sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs)) ** 0.5
    row = page.locator(".card", has_text="What the reward goes by").locator("tr", has_text="length")
    assert number_of(row.locator(".signed-text").inner_text()) == pytest.approx(over, abs=0.005)
    assert "look" in row.inner_text()
    page.locator(".histogram a").last.click()
    page.wait_for_selector("[data-episode]")
    longest = max(sum(turn.num_tokens for turn in each.turns) for each in everything)
    expected = [each for each in everything if sum(turn.num_tokens for turn in each.turns) == longest]
    assert page.locator("[data-episode]").count() == len(expected)
    mean = number_of(page.locator(".summary").inner_text().rpartition(" ")[2])
    assert mean == pytest.approx(fmean(each.reward for each in expected), abs=0.005)
