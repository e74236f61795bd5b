"""Reward functions of OpenRLHF's form: files and servers, what they are asked, and what their answers become."""

import asyncio
import contextlib
import json
import math
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentenv.chat.chat import Chat
from agentenv.cli.main import main
from agentenv.cli.train import configured
from agentenv.core.types import Limits, SamplingParams, StopReason, Task
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError, ContractError
from agentenv.interop.agent_files import load_reward_source
from agentenv.interop.openrlhf.reward_func import RewardServers, RewardSource
from agentenv.rewards.models.openrlhf_wire import read_rewards
from agentenv.runs.records.directory import read_trajectories
from agentenv.testing.tokenizers import CharTokenizer
from tests.rewards.models.rm_servers import HANG, RESET, Status, server

EXACT = """
import torch
def reward_func(queries, prompts, labels):
    rewards = torch.tensor([float(q.split(p)[-1].startswith(l)) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": rewards, "scores": rewards / 2, "extra_logs": {"seen": rewards * 0 + len(queries)}}
"""


def write(folder, body, name="reward.py"):
    path = folder / name
    path.write_text(textwrap.dedent(body))
    return str(path)


async def episode(source, *, prompt="Q: 6*7?", label="42", action="42", limits=None, tokenizer=None):
    tokenizer = tokenizer or CharTokenizer()
    setup = EpisodeSetup(ScriptedEngine([action], tokenizer), Chat(tokenizer), SamplingParams(), limits or Limits())
    return await source.run(Task(prompt, label), setup, EpisodeKey("e"))


async def judged(tmp_path, body, **more):
    return await episode(load_reward_source(write(tmp_path, body)), **more)


async def test_rewards_without_a_dict_which_openrlhf_cannot_read_are_told_once(tmp_path, caplog):
    source = load_reward_source(write(tmp_path, "def reward_func(queries, prompts, labels):\n    return [1.0]\n"))
    assert [(await episode(source)).reward for _ in range(2)] == [1.0, 1.0]
    (told,) = caplog.messages
    assert "reward.py: reward_func: expected a dict, as OpenRLHF reads it, got list. Return {'rewards': …}" in told


# --- what the function is asked -------------------------------------------------------------------------------------


async def test_a_file_judges_one_answer_at_a_time_and_returns_reward_score_and_logs(tmp_path):
    trajectory = await judged(tmp_path, EXACT)
    assert (trajectory.reward, trajectory.score, trajectory.stop_reason) == (1.0, 0.5, StopReason.TERMINATED)
    assert trajectory.turns[0].result.info == {"seen": 1.0}
    assert len(trajectory.turns) == 1


async def test_the_query_is_prompt_and_answer_with_their_special_tokens_and_begins_with_the_prompt(tmp_path):
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    body = """
    asked = []
    def reward_func(queries, prompts, labels):
        asked.append((queries, prompts, labels))
        return [0.0]
    """
    source = load_reward_source(write(tmp_path, body))
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    label = {"answer": [42, None]}
    trajectory = await episode(source, prompt=messages, label=label, action="It is 42.", tokenizer=tokenizer)
    ((queries, prompts, labels),) = source.judge.function.__globals__["asked"]
    ids = trajectory.segments[0].token_ids.tolist()
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert queries == [tokenizer.decode(ids, skip_special_tokens=False)]
    assert prompts == [rendered]
    assert labels == [label]
    assert queries[0].startswith(rendered + "It is 42.")
    assert ids[-1] in tokenizer.all_special_ids
    assert queries[0].endswith(tokenizer.decode(ids[-1:]))


class LeadingSpaceTokenizer(CharTokenizer):
    """As SentencePiece's: decoding drops the space that a text begins with."""

    def decode(self, token_ids, **kwargs):
        return super().decode(token_ids, **kwargs).removeprefix(" ")


class JoiningTokenizer(CharTokenizer):
    """Decoding rewrites what stands on both sides of a border: the prompt alone is no beginning of the whole."""

    def decode(self, token_ids, **kwargs):
        return super().decode(token_ids, **kwargs).replace("?4", "!4")


