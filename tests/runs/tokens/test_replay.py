"""Replay: an untouched record agrees with its engine, and whatever was changed in it is found and placed."""

from __future__ import annotations

import asyncio
import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from agentenv.core.engine import is_plain
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import SamplingParams, StepResult, StopReason, Task
from agentenv.engines.hf.engine import HFEngine
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.tokens.replay import replay, replay_run
from tests.drivers import command, write_rows
from tests.models import make_tiny_qwen2

PLAIN = SamplingParams(max_tokens=7)
HOT = SamplingParams(temperature=0.7, max_tokens=7)
FEEDBACK = [2, 201, 1, 86, 84, 85, 201]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On busy cores, two threads take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def engine(folder):
    engine = HFEngine(folder, max_length=512)
    yield engine
    await engine.close()


async def play(engine, name, samplings=(PLAIN,) * 3, *, segments=1):
    """An episode with a turn for each sampling; the step of a turn sets the sampling of the next."""
    trajectory = Trajectory(Task("?"), 512, name, name)
    trajectory.append_observation([1, *range(40, 50), 40 + int(name)])
    for index, sampling in enumerate(samplings):
        seeded = replace(sampling, seed=100 * int(name) + index)
        prompt = list(trajectory.segments[-1].token_ids)
        completion = await engine.generate(prompt, seeded, request_id=f"{name}/{index}")
        trajectory.append_turn(completion, "")
        following = samplings[index + 1] if index + 1 < len(samplings) else None
        trajectory.set_result(StepResult(sampling=following if following != sampling else None))
        if following is None:
            break
        if index + 1 < segments:
            trajectory.open_segment([1, *range(60, 70), 60 + index])
        else:
            trajectory.append_observation(FEEDBACK)
    trajectory.finish(StopReason.MAX_TURNS)
    return trajectory


@pytest.fixture
async def episodes(engine):
    return [await play(engine, str(index)) for index in range(5)]


async def again(episodes, engine, sampling=PLAIN, **more):
    return await replay(episodes, engine, sampling=sampling, **more)


def actions(trajectory, segment=0):
    """Positions of the action tokens."""
    return [i for i, sampled in enumerate(trajectory.segments[segment].action_mask) if sampled]


def turn_of(trajectory, position):
    return next(i for i, turn in enumerate(trajectory.turns) if turn.start <= position < turn.end)


# --- an untouched record ----------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_untouched_record_agrees(engine, episodes):
    report = await again(episodes, engine, tolerance=1e-4)
    assert report.exit_code == 0
    assert (report.num_episodes, report.num_turns) == (5, 15)
    assert report.num_tokens == sum(len(actions(each)) for each in episodes) == report.versions[0]
    assert 0 <= report.mean <= report.p99 <= report.largest.size < 1e-4
    assert (report.num_missing, report.num_unscored, report.num_turns_left_out, report.num_other_version) == (0,) * 4
    assert (report.first, report.num_tokens_beyond, report.num_episodes_beyond) == (None, 0, 0)


async def test_every_segment_is_scored_on_its_own(engine):
    trajectory = await play(engine, "1", segments=2)
    assert len(trajectory.segments) == 2
    assert (await again([trajectory], engine, tolerance=1e-4)).exit_code == 0
    position = actions(trajectory, 1)[2]
    trajectory.segments[1].logprobs[position] -= 0.1
    report = await again([trajectory], engine)
    assert (report.largest.segment, report.largest.position) == (1, position)
    assert report.largest.turn == 1


async def test_failed_episode_is_compared_as_far_as_it_came(engine):
    trajectory = Trajectory(Task("?"), 512, "1")
    trajectory.append_observation([1, 40, 41])
    trajectory.append_turn(await engine.generate([1, 40, 41], PLAIN, request_id="1/0"), "")
    trajectory.finish(StopReason.ERROR)
    assert (await again([trajectory, Trajectory(Task("?"), 512, "2")], engine)).num_episodes == 1


@pytest.mark.long
async def test_episodes_are_taken_one_at_a_time_and_at_most_so_many_are_scored_at_once(engine, episodes):
    taken, running, most = [], 0, 0

    class Watched:
        async def score(self, token_ids):
            nonlocal running, most
            running += 1
            most = max(most, running)
            scores = await engine.score(token_ids)
            running -= 1
            return scores

    def source():
        for each in episodes:
            taken.append(running)
            yield each

    report = await again(source(), Watched(), concurrency=2)
    assert (report.num_episodes, most) == (5, 2)
    assert max(taken) <= 1


