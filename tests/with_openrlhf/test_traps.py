"""The traps of OpenRLHF's own agent loop and batches, by their number in the project's list, inside OpenRLHF's call.

Each test calls `AgentExecutor.execute` as OpenRLHF 0.10.0 to 0.11.2 do. Not here, since they are the trainer's own,
after the dict was read: 29 (GAE over masked tokens) and 31 (its pass@k wants prompts that are text). 20 and 32 are in
tests/interop, and 24, 28 and 30 in the tests of 10 and 21 to 27. What 18 costs in time is measured in benchmarks/.
"""

import asyncio
import copy
import importlib.util
import itertools
import math
import pickle
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.chat.chat import ChatOptions
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, StepResult
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.interop.openrlhf import AgentExecutor, ResponseDict
from agentenv.testing.tokenizers import CharTokenizer, MergingTokenizer
from tests.chat.families import FAMILIES, load
from tests.peers.where import versions
from tests.with_openrlhf.fakes import DONE, LLM, AsyncLLM, Env, Params, execute, executor, reply, siblings
from tests.with_openrlhf.where import ROOT, needs_openrlhf, python

TOKENIZER = CharTokenizer()
SOUND = {"failed": 0.0, "failed_alone": 0.0}


def sound(response, max_length=200):
    """What OpenRLHF's batches and losses need of any sample; see research: requirements 1 and 7."""
    ids, ranges = response["observation_tokens"], response["action_ranges"]
    assert response.keys() == ResponseDict.__annotations__.keys()
    assert type(ids) is list
    assert all(type(i) is int for i in ids)
    assert len(ids) <= max_length
    assert ranges
    assert ranges[0][0] >= 1
    assert all(start < end for start, end in ranges)
    assert ranges[-1][1] <= len(ids)
    logprobs = response["rollout_log_probs"]
    assert logprobs is None or (len(logprobs) == len(ids) and all(map(math.isfinite, logprobs)))
    assert type(response["reward"]) is type(response["scores"]) is float
    assert type(response["truncated"]) is bool
    assert all(type(value) is float for value in response["extra_logs"].values())
    return response


def failed(response):
    return response["extra_logs"]["failed"] == 1.0


async def test_01_siblings_with_prompts_of_different_lengths_share_sampling_parameters_unharmed():
    lengths = iter([1, 30, 60, 90])

    class Agent(AgentInstance):
        async def reset(self, states):
            return {"observation": "p" * next(lengths)}

        async def step(self, states):
            return DONE

    made, llm, params = type("Executor", (AgentExecutor,), {"agent_cls": Agent})(), LLM("hi"), Params()
    responses = await siblings(made, llm, params=params)
    assert [len(prompt) for prompt, _ in llm.requests] == [1, 30, 60, 90]
    assert [sampling.max_tokens for _, sampling in llm.requests] == [199, 170, 140, 110]
    assert [response["action_ranges"] for response in responses] == [[(n, n + 3)] for n in (1, 30, 60, 90)]
    assert params == Params()


async def test_02_what_one_episode_changes_in_the_sampling_reaches_no_sibling():
    params = Params()
    cool = reply("a", sampling_params=Params(temperature=0.25))
    llm = LLM("hi")
    await asyncio.gather(
        execute(executor(cool, reply(done=True)), llm, params=params),
        execute(executor(reply("b"), reply(done=True)), llm, params=params),
    )
    second = {ids[-1]: sampling.temperature for ids, sampling in llm.requests[2:]}
    assert second == {TOKENIZER.encode("a")[0]: 0.25, TOKENIZER.encode("b")[0]: 1.0}
    assert params == Params()


async def test_03_max_new_tokens_is_a_cap_of_every_turn():
    response = sound(
        await execute(executor(reply("a"), limits=Limits(max_turns=3)), LLM("x" * 99), params=Params(max_tokens=8))
    )
    assert [end - start for start, end in response["action_ranges"]] == [8, 8, 8]


