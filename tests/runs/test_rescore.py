"""`agentenv rescore`: what is graded again, by what, and what the record does not suffice for."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.cli.main import main
from agentenv.compare import compare
from agentenv.runs.records.directory import read_config, read_trajectories
from agentenv.runs.records.lines import encode_line
from tests.api_model import called, completion, served
from tests.drivers import command, lines, without_times, write_rows

ENV = """
from agentenv import AgentInstance, StepResult

REWARD, FEEDBACK, NUM_TURNS = 0.5, "Once more.", 2


class Asks(AgentInstance):
    async def step(self, states):
        last = states["turn_index"] == NUM_TURNS - 1
        if states["label"] == "fail" and last:
            raise ValueError("a bug in the environment")
        observation = [{"role": "user", "content": FEEDBACK}]
        reward = REWARD * len(states["action_text"])
        return StepResult("" if last else observation, reward, terminated=last, score=float(last), info={"n": 1})
"""
REWARDS = """
import os


def length(response, label):
    if label == "2":
        raise ValueError("no grade")
    return {"score": float(len(response)), "acc": 1.0}


def shortest(prompt, responses, extras):
    best = min(map(len, responses))
    return [float(len(text) == best) for text in responses], {}
"""

RUNS = "old", "new"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "tasks.jsonl", [{"prompt": f"Question {i}?", "label": str(i)} for i in range(3)])
    return tmp_path


def sampled(*flags):
    """Run two samples of three tasks: the tiny model's, at a temperature of 1."""
    assert command([
        "run", "--env", "env.py:Asks", "--data", "tasks.jsonl", "--engine", "hf", "--n", 2, "--max_tokens", 12,
        "--progress", "none", "--out", "old", *flags,
    ]) in (0, 3)  # fmt: skip


def rescored(*flags):
    return main(["rescore", "old", "--out", "new", "--progress", "none", "--max_error_share", "1", *map(str, flags)])


def episodes(run):
    return {each.episode_id: each for each in read_trajectories(run)}


def rewards(run):
    return {key: [turn.result and turn.result.reward for turn in each.turns] for key, each in episodes(run).items()}


def errors(run):
    return {key: each.error.message for key, each in episodes(run).items() if each.error}


def version(old, new, file="env.py:Asks"):
    """Return the flags of a new version of an environment, in which one text replaces another."""
    path, _, name = file.partition(":")
    code, other = Path(path).read_text(), f"v{len(list(Path().glob('*.py')))}_{path}"  # one process imports a file once
    assert old in code
    Path(other).write_text(code.replace(old, new))
    return "--env", f"{other}:{name}"


# --- the environment plays them again ------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["math_retry", "tool_use", "guess_number", "verify", "env.py:Asks"])
def test_an_environment_that_has_not_changed_leaves_the_same_record_without_the_model_and_its_data(place, env):
    shutil.copytree(_model(), place / "model")
    data = ["--data", "tasks.jsonl"] if env == "env.py:Asks" else ["--data", "None", "--limit", "3"]
    sampled("--env", env, *data, "--model", "model")
    shutil.rmtree("model")
    (place / "tasks.jsonl").unlink()
    assert rescored() == 0
    assert without_times(lines(place / "new")) == without_times(lines(place / "old"))
    old, new = (read_config(place / name)["config"] for name in ("old", "new"))
    assert new["rescored"] == {"run": str(place / "old"), "reward": None, "keeps_rewards": False}
    assert old["resolved"] == new["resolved"]
    assert {name for name in old["flags"] if old["flags"][name] != new["flags"][name]} <= {
        "out",
        "progress",
        "max_error_share",
    }


def _model():
    from agentenv.engines.models import resolve_model

    return resolve_model("tiny-math")


