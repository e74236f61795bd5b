"""A user's function as a reward: how it is called, what it may give, and what one that hangs, raises or lies costs."""

import asyncio
import http.client
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import urllib.error
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.rewards.function import FunctionReward
from agentenv.rewards.grading import grade
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers import threads
from agentenv.rewards.workers.pool import shared_pool
from tests.waits import until

ROOT = str(Path(__file__).resolve().parents[2])
RESPONSE = Response("four", 4, "2+2?", {"data_source": "sums", "level": 1})


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """A file of functions; the workers that load it end with the module."""
    path = tmp_path_factory.mktemp("functions") / "rewards.py"
    path.write_text(
        textwrap.dedent(
            """
            import asyncio, json
            from agentenv.rewards.types import RewardResult, Status

            def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):
                return {"score": 0.5, "acc": True, "pred": solution_str, "source": data_source, "kw": len(kw)}

            def result(response):
                return RewardResult(0.0, score=0.0, status=Status.NO_ANSWER, components={"a": None}, feedback="none")

            async def later(response, label):
                await asyncio.sleep(0)
                return float(label)

            def endless(response):
                return 1.0 if response == "four" else sum(range(10**13))

            def parsed(response):
                return json.loads(response)

            async def parsed_later(response):
                return json.loads(response)

            def ended(response):
                raise SystemExit(response)

            NOTHING = 3
            """
        )
    )
    yield path
    shared_pool("functions").close_now()


async def test_a_function_is_called_with_what_its_parameters_name():
    seen = {}

    def ours(response, *, prompt, label, metadata, weight=1.0):
        seen.update(locals())
        return 1

    result = await FunctionReward(ours, kwargs={"weight": 2.0}).grade(RESPONSE)
    assert result == RewardResult(1.0, score=1.0)
    del seen["seen"]
    assert seen == {"response": "four", "prompt": "2+2?", "label": 4, "metadata": RESPONSE.metadata, "weight": 2.0}


async def test_verls_compute_score_gets_its_four_keywords():
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):
        seen.update(locals())
        return 0.25

    row = Response("four", 4, "2+2?", {"data_source": "sums", "extra_info": {"split": "train"}})
    assert (await FunctionReward(compute_score).grade(row)).reward == 0.25
    del seen["seen"]
    assert seen == {
        "data_source": "sums", "solution_str": "four", "ground_truth": 4, "extra_info": {"split": "train"}, "kw": {}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "kwargs"),
    [
        (lambda: 1.0, {}),
        (lambda text: 1.0, {}),
        (lambda response, answer: 1.0, {}),
        (lambda response, /: 1.0, {}),
        (lambda *response: 1.0, {}),
        (lambda response: 1.0, {"weight": 1}),
        (3, {}),
        (dict.fromkeys, {}),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_at_once(function, kwargs):
    with pytest.raises(ConfigError, match=r"expected .* got .*\."):
        FunctionReward(function, kwargs=kwargs)


def test_a_reward_func_of_openrlhf_is_told_its_flag():
    with pytest.raises(ConfigError, match=r"as --reward_func_path FILE\.py"):
        FunctionReward(lambda queries, prompts, labels: [1.0])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"limit_s": 0}, "limit_s"),
        ({"num_threads": 0}, "num_threads"),
        ({"killable": True}, "to kill"),
        ({"timeout_reward": 0.0}, "timeout_reward"),
        ({"bounds": (1.0, 0.0)}, "bounds"),
    ],
)
def test_wrong_options_are_refused_at_once(options, word):
    with pytest.raises(ConfigError, match=word):
        FunctionReward(lambda response: 1.0, **options)


