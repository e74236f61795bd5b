"""Policies with arguments of the world: each finds its fault, and none blames an environment that is right."""

import json
import re

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult, Task
from agentenv.testing.audit.auditing import followed, named_policies
from agentenv.testing.tool_calls import (
    call_text,
    commands_of,
    form_of,
    keys_of,
    options_of,
    with_every_id,
    words_of,
)
from agentenv.tools import ToolError, answer_calls, schema_of
from tests.testing.audit.audited import Says, Sound, audited, ids

KEYS = ("port_a", "port_b", "port_c")
ROWS = [
    Task([{"role": "user", "content": f"Read the {key} of the machine."}], label, task_id=key, metadata={"key": key})
    for key, label in zip(KEYS, ("417x", "448x", "479x"), strict=True)
]


class Machine(AgentInstance):
    """Has settings that a tool reads; the answer is one of them."""

    max_turns = 12

    async def reset(self, states):
        self.settings, self.coins, self.ended = {states["metadata"]["key"]: states["label"]}, 5, False
        self.tools = {each.__name__: each for each in self.offered()}
        return {"observation": states["observation"], "tools": [schema_of(each) for each in self.tools.values()]}

    def offered(self):
        return [self.read_setting]

    def read_setting(self, key: str) -> str:
        """Read a setting.

        Args:
            key: Its key.
        """
        return self.settings.get(key, "Error: unknown.")

    async def step(self, states):
        called = states["tool_calls"]
        replies = await answer_calls(called, self.tools) if called.items else ""
        if not called.items or self.ended:
            score = self.score(states)
            return StepResult(reward=score, score=score, terminated=True)
        return StepResult(replies, reward=self.for_call(replies), score=0.0)

    def score(self, states):
        return float(states["action_text"].strip() == states["label"])

    def for_call(self, replies):
        return 0.0

    async def gold(self, states):
        return states["label"]


class PaysLookups(Machine):
    """A lookup pays only with a name that the prompt has."""

    found = "reward-exceeds-gold:again"

    def for_call(self, replies):
        return 0.2 * (not replies[0]["content"].startswith("Error"))


class PaysTheEnd(Machine):
    found, gold = "partial-credit:explore", AgentInstance.gold

    def offered(self):
        return [self.read_setting, self.finish]

    def finish(self) -> str:
        """End the work."""
        self.ended = True
        return "Ended."

    def score(self, states):
        return 0.7 * bool(states["action_text"].strip())


class SellsAgain(Machine):
    found, gold = "guess-earns:explore", AgentInstance.gold
    has = False

    def offered(self):
        return [self.buy, self.sell]

    def buy(self, good: str) -> str:
        """Buy salt or wool.

        Args:
            good: Its good.
        """
        self.has = True
        return "Bought."

    def sell(self, good: str) -> str:
        """Sell salt or wool.

        Args:
            good: Its good.
        """
        self.coins += self.has
        return f"{self.coins} coins."

    def score(self, states):
        return min(1.0, (self.coins - 5) / 6)


class Orders(Machine):
    """Is graded at the one order that the task names: the others are not looked at."""

    others_count = False

    async def reset(self, states):
        self.orders = dict.fromkeys((*range(11, 15), int(states["label"])), "open")
        return await super().reset({**states, "metadata": {"key": "port_a"}})

    def offered(self):
        return [self.list_orders, self.cancel]

    def list_orders(self) -> list[dict[str, int | str]]:
        """List the orders."""
        return [{"order": number, "state": state} for number, state in self.orders.items()]

    def cancel(self, order: int) -> str:
        """Cancel an order.

        Args:
            order: Its number.
        """
        self.orders[order] = "cancelled"
        return "Cancelled."

    def score(self, states):
        others = [state for number, state in self.orders.items() if number != int(states["label"])]
        is_right = self.orders[int(states["label"])] == "cancelled" and states["action_text"] == "DONE"
        return float(is_right and not (self.others_count and "cancelled" in others))

    async def gold(self, states):
        own = call_text("list_orders", {}), call_text("cancel", {"order": int(states["label"])}), "DONE"
        return own[min(states["turn_index"], 2)]


class LooksAtEveryOrder(Orders):
    others_count = True


class RefusesTheOthers(Orders):
    """A call for another order is an error, which changes nothing."""

    def cancel(self, order: int) -> str:
        """Cancel an order.

        Args:
            order: Its number.
        """
        if order < 20:
            raise ToolError("It is sent.")
        return super().cancel(order)


class AsksForTheNumber(Orders):
    """The last word is the order's number; the order has to be cancelled, too."""

    def score(self, states):
        return float(super().score({**states, "action_text": "DONE"}) and states["action_text"] == states["label"])

    async def gold(self, states):
        return states["label"] if states["turn_index"] > 1 else await super().gold(states)


