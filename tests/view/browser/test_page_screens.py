"""Screens and addresses of the page, from the server and from one file. Numbers are those of the research page, C14."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.cli.main import main
from agentenv.compare import compare
from agentenv.compare.report import sections_of
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Answer, Completion, StepResult, StopReason, Task
from agentenv.runs.metrics import summarize
from agentenv.runs.records.filters import parse_filter
from agentenv.runs.records.selection import Selection, select
from agentenv.runs.records.steps import append_step, evaluation_row
from agentenv.training.logs.samples import keep_evaluation
from agentenv.view.single_file import FileOptions, write_html
from agentenv.view.viewed import find_runs
from tests.runs.filter_run import write_filter_run
from tests.view.browser.conftest import serving
from tests.view.page_runs import QUESTION, play, save, siblings_run, small_run, train_run

pytestmark = pytest.mark.slow
LANGUAGE = json.loads((Path(__file__).parents[2] / "runs" / "filters.json").read_text())

SCREENS = {
    "/": "text=training",
    "/0/overview": ".tiles",
    "/0/episodes": "[data-episode]",
    "/0/task/a": ".strand-head",
    "/0/episode/a%2F1": ".tokens",
    "/0/episode/a%2F1?tab=messages": ".message",
    "/0/episode/a%2F1?tab=record": ".json",
    "/0/episode/a%2F1?tab=replay": ".command",
    "/0/episode/a%2F1/t1": "[data-turn='1']",
    "/3/training": ".chart",
    "/3/training?step=2": ".step-head",
}


COMPARISONS = {"/compare/0/2": ".interval", "/compare/0/2?task=a": ".pair-side"}


@pytest.mark.parametrize("place", SCREENS)
def test_3_every_screen_opens_by_its_address_and_a_reload_keeps_it(opened, place):
    page = opened(place, SCREENS[place])
    page.reload()
    page.wait_for_selector(SCREENS[place])
    assert page.evaluate("location.hash") == f"#{place}"


def test_nothing_is_shown_for_times_and_tokens_that_a_record_of_another_trainer_lacks(watched):
    with serving(Path(__file__).parents[1] / "foreign" / "verl") as address:
        places = {"overview": ".task-row", "task/250ab62c38@3": ".strand-head", "episodes": "[data-episode]"}
        for place, selector in places.items():
            page = watched().open(address, f"/0/{place}")
            page.wait_for_selector(selector)
            text = page.locator("main").inner_text()
            assert not re.search(r"\b0 tokens|sampled tokens|0\.000 s", text, re.IGNORECASE), text


def test_1_the_shell_is_painted_before_any_data(watched, server_address):
    one = watched()
    one.page.route("**/api/**", lambda route: None)  # no answer ever comes
    page = one.open(server_address)
    page.wait_for_selector("text=agentenv view")
    assert page.locator("h2").count() == 0


def test_12_a_task_says_why_its_episodes_failed(opened):
    page = opened("/0/overview", ".task-row[data-task=d]")
    assert page.locator(".task-row[data-task=d] .right").all_inner_texts() == ["—", "—"]
    page.click(".tile.bad a")
    page.wait_for_function("() => document.querySelectorAll('[data-episode]').length === 1")
    page.go_back()
    page.click(".task-row[data-task=d] .task-id")
    assert page.locator(".strand-error").inner_text() == "ValueError: none"


def test_the_overview_says_what_its_numbers_are_over(watched, tokenizer, tmp_path):
    episodes = [play(tokenizer, f"{task}/{k}", ("- 3" * k, float(k), "", {})) for task in "ab" for k in (0, 1)]
    failed = play(tokenizer, "c/0", ("3", None, "", {}), error=EpisodeError("infra", "OSError", "gone", "env.py:3", ""))
    failed.attempt, failed.turns[0].num_retries = 2, 1
    run = save(tmp_path / "run", [*episodes, failed])
    write_html(find_runs([str(run)]), tmp_path / "some.html", FileOptions(where="reward>0"))
    with serving(run) as address:
        page = watched().open(address, "/0/overview")
        page.wait_for_selector(".tile:has-text('mean reward, errors left out'):has-text('over 2 tasks')")
        page.get_by_role("cell", name="Markdown marks").wait_for()
        for link, found in (("2 retries", "c/0"), ("1 step retry", "c/0")):
            page.get_by_role("link", name=link).click()
            page.wait_for_function("() => document.querySelectorAll('[data-episode]').length === 1")
            assert page.locator("[data-episode]").get_attribute("data-episode") == found
            page.go_back()
    page = watched().open((tmp_path / "some.html").as_uri(), "/0/overview")
    page.wait_for_selector(".tile:has-text('1.000mean rewardover episodes')")
    assert page.locator(".tile", has_text="pass@").count() == 0


def test_3_back_leads_to_the_screens_before(opened):
    page = opened("/0/overview", ".task-row[data-task=b]")
    page.click(".task-row[data-task=b] .task-id")
    page.wait_for_selector(".strand-head")
    page.click(".strand-ids a")
    page.wait_for_selector(".tokens")
    page.go_back()
    page.wait_for_selector(".strand-head")
    page.go_back()
    page.wait_for_selector(".task-row[data-task=b]")
    assert page.evaluate("location.hash") == "#/0/overview"


def test_what_differs_comes_first_and_the_rest_is_by_outcome(opened):
    page = opened("/0/overview", ".task-row[data-task=b]")
    assert page.locator("[data-place='0']").get_attribute("data-task") == "b"
    folds = page.locator(".fold > summary").all_inner_texts()
    assert [re.sub(r"\s+", " ", text).strip("! ✗✓=") for text in folds[:3]] == [
        "with an error or without a reward 1 task", "failed by all siblings 1 task", "solved by all siblings 1 task",
    ]  # fmt: skip


def test_the_overview_of_a_file_has_the_prompt_of_each_task_whichever_sibling_ended_first(watched, tokenizer, tmp_path):
    run = save(tmp_path / "run", small_run(tokenizer)[::-1], metrics=False)
    write_html(find_runs([str(run)]), tmp_path / "page.html", FileOptions())
    page = watched().open((tmp_path / "page.html").as_uri(), "/0/overview")
    for task in "bcd":
        page.locator(f".task-row[data-task={task}] .prompt", has_text=QUESTION).wait_for()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/9/overview", "There is no run 9 here."),
        ("/0/task/aa", "There is no task with this id"),
        ("/0/episode/a%2F7", "There is no episode with this id"),
        ("/0/episode/%E0%A4%A", "There is no episode with this id"),
    ],
)
def test_4_what_is_not_there_is_said_with_near_ids(opened, place, said):
    page = opened(place, f"text={said}")
    if "a%2F7" in place:
        assert page.locator("a.near").all_inner_texts()[0].startswith("a/")
    if "task" in place:
        page.click("text=← overview")
        page.wait_for_selector(".tiles")


def test_4_a_token_that_is_not_there_leaves_the_episode_open(opened):
    assert opened("/0/episode/a%2F1/t1/k99999", ".tokens").locator(".t.selected").count() == 0


def test_5_filters_keep_what_they_keep_in_python(watched, tmp_path):
    write_filter_run(tmp_path / "run")
    with serving(tmp_path / "run") as address:
        one = watched()
        page = one.open(address, "/0/episodes")
        page.wait_for_selector("[data-episode]")
        for text, expected in LANGUAGE["cases"]:
            _type(page, text)
            page.wait_for_function("text => document.querySelector('.summary').dataset.query === text", arg=text)
            rows = page.locator("[data-episode]").evaluate_all("rows => rows.map(row => row.dataset.episode)")
            assert rows == expected, text
        for text, message in LANGUAGE["errors"]:
            if text.strip():  # an empty line is no filter here
                _type(page, text)
                page.wait_for_selector(".filter-problem")
                assert message in page.locator(".filter-problem").inner_text(), text
                _type(page, "")
                page.wait_for_selector(".filter-problem", state="detached")


def test_5_a_task_is_found_in_the_evaluations_of_every_step(watched, tokenizer, tmp_path):
    folder = train_run(tmp_path / "train", tokenizer)
    for step in (1, 2):
        keep_evaluation(folder, step, [play(tokenizer, f"{task}/0", ("3", 1.0, "", {})) for task in "ab"])
    kept = select(folder / "eval", Selection(where=parse_filter("task=a")))
    with serving(folder) as address:
        page = watched().open(address, "/1/episodes?q=task=a")
        page.wait_for_selector("[data-episode]")
        rows = page.locator("[data-episode]").evaluate_all("rows => rows.map(row => row.dataset.episode)")
        assert rows == [each.episode_id for each in kept] == ["a@1/0", "a@2/0"]


def _type(page, text):
    page.fill(".filter", text)
    page.press(".filter", "Enter")


def test_6_sorting_is_stable_and_what_has_no_value_comes_last(opened):
    def order(page):
        return page.locator("[data-episode]").evaluate_all("rows => rows.map(row => row.dataset.episode)")

    page = opened("/0/episodes?sort=-reward", "[data-episode]")
    assert order(page) == ["a/0", "a/1", "b/0", "c/0", "c/1", "b/1", "d/0"]
    page = opened("/0/episodes?sort=reward", "[data-episode]")
    assert order(page) == ["b/1", "c/0", "c/1", "a/0", "a/1", "b/0", "d/0"]


def test_a_filter_that_is_wrong_keeps_no_rows_of_an_earlier_one(opened):
    page = opened("/0/episodes?q=reward>0", "[data-episode]")
    page.fill(".filter", "reward>")
    page.wait_for_selector(".filter-problem")
    assert page.locator("[data-episode]").count() == 0
    page.fill(".filter", "reward<0")
    page.wait_for_selector("[data-episode='b/1']")


def test_numbers_of_info_are_columns_that_sort(opened):
    page = opened("/0/episodes?sort=-info.correct", "[data-episode]")
    assert page.get_by_role("columnheader", name="info.correct").get_attribute("aria-sort") == "descending"
    order = page.locator("[data-episode]").evaluate_all("rows => rows.map(row => row.dataset.episode)")
    assert order == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1", "d/0"]  # 1, 0, and d has none


def test_a_head_says_what_to_filter_by_and_what_no_filter_finds(opened):
    page = opened("/3/episodes", "[data-episode]")
    page.get_by_role("button", name="A", exact=True).wait_for()  # the train steps are read after the episodes
    heads = page.locator(".grid-head button").evaluate_all("heads => heads.map(each => [each.innerText, each.title])")
    titles = {name: title.partition("; sort")[2] for name, title in heads}
    assert (titles["tokens"], titles["mean lp"]) == ("; filter by act", "; filter by mean_logprob")
    assert titles["step"] == titles["A"] == ""
    _type(page, "step=2")
    page.wait_for_selector(".filter-problem >> text=got 'step', which the train steps have")
    _type(page, "task=u")
    page.wait_for_selector(".empty >> text=task:000004*")


def test_the_environments_own_info_has_a_column_before_what_graders_count(watched, tokenizer, tmp_path):
    info = {"judge/requests": 1, "judge/retries": 0, "rm/num_requests": 1, "judge/cost": 0.5, "right": 1, "polite": 0}
    with serving(save(tmp_path / "run", [play(tokenizer, "a/0", ("3", 1.0, "", info))])) as address:
        page = watched().open(address, "/0/episodes")
        page.wait_for_selector("[data-episode]")
        heads = page.get_by_role("columnheader").filter(has_text="info.").all_inner_texts()
        assert heads == ["info.right", "info.polite", "info.judge/requests", "info.judge/retries"]


def test_x_marks_two_episodes_that_stand_beside_each_other(opened):
    page = opened("/0/episodes", "[data-episode]")
    for step in ("j", "x", "j", "j", "x"):
        page.keyboard.press(step)
    page.wait_for_selector(".strand-head")
    assert "mark=a%2F0&and=b%2F0" in page.evaluate("location.hash")
    heads = page.locator(".strand-head").all_inner_texts()
    assert [re.findall(r"\b[ab]/0", head) for head in heads] == [["a/0"], ["b/0"]]
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-episode]")


def test_slash_finds_a_text_that_goes_over_several_tokens(opened):
    page = opened("/0/episode/a%2F1", ".tokens")
    page.keyboard.press("/")
    page.keyboard.type("TRY AGAIN")
    page.wait_for_selector(".find >> text=1 found")
    page.keyboard.press("Enter")
    page.wait_for_selector(".t.selected")
    chosen = page.locator(".t.selected")
    assert chosen.evaluate("node => node.closest('.span').dataset.kind") == "feedback"


def test_7_keys_walk_from_episode_to_sibling_to_task_and_up(opened):
    def is_at(place):
        page.wait_for_function("place => location.hash.startsWith('#' + place)", arg=place)

    page = opened("/0/episode/a%2F0", ".tokens")
    page.keyboard.press("j")
    is_at("/0/episode/a%2F1")
    page.wait_for_selector("[data-turn='1']")
    page.keyboard.press("]")
    is_at("/0/episode/a%2F1/t0")
    page.keyboard.press("n")
    is_at("/0/episode/a%2F1/t0/k")
    page.keyboard.press("J")
    is_at("/0/episode/b%2F0")
    page.wait_for_selector("text=b/0")
    page.keyboard.press("u")
    is_at("/0/task/b")
    page.wait_for_selector(".strand-head")
    page.keyboard.press("u")
    is_at("/0/overview")
    page.keyboard.press("g")
    page.keyboard.press("e")
    is_at("/0/episodes")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def parting(reference, other):
    """The first (turn, token of the action) at which two episodes differ; a reference for the page."""
    for turn in range(max(len(reference.turns), len(other.turns))):
        ids = [
            list(each.segments[0].token_ids[each.turns[turn].start : each.turns[turn].end])
            if turn < len(each.turns)
            else []
            for each in (reference, other)
        ]
        if ids[0] != ids[1]:
            same = [a == b for a, b in zip(*ids, strict=False)]
            return turn, same.index(False) if False in same else len(same)
    raise AssertionError("they do not part")


def test_13_identical_siblings_are_folded_and_each_parts_where_it_parts(opened, tokenizer):
    episodes = siblings_run(tokenizer)
    page = opened("/1/task/g", ".strand-head")
    heads = page.locator(".strand-head")
    assert [text.split() for text in heads.locator(".strand-ids").all_inner_texts()] == [
        ["#0", "#1", "#2"],
        ["#3"],
        ["#4"],
    ]
    expected = ["", *("{}:{}".format(*parting(episodes[0], episodes[k])) for k in (3, 4))]
    assert heads.evaluate_all("heads => heads.map(head => head.dataset.parts)") == expected
    turn, unit = parting(episodes[0], episodes[4])
    decision = page.locator(".decision")
    assert (decision.get_attribute("data-turn"), decision.get_attribute("data-unit")) == (str(turn), str(unit))
    page.keyboard.press("d")
    page.wait_for_selector(".left-out")


def test_14_one_task_of_64_siblings_opens_as_a_table_of_which_some_are_read(watched, tokenizer, tmp_path):
    many = [play(tokenizer, f"g/{k}", (f"28 * {k} = 112", float(k % 2), "", {})) for k in range(64)]
    with serving(save(tmp_path / "run", many, metrics=False)) as address:
        page = watched().open(address, "/0/task/g")
        page.wait_for_selector(".strand-table")
        assert page.locator(".strand-head").count() == 2
        page.locator(".strand-row input:not(:checked)").first.check()
        page.wait_for_function("() => document.querySelectorAll('.strand-head').length === 3")


def test_17_a_step_leads_to_its_episodes_and_back_to_the_same_zoom(opened):
    page = opened("/3/training?zoom=1_3", ".chart")
    page.keyboard.press("j")
    page.wait_for_selector(".step-head")
    page.keyboard.press("j")
    page.wait_for_selector("text=Step 2")
    bars = page.locator(".histogram title").all_text_contents()
    assert (bars[0], bars[-1]) == ("−0.5 to below −0.452: 1 turns", "0.452 to 0.5: 1 turns")
    page.click("[data-episode='t@1/0'] a")
    page.wait_for_selector(".tokens")
    assert "learned at step 2" in page.locator(".headline").inner_text()
    page.go_back()
    page.wait_for_selector("text=Step 2")
    assert "zoom=1_3" in page.evaluate("location.hash")
    page.click("[data-episode='t@1/0'] a")
    page.click(".headline >> a >> text=2")
    page.wait_for_selector("text=Step 2")


def test_two_trainings_stand_in_the_same_charts_and_are_compared_down_to_their_episodes(watched, tokenizer, tmp_path):
    with serving(*(train_run(tmp_path / name, tokenizer) for name in ("one", "two"))) as address:
        page = watched().open(address, "/0/training")
        page.wait_for_selector(".chart")
        page.get_by_role("group", name="trainings beside this one").get_by_role("checkbox").check()
        page.wait_for_selector(".chart-legend >> text=training, two")
        page.reload()
        page.wait_for_selector(".chart-legend >> text=training, two")
        page.keyboard.press("j")
        page.wait_for_selector("text=Step 1")
        page.get_by_role("navigation", name="screens").get_by_role("link", name="Compare").click()
        page.wait_for_selector(".interval, .tiles")
        assert page.evaluate("location.hash").startswith("#/compare/0/2")  # run 1 is that of its own evaluations
        page.evaluate("location.hash = '#/compare/0/2?task=t'")
        # of all passes over the data, as in the comparison
        page.wait_for_function("() => document.querySelectorAll('.pair-side .strand-head').length === 4")
        assert "t@1/0 and 4 more" in page.locator(".pair-side").first.inner_text()


def test_a_task_of_two_trainings_opens_the_episodes_of_the_evaluations_that_were_compared(watched, tokenizer, tmp_path):
    def training(name, steps, kept, reward):
        folder = train_run(tmp_path / name, tokenizer)
        for step in steps:
            episodes = [play(tokenizer, f"{task}/{k}", ("3", reward, "", {})) for task in "tu" for k in range(2)]
            rows = [replace(summarize(each), env=f"env-{each.group_id}") for each in episodes]
            append_step(folder, evaluation_row(step, rows))
        save(folder / "eval", [
            play(tokenizer, f"t@{step}/{k}", (f"{name} evaluated at {step}", 0.3, "", {}))
            for step in steps for k in range(kept)
        ])  # fmt: skip
        return str(folder)

    runs, out = [training("one", [1, 2], 2, 0.3), training("two", [1], 1, 0.4)], tmp_path / "page.html"
    assert main(["diff", *runs, "--html", str(out)]) == 0
    with serving(*runs) as address:
        for origin, place in ((out.as_uri(), "/compare/0/1?task="), (address, "/compare/0/2?task=")):
            page = watched().open(origin, f"{place}t")
            page.wait_for_function("() => document.querySelectorAll('.pair-side .strand-head').length === 2")
            a, b = page.locator(".pair-side").all_inner_texts()
            assert a.startswith("A: one, evaluation at step 2\n")
            assert "one evaluated at 2" in a
            assert "All took the same actions." in a
            assert "1 episode of the 2 that are compared" in b
            assert "two evaluated at 1" in b
            page = watched().open(origin, f"{place}u")
            page.wait_for_function("() => document.querySelectorAll('.pair-side .empty').length === 2")
            assert "agentenv run --model TRAINING/model" in page.locator(".pair-side .empty").first.inner_text()
            page.click("text=all tasks")
            assert page.locator("[data-task]").evaluate_all("rows => rows.map((row) => row.dataset.task)") == ["t", "u"]
            page.wait_for_selector("[data-task=t] a")
            assert page.locator("[data-task=u] a").count() == 0  # nothing to open
            assert page.locator("text=agentenv run --model TRAINING/model").count() == 1
            table = page.locator(".card", has_text="Environments").locator("tbody")
            assert [row.split("\t")[:3] + row.split("\t")[-1:] for row in table.inner_text().split("\n")] == [
                [env, "0.3", "0.4", "unknown"] for env in ("env-t", "env-u")
            ]


def test_of_a_run_graded_again_the_page_lists_the_episodes_that_changed(watched, tokenizer, tmp_path):
    old, new = (
        save(tmp_path / name, [
            play(tokenizer, f"{task}/{k}", ("3", value if (task, k) == ("t", 1) else k / 2, "", {}))
            for task in "tu" for k in range(2)
        ])
        for name, value in (("old", 0.5), ("new", 1.0))
    )  # fmt: skip
    document = json.loads((new / "config.json").read_text())
    document["config"]["rescored"] = {"run": str(old)}
    (new / "config.json").write_text(json.dumps(document))
    with serving(old, new) as address:
        page = watched().open(address, "/compare/0/1")
        card = page.locator(".card", has_text="Episodes that changed")
        assert card.locator("tbody").inner_text().split() == ["t/1", "0.50", "1.00", "+0.50"]
        tasks = page.locator(".card", has_text="Tasks, those that changed most first")
        assert tasks.locator("th").all_inner_texts() == ["task", "A", "B", "B − A", "episodes"]
        card.get_by_role("link", name="1.00").click()
        page.wait_for_function("() => location.hash.startsWith('#/1/episode/t%2F1')")
        page.go_back()
        card.get_by_role("link", name="t/1").click()
        page.wait_for_function("() => document.querySelectorAll('.pair-side').length === 2")
        assert page.locator("h1").inner_text() == "t"


def test_the_overview_of_a_mixture_has_the_numbers_of_each_environment(watched, tokenizer, tmp_path):
    run = save(tmp_path / "run", siblings_run(tokenizer))
    metrics = json.loads((run / "metrics.json").read_text())
    environments = {"letters": metrics, "own": metrics | {"num_tasks": 0, "reward": None, "turns_mean": None}}
    (run / "metrics.json").write_text(json.dumps(metrics | {"environments": environments}))
    with serving(run) as address:
        page = watched().open(address, "/0/overview")
        page.wait_for_selector(".environments")
        rows = [row.split("\t") for row in page.locator(".environments tbody tr").all_inner_texts()]
        assert [row[:3] for row in rows] == [["letters", "1", "0.740"], ["own", "0", "—"]]
        page.click(".environments >> text=letters")
        page.wait_for_function("() => location.hash.startsWith('#/0/episodes?q=env%3Dletters')")


def test_only_what_can_be_compared_is_offered(watched, tokenizer, tmp_path):
    run = save(tmp_path / "b", [play(tokenizer, "t/0", ("3", 1.0, "", {}))])
    training = train_run(tmp_path / "a", tokenizer)
    save(training / "eval", [play(tokenizer, "t@1/0", ("3", 1.0, "", {}))])
    with serving(training) as alone, serving(training, run) as address:
        page = watched().open(alone, "/0/training")
        page.wait_for_selector(".chart")
        assert page.get_by_role("link", name="Compare").count() == 0
        page = watched().open(address, "/0/training")
        page.get_by_role("link", name="Compare").click()
        page.wait_for_function("() => location.hash === '#/compare/0/2'")  # run 1 is that of its own evaluations
        assert page.locator(".toolbar select").nth(1).locator("option").all_inner_texts() == ["a", "b"]
        page.wait_for_selector(".tiles")  # else the server stops before it has answered


def test_a_step_is_compared_with_any_other(opened):
    page = opened("/3/training?step=4", ".step-head")
    assert "+0.26" in page.locator(".numbers").inner_text()  # 1.05, and 0.79 at step 3
    page.get_by_label("change since step").select_option("1")
    page.wait_for_selector(".numbers >> text=+0.79")  # 0.26 at step 1
    assert "since=1" in page.evaluate("location.hash")
    page.get_by_label("mean over").select_option("5")
    page.wait_for_selector("text=Means of the last 5 steps")
    cells = page.locator(".numbers tr", has_text="rollout/reward").locator("td").all_inner_texts()
    assert cells[1:] == ["0.6575", "+0.3975"]  # of 0.26, 0.53, 0.79 and 1.05


def test_18_a_step_that_was_done_again_counts_once_by_its_last_line(opened):
    page = opened("/3/training", ".chart")
    page.wait_for_selector("text=4 train steps")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_selector("text=Step 2")
    assert "0.53" in page.locator(".numbers").inner_text()  # 0.52 was that of the line before


def test_groups_that_failed_as_a_whole_are_flagged(watched, tokenizer, tmp_path):
    training = train_run(tmp_path / "training", tokenizer)
    with (training / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "rollout/num_failed": 0.0, "rollout/num_rejected_failed": 8.0}) + "\n")
    with serving(training) as address:
        page = watched().open(address, "/0/training")
        page.wait_for_selector(".flag-list >> text=Episodes failed")
        assert "in 1 of 5 steps, 8 groups left out" in page.locator(".flag-list").inner_text()


def test_longer_episodes_are_flagged_where_a_held_out_score_did_not_rise(watched, tokenizer, tmp_path):
    by_length = "rollout/reward/length_correlation_in_group"

    def flagged(name, **score):
        training = train_run(tmp_path / name, tokenizer)
        lines = [
            {"step": step, "rollout/num_episodes": 200.0, "rollout/action_tokens": 10.0 + 3 * step, **score,
             by_length: -float(step > 2)}
            for step in range(1, 13)
        ]  # fmt: skip
        (training / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with serving(training) as address:
            page = watched().open(address, "/0/training")
            page.wait_for_selector(".chart")
            held = page.locator(".flag-list li", has_text="The reward goes by length")
            assert "since step 3" in held.inner_text()
            assert "q=version%3E%3D3" in held.get_by_text("its episodes").get_attribute("href")
            num = page.get_by_text("Episodes get longer").count()
            page.close()  # it asks the server, which ends here
            return num

    assert flagged("evaluated", **{"eval/score": 0.5}) == 1
    assert flagged("alone") == 0


def test_the_tiles_of_a_training_are_of_the_kept_episodes(watched, tokenizer, tmp_path):
    training = train_run(tmp_path / "training", tokenizer)
    evaluated = [play(tokenizer, f"t@{step}/{k}", ("3", 1.0, "", {})) for step in (0, 10) for k in range(2)]
    save(training / "eval", evaluated, metrics=False)
    with serving(training) as address:
        for run, whole, gradient in ((0, "training", 1), (1, "evaluations", 0)):
            page = watched().open(address, f"/{run}/overview")
            page.wait_for_selector(f".tiles >> text=kept of the {whole}")
            names = page.locator(".tile-name").all_inner_texts()
            assert [name.lower() for name in names if "error" not in name] == ["episodes"] + [
                f"{name}, kept episodes" for name in ("mean reward", "groups without spread", "turns", "sampled tokens")
            ]
            assert page.get_by_text("no gradient").count() == gradient
        page = watched().open(address, "/1/task/t@10")
        page.wait_for_selector(".over-training >> text=2 evaluations")
        assert page.locator(".over-training td:nth-child(2)").all_inner_texts() == ["0", "10"]


def test_a_chart_says_the_step_under_the_pointer_and_a_click_beyond_its_end_opens_the_last(opened):
    page = opened("/3/training", ".chart .u-over")
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 20)
    page.wait_for_selector(".chart-label >> text=step 1")
    page.mouse.click(box["x"] + box["width"] + 5, box["y"] + 20)
    page.wait_for_selector(".step-head >> text=Step 4")


def test_a_color_is_by_what_the_record_has(opened):
    page = opened("/3/episode/t%2F0", ".tokens")
    page.get_by_label("color by").select_option("advantage")
    page.evaluate("location.hash = '#/0/episode/a%2F1'")
    page.wait_for_selector("text=a/1")
    page.wait_for_function("() => document.querySelector('.color-bar select').value === 'logprob'")


def test_the_overview_says_that_it_still_reads(watched, folders, server_address):
    one = watched()
    index = (folders[0] / "index.jsonl").read_text()
    one.page.route("**/api/index?*", lambda route: route.fulfill(body=index))  # its end never comes
    page = one.open(server_address, "/0/overview")
    page.wait_for_selector(".tile >> text=reading…")


def test_the_same_task_over_training_is_one_table(opened):
    page = opened("/3/task/t", ".over-training")
    assert page.locator(".over-training tbody tr").count() == 4


def test_19_the_comparison_says_what_diff_says(watched, address, folders):
    told = compare(folders[0], folders[2]).to_dict()
    page = watched().open(address, "/compare/0/2")
    page.wait_for_selector(".interval")
    text = page.locator(".tiles").inner_text().replace("−", "-")
    assert f"{told['a']['mean']:.3f}\nA: small\n" in text
    assert f"{told['b']['mean']:.3f}\nB: better\n" in text
    assert f"{told['difference']['mean']:+.3f}\nB - A" in text
    moved = [task["task_id"] for task in told["tasks"] if task["difference"]]
    assert page.locator("[data-task]").evaluate_all("rows => rows.map(row => row.dataset.task)") == moved


def test_small_costs_are_shown_as_the_terminal_shows_them(watched, tokenizer, tmp_path):
    def run(name, cost):
        episodes = [play(tokenizer, f"{task}/0", ("3", 1.0, "", {"judge/cost": cost / 100})) for task in "abc"]
        for episode in episodes:
            episode.turns[0] = replace(
                episode.turns[0], answer=Answer("3", num_input_tokens=9, num_output_tokens=1, cost_usd=cost)
            )
        return save(tmp_path / name, episodes)

    with serving(run("one", 0.00194), run("two", 0.00293)) as address:
        page = watched().open(address, "/0/overview")
        page.wait_for_selector("text=What it cost")
        costs = page.locator(".card", has_text="What it cost").locator("dd").all_inner_texts()
        assert costs[3:] == ["0.0058", "0.000058"]
        page = watched().open(address, "/compare/0/1")
        page.wait_for_selector(".interval")
        rows = [page.locator("tr", has_text=name).locator("td") for name in ("policy cost", "judge/cost")]
        assert [row.all_inner_texts()[1:4] for row in rows] == [
            ["0.0019", "0.0029", "+0.00099"], ["0.000019", "0.000029", "+0.0000099"],
        ]  # fmt: skip


def test_a_comparison_has_room_for_its_numbers_and_tells_tasks_from_chance_as_diff_does(watched, tokenizer, tmp_path):
    def run(name, reward):
        def info(task):
            return {"judge/completion_tokens_of_replies": reward / 1000 + (task == "a") / 10**6}

        return save(tmp_path / name, [
            play(tokenizer, f"{task}/{k}", ("3", reward + (task == "a") * reward / 100, "", info(task)))
            for task in "abc" for k in range(2)
        ])  # fmt: skip

    folders = run("one", 0.9), run("two", 0.105)
    with serving(*folders) as address:
        page = watched().open(address, "/compare/0/1")
        page.wait_for_selector(".interval")
        assert page.evaluate(
            "[...document.querySelectorAll('.compare-cards table')].every((table) =>"
            " table.getBoundingClientRect().right <= table.closest('.card').getBoundingClientRect().right)"
        )
        assert page.locator(".interval text").all_text_contents() == ["0", "−0.81 to −0.79"]
        said = sections_of(compare(*folders))["Tasks (★: q ≤ 0.10)"][-1][1]
        assert said in page.locator("main").inner_text()


def test_a_task_of_text_has_the_tokens_that_the_server_counted_and_no_colors(watched, tmp_path):
    def text_of(episode_id, num_tokens):
        episode = Trajectory(Task("Q", task_id="a"), 10**6, episode_id, "a")
        answer = Answer("one two three", num_input_tokens=9, num_output_tokens=num_tokens)
        episode.append_turn(Completion((), answer=answer), answer.content)
        episode.set_result(StepResult(reward=float(num_tokens is None), terminated=True))
        episode.finish(StopReason.TERMINATED)
        return episode

    with serving(save(tmp_path / "text", [text_of("a/0", 16), text_of("a/1", None)])) as address:
        page = watched().open(address, "/0/task/a")
        page.wait_for_selector(".strand-cell.action")
        assert re.findall(r"\S+ tokens", page.locator("main").inner_text()) == ["16 tokens"] * 2
        assert not page.locator(".color-bar").count()


def test_costs_and_what_ran_again_are_in_the_overview_the_list_and_at_the_turn(watched, tmp_path):
    with serving(write_filter_run(tmp_path / "run")) as address:
        page = watched().open(address, "/0/overview")
        again = "1 retry, 8 step retries, 12 request retries, 6 failovers"
        page.wait_for_selector(f".tile >> text={again}")
        page.click("text=12 request retries")
        page.wait_for_selector("[data-episode='d/2']")
        heads = page.get_by_role("columnheader").all_inner_texts()
        cells = dict(zip(heads, page.locator("[data-episode='d/2'] [role=gridcell]").all_inner_texts(), strict=True))
        assert (cells["cost $"], cells["request retries"]) == ("1.0000", "4")
        page.click("[data-episode='d/2']")
        page.wait_for_selector(".message")
        facts = page.locator(".headline .fact").all_inner_texts()
        assert {"cost $1.0000", "request retries 4"} <= set(facts)
        chips = page.locator("article header").filter(has_text="turn 1").locator(".chip").all_inner_texts()
        assert chips == ["1 step retry", "2 request retries", "1 failover"]


def test_19_runs_that_are_not_comparable_have_no_verdict(watched, tokenizer, tmp_path):
    one = save(tmp_path / "one", [play(tokenizer, f"{task}/0", ("3", 1.0, "", {}), label="3") for task in "abc"])
    two = save(tmp_path / "two", [play(tokenizer, f"{task}/0", ("4", 0.0, "", {}), label="4") for task in "abc"])
    assert compare(one, two).refused
    with serving(one, two) as address:
        page = watched().open(address, "/compare/0/1")
        page.wait_for_selector(".failure >> text=Not comparable")
        assert page.locator(".tile-value").first.inner_text() == "no verdict"


def test_23_each_screen_fits_480_pixels(watched, server_address):
    one = watched()
    one.page.set_viewport_size({"width": 480, "height": 900})
    for place, selector in {**SCREENS, **COMPARISONS}.items():
        page = one.open(server_address, place)
        page.wait_for_selector(selector)
        assert page.evaluate("document.documentElement.scrollWidth") <= 480, place


def test_27_without_a_network_the_file_opens_everything(watched, file_address):
    one = watched(offline=True)
    for place in ("/0/episodes", "/1/task/g", "/0/episode/a%2F1", "/3/training"):
        one.open(file_address, place).wait_for_selector(SCREENS.get(place, ".strand-head"))
