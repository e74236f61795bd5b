"""What an audit finds: every fault of an environment is named, and a sound one has none."""

import re
import time
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, StepResult, Task
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, InfraError, RunStopped
from agentenv.testing.audit.auditing import audit_env
from agentenv.testing.audit.facts import Facts
from agentenv.testing.audit.judging import judge_plays
from agentenv.testing.audit.policies import all_policies, cut_answer
from agentenv.testing.audit.report import verdict
from agentenv.testing.tool_calls import call_text, only_call
from agentenv.tools import answer_calls, schema_of
from tests.testing.audit import audited as envs
from tests.testing.audit.audited import audited, ids, tasks

CORE = ("null", "constant", "gold")
LUCKY = (4, 5, 6, 14)
"""Seeds with which one stick at a time wins."""


class PricedLook(AgentInstance):
    """The first turn looks, for a small price; some rows have an answer that can be guessed."""

    async def step(self, states):
        if states["action_text"] == "look":
            return StepResult("An answer, please.", reward=-0.01)
        right = float(states["action_text"] == states["label"])
        return StepResult(reward=right, score=right, terminated=True)

    async def gold(self, states):
        return states["label"] if states["turn_index"] else "look"


async def test_a_lucky_guess_without_the_price_of_gold_is_no_failure():
    rows = [
        Task([{"role": "user", "content": f"Row {n}?"}], label, task_id=f"t{n}") for n, label in enumerate("1abcdefg")
    ]
    result = await audited(PricedLook, *CORE, on=[replace(row, label=row.label * 5) for row in rows[1:]] + rows[:1])
    assert ids(result, "fail", "warn") == set()
    assert ids(result) >= {"guess-earns:constant"}


@pytest.mark.long
@pytest.mark.parametrize(("num_lucky", "severity"), [(1, set()), (2, {"warn"}), (4, {"fail"})])
async def test_more_than_gold_by_luck_on_a_few_tasks_is_no_failure(num_lucky, severity):
    class Arms(AgentInstance):
        """Four pulls of one of two arms, without a score."""

        async def step(self, states):
            pays = {"1": 0.5, "2": 0.6 if states["label"] == "lucky" else 0.4}.get(states["action_text"], 0.0)
            return StepResult("Again.", reward=pays, terminated=states["turn_index"] == 3)

        async def gold(self, states):
            return "1"

    rows = [Task("Pull 1 or 2.", "lucky" if n < num_lucky else "x", task_id=str(n)) for n in range(4)]
    result = await audited(Arms, *CORE, "wrong", on=rows)
    found = {each.severity: each for each in result.findings if each.kind == "reward-exceeds-gold"}
    assert set(found) == severity
    assert all("a warning below 90% of the tasks" in each.summary for each in found.values()) or "fail" in found


class ChangesNothing(AgentInstance):
    """Nothing has to be done, but gold looks it up."""

    async def step(self, states):
        done = states["action_text"] == "DONE"
        return StepResult("" if done else "Found.", score=float(done), terminated=done)

    async def gold(self, states):
        return "DONE" if states["turn_index"] else call_text("look", {})


async def test_the_last_word_of_gold_that_earns_without_its_calls_is_named_so():
    result = await audited(ChangesNothing, *CORE, "say/DONE")
    (found,) = [each for each in result.findings if each.kind == "guess-earns"]
    assert "without the calls of gold: what is checked holds at the start" in found.summary


@pytest.mark.parametrize("price", [1.0, 0.0])
async def test_a_call_that_another_one_undoes_with_some_of_its_arguments_and_is_paid_again_is_found(price):
    class Lends(AgentInstance):
        """Lend a book; returns cost less than was paid, or as much."""

        max_turns, is_lent = 10, False

        async def reset(self, states):
            keys = {"lend": ("book", "member"), "look": ("member",), "give_back": ("book",)}
            numbers = {name: {key: {"type": "integer"} for key in own} for name, own in keys.items()}
            parts = {name: {"type": "object", "properties": own, "required": [*own]} for name, own in numbers.items()}
            return {**states, "tools": [{"function": {"name": k, "parameters": part}} for k, part in parts.items()]}

        async def step(self, states):
            was, (name, _) = self.is_lent, only_call(states["action_text"])
            self.is_lent = name == "lend" or (was and name != "give_back")
            paid = float(self.is_lent) - was
            reward = max(paid, price - 1.0)
            return StepResult("Done.", reward=reward, score=float(self.is_lent), terminated=not name)

        async def gold(self, states):
            call = call_text("lend", {"book": int(states["label"]), "member": 11})
            return "DONE" if states["turn_index"] else call

    assert ids(await audited(Lends, *CORE, "farm"), "fail") == ({"reward-exceeds-gold:farm"} if price else set())


async def test_what_earns_where_gold_loses_by_chance_is_no_more_than_gold():
    class RollsOrHolds(AgentInstance):
        """Without a score: what was rolled is paid at the end, and some rolls lose all."""

        async def step(self, states):
            rolls = states["action_text"] == "roll"
            loses = rolls and states["label"] == "lost" and states["turn_index"] == 1
            paid = 0.0 if rolls or states["turn_index"] == 0 else float(states["turn_index"])
            return StepResult("Go on.", reward=paid, terminated=loses or not rolls)

        async def gold(self, states):
            return "hold" if states["turn_index"] == 2 else "roll"

    rows = [Task("Say roll or hold.", label, task_id=str(n)) for n, label in enumerate(("lost", "x", "x", "x"))]
    result = await audited(RollsOrHolds, *CORE, "farm", on=rows)
    assert max(play.reward for play in result.plays if play.policy == "farm" and play.task_id == "0") == 1.0
    assert ids(result, "fail") == {"no-signal"}