def test_a_name_that_leads_nowhere_is_refused_at_once(functions):
    for name in (str(functions), "nowhere.py:f", "no.such.module:f", f"{functions}:absent", f"{functions}:NOTHING"):
        with pytest.raises(ConfigError, match=r"expected .* got .*\."):
            FunctionReward(name)


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (1, RewardResult(1.0, score=1.0)),
        (True, RewardResult(1.0, score=1.0)),
        (-0.5, RewardResult(-0.5)),
        (np.float32(0.5), RewardResult(0.5, score=0.5)),
        ({"reward": -1, "score": 0.0}, RewardResult(-1.0, score=0.0)),
        ({"score": 1, "acc": np.bool_(True)}, RewardResult(1.0, score=1.0, components={"acc": 1.0})),
        ({"score": 1, "acc": math.nan}, RewardResult(1.0, score=1.0, components={"acc": None})),
        ({"score": 1, "pred": 7}, RewardResult(1.0, score=1.0, extracted="7")),
        ({"score": 1, "feedback": "ok"}, RewardResult(1.0, score=1.0, feedback="ok")),
        ({"score": 1, "why": [1]}, RewardResult(1.0, score=1.0, detail="why=[1]")),
    ],
)
async def test_numbers_and_dicts_become_results(value, result):
    assert await FunctionReward(lambda response: value).grade(RESPONSE) == result


@pytest.mark.parametrize(
    "value",
    [None, "1.0", math.nan, math.inf, 1e39, {}, {"acc": 1.0}, {"score": None}, {"reward": "x"}, [1.0], np.ones(2)],
)
async def test_input_that_is_not_a_reward_is_a_failed_function_and_never_zero(value):
    reward = FunctionReward(lambda response: value)
    with pytest.raises(ContractError, match="expected a finite number or a dict with one"):
        await reward.grade(RESPONSE)
    assert (await grade(reward, RESPONSE)).status is Status.ERROR


@pytest.mark.parametrize(
    ("name", "killable"),
    [
        ("def parsed", False),
        ("async def parsed_later", False),
        pytest.param("async def parsed_later", True, marks=pytest.mark.long),
        pytest.param("def ended", True, marks=pytest.mark.long),
    ],
)
async def test_a_function_that_raises_is_its_authors_error_with_file_and_line(functions, name, killable):
    line = Path(functions).read_text().splitlines().index(f"{name}(response):") + 2
    with pytest.raises(ContractError, match=rf"(JSONDecodeError|SystemExit): .* at {functions}:{line}\. Fix"):
        await FunctionReward(f"{functions}:{name.split()[-1]}", killable=killable).grade(RESPONSE)


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"), urllib.error.URLError(ConnectionRefusedError()), http.client.IncompleteRead(b""),
        MemoryError(), BrokenProcessPool("a process ended"), EOFError(), subprocess.TimeoutExpired("lean", 60.0),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=repr,
)  # fmt: skip
async def test_a_service_that_cannot_be_reached_and_a_machine_that_fails_are_infrastructure(error):
    def asks(response):
        raise error

    def wraps(response):
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("no grade") from cause

    for function in (asks, wraps):
        assert (await grade(FunctionReward(function), RESPONSE)).status is Status.INFRA


async def test_exceptions_of_a_function_are_typed():
    def row(response):
        raise DataError("label: expected a dict, got 4. Correct the row.")

    def late(response):
        raise TimeoutError("of a server")

    def stop(response):
        return next(iter(()))

    with pytest.raises(ContractError, match="StopIteration"):
        await FunctionReward(stop).grade(RESPONSE)
    assert (await grade(FunctionReward(stop), RESPONSE)).status is Status.ERROR
    with pytest.raises(InfraError, match="of a server"):
        await FunctionReward(late).grade(RESPONSE)
    assert (await grade(FunctionReward(row), RESPONSE)).status is Status.LABEL


async def test_a_function_cannot_change_its_callers_row():
    def greedy(response, label, metadata):
        label.append(1)
        metadata["tests"].clear()
        return 0

    row = Response("x", [1], "", {"tests": ["a"]})
    await FunctionReward(greedy).grade(row)
    assert (row.label, row.metadata) == ([1], {"tests": ["a"]})
    with pytest.raises(DataError, match="copied"):
        await FunctionReward(greedy).grade(Response("x", [threading.Lock()], "", {"tests": []}))


def test_an_async_function_ends_at_its_limit(virtual_clock):
    async def here(response):
        await asyncio.sleep(0 if response == "quick" else 3600)
        return 1

    class Model:
        async def __call__(self, response):
            return await here(response)

    for function in (here, Model()):
        reward = FunctionReward(function, limit_s=60.0)
        assert virtual_clock.run(reward.grade(Response("quick"))).reward == 1.0
        with pytest.raises(InfraError, match="within 60 s"):
            virtual_clock.run(reward.grade(Response("slow")))