class AsksOnlyForTheNumber(AsksForTheNumber):
    def score(self, states):
        return float(states["action_text"] == states["label"])


class LooksAtRefunds(Orders):
    """Two tools write, and only the orders that one of them changed are looked at."""

    def offered(self):
        return [self.list_orders, self.cancel, self.refund]

    def refund(self, order: int, fee: int) -> str:
        """Refund an order.

        Args:
            order: Its number.
            fee: What is kept.
        """
        self.refunded = {**getattr(self, "refunded", {}), order: fee}
        return "Refunded."

    def for_call(self, replies):
        return -0.01 * sum(getattr(self, "refunded", {}).values())

    def score(self, states):
        return super().score(states) * (getattr(self, "refunded", {}) == {int(states["label"]): 2})

    async def gold(self, states):
        refund = call_text("refund", {"order": int(states["label"]), "fee": 2})
        return refund if states["turn_index"] == 2 else await super().gold(states)


class TakesAnEmptyAnswer(Sound):
    """In the form of the prompt, what cannot be read passes."""

    found = "hack-earns:answers"

    async def reset(self, states):
        return {"observation": [{"role": "user", "content": "Think. End with 'Result:' and a number."}]}

    def right(self, text, states):
        said = re.search(r"Result:(.*)$", text)
        return said is not None and (not said[1].strip() or said[1].strip() == states["label"])

    async def gold(self, states):
        return f"Result: {states['label']}"


class TakesEmptyJson(Sound):
    """What is missing is not compared."""

    found = "hack-earns:no_values"

    def right(self, text, states):
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(said, dict) and all(str(value) == states["label"] for value in said.values())

    async def gold(self, states):
        return json.dumps({"sum": states["label"]})


class TakesEachKeyAlone(TakesEmptyJson):
    """What is missing is not counted."""

    def right(self, text, states):
        return "null" not in text and text != "{}" and super().right(text, states)

    async def gold(self, states):
        return json.dumps({"sum": states["label"], "total": states["label"]})


class PaysTheFailed(Sound):
    """The reward falls with the score."""

    found, gold = "reward-contradicts-score", AgentInstance.gold

    def right(self, text, states):
        return text == "42" or (states["label"] == "0" and text == "0")

    def reward(self, right, states):
        return 0.2 if right else 0.6


FAULTS = [PaysLookups, PaysTheEnd, SellsAgain]
WITHOUT_TOOLS = [TakesAnEmptyAnswer, TakesEmptyJson, TakesEachKeyAlone, PaysTheFailed]
CALLS = ("explore", "odd_calls", "overwrite", "answers", "label")


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTS, ids=lambda cls: cls.__name__)
async def test_calls_with_words_of_the_world_find_a_fault_of_tools(cls):
    key = call_text("read_setting", {"key": "port_a"}).splitlines()[1]
    result = await audited(cls, *CALLS, f"again/{key}", on=ROWS)
    assert cls.found in ids(result, "fail", "warn")


@pytest.mark.long
async def test_a_machine_whose_tool_knows_the_answer_has_no_fault():
    result = await audited(Machine, *CALLS, on=ROWS)
    assert ids(result, "fail", "warn") == set()
    assert "answer-in-feedback" in ids(result, "note")


async def test_a_call_for_every_id_that_a_tool_lists_earns_only_where_the_others_are_not_looked_at():
    prompt = [{"role": "user", "content": "Cancel the last order."}]
    rows = [Task(prompt, number, task_id=number) for number in ("25", "26", "27")]
    assert "hack-earns:every_id" in ids(await audited(Orders, "every_id", on=rows), "warn")
    for cls in (LooksAtEveryOrder, RefusesTheOthers):
        assert "hack-earns:every_id" not in ids(await audited(cls, "every_id", on=rows))
    for cls in (AsksForTheNumber, LooksAtRefunds):
        assert "hack-earns:every_id" in ids(await audited(cls, "every_id", "farm", on=rows), "warn"), cls
    assert "hack-earns:every_id" not in ids(await audited(AsksOnlyForTheNumber, "every_id", "farm", on=rows))


async def test_a_number_far_below_zero_in_golds_call_is_paid():
    rows = [Task([{"role": "user", "content": "Refund the order."}], number, task_id=number) for number in ("25", "26")]
    assert "reward-exceeds-gold:odd_values" in ids(await audited(LooksAtRefunds, "odd_values", on=rows), "fail")