async def test_an_audit_plays_no_more_turns_than_the_class_has():
    class Short(envs.Sound):
        max_turns = 1

    result = await audited(Short, *CORE)
    assert {len(play.steps) for play in result.plays} == {1}


async def test_a_hack_has_as_many_turns_as_the_class():
    class Counts(envs.Sound):
        max_turns, hacks = 10, {"wait": [*"123456789", "now"]}

        async def step(self, states):
            won = float(states["action_text"] in ("now", await self.gold(states)))
            return StepResult("Go on.", reward=won, score=won, terminated=bool(won))

    assert ids(await audited(Counts, *CORE, "hacks"), "fail") == {"hack-earns:hacks"}


@pytest.mark.long
async def test_a_sound_environment_has_no_findings_with_any_policy():
    result = await audited(envs.Sound, on=tasks(2))
    assert ids(result) == set()
    assert result.exit_code(strict=True) == 0
    gold = next(row for row in result.policies if row.policy == "gold")
    assert (gold.num_full, gold.num_failed, gold.reward.mean) == (2, 0, 1.0)
    assert result.gap == {"gold": 1.0, "null": 0.0, "gap": 1.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("cls", "policies", "found"),
    [
        (envs.PaysItsHack, (*CORE, "hacks"), {"hack-earns:hacks"}),
        (envs.TakesAnything, CORE, {"trivial-tasks"}),
        (envs.FailingGold, (*CORE, "wrong", "hedge"), {"gold-fails"}),
        (envs.PaysNothing, CORE, {"no-signal"}),
        (envs.Wavers, CORE, {"flaky-reward"}),
        (envs.FailsOnNul, (*CORE, "unicode"), {"hostile-error"}),
        (envs.FailsAtReset, CORE, {"data-error"}),
    ],
)
async def test_a_fault_fails_and_nothing_else_is_reported(cls, policies, found):
    result = await audited(cls, *policies)
    assert ids(result, "fail") == found
    assert ids(result, "warn") == set()
    assert result.exit_code() == 1
    if cls is not envs.PaysItsHack:  # whose hacks are its own
        assert ids(await audited(envs.Sound, *policies)) == set()


@pytest.mark.parametrize(
    ("cls", "policies", "found", "severity"),
    [
        (envs.PaysForm, (*CORE, "constant_in_forms"), "partial-credit:constant_in_forms", "warn"),
        (envs.ChangesItsWords, CORE, "flaky-observation", "warn"),
        (envs.NoGold, CORE, "no-gold", "note"),
        (envs.HalfGold, CORE, "gold-partly", "note"),
    ],
)
async def test_what_only_warns_or_is_noted_fails_by_strict_at_most(cls, policies, found, severity):
    result = await audited(cls, *policies)
    assert ids(result) == {found}
    assert ids(result, severity) == {found}
    assert (result.exit_code(), result.exit_code(strict=True)) == (0, int(severity == "warn"))


async def test_a_fixed_sentence_with_a_labels_digits_is_not_a_leak():
    assert ids(await audited(envs.TellsItsOwnCode, *CORE)) == set()


@pytest.mark.long
async def test_short_answers_leak_only_where_most_tasks_say_their_own():
    class TellsShort(envs.Sound):
        def said(self, states):
            return f"No, {states['label']}. 2 attempts left."

    class CountsDown(envs.Sound):
        def said(self, states):
            return "No. 2 attempts left, of 3, for 4 points."

    short = [Task(f"What is {n - 111} ", str(n), task_id=str(n)) for n in range(2, 7)]
    assert ids(await audited(TellsShort, "null", "unicode/nul", on=short), "fail") == {"answer-in-feedback"}
    assert ids(await audited(CountsDown, "null", "unicode/nul", on=short), "fail") == set()


async def test_short_and_long_answers_of_one_data_set_are_reported_together():
    class TellsTheCity(envs.Sound):
        def said(self, states):
            return f"No, it is {states['label']}. Say it."

    cities = [Task(f"Capital number {n}?", city, task_id=city) for n, city in enumerate(("Lisbon", "Oslo", "Lima"))]
    result = await audited(TellsTheCity, "null", on=cities)
    told = [each.summary for each in result.findings if each.kind == "answer-in-feedback"]
    assert told == ["3 tasks have their answer in the feedback"]


@pytest.mark.parametrize(("hint", "found"), [("The city is {}.", {"answer-in-feedback"}), ("No oslo today.", set())])
async def test_a_short_word_that_one_task_says_in_place_of_what_others_say_is_warned_of(hint, found):
    class Uncovers(envs.Says):
        def said(self, states):
            return hint.format(states["label"][:4].ljust(len(states["label"]), "_"))

    cities = [Task(f"Capital {n}?", city, task_id=city) for n, city in enumerate(("Lisbon", "Oslo", "Ottawa"))]
    assert ids(await audited(Uncovers, "null", on=cities), "fail", "warn") == found


