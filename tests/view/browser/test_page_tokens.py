"""Tokens on the page are those of the record: texts, origins, log-probabilities, versions, advantages."""

import contextlib
import math
import re

import pytest

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.core.views import spans_of
from agentenv.runs.records.steps import append_rows
from agentenv.runs.records.token_stats import TOKEN_STATS, TokenStats, hash_actions, sampled_tokens
from tests.view.browser.conftest import serving
from tests.view.page_runs import play, save, small_run

pytestmark = pytest.mark.slow


@pytest.fixture
def of_one(watched, tmp_path):
    """Open the only episode of a run, with its template tokens."""
    stack = contextlib.ExitStack()

    def open_episode(trajectory):
        address = stack.enter_context(serving(save(tmp_path / "run", [trajectory], metrics=False)))
        one = watched()
        one.context.add_init_script("try { localStorage.setItem('agentenv.template', '1') } catch {}")
        page = one.open(address, "/0/episode/" + trajectory.episode_id.replace("/", "%2F"))
        page.wait_for_selector(".headline")
        return page

    with stack:
        yield open_episode


def test_8_texts_and_origins_are_those_of_the_record(of_one, tokenizer):
    trajectory = small_run(tokenizer)[1]
    page = of_one(trajectory)
    page.wait_for_selector(".tokens")
    spans = page.locator(".span").evaluate_all("nodes => nodes.map(node => node.dataset.kind)")
    assert spans == [span.kind for span in spans_of(trajectory)]
    joined = page.locator(".tokens").evaluate_all("nodes => nodes.map(node => node.textContent).join('')")
    assert joined == tokenizer.decode(list(trajectory.segments[0].token_ids))


def of_one_turn(ids, reason=StopReason.TERMINATED, **completion):
    """An episode in which these tokens were sampled after one of a prompt."""
    trajectory = Trajectory(Task([], task_id="a"), 10**6, "a/0", "a")
    trajectory.append_observation([1])
    trajectory.append_turn(Completion(tuple(ids), **{"logprobs": (-0.1,) * len(ids)} | completion), "said")
    trajectory.set_result(StepResult(reward=1.0, terminated=True))
    trajectory.finish(reason)
    return trajectory


def step_of(logprob):
    """The color of a log-probability, at -0.1, -1, -3 and -6."""
    return "missing" if math.isnan(logprob) else f"p{sum(logprob < edge for edge in (-0.1, -1, -3, -6))}"


def test_9_each_tokens_colors_version_and_mask_are_those_of_the_record_and_the_learner(of_one, tokenizer, tmp_path):
    ids = tuple(tokenizer.encode("12 + 34 = 46, so 46", add_special_tokens=False))
    values = (-0.01, -0.5, -2.0, -4.0, -9.0, math.nan)
    logprobs = tuple(values[k % len(values)] for k in range(len(ids)))
    versions = tuple(3 + (k > 4) for k in range(len(ids)))
    trajectory = of_one_turn(ids, logprobs=logprobs, policy_versions=versions, forced=(1, 2))
    learner = [math.nan if k % 7 == 3 else -0.25 * (k % 5) for k in range(len(ids))]
    advantages = [(k % 9 - 4) / 2 for k in range(len(ids))]
    (tmp_path / "run").mkdir()
    stats = TokenStats(1, trajectory.episode_id, hash_actions(sampled_tokens(trajectory)), learner, advantages)
    append_rows(tmp_path / "run" / TOKEN_STATS, [stats.to_dict()])
    page = of_one(trajectory)
    page.wait_for_selector(".tokens")
    start = trajectory.turns[0].start
    places = page.locator(".k-action [data-k]").evaluate_all("nodes => nodes.map(node => Number(node.dataset.k))")
    assert places == [start + k for k in range(len(ids))]
    assert page.locator(".seam").get_attribute("data-seam") == "v3│v4"

    def colors(by):
        page.select_option(".color-bar select", by)
        found = page.locator(".k-action [data-k]").evaluate_all("nodes => nodes.map(node => node.className)")
        return [re.search(r"\b(p\d|v\d|d0|(pos|neg)\d|missing)\b", each)[0] for each in found]

    def diverging(value, unit):
        step = sum(abs(value) / unit >= edge for edge in (0.05, 0.5, 1.5))
        return "missing" if math.isnan(value) else f"{'pos' if value > 0 else 'neg'}{step}" if step else "d0"

    assert colors("logprob") == [step_of(value) for value in logprobs]
    assert colors("version") == [f"v{min(4, 4 - version)}" for version in versions]
    assert colors("advantage") == [diverging(value, 1) for value in advantages]
    assert colors("ratio") == [diverging(b - a, 0.2) for a, b in zip(logprobs, learner, strict=True)]
    page.select_option(".color-bar select", "mask")
    trained = page.locator("[data-k].trained").evaluate_all("nodes => nodes.map(node => Number(node.dataset.k))")
    mask = trajectory.segments[0].action_mask
    assert trained == [k for k, sampled in enumerate(mask) if sampled and k not in (start + 1, start + 2)]


def test_12_what_has_no_number_says_so(of_one, tokenizer):
    ids = tuple(tokenizer.encode("so 46", add_special_tokens=False))
    page = of_one(of_one_turn(ids, StopReason.ABORTED, logprobs=(math.nan,) * len(ids)))
    page.wait_for_selector(".tokens")
    assert "aborted" in page.locator(".headline").inner_text()
    assert page.locator(".k-action .missing").count() == len(ids)
    page.locator(".k-action [data-k]").first.click()
    assert "missing" in page.locator(".facts-side").inner_text()
    assert "has no log-probabilities" in page.locator(".facts-side").inner_text()
    page.keyboard.press("n")
    page.get_by_text("no later token below p = .05").wait_for()


