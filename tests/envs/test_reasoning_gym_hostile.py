"""reasoning_gym: answers that attack what grades them."""

import asyncio
import socket
from importlib.util import find_spec

import pytest

from agentenv.errors import InfraError
from agentenv.rewards.types import Response, Status
from agentenv.rewards.workers.pool import WorkerFailed
from agentenv_envs.reasoning_gym import ReasoningGym, ReasoningGymReward
from agentenv_envs.reasoning_gym.data_only import EXECUTED, refusal
from tests.envs.reasoning_gym_items import golds, item

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install 'agentenv-rl[reasoning-gym]'")
PAYLOADS = (
    "__import__('pathlib').Path({path!r}).write_text('x')",
    "__import__('os').system('touch {path}')",
    "[open({path!r}, 'w')]",
    "[__import__('socket').create_connection(('127.0.0.1', {port}))]",
    "__import__('os')._exit(0)",
    "(lambda: exec('while True: pass'))()",
    "[1 for _ in iter(int, 1)]",
    "9**9**9**9",
    "[0]*(10**11)",
    "().__class__.__base__.__subclasses__()",
    "f'{{open({path!r}, chr(119))}}'",
    "oracle_answer",
    "[entry]",
    "-" * 900 + "1",
    "(" * 400 + "1" + ")" * 400,
    "9999999999!!!!",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("dataset", sorted(EXECUTED))
async def test_code_that_a_scorer_would_execute_does_nothing_hangs_nothing_and_earns_nothing(dataset, tmp_path):
    mark, reward = tmp_path / "mark", ReasoningGymReward(partial_credit=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        for payload in PAYLOADS:
            text = payload.format(path=str(mark), port=listening.getsockname()[1])
            async with asyncio.timeout(30):
                result = await reward.grade(Response(f"<answer>{text}</answer>", item(dataset)))
            assert (result.reward, result.status) == (0.0, Status.PARSE_ERROR), payload
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert not mark.exists()
    assert (await reward.grade(Response(golds()[dataset], item(dataset)))).reward == 1.0


@pytest.mark.parametrize("dataset", sorted(EXECUTED))
def test_the_right_answer_of_each_of_the_nine_is_data(dataset):
    assert refusal(dataset, item(dataset)["answer"]) == ""


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("simple_integration", "x**3/3 + sin(2*x)*exp(-x) + C"), ("intermediate_integration", "-x*cos(x)**2 + log(x)"),
     ("polynomial_multiplication", "3*x**4 - 2*x*y + 1"), ("countdown", "(3 + 4) * 5 - 6/2"),
     ("binary_matrix", "[[0, 1], [1, 2]]"), ("spiral_matrix", "[1, 2, 3]"), ("n_queens", "[['_', 'Q']]"),
     ("string_insertion", "['A', 'B']"), ("string_insertion", "ABCDA")],
)  # fmt: skip
def test_any_text_of_a_policy_is_data(dataset, answer):
    assert refusal(dataset, answer) == ""


@pytest.mark.parametrize(
    "answer",
    ["x**9**9**9", "(2**999)**999", "x**(10**9)", "x.diff", "N(x)", "sin(x, y)", "xy", "S('x')", "True", "1e400"],
)
def test_anything_but_school_mathematics_is_not_in_the_data(answer):
    assert refusal("simple_integration", answer)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("coin_flip", "1e9999999999"),
     pytest.param("rush_hour", "A+99999999999999", marks=pytest.mark.slow),  # the worker that is cut off loads anew
     pytest.param("rubiks_cube", "R9999999999", marks=pytest.mark.slow)],
)  # fmt: skip
async def test_an_answer_that_makes_a_scorer_hang_is_cut_off_and_the_next_one_is_graded(dataset, answer):
    reward = ReasoningGymReward(cpu_limit_s=0.3)
    result = await reward.grade(Response(f"<answer>{answer}</answer>", item(dataset)))
    assert (result.reward, result.status in (Status.TIMEOUT, Status.OK)) == (0.0, True)
    assert (await ReasoningGymReward().grade(Response(golds()["coin_flip"], item("coin_flip")))).reward == 1.0


async def test_an_answer_without_end_is_not_scored():
    reward = ReasoningGymReward(max_answer_chars=100)
    result = await reward.grade(Response(f"<answer>{'1' * 101}</answer>", item("chain_sum")))
    assert (result.reward, result.status, len(result.extracted)) == (0.0, Status.PARSE_ERROR, 101)
    assert "101 characters; at most 100" in result.detail


async def test_a_worker_that_dies_is_a_failure_and_no_wrong_answer(monkeypatch):
    class Dead:
        async def run(self, request, **limits):
            raise WorkerFailed("a worker died during the check")

    monkeypatch.setattr("agentenv_envs.reasoning_gym.reward.shared_pool", Dead)
    env = ReasoningGym()
    with pytest.raises(InfraError, match=r"no grade .infra.: WorkerFailed: a worker died"):
        await env.step({"action_text": "<answer>1</answer>", "label": item("chain_sum")})
    assert env.num_attempts == 0
