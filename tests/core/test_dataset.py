"""read_tasks: what a row becomes, and what is said about rows and names that cannot be used."""

import gzip
import json
import sys
import types

import numpy as np
import pytest

from agentenv.core.dataset import read_tasks
from agentenv.core.types import Task
from agentenv.errors import ConfigError, DataError, MissingDependency


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(prompt="1+1?", label="2", **columns):
    return {"prompt": prompt, "label": label, **columns}


@pytest.fixture
def jsonl(tmp_path):
    return lambda *rows: write(tmp_path / "data.jsonl", *rows)


def test_a_row_becomes_a_task_with_its_other_columns_as_metadata(jsonl):
    (task,) = read_tasks(jsonl(row(source="book", level=3)))
    assert (task.prompt, task.label, task.task_id) == ("1+1?", "2", "000000")
    assert task.metadata == {"source": "book", "level": 3}
    assert task.seed is None
    assert task.images == ()


def test_keys_choose_prompt_and_label(jsonl):
    spec = jsonl({"question": "q", "answer": {"value": 4}})
    (task,) = read_tasks(spec, prompt_key="question", label_key="answer")
    assert (task.prompt, task.label, task.metadata) == ("q", {"value": 4}, {})


@pytest.mark.parametrize("label_key", [None, ""])
def test_no_label_key_means_no_labels(jsonl, label_key):
    (task,) = read_tasks(jsonl({"prompt": "q", "label": 1}), label_key=label_key)
    assert task.label is None
    assert task.metadata == {"label": 1}


CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"q": 1}}}
IMAGE = {"type": "image", "image": "a.png"}


def calls(**function):
    return {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", **function}}]}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"role": "user", "content": "q", "tool_calls": None, "name": None}, {"role": "user", "content": "q"}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": t, "image": None} for t in "ab"]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "image": None}, {**IMAGE, "text": None}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
        ),
        (calls(arguments='{"q": 1}'), calls(arguments={"q": 1})),
        (calls(arguments=json.dumps('{"q": 1}')), calls(arguments={"q": 1})),
        (calls(arguments={"q": 1, "limit": None}, strict=None), calls(arguments={"q": 1, "limit": None})),
        (calls(arguments=None), calls(arguments={})),
        (calls(), calls(arguments={})),
        *[(calls(arguments=empty), calls(arguments={})) for empty in (" ", "null", "[]", ' "null"', '""', [], "{}")],
        *[(calls(arguments=other), calls(arguments=other)) for other in ("[1]", "0", "false", "nul", "[null]", [1])],
        (calls(name=["f"], arguments={"q": None}), calls(name=["f"], arguments={"q": None})),
        (calls(arguments='{"q": '), calls(arguments='{"q": ')),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"q": 1}', "id": "c1", "function": None}]},
            calls(arguments={"q": 1}),
        ),
    ],
)
def test_messages_of_rows_are_in_the_form_that_templates_take(jsonl, written, read):
    (task,) = read_tasks(jsonl(row([written, {"role": "user", "content": "next"}])))
    assert task.prompt[0] == read


def test_a_tool_result_of_a_row_has_the_name_of_its_call(jsonl):
    other = {"id": "c2", "function": {"name": "g", "arguments": "{}"}}
    results = [{"role": "tool", "content": "r", "tool_call_id": name} for name in ("c2", "c1")]
    (task,) = read_tasks(jsonl(row([{"role": "assistant", "tool_calls": [CALL, other]}, *results])))
    assert [message["name"] for message in task.prompt[1:]] == ["g", "f"]


def test_arguments_that_are_null_against_the_rows_own_tools_are_padding(jsonl):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"q": {"type": "integer"}}}}}]
    messages = [calls(arguments={"q": 1, "other": None}), {"role": "user", "content": "next"}]
    first, second = read_tasks(jsonl(row(messages, tools=tools), row(messages, tools="none")))
    assert first.prompt[0] == calls(arguments={"q": 1})
    assert second.prompt[0] == messages[0]


@pytest.mark.parametrize("written", ["[]", [5], {"name": "f"}])
def test_tool_calls_of_a_row_that_are_not_calls_are_refused(jsonl, written):
    with pytest.raises(DataError, match=r"line 1, 'prompt': tool_calls: expected a list of calls"):
        read_tasks(jsonl(row([{"role": "assistant", "content": "", "tool_calls": written}])))