async def test_03_min_tokens_never_pass_what_a_turn_may_have():
    llm = LLM("hi")
    await execute(executor(DONE), llm, params=Params(min_tokens=500, max_tokens=8))
    assert (llm.requests[0][1].min_tokens, llm.requests[0][1].max_tokens) == (8, 8)


async def test_04_max_new_tokens_as_large_as_the_context_still_generates():
    llm = LLM("hi")
    response = sound(await execute(executor(DONE), llm, params=Params(max_tokens=500), max_length=20), 20)
    assert (llm.requests[0][1].max_tokens, response["reward"]) == (14, 1.0)


async def test_05_empty_actions_and_feedback_end_by_the_limit_of_turns():
    response = sound(await execute(executor(reply(""), limits=Limits(max_turns=5)), LLM("")))
    assert len(response["action_ranges"]) == 5


async def test_06_the_environment_learns_that_an_action_was_cut():
    made = executor(reply(done=True))
    await execute(made, LLM("x" * 99), params=Params(max_tokens=8))
    assert made.agents[0].seen[0]["finish_reason"] == "length"


async def test_07_the_text_that_the_environment_sees_is_that_of_the_tokens():
    made = executor(reply("a"), reply(done=True))
    response = await execute(made, LLM("hi", text="NOT THE TOKENS' TEXT"))
    first, second = made.agents[0].seen
    assert (first["action_text"], first["action_ids"][-1]) == ("hi", TOKENIZER.eos_token_id)
    before = response["observation_tokens"][: response["action_ranges"][1][0]]
    assert second["observation_text"] == TOKENIZER.decode(before) == "prompthi<|im_end|>a"


@pytest.mark.parametrize("max_tokens", [8, 2], ids=["sampled", "cut"])
async def test_07_a_close_that_the_file_adds_appears_once(max_tokens):
    """It is shown the action without its close, and cannot know whether that was sampled."""

    def step(states):
        assert "<|im_end|>" not in states["action_text"]
        return reply("<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n")

    made = executor(step, reply(done=True))
    response = sound(await execute(made, LLM("hi!!"), params=Params(max_tokens=max_tokens)))
    said = "hi!!" if max_tokens == 8 else "hi"
    text = TOKENIZER.decode(response["observation_tokens"])
    assert text.startswith(f"prompt{said}<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n{said}")


async def test_08_actions_are_never_tokenized_again():
    merging = MergingTokenizer()
    apart = [merging.encode(letter)[0] for letter in "abc"]
    assert merging.encode("abc") != apart
    llm = LLM("abc", token_ids=[*apart, 0])
    made = executor(reply("ab"), reply(done=True))
    response = sound(await execute(made, llm, tokenizer=merging))
    assert [response["observation_tokens"][start:end] for start, end in response["action_ranges"]] == [[*apart, 0]] * 2
    assert made.agents[0].seen[0]["action_text"] == "abc"
    ids = response["observation_tokens"]
    assert [asked for asked, _ in llm.requests] == [ids[:start] for start, _ in response["action_ranges"]]


async def test_09_feedback_of_the_last_step_is_not_appended():
    response = sound(await execute(executor(reply("y" * 500, rewards=1.0, done=True)), LLM("hi")))
    assert response["action_ranges"][-1][1] == len(response["observation_tokens"])
    assert (response["reward"], response["truncated"]) == (1.0, False)


@pytest.mark.parametrize("num", [191, 192, 500])
async def test_10_feedback_that_does_not_fit_truncates_and_the_environment_has_the_last_word(num):
    class Agent(Env):
        def __init__(self):
            super().__init__(reply("y" * num, rewards=0.25))

        async def on_truncate(self, states):
            return StepResult(reward=0.5)

    response = sound(await execute(type("Executor", (AgentExecutor,), {"agent_cls": Agent})(), LLM("hi")))
    assert (response["reward"], len(response["action_ranges"])) == (0.75, 1)


