"""EnvRollout without TRL: a trainer's arguments and a scripted engine; tests/peers has TRL's own trainer."""

import asyncio
import math
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import Completion, Limits, StepResult
from agentenv.engines.scripted import ScriptedEngine
from agentenv.engines.vllm.http import VLLMHTTPEngine
from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.interop import trl as rollout
from agentenv.interop.hosted import GatheringEngine
from agentenv.interop.trl import EnvRollout, dataset, reward
from agentenv.testing.tokenizers import CharTokenizer

ROWS = [{"prompt": "one", "label": "1"}, {"prompt": "two", "label": "2"}]


class Guess(AgentInstance):
    """Pays 1.0 for the label, 0.25 for the word "half" and goes on; breaks on "bang"."""

    async def reset(self, states):
        self.label = states["label"]
        return states

    async def step(self, states):
        if states["action_text"] == "bang":
            raise RuntimeError("bang")
        if states["action_text"] == "half":
            return StepResult("more", reward=0.25)
        return StepResult(reward=float(states["action_text"] == self.label), terminated=True)


class Short(Guess):
    """Needs one turn, and few tokens."""

    max_turns = 1
    max_length = 80


class Tokenizer(CharTokenizer):
    pad_token_id = None
    name_or_path = ""


def trainer_with(**args):
    tokenizer = Tokenizer()
    known = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
        "generation_kwargs": None, "use_vllm": False, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False,
        "vllm_tensor_parallel_size": 1, "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0",
        "vllm_server_port": 8000, "mask_truncated_completions": False, "seed": 42,
    }  # fmt: skip
    return SimpleNamespace(
        args=SimpleNamespace(**{**known, **args}), processing_class=tokenizer, eos_token_ids=[tokenizer.eos_token_id],
        accelerator=SimpleNamespace(process_index=0), model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0), reward_funcs=[reward], reward_func_names=["reward"],
    )  # fmt: skip


@pytest.fixture
def roll(monkeypatch):
    """Runs prompts of the two rows against a script."""

    def run(script, prompts=None, trainer=None, engine=None, env=Guess, rows=ROWS, **options):
        trainer = trainer or trainer_with()

        @asynccontextmanager
        async def scripted(_):
            yield engine or ScriptedEngine(script, trainer.processing_class, logprob=-0.5)

        monkeypatch.setattr(rollout, "_engine", scripted)
        options = {"limits": Limits(max_turns=2), **options}
        made = EnvRollout(env, rows, **options)
        return made(prompts or [row["prompt"] for row in dataset(ROWS)], trainer)

    return run


def test_a_dataset_carries_each_tasks_id_in_its_last_message():
    rows = dataset(
        [*ROWS, {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "id": "z"}]
    )
    assert [row["prompt"][-1]["task_id"] for row in rows] == ["000000", "000001", "z"]
    assert [message["role"] for message in rows[2]["prompt"]] == ["system", "user"]
    assert rows[0]["prompt"][-1]["content"] == "one"


def test_rows_without_the_label_that_the_environment_needs_are_refused():
    with pytest.raises(DataError, match="row 1: expected key 'label'"):
        len(EnvRollout(Guess, [{"prompt": "q", "answer": "1"}]).tasks)


def test_rows_come_in_the_order_of_the_prompts_with_the_reward_of_each(roll):
    prompts = [dataset(ROWS)[i]["prompt"] for i in (1, 1, 0)]
    out = roll(["2"], prompts)
    assert out["reward"] == [1.0, 1.0, 0.0]
    assert [name.partition("/")[0] for name in out["episode_id"]] == ["000001", "000001", "000000"]
    assert {len(values) for values in out.values()} == {3}
    assert reward([None] * 3, **out) == [1.0, 1.0, 0.0]


def test_observations_are_off_the_mask_and_turn_rewards_are_summed(roll):
    out = roll(["half", "1"])
    assert out["reward"] == [1.25, 0.25]
    assert out["turn_scores"] == [[0.25, 1.0], [0.25, 0.0]]
    for ids, mask, logprobs in zip(out["completion_ids"], out["env_mask"], out["logprobs"], strict=True):
        assert len(ids) == len(mask) == len(logprobs)
        assert 0 in mask
        assert all(value == (-0.5 if chosen else 0.0) for value, chosen in zip(logprobs, mask, strict=True))


