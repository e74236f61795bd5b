"""Other trainers' records open as they were written; `make_fixtures.py` says how their own code wrote the files."""

import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.cli.main import main
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records.directory import read_trajectories
from agentenv.runs.records.index import FIELDS, read_index, stored_index
from agentenv.view.foreign.building import records_in
from agentenv.view.single_file import FileOptions, write_html
from agentenv.view.viewed import find_runs

HERE = Path(__file__).parent
TRACES = HERE / "prime_rl/rollouts/step_5/train/all/traces.jsonl"


def opened(path):
    (run,) = find_runs([str(path)])
    return run, {each.episode_id: each for each in read_trajectories(run.folder)}


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_dumps_of_verl_show_texts_scores_and_siblings():
    run, episodes = opened(HERE / "verl")
    assert run.name == "verl"
    assert run.said.endswith(
        "verl: 7 episodes of verl (no token ids, no log-probabilities, no reasons for the end of episodes, "
        "1 without rewards)"
    )
    wanted = [*records(HERE / "verl/3.jsonl"), *records(HERE / "verl/4.jsonl")]
    for episode, record in zip(episodes.values(), wanted, strict=True):
        (turn,) = episode.turns
        assert (episode.prompt, turn.action, episode.task.label) == (record["input"], record["output"], record["gts"])
        assert episode.reward == (record["score"] if math.isfinite(record["score"]) else None)
        assert turn.answer.num_output_tokens is None
        assert (turn.finish_reason, episode.stop_reason) == ("", None)
    assert next(iter(episodes.values())).turns[0].result.info == {"acc": True, "pred": "4"}
    siblings = [episode.group_id for episode in episodes.values()]
    assert [siblings.count(group) for group in dict.fromkeys(siblings)] == [2, 2, 2, 1]
    assert siblings[4:] == ["s0@4", "s0@4", "s1@4"]


def test_rollouts_of_nemo_gym_show_tokens_calls_and_failures():
    run, episodes = opened(HERE / "nemo_gym/rollouts.jsonl")
    assert run.said.endswith(
        "5 episodes of NeMo Gym (2 without rewards, 3 without token ids, 3 without log-probabilities)"
    )
    whole, judge, texts, cut, failed = episodes.values()
    first, *_ = records(HERE / "nemo_gym/rollouts.jsonl")
    sampled = [each for each in first["response"]["output"] if "generation_token_ids" in each]
    for turn, item in zip(whole.turns, sampled, strict=True):
        assert whole.token_ids[: turn.start].tolist() == item["prompt_token_ids"]
        assert whole.token_ids[turn.start : turn.end].tolist() == item["generation_token_ids"]
        assert whole.logprobs[turn.start : turn.end].tolist() == item["generation_log_probs"]
    assert whole.action_mask == bytes([0, 0, 0, 1, 1, 0, 1, 1, 1])
    assert (whole.reward, whole.turns[-1].result.info["accuracy"], whole.group_id) == (1.0, 1.0, "000000:simple")
    assert (whole.tools[0]["name"], whole.prompt[0]["content"]) == ("add", "What is 2 + 2?")
    assert (judge.reward, judge.error.type, judge.group_id) == (None, "judge_failed", whole.group_id)
    assert [turn.answer.reasoning for turn in texts.turns] == ["Add.", ""]
    assert texts.turns[0].answer.tool_calls[0]["function"] == {"name": "add", "arguments": "{}"}
    assert texts.turns[0].result.observation == [{"role": "tool", "tool_call_id": "c0", "content": "4"}]
    assert (cut.reward, cut.stop_reason, cut.turns[0].finish_reason) == (0.0, "max_length", "length")
    assert (failed.reward, failed.error.type, failed.turns) == (None, "agent_run_error", [])