def test_messages_are_a_prompt_and_json_text_of_them_stays_text(jsonl):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    first, second = read_tasks(jsonl(row(messages), row(json.dumps(messages))))
    assert first.prompt == messages
    assert second.prompt == json.dumps(messages)


def test_seed_and_images_of_a_row_go_with_the_task(jsonl):
    first, second = read_tasks(jsonl(row(seed=7, images=["a.png"]), row(seed="seven", images="a.png")))
    assert (first.seed, first.images, first.metadata) == (7, ("a.png",), {"seed": 7})
    assert (second.seed, second.images, second.metadata) == (None, (), {"seed": "seven", "images": "a.png"})


@pytest.mark.parametrize("key", ["id", "task_id"])
def test_an_id_column_names_the_tasks(jsonl, key):
    tasks = read_tasks(jsonl(row(**{key: "a"}), row(**{key: 12}), row(**{key: None}), row(**{key: True}), row()))
    assert [task.task_id for task in tasks] == ["a", "12", "000002", "000003", "000004"]


def test_task_ids_are_unique_and_do_not_depend_on_the_limit(jsonl):
    spec = jsonl(row(id="000001"), row(), row(id="a"), row(), row(id="000003"))
    ids = [task.task_id for task in read_tasks(spec)]
    assert ids == ["000001", "000001+", "a", "000003", "000003+"]
    for limit in range(1, 6):
        assert [task.task_id for task in read_tasks(spec, limit=limit)] == ids[:limit]


@pytest.mark.parametrize("key", ["id", "task_id"])
@pytest.mark.parametrize("name", ["a", 12])
def test_two_rows_with_one_id_are_an_error(jsonl, key, name):
    spec = jsonl(row(**{key: name}), row(), row(**{key: str(name)}))
    found = rf"line 3: expected an id that no other row has, got '{name}', the id of .*line 1\."
    with pytest.raises(DataError, match=found):
        read_tasks(spec)
    assert len(read_tasks(spec, limit=2)) == 2


def test_two_tasks_with_one_id_are_an_error():
    with pytest.raises(DataError, match=r"data, row 2: expected an id that no other row has, got 'a', the id of data"):
        read_tasks([Task("q", task_id="a"), Task("p", task_id="a")])


@pytest.mark.parametrize(
    ("label", "got"),
    [
        ("NaN", "nan"),
        ("Infinity", "inf"),
        ("-Infinity", "-inf"),
        ("[1, [2.5, NaN]]", "[1, [2.5, nan]]"),
        ('{"a": {"b": [Infinity]}}', "{'a': {'b': [inf]}}"),
    ],
)
def test_a_label_with_what_is_not_a_finite_number_is_an_error(tmp_path, label, got):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "q", "label": {label}}}\n')
    with pytest.raises(DataError) as raised:
        read_tasks(str(path))
    assert f"line 1, 'label': expected a label, got {got}." in str(raised.value)


def test_numbers_that_are_not_finite_are_found_in_arrays_and_finite_ones_are_labels():
    with pytest.raises(DataError, match="row 1, 'label': expected a label, got"):
        read_tasks([row(label={"a": np.array([[1.0, np.nan]])})])
    with pytest.raises(DataError, match="row 1, 'label': expected a label, got"):
        read_tasks([row(label=np.float32("inf"))])
    label = {"a": [1e308, "nan", {"b": None}], "c": True}
    assert read_tasks([row(label=label)])[0].label == label


def test_a_label_may_be_deep_or_contain_itself():
    cyclic: list = [1.0]
    cyclic.append(cyclic)
    deep: list = []
    for _ in range(5_000):
        deep = [deep]
    for label in (cyclic, deep):
        (task,) = read_tasks([row(label=label)])
        assert task.label is label
    cyclic.append(float("nan"))
    with pytest.raises(DataError, match="row 1, 'label': expected a label, got"):
        read_tasks([row(label=cyclic)])


@pytest.mark.parametrize("role", ["robot", "User", "human", "gpt"])
def test_a_role_that_chat_templates_do_not_have_is_an_error(jsonl, role):
    messages = [{"role": "system", "content": "s"}, {"role": role, "content": "q"}]
    with pytest.raises(DataError, match=rf"message 1: expected one of the roles system, .*, got '{role}'"):
        read_tasks(jsonl(row(messages)))


def test_limit_stops_reading_before_bad_rows(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row()) + "\nnot json\n")
    assert len(read_tasks(str(path), limit=1)) == 1
    with pytest.raises(DataError, match=r"data\.jsonl, line 2: expected a JSON object on each line, got 'not json'"):
        read_tasks(str(path))