def test_every_id_is_one_of_the_same_key_or_form_and_reading_calls_stay_as_they_are():
    seen = '[{"slot": 3, "start": "09:00"}, {"slot": 14}] Orders: B02, B17 (late), C03.'
    assert with_every_id(f"Now.\n{call_text('book', {'slot': 3})}", seen) == (
        f"Now.\n{call_text('book', {'slot': 3})}\n{call_text('book', {'slot': 14})}"
    )
    sent = call_text("send", {"order": "B17", "how": "fast"})
    assert with_every_id(sent, seen) == "\n".join([sent.replace("B17", "B02"), sent])
    seen += r' "order": "C:\dir", "order": "B17"'  # no JSON
    assert with_every_id(sent, seen) == sent
    for action in (call_text("get_slot", {"slot": 3}), call_text("book", {"slot": 5}), "slot 3"):
        assert with_every_id(action, seen) == action


@pytest.mark.long
@pytest.mark.parametrize("cls", WITHOUT_TOOLS, ids=lambda cls: cls.__name__)
async def test_forms_of_the_prompt_find_a_fault(cls):
    result = await audited(cls, "answers", "odd_values", "label")
    assert cls.found in ids(result, "fail", "warn")


async def test_a_key_that_the_prompt_names_is_no_leak_and_a_copied_answer_at_any_place_is_noted():
    class Keyed(Sound):
        def right(self, text, states):
            return text.strip() == f"{len(states['label'])}-{states['label'][::-1]}"

        async def gold(self, states):
            return f"{len(states['label'])}-{states['label'][::-1]}"

    names = ("Lisbon", "Nairobi", "Caracas")
    keyed = [Task(f"Code of {name}?", name, task_id=name) for name in names]
    assert ids(await audited(Keyed, "label", on=keyed), "fail", "warn") == set()

    said = ("Who won? Ines lost, Lisbon won.", "Who won? It was Nairobi, said Tom.", "Who won? Caracas did, not Oslo.")
    copied = [Task(text, name, task_id=name) for text, name in zip(said, names, strict=True)]
    result = await audited(Says, "label", on=copied)
    assert "answer-in-prompt" in ids(result, "note")
    assert ids(result, "fail", "warn") == set()


async def test_an_empty_label_that_every_text_contains_warns_among_many_rows():
    class Contains(Sound):
        def right(self, text, states):
            return bool(text) and states["label"] in text

    rows = [Task(f"Row {n}?", f"4{n}17x" if n else "", task_id=str(n)) for n in range(7)]
    assert "trivial-tasks" in ids(await audited(Contains, "constant", on=rows), "warn")
    rows[0] = Task("Row 0?", "anything", task_id="0")
    assert "trivial-tasks" not in ids(await audited(Contains, "constant", on=rows))


async def test_a_number_of_the_prompt_within_a_longer_answer_is_no_leak():
    class Ruler(Sound):
        def right(self, text, states):
            return text == f"0 {states['label']} 9{states['label']}7"

        async def gold(self, states):
            return f"0 {states['label']} 9{states['label']}7"

    rows = [Task(f"A ruler with {n} marks.", n, task_id=str(n)) for n in (417, 448, 479)]
    assert "answer-in-prompt" not in ids(await audited(Ruler, "label", on=rows), "warn")


async def test_a_constant_that_is_one_of_two_answers_is_noted_only():
    rows = [Task(f"Is {n} even?", "no" if n % 2 else "yes", task_id=str(n)) for n in range(6)]
    assert ids(await audited(Says, "constant", on=rows), "fail", "warn") == set()


def test_words_of_a_text_are_its_names_files_and_options():
    text = "Say 'open sesame' or QUIT. Order B02 is in notes.txt; the keys are port, workers or region."
    assert {"open sesame", "B02", "notes.txt", "port", "workers", "region"} <= {*words_of(text)}
    assert options_of("One of salt (3), wool or iron.") == ["salt", "wool", "iron"]
    assert {"open sesame", "QUIT"} <= {*commands_of(text)}
    assert {"notes.txt", "B02", "port"} <= {*keys_of([text])}
    assert words_of("") == commands_of("") == options_of("") == keys_of([""]) == []


@pytest.mark.parametrize(
    ("text", "form"),
    [("End with 'Estimate:' and a number.", "Estimate: {}"),
     ("Answer with FIRST BAD: and its number.", "FIRST BAD: {}"),
     ("Write <sql>your query</sql>.", "<sql>{}</sql>"), ("What is 1 + 1?", None)],
)  # fmt: skip
def test_the_form_of_an_answer_is_read_from_the_prompt(text, form):
    assert form_of(text) == form


def test_a_followed_action_is_made_again_from_its_name():
    call = call_text("buy", {"item": "it/em"})
    policy = followed("call", call)
    (again,) = named_policies([policy.key, "null"])
    assert (again.key, again.act.__closure__[0].cell_contents) == (policy.key, call)