@pytest.mark.parametrize(("tokenizer", "action"), [(LeadingSpaceTokenizer(), " 42"), (JoiningTokenizer(), "42")])
async def test_a_query_is_prompt_and_answer_no_matter_what_the_tokenizer_makes_of_both(tokenizer, action, tmp_path):
    body = f"""
    def reward_func(queries, prompts, labels):
        return [float(prompts == ["Q: 6*7?"] and queries[0].startswith("Q: 6*7?{action}"))]
    """
    assert (await judged(tmp_path, body, action=action, tokenizer=tokenizer)).reward == 1.0


async def test_an_answer_that_was_cut_is_truncated_and_judged_all_the_same(tmp_path):
    limits = Limits(max_length=12)
    trajectory = await judged(tmp_path, EXACT, action="42" * 20, limits=limits)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TRUNCATED_BY_ENV, 1.0)


async def test_calls_run_concurrently_in_threads(tmp_path):
    body = """
    import threading
    both = threading.Barrier(2)
    def reward_func(queries, prompts, labels):
        both.wait(30)
        return [1.0]
    """
    source = load_reward_source(write(tmp_path, body))
    made = await asyncio.gather(episode(source), episode(source))
    assert [each.reward for each in made] == [1.0, 1.0]


# --- what its answer becomes ----------------------------------------------------------------------------------------


async def test_an_answer_that_cannot_be_read_fails_the_episode_and_is_not_a_reward(tmp_path):
    trajectory = await judged(tmp_path, "def reward_func(queries, prompts, labels):\n    return [float('nan')]\n")
    assert (trajectory.reward, trajectory.stop_reason) == (None, StopReason.ERROR)
    assert (trajectory.error.kind, trajectory.error.where) == ("contract", "step")
    assert "reward.py: reward_func: rewards: expected one finite number, got nan" in trajectory.error.message


async def test_an_exception_of_the_function_is_an_error_of_the_environment_with_file_and_line(tmp_path):
    body = "def reward_func(queries, prompts, labels):\n    text = queries[0]\n    return [1.0 / text.count('#')]\n"
    path = write(tmp_path, body)
    trajectory = await episode(load_reward_source(path))
    assert trajectory.reward is None
    assert (trajectory.error.kind, trajectory.error.type) == ("env", "ZeroDivisionError")
    assert trajectory.error.place == f"{path}:3"


@pytest.mark.long
async def test_a_function_that_hangs_costs_its_own_episode_only(tmp_path):
    body = """
    import threading
    never = threading.Event()
    def reward_func(queries, prompts, labels):
        if labels[0] == "hang":
            never.wait()
        return [1.0]
    """
    source = load_reward_source(write(tmp_path, body))
    limits = Limits(step_timeout_s=0.5)
    hung, fine = await asyncio.gather(
        episode(source, label="hang", limits=limits), episode(source, limits=Limits(step_timeout_s=60))
    )
    source.judge.function.__globals__["never"].set()
    assert (hung.stop_reason, hung.reward, fine.reward) == (StopReason.STEP_TIMEOUT, None, 1.0)


@pytest.mark.long
async def test_waiting_for_a_free_thread_is_not_a_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr("agentenv.interop.openrlhf.reward_func.MAX_CALLS", 1)
    body = """
    import time
    def reward_func(queries, prompts, labels):
        time.sleep(0.2)
        return [1.0]
    """
    source, limits = load_reward_source(write(tmp_path, body)), Limits(step_timeout_s=1.5)
    made = await asyncio.gather(*(episode(source, limits=limits) for _ in range(8)))  # 1.6 s for the last
    assert [each.reward for each in made] == [1.0] * 8


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_one_source_serves_event_loops_one_after_another_and_at_once(size, tmp_path, monkeypatch):
    """Elsewhere: "is bound to a different event loop", or an answer that waits for ever beside one of a loop before."""
    monkeypatch.setattr("agentenv.interop.openrlhf.reward_func.MAX_CALLS", 1)
    body = """
    import time
    def reward_func(queries, prompts, labels):
        time.sleep(0.02)
        return [1.0] * len(queries)
    """
    source = load_reward_source(write(tmp_path, body), batch_size=size, wait_s=0.05)

    async def cut():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(episode(source), 0.01)

    async def several():
        return [each.reward for each in await asyncio.gather(*(episode(source) for _ in range(3)))]

    asyncio.run(cut())
    assert asyncio.run(several()) == [1.0] * 3
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: asyncio.run(several()), range(2))) == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("batch_size", 1.5), ("wait_s", -1), ("wait_s", math.nan)]
)
def test_wrong_settings_of_a_source_are_refused(name, value, tmp_path):
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        load_reward_source(write(tmp_path, EXACT), **{name: value})