def test_bom_crlf_and_blank_lines_are_accepted(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + b"\r\n".join([json.dumps(row()).encode(), b"", b"  ", json.dumps(row()).encode()])
    )
    assert len(read_tasks(str(path))) == 2


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.JSON.GZ"])
def test_gzip_is_read(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(json.dumps(row("ünï")).encode()))
    (task,) = read_tasks(str(tmp_path / name))
    assert task.prompt == "ünï"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-12], lambda data: b"plain text", lambda data: data[:12] + b"\xff" * 9]
)
def test_a_broken_gzip_is_a_data_error(tmp_path, damage):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(damage(gzip.compress(json.dumps([row()] * 100).encode())))
    with pytest.raises(DataError, match="expected a gzip file"):
        read_tasks(str(path))


def test_json_is_an_array_or_json_lines(tmp_path):
    path = tmp_path / "data.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps([row("a"), row("b")], indent=2).encode())
    assert [task.prompt for task in read_tasks(str(path))] == ["a", "b"]
    assert [task.prompt for task in read_tasks(write(path, row("c"), row("d")))] == ["c", "d"]


@pytest.mark.long
def test_parquet_is_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    messages = [{"role": "user", "content": "hi"}]
    parquet.write_table(pa.Table.from_pylist([row(messages, n=index) for index in range(3000)]), path)
    tasks = read_tasks(str(path), limit=2000)
    assert [task.metadata["n"] for task in tasks] == list(range(2000))
    assert tasks[0].prompt == messages
    with pytest.raises(DataError, match=r"data\.parquet, row 1: expected key 'question'"):
        read_tasks(str(path), prompt_key="question")


