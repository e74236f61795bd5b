"""Checkpoints: what was saved is there, whole, whatever killed the process; what is torn is passed over."""

import json
import logging
import random
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.runs.records.lines import trajectory_to_dict
from agentenv.training.checkpoint import Checkpoints


def episode(episode_id="a/0", *, end="rewarded"):
    trajectory = Trajectory(Task("p", label=[1, {"x": None}]), 1000, episode_id, episode_id.split("/")[0])
    trajectory.append_observation(range(20))
    trajectory.append_turn(Completion(tuple(range(7)), logprobs=(-0.5, float("nan"), -1 / 3, 0, 0, 0, -9)), "hello")
    if end == "rewarded":
        trajectory.set_result(StepResult(reward=0.1, score=1.0, terminated=True, info={"tries": 2}))
        trajectory.finish(StopReason.TERMINATED)
    elif end == "failed":
        trajectory.finish(StopReason.ERROR, EpisodeError("infra", "SomeError", "it broke", "step"))
    return trajectory


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save_steps(folder, *steps, keep=10):
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, {"step": step, "weights": torch.full((50,), float(step))}, [episode(f"{step}/0")])
    return checkpoints


# --- what was saved is there ----------------------------------------------------------------------------------------


def test_state_and_waiting_episodes_come_back_as_they_were(tmp_path):
    state = {
        "model": {
            "w": torch.linspace(-1, 1, 15).view(3, 5),
            "b": torch.linspace(-3, 3, 4).bfloat16(),
            "i": torch.tensor([2**40]),
        },
        "random": random.Random(1).getstate(),
        "positions": [0, 1.5, True, None, "text", b"bytes", (1, 2)],
        "by index": {0: {"lr": 1e-6}},
    }
    episodes = [episode("a/0"), episode("a/1", end="failed"), episode("b/0", end="not finished")]
    checkpoints = Checkpoints(tmp_path / "made" / "here", keep=1)
    path = checkpoints.save(12, state, episodes)
    assert path == tmp_path / "made" / "here" / "step-00000012" == checkpoints.newest()
    step, loaded, back = checkpoints.load(path)
    assert step == 12
    for name, tensor in state["model"].items():
        assert loaded["model"].pop(name).equal(tensor)
    assert loaded.pop("model") == {}
    assert loaded == {key: state[key] for key in ("random", "positions", "by index")}
    assert [json.dumps(trajectory_to_dict(one)) for one in back] == [
        json.dumps(trajectory_to_dict(one)) for one in episodes
    ]
    assert [one.reward for one in back] == [0.1, None, episodes[2].reward]


def test_an_episode_that_cannot_be_stored_leaves_nothing_behind(tmp_path):
    loop = []
    loop.append(loop)
    bad = Trajectory(Task("p", label=loop), 10, "a/0", "a")
    checkpoints = save_steps(tmp_path, 1)
    with pytest.raises(DataError, match="episode a/0"):
        checkpoints.save(2, {}, [bad])
    assert names(tmp_path) == ["step-00000001"]


# --- which are kept -------------------------------------------------------------------------------------------------


def test_the_newest_ones_are_kept(tmp_path):
    checkpoints = save_steps(tmp_path, 8, 9, 10, 11, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000011"]
    assert checkpoints.load(checkpoints.newest())[0] == 11


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2, keep=2)
    for text in ("again", "and again"):
        checkpoints.save(2, {"said": text}, [])
        assert checkpoints.load(checkpoints.newest())[:2] == (2, {"said": text})
        assert checkpoints.step_of(checkpoints.newest()) == 2
    checkpoints.save(3, {}, [])
    assert len(names(tmp_path)) == 2


def test_a_checkpoint_just_saved_stays_though_later_ones_lie_about(tmp_path):
    checkpoints = save_steps(tmp_path, 50, 5, keep=1)
    assert names(tmp_path) == ["step-00000005"]
    assert checkpoints.load(checkpoints.newest())[0] == 5


def test_leftovers_of_killed_saves_are_removed_by_the_next_and_nothing_else_is(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / ".tmp-step-00000003").mkdir()
    (tmp_path / ".tmp-step-00000003" / "state.pt").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-1").mkdir()
    assert checkpoints.newest() is None
    checkpoints.save(4, {}, [])
    assert names(tmp_path) == ["notes", "step-00000004", "step-1"]