def test_a_failed_episode_is_a_masked_token_without_a_reward(roll):
    tokenizer = Tokenizer()
    out = roll(lambda request: "bang" if "one" in request.prompt else "2")
    assert (out["reward"], out["failed"]) == ([None, 1.0], [True, False])
    assert (out["completion_ids"][0], out["env_mask"][0], out["logprobs"][0]) == ([tokenizer.eos_token_id], [0], [0.0])
    assert "one" in tokenizer.decode(out["prompt_ids"][0])
    assert out["stop_reason"] == ["error", "terminated"]


def num_spans(turn_spans, log_extra, **columns):
    log_extra("spans", turn_spans)
    return [float(len(spans)) for spans in turn_spans]


class Awaited:
    async def __call__(self, turn_spans, log_extra, **columns):
        return num_spans(turn_spans, log_extra)


@pytest.mark.parametrize("function", [num_spans, Awaited(), partial(Awaited())])
def test_reward_functions_do_not_get_failed_episodes_which_have_no_value_and_whose_share_is_logged(roll, function):
    def told_by(script):
        given, trainer, told = [function], trainer_with(), {}
        trainer.reward_funcs, trainer.reward_func_names = given, ["function"]
        for _ in range(2):  # of each step
            out = roll(script, trainer=trainer)
        log = {"log_metric": told.__setitem__, "log_extra": told.__setitem__}
        values = trainer.reward_funcs[0](completions=[None] * 2, trainer_state=None, **log, **out)
        assert given == [function]
        return (asyncio.run(values) if asyncio.iscoroutine(values) else values), told

    values, told = told_by(lambda request: "bang" if "one" in request.prompt else "2")
    assert values == [None, 1.0]
    assert told == {"failed": 0.5, "truncated": 0.0, "spans": [None, [[0, 2]]]}
    assert told_by(["bang"]) == ([None, None], {"failed": 1.0, "truncated": 0.0})  # it was not called


def test_a_reward_function_with_too_few_values_is_named(roll):
    trainer = trainer_with()
    trainer.reward_funcs, trainer.reward_func_names = [lambda **columns: []], ["none"]
    out = roll(["1"], trainer=trainer)
    with pytest.raises(ContractError, match="expected 2 values of the reward function 'none', got 0"):
        trainer.reward_funcs[0](log_metric=lambda *_: None, log_extra=None, **out)


def test_the_finish_reason_is_that_of_the_last_action_whatever_ended_the_episode(roll):
    out = roll(["half"], limits=Limits(max_length=60))
    assert (out["stop_reason"], out["finish_reason"]) == (["max_length"] * 2, ["stop"] * 2)


def test_an_episode_that_a_slow_step_lost_has_failed_and_is_not_truncated(roll):
    class Slow(Guess):
        async def step(self, states):
            await asyncio.sleep(60)

    out = roll(["1"], env=Slow, limits={"step_timeout_s": 0.01})
    assert (out["stop_reason"], out["failed"], out["truncated"]) == (["step_timeout"] * 2, [True] * 2, [False] * 2)


def test_a_reward_model_is_refused(roll):
    trainer = trainer_with()
    trainer.reward_funcs, trainer.reward_func_names = [reward, SimpleNamespace(forward=len)], ["reward", "judge"]
    with pytest.raises(ConfigError, match="expected reward functions, got the model 'judge'"):
        roll(["1"], trainer=trainer)


def test_an_episode_that_fails_before_its_first_token_has_a_row_too(roll):
    out = roll(["1"], limits=Limits(max_length=2))
    assert (out["failed"], out["env_mask"]) == ([True, True], [[0], [0]])
    assert all(out["prompt_ids"])


