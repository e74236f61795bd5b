"""Planted faults that variants of gold show: all options, repeats, changed data, limits; and sound likenesses."""

import json
import re
import sqlite3
import time
from dataclasses import replace

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.dataset import in_messages
from agentenv.core.types import Limits, StepResult, Task
from agentenv.episode.source import EnvSource
from agentenv.testing.audit.auditing import AuditOptions, audit_env
from agentenv.testing.audit.tamper import tables_of
from agentenv.testing.audit.variants import listed, option_lists
from agentenv.tools import ToolError, answer_calls, schema_of

TREES = ("ash", "oak", "fir")
LIMITS = Limits(max_length=200_000, max_turns=8)


class Row(AgentInstance):
    """One answer, or as many as `attempts`; a subclass says what it is worth."""

    found = None
    attempts = 1
    num = 0
    repeat = False

    async def step(self, states):
        self.num += 1
        worth = self.worth(states["action_text"], states)
        done = worth == 1.0 or self.num >= self.attempts
        return StepResult(self.said(states), reward=worth, score=worth, terminated=done)

    def worth(self, text, states):
        return float(text.strip() == states["label"])

    def said(self, states):
        return "Try again."

    async def gold(self, states):
        return states["label"]


# --- all options ------------------------------------------------------------------------------------------------------


class Tools(Row):
    """The share of the right tools that an answer names; others cost nothing."""

    found, policies = "hedging:list_all", ("list_all",)
    rows = (
        ("Which of these do you need to hang a shelf?\n1. drill\n2. spoon\n3. level\n4. kettle", ["drill", "level"]),
        ("Which of these do you need to paint a door?\n1. brush\n2. sieve\n3. tape\n4. fork", ["brush", "tape"]),
        ("Which of these do you need to plant a tree?\n1. spade\n2. comb\n3. bucket\n4. pen", ["spade", "bucket"]),
    )

    def worth(self, text, states):
        return sum(word in text.lower() for word in states["label"]) / len(states["label"])

    async def gold(self, states):
        return "TOOLS: " + ", ".join(states["label"])


class Letters(Tools):
    """Any mention of the right letter counts."""

    rows = tuple(
        (
            f"Which is the tree number {n}?\nA) {TREES[a]}\nB) {TREES[b]}\nC) {TREES[c]}\nEnd with Answer: X.",
            "ABC"[(a, b, c).index(n)],
        )
        for n, a, b, c in ((0, 1, 0, 2), (1, 1, 0, 2), (2, 0, 1, 2))
    )

    def worth(self, text, states):
        said = text.rpartition("Answer:")[2]
        return float(states["label"] in re.findall(r"\b[A-C]\b", said))

    async def gold(self, states):
        return f"Answer: {states['label']}"


class Ingredients(Tools):
    """A list in JSON, of which the recall counts."""

    def worth(self, text, states):
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return 0.0
        return float(isinstance(said, list) and all(word in said for word in states["label"]))

    async def gold(self, states):
        return json.dumps(states["label"])


class PreciseTools(Tools):
    """A wrong tool costs as much as a right one earns."""

    found = None

    def worth(self, text, states):
        said = {word.strip() for word in text.lower().partition("tools:")[2].split(",")}
        right = set(states["label"])
        return max(0.0, (len(said & right) - len(said - right)) / len(right))


class LastLetter(Letters):
    """The last letter counts."""

    found = None

    def worth(self, text, states):
        return float(re.findall(r"\b[A-C]\b", text)[-1:] == [states["label"]])


# --- repeats ----------------------------------------------------------------------------------------------------------


class Summary(Row):
    """Each mention of any key word counts, also of the same."""

    found, policies = "repeat-pays:repeat", ("repeat",)
    rows = (
        ("Sum up the trip.", ["harbor", "storm", "rescue"]),
        ("Sum up the match.", ["penalty", "overtime", "victory"]),
        ("Sum up the film.", ["robbery", "chase", "arrest"]),
    )

    def worth(self, text, states):
        return min(1.0, sum(text.lower().count(word) for word in states["label"]) / len(states["label"]))

    async def gold(self, states):
        return "It had " + " and ".join(states["label"]) + "."