WRONG = {
    "no such file": ("missing.py", None, "expected an existing .py file"),
    "neither": ("reward", None, "expected FILE.py or http://HOST/get_reward"),
    "no scheme": ("localhost:5000/get_reward", None, "write http:// before the address"),
    "second without scheme": ("http://a/get_reward,b/get_reward", None, "expected addresses with http://"),
    "no function": ("reward.py", "def reward(): ...", "expected a function reward_func, got the functions ['reward']"),
    "two arguments": ("reward.py", "def reward_func(queries, labels): ...", "to accept queries, prompts and labels"),
    "broken": ("reward.py", "x = 1\nimport nothing_of_the_kind", "reward.py:2: expected to import"),
}


@pytest.mark.parametrize("case", WRONG)
def test_input_that_is_not_a_reward_function_is_refused_before_the_first_episode(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec, body, said = WRONG[case]
    if body is not None:
        write(tmp_path, body)
    with pytest.raises(ConfigError) as caught:
        load_reward_source(spec)
    assert said in str(caught.value)


# --- reading, for any number of samples -----------------------------------------------------------------------------

HALF = torch.tensor([0.5])
HALVES = {
    "tensor": HALF, "column": HALF[:, None], "tensor without a dimension": HALF[0], "half": HALF.half(),
    "bfloat16 that learns": torch.nn.Parameter(HALF.bfloat16()), "part of a graph": torch.nn.Parameter(HALF) * 1,
    "list": [0.5], "list of tensors": [HALF[0]], "number": 0.5, "array": HALF.numpy(), "tuple": (0.5,),
    "numbers of numpy": [HALF.numpy()[0]],
}  # fmt: skip


@pytest.mark.parametrize("shape", HALVES)
def test_every_shape_of_one_reward_is_read_and_is_the_score_where_none_is_given(shape):
    half = HALVES[shape]
    for answer in (half, {"rewards": half}, {"rewards": half, "scores": None, "extra_logs": None}):
        (outcome,) = read_rewards(answer, 1, "f")
        assert (outcome.reward, outcome.score) == (0.5, 0.5)


def test_truth_and_whole_numbers_are_rewards_of_several_samples():
    for ones in (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.int64), [True] * 3):
        assert [(each.reward, each.score) for each in read_rewards(ones, 3, "f")] == [(1.0, 1.0)] * 3


