"""`agentenv rm`: evaluations from the command line, on a tiny model, a reward of text and files on disk."""

import json
import socket

import pytest

from agentenv.cli.main import main
from agentenv.cli.rm import TOO_MANY_FAILED, rm
from agentenv.errors import ConfigError
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


def test_items_without_a_score_end_in_3_and_may_be_allowed(capsys):
    write("pairs.jsonl", [("longer one", "short"), ("boom", "x"), ("boom", "y"), ("abc", "d")])
    assert evaluate("--out", "o") == TOO_MANY_FAILED
    shown = capsys.readouterr()
    assert "| pairs | 4 | 2 | 2 | 0 | 1.0000 |" in shown.out
    assert "--max_failed: 2 of 4 items have no score" in shown.err
    assert "boom" in shown.err
    assert evaluate("--out", "p", "--max_failed", "0.5") == 0


def test_resume_is_of_the_same_data_and_the_same_model(capsys):
    assert evaluate("--out", "o") == 0
    with pytest.raises(ConfigError, match=r"rm_args, which is '{}', got '{\"killable\": false}'. Omit --rm_args"):
        evaluate("--out", "o", "--resume", "--rm_args", '{"killable": false}')
    write("pairs.jsonl", [("longer one", "short")])
    with pytest.raises(ConfigError, match=r"its data_sha256.* Evaluate the same data"):
        evaluate("--out", "o", "--resume")


def test_resume_takes_over_the_stored_flags(capsys, tmp_path):
    write("pairs.jsonl", [("longer one", "short"), ("boom", "x")])
    args = ("--rm_args", '{"killable": false}', "--ties", "half")
    assert evaluate("--out", "o", *args) == TOO_MANY_FAILED
    capsys.readouterr()
    assert rm(["eval", "--resume", "--out", "o", "--max_failed", "1"]) == 0
    shown = capsys.readouterr()
    assert "1 of 1 items" in shown.err
    assert "rule: half" in shown.out
    assert json.loads((tmp_path / "o" / "config.json").read_text())["rm_args"] == '{"killable": false}'


def test_resume_of_nothing_needs_a_model_and_data():
    with pytest.raises(ConfigError, match="folder of `rm eval --out`, got 'none'"):
        rm(["eval", "--resume", "--out", "none"])
    assert evaluate("--resume", "--out", "new") == 0


INTERRUPTED = """
import os, signal, time
def longer(response):
    if "stop" in response and not os.path.exists("calm"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)  # the main thread stops waiting for it
    return len(response)
"""


def test_ctrl_c_says_what_is_kept_and_how_to_continue(capsys, tmp_path):
    (tmp_path / "r.py").write_text(INTERRUPTED)
    write("pairs.jsonl", [("longer one", "short"), ("stop", "x"), ("never", "asked")])
    flags = ["eval", "--data", "pairs.jsonl", "--rm", "reward:r.py:longer", "--max_concurrent", "1"]
    assert main(["rm", *flags, "--out", "o o"]) == 130
    said = "interrupted: 1 of 3 items are stored. Resume with: agentenv rm eval --resume --out 'o o'\n"
    assert said in capsys.readouterr().err
    assert main(["rm", *flags]) == 130
    assert "interrupted: nothing is stored. With --out DIR" in capsys.readouterr().err
    (tmp_path / "calm").touch()
    assert main(["rm", "eval", "--resume", "--out", "o o"]) == 0
    assert "2 of 2 items" in capsys.readouterr().err


def test_a_reference_beyond_its_tolerance_ends_in_1(capsys):
    with open("ref.json", "w") as file:
        json.dump({"pairs": 1.0}, file)
    assert evaluate("--reference", "ref.json", "--tolerance", "2") == 0
    assert evaluate("--reference", "ref.json", "--tolerance", "1.5") == 1
    assert "| pairs | 1.0000 | 0.5000 | -2 | NO |" in capsys.readouterr().out


@pytest.mark.long
def test_a_model_is_evaluated(capsys):
    assert evaluate("--out", "o", "--max_length", "64", "--overflow", "left", reward=str(tiny_rm())) == 0
    assert "| pairs | 4 | 0 |" in capsys.readouterr().out
    assert evaluate("--json", reward=f"hf:{tiny_rm()}") == 0
    assert json.loads(capsys.readouterr().out)["total"]["num"] == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--resume"], "--out DIR"),
        (["--max_failed", "2"], "--max_failed"),
        (["--rm_args", "[1]"], "--rm_args"),
        (["--reference", "none.json"], "--reference"),
        (["--ties", "never"], "--ties"),
    ],
)
def test_a_wrong_flag_is_reported_in_one_line(flags, said):
    with pytest.raises(ConfigError, match=said):
        evaluate(*flags)


def test_a_scorer_that_cannot_work_ends_it_at_once_and_names_the_flag(capsys, tmp_path):
    flags = ["rm", "eval", "--data", "pairs.jsonl", "--out", "o", "--rm"]
    assert main([*flags, "http://127.0.0.1:9/get_reward", "--rm_args", '{"send_messages": false}']) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("agentenv: error: GetRewardScorer.tokenizer: expected the reward model's")
    assert """The flag is --rm_args '{"tokenizer": "PATH"}'.""" in shown.err
    assert shown.out == ""
    assert not (tmp_path / "o" / "config.json").exists()
    assert main([*flags, "reward:r.py:longer"]) == 0  # the folder is still free


def test_a_judge_that_is_down_is_not_one_without_a_verdict(capsys):
    quick = json.dumps({"retry": {"backoff_s": 0}, "request_options": {"first_pause_s": 0, "max_retries": 0}})
    flags = ["--rm_args", quick, "--limit", "1"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # It never listens.
        port = taken.getsockname()[1]
        assert evaluate(*flags, reward=f"judge:m@http://127.0.0.1:{port}/v1") == TOO_MANY_FAILED
    said = capsys.readouterr().err
    assert f"http://127.0.0.1:{port}/v1/chat/completions: expected an answer, got ConnectError" in said
    assert "Verdict: A" not in said


# --- check and compare ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_check_prints_a_line_for_each_finding_and_ends_in_1_for_a_problem(capsys):
    assert rm(["check", str(tiny_rm())]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("✓ template")
    assert "✓ batch invariance" in shown
    assert rm(["check", str(tiny_rm()), "--max_length", "16", "--json"]) == 1
    found = {each["name"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert found["template"] == "problem"  # a conversation is longer than that


def test_compare_puts_the_accuracies_of_evaluations_side_by_side(capsys, tmp_path):
    with open("s.py", "w") as file:
        file.write("def shorter(response):\n    return -len(response)\n")
    assert evaluate("--out", "a") == evaluate("--out", "b", reward="reward:s.py:shorter") == 0
    (tmp_path / "published.json").write_text('{"pairs": 0.75, "hep-go": 0.5}')
    capsys.readouterr()
    assert rm(["compare", "a", "b", "published.json"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| subset | a | b | published.json |",
        "| --- | --- | --- | --- |",
        "| hep-go | – | – | 0.5000 |",
        "| pairs | 0.5000 | 0.2500 | 0.7500 |",
    ]
    assert rm(["compare", "a", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"pairs": {"a": 0.5, "b": 0.25}}
    with pytest.raises(ConfigError, match="two or more different evaluations"):
        rm(["compare", "a", "a"])
    with pytest.raises(ConfigError, match="none: expected a JSON file"):
        rm(["compare", "a", "none"])
