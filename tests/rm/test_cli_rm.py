"""`agentenv rm`: evaluations from the command line, on a tiny model, a reward of text and files on disk."""

import json

import pytest

from agentenv.cli_rm import TOO_MANY_FAILED, rm
from agentenv.errors import ConfigError
from agentenv.rm.specs import RewardModel
from tests.rewards.models.tiny import tiny_rm

LENGTH = (
    "def longer(response):\n    if 'boom' in response:\n        raise RuntimeError('boom')\n    return len(response)\n"
)


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(LENGTH)
    write("pairs.jsonl", [("longer one", "short"), ("no", "longer"), ("abc", "abd"), ("a b c", "d")])


def write(name, pairs, **columns):
    rows = [{"prompt": f"q{n}", "chosen": a, "rejected": b, **columns} for n, (a, b) in enumerate(pairs)]
    with open(name, "w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def evaluate(*more, reward="reward:r.py:longer"):
    return rm(["eval", "--data", "pairs.jsonl", "--rm", reward, *more])


def test_the_report_is_shown_and_written(capsys, tmp_path):
    assert evaluate("--out", "o") == 0
    shown = capsys.readouterr()
    assert "| pairs | 4 | 0 | 2 | 1 | 0.5000 |" in shown.out
    assert "4 of 4 items" in shown.err
    assert (tmp_path / "o" / "report.md").read_text() == shown.out
    stored = json.loads((tmp_path / "o" / "report.json").read_text())
    assert stored["total"] == {"num": 4, "failed": 0, "correct": 2.0, "ties": 1, "score": 0.5}
    assert len((tmp_path / "o" / "items.jsonl").read_text().splitlines()) == 4


def test_json_is_the_report_and_nothing_else(capsys):
    assert evaluate("--json", "--ties", "half", "--limit", "3") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["total"]["num"], found["total"]["score"], found["ties"]) == (3, 0.5, "half")


def test_items_without_a_score_end_in_3_and_may_be_allowed(capsys):
    write("pairs.jsonl", [("longer one", "short"), ("boom", "x"), ("boom", "y"), ("abc", "d")])
    assert evaluate("--out", "o") == TOO_MANY_FAILED
    shown = capsys.readouterr()
    assert "| pairs | 4 | 2 | 2 | 0 | 1.0000 |" in shown.out
    assert "--max_failed: 2 of 4 items have no score" in shown.err
    assert "boom" in shown.err
    assert evaluate("--out", "p", "--max_failed", "0.5") == 0


def test_resume_asks_only_about_what_has_no_score_yet(capsys, tmp_path):
    write("pairs.jsonl", [("longer one", "short"), ("boom", "x")])
    assert evaluate("--out", "o") == TOO_MANY_FAILED
    with pytest.raises(ConfigError, match="Set --resume"):
        evaluate("--out", "o")
    (tmp_path / "r.py").write_text(LENGTH)
    assert evaluate("--out", "o", "--resume") == TOO_MANY_FAILED
    assert "1 of 1 items" in capsys.readouterr().err
    lines = [json.loads(line)["index"] for line in (tmp_path / "o" / "items.jsonl").read_text().splitlines()]
    assert (sorted(lines[:2]), lines[2:]) == ([0, 1], [1])  # the first two in the order in which they ended


def test_resume_is_of_the_same_data_and_the_same_model(capsys):
    assert evaluate("--out", "o") == 0
    with pytest.raises(ConfigError, match="same rm_args"):
        evaluate("--out", "o", "--resume", "--rm_args", '{"killable": false}')
    write("pairs.jsonl", [("longer one", "short")])
    with pytest.raises(ConfigError, match="same data_sha256"):
        evaluate("--out", "o", "--resume")


