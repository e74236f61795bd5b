"""The page without a mouse, and in the colors of the system: names, a focus that shows, a glyph for each outcome."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.view.browser.test_page_screens import COMPARISONS
from tests.view.browser.test_page_screens import SCREENS as OPENED

pytestmark = pytest.mark.slow
PLACES = {**OPENED, **COMPARISONS}
TREES = Path(__file__).parent / "trees"
SCREENS = ("/0/overview", "/0/episodes", "/0/task/a", "/0/episode/a%2F1", "/3/training", "/compare/0/2")
FOCUSED = """() => {
    const node = document.activeElement;
    if (!node || node === document.body) return null;
    const style = getComputedStyle(node);
    const named = node.getAttribute('aria-label') || node.title || node.placeholder;
    const name = named || node.innerText || node.value || '';
    const label = node.labels && node.labels[0] ? node.labels[0].innerText : '';
    const box = node.getBoundingClientRect();
    return {
        tag: node.tagName, name: (name + label).trim(),
        shows: style.outlineStyle !== 'none' || style.boxShadow !== 'none',
        seen: box.width > 0 && box.height > 0, hidden: node.closest('[aria-hidden=true]') !== null,
    };
}"""


@pytest.mark.parametrize("place", SCREENS)
def test_24_each_stop_of_the_tab_key_has_a_name_and_shows_the_focus(opened, place):
    page = opened(place, "main h1, main .tiles, main .grid, main .charts, main .card")
    stops = []
    for _ in range(25):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUSED)
        if found is None:
            break
        stops.append(found)
    assert len(stops) > 3
    assert [each for each in stops if not (each["name"] and each["shows"] and each["seen"]) or each["hidden"]] == []


@pytest.mark.parametrize("address", ["server"], indirect=True)
def test_23_in_the_systems_colors_each_outcome_has_its_glyph(watched, address):
    page = watched(forced_colors="active").open(address, "/0/overview")
    page.wait_for_selector("[class*='o-']")
    assert page.evaluate("matchMedia('(forced-colors: active)').matches")
    marks = page.locator("a[class*='o-'], span[class*='o-']").evaluate_all(
        """nodes => nodes.map(node => [
            node.innerText.trim(), getComputedStyle(node).color, getComputedStyle(node).backgroundColor,
        ])"""
    )
    assert marks
    assert [each for each in marks if not each[0] or each[1] == each[2]] == []


def tree_of(page, root):
    """The accessibility tree, without what the place of the run and the form of its record decide."""
    tree = page.locator("body").aria_snapshot().replace(str(root), "RUNS")
    tree = re.sub(r"[\d,]+ bytes at [\d,]+", "bytes of its line", tree)
    tree = re.sub(r'- text: "\{ .*', "- text: JSON", tree)
    return tree + "\n"


@pytest.mark.parametrize("place", PLACES)
def test_28_each_screen_has_the_accessibility_tree_on_record(opened, folders, place):
    """AGENTENV_WRITE_TREES=1 writes the trees, after a change of the page that is meant."""
    page = opened(place, PLACES[place])
    path = TREES / f"{re.sub(r'[^a-z0-9]+', '-', place).strip('-') or 'runs'}.yml"
    if os.environ.get("AGENTENV_WRITE_TREES") and page.url.startswith("http"):
        page.wait_for_timeout(2000)
        path.write_text(tree_of(page, folders[0].parent))
    expected = path.read_text()
    if page.url.startswith("file:"):  # it compares by what was chosen when it was written
        expected = "".join(line for line in expected.splitlines(keepends=True) if "one unit by" not in line)
    deadline = time.monotonic() + 60
    while tree_of(page, folders[0].parent) != expected and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert tree_of(page, folders[0].parent) == expected
