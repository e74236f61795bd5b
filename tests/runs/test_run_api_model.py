"""`agentenv run --engine chat`: every environment, what is recorded, what it cost, and who refuses the record."""

import json
import re

import pytest

import agentenv
from agentenv._util.plurals import decimal
from agentenv.core.views import messages_of
from agentenv.engines.chat.engine import ChatEngine
from agentenv.errors import ConfigError, DataError
from agentenv.interop import records as samples
from agentenv.interop.nemo_rl import records as nemo_rl
from agentenv.interop.openrlhf.response import to_response
from agentenv.interop.verl import records as verl
from agentenv.runs.records.directory import read_config, read_trajectories
from agentenv.runs.records.tables import episode_row
from agentenv.training.algorithm.batch import build
from tests.api_model import called, completion, served
from tests.drivers import command, lines, without_times

PRICES = {"the-model": {"input": 2.0, "output": 10.0, "cached_input": 1.0}}
ENVIRONMENTS = [
    "code_sandbox", "guess_number", "gymnasium_text", "math_retry", "reasoning_gym", "rm_chat", "tool_use", "verify"
]  # fmt: skip
REWARD_FUNC = """
def reward_func(queries, prompts, labels):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return [float(label in query[len(prompt):]) for query, prompt, label in zip(queries, prompts, labels)]
"""
OWN_LOOP = """
class Agent:
    async def run(self, context):
        return 1.0
"""


def answer(body):
    """Call the first tool that is offered once, then answer; every request has as many tokens as messages."""
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        return called(("calculator", {"expression": "6 * 7"}))
    message = {"role": "assistant", "content": "It is #### 42", "reasoning": "Six times seven."}
    usage = {"prompt_tokens": len(body["messages"]), "completion_tokens": 3}
    return completion(message) | {"usage": usage}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setattr("agentenv.engines.chat.engine.FIRST_PAUSE_S", 0.001)
    return tmp_path


def run(server, *flags):
    return command(
        ["run", "--engine", "chat", "--base_url", server.base_url, "--model", "the-model", "--progress", "none", *flags]
    )


@pytest.mark.long
@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_every_environment_runs_with_an_api_model(env, place):
    with served(answer) as server:
        more = ("--env_kwargs", '{"reward": "length"}') if env == "rm_chat" else ()
        assert run(server, "--env", env, "--limit", "3", "--out", "out", *more) == 0
    trajectories = list(read_trajectories("out"))
    assert len(trajectories) == 3
    for trajectory in trajectories:
        assert trajectory.error is None
        assert trajectory.reward is not None
        assert [len(segment) for segment in trajectory.segments] == [0]
        assert messages_of(trajectory)[-1]["role"] == "assistant"
        assert trajectory.turns[-1].answer.reasoning == "Six times seven."
        assert "Six times" not in trajectory.turns[-1].action
    if env == "tool_use":
        assert trajectories[0].turns[0].result.info["num_calls"] == 1.0
        assert trajectories[0].turns[0].result.observation[0]["content"] == "42"


@pytest.mark.long
def test_a_run_is_recorded_counted_and_priced_without_the_key(place, capsys):
    with served(answer) as server:
        flags = ("--env", "math_retry", "--limit", "2", "--out", "out", "--prices", json.dumps(PRICES))
        assert run(server, *flags) == 0
    assert server.keys == ["Bearer sk-secret"] * len(server.requests)
    for path in (place / "out").rglob("*"):
        assert path.is_dir() or b"sk-secret" not in path.read_bytes()
    metrics = json.loads((place / "out/metrics.json").read_text())
    num_input = sum(len(body["messages"]) for body in server.requests)
    cost = (2 * num_input + 10 * 3 * len(server.requests)) / 1e6
    assert metrics["cost_usd"] == pytest.approx(cost)
    assert metrics["num_priced"] == 2
    assert metrics["tokens"]["num_input"] == num_input
    assert metrics["tokens"]["num_action"] == 3 * len(server.requests)
    assert f"${decimal(cost, 4)}  (${decimal(cost / 2, 4)} per episode)" in capsys.readouterr().out
    recorded = [turn["answer"] for episode in lines(place / "out") for turn in episode["turns"]]
    assert sum(each["cost_usd"] for each in recorded) == pytest.approx(cost)


@pytest.mark.long
def test_a_run_is_resumed_with_its_flags_another_address_and_prices_of_its_new_answers(place, capsys):
    with served(answer) as server:
        assert run(server, "--env", "math_retry", "--limit", "2", "--out", "whole") == 0
        assert run(server, "--env", "math_retry", "--limit", "2", "--out", "out") == 0
    record = place / "out/trajectories.jsonl"
    record.write_bytes(record.read_bytes().splitlines(keepends=True)[0])
    assert command(["run", "--resume", "--out", "out", "--model", "another", "--progress", "none"]) == 2
    with served(answer) as server:
        others = ["--base_url", server.base_url, "--progress", "none"]
        capsys.readouterr()
        assert command(["run", "--resume", "--out", "out", *others, "--prices", json.dumps(PRICES)]) == 0
    assert "changed on resume: --prices; episodes that have ended keep their cost\n" in capsys.readouterr().err
    assert read_config("out")["config"]["flags"]["prices"] == json.dumps(PRICES), (
        "as a further resume without the flag has them"
    )
    found = lines(place / "out")
    assert [any(turn["answer"]["cost_usd"] for turn in episode["turns"]) for episode in found] == [False, True]
    for turn in found[1]["turns"]:
        turn["answer"]["cost_usd"] = None
    assert without_times(found) == without_times(lines(place / "whole"))