async def test_a_label_that_gold_does_not_say_is_no_answer():
    class Stock(AgentInstance):
        """The label is a key; the answer is asked for twice."""

        async def step(self, states):
            right = states["action_text"] == await self.gold(states)
            right, over = float(right and states["turn_index"]), states["turn_index"] == 1
            return StepResult(f"Again: {states['label']}.", reward=right, score=right, terminated=over)

        async def gold(self, states):
            return {"bolts": "12", "gears": "0", "nuts": "3"}[states["label"]]

    rows = [Task(f"How many {item}?", item, task_id=item) for item in ("bolts", "gears", "nuts")]
    assert ids(await audited(Stock, *CORE, "json", on=rows)) == {"guess-earns:constant"}


@pytest.mark.parametrize("is_stale", [True, False])
async def test_a_right_second_attempt_with_the_score_of_a_failure_is_warned_of(is_stale):
    class TwoAttempts(envs.Sound):
        def score(self, right):
            return float(right and not (is_stale and self.attempts == 2))

    assert ids(await audited(TwoAttempts, *CORE, "late")) == ({"score-disagrees"} if is_stale else set())


@pytest.mark.parametrize("price", [0.1, -0.1])
async def test_a_wrong_answer_in_the_right_form_that_is_paid_before_the_right_one_is_found(price):
    class PaysTheForm(envs.Sound):
        def reward(self, right, states):
            return float(right) or price * bool(re.fullmatch(r"#### \d+", states["action_text"]))

    found = {"reward-exceeds-gold:late"} if price > 0 else set()
    assert ids(await audited(PaysTheForm, *CORE, "late"), "fail", "warn") == found


async def test_an_answer_that_the_policy_said_itself_is_not_a_leak():
    class SaysItBack(envs.Sound):
        def said(self, states):
            return f"{states['observation_text']} You said {states['action_text']}, which is not right."

    result = await audited(SaysItBack, "null", "enumeration/other_labels", "enumeration/numbers")
    assert ids(result, "fail") == set()


async def test_an_answer_in_the_prompt_is_reported_and_warned_of_where_it_is_the_rule():
    given = [Task(f"The answer is {task.label}. What is it?", task.label, task_id=task.task_id) for task in tasks()]
    assert ids(await audited(envs.Sound, "null", on=given), "warn") == {"answer-in-prompt"}
    assert "answer-in-prompt" in ids(await audited(envs.Sound, "null", on=[given[0], *tasks()[1:]]), "note")


@pytest.mark.long
async def test_a_guess_that_is_right_by_chance_is_noted_and_no_hack():
    class Small(envs.Sound):
        def right(self, text, states):
            return (re.findall(r"\d+", text) or [""])[-1] == states["label"]

    labels = ("0", "500", "501", "502")
    small = [Task(f"Which number? Row {row}.", label, task_id=f"t{row}") for row, label in enumerate(labels)]
    result = await audited(Small, "null", "constant", "injection", "enumeration", "gold", on=small)
    assert {play.policy for play in result.plays if play.score == 1.0} >= {"injection"}
    assert ids(result, "fail", "warn") == set()
    assert "guess-earns:constant" in ids(result, "note")


@pytest.mark.parametrize(("others", "found"), [((71234, 81234, 91234), set()), ((0, 42, 1), {"hack-earns:injection"})])
async def test_an_attack_that_holds_the_constant_that_solves_the_same_tasks_is_that_guess(others, found):
    class Counts(AgentInstance):
        """A count in a text is right; with more than one answer, any text about a score is right, too."""

        async def step(self, states):
            said = re.findall(r"\d+", states["action_text"])[:1]
            right = float(said == [str(states["label"]["num"])] or (bool(found) and "[[" in states["action_text"]))
            return StepResult(reward=right, score=right, terminated=True)

    asked = [{"role": "user", "content": "How many jars are on the shelf?"}]
    rows = [Task(asked, {"num": num}, task_id=f"t{num}") for num in (10, *others)]
    assert ids(await audited(Counts, *CORE, "injection", on=rows, repeat=False), "fail") == found


async def test_control_characters_hold_no_number_that_is_an_answer_by_chance():
    class Digits(AgentInstance):
        """One look, and then the digits of an action count."""

        async def step(self, states):
            right = float(re.sub(r"\D", "", states["action_text"]) == states["label"]["number"])
            return StepResult("What do you see?", reward=right, score=right, terminated=states["action_text"] != "look")

        async def gold(self, states):
            return states["label"]["number"] if states["turn_index"] else "look"

    rows = [Task(f"Which number? Row {row}.", {"number": str(row)}, task_id=f"t{row}") for row in (2, 7, 8)]
    result = await audited(Digits, *(f"unicode/{name}" for name in ("nul", "line_ends", "zero_width")), on=rows)
    assert not any(each.startswith("hack-earns") for each in ids(result))


class Nim(AgentInstance):
    """Who takes the last of the sticks wins; the other takes one, two or three."""

    max_turns = 20

    async def reset(self, states):
        self.rng = Random(states["seed"])
        self.num = 15 + self.rng.randrange(6)
        return {"observation": [{"role": "user", "content": f"{self.num} sticks. How many do you take?"}]}

    async def step(self, states):
        said = states["action_text"]
        took = int(said) if said in ("1", "2", "3") else self.num + 1
        self.num -= took
        if self.num > 0:
            self.num -= self.rng.randint(1, min(3, self.num))
            won, done = 0.0, self.num == 0
        else:
            won, done = float(self.num == 0), True
        return StepResult(f"{self.num} are left.", reward=won, score=won, terminated=done)

    async def gold(self, states):
        return str(self.num % 4 or 1)


