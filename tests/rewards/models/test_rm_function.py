"""FunctionScorer: how a reward function is found and called, what it may give, and what its failures are."""

import asyncio
import textwrap
import threading

import pytest
import torch

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models.get_reward import FunctionScorer
from tests.models import make_tiny_tokenizer
from tests.rewards.models.rm_servers import TOGETHER
from tests.rewards.models.tiny import said
from tests.waits import until


def write(folder, body, name="rm.py"):
    path = folder / name
    path.write_text(textwrap.dedent(body))
    return str(path)


def lengths(queries, prompts, labels):
    return [float(len(query)) for query in queries]


LENGTHS = """
    def reward_func(queries, prompts, labels):
        return [float(len(query)) for query in queries]

    def negative(queries, prompts, labels):
        return [-float(len(query)) for query in queries]
"""


@pytest.mark.parametrize(("name", "value"), [("", 3.0), (":reward_func", 3.0), (":negative", -3.0)])
async def test_a_file_names_its_function(name, value, tmp_path):
    scorer = FunctionScorer(write(tmp_path, LENGTHS) + name)
    found = await scorer.score("abc")
    assert (found.value, found.num_tokens, found.truncated) == (value, None, False)
    await scorer.close()
    await scorer.close()
    with pytest.raises(InfraError, match="closed"):
        await scorer.score("abc")
    assert scorer.metrics()["rm/num_scored"] == 1.0


@pytest.mark.parametrize(
    ("body", "said_of_it"),
    [
        ("x = 1", "reward_func"),
        ("def reward_func(queries): return [0.0]", "by their places"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def reward_func(:", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_config_error(body, said_of_it, tmp_path):
    with pytest.raises(ConfigError, match=said_of_it):
        FunctionScorer(write(tmp_path, body, f"rm_{abs(hash(body))}.py"))


@pytest.mark.parametrize("wrong", [{"timeout_s": -1}, {"max_batch": 0}, {"max_length": 1}], ids=str)
def test_a_wrong_argument_is_refused_when_it_is_made(wrong):
    with pytest.raises(ConfigError):
        FunctionScorer(lengths, **wrong)


async def test_it_is_called_once_a_conversation_unless_batches_are_asked_for():
    calls = []

    def function(queries, prompts, labels):
        calls.append((queries, prompts, labels))
        return lengths(queries, prompts, labels)

    scorer = FunctionScorer(function)
    assert [each.value for each in await asyncio.gather(*map(scorer.score, ["a", "bb"]))] == [1.0, 2.0]
    assert sorted(calls) == [(["a"], [""], [None]), (["bb"], [""], [None])]
    calls.clear()
    scorer = FunctionScorer(function, max_batch=2, max_wait_s=TOGETHER)
    assert [each.value for each in await asyncio.gather(*map(scorer.score, ["a", "bb"]))] == [1.0, 2.0]
    assert calls == [(["a", "bb"], ["", ""], [None, None])]


async def test_messages_are_rendered_with_a_tokenizer_and_refused_without(tmp_path):
    make_tiny_tokenizer(tmp_path)
    calls = []

    def function(queries, prompts, labels):
        calls.append((queries, prompts))
        return [1.0]

    asks = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert (await FunctionScorer(function, tokenizer=tmp_path).score(said("a", question="q"))).value == 1.0
    assert calls == [([f"{asks}a<|im_end|>\n"], [asks])]
    with pytest.raises(ConfigError, match=r"FunctionScorer\.tokenizer"):
        await FunctionScorer(function).score(said("a"))
    with pytest.raises(DataError):
        await FunctionScorer(function, tokenizer=tmp_path).score([])


@pytest.mark.parametrize("kind", ["plain", "async", "awaitable"])
async def test_rewards_are_read_of_every_kind_of_function(kind):
    async def later(queries, prompts, labels):
        return {"rewards": torch.tensor([1.5]), "scores": [0.5]}

    def plain(queries, prompts, labels):
        return later(queries, prompts, labels) if kind == "awaitable" else [1.5]

    assert (await FunctionScorer(later if kind == "async" else plain).score("x")).value == 1.5


def wrong(value):
    def function(queries, prompts, labels):
        if isinstance(value, BaseException):
            raise value
        return value

    return function


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([float("nan")], InfraError),
        ([1.0, 2.0], InfraError),
        (ValueError("no"), InfraError),
        (SystemExit("no"), InfraError),
        (DataError("row"), DataError),
        (ConfigError("key"), ConfigError),
    ],
    ids=repr,
)
async def test_input_that_is_not_a_reward_is_typed_and_counted(value, kind):
    scorer = FunctionScorer(wrong(value))
    with pytest.raises(kind):
        await scorer.score("x")
    assert (scorer.num_failed, scorer.num_scored, scorer.num_retried) == (1, 0, 0)


async def test_one_that_raises_fails_alone():
    def function(queries, prompts, labels):
        if "bad" in queries:
            raise ValueError(f"of {len(queries)}")
        return lengths(queries, prompts, labels)

    scorer = FunctionScorer(function, max_batch=3, max_wait_s=TOGETHER)
    found = await asyncio.gather(*map(scorer.score, ["a", "bad", "cc"]), return_exceptions=True)
    assert [found[0].value, found[2].value] == [1.0, 2.0]
    assert isinstance(found[1], InfraError)
    assert "ValueError: of 1" in str(found[1])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_function_that_hangs_fails_in_time_and_the_others_continue(kind):
    go = threading.Event()

    def plain(queries, prompts, labels):
        if queries == ["hang"]:
            go.wait(60)
        return [1.0]

    async def later(queries, prompts, labels):
        if queries == ["hang"]:
            await asyncio.sleep(60)
        return [1.0]

    scorer = FunctionScorer(plain if kind == "plain" else later, timeout_s=2.0, max_concurrent=1)
    hanging, other = asyncio.create_task(scorer.score("hang")), asyncio.create_task(scorer.score("x"))
    with pytest.raises(InfraError, match="within 2 s"):
        await hanging
    assert (await other).value == 1.0
    assert scorer.num_abandoned == (1 if kind == "plain" else 0)
    go.set()
    await until(lambda: not scorer.num_abandoned)
