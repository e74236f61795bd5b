"""When episodes ran: the lanes of a train step, and how many ran at once in a run."""

import re
from dataclasses import replace

import pytest

from agentenv.runs.metrics import summarize
from agentenv.runs.records.steps import StepGroup, TrainedEpisode, append_step, train_row
from tests.view.browser.conftest import serving
from tests.view.page_runs import RIGHT, WRONG, play, save

pytestmark = pytest.mark.slow
BEGAN_S = 1_795_746_000.0
MIDNIGHT_S = 86_400.0


def timed(tokenizer, episode_id, began_s, turns, wait_s=0.0):
    """An episode whose turns are (seconds since its start, in the engine, in `step`)."""
    said = [("28 * 4 = 108", 0.0, "No.", WRONG)] * (len(turns) - 1) + [("28 * 4 = 112", 1.0, "", RIGHT)]
    played = play(tokenizer, episode_id, *said)
    played.turns[:] = [
        replace(turn, began_s=at, generate_s=generate_s, step_s=step_s)
        for turn, (at, generate_s, step_s) in zip(played.turns, turns, strict=True)
    ]
    return replace(played, began_s=BEGAN_S + began_s, wait_s=wait_s)


def training(folder, episodes):
    """A training of one step that learned from these episodes, and kept them."""
    save(folder, episodes, metrics=False)
    trained = {each.episode_id: TrainedEpisode((0.5,), 0, 0, 9, 0.0) for each in episodes}
    group = StepGroup("t", tuple(map(summarize, episodes)))
    kept = [each.episode_id for each in episodes]
    append_step(folder, train_row(1, [group], trained, kept=kept, estimator="group_norm", credit="turn"))
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollout/reward": 0.5}\n')
    return folder


def test_lanes_stand_where_the_record_says_when_the_turns_were(watched, tokenizer, tmp_path):
    late = timed(tokenizer, "t/0", 4.0, [(0.0, 2.0, 1.0), (3.0, 2.0, 1.0)])
    early = timed(tokenizer, "t/1", 0.0, [(1.0, 3.0, 0.0)], wait_s=2.0)
    with serving(training(tmp_path / "run", [late, early])) as address:
        page = watched().open(address, "/0/training?step=1")
        page.wait_for_selector("[data-lane]")
        assert page.locator("[data-lane]").evaluate_all("rows => rows.map(row => row.dataset.lane)") == ["t/1", "t/0"]
        assert "within 10 s" in page.locator(".card", has_text="When the episodes ran").inner_text()

        def parts(episode, part):
            rects = page.locator(f"[data-lane='{episode}'] rect.{part}")
            return rects.evaluate_all(
                "nodes => nodes.map(node => ['x', 'width'].map(name => Math.round(node.getAttribute(name))))"
            )

        assert parts("t/1", "series0") == [[100, 300]]
        assert parts("t/1", "lane-wait") == [[0, 500]]
        assert parts("t/0", "series0") == [[400, 200], [700, 200]]
        assert parts("t/0", "series1") == [[600, 100], [900, 100]]
        page.click("[data-lane='t/0'] a")
        page.wait_for_selector(".tokens")


def test_a_record_without_starts_has_no_lanes(opened):
    page = opened("/3/training?step=2", "[data-episode]")
    assert page.locator("text=When the episodes ran").count() == 0


def test_the_overview_says_how_many_episodes_ran_at_once(watched, tokenizer, tmp_path):
    spans = [(MIDNIGHT_S, 12.0), (MIDNIGHT_S + 6.0, 12.0), (MIDNIGHT_S + 36.0, 12.0)]
    episodes = [timed(tokenizer, f"t/{k}", at, [(0.0, took, 0.0)]) for k, (at, took) in enumerate(spans)]
    with serving(save(tmp_path / "run", episodes)) as address:
        page = watched().open(address, "/0/overview")
        card = page.locator(".card", has_text="Episodes at once")
        card.wait_for()
        assert "at most 2" in card.inner_text()
        bars = [re.split(": | ", text) for text in card.locator("title").all_text_contents()]  # a second each
        found = {int(second): float(num) for second, num, *_ in bars}
        ran = {
            second: sum(at - MIDNIGHT_S <= second < at - MIDNIGHT_S + took for at, took in spans) for second in found
        }
        assert len(found) == 48
        assert found == ran
