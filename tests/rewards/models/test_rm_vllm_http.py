"""VLLMHTTPScorer: what it asks a vLLM server, what it believes of its answers, and what becomes of its failures."""

import asyncio
import contextlib
import gc
import math
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from agentenv._util.http.client import retry_after_s
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models.vllm_http import VLLMHTTPScorer
from tests.ports import held_port
from tests.rewards.models.rm_servers import (
    HANG,
    RESET,
    TOGETHER,
    FakeVLLM,
    Status,
    http,
    in_turn,
    raw_value,
    server,
)
from tests.rewards.models.tiny import make_tiny_rm, said
from tests.waits import until

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def ids_of(tokenizer, conversation):
    return FakeVLLM(tokenizer=tokenizer).rendered(conversation)


@contextlib.asynccontextmanager
async def scorer_at(fake, **options):
    """The server and its scorer, closed at the end."""
    async with server(fake) as asked:
        scorer = VLLMHTTPScorer(asked.url, **options)
        try:
            yield asked, scorer
        finally:
            await scorer.close()


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["classify", "pooling"])
async def test_conversations_that_wait_together_are_rendered_here_and_asked_in_one_request(endpoint, tokenizer):
    conversations = [said(f"It is {number}.") for number in range(5)]
    options = {"tokenizer": tokenizer, "endpoint": endpoint, "max_batch": 5, "max_wait_s": TOGETHER}
    async with scorer_at(FakeVLLM(), **options) as (asked, scorer):
        found = await asyncio.gather(*map(scorer.score, conversations))
    ids = [ids_of(tokenizer, each) for each in conversations]
    assert [each.value for each in found] == [raw_value(each) for each in ids]
    assert [each.num_tokens for each in found] == [len(each) for each in ids]
    assert [body["input"] for body in asked.bodies] == [ids]
    (body,) = asked.bodies
    assert (body["model"], body["use_activation"], body["add_special_tokens"]) == ("rm", False, False)
    assert asked.paths == ["/v1/models", f"/{endpoint}"]
    assert scorer.metrics() == {
        "rm/num_scored": 5.0, "rm/num_failed": 0.0, "rm/num_retried": 0.0, "rm/num_truncated": 0.0,
    }  # fmt: skip


async def test_without_a_tokenizer_the_server_renders_each_conversation_without_generation_prompt(tokenizer):
    conversations = [said("a"), said("b", system="Be kind.")]
    trusted = [{**message, "trusted": True} for message in conversations[1]]
    async with scorer_at(FakeVLLM(tokenizer=tokenizer), max_batch=32) as (asked, scorer):
        found = [await scorer.score(each) for each in (conversations[0], trusted)]
        text = await scorer.score("<|im_start|>x")
    assert [each.value for each in found] == [raw_value(ids_of(tokenizer, each)) for each in conversations]
    assert [each.num_tokens for each in found] == [len(ids_of(tokenizer, each)) for each in conversations]
    assert [body.get("messages") for body in asked.bodies] == [*conversations, None]
    assert {body.get("add_generation_prompt", False) for body in asked.bodies} == {False}
    assert {body["add_special_tokens"] for body in asked.bodies} == {False}  # or text would get a second BOS
    assert (asked.bodies[2]["input"], text.num_tokens) == (["<|im_start|>x"], len(tokenizer.encode("<|im_start|>x")))


async def test_a_model_is_asked_for_by_the_name_the_server_has_for_it(tokenizer):
    async with scorer_at(FakeVLLM(models=["b", "rm"]), tokenizer=tokenizer) as (asked, scorer):
        await scorer.score(said("x"))
        named = VLLMHTTPScorer(f"{asked.url}/v1/", model="rm", tokenizer=tokenizer)
        await named.score(said("x"))
        await named.close()
        assert [body["model"] for body in asked.bodies] == ["b", "rm"]  # names of one model
        wrong = VLLMHTTPScorer(asked.url, model="other", tokenizer=tokenizer)
        with pytest.raises(ConfigError, match=r"'other' to be served, got \['b', 'rm'\]"):
            await wrong.score(said("x"))