def test_a_new_version_of_the_environment_pays_for_the_same_actions(place):
    sampled()
    assert rescored(*version("NUM_TURNS = 0.5", "NUM_TURNS = 1.0")) == 0
    assert rewards("new") == {key: [2 * each for each in paid] for key, paid in rewards("old").items()}
    old, new = episodes("old"), episodes("new")
    assert {key: each.token_ids for key, each in new.items()} == {key: each.token_ids for key, each in old.items()}
    with_rewards = [new[key].segments[0].rewards[turn.end - 1] for key in new for turn in new[key].turns]
    assert with_rewards == [turn.result.reward for each in new.values() for turn in each.turns]


def test_a_step_that_raised_is_graded_by_a_version_that_does_not(place):
    write_rows(place / "tasks.jsonl", [{"prompt": f"Question {i}?", "label": "fail" * (i == 1)} for i in range(3)])
    sampled("--max_error_share", "1")
    assert sorted(errors("old")) == ["000001/0", "000001/1"]
    assert rescored(*version('"fail" and last', '"fall" and last')) == 0
    assert (errors("new"), len(rewards("new"))) == ({}, 6)


def test_an_environment_that_asks_something_else_is_named_with_what_it_asks(place, capsys):
    sampled()
    other = version("Once more.", "Try again.")
    assert main(["rescore", "old", "--out", "stopped", "--progress", "none", *other]) == 3
    advice = "Let the environment ask what it asked then, or fix what raised, and --resume, or raise --max_error_share."
    assert capsys.readouterr().err.endswith(f"run it again (6 times). {advice}\n")
    assert rescored(*other) == 0
    assert set(errors("new")) == set(rewards("old"))
    text = errors("new")["000000/0"]
    assert text.startswith("rescore: expected the prompt of turn 1 as it was recorded, with 'Once more.<|im_end|>")
    assert "got 'Try again.<|im_end|>" in text
    failed = episodes("new")["000000/0"].error
    assert (failed.type, failed.kind, failed.where) == ("NotRecorded", "data", "generate")


def test_actions_that_the_record_lacks_are_named_and_those_that_an_environment_needs_no_more_are_left_out(place):
    sampled()
    assert rescored(*version('"Once more.", 2', '"Once more.", 3')) == 0
    whole = {"rescore: expected 3 recorded actions, got 2: stop reason terminated"}
    assert (set(errors("new").values()), len(errors("new"))) == (whole, 6)
    shutil.rmtree("new")
    assert rescored(*version('"Once more.", 2', '"Once more.", 1')) == 0
    assert rewards("new") == {key: paid[:1] for key, paid in rewards("old").items()}


def test_episodes_that_a_stopped_run_lacks_are_named(place):
    sampled()
    kept = (place / "old" / "trajectories.jsonl").read_bytes().splitlines(keepends=True)[:5]
    (place / "old" / "trajectories.jsonl").write_bytes(b"".join(kept))
    (place / "old" / "index.jsonl").unlink()
    assert rescored() == 0
    missing = "rescore: expected the episode in old, got none. Finish that run with --resume."
    assert (set(errors("new").values()), len(errors("new"))) == ({missing}, 1)


def test_the_messages_of_an_api_model_are_graded_again(place):
    with served(lambda body: completion(f"It is {len(body['messages'])}")) as server:
        sampled("--engine", "chat", "--base_url", server.base_url, "--model", "the-model")
        num_asked = len(server.requests)
        assert rescored() == 0
        assert len(server.requests) == num_asked
    assert without_times(lines(place / "new")) == without_times(lines(place / "old"))
    shutil.rmtree("new")
    assert rescored(*version("Once more.", "Try again.")) == 0
    text = "expected the prompt of turn 1 as it was recorded, with \"['Once more.']\", got \"['Try again.']\"."
    assert text in errors("new")["000000/0"]