async def test_11_every_response_says_whether_its_last_action_was_cut():
    params = Params(max_tokens=2)
    done = await execute(executor(reply("a"), reply(done=True)), LLM("hi"))
    cut = await execute(executor(reply("a"), reply(done=True)), LLM("hi!"), params=params)
    out_of_turns = await execute(executor(reply("a"), limits=Limits(max_turns=2)), LLM("hi"))
    by_environment = await execute(executor(StepResult(truncated=True)), LLM("hi"))
    responses = (done, cut, out_of_turns, by_environment)
    assert [sound(r)["truncated"] for r in responses] == [False, True, False, False]


async def test_turns_are_limited_by_the_environment_unless_the_executor_has_limits():
    class Agent(AgentInstance):
        max_turns = 3

        async def step(self, states):
            return StepResult("a")

    made = [executor(agent_cls=Agent), executor(agent_cls=Agent, limits=Limits(max_turns=4))]
    assert [len((await execute(each, LLM("hi")))["action_ranges"]) for each in made] == [3, 4]
    Agent.max_length = 12
    assert [len(sound(await execute(each, LLM("x" * 99)))["observation_tokens"]) > 12 for each in made] == [False, True]


async def test_12_without_log_probabilities_there_are_none_in_any_sample():
    llm = LLM(lambda ids: RuntimeError("down") if len(ids) > 6 else "hi")
    params = Params(logprobs=None)
    good = sound(await execute(executor(DONE), llm, params=params))
    bad = sound(await execute(executor(reply("a")), llm, params=params))
    assert (good["rollout_log_probs"], bad["rollout_log_probs"]) == (None, None)
    assert (failed(good), failed(bad)) == (False, True)


async def test_12_with_log_probabilities_every_sample_has_them_at_its_actions():
    response = sound(await execute(executor(reply("a"), reply(done=True)), LLM("hi", logprob=-0.25)))
    values = response["rollout_log_probs"]
    inside = {i for start, end in response["action_ranges"] for i in range(start, end)}
    assert [i for i, value in enumerate(values) if value] == sorted(inside)
    assert {values[i] for i in inside} == {-0.25}


@pytest.mark.parametrize(
    "logprobs", [[], [{106: -0.5}], None, [{1: -0.5}] * 3], ids=["none", "one", "absent", "others"]
)
async def test_12_lost_or_misaligned_log_probabilities_are_never_trained_on(logprobs):
    response = sound(await execute(executor(DONE), LLM("hi", logprobs=logprobs)))
    assert failed(response)
    assert response["rollout_log_probs"] is not None


@pytest.mark.parametrize("kind", [list, tuple])
async def test_13_the_engine_gets_lists_and_may_answer_with_tuples(kind):
    llm = LLM("hi", token_ids=kind([106, 107, 0]))
    response = sound(await execute(executor(DONE), llm))
    assert type(llm.requests[0][0]) is list
    assert response["observation_tokens"][-3:] == [106, 107, 0]


async def test_14_a_prompt_that_does_not_fit_is_never_cut_and_fails_alone():
    llm = LLM("hi")
    response = sound(await execute(executor(DONE, prompt="x" * 300), llm))
    assert failed(response)
    assert llm.requests == []


@pytest.mark.long
async def test_15_a_step_that_blocks_does_not_stop_the_engines_loop():
    loop, together = asyncio.get_running_loop(), threading.Barrier(8, timeout=60)

    class Agent(AgentInstance):
        def step(self, states):
            together.wait()
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(60), "the loop stands still"
            return DONE

    responses = await siblings(type("Executor", (AgentExecutor,), {"agent_cls": Agent})(), LLM("hi"), 8)
    assert not any(map(failed, responses))