async def test_a_server_of_several_models_needs_the_name_of_one(tokenizer):
    rows = {"data": [{"id": "policy", "root": "p"}, {"id": "rm", "root": "r"}]}
    async with scorer_at(lambda path, body: rows, tokenizer=tokenizer) as (_, scorer):
        with pytest.raises(ConfigError, match="expected one model to be served"):
            await scorer.score(said("x"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://h"},
        {"endpoint": "score"},
        {"overflow": "middle"},
        {"label": "good"},
        {"tokenizer": 3},
        {"retries": -1},
        {"api_key": "two words"},
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_when_it_is_made(wrong):
    with pytest.raises(ConfigError):
        VLLMHTTPScorer(**({"url": "http://h:1"} | wrong))


# --- what is believed: activations, labels, lengths -----------------------------------------------------------------


def unit(ids):
    """Raw numbers that happen to be in 0..1, as an activation gives them."""
    return (sum(ids) % 100) / 100


@pytest.mark.long
@pytest.mark.parametrize("labels", [1, 3])
async def test_values_in_0_to_1_are_believed_only_of_a_server_that_knows_the_difference(labels, tokenizer):
    def raw(ids):
        """One number, or three."""
        return unit(ids) if labels == 1 else [unit(ids), 0.5, 0.25]

    conversations = [said(f"{number}") for number in range(6)]
    options = {"tokenizer": tokenizer, "label": 0}
    async with scorer_at(FakeVLLM(raw), **options) as (asked, scorer):
        found = await asyncio.gather(*map(scorer.score, conversations))
        asked_before = len(asked.bodies)
        again = [await scorer.score(each) for each in conversations]
    assert [each.value for each in found + again] == [unit(ids_of(tokenizer, each)) for each in conversations] * 2
    assert len(asked.bodies) == asked_before + len(conversations)  # it is shown once


async def test_a_server_that_always_activates_is_refused(tokenizer):
    async with scorer_at(FakeVLLM(switches=()), tokenizer=tokenizer) as (asked, scorer):
        with pytest.raises(ConfigError, match="applies one always") as raised:
            await scorer.score(said("x"))
    assert "bounded=True" in str(raised.value)
    assert len(asked.bodies) == 3  # the question, and both ways
    assert scorer.num_failed == 1


async def test_a_models_own_numbers_in_0_to_1_are_taken_if_declared(tokenizer):
    async with scorer_at(FakeVLLM(unit, switches=()), tokenizer=tokenizer, bounded=True) as (asked, scorer):
        assert 0.0 < (await scorer.score(said("x"))).value < 1.0
    assert len(asked.bodies) == 1


async def test_a_value_outside_of_0_to_1_needs_no_proof(tokenizer):
    async with scorer_at(FakeVLLM(lambda ids: [0.5, 0.5, -2.0]), tokenizer=tokenizer, label=2) as (asked, scorer):
        assert (await scorer.score(said("x"))).value == -2.0
    assert len(asked.bodies) == 1


@pytest.mark.parametrize("label", [None, 3])
async def test_one_of_several_numbers_must_be_named(label, tokenizer):
    async with scorer_at(FakeVLLM(lambda ids: [3.0, -1.0, 2.0]), tokenizer=tokenizer, label=label) as (_, scorer):
        with pytest.raises(ConfigError, match=r"one of the model's 3 numbers, got (None|3)"):
            await scorer.score(said("x"))


@pytest.mark.parametrize("by", ["us", "the server"])
@pytest.mark.parametrize("overflow", ["error", "left", "right"])
async def test_too_long_conversations_are_refused_or_cut_and_counted(by, overflow, tokenizer):
    long, fake = said("word " * 40), FakeVLLM(tokenizer=tokenizer, max_length=32)
    ids = ids_of(tokenizer, long)
    options = {"overflow": overflow, "tokenizer": tokenizer if by == "us" else None}
    async with scorer_at(fake, **options) as (asked, scorer):
        if overflow == "error":
            with pytest.raises(DataError, match="32 tokens"):
                await scorer.score(long)
            assert (scorer.num_failed, scorer.num_truncated, scorer.num_retried) == (1, 0, 0)
            assert len(asked.bodies) == (0 if by == "us" else 1)
            return
        found = await scorer.score(long)
        cut = ids[-32:] if overflow == "left" else ids[:32]
        assert (found.value, found.num_tokens, found.truncated) == (raw_value(cut), 32, True)
        short = await scorer.score(said("x"))
        assert (short.truncated, scorer.num_truncated) == (False, 1)


async def test_a_smaller_max_length_is_kept_to_and_a_larger_one_refused(tokenizer):
    fake = FakeVLLM(tokenizer=tokenizer, max_length=64)
    for tokens in (tokenizer, None):
        async with scorer_at(fake, tokenizer=tokens, max_length=24) as (_, scorer):
            assert (await scorer.score(said("x", question="y"))).num_tokens <= 24
            with pytest.raises(DataError, match="at most 24 tokens"):
                await scorer.score(said("x" * 20))
    async with scorer_at(fake, tokenizer=tokenizer, max_length=65) as (_, scorer):
        with pytest.raises(ConfigError, match="at most the server's 64"):
            await scorer.score(said("x"))


async def test_a_server_that_scores_other_tokens_than_were_sent_is_refused(tokenizer):
    def answer(path, body):
        """It puts a BOS before everything."""
        found = FakeVLLM()(path, body)
        return found if body is None else found | {"usage": {"prompt_tokens": found["usage"]["prompt_tokens"] + 1}}

    async with scorer_at(answer, tokenizer=tokenizer) as (_, scorer):
        with pytest.raises(ConfigError, match="adds or drops some"):
            await scorer.score(said("x"))


# --- failures -------------------------------------------------------------------------------------------------------


async def drip(writer):
    """A byte every few milliseconds, for ever: no single read is slow."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.005)


def row(*values, index=0):
    return {"index": index, "probs": list(values)}


FAILURES = {
    "500": Status(500, "CUDA error"),
    "reset": RESET,
    "nan": http(b'{"data": [{"index": 0, "probs": [NaN]}]}'),
    "null": {"data": [row(None)]},
    "another index": {"data": [row(1.0, index=7)]},
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_tried_again_and_counted(name, tokenizer):
    fake = FakeVLLM(first=in_turn(FAILURES[name], FAILURES[name], None))
    async with scorer_at(fake, tokenizer=tokenizer) as (asked, scorer):
        found = await scorer.score(said("x"))
    assert found.value == raw_value(ids_of(tokenizer, said("x")))
    assert (len(asked.bodies), scorer.num_retried, scorer.num_scored, scorer.num_failed) == (3, 2, 1, 0)


@pytest.mark.long
@pytest.mark.parametrize("answer", [HANG, drip], ids=["hang", "drip"])
async def test_a_hang_and_a_slow_drip_end_in_time_and_are_tried_again(answer, tokenizer):
    fake = FakeVLLM(first=in_turn(answer, None))
    async with scorer_at(fake, tokenizer=tokenizer, timeout_s=4.0) as (asked, scorer):
        assert (await scorer.score(said("x"))).value == raw_value(ids_of(tokenizer, said("x")))
        assert scorer.num_retried == 1
    async with scorer_at(FakeVLLM(first=lambda: answer), tokenizer=tokenizer, timeout_s=1.0) as (asked, scorer):
        await scorer.served()
        with pytest.raises(InfraError, match="expected an answer within"):
            await scorer.score(said("x"))
        assert 2 <= len(asked.bodies) <= 3  # half of the time each


@pytest.mark.parametrize(("header", "seconds"), [(None, 0), ("soon", 0), ("2", 2), (" 1.5 ", 1.5)])
def test_retry_after_is_seconds_and_anything_else_no_wait(header, seconds):
    assert retry_after_s(header) == seconds


@pytest.mark.parametrize(
    ("code", "said_of_it"), [(401, "API key"), (403, "rights"), (404, "model's name"), (307, "ad")]
)
async def test_a_wrong_address_or_key_is_a_config_error_and_not_tried_again(code, said_of_it, tokenizer):
    async with scorer_at(FakeVLLM(first=lambda: Status(code)), tokenizer=tokenizer) as (asked, scorer):
        with pytest.raises(ConfigError, match=said_of_it):
            await scorer.score(said("x"))
    assert (len(asked.bodies), scorer.num_failed) == (1, 1)


# --- one among others -----------------------------------------------------------------------------------------------


def poisoned(ids, answer):
    """A server that gives `answer` to every request with these ids in it."""

    def reply(path, body):
        return answer(body) if body is not None and ids in body["input"] else FakeVLLM()(path, body)

    return reply


def with_nan(ids):
    """The answers, with NaN in the place of these ids'."""

    def answer(body):
        found = FakeVLLM()("/classify", body)
        found["data"][body["input"].index(ids)]["probs"] = [math.nan]
        return found

    return answer


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "kind", "retries"),
    [
        (lambda ids: lambda body: Status(400, "Token id 99999 is out of vocabulary"), DataError, 0),
        (lambda ids: lambda body: Status(500), InfraError, 3),
        (lambda ids: lambda body: {"data": [row(1.0)] * (len(body["input"]) - 1)}, InfraError, 3),
        (lambda ids: with_nan(ids), InfraError, 3),
    ],
    ids=["400", "500", "wrong count", "nan"],
)
async def test_one_that_makes_requests_fail_fails_alone(make, kind, retries, tokenizer):
    conversations = [said(f"{number}") for number in range(8)]
    bad = ids_of(tokenizer, conversations[3])
    options = {"tokenizer": tokenizer, "max_batch": 8, "max_wait_s": TOGETHER}
    async with scorer_at(poisoned(bad, make(bad)), **options) as (asked, scorer):
        found = await asyncio.gather(*map(scorer.score, conversations), return_exceptions=True)
    assert isinstance(found.pop(3), kind)
    del conversations[3]
    assert [each.value for each in found] == [raw_value(ids_of(tokenizer, each)) for each in conversations]
    assert (scorer.num_scored, scorer.num_failed, scorer.num_retried) == (7, 1, retries)
    assert len(asked.bodies[0]["input"]) == 8