# --- what is torn ---------------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a state cut short": lambda folder: cut(folder / "state.pt"),
    "a flipped bit in the state": lambda folder: flip(folder / "state.pt"),
    "no state": lambda folder: (folder / "state.pt").unlink(),
    "a flipped bit in the buffer": lambda folder: flip(folder / "buffer.jsonl"),
    "no meta": lambda folder: (folder / "meta.json").unlink(),
    "a meta of something else": lambda folder: (folder / "meta.json").write_text("[]"),
    "a meta without sizes": lambda folder: (folder / "meta.json").write_text('{"schema_version": 1, "step": 2}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_torn_checkpoint_is_passed_over_by_name(tmp_path, damage, caplog):
    checkpoints = save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest() == tmp_path / "step-00000001"
    assert "step-00000002: skipped" in caplog.text
    assert checkpoints.num_damaged == 1


def test_a_torn_checkpoint_does_not_count_among_those_that_are_kept(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2, 3, keep=3)
    cut(tmp_path / "step-00000003" / "state.pt")
    checkpoints.keep = 2
    checkpoints.save(4, {}, [])
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_a_checkpoint_of_a_newer_schema_is_refused_and_never_removed(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2, keep=2)
    meta = tmp_path / "step-00000002" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"schema_version": 2, "files": "elsewhere"}))
    with pytest.raises(ConfigError, match="expected a checkpoint of schema version up to 1, got 2"):
        checkpoints.newest()
    checkpoints.keep = 1
    checkpoints.save(3, {}, [])
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_of_another_owner_runs_no_code_of_theirs(tmp_path):
    checkpoints = save_steps(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    torch.save({"model": Path("somewhere")}, folder / "state.pt")
    content = (folder / "state.pt").read_bytes()
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"]["state.pt"] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"state.pt: expected tensors and numbers only"):
        checkpoints.load(checkpoints.newest())


def test_a_folder_that_is_a_file_or_of_another_name_is_a_wrong_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--ckpt_path"):
        Checkpoints(tmp_path / "file", keep=1)
    with pytest.raises(ConfigError, match="expected a folder named like step-00000012"):
        Checkpoints.step_of(tmp_path)
    with pytest.raises(ConfigError, match="--max_ckpt_num"):
        Checkpoints(tmp_path, keep=0)


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [100, 100_000])
def test_a_full_disk_stops_the_training_and_leaves_the_old_checkpoints(tmp_path, limit):
    checkpoints = save_steps(tmp_path, 1)
    state = {"weights": torch.ones(100, 100), "more": torch.ones(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RunStopped, match=r"step-00000002: expected to write a checkpoint, got.*Make room"):
            checkpoints.save(2, state, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoints.load(checkpoints.newest())[0] == 1
    checkpoints.save(2, state, [])
    assert checkpoints.load(checkpoints.newest())[1]["more"].equal(state["more"])


KILLS = """
import os, signal, sys
from pathlib import Path
import torch
from agentenv.training.checkpoint import Checkpoints
from tests.training.test_checkpoint import episode

folder = Path(sys.argv[1])
torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork: a child that uses them hangs

def newest():
    checkpoints = Checkpoints(folder, keep=2)
    path = checkpoints.newest()
    if path is None:
        return 0
    step, state, episodes = checkpoints.load(path)
    assert state["weights"].eq(step).all(), path
    assert [one.episode_id for one in episodes] == [f"{step}/0", f"{step}/1"], path
    return step

def work(kill_at):
    events = 0
    def count(name, arguments):
        nonlocal events
        if name == "open" or name.startswith(("os.", "shutil.")):
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    step = newest() + 1
    sys.addaudithook(count)
    weights = torch.full((60_000,), float(step))
    Checkpoints(folder, keep=2).save(step, {"weights": weights}, [episode(f"{step}/0"), episode(f"{step}/1")])

def run(kill_at):
    pid = os.fork()
    if pid == 0:
        work(kill_at)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL

was, num_kills = 0, 0
for number in range(1, 1000):
    killed = run(number)
    step = newest()
    assert was <= step <= was + 1, (number, was, step)
    was, num_kills = step, num_kills + killed
    if not killed:
        break
Checkpoints(folder, keep=2).save(was + 1, {}, [])
left = sorted(path.name for path in folder.iterdir())
assert len(left) <= 2 and not any(name.startswith(".") for name in left), left
print(num_kills, was)
"""


@pytest.mark.long
def test_a_kill_at_any_event_leaves_a_checkpoint_that_loads_and_steps_never_go_back(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", KILLS, tmp_path / "c"],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    num_kills, step = map(int, ran.stdout.split())
    assert num_kills >= 20
    assert step >= 1


def test_a_checkpoint_says_what_training_it_is_of(tmp_path):
    told = Checkpoints(tmp_path / "told", keep=1, facts={"seed": 1, "range": [0, 0.5]}).save(1, {}, [])
    assert Checkpoints.facts_of(told) == {"seed": 1, "range": [0, 0.5]}
