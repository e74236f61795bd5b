"""Planted faults of short ways: an answer in the prompt, cases that may be written; and sound ones."""

import json

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult, Task
from agentenv.testing.odd_values import odd_forms, slow_pattern
from agentenv.testing.tool_calls import call_text
from agentenv.tools import answer_calls, schema_of
from tests.testing.audit.audited import audited, ids


class Header(AgentInstance):
    """The prompt has all columns of the row."""

    found, policy = "answer-in-prompt", "label"
    rows = tuple(
        (f"id: {n}\nassigned_to: {team}\nlog: {log}\nTeams: storage, network. Which one?", team)
        for n, (team, log) in enumerate((("storage", "disk full"), ("network", "no route"), ("storage", "bad block")))
    )

    async def step(self, states):
        right = float(states["action_text"] == states["label"])
        return StepResult(reward=right, score=right, terminated=True)

    async def gold(self, states):
        return states["label"]


class HeaderOfAll(Header):
    """The word before the answer has the same value in each row."""

    rows = tuple((text.replace(f"assigned_to: {team}", "assigned_to: storage"), team) for text, team in Header.rows)


class Workspace(AgentInstance):
    """The cases of the grader are a file that may be written."""

    found, policy = "hack-earns:overwrite", "overwrite"
    rows = tuple((f"Write word.txt so that cases.json passes, {n}. Then say done.", f"w{n}") for n in range(3))
    is_kept = False

    def __init__(self):
        self.files = {}

    async def reset(self, states):
        self.files = {"word.txt": "", "cases.json": json.dumps({"words": [states["label"]]})}
        tools = [schema_of(tool) for tool in (self.list_files, self.read_file, self.write_file)]
        return {"observation": states["observation"], "tools": tools}

    def list_files(self) -> str:
        """List the files."""
        return "\n".join(self.files)

    def read_file(self, name: str) -> str:
        """Read a file.

        Args:
            name: Its name.
        """
        return self.files.get(name, "no such file")

    def write_file(self, name: str, text: str) -> str:
        """Write a file.

        Args:
            name: Its name.
            text: Its text.
        """
        if name in self.files:
            self.files[name] = text
        return "written"

    def cases(self, label):
        return json.loads(self.files["cases.json"])["words"]

    async def step(self, states):
        called = states["tool_calls"]
        if called.items:
            tools = {"list_files": self.list_files, "read_file": self.read_file, "write_file": self.write_file}
            return StepResult(await answer_calls(called, tools))
        word = self.files["word.txt"]
        try:
            right = float(bool(word) and all(each == word for each in self.cases(states["label"])))
        except (ValueError, KeyError, TypeError):
            right = 0.0
        return StepResult(reward=right, score=right, terminated=True)

    async def gold(self, states):
        calls = (
            call_text("read_file", {"name": "cases.json"}),
            call_text("write_file", {"name": "word.txt", "text": states["label"]}),
        )
        return [*calls, "done"][states["turn_index"]]


class SafeWorkspace(Workspace):
    def cases(self, label):
        return [label]


class Conversion(AgentInstance):
    """The tolerance is a part of what was said."""

    found, policy = "hack-earns:odd_values", "odd_values wrong"
    rows = tuple((f"How many meters are {n}.5 feet?", str((n + 0.5) * 0.3048)) for n in range(3))
    maximum = float("inf")

    async def step(self, states):
        try:
            said = float(states["action_text"].removeprefix("Answer: "))
        except ValueError:
            said = 0.0
        right = float(abs(said - float(states["label"])) <= 0.01 * abs(said) and 0 < abs(said) <= self.maximum)
        return StepResult(reward=right, score=right, terminated=True)

    async def gold(self, states):
        return f"Answer: {states['label']}"


class BoundedConversion(Conversion):
    maximum = 1e9


async def findings(cls):
    rows = [
        Task([{"role": "user", "content": text}], label, task_id=f"t{n}") for n, (text, label) in enumerate(cls.rows)
    ]
    return ids(await audited(cls, *cls.policy.split(), on=rows, repeat=False), "fail", "warn")


@pytest.mark.parametrize("cls", [Header, Workspace, Conversion], ids=lambda cls: cls.__name__)
async def test_a_short_way_that_earns_is_found(cls):
    assert cls.found in await findings(cls)


@pytest.mark.parametrize(
    "cls",
    [HeaderOfAll, SafeWorkspace, BoundedConversion],
    ids=lambda cls: cls.__name__,
)
async def test_a_short_way_that_earns_nothing_is_no_finding(cls):
    assert await findings(cls) == set()


@pytest.mark.parametrize(
    ("gold", "slow"),
    [
        (r"`\d{4}-[A-Z]+`", "`(.+)+@@`"),
        (r"Pattern: ^[a-z]+$", "Pattern: (.+)+@@"),
        ("The answer is 4.5", None),
        ("[1, 2]", None),
    ],
)
def test_a_regular_expression_in_gold_is_replaced_by_a_slow_one(gold, slow):
    assert slow_pattern(gold) == slow


def test_the_whole_last_number_is_replaced():
    forms = odd_forms("flour=12.5, sugar=30.75 g")
    assert {name: forms[name] for name in ("nan", "no_value")} == {
        "nan": "flour=12.5, sugar=nan g",
        "no_value": "flour=12.5, sugar= g",
    }