UNREADABLE_TENSOR = torch.ones(1, device="meta")
BREACHES = {
    "two rewards": ([1.0, 2.0], "rewards: expected 1 number, one per query, got 2"),
    "none": (None, "rewards: expected one finite number, got None"),
    "NaN": ([math.nan], "rewards: expected one finite number, got nan"),
    "too long for a float": (10**400, "rewards: expected one finite number, got 1000"),
    "too large": ([1e39], "StepResult.reward: expected a finite number, got 1e+39"),
    "sparse": (torch.ones(1).to_sparse(), "rewards: expected a tensor or a list whose values can be read"),
    "no rewards": ({"reward": [1.0]}, "expected the key 'rewards', got ['reward']"),
    "two scores": ({"rewards": [1.0], "scores": [1, 2]}, "scores: expected 1 number, one per query, got 2"),
    "a score without a value": ({"rewards": [1.0], "scores": UNREADABLE_TENSOR}, "scores: expected a tensor or a list"),
    "logs of two": ({"rewards": [1.0], "extra_logs": {"a": [1, 2]}}, "extra_logs['a']: expected 1 number"),
    "logs of NaN": ({"rewards": [1.0], "extra_logs": {"a": math.nan}}, "extra_logs['a']: expected one finite"),
    "logs in a list": ({"rewards": [1.0], "extra_logs": [1.0]}, "extra_logs: expected a dict of numbers, got list"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_an_answer_that_cannot_be_read_is_an_error_that_names_it(breach):
    answer, said = BREACHES[breach]
    try:
        (error,) = read_rewards(answer, 1, "f")
    except ContractError as raised:
        error = raised
    assert isinstance(error, ContractError)
    assert str(error).startswith("f: ")
    assert said in str(error)


def test_one_bad_reward_of_several_is_wrong_alone():
    good, bad, other = read_rewards([1.0, math.nan, 0.0], 3, "f")
    assert (good.reward, other.reward) == (1.0, 0.0)
    assert isinstance(bad, ContractError)


def test_rewards_scores_and_logs_are_matched_by_their_places():
    values = [1.0, -2.5, 0.0]
    column = torch.tensor(values)[:, None]
    logs = {"own": column, "all": torch.tensor(values).mean(), "one": [7], "text": "t", "texts": ["a", "b", "c"]}
    outcomes = read_rewards({"rewards": column, "scores": -column, "extra_logs": logs}, 3, "f")
    assert [(each.reward, each.score) for each in outcomes] == [(value, -value) for value in values]
    expected = [
        {"own": v, "all": -0.5, "one": 7.0, "text": "t", "texts": t} for v, t in zip(values, "abc", strict=True)
    ]
    assert [each.info for each in outcomes] == expected


# --- batches --------------------------------------------------------------------------------------------------------

SIZES = """
sizes = []
def reward_func(queries, prompts, labels):
    sizes.append(len(queries))
    if len(queries) > 1 and "#" in "".join(queries):
        raise RuntimeError("together")
    if "#" in queries[0]:
        raise ValueError("alone")
    return [float(l) for l in labels]
"""


async def test_episodes_that_end_together_are_judged_in_one_call_and_get_their_own_rewards(tmp_path):
    source = load_reward_source(write(tmp_path, SIZES), batch_size=4, wait_s=60.0)
    made = await asyncio.gather(*(episode(source, label=str(number)) for number in range(8)))
    assert [each.reward for each in made] == [float(number) for number in range(8)]
    assert source.judge.function.__globals__["sizes"] == [4, 4]


async def test_the_episodes_of_a_batch_share_what_its_judge_cost(tmp_path):
    body = """
    from agentenv.rewards.grading import add_usage
    def reward_func(queries, prompts, labels):
        add_usage({"judge/cost": 0.5, "judge/tokens": 8.0})
        return [1.0] * len(queries)
    """
    source = load_reward_source(write(tmp_path, body), batch_size=4, wait_s=60.0)
    made = await asyncio.gather(*(episode(source) for _ in range(4)))
    assert [each.turns[0].result.info for each in made] == [{"judge/cost": 0.125, "judge/tokens": 2.0}] * 4


async def test_a_batch_that_does_not_fill_is_judged_after_the_wait(tmp_path):
    source = load_reward_source(write(tmp_path, SIZES), batch_size=64, wait_s=0.05)
    made = await asyncio.gather(*(episode(source, label=str(number)) for number in range(3)))
    assert [each.reward for each in made] == [0.0, 1.0, 2.0]


async def test_one_answer_that_breaks_the_function_costs_its_batch_nothing(tmp_path):
    path = write(tmp_path, SIZES)
    source = load_reward_source(path, batch_size=3, wait_s=60.0)
    made = await asyncio.gather(*(episode(source, label="1", action=action) for action in ("a", "#", "b")))
    assert [each.reward for each in made] == [1.0, None, 1.0]
    assert (made[1].error.type, made[1].error.message) == ("ValueError", "alone")
    assert made[1].error.place == f"{path}:8"


async def test_an_episode_that_is_cancelled_takes_no_other_with_it(tmp_path):
    source = load_reward_source(write(tmp_path, SIZES), batch_size=3, wait_s=60.0)
    first = asyncio.ensure_future(episode(source, label="1"))
    while not source._batches.here()._open:
        await asyncio.sleep(0.001)
    first.cancel()
    second = asyncio.ensure_future(episode(source, label="2"))
    with pytest.raises(asyncio.CancelledError):
        await first
    third = asyncio.ensure_future(episode(source, label="3"))
    made = await asyncio.gather(second, third)
    assert [each.reward for each in made] == [2.0, 3.0]
    sizes = source.judge.function.__globals__["sizes"]
    assert sum(sizes) == 2, "nobody waits for the answer of the first"


# --- servers --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(answer):
    """A server of rewards; `answer` gives what `rm_servers.server` takes, for a request's JSON."""
    async with server(lambda path, body: answer(body)) as asked:
        yield f"{asked.url}/get_reward", asked.bodies


def rewards(*values):
    return {"rewards": values}


async def test_a_server_gets_openrlhfs_request_and_its_answer_is_the_reward():
    answer = {"rewards": [1.5], "scores": [0.5], "extra_logs": {"length": [3], "text": "x"}}
    async with server(lambda path, body: answer) as asked:
        trajectory = await episode(load_reward_source(f"{asked.url}/get_reward"), label={"a": "é"})
    assert (trajectory.reward, trajectory.score) == (1.5, 0.5)
    assert trajectory.turns[0].result.info == {"length": 3.0, "text": "x"}
    assert (asked.paths, asked.headers[0]["content-type"]) == (["/get_reward"], "application/json")
    eos = CharTokenizer().decode([CharTokenizer().eos_token_id])
    assert asked.bodies == [{"query": [f"Q: 6*7?42{eos}"], "prompts": ["Q: 6*7?"], "labels": [{"a": "é"}]}]


@pytest.mark.parametrize(
    "trouble", [Status(500, "dead"), Status(503, ""), Status(429), RESET], ids=["500", "503", "429", "reset"]
)
async def test_a_failure_that_may_pass_is_tried_again(trouble):
    told = iter([trouble, trouble, rewards(1.0)])
    async with serving(lambda body: next(told)) as (url, asked):
        source = RewardSource(RewardServers([url], first_pause_s=0.01))
        trajectory = await episode(source)
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert len(asked) == 3


async def test_another_server_is_asked_without_the_wait_that_the_first_one_asks_for():
    busy = serving(lambda body: Status(503, "busy", {"Retry-After": 3600}))
    async with busy as (first, _), serving(lambda body: rewards(1.0)) as (second, asked):
        trajectory = await episode(RewardSource(RewardServers([first, second], first_pause_s=0.0)))
    assert (trajectory.reward, len(asked)) == (1.0, 1)


async def test_a_server_that_stays_dead_is_an_error_of_infrastructure_and_never_a_reward():
    async with serving(lambda body: Status(500, "out of memory")) as (url, asked):
        trajectory = await episode(RewardSource(RewardServers([url], first_pause_s=0.01)))
    assert trajectory.reward is None
    assert (trajectory.error.kind, trajectory.error.type) == ("infra", "InfraError")
    assert (
        f"{url}: expected status 200, got 500: 'out of memory'. Check the server's log. (5 attempts.)"
        in trajectory.error.message
    )
    assert len(asked) == 5


@pytest.mark.long
async def test_a_server_that_does_not_answer_ends_at_the_deadline():
    async with serving(lambda body: HANG) as (url, _):
        # The step's own limit is shorter: a reward model has its own.
        trajectory = await episode(load_reward_source(url, timeout_s=0.5), limits=Limits(step_timeout_s=0.1))
    assert (trajectory.error.kind, trajectory.reward) == ("infra", None)
    assert "expected rewards within 0.5 s, got none" in trajectory.error.message


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Status(404, "no such page"), "expected status 200, got 404: 'no such page'"),
        ({}, "expected the key 'rewards'"),
    ],
)
async def test_an_unreadable_answer_of_a_server_is_reported_and_not_requested_again(told, said):
    async with serving(lambda body: told) as (url, asked):
        trajectory = await episode(load_reward_source(url))
    assert (trajectory.error.kind, trajectory.reward) == ("contract", None)
    assert trajectory.error.message.startswith(url)
    assert said in trajectory.error.message
    assert len(asked) == 1