def test_traces_of_prime_rl_show_the_tokens_of_every_branch():
    run, episodes = opened(TRACES.parent)
    assert run.said.endswith(
        "5 episodes of prime-rl (2 without rewards, 1 without token ids, 1 without log-probabilities)"
    )
    for record in records(TRACES)[:2]:
        (trace,) = record["traces"]
        episode = episodes[f"g0/{record['id']}"]
        assert episode.token_ids.tolist() == [token for node in trace["nodes"] for token in node["token_ids"]]
        assert list(episode.action_mask) == [on for node in trace["nodes"] for on in node["mask"]]
        sampled = [value for value, on in zip(episode.logprobs, episode.action_mask, strict=True) if on]
        assert sampled == pytest.approx([value for node in trace["nodes"] for value in node["logprobs"]])
        wanted = sum(each["score"] * each["weight"] for each in trace["rewards"].values())
        assert episode.reward == pytest.approx(wanted)
        assert episode.turns[-1].result.info["num_calls"] == 1.0
        assert [turn.generate_s for turn in episode.turns] == [0.5, 0.5]
    branched = episodes["g0/e2"]
    assert [segment.token_ids.tolist() for segment in branched.segments][1:] == [[20, 21, 6, 22]]
    assert [turn.segment for turn in branched.turns] == [0, 0, 1]
    assert branched.turns[1].result.observation == [{"role": "user", "content": "Summary: 2 + 2 is 4."}]
    ends = [each.stop_reason for each in episodes.values()]
    assert ends == ["terminated", "max_turns", "terminated", "error", "error"]
    assert [each.error.type for each in episodes.values() if each.error] == ["SandboxError", "SandboxError"]
    assert stored_index(run.folder)
    versions = [row[list(FIELDS).index("version_max")] for row in read_index(run.folder)]
    assert versions == [7, None, 7, 7, None]
    (relayed,) = opened(HERE / "prime_rl/eval/traces.jsonl")[1].values()
    assert (relayed.reward, relayed.turns[0].answer.num_output_tokens, relayed.turns[0].action) == (0.25, 3, "Ho")


def test_a_job_of_harbor_shows_its_trials_as_siblings():
    run, episodes = opened(HERE / "harbor/job")
    assert run.said.endswith(
        "4 episodes of Harbor (2 without token ids, 2 without log-probabilities, 2 without rewards)"
    )
    whole, slow, lost, _ = episodes.values()
    steps = json.loads((HERE / "harbor/job/fix-it__0/agent/trajectory.json").read_text())["steps"]
    assert whole.prompt == [{"role": each["source"], "content": each["message"]} for each in steps[:2]]
    for turn, step in zip(whole.turns, steps[2:], strict=True):
        assert whole.token_ids[: turn.end].tolist() == [
            *step["metrics"]["prompt_token_ids"], *step["metrics"]["completion_token_ids"],
        ]  # fmt: skip
        assert whole.logprobs[turn.start : turn.end].tolist() == step["metrics"]["logprobs"]
    assert (whole.reward, slow.reward, slow.stop_reason) == (1.0, 0.0, "episode_timeout")
    assert slow.turns[-1].result.info == {"reward": 0.0, "style": 0.5}
    assert (slow.turns[0].answer.cost_usd, slow.turns[0].answer.reasoning) == (0.25, "Hm.")
    assert (lost.reward, lost.error.type) == (None, "EnvironmentStartTimeoutError")
    assert list(episodes) == ["fix-it/0", "fix-it/1", "fix-it/2", "other/0"]
    (trial,) = opened(HERE / "harbor/job/fix-it__0")[1].values()
    assert trial.reward == 1.0
    _, bare = opened(HERE / "harbor/job/fix-it__0/agent/trajectory.json")
    assert [(each.reward, each.stop_reason) for each in bare.values()] == [(None, None)]


def test_what_an_agent_put_in_a_trial_is_not_followed(tmp_path):
    subprocess.run(["cp", "-r", str(HERE / "harbor/job/fix-it__0"), str(tmp_path / "trial")], check=True)
    trajectory = tmp_path / "trial/agent/trajectory.json"
    trajectory.rename(tmp_path / "secret.json")
    trajectory.symlink_to(tmp_path / "secret.json")
    with pytest.raises(ConfigError, match="got none; 1 record left out: trial: OSError"):
        find_runs([str(tmp_path / "trial")])
    trajectory.unlink()
    os.mkfifo(trajectory)
    with pytest.raises(ConfigError, match="1 record left out: trial"):
        find_runs([str(tmp_path / "trial")])


def test_damaged_and_unknown_lines_are_named_and_the_rest_opens(tmp_path):
    lines = TRACES.read_text().splitlines()
    path = tmp_path / "traces.jsonl"
    hole = lines[0].replace('"mask":[false,true,true,true]', '"mask":[false,true,false,true]')
    cycle = lines[0].replace('{"parent":0,', '{"parent":4,')
    path.write_text("\n".join([lines[0][:90], hole, cycle, '{"x":1}', "[" * 100_000, "", lines[1]]) + "\n")
    run, episodes = opened(path)
    assert list(episodes) == ["g0/e1"]
    assert "1 episode of prime-rl; 5 records left out: traces.jsonl:1: JSONDecodeError" in run.said
    assert "traces.jsonl:2: ValueError: node 2: expected a mask" in run.said
    path.write_text("\n".join(lines[:1]).replace('"token_ids":[1,2,3]', '"token_ids":[1,2,99999999999]'))
    with pytest.raises(ConfigError, match="expected episodes of prime-rl, got none; 1 record left out"):
        find_runs([str(path)])


def places_in(value, place=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*place, key)
        yield from places_in(each, (*place, key))