def test_a_broken_parquet_file_is_a_data_error(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "data.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="expected a Parquet file"):
        read_tasks(str(tmp_path / "data.parquet"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv-rl\[data\]'"):
        read_tasks(str(tmp_path / "data.parquet"))


def test_a_missing_prompt_key_names_the_line_and_the_keys(jsonl):
    spec = jsonl(row(), {"query": "q", "label": 1})
    with pytest.raises(DataError) as caught:
        read_tasks(spec)
    expected = f"{spec}, line 2: expected key 'prompt', got keys ['query', 'label']. Set --prompt_key to one of them."
    assert str(caught.value) == expected


def test_a_label_may_be_inside_of_a_column_as_in_verls_data(jsonl):
    row = {"prompt": "q", "reward_model": {"style": "rule", "ground_truth": "4"}, "a.b": "5"}
    (task,) = read_tasks(jsonl(row), label_key="reward_model.ground_truth")
    assert (task.label, task.metadata["reward_model"]) == ("4", row["reward_model"])
    assert read_tasks(jsonl(row), label_key="a.b")[0].label == "5"
    for key in ("reward_model.truth", "reward_model.style.x", "prompt.x"):
        with pytest.raises(DataError, match=f"expected key '{key}', got keys"):
            read_tasks(jsonl(row), label_key=key)


def test_a_row_may_lack_the_label_where_none_is_needed(jsonl):
    assert [each.label for each in read_tasks(jsonl({"prompt": "q"}), needs_label=False)] == [None]
    assert read_tasks(jsonl({"prompt": "q", "label": 1}), needs_label=False)[0].label == 1
    assert read_tasks(jsonl({"prompt": "q", "gold": None}), label_key="gold", needs_label=False)[0].label is None
    with pytest.raises(DataError, match="expected key 'gold'"):
        read_tasks(jsonl({"prompt": "q"}), label_key="gold", needs_label=False)
    with pytest.raises(DataError, match="expected a JSON object"):
        read_tasks(jsonl(3), needs_label=False)


def test_a_missing_label_key_is_not_a_silent_none(jsonl):
    with pytest.raises(
        DataError, match=r"expected key 'label', got keys \['prompt'\]. Rename .* set --label_key.*read_tasks takes"
    ):
        read_tasks(jsonl({"prompt": "q"}))


def test_a_list_holds_rows_and_no_files():
    with pytest.raises(DataError, match=r"data, row 1: expected a row, got the text 'a.jsonl'. Read each file with"):
        read_tasks(["a.jsonl", "b.jsonl"])


@pytest.mark.parametrize(("label", "key"), [(None, "label"), ({"gold": None}, "label.gold")])
def test_a_null_is_no_label_where_one_is_needed(jsonl, label, key):
    with pytest.raises(DataError, match=f"line 1, '{key}': expected a label, got None.*needs_label = False"):
        read_tasks(jsonl({"prompt": "q", "label": label}), label_key=key)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "expected a prompt, got ''"),
        (" \n", "expected a prompt, got"),
        (None, "expected a prompt, got None"),
        (3, "expected a prompt, got 3"),
        ([], r"expected a prompt, got \[\]"),
        (["hi"], "message 0: expected role and content, got 'hi'"),
        ([{"from": "human", "value": "hi"}], r"message 0: expected role and content, got keys \['from', 'value'\]"),
        ([{"role": "user", "content": "hi"}, {"role": "", "content": "x"}], "message 1: expected a role and text"),
        ([{"role": "user", "content": 3}], "message 0: expected a role and text"),
    ],
)
def test_invalid_prompts_are_refused(jsonl, prompt, message):
    with pytest.raises(DataError, match=message):
        read_tasks(jsonl(row(prompt)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]\n", r"line 1: expected a JSON object, got \[1, 2\]"),
        (b'"text"\n', "line 1: expected a JSON object, got 'text'"),
        (b'{"prompt": "a", \n', "line 1: expected a JSON object on each line"),
        (b'{"prompt": "\xff"}\n', "line 1: expected UTF-8"),
        (b"\xff\xfe{\x00", "line 1: expected UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "line 1: expected a JSON object on each line"),
        (b"", "expected at least one row, got none"),
        (b"\n\n", "expected at least one row, got none"),
    ],
)
def test_lines_that_are_not_rows_are_refused(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_tasks(str(path))


def test_builtin_data_is_found_by_name(tmp_path):
    path = write(tmp_path / "shipped.jsonl", row("built in"))
    (task,) = read_tasks("gsm8k", builtin={"gsm8k": tmp_path / "shipped.jsonl"})
    assert task.prompt == "built in"
    assert read_tasks(path)[0] == task


def test_a_nearly_right_builtin_name_is_suggested(tmp_path):
    with pytest.raises(ConfigError, match=r"Did you mean 'gsm8k'\?.*built-in data \(gsm8k, words\)"):
        read_tasks("gsm8", builtin={"gsm8k": tmp_path, "words": tmp_path})


def test_a_missing_file_is_named_in_full_and_suggests_its_neighbor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", row())
    with pytest.raises(ConfigError, match=rf"got none at {tmp_path}/trian.jsonl. Did you mean 'train.jsonl'\?"):
        read_tasks("trian.jsonl")


def test_other_kinds_of_files_and_folders_are_refused(tmp_path):
    (tmp_path / "data.csv").write_text("prompt,label\n")
    for path in (tmp_path / "data.csv", tmp_path):
        with pytest.raises(ConfigError, match=r"expected a file ending in .jsonl, .json"):
            read_tasks(str(path))


def test_flags_that_do_not_fit_are_refused(jsonl):
    with pytest.raises(ConfigError, match="--limit"):
        read_tasks(jsonl(row()), limit=0)
    with pytest.raises(ConfigError, match="--split"):
        read_tasks(jsonl(row()), split="train")


def test_a_hugging_face_name_without_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match=r"got neither.*\(none installed\).*pip install 'agentenv-rl\[data\]'"):
        read_tasks("org/name")


@pytest.fixture
def hub(monkeypatch):
    calls = []

    def load_dataset(name, configuration, split):
        calls.append((name, configuration, split))
        if name == "org/gone":
            raise FileNotFoundError("org/gone is not on the Hub")
        rows = [row("from the hub", id="x")]
        splits = {"train": rows} if name == "org/one" else {"train": rows, "test": rows}
        return splits if split is None else splits[split]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_hugging_face_datasets_are_read_by_name_configuration_and_split(hub):
    assert read_tasks("org/two:main", split="test")[0].prompt == "from the hub"
    assert read_tasks("org/one")[0].task_id == "x"
    assert hub == [("org/two", "main", "test"), ("org/one", None, None)]


def test_a_hugging_face_dataset_that_cannot_be_loaded_or_needs_a_split_or_lacks_a_key_is_an_error(hub):
    with pytest.raises(ConfigError, match=r"--split: expected one of \['train', 'test'\]"):
        read_tasks("org/two")
    with pytest.raises(ConfigError, match="org/gone is not on the Hub"):
        read_tasks("org/gone")
    with pytest.raises(DataError, match="org/one, row 1: expected key 'question'"):
        read_tasks("org/one", prompt_key="question")