async def test_requests_go_to_the_server_with_the_fewest_and_away_from_a_dead_one():
    free = asyncio.Event()

    async def slow(body):
        """An answer when it is let go."""
        await free.wait()
        return rewards(0.0)

    async with serving(slow) as (first, waiting), serving(lambda body: rewards(1.0)) as (second, fast):
        source = load_reward_source(f"{first},{second}")
        held = asyncio.ensure_future(episode(source))
        while not waiting:
            await asyncio.sleep(0.001)
        made = [await episode(source) for _ in range(4)]
        free.set()
        assert [each.reward for each in [*made, await held]] == [1.0] * 4 + [0.0]
        assert (len(waiting), len(fast)) == (1, 4)


async def test_a_failed_request_is_retried_at_another_server_even_if_that_is_busier():
    free = asyncio.Event()

    async def slow(body):
        """An answer to the first request when it is let go, to the others at once."""
        if len(asked) == 1:
            await free.wait()
        return rewards(1.0)

    async with serving(slow) as (alive, asked), serving(lambda body: Status(500)) as (dead, refused):
        source = RewardSource(RewardServers([alive, dead], first_pause_s=0.01))
        held = asyncio.ensure_future(episode(source))
        while not asked:
            await asyncio.sleep(0.001)
        assert (await episode(source)).reward == 1.0
        free.set()
        assert (await held).reward == 1.0
        assert (len(asked), len(refused)) == (2, 1)