def test_so_many_failures_in_a_row_end_the_training(roll):
    with pytest.raises(InfraError, match=r"EnvRollout: expected an episode to train on.*bang.*in a row: 2"):
        roll(["bang"], max_failed_in_a_row=2)


def test_truncated_episodes_are_trained_on_by_default(roll):
    out = roll(["half"])
    assert (out["truncated"], out["reward"]) == ([True, True], [0.5, 0.5])
    assert all(1 in mask for mask in out["env_mask"])


def test_mask_truncated_completions_masks_what_we_cut_although_it_ends_with_an_eos(roll):
    out = roll(["half"], trainer=trainer_with(mask_truncated_completions=True))
    eos = Tokenizer().eos_token_id
    assert [ids[-1] for ids in out["completion_ids"]] == [eos, eos]
    assert not any(any(mask) for mask in out["env_mask"])


def test_mask_truncated_completions_keeps_an_episode_that_ends_without_an_eos(roll):
    tokenizer = Tokenizer()
    cut = Completion(tuple(tokenizer.encode("1")), "length", logprobs=(-0.5,))
    trainer = trainer_with(mask_truncated_completions=True)
    out = roll([cut], trainer=trainer)
    assert out["truncated"] == [False, False]
    assert [ids[-1] for ids in out["completion_ids"]] == [tokenizer.eos_token_id] * 2
    assert ([mask[-2:] for mask in out["env_mask"]], out["logprobs"]) == ([[1, 0]] * 2, [[-0.5, 0.0]] * 2)
    assert roll([cut])["env_mask"] == [[1], [1]]


def test_limits_that_are_not_named_are_those_of_the_class(roll):
    for limits, turns in ((None, 1), ({"max_length": 200}, 1), ({"max_turns": 2}, 2), (Limits(max_turns=2), 2)):
        assert {len(each) for each in roll(["half"], env=Short, limits=limits)["turn_scores"]} == {turns}
    (cut, _) = roll(["x" * 100], env=Short, limits=None)["completion_ids"]
    assert len(cut) < 80


def test_every_row_has_the_same_columns_whatever_happened(roll):
    out = roll(lambda request: "bang" if "one" in request.prompt else "half")
    assert {"failed", "truncated", "forced_tokens", "turn_spans", "policy_versions"} <= set(out)
    assert {len(values) for values in out.values()} == {2}


def test_reward_functions_get_the_actions_the_label_and_the_metadata(roll):
    rows = [{**row, "level": n} for n, row in enumerate(ROWS)]
    script = lambda request: "bang" if "one" in request.prompt else "half"  # noqa: E731
    out = roll(script, [row["prompt"] for row in dataset(rows)], rows=rows)
    assert (out["actions"], out["label"]) == ([None, ["half", "half"]], ["1", "2"])
    assert [metadata["level"] for metadata in out["metadata"]] == [0, 1]
    tokenizer, spans = Tokenizer(), out["turn_spans"][1]
    sampled = [tokenizer.decode(out["completion_ids"][1][start:end]) for start, end in spans]
    assert sampled == ["half<|im_end|>"] * 2


def test_versions_of_the_weights_are_trls_step_at_generation(roll):
    trainer = trainer_with()
    trainer.state.global_step = 7
    (row, _) = zip(
        *(roll(["half", "1"], trainer=trainer)[name] for name in ("policy_versions", "env_mask")), strict=True
    )
    assert row[0] == [7 if chosen else -1 for chosen in row[1]]


def test_siblings_share_the_environments_seed_and_no_two_calls_repeat_a_sampling_seed(roll):
    seeds = []

    class Seeded(Guess):
        async def reset(self, states):
            seeds.append(states["seed"])
            return await super().reset(states)

    engine = ScriptedEngine(["1"], Tokenizer(), logprob=-0.5)
    prompts = [dataset(ROWS)[0]["prompt"]] * 2
    roll(None, prompts, engine=engine, env=Seeded)
    assert len(set(seeds)) == 1
    assert len({request.sampling.seed for request in engine.requests}) == 2


async def test_it_runs_inside_a_running_loop_as_in_a_notebook(roll):
    assert roll(["1"])["reward"] == [1.0, 0.0]