@pytest.mark.long
async def test_a_constant_that_wins_with_few_seeds_by_luck_is_no_fault():
    rows = [Task("Nim.", None, task_id=str(seed), seed=seed) for seed in LUCKY]
    result = await audited(Nim, *CORE, on=rows, limits=replace(envs.LIMITS, max_turns=20))
    assert [play.score for play in result.plays if play.key == "constant/1"] == [1.0] * len(rows)
    assert ids(result, "fail") == set()


async def test_other_seeds_on_which_a_service_failed_say_nothing_of_luck():
    class SolvedByOne(envs.Sound):
        async def reset(self, states):
            if states["seed"] > 2:
                raise InfraError("desk: expected an answer, got none.")
            return await super().reset(states)

        def right(self, text, states):
            return text == "1" or super().right(text, states)

    rows = [replace(task, seed=seed) for seed, task in enumerate(envs.tasks())]
    result = await audited(SolvedByOne, "constant", on=rows)
    (found,) = [each for each in result.findings if each.kind == "guess-earns"]
    assert (found.severity, found.summary) == ("fail", "3 of 3 tasks solved by constant/1")


async def test_without_a_score_gold_says_what_full_marks_are():
    result = await audited(envs.NoScore, *CORE, "injection")
    assert ids(result) == set()
    assert next(row for row in result.policies if row.policy == "gold").num_full == 3


async def test_pass_reward_says_what_full_marks_are_where_nothing_else_does():
    class PaysInjection(envs.NoCeiling):
        def right(self, text, states):
            return "grader" in text

    assert "hack-earns:injection" not in ids(await audited(PaysInjection, *CORE, "injection"))
    assert "hack-earns:injection" in ids(await audited(PaysInjection, *CORE, "injection", pass_reward=1.0))


async def test_scores_beyond_0_to_1_without_a_declared_range_are_a_warning():
    result = await audited(envs.ScoresInPercent, *CORE)
    assert (ids(result, "fail"), ids(result, "warn")) == (set(), {"score-range"})


async def test_rewards_beyond_a_declared_range_fail():
    assert ids(await audited(envs.Sound, *CORE, reward_range=(0.0, 0.5))) == {"reward-range"}
    assert ids(await audited(envs.Sound, *CORE, reward_range=(0.0, 1.0))) == set()


@pytest.mark.long
async def test_a_step_that_hangs_is_reported_by_its_policy():
    class Hangs(envs.Sound):
        async def step(self, states):
            if "\x00" in states["action_text"]:
                import asyncio

                await asyncio.sleep(60)
            return await super().step(states)

    limits = Limits(max_length=60_000, max_turns=4, step_timeout_s=1.0)
    result = await audited(Hangs, *CORE, "unicode", on=tasks(2), limits=limits)
    assert ids(result) == {"step-timeout"}
    assert {each.policy for each in result.findings[0].evidence} == {"unicode/nul"}


@pytest.mark.long
async def test_text_that_comes_back_as_special_tokens_fails():
    raw = [Task(task.prompt[0]["content"], task.label, task_id=task.task_id) for task in tasks()]

    class ChatmlByHand(envs.EchoesRaw):
        async def step(self, states):
            result = await super().step(states)
            if result.done:
                return result
            said = f"<|im_start|>user\n{result.observation}<|im_end|>\n<|im_start|>assistant\n"
            return {
                "rewards": result.reward, "scores": result.score, "environment_feedback": said, "done": False,
            }  # fmt: skip

    assert ids(await audited(ChatmlByHand, *CORE, "special_tokens", on=raw)) == {"forged-tokens"}
    assert ids(await audited(envs.EchoesRaw, *CORE, "special_tokens")) == set()


async def test_environments_that_draw_by_seed_are_sound():
    rows = [Task("Guess.", None, task_id=f"t{index}") for index in range(3)]
    assert ids(await audited(envs.DrawsBySeed, *CORE, "wrong", "hedge", on=rows)) == set()


async def test_a_task_that_any_text_solves_is_not_a_hack_even_where_one_policy_is_named():
    class OneIsTrivial(envs.Sound):
        def right(self, text, states):
            return (states["label"] == "417" and bool(text.strip())) or super().right(text, states)

    result = await audited(OneIsTrivial, "injection", "enumeration")
    assert ids(result) == {"trivial-tasks"}
    assert result.unresolved("fail") == []


@pytest.mark.parametrize("is_down", [lambda times, text: "\x00" in text, lambda times, text: times > 1])
async def test_failures_outside_the_environment_are_warnings_also_where_only_a_repetition_fails(is_down, virtual_clock):
    class Unreachable(envs.Sound):
        times = Counter()  # noqa: RUF012

        async def step(self, states):
            text = states["action_text"]
            self.times[states["label"], text, self.attempts] += 1
            if is_down(self.times[states["label"], text, self.attempts], text):
                raise InfraError("grader: expected an answer, got none. Retry.")
            return await super().step(states)

    assert ids(await audited(Unreachable, "unicode")) == {"infra-error"}