async def test_a_busy_server_is_not_asked_about_each_alone(tokenizer):
    fake = FakeVLLM(first=in_turn(Status(503), None))
    async with scorer_at(fake, tokenizer=tokenizer, max_batch=20, max_wait_s=TOGETHER) as (asked, scorer):
        await asyncio.gather(*(scorer.score(said(f"{number}")) for number in range(20)))
    assert [len(body["input"]) for body in asked.bodies] == [20, 20]
    assert scorer.num_retried == 20


async def test_no_more_requests_are_in_flight_than_may_be_and_batches_are_not_larger(tokenizer):
    meeting = asyncio.Barrier(2)

    async def together(body):
        await meeting.wait()
        return FakeVLLM()("/classify", body)

    def answer(path, body):
        return FakeVLLM()(path, body) if body is None else together(body)

    options = {"tokenizer": tokenizer, "max_concurrent": 2, "max_batch": 3, "max_wait_s": TOGETHER}
    async with scorer_at(answer, **options) as (asked, scorer):
        found = await asyncio.gather(*(scorer.score(said(f"{number}")) for number in range(24)))
    assert (len(found), asked.most) == (24, 2)
    assert [len(body["input"]) for body in asked.bodies] == [3] * 8


@pytest.mark.long
async def test_cancelling_all_who_wait_ends_the_request_and_frees_its_place(tokenizer):
    fake = FakeVLLM(first=in_turn(HANG, None))
    async with scorer_at(fake, tokenizer=tokenizer, max_concurrent=1, max_batch=3, max_wait_s=3.0) as (asked, scorer):
        hanging = [asyncio.create_task(scorer.score(said(f"{number}"))) for number in range(3)]
        await until(lambda: asked.bodies)
        queued = asyncio.create_task(scorer.score(said("next")))
        given_up = asyncio.create_task(scorer.score(said("never")))
        await asyncio.sleep(0.1)
        given_up.cancel()
        for task in hanging:
            task.cancel()
        assert (await queued).value == raw_value(ids_of(tokenizer, said("next")))
        await until(lambda: asked.num_gone == 1)
        await asyncio.gather(*hanging, given_up, return_exceptions=True)
        assert all(task.cancelled() for task in (*hanging, given_up))
    assert [len(body["input"]) for body in asked.bodies] == [3, 1]
    assert (scorer.num_scored, scorer.num_failed) == (1, 0)


