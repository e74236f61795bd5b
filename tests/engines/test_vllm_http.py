"""VLLMHTTPEngine against servers that misbehave; all on loopback or in memory, nothing waits for real."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
import pytest
from hypothesis import given, settings

from agentenv._util.http.client import RetryPolicy
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import SamplingParams, StopReason, Task
from agentenv.engines.vllm.http import VLLMHTTPEngine
from agentenv.engines.vllm.wire import completion_of
from agentenv.errors import ConfigError, EngineError, PromptTooLong
from agentenv.runs.metrics import Tally, summarize
from agentenv.runs.records.lines import decode_line, encode_line, trajectory_from_dict
from tests.damage import damaged
from tests.engines.streamed import StreamedTransport
from tests.waits import until

PROMPT = [11, 12, 13]
TOKENS = [5, 6, 7]
LOGPROBS = [-0.5, -1.25, -2.0]


def completion(prompt=PROMPT, tokens=TOKENS, logprobs=LOGPROBS, **changes):
    """The answer of /v1/completions."""
    choice = {
        "index": 0,
        "text": "abc",
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "logprobs": {"tokens": [f"token_id:{token}" for token in tokens or ()], "token_logprobs": logprobs},
    }
    return {"choices": [{**choice, **changes}], "usage": {"prompt_tokens": len(prompt)}}


class Fake:
    """A vLLM in memory: `answer(body)` is asked for generations, everything else is what vLLM 0.32 says."""

    def __init__(self, answer=lambda body: completion(body["prompt"]), *, raw=False, max_model_len=4096):
        self.answer, self.raw, self.max_model_len = answer, raw, max_model_len
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        body = json.loads(request.content) if request.content else {}
        if request.url.path == "/v1/models":
            model = {"id": "the-model", "root": "org/the-model", "max_model_len": self.max_model_len}
            return httpx.Response(200, json={"data": [model]})
        if str(body.get("request_id", "")).startswith("agentenv-look"):
            return httpx.Response(200, json=completion(body["prompt"], [4], [-1.5] if self.raw else [0.0]))
        answer = self.answer(body)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    @property
    def bodies(self):
        """The generations asked for."""
        bodies = [json.loads(request.content) for request in self.requests if request.content]
        return [body for body in bodies if body and not body["request_id"].startswith("agentenv-look")]


@contextlib.asynccontextmanager
async def engine_over(fake: Fake, **options) -> AsyncIterator[VLLMHTTPEngine]:
    engine = VLLMHTTPEngine(options.pop("base_url", "http://vllm"), transport=StreamedTransport(fake), **options)
    engine.waits = []
    try:
        with recorded_pauses(engine.waits):
            yield engine
    finally:
        await engine.close()


@contextlib.contextmanager
def recorded_pauses(pauses):
    """Record the pauses between attempts and make them short."""
    pause_s = RetryPolicy.pause_s

    def record(*args):
        pauses.append(pause_s(*args))
        return 0.01

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RetryPolicy, "pause_s", record)
        yield


async def ask(engine, prompt=PROMPT, request_id="run/7/0", **sampling):
    return await engine.generate(prompt, SamplingParams(**sampling), request_id=request_id)


def replies(*answers):
    """One answer per generation, the last one for ever."""
    remaining = list(answers)
    return lambda body: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def status(code, message="busy", **headers):
    return httpx.Response(code, json={"error": {"message": message}}, headers=headers)


# ---------------------------------------------------------------------------------------------------- requests, answers


async def test_completions_endpoint_gives_tokens_logprobs_and_stop_reason():
    fake = Fake(lambda body: completion(body["prompt"], finish_reason="stop", stop_reason="</answer>"))
    async with engine_over(fake) as engine:
        result = await ask(engine, temperature=0.5, max_tokens=9, stop=("</answer>",), seed=3)
    assert result.token_ids == (5, 6, 7)
    assert result.logprobs == (-0.5, -1.25, -2.0)
    assert (result.finish_reason, result.matched_stop) == ("stop", "</answer>")
    (body,) = fake.bodies
    assert body["prompt"] == PROMPT
    assert (body["model"], body["return_token_ids"], body["logprobs"]) == ("the-model", True, 0)
    assert (body["temperature"], body["max_tokens"], body["stop"], body["seed"]) == (0.5, 9, ["</answer>"], 3)
    assert body["repetition_penalty"] == 1.0  # else the model's generation config would decide


@pytest.mark.parametrize("base_url", ["http://vllm", "http://vllm/", "http://vllm/v1", "http://vllm/v1/"])
async def test_base_url_with_and_without_v1(base_url):
    fake = Fake()
    async with engine_over(fake, base_url=base_url) as engine:
        await ask(engine)
    assert str(fake.requests[-1].url) == "http://vllm/v1/completions"


async def test_session_header_is_the_episode_and_survives_any_text():
    fake = Fake()
    async with engine_over(fake) as engine:
        await ask(engine, request_id="run/7/3")
        await ask(engine, request_id="räum\n/0")
    assert [request.headers["X-Session-ID"] for request in fake.requests[-2:]] == ["run/7", "r%C3%A4um%0A"]


async def test_api_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("AGENTENV_API_KEY", "sesame")
    fake = Fake()
    async with engine_over(fake) as engine:
        await ask(engine)
    assert fake.requests[-1].headers["Authorization"] == "Bearer sesame"


async def test_missing_logprobs_become_nan():
    fake = Fake(lambda body: completion(logprobs=[-9999.0, None, -1.0]))
    async with engine_over(fake) as engine:
        first, second, third = (await ask(engine)).logprobs
    assert math.isnan(first)
    assert math.isnan(second)
    assert third == -1.0


async def test_raw_logprobs_are_noticed_once(caplog):
    fake = Fake(raw=True)
    with caplog.at_level(logging.WARNING):
        async with engine_over(fake) as engine:
            await ask(engine)
            await ask(engine)
            assert engine.logprobs_mode == "raw"
    assert caplog.text.count("--logprobs-mode processed_logprobs") == 1


@pytest.mark.parametrize(("sampling", "kept"), [({}, True), ({"temperature": 0.0}, True), ({"temperature": 0.7}, False),
                                                ({"top_p": 0.9}, False), ({"top_k": 5}, False)])  # fmt: skip
async def test_raw_logprobs_are_missing_where_they_are_not_those_sampled_from(sampling, kept):
    fake = Fake(lambda body: completion(), raw=True)
    async with engine_over(fake) as engine:
        answer = await ask(engine, **sampling)
    assert all(math.isnan(logprob) != kept for logprob in answer.logprobs)


async def test_a_prompt_over_the_servers_context_is_told_as_that_and_not_sent():
    fake = Fake(lambda body: completion())
    async with engine_over(fake) as engine:
        await engine.start()
        assert (engine.served_names, engine.max_model_len) == (("the-model", "org/the-model"), 4096)
        assert engine.logprobs_mode == "processed"
        num = len(fake.requests)
        with pytest.raises(PromptTooLong, match="4096"):
            await engine.generate([1] * 4096, SamplingParams(), request_id="e/0")
    assert len(fake.requests) == num


async def test_start_says_in_one_line_that_nothing_answers():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # It never listens.
        port = taken.getsockname()[1]
        engine = VLLMHTTPEngine(f"http://127.0.0.1:{port}")
        with pytest.raises(
            ConfigError,
            match=f"--base_url: expected a vLLM server, got none: http://127.0.0.1:{port}/health: .* got Connect",
        ):
            await engine.start()
        await engine.close()


# ---------------------------------------------------------------------------------------------------------- bad answers

BAD_ANSWERS = {
    "garbage": (httpx.Response(200, text="<html>nginx</html>"), "JSON object.*nginx"),
    "an error with status 200": ({"error": {"message": "CUDA out of memory"}}, "without an error, got .*CUDA out of"),
    "no choices": ({}, "choices to be a list"),
    "two choices": ({"choices": [{}, {}]}, "one choice"),
    "text only": (completion(token_ids=None), "got text only"),
    "log-probs of other tokens": (completion(tokens=[5, 6, 9], token_ids=TOKENS), "sampled tokens"),
    "wrong echo": (completion(prompt=[1, 11, 12, 13]), "3 prompt tokens sent"),
    "no log-probs": (completion(logprobs=None, tokens=[]), "token_logprobs to be a list"),
    "short log-probs": (completion(logprobs=[-0.5]), "3 sampled tokens, got 1"),
    "tokens that no record holds": (completion(tokens=[2**31]), "token_ids to be a whole number"),
    "log-probs that are no floats": (completion(logprobs=[10**400, 0, 0]), "log-probabilities of at most 0"),
    "odd finish reason": (completion(finish_reason="content_filter"), "finish_reason"),
    "a stop reason that is a list": (completion(stop_reason=[1]), "stop_reason to be a whole number"),
    "deep brackets": (httpx.Response(200, content=b"[" * 100_000), "JSON object"),
    "gzip": (httpx.Response(200, content=gzip.compress(json.dumps(completion()).encode())), "JSON object"),
    **{
        f"{value!r:.9} cached": (
            {**completion(), "usage": {"prompt_tokens_details": {"cached_tokens": value}}},
            "cached_tokens to be a whole number",
        )
        for value in ("many", -1, True, 10**400)
    },
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_bad_answer_is_an_engine_error_that_says_what_came(name):
    answer, message = BAD_ANSWERS[name]
    fake = Fake(lambda body: answer)
    async with engine_over(fake) as engine:
        with pytest.raises(EngineError, match=message):
            await ask(engine)
    assert len(fake.bodies) == 1


def check_answer(answer):
    """Assert that an answer is refused, or goes through a record and the metrics of a run."""
    try:
        result = completion_of(answer, PROMPT)
        if not result.token_ids:
            return
    except (EngineError, ConfigError):
        return
    trajectory = Trajectory(Task("", task_id="t"), 4096, "t/0", "t")
    trajectory.append_observation(PROMPT)
    trajectory.append_turn(result, "text")
    trajectory.finish(StopReason.MAX_TURNS)
    line = encode_line(trajectory)
    read = trajectory_from_dict(json.loads(decode_line(line)))
    assert encode_line(read) == line
    tally = Tally()
    tally.add(summarize(read))
    assert json.dumps(tally.metrics(num_tasks=1, num_samples=1, wall_s=1.0).to_dict(), allow_nan=False)


@given(damaged({**completion(), "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}))
@settings(max_examples=300, deadline=None)
def test_an_answer_is_an_engine_error_or_a_completion_that_a_record_holds(answer):
    check_answer(answer)


@pytest.mark.parametrize("changes", [{"token_ids": None}, {"prompt_token_ids": None}])
async def test_server_without_token_ids_is_a_config_error(changes, monkeypatch):
    fake = Fake()
    monkeypatch.setattr(f"{__name__}.completion", functools.partial(completion, **changes))
    async with engine_over(fake) as engine:
        with pytest.raises(ConfigError, match="vllm serve MODEL --logprobs-mode processed_logprobs"):
            await ask(engine)


# -------------------------------------------------------------------------------------------------------------- retries


async def test_retries_then_success_with_growing_jittered_waits():
    fake = Fake(replies(status(503), httpx.ConnectError("refused"), status(429), completion()))
    async with engine_over(fake) as engine:
        found = await ask(engine)
        assert (found.token_ids, found.num_request_retries) == ((5, 6, 7), 3)
        assert len(engine.waits) == 3
        assert all(0.5 <= wait / 2.0**attempt <= 1.0 for attempt, wait in enumerate(engine.waits))
    assert len({body["request_id"] for body in fake.bodies}) == 4  # a server may still hold the failed one


@pytest.mark.parametrize("failure", [status(502), status(408), httpx.ReadError("reset"), httpx.ConnectTimeout("")])
async def test_retries_are_bounded_and_the_last_failure_is_named(failure):
    fake = Fake(lambda body: failure)
    async with engine_over(fake, max_retries=2) as engine:
        with pytest.raises(EngineError, match=r"got (\d+: .*busy|ReadError|ConnectTimeout).*\(3 attempts\.\)"):
            await ask(engine)
    assert len(fake.bodies) == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, EngineError), (422, EngineError), (401, ConfigError), (404, ConfigError)],
)
async def test_refusals_are_not_retried_and_quote_the_server(code, kind):
    fake = Fake(lambda body: status(code, "The model `x` does not exist."))
    async with engine_over(fake) as engine:
        with pytest.raises(kind, match=rf"got {code}: .*The model `x` does not exist"):
            await ask(engine)
        assert engine.waits == []
    assert len(fake.bodies) == 1


async def test_a_retry_after_beyond_the_deadline_ends_the_request():
    fake = Fake(lambda body: status(429, **{"Retry-After": "100000"}))
    async with engine_over(fake) as engine:
        with pytest.raises(EngineError, match=r"1 attempt; the next, in 100000\.0 s, would be too late"):
            await ask(engine)
    assert len(fake.bodies) == 1


@pytest.mark.parametrize("base_url", ["", "localhost:8000", "ftp://vllm", "http://", "http://host:port", "/v1"])
def test_base_url_that_is_none_is_a_config_error(base_url):
    with pytest.raises(ConfigError, match="base_url"):
        VLLMHTTPEngine(base_url)


async def test_failed_look_is_shared_and_then_tried_again():
    class Down(Fake):
        down = True

        async def __call__(self, request):
            if self.down:
                self.requests.append(request)
                raise httpx.ConnectError("refused")
            return await super().__call__(request)

    fake = Down()
    async with engine_over(fake, max_retries=1) as engine:
        results = await asyncio.gather(*(ask(engine) for _ in range(10)), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert len(fake.requests) == 2
        fake.down = False
        assert (await ask(engine)).token_ids == (5, 6, 7)


async def test_closed_engine_says_so_and_closes_again():
    async with engine_over(Fake()) as engine:
        await ask(engine)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await ask(engine)


# ------------------------------------------------------------------------------------------------------- real sockets


@dataclass
class Server:
    """HTTP/1.1 on loopback: `behave(reader, writer, body)` is asked for generations and may do anything."""

    behave: Callable[..., Awaitable[None]]
    connections: int = 0
    generations: int = 0

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.lower()[:15] == b"content-length:"), 0
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                if head.startswith(b"GET"):
                    reply(writer, {"data": [{"id": "the-model"}]})
                elif body["request_id"].startswith("agentenv-look"):
                    reply(writer, completion(body["prompt"], [4], [0.0]))
                else:
                    self.generations += 1
                    await self.behave(reader, writer, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def reply(writer, answer):
    data = json.dumps(answer).encode()
    writer.write(f"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode())
    writer.write(data)


@contextlib.asynccontextmanager
async def serving(behave, **options):
    server = Server(behave)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        engine = VLLMHTTPEngine(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", **options)
        try:
            yield server, engine
        finally:
            await engine.close()


async def test_connections_are_pooled_and_bounded():
    async def slowly(reader, writer, body):
        await asyncio.sleep(0.01)
        reply(writer, completion(body["prompt"]))

    async with serving(slowly, max_connections=4) as (server, engine):
        for _ in range(3):
            await asyncio.gather(*(ask(engine, request_id=f"{index}/0") for index in range(12)))
        assert server.generations == 36
        assert server.connections <= 4


async def test_cancelling_reaches_the_server_for_every_request_in_flight():
    gone = set()

    async def behave(reader, writer, body):
        try:
            await reader.readexactly(1)
        except asyncio.IncompleteReadError:
            gone.add(body["request_id"])
            raise

    async with serving(behave) as (server, engine):
        asked = [asyncio.ensure_future(ask(engine, request_id=f"{index}/0")) for index in range(8)]
        await until(lambda: server.generations == 8)
        for each in asked:
            each.cancel()
        await until(lambda: len(gone) == 8)