@pytest.mark.parametrize("flags", [(), ("--reward", "length")])
def test_what_the_policy_cost_is_not_paid_again_nor_are_its_requests_sent(place, flags):
    busy = iter([(429, {"Retry-After": "0.01"}, {"error": {"message": "Rate limit reached"}})])
    with served(lambda body: next(busy, completion("4"))) as server:
        prices = json.dumps({"the-model": {"input": 2.0, "output": 10.0}})
        sampled("--engine", "chat", "--base_url", server.base_url, "--model", "the-model", "--prices", prices)
    assert rescored(*flags) == 0
    retries = [sum(turn.num_request_retries for each in read_trajectories(run) for turn in each.turns) for run in RUNS]
    assert retries == [1, 0]
    costs = [{each.cost_usd is None for each in read_trajectories(run)} for run in RUNS]
    assert costs == [{False}, {True}]


def test_the_tool_calls_of_an_api_model_are_graded_again(place):
    def answer(body):
        if body["messages"][-1]["role"] == "user":
            return called(("calculator", {"expression": "6 * 7"}))
        return completion("#### 42")

    with served(answer) as server:
        engine = ["--engine", "chat", "--base_url", server.base_url, "--model", "the-model"]
        sampled("--env", "tool_use", "--data", "None", "--limit", 3, *engine)
    assert rescored() == 0
    assert without_times(lines(place / "new")) == without_times(lines(place / "old"))


OWN_LOOP = """
import asyncio
from openai import AsyncOpenAI

QUESTION = "And now?"


class Agent:
    async def run(self, context):
        async with AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, max_retries=0) as client:
            return await self.total(client, context)

    async def total(self, client, context):
        async def ask(text):
            messages = [*context.messages, {"role": "user", "content": text}]
            answer = await client.chat.completions.create(model=context.model, messages=messages)
            return answer.choices[0].message.content

        texts = await asyncio.gather(*map(ask, ["First?", "Second?", QUESTION]))
        return float(sum(map(len, texts)))
"""


def test_an_agent_with_its_own_loop_gets_the_recorded_answers_in_whatever_order_it_asks(place):
    (place / "agent.py").write_text(OWN_LOOP)
    sampled("--env", "agent.py:Agent")
    assert (
        rescored(*version('["First?", "Second?", QUESTION]', '[QUESTION, "Second?", "First?"]', "agent.py:Agent")) == 0
    )
    assert (errors("new"), {key: sum(paid) for key, paid in rewards("new").items()}) == (
        {}, {key: sum(paid) for key, paid in rewards("old").items()}
    )  # fmt: skip
    shutil.rmtree("new")
    assert rescored(*version("And now?", "And then?", "agent.py:Agent")) == 0
    assert len(errors("new")) == 6


def test_a_mixture_is_graded_again_each_episode_by_its_environment(place):
    entries = [{"env": "env.py:Asks", "data": "tasks.jsonl", "limit": 2}, {"env": "math_retry", "limit": 2}]
    (place / "both.json").write_text(json.dumps(entries))
    sampled("--env", "both.json", "--data", "None")
    assert len(rewards("old")) == 8
    assert rescored() == 0
    assert without_times(lines(place / "new")) == without_times(lines(place / "old"))
    shutil.rmtree("new")
    assert rescored("--reward", "length") == 0
    assert len(rewards("new")) == 8


def test_a_new_version_of_one_environment_of_a_mixture_is_an_entry_beside_those_of_the_others(place, capsys):
    entries = [{"env": "env.py:Asks", "name": "asks", "data": "tasks.jsonl"}, {"env": "math_retry", "limit": 2}]
    (place / "both.json").write_text(json.dumps(entries))
    sampled("--env", "both.json", "--data", "None")
    twice = version("REWARD, FEEDBACK, NUM_TURNS = 0.5", "REWARD, FEEDBACK, NUM_TURNS = 1.0")
    for flags in (twice, [*twice, "--env", "math_retry"]):
        capsys.readouterr()
        assert rescored(*flags) == 2
        assert "--env: expected the environments of old, asks and math_retry, got " in capsys.readouterr().err
    assert not (place / "new").exists()
    (place / "both.json").write_text(json.dumps([entries[0] | {"env": twice[1]}, entries[1]]))
    assert rescored("--env", "both.json") == 0
    times = {"asks": 2, "math_retry": 1}
    paid = {key: [times[key.split("/")[0]] * each for each in row] for key, row in rewards("old").items()}
    assert rewards("new") == paid