async def test_one_who_is_cancelled_does_not_end_the_request_of_the_others(tokenizer):
    go = asyncio.Event()

    async def later(body):
        await go.wait()
        return FakeVLLM()("/classify", body)

    def answer(path, body):
        return FakeVLLM()(path, body) if body is None else later(body)

    async with scorer_at(answer, tokenizer=tokenizer, max_batch=3, max_wait_s=TOGETHER) as (asked, scorer):
        tasks = [asyncio.create_task(scorer.score(said(f"{number}"))) for number in range(3)]
        await until(lambda: asked.bodies)
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError)
    assert [found[0].value, found[2].value] == [raw_value(ids_of(tokenizer, said(text))) for text in "02"]
    assert len(asked.bodies) == 1


# --- the end, and other loops ---------------------------------------------------------------------------------------


async def test_closing_ends_what_waits_with_an_error_and_may_be_done_again(tokenizer):
    async with scorer_at(FakeVLLM(first=lambda: HANG), tokenizer=tokenizer, max_concurrent=1) as (asked, scorer):
        tasks = [asyncio.create_task(scorer.score(said("a"))), asyncio.create_task(scorer.score(said("b")))]
        await until(lambda: asked.bodies)
        tasks.append(asyncio.create_task(scorer.score(said("c"))))
        await asyncio.sleep(0.02)
        await scorer.close()
        await scorer.close()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, InfraError)
            assert "closed" in str(found)
        with pytest.raises(InfraError, match="closed"):
            await scorer.score(said("d"))
    assert scorer.num_failed == 4