async def test_servers_that_are_as_busy_take_turns():
    async with serving(lambda body: rewards(0.0)) as (one, first), serving(lambda body: rewards(1.0)) as (two, second):
        source = load_reward_source(f"{one}, {two}")
        assert [(await episode(source)).reward for _ in range(4)] == [0.0, 1.0, 0.0, 1.0]
        await source.judge.close()
        assert (len(first), len(second)) == (2, 2)


# --- what functions do to what they are given, and odd values that they give ---------------------------------------


async def test_a_function_that_changes_its_arguments_changes_no_task(tmp_path):
    body = """
    def reward_func(queries, prompts, labels):
        seen = dict(labels[0])
        labels[0].clear()
        queries.clear()
        prompts.append("more")
        return [float(seen["answer"][0])]
    """
    source, label = load_reward_source(write(tmp_path, body)), {"answer": [42]}
    made = [await episode(source, label=label) for _ in range(2)]
    assert [each.reward for each in made] == [42.0, 42.0]
    assert label == {"answer": [42]}


ASYNC = {
    "coroutine function": "async def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)",
    "an object": "class Judge:\n    async def __call__(self, queries, prompts, labels):\n        return [1.0]\n"
    "reward_func = Judge()",
    "a coroutine given": "async def f():\n    return [1.0]\ndef reward_func(queries, prompts, labels):\n    return f()",
}


@pytest.mark.parametrize("form", ASYNC)
async def test_a_function_may_be_async(form, tmp_path):
    assert (await judged(tmp_path, ASYNC[form])).reward == 1.0


# --- the files of the guide to OpenRLHF's rewards, as they are ------------------------------------------------------

GUIDE = {
    "code": """
import os, subprocess, tempfile
import torch

def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        generated_code = query.split(prompt)[-1].strip()
        try:
            with tempfile.NamedTemporaryFile(mode="w", suffix=".py", delete=False) as f:
                f.write(generated_code)
                temp_file = f.name
            result = subprocess.run(["python", temp_file], capture_output=True, text=True, timeout=50)
            rewards.append(1.0 if "passed" in result.stdout else 0.3 if "failed" in result.stdout else 0.0)
        except subprocess.TimeoutExpired:
            rewards.append(-0.5)
        except Exception as e:
            rewards.append(-1.0)
        finally:
            if os.path.exists(temp_file):
                os.remove(temp_file)
    rewards_tensor = torch.tensor(rewards).float()
    logs = {"code_correctness": rewards_tensor, "avg_correctness": rewards_tensor.mean()}
    return {"rewards": rewards_tensor, "scores": (rewards_tensor + 1.0) / 2.0, "extra_logs": logs}
""",
    "math": r"""
import re
import torch

def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        answer = query.split(prompt)[-1].strip()
        match = re.search(r"(?:answer is:?|=)\s*(-?\d+\.?\d*)", answer, re.IGNORECASE)
        if match is None:
            rewards.append(-0.5)
        else:
            rewards.append(float(abs(float(match.group(1)) - float(label)) < 1e-6))
    rewards_tensor = torch.tensor(rewards).float()
    logs = {"math_accuracy": (rewards_tensor == 1.0).float().mean()}
    return {"rewards": rewards_tensor, "scores": (rewards_tensor + 0.5) / 1.5, "extra_logs": logs}
""",
}
GIVEN = {
    "code": ("print('1 passed')", (1.0, 1.0, {"code_correctness": 1.0, "avg_correctness": 1.0})),
    "math": ("So 6*7 = 42", (1.0, 1.0, {"math_accuracy": 1.0})),
}


