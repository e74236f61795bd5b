"""Preference data in every form that is read, and what is said of a row that is of none."""

import gzip
import json
from pathlib import Path

import pytest

from agentenv.episode.registry import builtin_datasets
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.evaluation.rows import item_of, read_items, transcript

USER = {"role": "user", "content": "Hi?"}
GOOD, BAD = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "Go."}


def item(**row):
    return item_of(row, where="line 1", subset="file")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi?", "chosen": "Hello.", "rejected": "Go."},
        {"prompt": [USER], "chosen": "Hello.", "rejected": "Go."},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": None, "chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.", "rejected": "Human: Hi?\n\nAssistant: Go."},
        {"prompt": "Hi?", "chosen": ["Hello."], "rejected": ["Go."]},
        {"prompt": [{**USER, "name": None}], "chosen": "Hello.", "rejected": "Go."},
    ],
)
def test_every_form_of_a_pair_is_the_same_item(row):
    found = item(**row)
    assert [(each.prompt, each.text) for each in found.candidates] == [((USER,), "Hello."), ((USER,), "Go.")]
    assert (found.num_chosen, found.is_pair, found.subset, found.item_id) == (1, True, "file", "0")


def test_a_row_of_rewardbench_2_has_several_answers_the_right_ones_first():
    found = item(id="tied:3", subset="Ties", prompt="Hi?", chosen=["a", "b"], rejected=["c", "d", "e"], num_correct=2)
    assert [candidate.text for candidate in found.candidates] == ["a", "b", "c", "d", "e"]
    assert (found.num_chosen, found.is_pair, found.item_id) == (2, False, "tied:3")


def test_an_answer_of_several_turns_continues_from_the_prompt():
    found = item(prompt=[USER], chosen=[GOOD, USER, GOOD], rejected=[BAD])
    assert found.candidates[0].prompt == (USER, GOOD, USER)


def test_turns_of_one_speaker_in_a_row_become_one_message():
    found = transcript("\n\nHuman: a\n\nAssistant: b\n\nAssistant:  c\n\nHuman: d\n\nAssistant: ", where="x")
    assert [message["content"] for message in found.prompt] == ["a", "b\n\nc", "d"]
    assert found.text == ""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("text", "chosen and rejected"),
        ({"prompt": "a", "chosen": "b"}, "keys ['prompt', 'chosen']"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "'prompt': expected text or messages, got ' '"),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}, "message 0: expected role and content"),
        ({"chosen": "plain", "rejected": "text"}, "transcript"),
        ({"chosen": "Human: b", "rejected": "c"}, "transcript"),
        ({"chosen": "so Human: a\n\nAssistant: b", "rejected": "c"}, "transcript"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, "'chosen': expected text or messages"),
        ({"prompt": "a", "chosen": ["x", 4], "rejected": "c"}, "'chosen'[1]"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected'"),
        ({"prompt": "a", "chosen": [USER], "rejected": "c"}, "end with an assistant's text"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "a prompt before the answer"),
    ],
)
def test_a_row_of_no_form_is_refused_with_its_place_and_why(row, said):
    with pytest.raises(DataError) as error:
        item_of(row, where="f.jsonl, line 7")
    assert str(error.value).startswith("f.jsonl, line 7")
    assert said in str(error.value)


ROWS = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(3)]


@pytest.mark.parametrize("name", ["set.jsonl", "set.json", "set.jsonl.gz"])
def test_files_are_read_and_name_the_subset(name, tmp_path):
    text = json.dumps(ROWS) if name.endswith(".json") else "".join(f"{json.dumps(row)}\n" for row in ROWS)
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    items = read_items([str(tmp_path / name)])
    assert [(each.index, each.subset) for each in items] == [(0, "set"), (1, "set"), (2, "set")]


def test_several_files_are_one_list_and_the_limit_is_of_each(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    items = read_items([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], limit=2)
    assert [(each.index, each.subset) for each in items] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


def test_an_empty_file_and_a_limit_of_none_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="at least one row"):
        read_items([str(tmp_path / "empty.jsonl")])
    with pytest.raises(ConfigError, match="--limit"):
        read_items([str(tmp_path / "empty.jsonl")], limit=0)


def test_data_of_an_installed_environment_are_named_as_they_are_listed():
    with pytest.raises(DataError, match=r"word_problems\.jsonl, line 1: expected chosen and rejected"):
        read_items(["word_problems"], builtin=builtin_datasets())
    with pytest.raises(ConfigError, match=r"built-in data .*Did you mean 'word_problems'"):
        read_items(["word_problem"], builtin=builtin_datasets())


# --- the pairs that ship ----------------------------------------------------------------------------------------------

FLAWS = {"rude", "evasive", "off_topic", "wrong", "padding", "harmful", "format"}
PAIRS = Path(__file__).parents[3] / "envs/agentenv_envs/rm_chat/data/pairs.jsonl"


@pytest.fixture(scope="module")
def pairs():
    return read_items([str(PAIRS)])


def test_the_pairs_that_ship_are_pairs_of_all_flaws_each_as_often(pairs):
    assert all(item.is_pair for item in pairs)
    assert {flaw: sum(item.subset == flaw for item in pairs) for flaw in FLAWS} == dict.fromkeys(FLAWS, 36)
    assert len(pairs) == 36 * len(FLAWS)
    roles = {tuple(message["role"] for message in item.candidates[0].prompt) for item in pairs}
    assert roles == {("user",), ("system", "user"), ("user", "assistant", "user")}
