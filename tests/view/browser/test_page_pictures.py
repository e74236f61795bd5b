"""Pictures of the documentation: each is that of a screen which the page has. `make view-pictures` draws them again."""

import os
import re
from pathlib import Path

import pytest

from tests.view.browser.conftest import serving
from tests.view.page_runs import play, save, siblings_run, train_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
ASSETS = ROOT / "docs" / "assets"
MOST_BYTES = 150_000
PICTURES = {
    "view-overview.png": ("/0/overview", "[data-task]", 520),
    "view-task.png": ("/1/task/g", ".decision", 640),
    "view-episode.png": ("/1/episode/g%2F4", ".span[data-turn='1']", 640),
    "view-training.png": ("/2/training?step=3", ".step-head", 620),
    "view-compare.png": ("/compare/0/4", ".interval", 560),
}
"""File, place in the page, what stands there, and the height."""


@pytest.fixture(scope="module")
def pictured(tmp_path_factory, tokenizer):
    """The runs of the pictures, under names that a reader may have chosen."""
    root = tmp_path_factory.mktemp("pictures")
    tasks = [*"abcdefghij"]
    better = [play(tokenizer, f"{task}/{k}", ("3", 1.0, "", {"correct": 1.0})) for task in tasks for k in range(2)]
    worse = [
        play(tokenizer, f"{task}/{k}", ("3", float(k or place % 3 == 0), "", {"correct": 1.0}))
        for place, task in enumerate(tasks)
        for k in range(2)
    ]
    runs = [
        save(root / "before", worse),
        save(root / "siblings", siblings_run(tokenizer)),
        train_run(root / "train", tokenizer),
        save(root / "after", better),
    ]
    with serving(*runs) as address:
        yield address


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_a_screen_that_is_there(browser, pictured, name):
    place, selector, height = PICTURES[name]
    size = {"width": 1180, "height": height}
    page = browser.new_context(viewport=size, color_scheme="light").new_page()
    page.goto(pictured.split("#")[0] + f"#{place}")
    page.wait_for_selector(selector)
    if os.environ.get("AGENTENV_DRAW_PICTURES"):
        page.wait_for_timeout(1500)  # the prompts of the tasks come after the numbers
        page.screenshot(path=ASSETS / name)
    page.context.close()
    assert (ASSETS / name).stat().st_size <= MOST_BYTES


def test_each_picture_is_in_the_documentation_and_no_other_is():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert set(re.findall(r"assets/(view-[\w-]+\.png)", pages)) == set(PICTURES)
