"""A run that grows while one looks: added episodes, a superseded attempt, a torn line, a cut, a replaced file."""

import pytest

from agentenv.core.trajectory import EpisodeError
from tests.view.browser.conftest import serving
from tests.view.page_runs import play, save

pytestmark = pytest.mark.slow
MOST_HEAP_BYTES = 150e6


def shows(page, *ids):
    page.wait_for_function(
        "ids => [...document.querySelectorAll('[data-episode]')].map(row => row.dataset.episode).join() === ids",
        arg=",".join(ids),
    )


def test_16_the_table_follows_the_file(watched, tokenizer, tmp_path):
    folder, record = tmp_path / "run", tmp_path / "run" / "trajectories.jsonl"
    lines = []
    for number in range(4):
        save(tmp_path / f"one{number}", [play(tokenizer, f"t/{number}", (str(number), 1.0, "", {}))], metrics=False)
        lines.append((tmp_path / f"one{number}" / "trajectories.jsonl").read_bytes())
    save(folder, [play(tokenizer, "t/0", ("0", 1.0, "", {}))], metrics=False)
    with serving(folder) as address:
        page = watched().open(address, "/0/episodes")
        shows(page, "t/0")
        page.focus(".filter")
        page.keyboard.type("reward>0")
        with record.open("ab") as file:
            file.write(lines[1] + lines[2][:40])  # a torn line is nothing yet
        shows(page, "t/0", "t/1")
        assert page.evaluate("document.activeElement.className") == "filter"
        assert page.locator(".filter").input_value() == "reward>0"
        with record.open("ab") as file:
            file.write(lines[2][40:])
        shows(page, "t/0", "t/1", "t/2")
        record.write_bytes(lines[0])  # a resume cut the file
        shows(page, "t/0")
        (tmp_path / "new").write_bytes(lines[3] + lines[1])
        (tmp_path / "new").replace(record)
        shows(page, "t/3", "t/1")


def test_15_a_hundred_thousand_rows_are_filtered_and_sorted_in_the_page(watched, tokenizer, tmp_path):
    folder = save(tmp_path / "run", [play(tokenizer, "t/0", ("0", 1.0, "", {}))], metrics=False)
    with serving(folder) as address:
        one = watched()

        def many(route):
            fields = (
                '["offset","length","episode_id","group_id","attempt","reward","score","stop_reason","error","turns"]'
            )
            rows = (f'[{k},1,"{k // 8}/{k % 8}","{k // 8}",0,{k % 5},null,"terminated",null]' for k in range(100_000))
            body = "\n".join([f'{{"v":1,"source":"trajectories.jsonl","fields":{fields}}}', *rows, '!{"next":"x"}', ""])
            route.fulfill(body=body, content_type="application/x-ndjson")

        one.page.route("**/api/index**", many)
        one.page.route("**/api/heads**", lambda route: route.fulfill(json={"heads": []}))
        page = one.open(address, "/0/episodes?q=reward>3&sort=-episode")
        page.wait_for_function("() => document.querySelector('.summary')?.textContent.startsWith('20,000 of 100,000')")
        assert page.locator("[data-episode]").first.get_attribute("data-episode") == "12499/7"
        assert page.locator("[data-episode]").count() < 100
        page.locator(".grid").evaluate("grid => { grid.scrollTop = grid.scrollHeight; }")
        page.wait_for_selector("[data-episode='0/4']")
        session = one.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        assert session.send("Runtime.getHeapUsage")["usedSize"] < MOST_HEAP_BYTES


def test_an_attempt_that_failed_is_superseded(watched, tokenizer, tmp_path):
    error = EpisodeError("infra", "TimeoutError", "late", "", "")
    folder = save(tmp_path / "run", [play(tokenizer, "t/0", ("0", None, "", {}), error=error)], metrics=False)
    with serving(folder) as address:
        page = watched().open(address, "/0/overview")
        page.wait_for_selector(".fold")
        again = play(tokenizer, "t/0", ("0", 1.0, "", {}))
        again.attempt, again.turns[0].num_retries = 1, 2
        save(tmp_path / "again", [again], metrics=False)
        with (folder / "trajectories.jsonl").open("ab") as file:
            file.write((tmp_path / "again" / "trajectories.jsonl").read_bytes())
        page.wait_for_selector("text=1 retry, 2 step retries")
