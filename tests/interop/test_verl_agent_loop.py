"""EnvAgentLoop without verl: its arguments and a scripted server; tests/peers has verl's own workers."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.core.types import Task
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.interop.hosted import task_of
from agentenv.interop.verl import agent_loop
from agentenv.interop.verl.agent_loop import EnvAgentLoop, check, dataset
from agentenv.testing.tokenizers import CharTokenizer
from tests.interop import test_trl_rollout as trl_rollout
from tests.interop.protos import stand_in
from tests.interop.test_trl_rollout import Guess

TARGET = "agentenv.interop.verl.agent_loop.EnvAgentLoop"
PARAMS = {"temperature": 0.5, "logprobs": True}
ROW = {"raw_prompt": [{"role": "user", "content": "one"}], "reward_model": {"ground_truth": "1"}, "uid": "u"}


class GuessLabel(Guess):
    """Takes an argument."""

    def __init__(self, words=()):
        self.words = words


class GuessNothing(Guess):
    """Has rows without a label."""

    needs_label = False


class Server:
    """verl's client: answers texts in turn, and keeps what it was asked."""

    def __init__(self, *texts, ends=True, **facts):
        self.tokenizer, self.texts, self.ends, self.asked = CharTokenizer(), list(texts), ends, []
        self.facts = {"stop_reason": "completed", "extra_fields": {"global_steps": 3}, **facts}

    async def generate(self, session, *, prompt_ids, sampling_params, **more):
        self.asked.append((session, prompt_ids, sampling_params, more))
        ids = self.tokenizer.encode(self.texts.pop(0)) + [self.tokenizer.eos_token_id] * self.ends
        ids = ids[: sampling_params["max_tokens"]]
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids), **self.facts)


@pytest.fixture
def run(monkeypatch):
    """Runs a row against a server."""
    loop = {"AgentLoopOutput": SimpleNamespace, "AgentLoopMetrics": SimpleNamespace}
    packages = {"verl": {}, "verl.experimental": {}, "verl.experimental.agent_loop": {}}
    stand_in(monkeypatch, {**packages, "verl.experimental.agent_loop.agent_loop": loop})

    async def one(server, row=ROW, budgets=(64, 64), **options):
        return await loop_with(server, budgets, **options).run(PARAMS, **row)

    return one