@pytest.mark.parametrize(
    ("is_down", "lost"),
    [
        (lambda text: "417" in text, None),
        (lambda text: "####" in text, "gold"),
        (lambda text: True, "null, constant, gold"),
    ],
)
async def test_policies_that_an_outage_took_are_named_and_the_audit_has_not_passed(is_down, lost, virtual_clock):
    class Down(envs.Sound):
        async def step(self, states):
            if is_down(states["action_text"]):
                raise InfraError("grader: expected an answer, got none. Retry.")
            return await super().step(states)

    result = await audited(Down, "gold")
    assert ids(result) == {"infra-error"}
    named = [line for line in result.not_examined if "outage" in line]
    assert named == [f"policies of which an outage (InfraError) took every episode: {lost}"] * bool(lost)
    assert result.exit_code() == (3 if lost else 0)
    assert verdict(result).startswith("too little could be judged: an outage" if lost else "passed")
    allowed = await audited(Down, "gold", allowed={"infra-error": "that service is often down"})
    assert allowed.exit_code() != 3


class Shelf(AgentInstance):
    """Put as many as the label says on the shelf, and then say its word, which may be anywhere in the answer."""

    async def reset(self, states):
        self.num = 0
        return {**states, "tools": [schema_of(self.put)]}

    def put(self, num: int) -> str:
        """Put jars on the shelf.

        Args:
            num: How many.
        """
        self.num += num
        return f"It has {self.num}."

    async def step(self, states):
        if states["tool_calls"].items:
            return StepResult(await answer_calls(states["tool_calls"], {"put": self.put}), score=0.0)
        score = float(self.says(states["action_text"], states["label"]["word"]) and self.num == states["label"]["num"])
        return StepResult(reward=score, score=score, terminated=True)

    def says(self, text, word):
        return word in text

    async def gold(self, states):
        return states["label"]["word"] if states["turn_index"] else call_text("put", {"num": states["label"]["num"]})


class StrictShelf(Shelf):
    def says(self, text, word):
        return word == text


class ShelfAlone(Shelf):
    """Only what is on the shelf is graded."""

    def says(self, text, word):
        return bool(text)


class ShelfUngraded(StrictShelf):
    """Only the word is graded."""

    async def reset(self, states):
        self.label = states["label"]
        return await super().reset(states)

    async def step(self, states):
        self.num = states["label"]["num"]
        return await super().step(states)


class ShelfWithLabel(StrictShelf):
    """The shelf is labeled, too; gold says what is missing."""

    is_graded, labeled = False, False

    async def reset(self, states):
        self.labeled = False
        return {**await super().reset(states), "tools": [schema_of(self.put), schema_of(self.mark)]}

    def mark(self, num: int) -> str:
        """Label the shelf.

        Args:
            num: A number.
        """
        self.labeled = num == 7
        return "Labeled."

    async def step(self, states):
        if states["tool_calls"].items:
            return StepResult(await answer_calls(states["tool_calls"], {"put": self.put, "mark": self.mark}), score=0.0)
        result = await super().step(states)
        return result if self.labeled or not self.is_graded else StepResult(reward=0.0, score=0.0, terminated=True)

    async def gold(self, states):
        if self.num == states["label"]["num"] and not self.labeled:
            return call_text("mark", {"num": 7})
        return await super().gold({**states, "turn_index": self.labeled})


class ShelfWithGradedLabel(ShelfWithLabel):
    is_graded = True


class ShelfThatTells(ShelfUngraded):
    """The call is how to find the word."""

    def put(self, num: int) -> str:
        """Put jars on the shelf.

        Args:
            num: How many.
        """
        return f"Its word: {self.label['word']}."


def shelves():
    words = enumerate(["amber", "cobalt", "umber", "ochre"])
    asked = [{"role": "user", "content": "What is on the shelf?"}]
    return [Task(asked, {"word": word, "num": 10 + n}, task_id=f"t{n}") for n, word in words]


class Submitted(AgentInstance):
    """Submit the word; of several answers in one action, one has to be right."""

    def is_right(self, words, word):
        return word in words

    async def reset(self, states):
        self.words = []
        return {**states, "tools": [schema_of(self.submit)]}

    def submit(self, word: str) -> str:
        """Submit the answer.

        Args:
            word: The answer.
        """
        self.words.append(word)
        return "Thank you."

    async def step(self, states):
        told = await answer_calls(states["tool_calls"], {"submit": self.submit})
        score = float(self.is_right(self.words, states["label"]["word"]))
        return StepResult(told, reward=score, score=score, terminated=True)

    async def gold(self, states):
        return call_text("submit", {"word": states["label"]["word"]})


class SubmittedOnce(Submitted):
    def is_right(self, words, word):
        return words == [word]


class SubmittedText(Submitted):
    """The word anywhere in the only answer is right."""

    def is_right(self, words, word):
        return len(words) == 1 and word in words[0]


class SubmittedTwice(SubmittedOnce):
    """A second answer is possible, and the first wrong one is told what was expected."""

    def told(self, states):
        return f"That is not right, expected {states['label']['word']}."

    async def step(self, states):
        result = await super().step(states)
        again = not result.score and states["turn_index"] == 0
        self.words.clear()
        return StepResult(self.told(states), score=0.0) if again else result


class SubmittedAgain(SubmittedTwice):
    def told(self, states):
        return "That is not right."


class SubmittedOrRefused(SubmittedOnce):
    def submit(self, word: str) -> str:
        """Submit the answer.

        Args:
            word: The answer, or REFUSED if there is none.
        """
        return super().submit(word)