def test_a_run_of_one_environment_is_not_graded_by_a_mixture(place, capsys):
    sampled("--env", "math_retry", "--data", "None", "--limit", "2")
    assert rescored("--env", "math_retry", "--env", "guess_number") == 2
    assert "--env: expected one environment, as old has, got 'math_retry+guess_number'" in capsys.readouterr().err


# --- a reward grades the answers -----------------------------------------------------------------------------------


def test_a_reward_grades_the_last_action_and_what_it_cannot_grade_has_no_reward(place, capsys):
    sampled()
    assert rescored("--reward", "rewards.py:length") == 0
    assert re.search("^reward +rewards.py:length *$", capsys.readouterr().out, re.MULTILINE)
    failed = [key for key in rewards("old") if key.startswith("000002")]
    assert sorted(errors("new")) == sorted(failed)
    assert "ValueError: no grade" in errors("new")[failed[0]]
    for key, episode in episodes("new").items():
        if key not in failed:
            assert [turn.result.reward for turn in episode.turns] == [0.0, len(episode.turns[1].action)]
            assert [turn.result.score for turn in episode.turns] == [None, 1.0] or episode.score is None
            assert episode.segments[0].rewards[episode.turns[0].end - 1] == 0.0
            assert episode.segments[0].rewards[-1] == len(episode.turns[1].action)
            assert episode.turns[0].result.observation == [{"role": "user", "content": "Once more."}]


def test_a_reward_grades_an_answer_whose_step_raised_and_no_episode_without_one(place):
    write_rows(place / "tasks.jsonl", [{"prompt": f"Question {i}?", "label": "fail" * (i == 1)} for i in range(3)])
    sampled("--max_error_share", "1")
    assert rescored("--reward", "length") == 0
    assert errors("new") == {}
    path, failed = place / "old" / "trajectories.jsonl", episodes("old")["000001/0"]
    in_generate = replace(failed, error=replace(failed.error, where="generate", message="no engine"))
    path.write_bytes(path.read_bytes() + encode_line(in_generate))
    shutil.rmtree("new")
    assert rescored("--reward", "length") == 0
    assert list(errors("new")) == ["000001/0"]


@pytest.mark.parametrize("flags", [(), ("--group_reward", "rewards.py:shortest")], ids=["without", "with"])
def test_the_reward_of_a_group_replaces_an_earlier_one_and_leaves_those_of_the_environment(place, flags):
    sampled(*flags)
    assert rescored("--group_reward", "rewards.py:shortest") == 0
    before, after = episodes("old"), episodes("new")
    for key, episode in after.items():
        result = episode.turns[-1].result
        assert result.info["group/reward"] in (0.0, 1.0)
        assert result.reward - result.info["group/reward"] == 0.5 * len(episode.turns[-1].action)
        assert (episode.score, episode.stop_reason) == (before[key].score, before[key].stop_reason)


def test_an_interrupted_rescoring_continues_with_the_same_command_and_no_model_runs_in_its_directory(place, capsys):
    sampled()
    assert rescored("--reward", "rewards.py:length") == 0
    path = place / "new" / "trajectories.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert rescored("--reward", "rewards.py:length", "--resume") == 0
    assert sorted(path.read_bytes().splitlines()[:2]) == sorted(whole.splitlines()[:2])
    assert len(rewards("new")) == 6
    (place / "rewards.py").write_text(REWARDS + "# changed")
    capsys.readouterr()
    again = ["rescore", str(place / "old"), "--out", "new", "--progress", "none", "--max_error_share", "1", "--resume"]
    assert main([*again, "--reward", "rewards.py:length"]) == 0
    assert "changed on resume: rewards.py; " in capsys.readouterr().err
    assert main(["run", "--resume", "--out", "new"]) == 2
    assert "got one of `agentenv rescore`, 'new'. Resume it with that command" in capsys.readouterr().err