@pytest.mark.parametrize("name", ["verl/3.jsonl", "nemo_gym/rollouts.jsonl", str(TRACES.relative_to(HERE))])
def test_whatever_one_value_is_the_episodes_of_other_lines_open(name, tmp_path):
    first, *_ = lines = records(HERE / name)
    odd = [None, [], {}, "\ud800\x1b[31m", -1, 10**400, math.inf, True, [[1]], {"a": 1}]
    places = list(places_in(first))
    draw = random.Random(1)
    for number in range(30):
        changed = json.loads(json.dumps(first))
        *path, last = draw.choice(places)
        functools.reduce(lambda value, key: value[key], path, changed)[last] = draw.choice(odd)
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(map(json.dumps, [changed, *lines[1:]])))
        assert len(opened(file)[1]) >= len(lines) - 1


@pytest.mark.parametrize("content", ["", "no JSON\n", '{"a": 1}\n', "[1]\n"])
def test_another_file_is_refused_with_the_kinds_that_open(content, tmp_path):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"or one of prime-rl's traces.jsonl, NeMo Gym's rollouts, verl's"):
        find_runs([str(tmp_path / "x.jsonl")])


def test_a_file_with_a_number_for_a_name_does_not_hide_the_runs_beside_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text("{}")
    (tmp_path / "a/trajectories.jsonl").write_text("")
    (tmp_path / "1.jsonl").write_text('{"question": "What is 2 + 2?"}\n')
    assert [run.folder for run in find_runs([str(tmp_path)])] == [tmp_path / "a"]


def test_pipes_and_folders_among_the_dumps_are_passed_over_and_a_file_that_cannot_be_read_is_named(tmp_path):
    os.mkfifo(tmp_path / "1.jsonl")
    (tmp_path / "2.jsonl").mkdir()
    (tmp_path / "3.jsonl").symlink_to(HERE / "verl/3.jsonl")
    assert len(opened(tmp_path)[1]) == 4
    with pytest.raises(DataError, match=r"1\.jsonl: expected a file, got a folder or a pipe"):
        list(records_in(tmp_path / "1.jsonl"))
    with pytest.raises(ConfigError, match=r"4\.jsonl: expected a file that can be read, got .*Errno"):
        list(records_in(tmp_path / "4.jsonl"))


@pytest.mark.parametrize(("num_nodes", "num_tokens", "num_children"), [(400, 1, 300), (1, 500_000, 25)])
def test_a_trace_whose_paths_are_much_longer_than_its_line_is_left_out(num_nodes, num_tokens, num_children, tmp_path):
    lines = TRACES.read_text().splitlines()
    record = json.loads(lines[0])
    said = {"sampled": False, "message": {"role": "user", "content": ""}}
    nodes = [{**said, "parent": None, "token_ids": [1] * num_tokens, "mask": [False] * num_tokens}]
    nodes += [{**said, "parent": each, "token_ids": [1], "mask": [False]} for each in range(num_nodes - 1)]
    child = {"sampled": True, "message": {"role": "assistant", "content": ""}, "token_ids": [1], "mask": [True]}
    record["traces"][0]["nodes"] = [*nodes, *num_children * [{**child, "parent": num_nodes - 1}]]
    (tmp_path / "traces.jsonl").write_text(f"{json.dumps(record)}\n{lines[1]}\n")
    run, episodes = opened(tmp_path)
    assert list(episodes) == ["g0/e1"]
    assert "1 record left out: traces.jsonl:1: ValueError: node" in run.said


def test_sigterm_leaves_no_copy_of_a_record(tmp_path):
    command = [sys.executable, "-m", "agentenv.cli", "view", str(TRACES), "--no_open", "--until_eof"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, **pipes) as process:
        assert process.stdout.readline().startswith(b"http")
        assert len(list(tmp_path.iterdir())) == 1
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_page_of_a_record_is_written_and_the_copy_removed(tmp_path, capsys):
    assert main(["view", str(HERE / "verl/3.jsonl"), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    assert "4 episodes of verl" in printed.err
    assert "4 episodes" in printed.out
    assert "<script>alert(1)</script>" not in (tmp_path / "page.html").read_text()
    runs = find_runs([str(HERE / "verl/3.jsonl"), str(HERE / "verl/../verl/3.jsonl"), str(TRACES)])
    assert [run.name for run in runs] == ["3.jsonl", "traces.jsonl"]
    assert "9 episodes" in write_html(runs, tmp_path / "both.html", FileOptions())
    code = "import sys; from agentenv.view.viewed import find_runs; print(find_runs(sys.argv[1:])[0].folder)"
    done = subprocess.run([sys.executable, "-c", code, str(TRACES)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(os.sep)
    assert not Path(done.stdout.strip()).exists()