def loop_with(server, budgets=(64, 64), env=f"{__file__}:GuessLabel", **options):
    rollout = SimpleNamespace(prompt_length=budgets[0], response_length=budgets[1])
    config = SimpleNamespace(data={"seed": 1}, actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return EnvAgentLoop(
        trainer_config=SimpleNamespace(config=config), server_manager=server, tokenizer=server.tokenizer,
        env=env, name="agentenv", processor=None, hf_model_type="qwen2", tools=object(), **options,
    )  # fmt: skip


async def test_an_output_has_the_tokens_the_reward_and_the_facts_of_the_episode(run):
    server = Server("half", "1")
    made = await run(server)
    first, second = server.asked
    assert made.prompt_ids == first[1]
    assert made.prompt_ids + made.response_ids[: len(second[1]) - len(first[1])] == second[1]
    assert made.reward_score == 1.25
    assert made.extra_fields["turn_scores"] == [0.25, 1.0]
    assert made.extra_fields["reward_extra_info"] == {"score": 1.25, "acc": 1.25, "truncated": 0.0}
    assert (made.extra_fields["min_global_steps"], made.extra_fields["max_global_steps"]) == (3, 3)
    assert {value for value, chosen in zip(made.response_logprobs, made.response_mask, strict=True) if chosen} == {-0.5}
    assert 0 in made.response_mask


@pytest.mark.parametrize(
    "columns", [{"label": "1"}, {"reward_model": {"ground_truth": None}}, dataset([{"prompt": "one"}])[0]]
)
async def test_a_row_without_a_label_is_refused_where_one_is_needed(run, columns):
    row = {"raw_prompt": ROW["raw_prompt"], **columns, "uid": "u"}
    with pytest.raises(DataError, match=r"^row (u|000000): expected a label, got none in the columns raw_prompt, "):
        await run(Server("1"), row)
    assert (await run(Server("1"), row, env=f"{__file__}:GuessNothing")).reward_score == 0.0


async def test_an_episode_that_its_time_limit_cut_is_trained_on_and_logged(run, caplog):
    server = Server("half", "1", "1")
    answer = server.generate

    async def generate(*args, **kwargs):
        if server.asked:
            await asyncio.Event().wait()  # until the limit
        return await answer(*args, **kwargs)

    server.generate = generate
    made = await run(server, {**ROW, "session_id": 0}, limits={"episode_timeout_s": 0.2})
    assert [(each.reward_score, each.extra_fields["stop_reason"]) for each in made] == [(0.25, "episode_timeout")]
    (record,) = caplog.records
    assert record.getMessage() == "EnvAgentLoop: u/0 ended after episode_timeout_s=0.2"


async def test_one_session_asks_with_verls_parameters_and_its_priority(run):
    server = Server("half", "1")
    await run(server, {**ROW, "priority": 5}, max_tokens=20)
    assert len({session for session, *_ in server.asked}) == 1
    assert [params["max_tokens"] for _, _, params, _ in server.asked] == [20, 20]
    assert all(params.items() >= PARAMS.items() and more == {"priority": 5} for _, _, params, more in server.asked)


async def test_a_response_never_outgrows_verls_budget_whatever_the_prompt_leaves_free(run):
    made = await run(Server("half", "x" * 90), budgets=(64, 12))
    assert len(made.response_ids) <= 12
    assert made.extra_fields["reward_extra_info"]["truncated"] == 1.0
    assert made.extra_fields["turn_scores"][0] == 0.25


async def test_limits_that_are_not_named_are_those_of_the_class_and_verls_where_they_are_less(run):
    env = f"{Path(trl_rollout.__file__)}:Short"
    for limits, turns in ((None, 1), ({"max_turns": 2}, 2)):
        made = await run(Server("half", "half"), env=env, limits=limits)
        assert len(made.extra_fields["turn_scores"]) == turns
    lengths = []
    for budgets in ((64, 12), (64, 64)):
        made = await run(Server("x" * 90), budgets=budgets, env=env)
        lengths.append(len(made.response_ids))
        assert len(made.prompt_ids) + lengths[-1] <= 80
    assert lengths[0] == 12 < lengths[1]


async def test_an_action_that_verl_cut_is_a_length_though_its_server_says_completed(run):
    made = await run(Server("x" * 90), budgets=(64, 8))
    assert (len(made.response_ids), made.extra_fields["finish_reason"]) == (8, "length")


async def test_an_action_that_ends_at_the_last_token_of_the_budget_is_complete(run):
    made = await run(Server("1"), budgets=(64, 2))
    assert (len(made.response_ids), made.extra_fields["finish_reason"], made.reward_score) == (2, "stop", 1.0)


async def test_a_prompt_beyond_verls_budget_is_refused_by_its_setting(run):
    with pytest.raises(InfraError, match=r"rollout.prompt_length=2 tokens, got \d+"):
        await run(Server("1"), budgets=(2, 64))


@pytest.mark.parametrize("server", [Server("bang"), Server("1", stop_reason="error")])
async def test_a_failed_episode_raises_and_is_no_reward(run, server, monkeypatch):
    original = agent_loop.run_planned
    monkeypatch.setattr(agent_loop, "run_planned", lambda *given: original(*given, max_retries=0))
    with pytest.raises(InfraError, match="EnvAgentLoop: expected an episode to train on"):
        await run(server)


async def test_the_v1_trainer_gets_a_list_and_its_siblings_their_own_names(run):
    made = [await run(Server("1"), {**ROW, "session_id": i}) for i in range(2)]
    assert [[each.extra_fields["episode_id"] for each in outputs] for outputs in made] == [["u/0"], ["u/1"]]


async def test_rows_of_a_worker_of_v0_have_their_own_names_with_and_without_verls_priority(run):
    made = [await run(Server("1"), {**ROW, **more}) for more in ({}, {}, {"priority": 5})]
    first, second, third = (each.extra_fields["episode_id"] for each in made)
    assert first != second
    assert third == "u/5"


async def test_the_v0_trainer_refuses_several_segments(run, monkeypatch):
    original = agent_loop.to_records
    monkeypatch.setattr(agent_loop, "to_records", lambda trajectory: original(trajectory) + original(trajectory))
    with pytest.raises(ContractError, match=r"one segment with actions, got 2.*use_v1=true"):
        await run(Server("1"))
    assert len(await run(Server("1"), {**ROW, "session_id": 0})) == 2


def test_max_length_is_verls_to_set():
    with pytest.raises(ConfigError, match=r"EnvAgentLoop.limits: expected no max_length"):
        loop_with(Server(), limits={"max_length": 3})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"limits": {"max_turns": "3"}}, r"limits: .*Limits\.max_turns: expected an integer >= 1, got '3'\. Change"),
        ({"limits": {"max_turn": 3}}, r"limits: expected options among .*max_turns.*got 'max_turn'\. Did you mean"),
        ({"limits": 3}, r"limits: expected Limits\(…\), or an object with some of its fields, got 3"),
        ({"chat_options": {"history": "x"}}, r"chat_options: .*ChatOptions\.history: expected one of keep, rerender"),
        ({"max_tokens": 0}, r"max_tokens: expected None or an integer >= 1, got 0"),
        ({"env": None}, r"^EnvAgentLoop: expected an environment's name in env .*, got None and \{\}"),
        ({"env_kwargs": ["x"]}, r"^EnvAgentLoop: .* an object in env_kwargs, got .*GuessLabel' and \['x'\]"),
        ({"env_kwargs": {"word": 1}}, r"^env_kwargs: expected arguments of GuessLabel \['words'\], got \{'word': 1\}"),
    ],
)
def test_a_value_that_its_key_does_not_take_is_refused_by_its_field(entry, message):
    with pytest.raises(ValueError, match=message):
        loop_with(Server(), **entry)


