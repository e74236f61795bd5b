"""GetRewardScorer: what it asks a server of OpenRLHF's kind, and what becomes of its answers and failures."""

import asyncio
import contextlib

import pytest

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models.get_reward import GetRewardScorer
from agentenv.rewards.models.types import ready
from tests.rewards.models.rm_servers import RESET, TOGETHER, Status, in_turn, server
from tests.rewards.models.tiny import said

pytestmark = pytest.mark.usefixtures("soon")


@contextlib.asynccontextmanager
async def scorer_at(answer, **options):
    """The server and its scorer, closed at the end."""
    async with server(answer) as asked:
        scorer = GetRewardScorer(f"{asked.url}/get_reward", **options)
        try:
            yield asked, scorer
        finally:
            await scorer.close()


def lengths(path, body):
    """As OpenRLHF's server answers: each query's length is its reward."""
    rewards = [float(len(query)) for query in body["query"]]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}


def texts(num):
    return ["x" * (number + 1) for number in range(num)]


async def test_texts_that_wait_together_are_asked_in_one_request():
    async with scorer_at(lengths, max_batch=4, max_wait_s=TOGETHER, api_key="sk-1") as (asked, scorer):
        found = await asyncio.gather(*map(scorer.score, texts(4)))
    assert [each.value for each in found] == [1.0, 2.0, 3.0, 4.0]
    assert asked.bodies == [{"query": texts(4), "prompts": [""] * 4, "labels": [None] * 4}]
    assert asked.paths == ["/get_reward"]
    assert asked.headers[0]["authorization"] == "Bearer sk-1"
    assert scorer.metrics() == {
        "rm/num_scored": 4.0, "rm/num_failed": 0.0, "rm/num_retried": 0.0, "rm/num_truncated": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("load", [True, False], ids=["folder", "object"])
async def test_messages_are_rendered_by_the_models_tokenizer_and_begin_with_their_prompt(tokenizer_folder, load):
    from transformers import AutoTokenizer

    tokenizer = tokenizer_folder if load else AutoTokenizer.from_pretrained(tokenizer_folder)
    async with scorer_at(lengths, tokenizer=tokenizer) as (asked, scorer):
        await ready(scorer)
        found = await scorer.score(said("It is 42.", question="6 * 7?"))
    assert asked.paths == ["/get_reward"]
    asks = "<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n"
    assert asked.bodies == [{"query": [f"{asks}It is 42.<|im_end|>\n"], "prompts": [asks], "labels": [None]}]
    own = AutoTokenizer.from_pretrained(tokenizer_folder).encode(f"{asks}It is 42.<|im_end|>\n")
    assert (found.num_tokens, found.truncated) == (len(own), False)


async def test_messages_may_be_sent_to_a_server_that_renders_them_and_says_what_it_saw():
    def answer(path, body):
        """As `agentenv rm serve` answers."""
        num = len(body.get("messages") or body["query"])
        logs = {"rm_value": [7.0] * num, "rm_truncated": [1.0] * num, "rm_num_tokens": [9.0] * num}
        return {"rewards": [3.5] * num, "scores": [3.5] * num, "extra_logs": logs}

    conversations = [said("a"), said("b")]
    options = {"send_messages": True, "max_batch": 2, "max_wait_s": TOGETHER}
    async with scorer_at(answer, **options) as (asked, scorer):
        await ready(scorer)
        found = await asyncio.gather(*map(scorer.score, conversations))
        assert (asked.paths, asked.bodies) == (["/get_reward"], [{"messages": conversations}])
        mixed = await asyncio.gather(scorer.score("text"), scorer.score(conversations[0]))
        with pytest.raises(DataError):
            await scorer.score([])
    assert {(each.value, each.num_tokens, each.truncated) for each in found + mixed} == {(3.5, 9, True)}
    assert (scorer.num_scored, scorer.num_truncated, scorer.num_failed) == (4, 4, 1)


ROOTS = {
    "OpenRLHF's": Status(404, {"detail": "Not Found"}),
    "a page of another": {"name": "rewards"},
    "no GET": Status(405),
}
"""What other servers have at /."""


@pytest.mark.parametrize("root", ROOTS)
async def test_messages_without_a_tokenizer_are_refused_with_what_to_do_by_servers_that_do_not_render(root):
    async with scorer_at(lambda path, body: ROOTS[root] if path == "/" else lengths(path, body)) as (asked, scorer):
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"GetRewardScorer\.tokenizer: expected the reward model's"):
                await ready(scorer)
        found = await asyncio.gather(*(scorer.score(said("x")) for _ in range(9)), return_exceptions=True)
        assert {type(each) for each in found} == {ConfigError}
        assert (await scorer.score("text is scored")).value == 14.0
    assert (asked.paths, scorer.num_failed) == (["/", "/get_reward"], 9)