@pytest.mark.long
def test_a_reward_function_judges_text(place):
    (place / "reward.py").write_text(REWARD_FUNC)
    (place / "rows.jsonl").write_text('{"prompt": "6 * 7?", "label": "42"}\n{"prompt": "6 * 8?", "label": "48"}\n')
    with served(answer) as server:
        assert run(server, "--reward_func_path", "reward.py", "--data", "rows.jsonl", "--out", "out") == 0
    assert sorted(each["reward"] for each in lines(place / "out")) == [0.0, 1.0]


@pytest.mark.long
def test_show_and_tables_have_its_text_reasoning_tokens_and_cost(place, capsys):
    with served(answer) as server:
        flags = ("--env", "tool_use", "--limit", "1", "--out", "out", "--prices", json.dumps(PRICES))
        assert run(server, *flags) == 0
    capsys.readouterr()
    assert command(["show", "out", "--where", "cost_usd>0 turn.model=the-model-2026-01-01"]) == 0
    shown = capsys.readouterr().out
    for text in ("[reasoning]", "Six times seven.", "It is #### 42", "<tool_call>", "[tool calculator]", "6 tokens"):
        assert text in shown
    (trajectory,) = read_trajectories("out")
    row = episode_row(trajectory)
    assert (row["num_tokens"], row["policy_version"]) == (6, None)
    assert row["cost_usd"] == sum(turn.answer.cost_usd for turn in trajectory.turns)


@pytest.mark.long
def test_without_any_count_the_policys_cost_is_unknown(place, capsys):
    with served(lambda body: completion("42", usage=None)) as server:
        assert run(server, "--env", "math_retry", "--limit", "2", "--prices", json.dumps(PRICES)) == 0
    assert re.search("policy cost +│ unknown", capsys.readouterr().out)


@pytest.mark.long
def test_readers_of_tokens_say_that_there_are_none(place, capsys):
    with served(answer) as server:
        assert run(server, "--env", "math_retry", "--limit", "1", "--out", "out") == 0
    (trajectory,) = read_trajectories("out")
    readers = {
        "nemo_rl": lambda each: nemo_rl.to_records(each, decode=str),
        "openrlhf": to_response,
        "samples": lambda each: samples(each, "here"),
        "train": lambda each: build([each]),
        "verl": verl.to_records,
    }
    for name, read in readers.items():
        with pytest.raises(DataError, match="recorded by --engine chat, which returns no token ids"):
            pytest.fail(f"{name}: {read(trajectory)}")
    tokens = (["tokens", "show", "out", "0"], ["tokens", "replay", "out"])
    picture = ["view", "out", "--episode", "0", "--svg", "out.svg"]
    for name in (*tokens, picture, ["export", "out", "--to", "verl"], ["export", "out", "--to", "nemo_rl"]):
        assert command(name) == 2
        assert "recorded by --engine chat, which returns no token ids" in " ".join(capsys.readouterr().err.split())
    assert command(["export", "out", "--to", "csv"]) == 0


@pytest.mark.long
async def test_an_engine_from_python_needs_no_other_tokenizer_and_cut_answers_are_counted():
    with served(lambda body: completion("Let me", finish_reason="length")) as server:
        engine = ChatEngine(server.base_url, "the-model")
        found = await agentenv.arollout("verify", engine=engine, limit=2, progress="none")
        await engine.close()
    assert [each.turns[0].action for each in found] == ["Let me"] * 2
    assert found.metrics.num_cut == 2
    assert {each.error for each in found} == {None}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--history", "rerender"), "--history: expected none with --engine chat"),
        (("--tokenizer", "tiny-math"), "--tokenizer: expected none with --engine chat"),
        (("--stop_token_ids", "7"), "--stop_token_ids: expected none with --engine chat"),
        (
            ("--model", "tiny-math"),
            "--model: expected the server's name of a model, got 'tiny-math'. Add --model NAME.",
        ),
        (("--engine", "auto"), "If the server has an API model, add --engine chat."),
        (("--prices", "{}"), "--prices: expected"),
        (("--api_key_env", "NO_SUCH_KEY"), "--api_key_env: expected a key in the environment variable 'NO_SUCH_KEY'"),
        (("--env", "own.py:Agent", "--data", "word_problems"), "got Agent, which has its own loop"),
        (("--base_url", "localhost"), "--base_url: expected an address"),
    ],
)
def test_what_cannot_be_done_without_token_ids_is_refused_before_the_run(flags, message, place, capsys):
    (place / "own.py").write_text(OWN_LOOP)
    env = () if "--env" in flags else ("--env", "math_retry")
    with served(answer) as server:
        url = () if "--base_url" in flags else ("--base_url", server.base_url)
        others = {"--engine": "chat", "--model": "m"}
        more = [word for name, value in others.items() if name not in flags for word in (name, value)]
        assert command(["run", *more, *url, *env, *flags, "--progress", "none"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert server.requests == []


def test_chat_needs_an_address():
    with pytest.raises(ConfigError, match="Add --base_url https://api"):
        agentenv.rollout("math_retry", engine="chat", model="gpt-4o")


def test_train_does_not_know_the_engine(capsys):
    assert command(["train", "--env", "math_retry", "--engine", "chat", "--base_url", "http://localhost/v1"]) == 2
    assert "API models return no token ids to train on" in capsys.readouterr().err
