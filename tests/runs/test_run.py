"""`agentenv run` as a user meets it: what it leaves on the disk, how it ends, and how it goes on."""

import asyncio
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, RunStopped
from agentenv.runs.prepare import check_constructor
from agentenv.runs.records.directory import read_trajectories
from tests.drivers import command, forked, ids, lines, without_times, write_rows
from tests.models import make_tiny_qwen2, make_tiny_tokenizer

ENV = '''
import asyncio
from pathlib import Path
from agentenv import AgentInstance, StepResult


class Slow(AgentInstance):
    """Two turns; the label says how long a step takes, or that it fails."""

    def __init__(self, wait_s: float = 0.0):
        self.wait_s = wait_s

    async def step(self, states):
        with Path("started").open("a") as file:
            file.write("x")
        await asyncio.sleep(3600 if states["label"] == "hang" else self.wait_s)
        if states["label"] == "fail":
            raise ValueError("a bug in the environment")
        last = states["turn_index"] == 1
        observation = [{"role": "user", "content": "Once more."}]
        return StepResult("" if last else observation, reward=0.5, score=float(last), terminated=last, info={"n": 1})
'''


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(path)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch, tokenizer_folder):
    """A working directory with an environment and ten tasks; `place.run` are the flags of a run there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENV)
    make_data(tmp_path, ["ok"] * 10)
    return tmp_path


def make_data(place, labels):
    write_rows(place / "tasks.jsonl", [{"prompt": f"Question {i}?", "label": label} for i, label in enumerate(labels)])


@pytest.fixture
def flags(place, tokenizer_folder):
    return [
        "run", "--env", "env.py:Slow", "--data", "tasks.jsonl", "--model", tokenizer_folder,
        "--engine", "scripted", "--n", 2, "--out", "out",
    ]  # fmt: skip


def resume(*more):
    return ["run", "--resume", "--out", "out", *more]


ALL = sorted(f"{task:06d}/{sample}" for task in range(10) for sample in range(2))


# --- the run directory --------------------------------------------------------------------------------------------


def test_a_run_leaves_its_flags_a_line_per_episode_and_its_metrics(place, flags, capsys):
    assert command(flags) == 0
    run = place / "out"
    names = ".lock config.json index.jsonl metrics.json tokenizer trajectories.jsonl"
    assert {path.name for path in run.iterdir()} == set(names.split())
    config = json.loads((run / "config.json").read_text())
    assert (config["config"]["flags"]["n"], config["config"]["flags"]["env"]) == (2, "env.py:Slow")
    assert config["config"]["resolved"]["engine"] == "scripted"
    assert config["versions"]["agentenv"]
    assert ids(run) == ALL
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["num_episodes"], metrics["num_missing"], metrics["reward"]["mean"]) == (20, 0, 1.0)
    trajectory = next(read_trajectories(run))
    assert (trajectory.reward, trajectory.score, len(trajectory.turns)) == (1.0, 1.0, 2)
    out = capsys.readouterr().out
    assert "20  (10 tasks × 2; 20 rewarded)" in out
    assert "\nrun directory: out\n" in out


@pytest.mark.long
def test_plain_progress_is_on_stderr_and_stdout_is_the_table(place, flags, capsys):
    assert command([*flags, "--progress", "plain"]) == 0
    captured = capsys.readouterr()
    assert "20/20 episodes · reward 1.000 · score 1.000 · errors 0 env, 0 infra" in captured.err
    assert "20/20 episodes" not in captured.out
    assert captured.out.count("Result") == 1
    assert command([*flags, "--progress", "none", "--out", "other"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_json_writes_nothing_but_json_lines_to_stdout_also_if_an_environment_prints(place, flags, capfd):
    (place / "env.py").write_text(
        ENV.replace("        last =", "        print('looking at', states['label'])\n        last =")
    )
    assert command([*flags, "--json"]) == 0
    captured = capfd.readouterr()
    events = [json.loads(line) for line in captured.out.splitlines()]
    names = [event["event"] for event in events]
    assert (names[0], names[-1]) == ("launch", "done")
    assert set(names[1:-1]) == {"progress"}
    assert events[0]["config"]["n"] == 2
    assert (events[-2]["done"], events[-2]["total"]) == (20, 20)
    assert events[-1]["metrics"] == json.loads((place / "out/metrics.json").read_text())
    assert captured.err == "looking at ok\n" * 40


@pytest.mark.long
def test_the_header_shows_the_flags_that_were_changed_and_no_other(place, flags, capsys):
    assert command([*flags, "--temperature", 0.5, "--stop", "a", "b"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("flags")]
    assert line.split() == ["flags", "--n", "2", "--temperature", "0.5", "--stop", "['a',", "'b']"]


@pytest.mark.long
def test_a_terminal_that_cannot_show_a_character_does_not_end_the_run(place, flags, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert command(flags) == 0
    stdout.flush()
    assert b"20  (10 tasks ? 2; 20 rewarded)" in stdout.buffer.getvalue()


@pytest.mark.long
def test_without_out_a_run_directory_is_named_after_environment_and_model_also_in_the_same_second(
    place, flags, tokenizer_folder, capsys, monkeypatch
):
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    for name in (f"env-{tokenizer_folder.name}-now", f"env-{tokenizer_folder.name}-now-2"):
        assert command(flags[:-2]) == 0
        assert f"run directory: runs/{name}\n" in capsys.readouterr().out
        assert len(lines(place / "runs" / name)) == 20


# --- resume -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("where", ["env", "env_kwargs", "group_reward"])
def test_a_file_that_was_fixed_before_a_resume_is_reported_and_kept_once(place, flags, capsys, where):
    flags = [*flags, "--n", 1]
    (place / "judge.py").write_text("def judge(response): return 1.0\n")
    if where == "group_reward":
        flags += ["--group_reward", json.dumps({"judge.py:judge": {}})]
    elif where == "env_kwargs":
        flags[flags.index("env.py:Slow")] = "verify"
        flags += ["--env_kwargs", json.dumps({"reward": {"sum": {"mine": {"reward": "judge.py:judge"}}}})]
    assert command(flags) == 0
    log = place / "out/trajectories.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:7]))
    mended = place / ("env.py" if where == "env" else "judge.py")
    mended.write_text(f"{mended.read_text()}\n# mended\n")
    capsys.readouterr()
    assert command(resume()) == 0
    assert f"changed on resume: {mended.name}; episodes from here" in capsys.readouterr().err
    config = json.loads((place / "out/config.json").read_text())
    assert config["changed"] == [[config["changed"][0][0], config["config"]["agent_file"]]]
    mended.write_text(f"{mended.read_text()}\n# again, when all episodes have ended\n")
    assert command(resume()) == 0
    assert "changed on resume" not in capsys.readouterr().err
    assert json.loads((place / "out/config.json").read_text()) == config


@pytest.mark.long
def test_resume_with_what_changes_the_measurement_is_refused_with_a_diff(place, flags, capsys):
    assert command(flags) == 0
    before = (place / "out/trajectories.jsonl").read_bytes()
    capsys.readouterr()
    for change, diff in (
        (["--temperature", 0.5], "flags.temperature was 1.0, is now 0.5"),
        (["--env_kwargs", '{"wait_s": 0.1}'], "flags.env_kwargs was {}, is now {'wait_s': 0.1}"),
        ([], "is now '11 tasks, "),
    ):
        if not change:
            make_data(place, ["ok"] * 11)
        assert command(resume(*change)) == 2
        err = capsys.readouterr().err
        assert diff in err
        assert err.count("\n") == 1
    assert (place / "out/trajectories.jsonl").read_bytes() == before


@pytest.mark.long
def test_resume_tries_infrastructure_failures_again_with_a_higher_attempt(place, flags, capsys):
    crash = ["--engine_args", '{"script": ["#### 42"], "crash_at": [0]}', "--max_retries", 0]
    assert command([*flags, *crash]) == 0
    (failed,) = [e for e in lines(place / "out") if e["error"]]
    assert command(resume()) == 0  # its engine crashes at its first call, too
    assert command(resume()) == 0
    tries = [e for e in lines(place / "out") if e["episode_id"] == failed["episode_id"]]
    assert [(e["error"]["kind"], e["attempt"]) for e in tries] == [("infra", 0), ("infra", 1), ("infra", 2)]
    metrics = json.loads((place / "out/metrics.json").read_text())
    assert (metrics["num_episodes"], metrics["num_infra_errors"], metrics["num_missing"]) == (20, 1, 0)
    assert [e.get("retried", []) for e in tries] == [[], ["EngineError"], ["EngineError"] * 2]
    assert (metrics["num_retries"], metrics["retried_errors"]) == (2, {"EngineError": 2})


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_lets_episodes_in_flight_end_and_names_the_command_that_continues(place, flags, number, code):
    make_data(place, ["ok"] * 200)
    run = place / "out"
    with forked([*flags, "--concurrency", 4, "--env_kwargs", '{"wait_s": 0.1}', "--grace_s", 3600], place) as running:
        running.until(lambda: len(lines(run)) >= 4)
        running.signal(number)
        assert running.wait() == code, "long before the grace is over"
        stderr = running.stderr
        told = rf"{number.name}: finishing [1-4] episodes in flight, at most 3600 s\. Once more cancels\."
        assert re.search(told, stderr)
        kept = lines(run)
        assert f"interrupted: {len(kept)} episodes are kept." in stderr
        assert "Traceback" not in stderr
        assert "Result" in running.stdout
    assert 4 <= len(kept) < 400
    assert {e["stop_reason"] for e in kept} == {"terminated"}
    assert json.loads((run / "metrics.json").read_text())["num_episodes"] == len(kept)
    argv = shlex.split(stderr.rpartition("Resume with: agentenv ")[2])
    assert argv == resume()
    before = (run / "trajectories.jsonl").read_bytes()
    with forked([*argv, "--concurrency", 200], place) as running:
        assert running.wait() == 0
    assert (run / "trajectories.jsonl").read_bytes().startswith(before)
    assert ids(run) == sorted(f"{task:06d}/{sample}" for task in range(200) for sample in range(2))


def hanging(place, flags, *more):
    """A run of which two episodes are over and eighteen hang."""
    make_data(place, ["ok"] + ["hang"] * 9)
    return forked([*flags, *more], place)


def all_in_flight(place):
    return len(lines(place / "out")) == 2 and (place / "started").read_text() == "x" * 22


@pytest.mark.long
def test_a_second_interrupt_cancels_at_once(place, flags):
    with hanging(place, flags, "--grace_s", 3600) as running:
        running.until(lambda: all_in_flight(place))
        running.signal(signal.SIGINT)
        running.until(lambda: re.search("finishing (18|19|20) episodes", running.stderr))  # two may just be written
        time.sleep(0.3)
        assert running.alive
        running.signal(signal.SIGINT)
        assert running.wait() == 130, "long before the grace is over"
        assert "interrupted: 2 episodes are kept" in running.stderr
        assert "Traceback" not in running.stderr
    assert ids(place / "out") == ["000000/0", "000000/1"]


STUBBORN = """
import asyncio
from pathlib import Path
from agentenv import AgentInstance