def test_it_may_be_asked_from_several_event_loops_one_after_the_other(tokenizer):
    made = []

    async def once(number):
        async with server(FakeVLLM()) as asked:
            made[:] = made or [VLLMHTTPScorer(asked.url, tokenizer=tokenizer)]
            (scorer,) = made
            scorer._client.url = asked.url  # the server lives on this loop
            found = await asyncio.gather(*(scorer.score(said(f"{number}")) for _ in range(3)))
            assert [each.value for each in found] == [raw_value(ids_of(tokenizer, said(f"{number}")))] * 3

    for number in range(3):
        asyncio.run(once(number))
    assert made[0].num_scored == 9
    gc.collect()
    # Nothing keeps a hold on a loop that has ended; the thread that renders has one on its last caller's for a while.
    assert len(made[0].asker._lines._values) <= 1
    assert len(made[0]._client._clients._values) <= 1


# --- vLLM itself ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """A real server of a tiny reward model, started once; its URL and the model's folder."""
    folder = make_tiny_rm(tmp_path_factory.mktemp("model") / "rm")
    with held_port() as port, served(folder, port) as url:
        yield url, folder


@contextlib.contextmanager
def served(folder, port):
    log = folder.parent / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--runner", "pooling", "--served-model-name", "tiny-rm", "--dtype", "float32"]
    command += ["--max-model-len", "128", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-3000:])
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


CONVERSATIONS = [said("It is 42. " * (1 + number % 4), question=f"What is {number} + 30?") for number in range(12)]


@pytest.fixture(scope="module")
def expected(vllm):
    """What transformers says in float32."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(vllm[1], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(vllm[1])
    with torch.inference_mode():
        rows = [torch.tensor([ids_of(tokenizer, each)]) for each in CONVERSATIONS]
        return [model(input_ids=row).logits.flatten().tolist() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ids", "messages"])
@pytest.mark.parametrize("endpoint", ["classify", "pooling"])
async def test_vllm_returns_the_raw_numbers_of_transformers(endpoint, by, vllm, expected):
    url, folder = vllm
    scorer = VLLMHTTPScorer(url, endpoint=endpoint, tokenizer=folder if by == "ids" else None)
    found = await asyncio.gather(*map(scorer.score, CONVERSATIONS))
    assert (await scorer.served()).max_length == 128
    await scorer.close()
    assert [[each.value] for each in found] == [pytest.approx(each, abs=1e-3) for each in expected]
    assert all(each.num_tokens and not each.truncated for each in found)
    assert scorer.num_retried == 0


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ids", "messages"])
async def test_vllm_refuses_what_is_too_long_and_cuts_where_that_is_asked(by, vllm):
    url, folder = vllm
    tokenizer = folder if by == "ids" else None
    long = said("word " * 200)
    scorer, cutting = (VLLMHTTPScorer(url, tokenizer=tokenizer, overflow=overflow) for overflow in ("error", "left"))
    found = await asyncio.gather(*map(scorer.score, [*CONVERSATIONS[:3], long]), return_exceptions=True)
    assert isinstance(found[3], DataError)
    assert all(each.value for each in found[:3])
    cut = await cutting.score(long)
    assert (cut.num_tokens, cut.truncated, cutting.num_truncated) == (128, True, 1)
    await scorer.close()
    await cutting.close()
