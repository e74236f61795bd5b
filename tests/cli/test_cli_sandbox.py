"""`agentenv sandbox`: what a program wrote is shown as it is, how it ended is an exit code."""

import json
from dataclasses import fields

import pytest

import agentenv.sandbox
from agentenv.cli import doctor
from agentenv.errors import InfraError
from agentenv.sandbox import ExecLimits, ExecResult, ExecStatus, Isolation, LocalSandbox, SandboxUnavailable
from agentenv.sandbox.local import doctor as sandbox_doctor
from agentenv.sandbox.local.doctor import DoctorReport, LevelReport, Speed
from tests.drivers import command

PROGRAMS = {
    "echo.py": "import sys\nprint('read', sys.stdin.read())\nsys.stderr.write('a warning\\n')\n",
    "raises.py": "print('before', end='')\n1 / 0\n",
    "exits.py": "raise SystemExit(7)\n",
    "torn.py": "import os\nos.write(2, b'torn')\nos._exit(7)\n",
    "spins.py": "while True:\n    pass\n",
    "crashes.py": "import ctypes\nctypes.string_at(0)\n",
    "forks.py": "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n",
    "talks.py": "print('x' * 5000)\n",
    "latin.py": b"# caf\xe9\n",
}


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "in.txt").write_text("this")


@pytest.fixture(scope="module")
def level():
    """The level that there is; a skip with its reason where there is none."""
    import asyncio

    async def find():
        async with LocalSandbox() as local:
            return local.isolation

    try:
        return asyncio.run(find())
    except SandboxUnavailable as error:
        pytest.skip(str(error))


# --- run --------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_programs_output_is_separate_from_the_report(level, capsys):
    assert command(["sandbox", "run", "echo.py", "--stdin", "in.txt"]) == 0
    said = capsys.readouterr()
    assert said.out == "read this\n"
    warning, ours = said.err.splitlines()
    assert warning == "a warning"
    assert ours.startswith("agentenv: ok; CPU 0.")
    assert f"of {ExecLimits().memory_mb} MiB" in ours
    assert ours.endswith(f"; isolation {level}")


