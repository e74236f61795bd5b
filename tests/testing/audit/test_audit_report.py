"""The report of an audit: its form does not change unseen, and two audits of one environment say the same."""

import json
import os
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentenv.episode.source import EnvSource
from agentenv.testing.audit.answers import Needle, needles, normal
from agentenv.testing.audit.auditing import AuditOptions, audit_env
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.findings import WHY, apply_allowances, make_finding
from agentenv.testing.audit.policies import View, all_policies, change_answer, select_policies, undo
from agentenv.testing.audit.report import card, screen
from agentenv.testing.tool_calls import call_text
from tests.testing.audit import audited as envs
from tests.testing.audit.audited import audited, ids, tasks
from tests.testing.planted.more_faults import LOOKUP, ORDER

FEW = ("null", "random", "enumeration", "unicode", "gold")


def without_times(result):
    return {name: value for name, value in result.to_dict().items() if name != "times"}


@pytest.mark.long
async def test_two_audits_are_equal_but_for_their_times_however_many_episodes_run_at_once():
    first = await audited(envs.PaysEnumeration, *FEW, on=tasks(6), num_tasks=3, seed=5)
    second = await audited(envs.PaysEnumeration, *FEW, on=tasks(6), num_tasks=3, seed=5, concurrency=1)
    assert without_times(first) == without_times(second)
    assert first.plays == second.plays
    other = await audited(envs.PaysEnumeration, *FEW, on=tasks(6), num_tasks=3, seed=6)
    assert other.plays != first.plays


async def test_the_form_of_the_data_is_known():
    result = await audited(envs.PaysEnumeration, *FEW, on=tasks(2))
    data = json.loads(json.dumps(result.to_dict()))
    assert list(data) == [
        "schema", "env", "seed", "tasks", "num_plays", "ceiling", "judged", "counts", "findings", "policies",
        "not_examined", "unused_allowances", "times",
    ]  # fmt: skip
    assert data["schema"] == 1
    assert data["counts"] == {"fail": 1, "warn": 0, "note": 0}
    assert list(data["findings"][0]) == [
        "id", "severity", "summary", "evidence", "num_plays", "reproduce", "allowed", "why",
    ]  # fmt: skip
    assert list(data["findings"][0]["evidence"][0]) == ["policy", "task_id", "action", "reward", "score", "detail"]
    assert list(data["policies"][0]) == [
        "policy", "kind", "num_variants", "num_plays", "num_failed", "failures", "num_full", "reward", "max_reward",
        "best", "score",
    ]  # fmt: skip
    assert set(data["policies"][0]["reward"]) == {"mean", "ci95_low", "ci95_high", "num_tasks"}
    assert set(data["times"]) == {"wall_s"}


class AsksFirst(envs.Sound):
    """Gold asks with a number, and then knows the answer without one."""

    async def gold(self, states):
        return "What is 7 + 1?" if self.attempts == 0 else "I know it."


async def test_an_episode_that_its_policy_leaves_has_not_failed():
    result = await audited(AsksFirst, "wrong/changed", on=tasks(2))
    assert ids(result) == {"gold-fails"}  # and no reward differs the second time
    assert {play.stop_reason for play in result.plays if play.policy == "wrong"} == {"aborted"}
    (left,) = [row for row in result.policies if row.policy == "wrong"]
    assert (left.num_failed, left.reward.mean) == (0, None)
    console = Console(record=True, width=200)
    console.print(screen(result))
    assert "1 policy had actions for a part of each episode only, so no reward: wrong" in console.export_text()


async def test_a_note_names_a_task_and_the_command_that_plays_it_again():
    rows = [replace(row, label=label) for row, label in zip(tasks(4), ["1", "77777", "88888", "99999"], strict=True)]
    options = AuditOptions(policies=("constant",), limits=envs.LIMITS)
    result = await audit_env(EnvSource(envs.Says), rows, options=options, command=["agentenv", "audit", "says.py"])
    assert ids(result) == {"guess-earns:constant"}
    (head, evidence, command, *_) = shown(result, 200)
    assert head.startswith("note ")
    assert evidence.split() == ["task", "t0,", "constant/1:", "'1',", "reward", "1"]
    assert command.strip() == "reproduce: agentenv audit says.py --task t0 --policies constant/1"


async def test_a_report_of_hostile_actions_can_be_written_and_shown():
    result = await audited(envs.FailsOnNul, "unicode", "special_tokens", on=tasks(1))
    text = card(result)
    assert text.encode("utf-8")
    assert "hostile-error" in text
    console = Console(record=True, width=200)
    console.print(screen(result))
    assert "ValueError: embedded null byte" in console.export_text()


def test_policies_have_their_own_names_and_findings_a_reason_each():
    keys = [policy.key for policy in all_policies({"mine": "x"})]
    assert len(keys) == len(set(keys))
    assert all(why.endswith(".") for why in WHY.values())


def test_without_gold_nothing_is_derived_from_it():
    view = View("What is 6 times 7?", "", 0, Random(0), 1_000, [], tools=[LOOKUP, ORDER])
    assert [each.key for each in all_policies() if each.sees_gold and each.act(view) is not None] == []


def test_a_call_that_no_tool_takes_back_is_not_undone():
    view = View("", "", 0, Random(0), 1_000, [], call_text("lookup", {"item": "figs"}), [LOOKUP])
    back = {**LOOKUP, "function": {**LOOKUP["function"], "name": "put_back"}}
    assert undo(view, 0) is None
    assert undo(replace(view, gold="wait", tools=[LOOKUP, ORDER, back]), 0) == "wait"
    put, take = (
        {"function": {"name": name, "parameters": {**ORDER["function"]["parameters"], "required": [needed]}}}
        for name, needed in (("put", "item"), ("take", "num"))
    )
    given = {"item": "figs", "num": 2}
    assert undo(replace(view, before=[call_text("put", given)], tools=[put, take]), 0) == call_text("take", given)
    assert undo(replace(view, gold="wait", tools=[put, take]), 0) == "wait"