def test_a_prompt_without_a_known_id_is_refused(roll):
    for prompt in ("one", [{"role": "user", "content": "one"}], [{"role": "user", "content": "x", "task_id": "7"}]):
        with pytest.raises(DataError, match=r"expected the id of one of its rows.*agentenv\.interop\.trl\.dataset"):
            roll(["1"], [prompt])


def test_a_row_of_another_data_set_is_refused_although_it_has_the_same_number(roll):
    for other in ({"prompt": "one, too", "label": "1"}, {"prompt": "one", "label": "3"}, {**ROWS[0], "seed": 4}):
        with pytest.raises(DataError, match=r"with the content of task '000000', got another"):
            roll(["1"], [dataset([other])[0]["prompt"]])
    named = {"prompt": "other", "label": "1", "id": "eval-0"}
    assert roll(["1"], [dataset([named])[0]["prompt"]], rows=[*ROWS, named])["reward"] == [1.0]


def test_a_missing_log_probability_is_refused(roll):
    silent = Completion(tuple(Tokenizer().encode("1")), logprobs=(math.nan,))
    with pytest.raises(DataError, match="expected a log-probability"):
        roll([silent])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.2), ("generation_kwargs", {"num_beams": 2}), ("vllm_enable_sleep_mode", True),
        ("vllm_tensor_parallel_size", 2),
    ],
)  # fmt: skip
def test_sampling_that_no_engine_follows_and_a_vllm_that_sleeps_or_is_split_are_refused(roll, name, value):
    with pytest.raises(ConfigError, match=f"expected {name}="):
        roll(["1"], trainer=trainer_with(use_vllm=name.startswith("vllm"), **{name: value}))


def test_chat_options_are_also_taken_by_name(roll):
    for options, is_message in (({}, True), ({"text_feedback": "raw"}, False)):
        completion = Tokenizer().decode(roll(["half"], chat_options=options)["completion_ids"][0])
        assert ("user" in completion) is is_message


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"env": "no_such"}, "environment: expected"), ({"env_kwargs": {"typo": 1}}, "expected arguments of Guess"),
        ({"rows": [{"label": "1"}]}, "prompt"), ({"limits": 3}, r"EnvRollout\.limits: expected Limits"),
        ({"limits": {"max_turn": 2}}, r"EnvRollout\.limits: .*Did you mean 'max_turns'"),
        ({"env_kwargs": '{"typo": 1}'}, "expected arguments of Guess"),
        ({"env": [{"role": "user"}], "rows": trainer_with()}, r"EnvRollout\.env: .*Pass rollout_func=EnvRollout\(env"),
        ({"max_tokens": -1}, r"EnvRollout\.max_tokens: expected"), ({"max_tokens": "64"}, "max_tokens: expected"),
        ({"max_retries": -1}, r"EnvRollout\.max_retries: expected"), ({"max_retries": None}, "max_retries: expected"),
        ({"max_failed_in_a_row": 0}, r"EnvRollout\.max_failed_in_a_row: expected"),
        ({"chat_options": {"histroy": "keep"}}, r"EnvRollout\.chat_options: .*Did you mean 'history'"),
        ({"chat_options": {"history": "rerender"}}, "history='keep'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_the_first_step(wrong, error):
    with pytest.raises((ConfigError, DataError), match=error):
        EnvRollout(**{"env": Guess, "rows": ROWS, **wrong})


async def test_the_engine_follows_the_trainers_arguments():
    async with rollout._engine(trainer_with(use_vllm=True)) as engine:
        assert isinstance(engine, GatheringEngine)
    server = {"use_vllm": True, "vllm_mode": "server"}
    async with rollout._engine(trainer_with(**server)) as engine:
        assert isinstance(engine, VLLMHTTPEngine)
        assert engine.base_url == "http://0.0.0.0:8000"
    async with rollout._engine(trainer_with(**server, vllm_server_base_url="http://host:1234/v1")) as engine:
        assert engine.base_url == "http://host:1234"
