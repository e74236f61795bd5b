"""What an audit finds if the full score is unknown; it never says "passed" if it judged nothing."""

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult, Task
from agentenv.testing.audit.report import verdict
from tests.testing.audit import audited as envs
from tests.testing.audit.audited import audited, ids

ANY = ("null", "constant", "random", "length_bomb", "enumeration", "unicode")


def paying(pay, num_turns=1):
    """An environment without `score` and `gold` whose reward is a function of the action."""

    class Pays(AgentInstance):
        async def step(self, states):
            last = states["turn_index"] == num_turns - 1
            return StepResult("Go on.", reward=float(pay(states["action_text"])), terminated=last)

    return Pays


@pytest.mark.parametrize(
    ("pay", "num_turns", "found"),
    [
        (lambda text: 1, 1, {"reward-constant"}),
        (lambda text: 1 if text.strip() else 0, 1, {"reward-constant"}),
        (lambda text: 0 if text.strip() else 0.5, 1, {"silence-pays"}),
        (lambda text: len(text) / 1000, 1, {"length-pays"}),
        (lambda text: min(1, len(text) / 400), 1, {"length-pays"}),
        (lambda text: 0.1 if text in ("yes", "no") else 0, 4, {"repeat-pays:constant"}),
        (lambda text: 0, 4, set()),
        (lambda text: -1, 1, set()),
        (lambda text: text == "yes", 1, set()),
        (lambda text: len(set(text)) % 7 / 7, 1, set()),
    ],
)
async def test_rewards_for_nothing_are_found_without_a_full_score(pay, num_turns, found):
    result = await audited(paying(pay, num_turns), *ANY)
    assert ids(result) == {"no-ceiling", *found}
    assert all(each.evidence for each in result.findings if each.kind != "no-ceiling")


async def test_silence_that_pays_more_than_a_wrong_answer_but_no_reward_is_a_warning():
    result = await audited(paying(lambda text: -1 if text.strip() else 0), *ANY)
    assert (ids(result, "fail"), ids(result, "warn")) == (set(), {"no-ceiling", "silence-pays"})


@pytest.mark.parametrize("known", ["score", "gold", "pass_reward"])
async def test_with_a_full_score_the_rewards_are_judged_by_it_alone(known):
    class Pays(envs.NoCeiling):
        def reward(self, right, states):
            return len(states["action_text"]) / 1000

        def score(self, right):
            return float(right) if known == "score" else None

        if known == "gold":
            gold = envs.Sound.gold

    result = await audited(Pays, *ANY, pass_reward=1000.0 if known == "pass_reward" else None)
    assert not ids(result) & {"reward-constant", "silence-pays", "no-ceiling"}
    length = [each.severity for each in result.findings if each.id == "length-pays"]
    assert length == ([] if known == "gold" else ["warn"])  # more than gold is another finding


async def test_nothing_judged_is_not_a_pass():
    result = await audited(envs.NoCeiling, *ANY)
    assert result.exit_code() == 4
    assert verdict(result) == (
        "nothing could be judged: the full score is unknown. Return `score`, implement `gold` or pass --pass_reward. "
        "Errors, leaks and flakiness: 0 fail, 1 warn, 0 note"
    )
    assert result.to_dict()["judged"] is False
    assert result.exit_code(strict=True) == 1
    allowed = await audited(envs.NoCeiling, *ANY, allowed={"no-ceiling": "a reward model"})
    assert allowed.exit_code(strict=True) == 0
    assert verdict(allowed).startswith("nothing could be judged (allowed): ")
    judged = await audited(envs.NoScore, "null", "constant", "gold")
    assert (judged.exit_code(), judged.to_dict()["judged"]) == (0, True)
    assert verdict(judged).startswith("passed: 0 fail, 0 warn, 0 note. That is not a proof: ")


async def test_a_finding_that_fails_outweighs_that_the_rest_was_not_judged():
    result = await audited(paying(lambda text: 1), *ANY)
    assert result.exit_code() == 1
    assert verdict(result) == "failed: 1 fail, 1 warn, 0 note"


@pytest.mark.parametrize(("label", "severity"), [("417", "note"), (417, "warn"), (None, "warn")])
async def test_a_pass_of_an_environment_in_which_nothing_earns_warns(label, severity):
    """A label that is a number equals no text."""

    class SaysTheLabel(envs.Says):
        gold = AgentInstance.gold

    rows = [Task("Say it.", label, task_id=str(n)) for n in range(3)]
    result = await audited(SaysTheLabel, "null", "constant", "label", on=rows)
    (found,) = [each for each in result.findings if each.kind == "no-gold"]
    assert found.severity == severity
    assert ("no policy earned anything" in found.summary) == (severity == "warn")


async def test_a_full_score_without_a_reward_above_zero_is_something_earned():
    result = await audited(paying(lambda text: -(text != "417")), "null", "constant", "label", pass_reward=0.0)
    (found,) = [each for each in result.findings if each.kind == "no-gold"]
    assert found.summary == "gold is known for none of the tasks"