@pytest.mark.parametrize("entry", [{"max_token": 5}, {"limit": {"max_turns": 2}}, {"max_turns": 2}, {"env_kwarg": {}}])
def test_a_key_of_the_entry_that_means_nothing_is_refused(entry):
    known = "env, env_kwargs, limits, max_tokens, chat_options"
    with pytest.raises(ConfigError, match=f"^EnvAgentLoop: expected keys among {known}, got {next(iter(entry))!r}"):
        loop_with(Server(), **entry)


@pytest.mark.parametrize(
    ("entry", "row", "message"),
    [
        ({}, {}, None),
        (
            {"max_token": 3},
            {},
            r"loops.yaml, entry 'mine': EnvAgentLoop: .*'max_token'. Did you mean 'max_tokens'",
        ),
        ({"_target_": ""}, {}, r"loops.yaml: expected a list of entries with name and _target_, got {'name': 'mine'"),
        ({"name": 3}, {}, r"loops.yaml: expected a list of entries with name and _target_, got {'name': 3"),
        ({"_target_": f"{TARGET}s"}, {}, rf"loops.yaml, entry 'mine': expected .*Loops'. Did you mean '{TARGET}'"),
        ({"_target_": "no.Loop"}, {}, None),
        ({}, {"agent_name": "tool_agent"}, None),
        (
            {},
            {"agent_name": None},
            r"row 1: expected an agent_name among .*, got None. Fill the column in all rows, or in none",
        ),
        ({"name": "other"}, {}, r"train.parquet, row 1: expected an agent_name among .*, got 'mine'"),
        ({}, {"agent_name": "agentenv/math_rety"}, r"row 1: .*rety'. Did you mean 'agentenv/math_retry'"),
        ({}, {"agent_name": "agentenv/math_retry"}, r"^row 000000: expected a label, got none"),
    ],
)
def test_entries_and_rows_are_checked_without_verl(tmp_path, entry, row, message):
    loops, file = tmp_path / "loops.yaml", tmp_path / "train.parquet"
    given = {"name": "mine", "_target_": TARGET, "env": f"{__file__}:GuessNothing", **entry}
    loops.write_text(json.dumps([{key: value for key, value in given.items() if value}]))
    rows = dataset([{"prompt": "one"}])
    for name, value in row.items():
        rows = rows.add_column(name, [value])
    rows.to_parquet(file)
    with pytest.raises((ConfigError, DataError), match=message) if message else nullcontext():
        check(loops, [file], "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a list of entries with name and _target_, got None"),
        ("name: mine", "expected a list of entries with name and _target_, got {'name': 'mine'}"),
        ("[", "expected YAML, got an error"),
        ("[{name: a, _target_: b.C}, {name: a, _target_: d.E}]", "expected different names, got two entries 'a'"),
    ],
)
def test_a_file_of_entries_that_verl_would_misread_is_refused(tmp_path, text, message):
    (tmp_path / "loops.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"loops\.yaml: {message}"):
        check(tmp_path / "loops.yaml", [], "mine")


def test_the_ground_truth_of_a_text_is_the_text():
    assert dataset([Task("q", "Austen")])[0]["reward_model"]["ground_truth"] == "Austen"


def test_a_row_of_the_dataset_is_the_whole_task_again():
    label, metadata = {"any": [1, None]}, {"depth": [{"x": 1.5}]}
    rows = list(dataset([Task("one", label, "a", metadata=metadata, seed=4), Task("two", task_id="b")]))
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert json.loads(rows[0]["reward_model"]["ground_truth"]) == label
    back = task_of([], rows[0], "u", EnvSource(Guess))
    assert back == Task([{"role": "user", "content": "one"}], label, "a", metadata=metadata, seed=4)


def test_agent_names_and_data_sources_of_rows_are_verls_columns():
    rows = [{"prompt": "one", "agent_name": "a", "data_source": "x"}, {"prompt": "two", "agent_name": "b"}]
    made = dataset(rows)
    assert (made["agent_name"][:], made["data_source"][:]) == (["a", "b"], ["x", "agentenv"])
    assert dataset(rows, data_source="mine")["data_source"][:] == ["mine", "mine"]
    assert "agent_name" not in dataset([{"prompt": "one"}]).column_names
    with pytest.raises(DataError, match=r"^interop.verl: expected agent_name in every row or in none, got none in "):
        dataset([*rows, {"prompt": "three"}])


@pytest.mark.parametrize("task", [Task("one", metadata={"x": object()}), Task("one", images=("i",))])
def test_a_task_that_a_row_cannot_hold_is_refused(task):
    with pytest.raises(DataError, match=r"interop.verl: expected"):
        dataset([task])