async def test_16_no_more_episodes_than_max_concurrent_live_at_once():
    llm = LLM("hi", latency_s=0.005)
    responses = await siblings(executor(reply("a"), reply(done=True), max_concurrent=3), llm, 12)
    assert len(responses) == 12
    assert llm.most_live == 3


@pytest.mark.parametrize("fault", [ValueError("no"), SystemExit(2), asyncio.CancelledError()], ids=repr)
async def test_17_an_episode_that_fails_takes_no_sibling_along_and_keeps_its_place(fault):
    def sometimes(states):
        if states["seed"] % 2:
            raise fault
        return DONE

    made = executor(sometimes)
    responses = await siblings(made, LLM("hi"), 8)
    assert [failed(sound(response)) for response in responses].count(True) == 4
    assert {response["reward"] for response in responses if not failed(response)} == {1.0}


async def test_17_a_failed_episode_has_the_mean_reward_of_its_siblings_and_moves_no_group():
    results = iter([StepResult(reward=3.0, score=0.5, terminated=True), None, StepResult(terminated=True), None])

    def step(_):
        result = next(results)
        if result is None:
            raise ValueError("no")
        return result

    responses = await siblings(executor(step), LLM("hi"))
    assert [failed(sound(response)) for response in responses] == [False, True, False, True]
    assert [(response["reward"], response["scores"]) for response in responses] == [
        (3.0, 0.5), (1.5, 0.25), (0.0, 0.0), (1.5, 0.25),
    ]  # fmt: skip
    assert [response["extra_logs"]["failed_alone"] for response in responses] == [0.0] * 4


@pytest.mark.slow
@needs_openrlhf
async def test_17_openrlhfs_estimators_give_right_siblings_of_a_failed_episode_no_advantage(tmp_path, lost):
    def step(states):
        if states["seed"] % 4 == 3:
            raise ValueError("no")
        return DONE

    responses = await siblings(executor(step), LLM("hi"))
    is_lost = torch.tensor([failed(response) for response in responses])
    rewards = torch.tensor([response["reward"] for response in responses])
    estimators, cases = ("dr_grpo", "reinforce_baseline", "rloo", "group_norm"), []
    tensors = {"action_mask": torch.ones(4, 1, dtype=torch.long), "kl": torch.zeros(4, 1), "n_samples_per_prompt": 4}
    for estimator in estimators:
        for handed in (rewards, rewards * ~is_lost):
            cases.append(("advantages", {"estimator": estimator}, {"rewards": handed, **tensors}))
    torch.save(cases, tmp_path / "in.pt")
    python(ROOT / "tests/training/openrlhf_arithmetic.py", tmp_path / "in.pt", tmp_path / "out.pt")
    answers = [each["advantages"][:, 0] for each in torch.load(tmp_path / "out.pt", weights_only=False)]
    assert [each[is_lost].item() for each in answers[::2]] == pytest.approx([0.0] * 4, abs=1e-6)
    found = [each[~is_lost].tolist() for each in answers]
    lost(
        "OpenRLHF", "RemoteExperienceMaker.compute_advantages_and_returns", versions("openrlhf"),
        gets="a row of one token with the mean reward of its siblings, so that its advantage is 0",
        again="twice, after an infrastructure error (`max_retries`)", counted="the log `failed`",
        advantages=dict(zip(estimators, zip(found[::2], found[1::2], strict=True), strict=True)),
    )  # fmt: skip


async def test_17_a_failed_episode_without_a_graded_sibling_says_so(caplog):
    def boom(_):
        raise ValueError("no")

    made = executor(boom, failed_reward=-1)
    await execute(executor(DONE), LLM("hi"))  # another time, and another executor
    responses = await siblings(made, LLM("hi"), 2)
    assert [(response["reward"], response["extra_logs"]["failed_alone"]) for response in responses] == [(-1.0, 1.0)] * 2
    assert "moves the baseline of its group" in caplog.text