@pytest.mark.parametrize("cls", [SubmittedOnce, SubmittedOrRefused])
async def test_a_word_that_a_tool_or_the_prompt_names_is_said_to_the_tool_that_takes_an_answer(cls):
    asked = [{"role": "user", "content": "What is on the shelf? Submit 'nothing', or a word."}]
    words = ("REFUSED", "amber", "cobalt") if cls is SubmittedOrRefused else ("nothing", "amber", "cobalt")
    rows = [Task(asked, {"word": word}, task_id=word) for word in words]
    result = await audited(cls, *CORE, "echo", on=rows, repeat=False)
    assert [each.summary[:15] for each in result.findings if each.id == "guess-earns:echo"] == ["1 of 3 tasks so"]


HEDGED = [
    (Shelf, True), (StrictShelf, False), (ShelfAlone, False), (Submitted, True), (SubmittedText, True),
    (SubmittedOnce, False),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "is_found"), HEDGED)
async def test_a_hedge_behind_the_calls_of_gold_or_in_a_call_that_answers_is_found_for_a_field_of_the_label(
    cls, is_found
):
    assert ids(await audited(cls, "hedge", on=shelves(), repeat=False), "fail") == ({"hedging"} if is_found else set())
    if is_found:  # what was not tried alone may be right alone
        assert not ids(
            await audited(cls, "hedge/others_first", "hedge/others_last", on=shelves(), repeat=False), "fail"
        )


@pytest.mark.parametrize(("cls", "found"), [(SubmittedTwice, {"answer-in-feedback"}), (SubmittedAgain, set())])
async def test_feedback_with_the_field_of_the_label_that_gold_says_fails(cls, found):
    rows = [replace(row, label={"word": str(1417 + row.label["num"]), "tool": "submit"}) for row in shelves()]
    assert ids(await audited(cls, *CORE, "calls", on=rows, repeat=False), "fail") == found


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (ShelfUngraded, {"calls-ungraded"}),
        (ShelfThatTells, set()),
        (Shelf, set()),
        (ShelfWithLabel, {"calls-ungraded"}),
        (ShelfWithGradedLabel, set()),
    ],
)
async def test_calls_of_gold_whose_values_do_not_matter_are_noted(cls, found):
    result = await audited(cls, "odd_values", "farm", "gold", on=shelves(), repeat=False)
    assert ids(result, "note") == found
    assert all("4 tasks solved with other values in gold's calls" in each.summary for each in result.findings)


@pytest.mark.long
async def test_an_audit_that_has_no_wrong_answer_to_put_beside_gold_says_so():
    class Done(envs.Says):
        async def gold(self, states):
            return "Done."

    for cls, is_named in [(Done, True), (envs.Says, False)]:
        result = await audited(cls, repeat=False, on=tasks(1))
        assert any(line.startswith("right and wrong answers together") for line in result.not_examined) == is_named


async def test_episodes_that_a_few_failed_requests_ended_are_played_again(virtual_clock):
    class Unsteady(envs.Says):
        num = 0

        async def reset(self, states):
            Unsteady.num += 1
            if Unsteady.num % 7 == 0:
                raise InfraError("words: expected a session, got none. Retry.")
            return states

    result = await audited(Unsteady, "gold", "unicode", "hedge")
    assert ids(result) == set()
    assert not any(play.error for play in result.plays)


@pytest.mark.long
async def test_policies_with_nothing_to_play_are_not_those_that_an_outage_took(virtual_clock):
    class OftenDown(envs.Says):
        async def reset(self, states):
            if states["label"] == "448":
                raise InfraError("words: expected a session, got none. Retry.")
            return states

    result = await audited(OftenDown, repeat=False, on=tasks(2))
    assert (result.lost, result.exit_code()) == ((), 0)
    assert "calls of tools: none are offered" in result.not_examined
    assert not any("`gold` returns none" in line for line in result.not_examined)


async def test_gold_that_meets_an_outage_is_played_again(virtual_clock):
    class DownTwice(envs.Sound):
        num = 0

        async def gold(self, states):
            DownTwice.num += 1
            if DownTwice.num < 3:
                raise InfraError("solver: expected an answer, got none. Retry.")
            return await super().gold(states)

    assert ids(await audited(DownTwice, "gold", on=tasks(1))) == set()


async def test_a_repetition_that_raises_is_an_error_and_no_flaky_reward():
    class RaisesTheSecondTime(envs.Sound):
        tried = set()  # noqa: RUF012

        def right(self, text, states):
            key = states["label"], text, self.attempts
            assert key not in self.tried, "said before"
            self.tried.add(key)
            return super().right(text, states)

    assert ids(await audited(RaisesTheSecondTime, "unicode/nul")) == {"hostile-error"}


async def test_a_policy_whose_steps_take_ten_times_as_long_is_reported():
    result = await audited(envs.Sound, "unicode/nul")
    slow = [replace(p, step_s=(9.0,) if p.variant == "nul" else (0.01,)) for p in result.plays]
    kinds = {policy.key: policy.kind for policy in all_policies()}
    by_id = {task.task_id: task for task in tasks()}
    assert [each.id for each in judge_plays(Facts(slow, by_id, kinds))] == ["slow-steps:unicode"]
    assert judge_plays(Facts([replace(p, step_s=(9.0,)) for p in slow], by_id, kinds)) == []


async def test_what_says_that_no_episode_can_run_ends_the_audit():
    class Refuses(AgentInstance):
        async def reset(self, states):
            raise RunStopped("Refuses.reset: expected an address, got none. Name one.")

        async def step(self, states):
            return StepResult()

    with pytest.raises(RunStopped, match="expected an address"):
        await audited(Refuses, "null")


