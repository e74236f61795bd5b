"""Five questions that one asks of runs, answered by clicks in the page; the records say what the answers are."""

import json
from collections import Counter, defaultdict
from statistics import fmean, stdev

import pytest

from agentenv.runs.metrics import summarize
from agentenv.runs.records.directory import RunWriter, read_trajectories
from agentenv.runs.records.steps import StepGroup, TrainedEpisode, append_step, train_row
from tests.view.browser.conftest import serving
from tests.view.browser.test_page_screens import parting
from tests.view.page_runs import RIGHT, WRONG, play, save

pytestmark = pytest.mark.slow
TASKS = ("boxes", "coins", "eggs", "pens", "shells", "trees")
STEPS, EARLY, LATE = 40, 10, 40
T_OF_5 = 2.5706
"""Quantile .975 of Student's t with five degrees of freedom, from a printed table."""


def attempt(tokenizer, task, sibling, *, fails, hint="No."):
    """An episode that is right at once, or wrong twice and longer, if it fails."""
    if not fails:
        return play(tokenizer, f"{task}/{sibling}", ("28 * 4 = 112", 1.0, "", RIGHT), label="112")
    wrong = ("28 * 4 = 108", 0.0, hint, WRONG)
    return play(tokenizer, f"{task}/{sibling}", wrong, ("28 * 4 = 122, I think", 0.0, "", WRONG), label="112")


def run_of(folder, tokenizer, failures):
    """A run of four siblings for each task, of which the last ones fail: their number by task."""
    hints = {"pens": "Write the number behind ####."}
    episodes = [
        attempt(tokenizer, task, k, fails=k >= 4 - failures.get(task, 0), hint=hints.get(task, "No."))
        for task in TASKS
        for k in range(4)
    ]
    return save(folder, episodes)