# --- a changed record -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_one_changed_logprob_is_found_and_placed(engine, episodes):
    position = actions(episodes[3])[9]
    episodes[3].segments[0].logprobs[position] += 0.1
    report = await again(episodes, engine)
    assert (report.exit_code, report.num_tokens_beyond, report.num_episodes_beyond) == (1, 1, 1)
    place = report.largest
    assert (place.episode_id, place.position, place.turn) == ("3", position, turn_of(episodes[3], position))
    assert place.token_id == episodes[3].token_ids[position]
    assert place.size == pytest.approx(0.1, abs=1e-4)
    assert report.first == place


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 4, 10])
async def test_changed_action_token_is_the_first_place_beyond_the_tolerance(engine, episodes, index):
    position = actions(episodes[4])[index]
    episodes[4].segments[0].token_ids[position] ^= 1
    report = await again(episodes, engine)
    assert (report.exit_code, report.num_episodes_beyond) == (1, 1)
    assert (report.first.episode_id, report.first.position) == ("4", position)
    assert report.first.turn == turn_of(episodes[4], position)


# --- what cannot be compared ------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_missing_logprobs_are_counted_and_not_compared(engine, episodes):
    for position in actions(episodes[0])[:3]:
        episodes[0].segments[0].logprobs[position] = math.nan
    report = await again(episodes, engine)
    assert (report.num_missing, report.exit_code) == (3, 0)
    assert report.num_tokens == sum(len(actions(each)) for each in episodes) - 3


@pytest.mark.long
async def test_two_infinite_logprobs_are_not_an_agreement(engine, episodes):
    class Impossible:
        async def score(self, token_ids):
            return [-math.inf] * len(token_ids)

    episodes[0].segments[0].logprobs[actions(episodes[0])[0]] = -math.inf
    report = await again(episodes[:1], Impossible())
    assert report.num_tokens_beyond == report.num_tokens


@pytest.mark.long
async def test_sampling_that_a_step_sets_decides_for_the_turns_after_it(engine):
    trajectory = await play(engine, "1", (PLAIN, HOT, HOT, PLAIN))
    report = await again([trajectory], engine, tolerance=1e-4)
    assert (report.num_turns, report.num_turns_left_out, report.exit_code) == (2, 2, 0)
    # The same record, read as of a run at another temperature: only the last turn says what it was sampled with.
    report = await again([trajectory], engine, HOT)
    assert (report.num_turns, report.num_turns_left_out) == (1, 3)


async def test_turns_under_a_constraint_are_left_out(engine):
    trajectory = await play(engine, "1", (PLAIN, PLAIN))
    trajectory.turns[0].forced = ()
    report = await again([trajectory], engine, tolerance=1e-4)
    assert (report.num_turns, report.num_turns_left_out) == (1, 1)


CHANGED = [
    {"temperature": 0.9}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"min_tokens": 2}, {"structural_tag": "{}"},
    {"temperature": 0.0, "min_tokens": 2},
]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_sampling_that_changes_logprobs_is_not_plain(changed):
    assert not is_plain(SamplingParams(**changed))
    assert is_plain(SamplingParams(top_k=-1, stop=("x",), stop_token_ids=(4,), max_tokens=3, seed=1))


@pytest.mark.long
async def test_nothing_to_compare_is_an_error(engine, episodes):
    with pytest.raises(DataError, match="15 turns were sampled otherwise"):
        await again(episodes, engine, HOT)
    with pytest.raises(DataError, match="got none"):
        await again([], engine)
    for each in episodes:
        each.segments[0].logprobs[:] = type(each.logprobs)("f", [math.nan] * len(each.token_ids))
    with pytest.raises(DataError, match="tokens recorded"):
        await again(episodes, engine)


@pytest.mark.long
async def test_tokens_of_other_policy_versions_are_counted(folder, episodes):
    engine = HFEngine(folder, max_length=512)
    other = HFEngine(make_tiny_qwen2(folder.parent / "other", seed=1), max_length=512)
    await engine.update_weights(list(other._slots.model.state_dict().items()), 4)
    try:
        trained = await play(engine, "1")
        report = await again([*episodes, trained], engine)
    finally:
        await engine.close()
        await other.close()
    assert (report.policy_version, report.exit_code) == (4, 1)
    assert report.versions == {0: sum(len(actions(each)) for each in episodes), 4: len(actions(trained))}
    assert report.num_other_version == report.versions[0]
    assert report.num_episodes_beyond == 5


# --- the report -------------------------------------------------------------------------------------------------------


def shown(report):
    screen = io.StringIO()
    Console(file=screen, width=140).print(report)
    return screen.getvalue()