async def test_17_rows_of_the_same_prompt_with_other_labels_are_no_siblings():
    def step(states):
        if states["label"] == "b":
            raise ValueError("no")
        return DONE

    made, llm = executor(step), LLM("hi")
    good, bad = await asyncio.gather(execute(made, llm, label="a"), execute(made, llm, label="b"))
    assert (good["reward"], bad["reward"], bad["extra_logs"]["failed_alone"]) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("max_retries", [2, 1])
async def test_17_an_episode_runs_again_where_infrastructure_failed_as_in_a_run(virtual_clock, max_retries):
    answers = iter([RuntimeError("down"), RuntimeError("down"), "hi"])
    made = executor(DONE, max_retries=max_retries)
    response = sound(await execute(made, LLM(lambda _: next(answers))))
    assert (failed(response), len(made.agents)) == ((False, 3) if max_retries == 2 else (True, 2))


@pytest.mark.parametrize("limit", ["step_timeout_s", "episode_timeout_s", "generate_timeout_s"])
async def test_17_limits_of_the_class_end_what_hangs(limit):
    class Agent(AgentInstance):
        async def step(self, states):
            await asyncio.sleep(0 if limit == "generate_timeout_s" else 3600)
            return DONE

    llm = LLM("hi", latency_s=3600 if limit == "generate_timeout_s" else 0)
    attributes = {"agent_cls": Agent, "limits": Limits(**{limit: 0.05}), "max_retries": 0}
    responses = await asyncio.wait_for(siblings(type("Executor", (AgentExecutor,), attributes)(), llm, 2), 60)
    assert [failed(sound(response)) for response in responses] == [True, True]


async def test_17_on_error_raise_reports_the_failure_to_openrlhf():
    def boom(_):
        raise ValueError("no licence")

    with pytest.raises(InfraError, match=r"step at .*: ValueError: no licence"):
        await execute(executor(boom, on_error="raise"), LLM("hi"))


async def test_17_failures_in_a_row_raise():
    answers = iter([ValueError("no"), DONE, ValueError("no"), ValueError("no")])

    def step(_):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = executor(step, max_failed_in_a_row=2)
    responses = [await execute(made, LLM("hi")) for _ in range(3)]
    assert [failed(response) for response in responses] == [True, False, True]
    with pytest.raises(InfraError, match=r"step at .*: ValueError: no.* Failures in a row: 2"):
        await execute(made, LLM("hi"))


async def test_18_what_a_turn_copies_does_not_grow_with_the_sampling_parameters():
    copies, nums = [], []

    class Counted(Params):
        def __deepcopy__(self, memo):
            copies.append(self)
            return copy.copy(self)

    for num_turns in (1, 9):
        made = executor(*[reply("a")] * (num_turns - 1), reply(done=True))
        before = len(copies)
        await execute(made, LLM("hi"), params=Counted())
        nums.append(len(copies) - before)
    assert nums[0] == nums[1]


async def test_19_samples_of_a_prompt_share_what_is_found_out_about_their_tokenizer():
    """OpenRLHF sends another copy of the tokenizer with every prompt."""

    class Counted(CharTokenizer):
        num = 0

        def apply_chat_template(self, *args, **kwargs):
            self.num += 1
            return super().apply_chat_template(*args, **kwargs)

    nums = []
    for num in (1, 8):
        tokenizer = Counted()
        await siblings(executor(reply("a"), reply(done=True)), LLM("hi"), num, tokenizer=tokenizer)
        nums.append(tokenizer.num)
    assert nums[0] == nums[1] > 0


LOGS = {"a": "sum", "b": "last", "c": "first", "d": "mean", "e": "max"}