async def test_no_tasks_are_a_config_error():
    with pytest.raises(ConfigError, match="at least one task"):
        await audit_env(EnvSource(envs.Sound), [])


async def test_gold_that_fails_on_a_row_that_was_not_drawn_is_found_and_changes_nothing_else():
    class WrongOnOne(envs.Says):
        async def gold(self, states):
            return "-1" if states["label"] == "479" else states["label"]

    failing, sound = [
        await audited(cls, *CORE, on=tasks(70), num_tasks=3, repeat=False) for cls in (WrongOnOne, envs.Says)
    ]
    assert "t2" not in failing.task_ids
    assert ids(failing) == {"gold-fails"}
    assert failing.findings[0].evidence[0].task_id == "t2"
    assert (failing.num_plays, failing.policies, ids(sound)) == (sound.num_plays, sound.policies, set())
    assert "67 of 70 tasks (--tasks), 61 of them only by gold" in failing.not_examined
    assert len(failing.plays) == failing.num_plays + 61
    for options in ({"policies": ("null",)}, {"task_ids": ("t0",)}):  # what names policies or tasks plays these only
        named = options.pop("policies", CORE)
        assert not ids(await audited(WrongOnOne, *named, on=tasks(70), num_tasks=3, repeat=False, **options))


async def test_gold_that_is_not_text_is_a_finding():
    class Odd(envs.Sound):
        async def gold(self, states):
            return [states["label"]]

    result = await audited(Odd, *CORE)
    (found,) = [each for each in result.findings if each.id.startswith("gold-fails") or "gold" in each.id]
    assert found.severity == "fail"
    failed = [play.error.message for play in result.plays if play.key == "gold"]
    assert failed[0].startswith("Odd.gold: expected text or None, got ['417']. ")


@pytest.mark.parametrize("last", ["sesame", "42"])  # a constant, which alone earns nothing
async def test_a_hack_of_several_actions_is_said_in_order(last):
    class OpensForTwo(envs.Sound):
        hacks = {"two": ["open", last]}  # noqa: RUF012
        said_before = ""

        def right(self, text, states):
            before, self.said_before = self.said_before, text
            return (before, text) == ("open", last) or super().right(text, states)

    assert ids(await audited(OpensForTwo, *CORE, "hacks"), "fail") == {"hack-earns:hacks"}


async def _hacks(self, states):
    return {}


@pytest.mark.parametrize("hacks", [_hacks, ["say it"], {"loud": 3}, {"loud": []}, None])
async def test_hacks_of_another_form_are_named(hacks):
    cls = type("Odd", (envs.Sound,), {"hacks": hacks})
    with pytest.raises(ConfigError, match=r"Odd\.hacks: expected a mapping of names to actions, got "):
        await audited(cls, *CORE)


async def test_what_no_decoder_gives_is_not_said():
    """A label that no tokenizer has, too: bytes that are no character are U+FFFD in every action."""
    result = await audited(envs.Sound, "unicode", *CORE, on=[replace(tasks(1)[0], label="\ud800 417")])
    said = "".join(step.action for play in result.plays for step in play.steps)
    assert not re.search("[\ud800-\udfff]", said)
    assert "\ufffd" in said


@pytest.mark.parametrize(("noise", "found"), [(4e-7, set()), (1e-3, {"flaky-reward"})])
async def test_a_reward_that_differs_by_rounding_is_not_flaky_and_more_is_shown_with_both_values(noise, found):
    paid = set()

    class Rounds(envs.Sound):
        def reward(self, right, states):
            play = states["label"], states["action_text"], self.attempts
            again = play in paid
            paid.add(play)
            return float(right) + noise * again

    result = await audited(Rounds, *CORE)
    assert ids(result) == found
    for each in result.findings:
        details = {one.detail for one in each.evidence}
        assert details == {
            "turn 1: reward 0.0 the first time, 0.001 the second time",
            "turn 1: reward 1.0 the first time, 1.001 the second time",
        }


@pytest.mark.parametrize(
    ("paid", "score", "gold", "found"),
    [
        (0.9, 0.9, 1.0, {"fail"}),
        (0.6, 0.6, 1.0, {"warn"}),
        (0.4, 0.4, 1.0, set()),
        (0.0, 0.5, 1.0, {"warn"}),  # by its score alone
        (1.0, None, 2.0, {"warn"}),  # by what gold earns
        (1.9, None, 2.0, {"fail"}),
        (0.0, None, 0.0, set()),
        (-0.9, None, -0.5, set()),
    ],
)
async def test_pay_for_anything_is_found_though_nothing_earns_more_than_silence(paid, score, gold, found):
    class PaysAnything(envs.Sound):
        async def step(self, states):
            right = self.right(states["action_text"], states)
            return StepResult(
                reward=gold if right else paid,
                score=None if score is None else 1.0 if right else score,
                terminated=True,
            )

    result = await audited(PaysAnything, *CORE)
    assert {each.severity for each in result.findings if each.id == "null-pays"} == found
    assert ids(result) - {"no-signal"} == ({"null-pays"} if found else set())


async def test_what_earns_as_much_as_silence_is_told_once_without_gold():
    class PaysAnything(envs.Sound):
        gold = AgentInstance.gold

        async def step(self, states):
            return StepResult(reward=0.9, score=0.9, terminated=True)

    assert ids(await audited(PaysAnything, *CORE), "fail", "warn") == {"null-pays"}