# --- plain functions, in threads ------------------------------------------------------------------------------------


@pytest.mark.long
async def test_one_plain_function_that_never_returns_costs_the_others_and_the_loop_nothing():
    forever = threading.Event()

    def compute_score(solution_str):
        if solution_str == "pathological":
            forever.wait()
        return 1.0

    reward = FunctionReward(compute_score, limit_s=2.0, num_threads=1)
    bad = asyncio.create_task(reward.grade(Response("pathological")))
    await asyncio.sleep(0)
    others = [asyncio.create_task(reward.grade(Response("fine"))) for _ in range(20)]
    with pytest.raises(InfraError, match="within 2 s"):
        await bad
    assert {(await other).reward for other in others} == {1.0}
    assert reward.num_abandoned == 1
    forever.set()
    await until(lambda: not reward.num_abandoned)


async def test_a_call_given_up_in_the_queue_is_never_made():
    calls, gate = [], threading.Event()

    def wait(response):
        calls.append(response)
        gate.wait(30)
        return 1

    reward = FunctionReward(wait, num_threads=1)
    first, second = (asyncio.create_task(reward.grade(Response(text))) for text in ("first", "second"))
    await until(lambda: calls)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert reward.num_abandoned == 0
    gate.set()
    assert (await first).reward == 1.0
    assert (await reward.grade(Response("third"))).reward == 1.0
    assert calls == ["first", "third"]


async def test_functions_that_pile_up_unfinished_are_refused_in_the_end(monkeypatch):
    monkeypatch.setattr(threads, "_MOST_ABANDONED", 2)
    forever = threading.Event()
    reward = FunctionReward(lambda response: forever.wait(60), limit_s=0.01, num_threads=4)
    for _ in range(2):
        with pytest.raises(InfraError, match="within"):
            await reward.grade(RESPONSE)
    with pytest.raises(InfraError, match=r"got 2 that did not\. Use killable=True"):
        await reward.grade(RESPONSE)
    forever.set()


def test_an_abandoned_thread_does_not_hold_up_the_end_of_the_process():
    code = """
        import asyncio, time
        from agentenv.rewards.function import FunctionReward
        from agentenv.rewards.grading import grade
        from agentenv.rewards.types import Response
        reward = FunctionReward(lambda response: time.sleep(600), limit_s=0.1)
        print(asyncio.run(grade(reward, Response(""))).status, reward.num_abandoned)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("infra 1\n", "", 0)


# --- killable -------------------------------------------------------------------------------------------------------


async def test_a_killable_function_answers_as_it_does_here(functions):
    for name in ("compute_score", "result", "later"):
        here, there = (FunctionReward(f"{functions}:{name}", killable=killable) for killable in (False, True))
        assert await there.grade(RESPONSE) == await here.grade(RESPONSE)


@pytest.mark.long
async def test_a_killable_function_that_computes_without_end_is_killed_and_costs_the_others_nothing(functions):
    reward = FunctionReward(f"{functions}:endless", killable=True, limit_s=0.3)
    bad = asyncio.create_task(grade(reward, Response("pathological")))
    good = await asyncio.gather(*(reward.grade(RESPONSE) for _ in range(10)))
    assert {result.reward for result in good} == {1.0}
    result = await bad
    assert result.status is Status.INFRA
    assert "0.3 s of CPU time" in result.detail
    priced = FunctionReward(f"{functions}:endless", killable=True, limit_s=0.3, timeout_reward=-1.0)
    result = await grade(priced, Response("pathological"))
    assert (result.reward, result.status) == (-1.0, Status.TIMEOUT)


async def test_a_reward_by_name_travels_to_other_processes_as_that_name(functions):
    name = f"{functions}:compute_score"
    sent = pickle.dumps(FunctionReward(name, limit_s=7.0, bounds=(0.0, 1.0)))
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert copy.bounds == (0.0, 1.0)
    assert (await copy.grade(RESPONSE)).reward == 0.5