@pytest.mark.long
async def test_report_is_json_and_a_table(engine, episodes):
    good = await again(episodes, engine)
    assert "agrees" in shown(good)
    assert "left out" not in shown(good)
    position = actions(episodes[3])[9]
    episodes[3].segments[0].logprobs[position] = -math.inf
    episodes[0].segments[0].logprobs[actions(episodes[0])[0]] = math.nan
    bad = await again(episodes, engine)
    values = json.loads(json.dumps(bad.to_dict(), allow_nan=False))
    assert (values["exit_code"], values["tolerance"], values["num_missing"]) == (1, 1e-3, 1)
    assert (values["largest"]["episode_id"], values["largest"]["position"]) == ("3", position)
    assert values["difference"]["largest"] == "inf"
    assert values["versions"] == {"0": bad.num_tokens}
    text = shown(bad)
    assert "differs" in text
    assert f"episode 3, turn {bad.largest.turn}, segment 0, position {position}" in text
    assert "1 recorded, 0 scored" in text


# --- run directories --------------------------------------------------------------------------------------------------

ENV = """
from agentenv import AgentInstance, StepResult


class Two(AgentInstance):
    async def step(self, states):
        last = states["turn_index"] == 1
        return StepResult([{"role": "user", "content": "Once more."}], reward=0.5, terminated=last)
"""


@pytest.fixture
def run_directory(tmp_path, monkeypatch, folder):
    """What `agentenv run` leaves behind: four episodes of two turns."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENV)
    write_rows(tmp_path / "tasks.jsonl", [{"prompt": f"Question {i}?", "label": "x"} for i in range(4)])
    flags = ["--env", "env.py:Two", "--data", "tasks.jsonl", "--model", folder, "--engine", "hf", "--out", "out"]
    more = ["--max_tokens", 6, "--progress", "none", "--engine_args", '{"max_num_seqs": 2}']
    assert command(["run", *flags, *more]) == 0
    return tmp_path / "out"


@pytest.mark.long
def test_run_directory_is_replayed_with_its_own_flags(run_directory):
    report = asyncio.run(replay_run(run_directory, tolerance=1e-4))
    assert (report.exit_code, report.num_episodes, report.num_turns) == (0, 4, 8)


@pytest.mark.long
def test_a_run_on_ray_is_replayed_on_what_ran_inside_its_actors(run_directory):
    path = run_directory / "config.json"
    document = json.loads(path.read_text())
    document["config"]["resolved"]["engine"] = document["config"]["flags"]["engine"] = "ray"
    document["config"]["flags"]["engine_backend"] = "hf"
    path.write_text(json.dumps(document))
    report = asyncio.run(replay_run(run_directory, tolerance=1e-4))  # with its engine's arguments, too
    assert (report.exit_code, report.num_episodes) == (0, 4)


@pytest.mark.long
def test_the_engine_that_scores_has_room_for_the_longest_episode_also_if_a_class_of_a_mixture_set_its_limit(
    run_directory,
):
    path = run_directory / "config.json"
    document = json.loads(path.read_text())
    document["config"]["flags"] |= {"env": ["env.py:Two", "other.py"], "max_length": 8}
    path.write_text(json.dumps(document))
    assert asyncio.run(replay_run(run_directory, tolerance=1e-4)).num_turns == 8


@pytest.mark.long
def test_a_record_with_a_damaged_line_never_agrees(run_directory, capsys):
    log = run_directory / "trajectories.jsonl"
    log.write_bytes(log.read_bytes().replace(b"Question 2", b"Question 3", 1))
    argv = ["tokens", "replay", run_directory, "--tolerance", 1e-4]
    assert command([*argv, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["num_damaged_lines"], report["num_episodes"], report["num_tokens_beyond"]) == (1, 3, 0)
    assert command(argv) == 1
    said = capsys.readouterr().out
    assert "agrees" not in said
    assert "skipped 1 damaged lines" in said


@pytest.mark.long
def test_run_of_an_engine_without_weights_cannot_be_replayed_on_it(run_directory):
    with pytest.raises(ConfigError, match="expected one that scores tokens, got ScriptedEngine"):
        asyncio.run(replay_run(run_directory, engine="scripted"))


def test_run_directory_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected a run directory"):
        asyncio.run(replay_run(tmp_path))
    with RunWriter.open(tmp_path / "own", {"mine": 1}):
        pass
    with pytest.raises(ConfigError, match="expected the flags"):
        asyncio.run(replay_run(tmp_path / "own"))