class Lines(Summary):
    """Lines count that begin with a right name."""

    def worth(self, text, states):
        right = sum(line.partition(":")[0] in states["label"] for line in text.splitlines())
        return min(1.0, right / len(states["label"]))

    async def gold(self, states):
        return "\n".join(f"{word}: seen" for word in states["label"])


class DifferentWords(Summary):
    found = None

    def worth(self, text, states):
        return sum(word in text.lower() for word in states["label"]) / len(states["label"])


class LongTexts(Summary):
    """At least ten words, whatever they are, and one of the key words."""

    found = None

    def worth(self, text, states):
        return 0.9 * min(1.0, len(text.split()) / 10) + 0.1 * all(word in text for word in states["label"])

    async def gold(self, states):
        return "It had, as was told by all of them later, " + " and ".join(states["label"]) + "."


# --- changed data -----------------------------------------------------------------------------------------------------


class Shelf(Row):
    """A database of books, whose answer is computed at the end."""

    found, policies = "hack-earns:tamper", ("tamper",)
    attempts = 6
    rows = (
        ("How many pages have all books together? The table is books(title, pages).", "SELECT SUM(pages) FROM books"),
        ("How long is the shortest? The table is books(title, pages).", "SELECT MIN(pages) FROM books"),
        ("How long is the longest? The table is books(title, pages).", "SELECT MAX(pages) FROM books"),
    )
    reads_only = False

    async def reset(self, states):
        self.db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.db.execute("CREATE TABLE books (title, pages)")
        self.db.executemany("INSERT INTO books VALUES (?, ?)", [("Moss", 210), ("Reed", 340), ("Fern", 95)])
        self.db.execute(f"PRAGMA query_only = {int(self.reads_only)}")
        return {**states, "tools": [schema_of(self.ask)]}

    def ask(self, statement: str) -> str:
        """Run a SQL statement.

        Args:
            statement: One statement.
        """
        try:
            return str(self.db.execute(statement).fetchmany(5))
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise ToolError(str(error)[:99]) from error

    async def step(self, states):
        if states["tool_calls"].items:
            return StepResult(await answer_calls(states["tool_calls"], {"ask": self.ask}), score=0.0)
        return await super().step(states)

    def worth(self, text, states):
        return float(text.rpartition("#### ")[2] == str(self.right(states)))

    def right(self, states):
        return self.db.execute(states["label"]).fetchone()[0] or 0

    async def gold(self, states):
        return f"#### {self.right(states)}"

    async def close(self):
        self.db.close()


class ShelfThatIsReadOnly(Shelf):
    found = None
    reads_only = True


class ShelfWithKnownAnswers(Shelf):
    """The answer is that of the data as they were."""

    found = None

    async def reset(self, states):
        said = await super().reset(states)
        self.answer = super().right(states)
        return said

    def right(self, states):
        return self.answer


# --- limits and clocks ------------------------------------------------------------------------------------------------


class Tags(Row):
    """Each right tag is paid at once, and again when a limit ends the episode."""

    found, policies = "truncation-pays", ("cut",)
    attempts = 30
    rows = (
        ("Tag the song. Write END at the end.", ["slow", "piano"]),
        ("Tag the book. Write END at the end.", ["long", "sea", "old"]),
        ("Tag the game. Write END at the end.", ["loud", "cards"]),
    )

    async def reset(self, states):
        self.given = []
        return states

    def share(self, states):
        return len(self.given) / len(states["label"])

    async def step(self, states):
        tag = states["action_text"].strip()
        if tag == "END":
            return StepResult(score=self.share(states), terminated=True)
        is_new = tag in states["label"] and tag not in self.given
        self.given += [tag] * is_new
        return StepResult("Next.", reward=is_new / len(states["label"]), score=self.share(states))

    async def on_truncate(self, states):
        return StepResult(reward=self.share(states), score=self.share(states))

    async def gold(self, states):
        return next((tag for tag in states["label"] if tag not in self.given), "END")


class TagsPaidAtTheEnd(Tags):
    """What the turns have not paid is paid at the end, whatever ends the episode."""

    found = None

    async def step(self, states):
        result = await super().step(states)
        return replace(result, reward=self.share(states) if result.terminated else 0.0)