def test_diff_says_that_the_rewards_differ_and_compares(place):
    sampled()
    assert rescored("--reward", "length") == 0
    found = compare("old", "new")
    assert [each.text for each in found.caveats] == [
        "B has the episodes of A, graded again: the difference is of the rewards",
        "--reward of rescore: None in A, length in B",
    ]
    assert (found.refused, found.difference.num_tasks) == ((), 3)
    shutil.rmtree("new")
    assert rescored(*version("NUM_TURNS = 0.5", "NUM_TURNS = 1.0")) == 0
    assert [each.kind for each in compare("old", "new").caveats] == ["rescored", "environment", "environment"]
    assert compare("old", "new").refused == ()
    Path("new").rename("corrected")
    assert rescored("--reward", "rewards.py:length") == 0
    assert [each.text for each in compare("corrected", "new").caveats[1:4]] == [
        "--reward of rescore: None in A, rewards.py:length in B",
        "--env: v2_env.py:Asks in A, env.py:Asks (graded nothing) in B",
        "code: rewards.py only in B",
    ]
    Path("old").rename("other")
    assert compare("other", "new").refused


def test_diff_compares_two_gradings_of_one_run_by_the_episodes_that_both_graded(place):
    sampled()
    assert rescored("--reward", "rewards.py:length") == 0  # which grades no answer to task 2
    Path("new").rename("first")
    assert rescored("--reward", "length") == 0
    found = compare("first", "new")
    assert [(each.text, each.refuses) for each in found.caveats[:4] if each.kind != "environment"] == [
        ("A and B have the episodes of old, graded again: the difference is of the rewards", False),
        ("--reward of rescore: rewards.py:length in A, length in B", False),
        ("2 episodes graded only in B: left out; mean in B 0, of the others 0", False),
    ]
    old, new = rewards("first"), rewards("new")
    assert {each.episode_id: (each.a, each.b) for each in found.episodes} == {
        key: (sum(old[key]), sum(new[key])) for key in old if not key.startswith("000002")
    }


def test_diff_knows_a_rescored_run_by_its_source_from_any_folder(place, monkeypatch):
    sampled()
    shutil.copytree("old", "copy")
    assert rescored("--reward", "length") == 0
    monkeypatch.chdir("old")
    assert [each.kind for each in compare(".", "../new").caveats] == ["rescored", "rewards"]
    assert [each.kind for each in compare(".", "../copy").caveats] == []
    monkeypatch.chdir("../copy")
    assert compare(".", "../new").refused


@pytest.mark.parametrize(("flags", "message"), [
    (["--reward", "rewards.py:shortest"], "--reward: expected a reward of single answers, got 'rewards.py:shortest'"),
    (["--reward", "length", "--env", "env.py:Asks"], "--reward: expected no other flag that says what grades"),
    (["--reward", "lenght"], "Did you mean 'length'?"),
])  # fmt: skip
def test_flags_that_do_not_fit_are_refused_before_anything_is_graded(place, capsys, flags, message):
    sampled()
    assert rescored(*flags) == 2
    assert message in capsys.readouterr().err
    assert not (place / "new").exists()


def test_only_a_run_is_graded_again_and_into_another_directory(place, capsys):
    assert rescored() == 2
    assert "old: expected a run directory, got no config.json in it" in capsys.readouterr().err
    sampled()
    assert main(["rescore", "old", "--out", str(place / "old"), "--resume"]) == 2
    assert "--out: expected another directory than RUN" in capsys.readouterr().err
    config = json.loads(Path("old/config.json").read_text())
    config["config"]["flags"]["advantage_estimator"] = "rloo"
    Path("old/config.json").write_text(json.dumps(config))
    assert rescored() == 2
    assert "old: expected a run of `agentenv run`, got one of `agentenv train`" in capsys.readouterr().err