STRANGE = ["héllo wörld", "日本語 ok", "😀👍🏽", "a\u202eb\u200bc\u2066d", "שלום עולם", "tab\there", "x\x00y\x1b[31m"]


@pytest.mark.parametrize("text", STRANGE)
def test_10_what_cannot_be_seen_is_shown_and_all_else_stays(of_one, tokenizer, text):
    page = of_one(play(tokenizer, "a/0", (text, 1.0, "", {})))
    page.wait_for_selector(".tokens")
    shown = page.locator(".k-action .tokens").inner_text()
    hidden = {"\u202e", "\u200b", "\u2066", "\x00", "\x1b"}
    assert not hidden & set(shown)
    if not hidden & set(text):
        assert text in shown
    for character in hidden & set(text):
        assert f"\\u{{{ord(character):x}}}" in shown
    page.goto(page.url.split("?")[0] + "?tab=messages")
    page.wait_for_selector(".message")
    if not hidden & set(text):
        assert text in page.locator(".role-assistant .text").inner_text()


def test_10_a_token_without_a_text_has_its_place(of_one, tokenizer):
    known = tuple(tokenizer.encode("so 46", add_special_tokens=False))
    ids = (known[0], len(tokenizer) + 7, *known[1:])
    page = of_one(of_one_turn(ids))
    page.wait_for_selector(".tokens")
    assert page.locator(".k-action [data-k]").count() == len(ids)
    page.goto(page.url.split("?")[0] + "/t0/k2")
    page.wait_for_selector(f".facts-side >> text={ids[1]}")


def of_two_segments(tokenizer, episode_id, last, reward):
    """An episode of two turns, each in another segment."""
    trajectory = Trajectory(Task([], task_id="a"), 10**6, episode_id, "a")
    for number, text in enumerate(("first", last)):
        prompt = tokenizer.encode(f"prompt {number}", add_special_tokens=False)
        if number:
            trajectory.open_segment(prompt)
        else:
            trajectory.append_observation(prompt)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        trajectory.append_turn(Completion(ids, logprobs=(-0.1,) * len(ids)), text)
        trajectory.set_result(StepResult("" if number else "more", reward if number else 0.0, terminated=number == 1))
    trajectory.finish(StopReason.TERMINATED)
    return trajectory


def test_11_the_token_that_decided_is_found_in_a_later_segment(watched, tmp_path, tokenizer):
    right = of_two_segments(tokenizer, "a/0", "3", 1.0)
    wrong = of_two_segments(tokenizer, "a/1", "4", 0.0)
    with serving(save(tmp_path / "run", [right, wrong], metrics=False)) as address:
        page = watched().open(address, "/0/task/a")
        page.click(".decision a")
        page.wait_for_selector(".t.selected")
        assert page.locator(".t.selected").inner_text() == "4"


def test_11_the_turn_from_which_the_rewards_differ_decides(watched, tmp_path, tokenizer):
    def episode(number, first, last, reward):
        turns = ((first, 0.0, "Try again.", {}), (last, reward, "", {}))
        return play(tokenizer, f"a/{number}", *turns)

    episodes = [episode(0, "5", "So it is 8", 1.0), episode(1, "6", "So it is 9", 0.0)]
    with serving(save(tmp_path / "run", episodes, metrics=False)) as address:
        page = watched().open(address, "/0/task/a")
        page.wait_for_selector(".decision[data-turn='1']")
        said = page.locator(".decision").inner_text()
        assert "their rewards differ from turn 1 on, after So it is" in said
        assert page.locator(".decision .token-literal").all_inner_texts() == ['"9"', '"8"']


def test_12_what_failed_or_has_no_reward_says_so(of_one, tokenizer):
    error = EpisodeError("env", "ValueError", "no apples", "env.py:3", "")
    page = of_one(play(tokenizer, "a/0", ("3", None, "", {}), error=error))
    assert "ValueError: no apples" in page.locator(".failure").inner_text()
    assert "reward —" in page.locator(".headline").inner_text()


def test_12_an_episode_that_failed_in_reset_has_its_task_and_is_copied_with_its_error(of_one):
    task = Task([{"role": "user", "content": "How many?"}], "3", task_id="a")
    trajectory = Trajectory(task, 10**6, "a/0", "a")
    trajectory.tools = ({"type": "function", "function": {"name": "count", "description": "Counts apples."}},)
    trajectory.finish(StopReason.ERROR, EpisodeError("infra", "OSError", "no apples", "reset", "env.py:3"))
    page = of_one(trajectory)
    page.locator(".message", has_text="How many?").wait_for()
    page.get_by_text("1 tool of the prompt").click()
    page.get_by_text("Counts apples.").wait_for()
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.keyboard.press("m")
    page.wait_for_function("() => window.copied")
    copied = page.evaluate("window.copied")
    assert "Run run, label 3" in copied
    assert "Failed in reset: OSError: no apples" in copied


def test_14_an_episode_of_32768_tokens_is_drawn_whole(of_one, tokenizer):
    ids = tuple(tokenizer.encode("12 + 34 = 46, so 46. ", add_special_tokens=False))
    page = of_one(of_one_turn((ids * (32768 // len(ids) + 1))[:32768]))
    page.wait_for_selector(".block.lazy")
    page.wait_for_function("() => document.querySelectorAll('.k-action [data-k]').length === 32768")
    at = page.url.split("?")[0]
    page.goto("about:blank")
    page.goto(f"{at}/t0/k30000")  # an address far below is drawn first
    page.wait_for_selector("[data-k='30000'].selected")
    assert page.evaluate("document.querySelector('.selected').getBoundingClientRect().top") < 900