def training_of(folder, tokenizer):
    """A training of many steps that keeps the episodes of two."""
    with RunWriter.open(folder, {"flags": {"model": "tiny-math"}}) as writer:
        (folder / "metrics.jsonl").write_text('{"step": 0, "eval/score": 0.5}\n')
        for step in range(1, STEPS + 1):
            episodes = [
                attempt(tokenizer, f"t@{step}", sibling, fails=sibling > step // 14)
                for sibling in range(4)
            ]  # fmt: skip
            kept = [each.episode_id for each in episodes] if step in (EARLY, LATE) else []
            for each in episodes:
                if kept:
                    writer.append(each)
            group = StepGroup(f"t@{step}", tuple(map(summarize, episodes)))
            trained = {each.episode_id: TrainedEpisode((0.5,), 0, 0, 9, 0.0) for each in episodes}
            append_step(folder, train_row(step, [group], trained, kept=kept, estimator="group_norm", credit="turn"))
            line = {"step": step, "rollout/reward": fmean(each.reward for each in episodes), "train/entropy": 2 / step}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("questions")
    return [
        run_of(root / "a", tokenizer, {"boxes": 1, "coins": 2, "eggs": 1, "pens": 3, "shells": 2, "trees": 2}),
        run_of(root / "b", tokenizer, {"coins": 1, "pens": 1, "shells": 1}),
        training_of(root / "train", tokenizer),
    ]


@pytest.fixture
def page(watched, runs):
    with serving(*runs) as address:
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


def test_which_task_does_it_fail_most_often_and_why(page, runs):
    groups = groups_of(runs[0])
    worst = min(groups, key=lambda task: sum(each.reward for each in groups[task]))
    failed = [each for each in groups[worst] if each.reward == 0]
    [(hint, _)] = Counter(each.turns[0].result.observation for each in failed).most_common(1)
    page.get_by_role("button", name="mean").click()
    page.wait_for_function("() => location.hash.endsWith('sort=mean')")
    rows = page.locator(".task-row[data-task]").all()
    means = [number_of(row.locator(".right").first.inner_text()) for row in rows]
    assert means == sorted(means)
    assert rows[0].get_attribute("data-task") == worst
    page.click(".task-row[data-task] .task-id >> nth=0")
    page.wait_for_selector(".strand-head")
    assert f"{len(groups[worst])} siblings" in page.locator("main").inner_text()
    page.click(f".strand-ids a:text-is('#{failed[0].episode_id.rpartition('/')[2]}')")
    page.get_by_role("tab", name="Record").wait_for()  # the task's page has turns, too
    page.wait_for_selector("[data-turn='1']")
    text = page.locator("main").inner_text()
    assert hint in text
    assert failed[0].turns[0].result.info["outcome"] in text


def test_what_changed_between_two_steps(page, runs):
    lines = {line["step"]: line for line in map(json.loads, (runs[2] / "metrics.jsonl").read_text().splitlines())}
    page.get_by_label("run", exact=True).select_option("2")
    page.get_by_role("navigation", name="screens").get_by_role("link", name="Training").click()
    plot = page.locator(".chart .u-over").first
    plot.wait_for()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    assert f"{STEPS} train steps" in page.locator(".toolbar").inner_text()
    assert f"{LATE} of {STEPS}" in page.locator(".step-head").inner_text()
    page.get_by_role("heading", name=f"Step {LATE}", exact=True).wait_for()
    page.get_by_label("change since step").select_option(str(EARLY))
    page.wait_for_function("step => location.hash.includes(`since=${step}`)", arg=str(EARLY))
    for key in ("rollout/reward", "train/entropy"):
        cells = page.locator(".numbers tr", has_text=key).locator("td").all_inner_texts()
        assert number_of(cells[1]) == pytest.approx(lines[LATE][key], abs=1e-4)
        assert number_of(cells[2]) == pytest.approx(lines[LATE][key] - lines[EARLY][key], abs=1e-4)
    page.locator("[data-episode] a").first.click()
    page.wait_for_selector(".tokens")
    assert f"learned at step {LATE}" in page.locator(".headline").inner_text()


def test_did_length_pay(page, runs):
    pairs, everything = [], list(read_trajectories(runs[0]))
    for siblings in groups_of(runs[0]).values():
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


def test_which_token_decided_this_group(page, runs, tokenizer):
    siblings = groups_of(runs[0])["boxes"]
    right, wrong = (next(each for each in siblings if each.reward == reward) for reward in (1.0, 0.0))
    turn, unit = parting(right, wrong)
    at = wrong.turns[turn].start + unit
    said, instead = (tokenizer.decode([each.segments[0].token_ids[at]]) for each in (wrong, right))
    page.click(".task-row[data-task=boxes] .task-id")
    page.wait_for_selector(".decision")
    assert page.locator(".decision .token-literal").all_inner_texts() == [f'"{said}"', f'"{instead}"']
    page.click(".decision a")
    page.wait_for_selector(".t.selected")
    assert page.locator(".t.selected").inner_text() == said
    assert f"k{at}" in page.evaluate("location.hash")


def test_is_b_better_than_a(page, runs):
    means = [{task: fmean(each.reward for each in group) for task, group in groups_of(run).items()} for run in runs[:2]]
    differences = [means[1][task] - means[0][task] for task in TASKS]
    mean, half = fmean(differences), T_OF_5 * stdev(differences) / len(TASKS) ** 0.5
    assert mean - half > 0
    page.get_by_role("navigation", name="screens").get_by_role("link", name="Compare").click()
    page.wait_for_selector(".interval")
    assert "better" in page.locator(".tile-value").first.inner_text()
    text = page.locator(".tiles").inner_text().replace("−", "-")
    assert f"{mean:+.3f}\nB - A" in text
    assert f"95 % {mean - half:+.3f} to {mean + half:+.3f}" in text
    most = max(TASKS, key=lambda task: means[1][task] - means[0][task])
    page.locator(f"[data-task={most}] a").first.click()
    page.wait_for_selector(".pair-side")
    assert page.locator(".pair-side").count() == 2