async def test_21_every_sample_has_the_same_logs_regardless_of_its_steps():
    steps = [
        reply("x", extra_logs={"a": 1, "c": 5, "d": 1, "e": 7}),
        reply("x", extra_logs={"a": 2, "b": 3, "d": 2, "e": 1}),
        reply(done=True, extra_logs={"unknown": 1}),
    ]
    full = sound(await execute(executor(*steps, logs=LOGS), LLM("hi")))
    none = sound(await execute(executor(reply(done=True), logs=LOGS), LLM("hi")))
    gone = sound(await execute(executor(DONE, prompt="", logs=LOGS), LLM("hi")))
    assert full["extra_logs"] == {"num_turns": 3.0, **SOUND, "a": 3.0, "b": 3.0, "c": 5.0, "d": 1.5, "e": 7.0}
    assert list(full["extra_logs"]) == list(none["extra_logs"]) == list(gone["extra_logs"])
    assert (none["extra_logs"]["a"], gone["extra_logs"]["failed"]) == (0.0, 1.0)


async def test_21_numbers_that_are_not_declared_are_left_out_and_named_once(caplog):
    made = executor(reply("x", extra_logs={"a": 1.0, "b": 2.0, "c": "text"}), reply(done=True), logs={"a": "last"})
    responses = await siblings(made, LLM("hi"), 3)
    assert {tuple(response["extra_logs"]) for response in responses} == {("num_turns", "failed", "failed_alone", "a")}
    assert caplog.text.count("got none for ['b']") == 1


async def test_21_declared_numbers_that_no_sound_episode_has_are_named_once_and_optional_ones_never(caplog):
    optional = itertools.cycle([{"a": 1.0}, {"b": 2.0}])

    class Agent(AgentInstance):
        async def step(self, states):
            return reply(done=True, extra_logs=next(optional))

    made = type("Executor", (AgentExecutor,), {"agent_cls": Agent, "logs": LOGS})()
    await siblings(made, LLM("hi"), 31)
    assert caplog.text == ""
    await siblings(made, LLM("hi"), 9)
    assert caplog.text.count("got ['c', 'd', 'e'], which none of 32 episodes had") == 1


@pytest.mark.parametrize("name", ["reward", "score", "response_clip_ratio", "kl", "failed"])
async def test_22_logs_never_overwrite_the_trainers_own(name):
    with pytest.raises(ContractError, match=f"expected names that the trainer does not use.*{name}"):
        executor(logs={name: "last"})
    response = sound(await execute(executor(reply(done=True, extra_logs={name: 7.0})), LLM("hi")))
    assert response["extra_logs"] == {"num_turns": 1.0, **SOUND}


async def test_23_scores_and_rewards_are_numbers_in_every_sample():
    responses = [
        await execute(executor(reply(done=True)), LLM("hi")),
        await execute(executor(reply(done=True, scores=0.5)), LLM("hi")),
        await execute(executor(reply(done=True)), LLM(RuntimeError("down"))),
        await execute(executor(StepResult(terminated=True)), LLM("", finish_reason="abort", token_ids=[], logprobs=[])),
    ]
    assert [sound(response)["scores"] for response in responses] == [0.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    "llm",
    [LLM("", token_ids=[], finish_reason="abort"), LLM(RuntimeError("down")), LLM("hi", finish_reason=None)],
    ids=["aborted", "down", "unfinished"],
)
async def test_25_every_sample_has_an_action_token(llm):
    response = sound(await execute(executor(DONE), llm))
    assert failed(response)
    assert [end - start for start, end in response["action_ranges"]] == [1]


async def test_25_a_failed_episodes_token_is_the_first_that_was_sampled():
    def boom(_):
        raise ValueError("no")

    response = sound(await execute(executor(reply("a"), boom, failed_reward=-1), LLM("hi", logprob=-0.25)))
    assert response["observation_tokens"] == TOKENIZER.encode("prompth")
    assert response["rollout_log_probs"] == [0.0] * 6 + [-0.25]
    assert response["reward"] == -1.0