async def test_the_beginning_of_an_answer_in_a_label_of_several_values_earns_nothing():
    class ReadsTheBeginning(envs.Sound):
        def right(self, text, states):
            answer = text.rpartition("#### ")[2]
            return bool(answer) and states["label"]["answer"].startswith(answer)

        async def gold(self, states):
            return f"#### {states['label']['answer']}"

    on = [replace(each, label={"answer": each.label, "unit": "g"}) for each in tasks()]
    assert ids(await audited(ReadsTheBeginning, "gold", "wrong", on=on)) == {"prefix-earns"}


async def test_what_solves_several_tasks_that_have_no_label_is_no_answer_to_another():
    class AnyEvenNumber(envs.Sound):
        def right(self, text, states):
            return text.strip().isdecimal() and len(text) == 3 and int(text) % 2 == 0

        async def gold(self, states):
            return str(states["metadata"]["even"])

    on = [replace(each, label=None, metadata={"even": 100 + 2 * place}) for place, each in enumerate(tasks())]
    assert ids(await audited(AnyEvenNumber, "gold", "other_gold/102", on=on)) == set()


async def test_free_text_without_its_end_may_earn_a_reward():
    class LikesCats(envs.Sound):
        def right(self, text, states):
            return "cats" in text

        async def gold(self, states):
            return "I like cats and dogs"

    assert ids(await audited(LikesCats, *CORE, "wrong")) == set()


@pytest.mark.parametrize(
    ("gold", "left"),
    [
        ("#### 2467", "#### 24"), (r"\boxed{417}", r"\boxed{4}"), ("<a>Lisbon</a>\n", "<a>Lis</a>\n"),
        ("It is 1,234.", "It is 1."), ("12.50", "1"), ("-42", "-4"), ("#### 7", None), ("0.50", None), ("000", None),
        ("yes", None), ("B", None), ("```python\nx = 417\n```", None), ("", None), (None, None),
    ],
)  # fmt: skip
def test_the_beginning_of_an_answer_is_another_answer(gold, left):
    assert cut_answer(gold) == left


@pytest.mark.long
@pytest.mark.parametrize("counts", [True, False])
async def test_a_reward_that_falls_with_the_minutes_between_turns_fails(counts):
    class PaysHaste(envs.Sound):
        async def reset(self, states):
            self.began_s = time.monotonic()
            return states

        def reward(self, right, states):
            minutes = (time.monotonic() - self.began_s) // 60
            return right / (1 + minutes * counts)

    result = await audited(PaysHaste, "giving_up")
    assert ids(result, "fail", "warn") == ({"clock"} if counts else set())


@pytest.mark.long
async def test_the_same_actions_of_another_policy_are_no_second_finding():
    class PaysForOneWord(envs.Sound):
        def right(self, text, states):
            return text == "skip" or super().right(text, states)

    found = ids(await audited(PaysForOneWord, "giving_up", "echo", "say/skip", "again/skip"))
    assert [each for each in found if each.startswith("guess-earns")] == ["guess-earns:say"]


async def test_a_label_that_is_what_the_prompt_asks_for_and_not_the_answer_is_no_leak():
    class Words(envs.Sound):
        def right(self, text, states):
            return len(text.split()) == states["label"]

        async def gold(self, states):
            return " ".join(["sea"] * states["label"])

    rows = [Task(f"Write exactly {num} words on the sea.", num, task_id=str(num)) for num in (5, 6, 7, 8)]
    assert ids(await audited(Words, *CORE, "label", on=rows), "fail", "warn") == set()


@pytest.mark.parametrize("example", ["{asked} {answer}", "Q: {asked}\nA: {answer}", "{asked} = {answer}"])
@pytest.mark.parametrize("is_own", [True, False])
async def test_a_solved_example_of_the_same_question_is_warned_of(example, is_own):
    on = tasks(first=2417)

    class ShowsExamples(envs.Sound):
        async def reset(self, states):
            asked = states["observation"][0]["content"]
            shown = on[1] if is_own or states["label"] != on[1].label else on[2]
            said = example.format(asked=shown.prompt[0]["content"], answer=shown.label)
            return {"observation": [{"role": "user", "content": f"{said}\n{example.format(asked=asked, answer='')}"}]}

    found = await audited(ShowsExamples, "gold", on=on)
    assert ids(found, "warn") == ({"answer-in-prompt"} if is_own else set())


@pytest.mark.parametrize(
    "prompt",
    [
        "Text: Great.\nSentiment: positive\nText: Number {}.\nSentiment:",
        "Mary went to the positive.\nMary went to the garden.\nWhere was Mary in room {} before?",
    ],
)
async def test_lines_that_begin_alike_are_no_solved_question(prompt):
    on = [replace(each, label="positive", prompt=prompt.format(place)) for place, each in enumerate(tasks())]
    found = await audited(envs.Says, "gold", on=on)
    assert [each.summary for each in found.findings if "solved example" in each.summary] == []


@pytest.mark.parametrize("is_told", [True, False])
async def test_an_answer_behind_the_same_word_of_each_prompt_is_warned_of(is_told):
    rows = [
        Task(f"id: {n}\nassigned_to: {team if is_told else 'storage'}\nTeams: storage, network. Which one?", team,
             task_id=str(n))
        for n, team in enumerate(("storage", "network", "storage"))
    ]  # fmt: skip
    found = ids(await audited(envs.Says, "label", on=rows, repeat=False), "fail", "warn")
    assert found == ({"answer-in-prompt"} if is_told else set())