class Stubborn(AgentInstance):
    async def step(self, states):
        Path("started").touch()
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                pass
"""


@pytest.mark.long
@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (0.2, 3)])
def test_a_run_ends_although_a_step_ignores_being_cancelled(place, flags, share, code):
    (place / "stubborn.py").write_text(STUBBORN)
    flags = [*flags, "--env", "stubborn.py:Stubborn", "--step_timeout_s", 0.2, "--max_error_share", share]
    with forked(flags, place) as running:
        assert running.wait(60) == code
        assert "20 calls ignored cancellation (call); ending without them" in running.stderr
        failed = "agentenv: error: episodes: expected at most 20% of them to fail, got 20 of 20"
        assert (failed in running.stderr) == (code == 3)
    assert ids(place / "out") == ALL


@pytest.mark.long
def test_episodes_that_do_not_end_within_the_grace_are_cancelled(place, flags):
    with hanging(place, flags, "--grace_s", 0.2) as running:
        running.until(lambda: all_in_flight(place))
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert ids(place / "out") == ["000000/0", "000000/1"]


@pytest.mark.long
def test_interrupting_the_start_ends_at_once_without_a_traceback(place, flags):
    (place / "env.py").write_text("from pathlib import Path\nimport time\nPath('started').touch()\ntime.sleep(60)\n")
    # Of tests in the background SIGINT is ignored, and would be here.
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "agentenv.cli", *map(str, flags)]
    running = subprocess.Popen(argv, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (place / "started").exists():
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130
    assert (out, err) == ("", "")


# --- runs that fail, runs that meet -------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_with_too_many_failures_says_so_stops_with_3_and_can_be_fixed_and_resumed(place, flags):
    make_data(place, ["ok"] * 5 + ["fail"] * 40)
    run = place / "out"
    with forked([*flags, "--concurrency", 1], place) as running:
        assert running.wait() == 3
        last = running.stderr.splitlines()[-1]
        assert "at most 20% of them to fail, got 10 of 20" in last
        assert "step at " in last
        assert "env.py:18: ValueError: a bug in the environment (10 times)" in last
        assert "Traceback" not in running.stderr
        assert running.stderr.count("failed (env): ValueError: ") == 1  # of a kind, as it comes
        assert "0 infrastructure, 10 environment" in running.stdout
        assert "env:ValueError 10" in running.stdout
        assert re.search(r"^failed episodes: agentenv show (.+) --failed$", running.stdout, re.MULTILINE)
    assert len(lines(run)) == 20
    kept = [e for e in lines(run) if not e["error"]]
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["num_env_errors"], metrics["num_rewarded"]) == (10, 10)
    assert metrics["error_types"] == {"env:ValueError": 10}
    (place / "env.py").write_text(ENV.replace('== "fail"', '== "never"'))
    with forked(resume(), place) as running:
        assert running.wait() == 0
    assert without_times(lines(run)[:20])[:10] == without_times(kept)
    assert {t.episode_id: t.error for t in read_trajectories(run)} == {
        f"{task:06d}/{sample}": None for task in range(45) for sample in range(2)
    }


# --- seeds --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_models_tokens_follow_the_seed_and_without_one_differ(place, flags, capsys, tmp_path_factory):
    model = make_tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")
    sample = [*flags, "--model", model, "--engine", "hf", "--max_tokens", 12, "--limit", 3]

    def tokens(out, *more):
        assert command([*sample, "--out", out, *more]) == 0
        return {e["episode_id"]: e["segments"][0]["token_ids"] for e in lines(place / out)}

    seeded = tokens("a")
    assert tokens("b") == seeded
    assert tokens("c", "--seed", 1) != seeded
    assert tokens("d", "--seed", "None") != tokens("e", "--seed", "None")
    assert seeded["000000/0"] != seeded["000000/1"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["__init__", "close"])
async def test_a_constructor_or_a_close_that_hangs_is_a_clear_error_before_the_run(method):
    async def hang(self):
        await asyncio.Event().wait()

    cls = type("Hanging", (AgentInstance,), {method: hang})
    with pytest.raises(ConfigError, match=rf"Hanging\.{method}: expected an end within 0\.2 s.*--step_timeout_s"):
        await asyncio.wait_for(check_constructor(EnvSource(cls), 0.2), 60)


async def test_a_close_that_stops_the_run_before_it_begins_keeps_its_exit_code():
    async def close(self):
        raise RunStopped("no license is left")

    with pytest.raises(RunStopped, match="no license is left"):
        await check_constructor(EnvSource(type("Stopping", (AgentInstance,), {"close": close})), 30.0)