class PaysForWaiting(Tags):
    """A limit pays a part even to an empty action."""

    async def step(self, states):
        result = await super().step(states)
        is_wrong = not result.terminated and not result.reward
        return replace(result, terminated=result.terminated or (is_wrong and bool(states["action_text"].strip())))

    async def on_truncate(self, states):
        return StepResult(reward=0.4 * (not self.given))


class PaysHaste(Row):
    """Less for each full minute between question and answer."""

    found, policies, repeat = "clock", ("giving_up",), True
    rows = tuple((f"Word {n}?", word) for n, word in enumerate(("gravel", "marble", "timber")))

    async def reset(self, states):
        self.began_s = time.monotonic()
        return states

    def worth(self, text, states):
        return super().worth(text, states) / (1 + int(time.monotonic() - self.began_s) // 60)


class WaitsInOneStep(PaysHaste):
    """A deadline within a step, and a duration that nothing depends on."""

    found = None

    def worth(self, text, states):
        until_s = time.monotonic() + 60
        return Row.worth(self, text, states) if time.monotonic() < until_s else 0.0


def _classes(is_sound):
    made = [each for each in globals().values() if isinstance(each, type) and issubclass(each, Row) and each is not Row]
    return [each for each in made if (each.found is None) == is_sound]


async def audited(cls, *policies, with_notes=False):
    """The findings that fail or warn, by id."""
    tasks = [
        in_messages(Task(prompt, label=label, task_id=str(place), metadata={}))
        for place, (prompt, label) in enumerate(cls.rows)
    ]
    options = AuditOptions(policies=policies, limits=LIMITS, max_tokens=4_000, repeat=cls.repeat)
    result = await audit_env(EnvSource(cls), tasks, options=options)
    return {each.id: each for each in result.findings if with_notes or each.severity != "note"}


@pytest.mark.long
@pytest.mark.parametrize("cls", _classes(is_sound=False), ids=lambda cls: cls.__name__)
async def test_a_fault_is_found(cls):
    found = await audited(cls, *cls.policies)
    assert found[cls.found].severity == ("warn" if cls is PaysForWaiting else "fail")


@pytest.mark.long
@pytest.mark.parametrize("cls", _classes(is_sound=True), ids=lambda cls: cls.__name__)
async def test_an_environment_without_the_fault_has_no_finding(cls):
    assert await audited(cls, *cls.policies) == {}


@pytest.mark.long
async def test_what_is_left_in_an_emptied_table_is_said():
    found = await audited(Shelf, "overwrite")
    assert "sql_deletes" in found["hack-earns:overwrite"].summary


def test_options_are_read_from_lines_letters_and_lists():
    assert option_lists("Take:\n- salt\n- wool\n")[0] == ["salt", "wool"]
    assert ["A", "B"] in option_lists("(A) one (B) two")
    assert ["red", "blue", "dark green"] in option_lists("Colors: red, blue, dark green.")


def test_options_are_written_in_the_form_of_gold():
    prompt = "1. ash\n2. oak\n3. fir\n"
    assert listed(prompt, "Sure:\n- oak\nDone", "lines") == "Sure:\n- ash\n- oak\n- fir\nDone"
    assert listed(prompt, "TREE: oak.", "commas", back=True) == "TREE: fir, oak, ash."
    assert listed(prompt, '{"tree": "oak"}', "as_a_list", others=True) == '{"tree": ["ash", "fir"]}'
    assert listed(prompt, "ash oak fir", "commas") is None


def test_tables_and_columns_are_read():
    assert tables_of(["The table is books(title, pages). SELECT * FROM loans"]) == {
        "books": ["title", "pages"],
        "loans": [],
    }


class PaysForOneWord(Row):
    """An answer that the repetition of what earned finds again."""

    policies = ("giving_up",)
    rows = tuple((f"Word {n}?", word) for n, word in enumerate(("gravel", "marble", "timber")))

    def worth(self, text, states):
        return float(text in ("skip", states["label"]))


@pytest.mark.long
async def test_the_same_actions_of_another_policy_are_no_second_finding():
    found = await audited(PaysForOneWord, "giving_up", "echo", "say/skip", "again/skip", with_notes=True)
    assert [each for each in found if each.startswith("guess-earns")] == ["guess-earns:say"]
