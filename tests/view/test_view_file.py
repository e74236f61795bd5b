"""The page as one file: what it holds, what it leaves out, and what a browser finds in it."""

import base64
import hashlib
import json
import os
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from agentenv.cli.main import main
from agentenv.core.trajectory import EpisodeError
from agentenv.core.types import Answer
from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.index import FIELDS, INDEX
from agentenv.runs.records.steps import append_rows
from agentenv.runs.records.token_stats import TOKEN_STATS, TokenStats, hash_actions
from agentenv.view import page
from agentenv.view.redaction import Redaction
from agentenv.view.single_file import FileOptions, write_html
from agentenv.view.viewed import find_runs
from tests.view.viewed_runs import PAYLOADS, episode, forge_index, hostile_run, tiny_math, write_run

SCRIPT = "window.ran = true;"


@pytest.fixture(autouse=True)
def built(tmp_path, monkeypatch):
    """A page that was built."""
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "viewer.js").write_text(SCRIPT)
    (folder / "viewer.css").write_text("body { color: black }")
    monkeypatch.setattr(page, "DIST", folder)


class Elements(HTMLParser):
    """The elements of a page: tag, attributes and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=False)
        self.found, self.is_open = [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        self.is_open = True

    def handle_endtag(self, tag):
        self.is_open = False

    def handle_data(self, data):
        if self.is_open:
            self.found[-1][2] += data


def unpacked(text):
    return zlib.decompress(base64.b64decode(text), wbits=-15).decode()


def written(path, *folders, **options):
    """The elements of the file, by id those with data, and the values of `meta`."""
    said = write_html(find_runs([str(folder) for folder in folders]), path, FileOptions(**options))
    elements = Elements(path.read_text(encoding="utf-8")).found
    data = {attributes["id"]: text for tag, attributes, text in elements if tag == "script" and "id" in attributes}
    return elements, data, json.loads(data["meta"]), said


def rows_of(data, run=0):
    header, *rows = map(json.loads, unpacked(data[f"index-{run}"]).splitlines())
    return [dict(zip(header["fields"], row, strict=True)) for row in rows]


def episodes_of(data, meta, run=0):
    """The episodes in the file, by id."""
    groups = [json.loads(unpacked(data[group["element"]])) for group in meta["runs"][run]["groups"]]
    return {each["record"]["episode_id"]: each for group in groups for each in group["episodes"]}


def test_the_file_holds_the_same_as_the_server_answers(tmp_path):
    tokenizer = tiny_math()
    episodes = [
        episode(f"{task}/{k}", action=f"{k} é", tokenizer=tokenizer, label=task) for task in "ab" for k in (0, 1)
    ]
    folder = write_run(tmp_path / "run", *episodes)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (folder / "steps.jsonl").write_text('{"v": 1, "step": 1}\n{"to')
    _, data, meta, said = written(tmp_path / "out.html", folder)
    assert said.startswith(f"{tmp_path / 'out.html'}: 4 episodes")
    assert meta["note"] is None
    run = meta["runs"][0]
    assert (run["name"], run["kind"], run["config"]["config"]["flags"]["env"]) == ("run", "train", "math_retry")
    rows = rows_of(data)
    assert [row["episode_id"] for row in rows] == ["a/0", "a/1", "b/0", "b/1"]
    assert [group["group_id"] for group in run["groups"]] == ["a", "b"]
    places = [[row["offset"], row["length"]] for row in rows]
    assert [place for group in run["groups"] for place in group["at"]] == places
    assert [json.loads(line) for line in unpacked(data["metrics-0"]).splitlines()] == [{"step": 1}, {"step": 2}]
    assert [json.loads(line) for line in unpacked(data["steps-0"]).splitlines()] == [{"v": 1, "step": 1}]
    heads = json.loads(unpacked(data["heads-0"]))["heads"]
    assert [head["at"] for head in heads] == places
    assert [head["prompt"] for head in heads] == ["How many apples?"] * 4
    texts = json.loads(unpacked(data["texts-0"]))
    table, found = dict(texts["texts"]), episodes_of(data, meta)
    assert list(found) == ["a/0", "a/1", "b/0", "b/1"]
    for made in episodes:
        view = found[made.episode_id]["view"]["segments"][0]
        special = dict(view["texts"])
        shown = "".join(special.get(at, table[token]) for at, token in enumerate(made.token_ids))
        assert shown == tokenizer.decode(made.token_ids, skip_special_tokens=False)
        assert found[made.episode_id]["record"]["task"]["label"] == made.task.label


def test_a_limit_that_no_flag_set_is_no_changed_flag(tmp_path):
    usual = {"n": 1, "max_length": 2048, "max_turns": 16}  # config.json has the limits in force
    for name, flags in (("usual", usual), ("own", usual | {"max_turns": 3})):
        write_run(tmp_path / name, episode("a/0"), flags=flags)
        assert main(["view", str(tmp_path / name), "--html", str(tmp_path / f"{name}.html")]) == 0
    texts = [(tmp_path / f"{name}.html").read_text() for name in ("usual", "own")]
    changed = [re.search('"changed_flags": (.*?), "tokenizer"', text)[1] for text in texts]
    assert changed == ["[]", '[["max_turns", "3"]]']


def test_the_file_opens_where_the_command_says(tmp_path):
    folder = str(write_run(tmp_path / "run", episode("a b/0")))
    for flags, place in ((["--episode", "a b/0"], "/0/episode/a%20b%2F0"), (["--task", "a"], "/0/task/a"), ([], "")):
        assert main(["view", folder, "--html", str(tmp_path / "out.html"), *flags]) == 0
        assert f'"go": "{place}"' in (tmp_path / "out.html").read_text()


def test_the_file_has_what_the_learner_computed(tmp_path):
    folder = write_run(tmp_path / "run", episode("a/0"), flags={"max_train_steps": 2})
    stats = TokenStats(1, "a/0", hash_actions([3, 4]), (-0.123456789, -0.5), (0.25, 0.25))
    append_rows(folder / TOKEN_STATS, [stats.to_dict()])
    _, data, meta, _ = written(tmp_path / "out.html", folder)
    learned = episodes_of(data, meta)["a/0"]["view"]["learned"]
    assert learned == {"step": 1, "logprobs": [-0.123457, -0.5], "advantages": [0.25, 0.25]}


def test_nothing_of_the_data_is_markup_and_the_policy_allows_one_script(tmp_path):
    elements, data, meta, _ = written(tmp_path / "out.html", hostile_run(tmp_path / "run"))
    tags = [tag for tag, _, _ in elements]
    assert set(tags) == {"html", "head", "meta", "link", "title", "style", "body", "div", "noscript", "script"}
    scripts = [(attributes, text) for tag, attributes, text in elements if tag == "script"]
    assert [text for attributes, text in scripts if not attributes] == [SCRIPT]
    assert {attributes["type"] for attributes, _ in scripts if attributes} == {"application/json", "text/plain"}
    assert all(re.fullmatch(r"[\w+/=]*", text) for name, text in data.items() if name != "meta")
    policy = next(attributes["content"] for tag, attributes, _ in elements if "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    assert (tmp_path / "out.html").read_text().isascii()
    assert [each["record"]["turns"][0]["action"] for each in episodes_of(data, meta).values()] == list(PAYLOADS)


def test_an_episode_of_two_lines_is_counted_once(tmp_path):
    failed = episode("a/0", error=EpisodeError("infra", "InfraError", "down"))
    folder = write_run(tmp_path / "run", failed, episode("a/0"), episode("a/1"))
    assert ": 2 episodes, " in written(tmp_path / "out.html", folder)[3]


def test_beyond_its_size_it_holds_whole_tasks_those_with_spread_first(tmp_path):
    wide = "0123456789" * 40
    episodes = [
        episode(f"t{task:02}/{k}", action=f"{wide}{task}{k}", reward=float(task == 7 and k == 1))
        for task in range(12) for k in range(4)
    ]  # fmt: skip
    folder = write_run(tmp_path / "run", *episodes)
    _, data, meta, said = written(tmp_path / "out.html", folder, max_mb=0.004)
    found = episodes_of(data, meta)
    tasks = {key.split("/")[0] for key in found}
    assert "t07" in tasks
    assert 1 < len(tasks) < 12
    assert len(found) == 4 * len(tasks)
    assert len(rows_of(data)) == 48
    assert meta["note"].startswith(f"{len(found)} of 48 episodes, chosen by: tasks whose rewards differ most")
    assert meta["note"] in said
    again = written(tmp_path / "again.html", folder, max_mb=0.004)[2]
    assert [group["group_id"] for group in again["runs"][0]["groups"]] == [
        group["group_id"] for group in meta["runs"][0]["groups"]
    ]


def test_a_filter_leaves_out_all_traces_of_the_others(tmp_path):
    folder = write_run(tmp_path / "run", episode("a/0", action="kept"), episode("b/0", action="left out", reward=0.0))
    (folder / "metrics.json").write_text('{"reward": {"mean": 0.5}, "pass_score": 0.8}')
    _, data, meta, _ = written(tmp_path / "out.html", folder, where="reward>0")
    assert meta["runs"][0]["metrics"] == {"pass_score": 0.8}  # the others are of all episodes
    assert [row["episode_id"] for row in rows_of(data)] == ["a/0"]
    assert list(episodes_of(data, meta)) == ["a/0"]
    assert meta["note"] == "only episodes for which this holds: reward>0"
    assert not [name for name, text in data.items() if name != "meta" and "left out" in unpacked(text)]
    with pytest.raises(ConfigError, match="--where"):
        written(tmp_path / "no.html", folder, where="rewrad<1")
    with pytest.raises(ConfigError, match=r"--where: expected a filter that keeps an episode, got 'reward>99'"):
        written(tmp_path / "no.html", folder, where="reward>99")
    with pytest.raises(ConfigError, match=r"--where: expected an environment of run, got 'x'\. It has one env"):
        written(tmp_path / "no.html", folder, where="env=x")
    assert not (tmp_path / "no.html").exists()


def test_redaction_leaves_out_folders_services_and_labels(tmp_path):
    error = EpisodeError("env", "KeyError", "see /home/ann/secret/data.txt", "step", "/home/ann/work/env.py:3",
                         'File "/home/ann/work/env.py", line 3')  # fmt: skip
    flags = {
        "env": "/home/ann/work/env.py", "base_url": "http://ann:pw@node7:8000", "model": "/home/ann/models/tiny",
        "env_kwargs": {"key": "secret"}, "use_mlflow": "http://node7", "temperature": 0.5, "api_key_env": "ANN_KEY",
    }  # fmt: skip
    refused = episode("a/0", label="gold")
    refused.refusal_reasons = {"invalid_request": "node7 has no /home/ann/work/data.txt"}
    refused.turns[0].answer = Answer("3", model="/home/ann/models/tiny")
    folder = write_run(tmp_path / "run", refused, episode("b/0", error=error), flags=flags)
    told = {"refusal_reasons": refused.refusal_reasons, "models": {"/home/ann/models/tiny": 1, "/tmp/tiny": 2}}
    (folder / "metrics.json").write_text(json.dumps(told))
    redaction = Redaction(paths=True, labels=True)
    _, data, meta, _ = written(tmp_path / "out.html", folder, redaction=redaction)
    texts = [data["meta"], *(unpacked(text) for name, text in data.items() if name != "meta")]
    for private in ("ann", "node7", "secret", "gold", "ANN_KEY", str(tmp_path)):
        assert not [text for text in texts if private in text], private
    kept = meta["runs"][0]["config"]["config"]["flags"]
    assert (kept["env"], kept["model"], kept["temperature"]) == ("env.py", "tiny", 0.5)
    found = episodes_of(data, meta)
    assert found["b/0"]["record"]["error"]["place"] == "…/env.py:3"
    left = {"invalid_request": "… has no …/data.txt"}
    told = [rows_of(data)[0], meta["runs"][0]["metrics"], found["a/0"]["record"]]
    assert [each["refusal_reasons"] for each in told] == [left] * 3
    assert [each["models"] for each in told[:2]] == [{"…/tiny": 1}, {"…/tiny": 3}]
    plain = written(tmp_path / "plain.html", folder)[2]
    assert plain["runs"][0]["config"]["config"]["flags"]["base_url"] == "http://ann:pw@node7:8000"


def test_redaction_leaves_out_folders_and_arguments_of_the_entries_of_a_mixture(tmp_path):
    entry = {"env": "/home/ann/env.py", "name": "own", "env_kwargs": {"key": "ann"}, "data": "/home/ann/rows.jsonl"}
    folder = write_run(tmp_path / "run", episode("own/0"), flags={"env": [entry | {"weight": 2}, "other.py"]})
    own = {"num_tasks": 1, "models": {"/home/ann/models/tiny": 1}}
    (folder / "metrics.json").write_text(json.dumps({"environments": {"own": own}}))
    _, data, meta, _ = written(tmp_path / "out.html", folder, redaction=Redaction(paths=True))
    assert "ann" not in data["meta"]
    kept = {"env": "env.py", "name": "own", "data": "rows.jsonl", "weight": 2}
    assert meta["runs"][0]["config"]["config"]["flags"]["env"] == [kept, "other.py"]
    assert meta["runs"][0]["metrics"]["environments"] == {"own": {"num_tasks": 1, "models": {"…/tiny": 1}}}


def test_no_labels_leaves_out_the_entries_of_a_row_that_hold_the_label(tmp_path):
    one, two = episode("a/0", label="gold"), episode("b/0", label={"answer": "gold"})
    rows = {"reward_model": {"ground_truth": "gold", "style": "rule"}, "label": "gold", "kept": "fine",
            "extra": {"also": "gold", "level": 3, "all": ["gold", "other"]}}  # fmt: skip
    one = replace(one, task=replace(one.task, metadata=rows))
    two = replace(two, task=replace(two.task, metadata={"extra": [{"answer": "gold"}], "level": 2}))
    folder = write_run(tmp_path / "run", one, two, flags={"label_key": "reward_model.ground_truth"})
    _, data, meta, _ = written(tmp_path / "out.html", folder, redaction=Redaction(labels=True))
    found = {key: each["record"]["task"] for key, each in episodes_of(data, meta).items()}
    assert {key: task["label"] for key, task in found.items()} == {"a/0": None, "b/0": None}
    assert found["a/0"]["metadata"] == {"kept": "fine", "extra": {"level": 3, "all": ["other"]}}
    assert found["b/0"]["metadata"] == {"extra": [], "level": 2}
    plain = episodes_of(*written(tmp_path / "plain.html", folder)[1:3])
    assert plain["a/0"]["record"]["task"]["metadata"] == rows


def test_no_labels_leaves_out_the_info_that_equals_the_label(tmp_path):
    infos = ({"expected": 112, "correct": 1.0, "said": "112 "}, {"expected": "112", "tries": 2})
    episodes = [episode(f"a/{number}", label="112", info=info) for number, info in enumerate(infos)]
    folder = write_run(tmp_path / "run", *episodes, episode("b/0", info={"expected": 112}))
    _, data, meta, _ = written(tmp_path / "out.html", folder, redaction=Redaction(labels=True))
    found = {key: each["record"]["turns"][0]["result"]["info"] for key, each in episodes_of(data, meta).items()}
    assert found == {"a/0": {"correct": 1.0}, "a/1": {"tries": 2}, "b/0": {"expected": 112}}
    heads = json.loads(unpacked(data["heads-0"]))["heads"]
    assert [head["info"] for head in heads] == [{"correct": 1.0}, {"tries": 2}, {"expected": 112}]
    assert [row["info"] for row in rows_of(data)] == [{"correct": 1.0}, {"tries": 2.0}, {"expected": 112.0}]
    plain = rows_of(written(tmp_path / "plain.html", folder)[1])
    assert plain[0]["info"] == {"expected": 112.0, "correct": 1.0}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("GET http://ann:pw@node7:8000/v1/chat?key=5 failed", "GET http://… failed"),
        ("HTTPConnectionPool(host='node7.lab', port=8000): refused", "HTTPConnectionPool(host=…, port=8000): refused"),
        ("cannot reach gpu-12.cluster.lab:29500.", "cannot reach …."),
        ("connect to 10.0.0.12:443 or [fe80::1]:80", "connect to … or …"),
        ("Could not resolve secret-node: try again", "Could not resolve …: try again"),
        ("ssh ann@login.lab", "ssh …"),
        ("env.py:17: step 12:30 of task@3/0 in module.name, line 4", None),
        ("KeyError: 'a:b', version 1.2.3, File \"x.py\", line 3", None),
    ],
)
def test_errors_name_no_machine_in_a_redacted_file(text, left):
    flags = {"base_url": ["https://Secret-Node:8000/v1"], "model": "tiny", "limit": 3}
    assert Redaction(paths=True).of_run(flags).text(text) == (text if left is None else left)
    assert Redaction().of_run(flags).text(text) == text


def test_a_page_that_was_not_built_and_a_file_that_cannot_be_written_are_told(tmp_path):
    runs = find_runs([str(write_run(tmp_path / "run", episode()))])
    with pytest.raises(ConfigError, match="expected a file that can be written"):
        write_html(runs, tmp_path / "no" / "out.html")
    (page.DIST / "viewer.js").unlink()
    with pytest.raises(MissingDependency, match="make view"):
        write_html(runs, tmp_path / "out.html")
    assert not list(tmp_path.glob("*out*"))


def test_the_command_writes_several_runs_into_one_file(tmp_path, capsys):
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / name, *(episode(f"{task}/0", reward=float(task)) for task in range(3)))
    out = tmp_path / "out.html"
    assert main(["view", str(tmp_path / "runs"), "--html", str(out), "--redact", "--no_labels"]) == 0
    assert f"{out}: 6 episodes" in capsys.readouterr().out
    meta = json.loads(re.search('id="meta">(.*)</script>', out.read_text())[1])
    assert [run["name"] for run in meta["runs"]] == ["one", "two"]
    found = [(each["a"], each["b"], each["by"], each["value"]["are_identical"]) for each in meta["diffs"]]
    assert (0, 1, "reward", True) in found
    assert {each[:2] for each in found} == {(0, 1)}


def test_diff_writes_a_page_that_opens_at_the_comparison(tmp_path, capsys):
    for name in ("one", "two"):
        write_run(tmp_path / name, *(episode(f"{task}/0", reward=float(task)) for task in range(3)))
    runs, out = [str(tmp_path / name) for name in ("one", "two")], tmp_path / "out.html"
    assert main(["diff", *runs, "--html", str(out)]) == 0
    said = capsys.readouterr().out
    assert "no difference is shown" in said
    assert f"{out}: 6 episodes" in said
    meta = json.loads(re.search('id="meta">(.*)</script>', out.read_text())[1])
    assert meta["go"] == "/compare/0/1?by=reward"
    for more in (["--margin", "0.1"], ["--json"]):
        assert main(["diff", *runs, "--html", str(out), *more]) == 2
        assert "--html: expected no" in capsys.readouterr().err
    assert main(["diff", f"{runs[0]}@3", runs[1], "--html", str(out)]) == 2


def test_diff_by_units_is_in_its_page_too(tmp_path, capsys):
    for name, reward in (("one", 0.0), ("two", 1.0)):
        episodes = [episode(f"{task}/0", reward=reward * (task % 3 > 0)) for task in range(6)]
        tasks = [replace(each.task, metadata={"passage": number // 2}) for number, each in enumerate(episodes)]
        write_run(tmp_path / name, *(replace(each, task=task) for each, task in zip(episodes, tasks, strict=True)))
    runs, out = [str(tmp_path / name) for name in ("one", "two")], tmp_path / "out.html"
    assert main(["diff", *runs, "--cluster", "passage", "--html", str(out)]) == 0
    assert "in 3 clusters" in capsys.readouterr().out
    meta = json.loads(re.search('id="meta">(.*)</script>', out.read_text())[1])
    assert meta["go"] == "/compare/0/1?by=reward&cluster=passage"
    units = {(each["by"], each["cluster"]): each["value"]["difference"]["num_clusters"] for each in meta["diffs"]}
    assert (units["reward", None], units["reward", "passage"]) == (None, 3)


@pytest.mark.parametrize("flag", [["--max_mb", "3"], ["--where", "reward<1"], ["--redact"], ["--no_labels"]])
def test_a_flag_of_the_file_needs_the_file(flag, tmp_path, capsys):
    write_run(tmp_path / "run", episode())
    assert main(["view", str(tmp_path / "run"), *flag]) == 2
    assert f"{flag[0]}: expected --html with it" in capsys.readouterr().err


def test_runs_are_found_in_a_folder_by_name_or_as_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^runs: expected a run directory"):
        find_runs([])
    write_run(tmp_path / "runs" / "a", episode())
    write_run(tmp_path / "runs" / "b", episode(), flags={"max_train_steps": 3})
    write_run(tmp_path / "other" / "a", episode())
    (tmp_path / "runs" / "model").mkdir()
    assert [run.name for run in find_runs(["runs"])] == ["a", "b", "b/eval"]
    assert [run.name for run in find_runs(["runs/a", "runs", "runs/b/../a"])] == ["a", "b", "b/eval"]
    assert len({run.name for run in find_runs(["runs/a", "other/a"])}) == 2
    assert find_runs([])[0].path in ("runs/a", "runs/b")
    os.utime(write_run(tmp_path / "runs" / "refused"), (2**32, 2**32))
    assert find_runs([])[0].path in ("runs/a", "runs/b"), "without content"
    with RunWriter.open(tmp_path / "runs" / "refused", {}):
        assert find_runs([])[0].path == "runs/refused", "before its first episode"
    with pytest.raises(ConfigError, match=r"^runs/model: expected a run directory"):
        find_runs(["runs/model"])


def test_redaction_leaves_out_the_folders_of_runs_with_the_same_name(tmp_path):
    folders = [
        write_run(
            tmp_path / part / "run", episode(), flags={"env_kwargs": {"key": f"secret {part}", "by": "secret/by.py"}}
        )
        for part in ("one", "two")
    ]
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        config["config"]["agent_file"] = {"secret/by.py": folder.parent.name}
        (folder / "config.json").write_text(json.dumps(config))
    meta = written(tmp_path / "out.html", *folders, redaction=Redaction(paths=True))[2]
    (texts,) = {tuple(each["text"] for each in found["value"]["caveats"]) for found in meta["diffs"]}
    assert texts == ("--env_kwargs: differs", "code: differs")
    assert str(tmp_path) not in json.dumps(meta)
    assert "secret" not in json.dumps(meta)
    assert [run["name"] for run in meta["runs"]] == ["…/run", "…/run"]


def test_a_line_separator_in_the_curves_ends_no_line(tmp_path):
    folder = write_run(tmp_path / "run", episode())
    (folder / "metrics.jsonl").write_text('{"step": 1, "a": "x\u2028y"}\n', encoding="utf-8")
    assert unpacked(written(tmp_path / "out.html", folder)[1]["metrics-0"]) == '{"step": 1, "a": "x\u2028y"}'


def test_a_forged_index_is_told(tmp_path):
    folder = write_run(tmp_path / "run", episode())
    row = json.loads((folder / INDEX).read_text().splitlines()[1])[:-1]
    row[list(FIELDS).index("error_text")] = 5
    forge_index(folder, row)
    with pytest.raises(DataError, match="Remove its index"):
        written(tmp_path / "out.html", folder)