def test_no_policy_fails_on_a_tool_whose_arguments_nothing_names():
    lists = {"name": "weigh", "parameters": {"properties": {"left": {"type": "array"}}, "required": ["left"]}}
    view = View("", "", 0, Random(0), 1_000, [], tools=[{"type": "function", "function": lists}])
    assert {each.name for each in all_policies() if each.act(view) is not None} >= {"null", "explore"}


def test_a_finding_counts_plays_and_not_steps():
    play = Play("gold", "", "t0", 0, "", (), 1.0, 1.0, "terminated")
    finding = make_finding("tool-fails", "fail", "", [play, play])
    assert (finding.num_plays, len(finding.evidence)) == (1, 1)


def test_an_allowance_is_for_an_id_a_kind_or_a_pattern():
    both = [make_finding("hack-earns", "fail", "", policy=name) for name in ("echo", "null")]

    def allowed(**patterns):
        return [each.allowed for each in apply_allowances(both, patterns)[0]]

    assert allowed(**{"hack-earns": "a"}) == ["a", "a"]
    assert allowed(**{"hack-earns:echo": "a"}) == ["a", ""]
    assert allowed(**{"*:null": "a"}) == ["", "a"]
    assert apply_allowances(both, {"flaky-reward": "a"})[1] == ["flaky-reward"]


@given(st.text(max_size=40))
def test_a_changed_gold_is_never_gold(gold):
    other = change_answer(gold)
    assert other is None or other != gold


def test_answers_are_found_as_numbers_and_words_and_not_inside_of_others():
    cases = [
        ("1,234", "it was 1234.", True), ("1234", "1,234!", True), ("123", "1234", False), ("123", "0.123", False),
        ("123", "123.5", False), ("123", "123.", True), ("-123", "x = -123", True), ("123", "-123", False),
        ("123", "100-123", True), ("Lisbon", "It is LISBON, of course", True), ("Lisbon", "Lisbonne", False),
        ("#### 456", "so 456", True), (r"\boxed{789}", "789", True), ("123", "١٢٣", True), ("123", "１２３", True),
    ]  # fmt: skip
    for label, text, there in cases:
        found = [needle.within(normal(text)) for needle in needles(label)]
        assert found == [there], (label, text)


def test_short_answers_are_weak_and_rules_are_not_answers():
    assert [needle.strong for needle in needles("42")] == [False]
    assert [needle.strong for needle in needles("B")] == [False]
    assert needles("420") == [Needle("420", True)]
    assert needles({"entry_point": "f", "hidden": []}) == []
    assert needles(None) == []


def test_a_label_that_gold_says_in_another_form_is_an_answer_in_both():
    assert [needle.text for needle in needles("0.125", ["#### 1/8"])] == ["0.125", "1/8"]
    assert [needle.text for needle in needles("1250", ["It is 1,250.", "done"])] == ["1250"]
    assert needles("key", ["#### 1/8"]) == [Needle("1/8", False)]


async def test_intervals_of_rewards_and_scores_in_0_to_1_stay_there():
    result = await audited(envs.Sound, "null", "constant", "gold", on=tasks(4))
    for row in result.policies:
        assert row.reward == row.score
        assert 0.0 <= row.reward.ci95_low <= row.reward.ci95_high <= 1.0
    gold = result.policies[-1]
    assert gold.reward.ci95_low < 1.0, "four tasks do not prove all"


def shown(result, width=80):
    console = Console(record=True, width=width, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(screen(result), crop=False)
    return console.export_text().splitlines()


@pytest.mark.long
async def test_at_80_columns_findings_come_first_zero_rows_are_one_line_and_names_are_whole():
    result = await audited(envs.PaysEnumeration, on=tasks(2))
    lines = shown(result)
    commands = [line for line in lines if "reproduce: " in line]
    assert max(len(line) for line in lines if line not in commands) <= 80
    whole = [each.reproduce for each in result.findings if each.reproduce and not each.allowed]
    assert [line.partition("reproduce: ")[2].rstrip() for line in commands] == whole
    assert lines[0].startswith("fail    hack-earns:enumeration: ")
    assert lines[-1].startswith("failed: ")
    (at,) = [number for number, line in enumerate(lines) if "episodes on 2 tasks" in line]
    assert at > max(number for number, line in enumerate(lines) if line.startswith(("fail ", "warn ", "note ")))
    table = lines[at:]
    text = " ".join(" ".join(table).split())
    zero = [row.policy for row in result.policies if row.reward.mean == row.max_reward == 0.0]
    assert len(zero) > 10
    assert f"{len(zero)} policies earned 0.000: {', '.join(zero)}" in text
    assert "…" not in text
    names = [line.split()[0] for line in table if line]
    for row in result.policies:
        assert (row.best in names) == (row.policy not in zero)
    assert select_policies(all_policies(), [row.best for row in result.policies])


async def test_a_policy_that_earned_nothing_but_failed_is_not_folded_and_what_failed_is_said():
    result = await audited(envs.FailsOnNul, "unicode", on=tasks(1))
    (row,) = [line.split() for line in shown(result) if line.startswith("unicode")]
    assert row[-2:] == ["1", "hostile-error"]