PIECES = st.text("ab", max_size=30)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    prompt=PIECES, action=PIECES, feedback=PIECES, max_length=st.integers(2, 80), num_turns=st.integers(1, 4),
    max_tokens=st.one_of(st.none(), st.integers(1, 40)), fails=st.sampled_from(["never", "engine", "environment"]),
)  # fmt: skip
def test_25_to_27_any_episode_is_a_sound_sample_of_what_was_sampled(
    prompt, action, feedback, max_length, num_turns, max_tokens, fails
):
    def last(_):
        if fails == "environment":
            raise ValueError("no")
        return reply(rewards=1, done=True)

    llm = LLM(action)
    good = llm.output
    llm.output = lambda *asked: good(*asked) if fails != "engine" or len(llm.requests) < num_turns else None
    made = executor(*[reply(feedback, rewards=0.5)] * (num_turns - 1), last)
    calls = execute(made, llm, params=Params(max_tokens=max_tokens), max_length=max_length, prompt=prompt)
    response = sound(asyncio.run(calls), max_length)
    ids, ranges = response["observation_tokens"], response["action_ranges"]
    if failed(response):
        assert response["reward"] == 0.0
        return
    # Every action stands right after the prompt that it was sampled for.
    assert [ids[:start] for start, _ in ranges] == [asked for asked, _ in llm.requests]
    assert all(end - start <= (max_tokens or max_length) for start, end in ranges)
    assert [i for i, value in enumerate(response["rollout_log_probs"]) if value] == [
        i for start, end in ranges for i in range(start, end)
    ]


@pytest.mark.parametrize("logprob", [-math.inf, math.inf, math.nan])
async def test_33_log_probabilities_that_would_make_nan_in_the_loss_are_never_trained_on(logprob):
    assert failed(sound(await execute(executor(DONE), LLM("hi", logprob=logprob))))


# --- what the requirements ask beyond the traps -----------------------------------------------------------------------


async def test_images_of_none_are_accepted_and_pictures_for_a_processor_refused():
    tokenizer = CharTokenizer()
    tokenizer.image_processor = object()
    arguments = {
        "prompt": "p", "label": "l", "sampling_params": Params(), "max_length": 99, "hf_tokenizer": tokenizer,
        "llm_engine": LLM("hi"),
    }  # fmt: skip
    assert sound(await executor(DONE).execute(**arguments, images=None))["images"] is None
    with pytest.raises(ConfigError, match="expected text only, got 1 images"):
        await executor(DONE).execute(**arguments, images=["cat.png"])


async def test_every_sample_of_a_prompt_has_its_own_seed_and_the_same_in_a_second_run():
    runs = []
    for _ in range(2):
        made = executor(DONE)
        await siblings(made, LLM("hi"), 4)
        runs.append([agent.seen[0]["seed"] for agent in made.agents])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