class PlainTokenizer(CharTokenizer):
    """Special tokens decode to nothing, so that a file of a program is one."""

    def decode(self, token_ids, **kwargs):
        return super().decode([each for each in token_ids if each != self.eos_token_id], **kwargs)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", GUIDE)
async def test_the_guides_files_run_unmodified(name, size, tmp_path):
    action, expected = GIVEN[name]
    source = load_reward_source(write(tmp_path, GUIDE[name]), batch_size=size, wait_s=60.0)
    made = await asyncio.gather(*(episode(source, action=action, tokenizer=PlainTokenizer()) for _ in range(size)))
    assert [(each.reward, each.score, each.turns[0].result.info) for each in made] == [expected] * size


# --- by the command line --------------------------------------------------------------------------------------------

BY_LABEL = """
sizes = []
def reward_func(queries, prompts, labels):
    sizes.append(len(queries))
    return {"rewards": [float(label) for label in labels], "extra_logs": {"asked": len(queries)}}
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Q{number}", "label": str(number)} for number in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path, BY_LABEL)
    return tmp_path


RUN = ["run", "--data", "tasks.jsonl", "--engine", "scripted", "--out", "out", "--progress", "none"]


@pytest.mark.long
@pytest.mark.parametrize("flag", [["--reward_func_path", "reward.py"], ["--remote_rm_url=reward.py"],
                                  ["--reward-func-path=reward.py"]])  # fmt: skip
def test_run_takes_a_reward_function_by_both_names_writes_it_down_and_resumes(flag, data, capsys):
    assert main([*RUN, *flag, "--resume"]) == 0  # which begins what is not there yet
    flags = json.loads((data / "out/config.json").read_text())["config"]["flags"]
    assert (flags["remote_rm_url"], flags["env"], flags["reward_batch_size"]) == ("reward.py", None, 1)
    made = {each.episode_id: each for each in read_trajectories("out")}
    assert sorted(each.reward for each in made.values()) == [0.0, 1.0, 2.0, 3.0]
    assert "reward.py" in capsys.readouterr().out
    (data / "reward.py").unlink()
    write(data, "def reward_func(queries, prompts, labels):\n    raise RuntimeError('asked again')\n")
    assert main(["run", "--resume", "--out", "out", "--progress", "none"]) == 0
    assert len(list(read_trajectories("out"))) == 4


def test_answers_of_one_moment_are_judged_together_where_the_flag_says_so(data):
    assert main([*RUN, "--reward_func_path", "reward.py", "--reward_batch_size", "4"]) == 0
    asked = [each.turns[0].result.info["asked"] for each in read_trajectories("out")]
    assert max(asked) > 1


@pytest.mark.long
def test_a_training_takes_it_and_its_batches():
    config = configured(["--reward-func-path", "reward.py", "--reward_batch_size", "8"])
    assert (config.remote_rm_url, config.reward_batch_size) == ("reward.py", 8)
    assert (config.episodes.remote_rm_url, config.episodes.reward_batch_size) == ("reward.py", 8)
    with pytest.raises(
        ConfigError, match="--remote_rm_url: expected one name, got --reward_func_path, which means the same"
    ):
        configured(["--reward_func_path", "reward.py", "--remote_rm_url", "reward.py"])
    with pytest.raises(ConfigError, match="--reward_batch_size: expected --remote_rm_url with it"):
        configured(["--env", "math_retry", "--reward_batch_size", "8"])