FAILED = {
    "an exception": (["raises.py"], "ZeroDivisionError: division by zero\nagentenv: nonzero, exit code 1; "),
    "no line's end": (["torn.py"], "torn\nagentenv: nonzero, exit code 7; "),
    "an exit code": (["exits.py"], "agentenv: nonzero, exit code 7; "),
    "a signal": (["crashes.py"], "agentenv: signal, signal 11; "),
    "a limit that is a flag": (["spins.py", "--cpu_s", "0.2"], "agentenv: cpu_timeout"),
    "what its policy forbids": (["forks.py"], "PermissionError"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", FAILED)
def test_a_program_that_failed_is_exit_code_1_and_a_line_that_says_how(level, case, capsys):
    argv, said = FAILED[case]
    assert command(["sandbox", "run", *argv]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.splitlines()[-1].startswith("agentenv: ")
    assert f"isolation {level}" in err.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "hint"),
    [
        ("import subprocess; subprocess.run(['ls'])", True),
        ("import os\nos.fork()", True),
        ("raise PermissionError(1, 'Operation not permitted')", False),
    ],
)
def test_the_error_of_a_program_that_may_not_start_others_names_the_policy_that_allows_it(
    level, program, hint, tmp_path, capsys
):
    file = tmp_path / "starts.py"
    file.write_text(program)
    assert command(["sandbox", "run", str(file)]) == 1
    assert ("--policy proc permits it" in capsys.readouterr().err.splitlines()[-1]) is hint


@pytest.mark.long
def test_a_policy_and_limits_of_output_reach_the_program(level, capsys):
    assert command(["sandbox", "run", "forks.py", "--policy", "proc"]) == 0
    assert command(["sandbox", "run", "talks.py", "--stdout_kb", "1"]) == 0
    said = capsys.readouterr()
    assert len(said.out) == 1024
    assert said.err.splitlines()[-1].endswith("; stdout truncated")


def test_json_has_the_whole_result_and_nothing_else(level, capsys):
    assert command(["sandbox", "run", "raises.py", "--json"]) == 1
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert said.err == ""
    assert result.keys() == {field.name for field in fields(ExecResult)} - {"files", "channel", "stdout_data"}
    assert (result["status"], result["exit_code"], result["stdout"]) == ("nonzero", 1, "before")
    assert "ZeroDivisionError" in result["stderr"]
    assert result["isolation"] == level
    assert result["layers"]


class Failing:
    """A sandbox whose host fails, as a result or as an error."""

    run_slots = 1
    isolation = Isolation.NAMESPACES

    def __init__(self, outcome):
        self.outcome = outcome

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        return None

    async def run(self, program, **options):
        if isinstance(self.outcome, ExecResult):
            return self.outcome
        raise self.outcome


INFRA = ExecResult(ExecStatus.INFRA, detail="zygote: it\nended")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [(INFRA, "agentenv: infra; "), (InfraError("zygote: it ended"), "agentenv: error: zygote: it ended\n")],
)
@pytest.mark.parametrize("argv", [["run", "echo.py"], ["bench", "--seconds", "0.1"]])
def test_a_sandbox_that_fails_says_nothing_of_the_program_and_is_exit_code_3(argv, outcome, said, monkeypatch, capsys):
    monkeypatch.setattr(agentenv.sandbox, "LocalSandbox", lambda **options: Failing(outcome))
    assert command(["sandbox", *argv]) == 3
    err = capsys.readouterr().err
    assert "zygote: it ended" in err
    assert err.startswith(said) or argv[0] == "bench"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "begins", "names"),
    [
        ("", "sandbox: expected isolation 'landlock' or stronger, got none here.", "Empty module name"),
        ("no_such_package", "preimport: expected packages of /", "no_such_package"),
    ],
)
def test_no_isolation_is_exit_code_2_with_what_failed_on_one_line(level, name, begins, names, capsys):
    assert command(["sandbox", "run", "echo.py", "--preimport", name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"agentenv: error: {begins}")
    assert names in said.err
    assert said.err.count("\n") == 1


WRONG = {
    "unknown command": (
        ["rnu"],
        "agentenv sandbox: expected one of doctor, run, bench, serve, got 'rnu'. Did you mean 'run'?",
    ),
    "no file": (["run"], "agentenv sandbox run: expected FILE (Python source file, in UTF-8), got none. Run"),
    "file not there": (["run", "gone.py"], "FILE: expected a file to read, got 'gone.py' (No such file or directory)."),
    "not UTF-8": (["run", "latin.py"], "latin.py: expected Python source in UTF-8, got"),
    "stdin not there": (["run", "echo.py", "--stdin", "gone"], "--stdin: expected a file to read, got 'gone'"),
    "no limit": (["run", "echo.py", "--cpu_s", "0"], "--cpu_s: expected a number above 0, got 0.0. Raise it."),
    "less memory than the interpreter's own": (
        ["run", "echo.py", "--memory_mb", "1"],
        "limits.memory_mb: expected a number from 16 to 1e+06, got 1",
    ),
    "no time": (["bench", "--seconds", "0"], "--seconds: expected a number above 0 and below 3600, got 0.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_reported_in_one_line_with_exit_code_2(case, capsys):
    argv, said = WRONG[case]
    assert command(["sandbox", *argv]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("agentenv: error: ")
    assert err.count("\n") == 1


def test_every_limit_is_a_flag_of_run(capsys):
    assert command(["sandbox", "run", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{limit.name} " in out for limit in fields(ExecLimits))


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_bench_times_the_level_that_is_found(level, capsys):
    assert command(["sandbox", "bench", "--seconds", "0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["isolation"] == level
    assert 0 < found["p50_ms"] <= found["p95_ms"]
    assert found["per_s"] > 0 < found["num_runs"]
    assert command(["sandbox", "bench", "--seconds", "0.1", "--preimport", "json"]) == 0
    assert f"isolation {level}: p50 " in capsys.readouterr().out


def test_bench_of_a_program_that_fails_returns_no_figures(monkeypatch, capsys):
    result = ExecResult(ExecStatus.NONZERO, exit_code=1, stderr="Traceback\nImportError: no numpy")
    monkeypatch.setattr(agentenv.sandbox, "LocalSandbox", lambda **options: Failing(result))
    assert command(["sandbox", "bench", "--preimport", "numpy"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "expected 'import numpy\\n' to succeed, got nonzero: Traceback ImportError: no numpy" in said.err


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_doctor_finds_the_level_that_programs_run_at(level, capsys):
    assert command(["sandbox", "doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["chosen"]) == (True, level)


def finds(monkeypatch, found):
    """Let the doctor find this, or fail with it."""

    async def find(**options):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(sandbox_doctor, "doctor", find)


def report(chosen):
    levels = (
        LevelReport(Isolation.NAMESPACES, chosen is not None, ("namespaces",), "python", 17),
        LevelReport(Isolation.LANDLOCK, False, failures=("landlock (python): ENOSYS",)),
    )
    return DoctorReport({"kernel": "Linux"}, levels, chosen, Speed(9, 4.4, 6.0, 300.0) if chosen else None)


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (report(Isolation.NAMESPACES), 0, "chosen: namespaces"),
        (report(None), 1, "chosen: none: no program can run"),
    ],
)
def test_doctor_fails_where_nothing_may_run(found, code, said, monkeypatch, capsys):
    finds(monkeypatch, found)
    assert command(["sandbox", "doctor"]) == code
    assert said in capsys.readouterr().out
    assert command(["sandbox", "doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


def test_the_doctor_of_everything_reports_the_level_of_the_sandbox(monkeypatch):
    for chosen, detail, fix in (
        (Isolation.NAMESPACES, "isolation namespaces", ""),
        (Isolation.LANDLOCK, "isolation landlock, weaker than namespaces", "agentenv sandbox doctor"),
    ):
        finds(monkeypatch, report(chosen))
        level = doctor._isolation()
        assert (level.name, level.state, level.detail, level.fix) == ("sandbox", "ok", detail, fix)
    finds(monkeypatch, report(None))
    level = doctor._isolation()
    assert (level.state, level.fix) == ("missing", "agentenv sandbox doctor")
    assert "landlock (python): ENOSYS" in level.detail


def test_a_doctor_that_itself_fails_is_a_finding_of_the_doctor_of_everything(monkeypatch):
    finds(monkeypatch, SandboxUnavailable("sandbox: expected isolation,\ngot none"))
    level = doctor._isolation()
    assert (level.state, level.detail) == ("broken", "sandbox: expected isolation, got none")


@pytest.mark.parametrize("name", ["rows.jsonl", "ROWS.JSON", "rows.csv"])
def test_data_is_not_run_as_a_program(tmp_path, capsys, name):
    (tmp_path / name).write_text('{"prompt": "a"}\n')
    assert command(["sandbox", "run", str(tmp_path / name)]) == 2
    assert f"FILE: expected a Python program, got the data '{tmp_path / name}'." in capsys.readouterr().err