def like_ours(path, body):
    """As `agentenv rm serve` answers."""
    if path == "/":
        return {"model": "rm", "agentenv": "1.0", "shift": 0.0}
    return {"rewards": [3.5] * len(body.get("messages") or body["query"])}


async def test_a_server_of_ours_is_asked_once_what_it_is_and_then_renders():
    async with scorer_at(like_ours, max_batch=9, max_wait_s=0.2) as (asked, scorer):
        conversations = [said(letter) for letter in "abcdefghi"]
        found = await asyncio.gather(*map(scorer.score, conversations))
        await ready(scorer)
    assert {each.value for each in found} == {3.5}
    assert asked.paths.count("/") == 1
    sent = [each for body in asked.bodies for each in body["messages"]]
    assert sorted(sent, key=str) == conversations


async def test_a_server_that_is_busy_when_it_is_asked_what_it_is_is_asked_again():
    roots = in_turn(Status(503), RESET, Status(429), like_ours("/", None))
    async with scorer_at(lambda path, body: roots() if path == "/" else like_ours(path, body)) as (asked, scorer):
        await ready(scorer)
    assert (asked.paths, scorer.num_retried) == (["/"] * 4, 3)


@pytest.mark.parametrize(("root", "kind"), [(Status(401), ConfigError), (Status(500), InfraError), (RESET, InfraError)],
                         ids=["key", "500", "reset"])  # fmt: skip
async def test_a_server_that_does_not_say_what_it_is_is_not_taken_for_another(root, kind):
    async with scorer_at(lambda path, body: root, retries=1) as (_, scorer):
        with pytest.raises(kind, match=r"expected (status 200|an answer)"):
            await ready(scorer)


async def test_too_long_conversations_are_cut_here_and_counted(tokenizer_folder):
    long = said(f"first {'word ' * 50} last", question="q")
    async with scorer_at(lengths, tokenizer=tokenizer_folder, max_length=40, overflow="left") as (asked, scorer):
        found = await scorer.score(long)
        assert (found.num_tokens, found.truncated, scorer.num_truncated) == (40, True, 1)
        assert not (await scorer.score(said("x"))).truncated
    (query,) = asked.bodies[0]["query"]
    assert (query.startswith("<|im_start|>user"), query.endswith("last<|im_end|>\n")) == (False, True)


@pytest.mark.parametrize(
    "wrong", [{"url": "h:5000"}, {"overflow": "up"}, {"max_length": 9}, {"overflow": "left"}], ids=str
)
def test_a_wrong_argument_is_refused_when_it_is_made(wrong):
    with pytest.raises(ConfigError):
        GetRewardScorer(**({"url": "http://h:1/get_reward"} | wrong))


async def test_messages_for_an_address_without_the_path_are_refused_by_naming_the_path():
    async with server(lengths) as asked:
        scorer = GetRewardScorer(asked.url)
        for ask in (scorer.check_messages, lambda: scorer.score(said("4"))):
            with pytest.raises(ConfigError, match=rf"expected …/get_reward of .*, or a tokenizer, got '{asked.url}'"):
                await ask()
        assert (await scorer.score("text")).value == 4.0
        await scorer.close()