def test_a_run_that_lacks_whole_tasks_or_its_tokenizer_is_graded_and_says_what_is_missing(place, capsys):
    sampled()
    shutil.rmtree("old/tokenizer")
    kept = [line for line in (place / "old" / "trajectories.jsonl").read_bytes().splitlines(True) if b"000001/" in line]
    (place / "old" / "trajectories.jsonl").write_bytes(b"".join(kept))
    (place / "old" / "index.jsonl").unlink()
    assert rescored() == 0
    assert (sorted(rewards("new")), errors("new")) == (["000001/0", "000001/1"], {})
    assert "missing   of 3 tasks the record has 1; finish that run with --resume" in capsys.readouterr().out


WIDE = ENV.replace("class Asks", "class Wide") + "\nWide.score_range = (0.0, 10.0)\n"


def test_another_environment_or_reward_has_its_own_pass_score_and_kept_rewards_have_theirs(place):
    (place / "wide.py").write_text(WIDE)
    sampled("--env", "wide.py:Wide")
    flags, by_length = {}, ("--reward", "length")
    asked = {
        "group": ("--group_reward", "rewards.py:shortest"),
        "reward": by_length,
        "env": ("--env", "env.py:Asks"),
        "given": (*by_length, "--pass_score", "0.5"),
    }
    for name, more in asked.items():
        assert rescored(*more) == 0
        flags[name] = read_config("new")["config"]["flags"]["pass_score"]
        shutil.rmtree("new")
    assert flags == {"group": 10.0, "reward": None, "env": None, "given": 0.5}
    entries = [{"env": "wide.py:Wide", "data": "tasks.jsonl"}, {"env": "env.py:Asks", "data": "tasks.jsonl"}]
    (place / "both.json").write_text(json.dumps(entries))
    shutil.rmtree("old")
    sampled("--env", "both.json", "--data", "None")
    assert rescored("--group_reward", "rewards.py:shortest") == 0
    assert read_config("new")["config"]["pass_scores"] == read_config("old")["config"]["pass_scores"]


def test_a_flag_with_its_default_value_takes_the_place_of_the_runs(place):
    sampled("--concurrency", 3)
    assert rescored("--concurrency", 64) == 0
    assert read_config("new")["config"]["flags"]["concurrency"] == 64


def test_the_default_folder_says_that_the_run_is_rescored(place):
    sampled()
    assert main(["rescore", "old", "--progress", "none"]) == 0
    assert [path.name.rpartition("-20")[0] for path in Path("runs").iterdir()] == ["rescored-env-tiny-math"]


def test_an_answer_is_given_once_to_an_agent_that_asks_the_same_more_often(place):
    (place / "agent.py").write_text(OWN_LOOP.replace('["First?", "Second?", QUESTION]', "[QUESTION] * 2"))
    sampled("--env", "agent.py:Agent")
    assert rescored() == 0
    assert errors("new") == {}
    shutil.rmtree("new")
    assert rescored(*version("[QUESTION] * 2", "[QUESTION] * 3", "agent.py:Agent")) == 0
    assert len(errors("new")) == 6


def test_an_episode_whose_group_was_not_graded_keeps_its_stop_reason(place):
    (place / "rewards.py").write_text(REWARDS.replace("best = min", "raise ValueError; best = min"))
    sampled("--max_turns", 1, "--group_reward", "rewards.py:shortest", "--max_error_share", 1)
    assert {each.error.where for each in episodes("old").values()} == {"group_reward"}
    (place / "right.py").write_text(REWARDS)
    assert rescored("--group_reward", "right.py:shortest") == 0
    assert {each.stop_reason for each in episodes("new").values()} == {"max_turns"}