async def test_a_cancelled_rollout_cancels_its_episodes_and_returns_no_sample():
    task = asyncio.create_task(siblings(executor(DONE), LLM("hi", latency_s=60)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_wrong_set_up_is_not_a_sample():
    with pytest.raises(ConfigError, match="expected `agent_cls`, got None"):
        await execute(type("Executor", (AgentExecutor,), {})(), LLM("hi"))


async def test_vllms_own_engine_of_the_queue_era_is_read_to_its_last_output():
    llm, queue = AsyncLLM("hi"), asyncio.Queue()
    agent_cls = executor(reply("a"), reply(done=True, rewards=1.0)).agent_instance_cls
    made = type("Executor", (AgentExecutor,), {})(
        agent_cls, max_steps=10, max_length=200, llm_engine=llm, hf_tokenizer=CharTokenizer(), result_queue=queue
    )
    params = Params(max_tokens=50)
    kept = copy.deepcopy(params)
    await asyncio.gather(*(made.execute("prompt", "l", params) for _ in range(2)))
    responses = [queue.get_nowait() for _ in range(2)]
    for response in responses:  # its trainer calls `item` of every log
        response["extra_logs"] = {name: value.item() for name, value in response["extra_logs"].items()}
        assert response["extra_logs"] == {"num_turns": 2.0, **SOUND}
    assert [sound(response)["reward"] for response in responses] == [1.0, 1.0]
    assert [end - start for start, end in responses[0]["action_ranges"]] == [3, 3]
    assert len({request_id for *_, request_id in llm.requests}) == 4
    assert params == kept


async def test_the_call_of_0_9_1_which_has_no_images_is_understood():
    made, llm = executor(reply("a"), reply(done=True, rewards=1.0)), LLM("hi")
    response = await made.execute(
        prompt="prompt", label="l", sampling_params=Params(), max_length=200, hf_tokenizer=CharTokenizer(),
        llm_engine=llm,
    )  # fmt: skip
    assert (sound(response)["reward"], len(response["action_ranges"]), len(llm.requests)) == (1.0, 2, 2)


async def test_our_own_file_loads_as_openrlhf_loads_it_and_its_agent_can_be_sent():
    """OpenRLHF leaves the file's module out of sys.modules, so that nothing defined in it could be pickled."""
    file = Path(__file__).parents[2] / "agent_funcs/math_retry.py"
    spec = importlib.util.spec_from_file_location("agent_module", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.AgentExecutor()
    assert pickle.loads(pickle.dumps(made.agent_instance_cls)) is made.agent_instance_cls
    response = sound(await execute(made, LLM("It is \\boxed{42}."), max_length=600, prompt="6 x 7?", label="42"), 600)
    assert (response["reward"], response["extra_logs"]["correct"]) == (1.0, 1.0)


# --- the options of the chat ------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "p"}]


def said_after(response):
    """The text after the first action."""
    return TOKENIZER.decode(response["observation_tokens"][response["action_ranges"][0][1] :])


async def test_chat_options_of_the_class_say_how_messages_become_tokens():
    steps = [StepResult([{"role": "user", "content": "x" * 400}]), DONE]
    ended = sound(await execute(executor(*steps), LLM("hi"), prompt=MESSAGES))
    options = ChatOptions(long_observation="cut")
    cut = sound(await execute(executor(*steps, chat_options=options), LLM("hi"), prompt=MESSAGES))
    assert said_after(ended) == ""
    assert "characters left out" in said_after(cut)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"on_error": "ignore"}, "expected mask or raise, got 'ignore'"),
        (
            {"logs": {"a": "median"}},
            "expected one of first, last, sum, mean, max for each name, got {'a': 'median'}. Ch",
        ),
        ({"chat_options": ChatOptions(history="rerender")}, "chat_options: expected history='keep', got 'rerender'"),
        ({"limits": {"max_turns": 2}}, r"limits: expected Limits\(…\), got {'max_turns': 2}"),
        ({"agent_kwargs": {"reply": 1}}, r"Executor\.agent_kwargs: expected arguments of Agent \[\], got {'reply': 1}"),
        ({"chat_options": {"history": "keep"}}, r"chat_options: expected ChatOptions\(…\), got {'history': 'keep'}"),
    ],
)
def test_wrong_attributes_of_the_class_are_refused(attributes, words):
    with pytest.raises((ConfigError, ContractError), match=words):
        executor(DONE, **attributes)


async def test_a_class_of_ours_gets_the_messages_of_a_rendered_prompt_and_openrlhf_its_text_back():
    tokenizer = load(next(family for family in FAMILIES if family.name == "Qwen2.5"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    seen = []

    class Agent(AgentInstance):
        async def reset(self, states):
            seen.append(states["observation"])
            return states

        async def step(self, states):
            return DONE

    llm = LLM("4")
    llm.tokenizer = tokenizer
    made = type("Executor", (AgentExecutor,), {"agent_cls": Agent})()
    response = sound(await execute(made, llm, prompt=text, tokenizer=tokenizer))
    ids = tokenizer.encode(text)
    assert (seen, response["prompt"], response["observation_tokens"][: len(ids)]) == ([messages], text, ids)