def test_ties_of_a_judge_that_compares_are_worth_a_half(capsys, monkeypatch):
    class Ties:
        async def compare(self, prompt, a, b):
            return 0.5

    monkeypatch.setattr("agentenv.rm.specs.open_rm", lambda spec, options: RewardModel(spec, comparer=Ties()))
    assert evaluate("--json", reward="judge:m@http://h/v1") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ties"], found["total"]["score"], found["total"]["ties"]) == ("half", 0.5, 4)
    assert evaluate("--json", "--ties", "strict", reward="judge:m@http://h/v1") == 0
    assert json.loads(capsys.readouterr().out)["total"]["score"] == 0.0


def test_a_reference_beyond_its_tolerance_ends_in_1(capsys):
    with open("ref.json", "w") as file:
        json.dump({"pairs": 1.0}, file)
    assert evaluate("--reference", "ref.json", "--tolerance", "2") == 0
    assert evaluate("--reference", "ref.json", "--tolerance", "1.5") == 1
    assert "| pairs | 1.0000 | 0.5000 | -2 | NO |" in capsys.readouterr().out


def test_rewardbench_files_have_sections(capsys):
    write("bench.jsonl", [("longer one", "short"), ("no", "longer")], subset="hep-go", id=7)
    assert rm(["eval", "--data", "bench.jsonl", "pairs.jsonl", "--rm", "reward:r.py:longer"]) == 0
    shown = capsys.readouterr().out
    assert "| Reasoning | 0.5000 |" in shown
    assert "| Safety | – |" in shown


def test_a_model_is_evaluated_and_its_batches_told(capsys):
    assert evaluate("--out", "o", "--max_length", "64", "--overflow", "left", reward=str(tiny_rm())) == 0
    shown = capsys.readouterr().out
    assert "Batch invariance: 8 conversations alone and all at once differ by at most" in shown
    assert evaluate("--invariance", "0", "--json", reward=f"hf:{tiny_rm()}") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["invariance"] is None
    assert found["total"]["num"] == 4


def test_overlong_items_fail_and_are_not_wrong(capsys):
    write("pairs.jsonl", [("a", "b"), ("long " * 100, "c")])
    assert evaluate("--max_length", "64", reward=str(tiny_rm())) == TOO_MANY_FAILED
    assert "1 failed and are not counted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--resume"], "--out DIR"),
        (["--max_failed", "2"], "--max_failed"),
        (["--invariance", "-1"], "--invariance"),
        (["--rm_args", "[1]"], "--rm_args"),
        (["--rm_args", "{"], "--rm_args"),
        (["--max_concurrent", "0"], "--max_concurrent"),
        (["--reference", "none.json"], "--reference"),
        (["--ties", "never"], "--ties"),
    ],
)
def test_a_wrong_flag_is_said_in_one_line(flags, said):
    with pytest.raises(ConfigError, match=said):
        evaluate(*flags)


# --- check and compare ------------------------------------------------------------------------------------------------


def test_check_prints_a_line_for_each_finding_and_ends_in_1_for_a_problem(capsys):
    assert rm(["check", str(tiny_rm())]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("✓ template")
    assert "✓ batch invariance" in shown
    assert rm(["check", str(tiny_rm()), "--max_length", "16", "--json"]) == 1
    found = {each["name"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert found["template"] == "problem"  # a conversation is longer than that


def test_check_is_of_reward_models():
    with pytest.raises(ConfigError, match="expected a reward model"):
        rm(["check", "reward:r.py:longer"])


def test_compare_says_how_far_two_evaluations_disagree(capsys):
    with open("s.py", "w") as file:
        file.write("def shorter(response):\n    return -len(response)\n")
    assert evaluate("--out", "a") == evaluate("--out", "b", reward="reward:s.py:shorter") == 0
    capsys.readouterr()
    assert rm(["compare", "a", "b"]) == 0
    assert capsys.readouterr().out == "a and b: opposite on 75.0% of 4 items, rank correlation of the margins -1.000\n"
    assert rm(["compare", "a", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["opposite"] == 0.75
    with pytest.raises(ConfigError, match="two folders"):
        rm(["compare", "a", "a"])


def test_the_group_shows_its_commands(capsys):
    assert rm([]) == 0
    assert "compare" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Did you mean 'eval'"):
        rm(["evl"])
