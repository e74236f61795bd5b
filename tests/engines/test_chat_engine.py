"""ChatEngine: what it sends, what it makes of answers and refusals, and the episodes of it."""

import asyncio
import json
import socket
import threading
import time
from typing import ClassVar

import pytest

import agentenv
from agentenv.compare import compare
from agentenv.core.agent import AgentInstance
from agentenv.core.engine import NoTokenizer
from agentenv.core.types import Conversation, Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.chat.engine import ChatEngine
from agentenv.engines.chat.wire import RepeatedAnswer, read_prices
from agentenv.episode.failures import error_name
from agentenv.episode.loop import run_episode
from agentenv.errors import ConfigError, EngineError, PromptTooLong, RunStopped
from agentenv.runs.display.conversation import episode_line
from agentenv.runs.display.report import result_rows
from agentenv.runs.records.tables import episode_row, turn_rows
from agentenv.runs.rollout import load_run
from tests.api_model import called, completion, served

HELLO = Conversation([{"role": "user", "content": "hello"}])
SHORT = SamplingParams(max_tokens=64)
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}, "return": {}}}
TOO_LONG = {
    "error": {"message": "This model's maximum context length is 128 tokens.", "code": "context_length_exceeded"}
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("agentenv.engines.chat.engine.FIRST_PAUSE_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def ask(answer, sampling=SHORT, asked=HELLO, model="the-model", **options):
    """Return the completion, or the error, and what the server was asked."""
    with served(answer) as server:
        engine = ChatEngine(server.base_url, model, **{"timeout_s": 30.0, "max_retries": 2} | options)
        try:
            return await engine.generate(asked, sampling, request_id="0/0"), server
        except (EngineError, RunStopped, ConfigError) as error:
            return error, server
        finally:
            await engine.close()


def in_turn(*answers):
    """Return an answer function that says one after the other, and the last one again."""
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


class Says(AgentInstance):
    async def step(self, states):
        return StepResult(reward=1.0, terminated=True)


class Asks(AgentInstance):
    """Offers a tool, and answers its calls until there are none; keeps what it was given."""

    seen: ClassVar[list] = []

    async def reset(self, states):
        self.seen.clear()
        return {**states, "tools": [TOOL]}

    async def step(self, states):
        self.seen.append(states)
        if not states["tool_calls"].items:
            return StepResult("Use the tool.", reward=0.5)
        results = [
            {"role": "tool", "tool_call_id": each.call_id, "content": "3"} for each in states["tool_calls"].items
        ]
        return StepResult(results, reward=1.0)

    async def on_truncate(self, states):
        return StepResult(reward=10.0)


async def play(answer, env=Asks, **limits):
    with served(answer) as server:
        engine = ChatEngine(server.base_url, "the-model", timeout_s=60.0, max_retries=0)
        task = Task([{"role": "user", "content": "1 + 2?", "trusted": True}])
        try:
            return await run_episode(env, task, engine=engine, limits=Limits(**limits)), server
        finally:
            await engine.close()


async def test_a_request_has_only_what_the_flags_change_and_no_model_refuses():
    _, server = await ask(in_turn("hi"))
    messages = [{"role": "user", "content": "hello"}]
    assert server.requests == [
        {"model": "the-model", "messages": messages, "temperature": 1.0, "max_completion_tokens": 64}
    ]
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, max_tokens=9, stop=("END",), seed=3)
    extra = {"seed": None, "reasoning_effort": "low"}
    _, server = await ask(in_turn("hi"), sampling, Conversation(messages, [TOOL]), extra_body=extra)
    assert server.requests == [
        {
            "model": "the-model", "messages": messages, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
            "stop": ["END"], "max_completion_tokens": 9, "reasoning_effort": "low",
            "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}],
        }
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["min_tokens", "stop_token_ids"])
async def test_sampling_by_token_ids_is_refused(name):
    sampling = SamplingParams(max_tokens=9, **{name: 2 if name == "min_tokens" else (7,)})
    error, server = await ask(in_turn("hi"), sampling)
    assert isinstance(error, ConfigError)
    assert f"--{name}: expected none with --engine chat" in str(error)
    assert server.requests == []


async def test_the_key_comes_from_the_variable_and_is_in_no_message(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-first")
    monkeypatch.setenv("OTHER_KEY", "sk-second")
    _, server = await ask(in_turn("hi"))
    assert server.keys == ["Bearer sk-first"]
    refused = in_turn((401, {}, {"error": {"message": "Incorrect API key provided: sk-second"}}))
    error, server = await ask(refused, api_key_env="OTHER_KEY")
    assert server.keys == ["Bearer sk-second"]
    assert isinstance(error, ConfigError)
    assert "sk-" not in str(error)
    assert "***" in str(error)
    assert str(error).endswith(" Check the API key (OTHER_KEY).")
    monkeypatch.delenv("OPENAI_API_KEY")
    error, _ = await ask(in_turn((401, {}, {})))
    assert str(error).endswith(" No API key was sent: set OPENAI_API_KEY.")
    with pytest.raises(ConfigError, match="--api_key_env: expected a key in the environment variable 'NONE'"):
        ChatEngine("http://127.0.0.1:1/v1", "the-model", api_key_env="NONE")


async def test_a_server_that_is_not_there_or_refuses_the_key_is_one_line_before_the_run():
    with served(in_turn("hi")) as server:
        engine = ChatEngine(server.base_url, "the-model")
        await engine.start()
        assert engine.max_model_len is None
        await engine.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # It never listens.
        engine = ChatEngine(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "the-model")
        with pytest.raises(ConfigError, match="--base_url: expected a server, got none"):
            await engine.start()
        await engine.close()


async def test_a_host_that_no_one_knows_is_one_line_before_the_run(monkeypatch):
    def unknown(*names, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    engine = ChatEngine("http://no-such-host.invalid/v1", "the-model")
    with pytest.raises(ConfigError, match=r"--base_url: expected a server, got none: .*Name or service not known"):
        await engine.start()
    await engine.close()


async def test_a_rate_limit_is_waited_for():
    started = time.monotonic()
    limited = (429, {"Retry-After": "0.2"}, {"error": {"message": "Rate limit reached"}})
    found, server = await ask(in_turn(limited, "hi"))
    assert found.answer.content == "hi"
    assert len(server.requests) == 2
    assert time.monotonic() - started >= 0.2
    assert found.num_request_retries == 1


NO_CHOICE = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "choices": []}


@pytest.mark.parametrize("content", ["<html>Welcome</html>", NO_CHOICE, {"detail": "Not here"}, [], {"choices": [{}]}])
async def test_what_is_no_completion_fails_after_a_few_requests_and_not_at_the_end_of_the_time(content):
    error, server = await ask(lambda body: (200, {}, content), max_retries=10)
    assert len(server.requests) == 3
    assert "expected a chat completion, got" in str(error)


async def test_json_that_was_cut_off_is_told_from_a_whole_answer_of_another_form():
    body = json.dumps({"id": "chatcmpl-1", "choices": [{"message": {"content": "long" * 200}}]}).encode()
    error, _ = await ask(lambda _: (200, {}, body[:500]), max_retries=0)
    assert "expected a chat completion, got 500 bytes that are not JSON (Unterminated string " in str(error)


@pytest.mark.parametrize("content", ["<html>Bad gateway</html>", NO_CHOICE])
async def test_what_is_no_completion_is_sent_again_and_counted_apart_from_other_failures(content):
    busy, page = (503, {}, "busy"), (200, {}, content)
    found, server = await ask(in_turn(busy, busy, page, busy, page, "hi"), max_retries=10)
    assert found.answer.content == "hi"
    assert len(server.requests) == 6


async def test_an_error_in_an_answer_of_status_200_is_tried_again():
    found, server = await ask(in_turn((200, {}, {"error": {"code": 502, "message": "upstream"}}), "hi"))
    assert found.answer.content == "hi"
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("status", "advice"), [(500, "Check the server's log."), (429, "Send fewer at a time: lower --concurrency.")]
)
async def test_a_failure_that_lasts_is_told_once_for_all_requests(status, advice, caplog):
    down = (status, {}, {"error": {"message": "The server had an error"}})
    wrong = (200, {}, {"error": {"code": 502, "message": "upstream"}})
    with served(in_turn(*[down] * 8, *[wrong] * 8, "hi")) as server:
        engine = ChatEngine(server.base_url, "the-model", timeout_s=30.0, max_retries=20)
        await asyncio.gather(*(engine.generate(HELLO, SHORT, request_id=f"{i}/0") for i in range(2)))
        await engine.close()
    first, second = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert f"got {status}" in first
    assert f"{advice} Attempt 4 follows in" in first
    assert "expected a chat completion, got" in second


async def test_a_server_that_knows_the_older_name_of_the_limit_is_asked_with_it():
    def answer(body):
        if "max_completion_tokens" in body:
            return (422, {}, {"detail": [{"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs"}]})
        return "hi"

    found, server = await ask(answer)
    assert found.answer.content == "hi"
    assert [body.get("max_tokens") for body in server.requests] == [None, 64]
    assert found.num_request_retries == 1


async def test_requests_at_the_same_time_learn_the_older_name_of_the_limit():
    together = threading.Barrier(4)

    def answer(body):
        if "max_completion_tokens" in body:
            together.wait(60)
            return (400, {}, {"error": {"message": "Unrecognized request argument: max_completion_tokens"}})
        return "hi"

    with served(answer) as server:
        engine = ChatEngine(server.base_url, "the-model", max_retries=0)
        found = await asyncio.gather(*(engine.generate(HELLO, SHORT, request_id=f"{i}/0") for i in range(4)))
        await engine.close()
    assert [each.answer.content for each in found] == ["hi"] * 4
    assert sorted(body.get("max_tokens", 0) for body in server.requests) == [0] * 4 + [64] * 4


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens is too large: 99999. This model supports at most 64 completion tokens, whereas you provided 99999.",
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
    ],
)
async def test_a_limit_beyond_what_the_model_takes_is_left_to_the_server(message):
    def answer(body):
        return (400, {}, {"error": {"message": message}}) if "max_completion_tokens" in body else "hi"

    found, server = await ask(answer)
    assert found.answer.content == "hi"
    assert len(server.requests) == 2


async def test_a_conversation_beyond_the_context_is_told_apart_from_other_refusals():
    error, server = await ask(in_turn((400, {}, TOO_LONG)))
    assert isinstance(error, PromptTooLong)
    assert len(server.requests) == 2
    error, server = await ask(in_turn((400, {}, {"error": {"message": "The response was filtered"}})))
    assert isinstance(error, EngineError)
    assert not isinstance(error, PromptTooLong)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "message",
    [
        "Your input exceeds the context window of this model. Please adjust your input and try again.",
        "prompt is too long: 213462 tokens > 200000 maximum",
        "Input is too long for requested model.",
        "The input token count (1196265) exceeds the maximum number of tokens allowed (1048575).",
        "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
        "Please reduce the length of the messages or completion. Current length is 9000 while limit is 8192",
        "This endpoint's maximum context length is 4096 tokens. However, you requested about 5000 tokens "
        "(3000 of text input, 1000 of tool input, 1000 in the output).",
        "the request exceeds the available context size, try increasing it",
        "prompt token count of 9000 exceeds the limit of 8192",
        "Your request exceeded model token limit: 8192 (requested: 9000)",
        "too many tokens: total number of tokens in the prompt cannot exceed 4081",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "Prompt exceeds max length",
    ],
)
async def test_servers_say_that_a_conversation_is_too_long_in_many_ways(message):
    error, server = await ask(in_turn((400, {}, {"error": {"message": message}})))
    assert isinstance(error, PromptTooLong)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "message",
    [
        "Request rate limit exceeded",
        "tokens per day limit exceeded",
        "You exceeded the limit of 60000 tokens/min. Reduce the length of the messages or wait.",
        "Daily token limit exceeded for your plan",
        "Request too large for model `m` on tokens per minute (TPM): Limit 6000, Requested 7000, reduce your message.",
        "This request would exceed your rate limit for the context window of 1M tokens",
        "Too many tokens, please wait before trying again.",
        "Your token quota was exceeded",
        "Your request exceeds the maximum number of images",
        "The prompt has 60 images, which exceeds the maximum of 50",
        "The input image is too large",
        "The number of tools in the request exceeds 128",
        "Request exceeds the maximum size",
    ],
)
async def test_a_refusal_for_another_limit_is_a_failure_and_is_sent_once(message):
    error, server = await ask(in_turn((413, {}, {"error": {"message": message}})))
    assert isinstance(error, EngineError)
    assert not isinstance(error, PromptTooLong)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [402, 429, 403])
async def test_an_account_without_credit_ends_the_run_with_one_advice(status):
    error, server = await ask(in_turn((status, {}, {"error": {"message": "No.", "code": "insufficient_quota"}})))
    assert isinstance(error, RunStopped)
    assert str(error).endswith("'. The account has no credit: add some. Then continue with --resume.")
    assert len(server.requests) == 1


async def test_a_refused_field_is_named_with_the_flag_that_leaves_it_out():
    refusal = {"error": {"message": "'seed' is wrong.", "param": "seed"}}
    error, _ = await ask(in_turn((400, {}, refusal)), SamplingParams(max_tokens=64, seed=3))
    assert type(error) is EngineError
    assert error_name(error) == "EngineError (400)"
    assert """Correct the request. --engine_args '{"extra_body": {"seed": null}}' leaves it out.""" in str(error)
    error, _ = await ask(in_turn((400, {}, {"error": {"message": '"auto" tool choice requires a parser'}})))
    assert "engine_args" not in str(error)


async def test_an_unknown_part_of_a_needed_field_ends_no_run():
    says = {"error": {"message": "Unknown parameter: 'tools[0].strict'. This was the request with seed 3."}}
    error, _ = await ask(in_turn((400, {}, says)), SamplingParams(max_tokens=64, seed=3))
    assert type(error) is EngineError


@pytest.mark.parametrize(
    "said",
    ["Unknown parameter: 'seed'.", "Unsupported parameter: 'seed'", "Unrecognized request argument supplied: seed"],
)
async def test_a_field_that_the_server_does_not_know_ends_the_run_at_its_first_refusal(said):
    with served(lambda body: (400, {}, {"error": {"message": said}})) as server:
        engine = ChatEngine(server.base_url, "the-model")
        rows, flags = [{"prompt": "?", "label": ""}] * 3, {"seed": 0, "concurrency": 1, "progress": "none"}
        with pytest.raises(ConfigError, match=r'"seed": null.* leaves it out'):
            await agentenv.arollout(Says, rows, engine=engine, **flags)
        await engine.close()
    assert len(server.requests) == 1


@pytest.mark.parametrize("model", ["org/seed", "seed-oss"])
async def test_a_field_that_is_part_of_the_models_name_is_not_taken_for_refused(model):
    refusal = {"error": {"message": f"{model} has no chat template."}}
    error, _ = await ask(in_turn((400, {}, refusal)), SamplingParams(max_tokens=64, seed=3), model=model)
    assert f"{model} has no chat template" in str(error)
    assert "engine_args" not in str(error)


async def test_a_code_of_the_server_says_that_a_conversation_is_too_long_whatever_its_words():
    refusal = {"error": {"code": "context_length_exceeded", "message": "Your plan has 8192 tokens a day or request."}}
    error, _ = await ask(in_turn((400, {}, refusal)))
    assert isinstance(error, PromptTooLong)


@pytest.mark.parametrize(
    ("message", "how", "content"),
    [
        ("", {}, ""),
        ("", {"finish_reason": "length", "usage": None}, ""),
        ({"content": None, "refusal": "I can't help."}, {}, "I can't help."),
        ("", {"usage": None}, None),
        ("4", {"finish_reason": "content_filter"}, None),
    ],
)
async def test_an_empty_or_cut_answer_and_a_refusal_are_actions_and_one_without_any_tokens_is_a_failure(
    message, how, content
):
    found, _ = await ask(lambda body: completion(message, **how))
    assert isinstance(found, EngineError) if content is None else found.answer.content == content
    if content is None and not message:
        assert 'neither: {"finish_reason": "stop", "message": {"role": "assistant", "content": "' in str(found)


@pytest.mark.parametrize(("name", "is_compared"), [("chatcmpl-0123456789abcdef", True), ("chatcmpl-0", False)])
async def test_an_answer_with_the_id_of_an_earlier_one_is_a_failure_if_its_id_is_long(name, is_compared):
    with served(lambda body: completion("4") | {"id": name}) as server:
        engine = ChatEngine(server.base_url, "the-model")
        asked = [engine.generate(HELLO, SHORT, request_id=f"{i}/0") for i in range(2)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        await engine.close()
    failed = [str(each) for each in found if isinstance(each, RepeatedAnswer)]
    assert ["Switch off caches of answers" in each for each in failed] == [True] * is_compared


async def test_an_answer_keeps_reasoning_apart_and_counts_tokens():
    message = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2 is 4."}
    usage = {"prompt_tokens": 1000, "completion_tokens": 200, "prompt_tokens_details": {"cached_tokens": 600}}
    prices = read_prices('{"the-model": {"input": 2, "output": 10, "cached_input": 1}}', "the-model")
    found, _ = await ask(lambda body: completion(message) | {"usage": usage}, prices=prices)
    answer = found.answer
    assert (answer.content, answer.reasoning, answer.model) == ("4", "2 and 2 is 4.", "the-model-2026-01-01")
    assert (answer.num_input_tokens, found.num_cached_tokens, answer.num_output_tokens) == (1000, 600, 200)
    assert answer.cost_usd == pytest.approx((400 * 2 + 600 * 1 + 200 * 10) / 1e6)
    assert found.token_ids == ()
    assert found.logprobs is None


@pytest.mark.parametrize("count", [-1, "many", 10**9, None])
async def test_a_count_of_tokens_that_cannot_be_is_unknown_and_so_is_its_cost(count):
    usage, prices = (
        {"prompt_tokens": count, "completion_tokens": 5},
        read_prices('{"the-model": {"input": 2, "output": 1}}', "the-model"),
    )
    found, _ = await ask(lambda body: completion("4") | {"usage": usage}, prices=prices)
    assert (found.answer.num_input_tokens, found.answer.cost_usd) == (None, None)


@pytest.mark.parametrize(
    ("usage", "known"),
    [
        (None, "unknown in, unknown out"),
        ((-1, 5), "unknown in, 10 out"),
        ((7, -1), "14 in (0% cached), unknown out"),
    ],
)
async def test_a_run_shows_what_was_sent_again_who_answered_and_that_it_sent_no_valid_counts(usage, known, monkeypatch):
    monkeypatch.setattr("agentenv.engines.chat.engine.FIRST_PAUSE_S", 0.001)
    limited = (429, {}, {"error": {"message": "Rate limit reached"}})
    with served(in_turn(limited, completion("four", usage=usage) | {"model": "a-cheaper-one"})) as server:
        engine = ChatEngine(server.base_url, "the-model")
        run = await agentenv.arollout(Says, [{"prompt": "2+2?", "label": "4"}] * 2, engine=engine, progress="none")
        await engine.close()
    shown = dict(result_rows(run.metrics))
    assert shown["request retries"] == "1 request of a recorded action was sent again"
    assert shown["answered by"] == "a-cheaper-one 2"
    assert shown["tokens"] == f"{known}: the server sent no valid counts"
    assert shown["speed"].count("tokens/s") == 2 - known.count("unknown")
    assert sorted(turn.num_request_retries for each in run for turn in each.turns) == [0, 1]


async def test_answers_without_counts_are_counted_and_have_no_number_of_tokens(tmp_path):
    with served(in_turn(completion("four", usage=(7, 5)), completion("five six", usage=None))) as server:
        engine = ChatEngine(server.base_url, "the-model")
        rows = [{"prompt": "2+2?", "label": "4"}] * 3
        run = await agentenv.arollout(Says, rows, engine=engine, progress="none", out=tmp_path / "run")
        await engine.close()
    assert run.metrics.tokens.num_uncounted == load_run(tmp_path / "run").metrics.tokens.num_uncounted == 2
    assert run.metrics.hygiene.length_correlation is None
    shown = dict(result_rows(run.metrics))
    assert shown["tokens"] == "7 in (0% cached), 5 out + 2 answers without valid counts"
    assert "tokens/s" not in shown["speed"]
    rows = [*map(episode_row, run), *(row for each in run for row in turn_rows(each))]
    assert sorted(str(row["num_action_tokens"]) for row in rows) == ["5"] * 2 + ["None"] * 4
    assert compare(tmp_path / "run", tmp_path / "run").lengths.num_tasks == 1
    lines = [episode_line(each) for each in run]
    assert sum("token" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ((429, {}, {"error": {"message": "Rate limit reached"}}), "EngineError (429)"),
        ((500, {}, {"error": {"message": "oops"}}), "EngineError (500)"),
        (NO_CHOICE, "EngineError (200)"),
        (completion("", usage=None), "EmptyAnswer"),
        (completion("4", finish_reason="content_filter"), "FilteredAnswer"),
    ],
)
async def test_a_run_counts_what_failed_it_by_the_status_of_the_server_or_what_is_wrong_with_the_answer(answer, name):
    with served(lambda body: answer) as server:
        engine = ChatEngine(server.base_url, "the-model", max_retries=1)
        flags = {"max_retries": 1, "max_error_share": 1.0, "progress": "none"}
        run = await agentenv.arollout(Says, [{"prompt": "2+2?", "label": "4"}] * 2, engine=engine, **flags)
        await engine.close()
    assert run.metrics.retried_errors == {name: 2}
    assert run.metrics.error_types == {f"infra:{name}": 2}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.json", "expected FILE.json or a JSON object, got 'missing.json'"),
        ("{", "expected a JSON object"),
        ('{"other": {"input": 1, "output": 2}}', "under 'the-model', got None"),
        ('{"the-model": {"input": 1}}', 'expected {"input": 2.5, "output": 10}'),
        ('{"the-model": {"input": 1, "output": 2, "per": 3}}', 'optionally with "cached_input"'),
        ('{"the-model": {"input": 1, "output": -2}}', "the-model: output: expected a number"),
        ('{"the-model": {"input": 1, "output": "2"}}', "the-model: output: expected a number"),
        ('{"the-model": {"input": 1, "output": 2}, "other": 3}', "under 'other', got 3"),
    ],
)
def test_wrong_prices_are_refused(spec, message):
    with pytest.raises(ConfigError) as error:
        read_prices(spec, "the-model")
    assert "--prices: " in str(error.value)
    assert message in str(error.value)


def test_prices_are_read_from_a_file_and_cached_input_costs_as_much_by_default(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text('{"the-model": {"input": 3, "output": 4}, "another": {"input": 1, "output": 1}}')
    assert read_prices(str(path), "the-model")["the-model"].cost_usd(10, 10, 0) == pytest.approx(3e-5)


@pytest.mark.parametrize(("named", "cost"), [("cheap", 1e-6), ("the-model-2026-01-01", 2e-6), (["cheap"], 2e-6)])
async def test_an_answer_costs_what_the_model_costs_that_it_names(named, cost):
    prices = read_prices({"the-model": {"input": 2, "output": 2}, "cheap": {"input": 1, "output": 1}}, "the-model")
    found, _ = await ask(lambda body: completion("4", usage=(1, 0)) | {"model": named}, prices=prices)
    assert found.answer.cost_usd == pytest.approx(cost)


async def test_calls_reach_the_environment_and_their_results_the_model():
    calls = called(("add", {"a": 1}), ("add", '{"a": '), content="I add.")
    trajectory, server = await play(in_turn(calls, "3"), max_turns=3)
    first, second = Asks.seen[0]["tool_calls"].items
    assert (first.name, dict(first.arguments), first.call_id) == ("add", {"a": 1}, "call_add_0")
    assert "its arguments are not JSON" in second.problem
    assert (second.name, second.call_id) == ("add", "call_add_1")
    text = Asks.seen[0]["action_text"]
    assert text == "\n".join(["I add.", first.text, second.text])
    assert trajectory.turns[0].action == text
    malformed = {**calls["tool_calls"][1], "function": {"name": "add", "arguments": '{"text": "{\\"a\\": "}'}}
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [calls["tool_calls"][0], malformed]},
        {"role": "tool", "tool_call_id": "call_add_0", "content": "3"},
        {"role": "tool", "tool_call_id": "call_add_1", "content": "3"},
    ]
    assert server.requests[2]["messages"][-2:] == [
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Use the tool."},
    ]
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.reward == 1.0 + 0.5 + 0.5 + 10.0


async def test_states_have_text_and_no_ids_and_tokens_as_the_server_counts_them():
    await play(lambda body: completion("3", usage=(100, 20)), max_turns=2, max_length=1000)
    states = Asks.seen[1]
    assert states["action_ids"] == []
    assert states["tokens_left"] == 880
    assert states["finish_reason"] == "stop"
    assert states["observation_text"] == "User: 1 + 2?\n\nAssistant: 3\n\nUser: Use the tool.\n\nAssistant:"


def answering(observation):
    """An environment that answers every action so."""

    class Answers(Asks):
        async def step(self, states):
            return StepResult(observation)

    return Answers


def result_of(call_id, content):
    return {"role": "tool", "tool_call_id": call_id, "name": "add", "content": content}


async def test_an_environment_that_leaves_a_call_unanswered_breaks_the_contract():
    calls, only_one = called(("add", {}), ("add", {})), answering([result_of("call_add_0", "3")])
    trajectory, _ = await play(in_turn(calls), only_one)
    assert trajectory.error.kind == "contract"
    assert "expected one message of the role tool for each call" in trajectory.error.message
    assert trajectory.reward is None


async def test_calls_that_are_answered_in_words_are_sent_back_in_words():
    in_words = answering("The result is 3.")
    trajectory, server = await play(in_turn(called(("add", {"a": 1})), "3"), in_words, max_turns=2)
    assert server.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": trajectory.turns[0].action},
        {"role": "user", "content": "The result is 3."},
    ]
    assert '{"name": "add", "arguments": {"a": 1}}' in trajectory.turns[0].action


async def test_an_answer_to_no_call_is_sent_as_a_message_of_the_user():
    trajectory, server = await play(in_turn("3"), answering([result_of("none", "No call found.")]), max_turns=2)
    assert trajectory.error is None
    assert server.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "No call found."},
    ]


async def test_an_episode_ends_when_the_tokens_that_the_server_counts_reach_the_limit():
    trajectory, server = await play(lambda body: completion("3", usage=(80, 15)), max_turns=9, max_length=96)
    assert trajectory.stop_reason is StopReason.MAX_LENGTH
    assert len(trajectory.turns) == len(server.requests) == 1
    assert trajectory.reward == 0.5 + 10.0
    assert server.requests[0]["max_completion_tokens"] == 96
    trajectory, server = await play(lambda body: completion("3", usage=(40, 5)), max_turns=2, max_length=96)
    assert [body["max_completion_tokens"] for body in server.requests] == [96, 51]


async def test_without_counts_of_the_server_turns_limit_an_episode_alone():
    trajectory, server = await play(lambda body: completion("3" * 99, usage=None), max_turns=3, max_length=8)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert [body["max_completion_tokens"] for body in server.requests] == [8, 8, 8]
    assert trajectory.cost_usd is None


async def test_a_full_context_truncates_an_episode_and_refuses_a_first_prompt():
    def answer(body):
        return (400, {}, TOO_LONG) if len(body["messages"]) > 1 else "3"

    trajectory, _ = await play(answer)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.MAX_LENGTH, None)
    assert trajectory.reward == 0.5 + 10.0
    trajectory, _ = await play(in_turn((400, {}, TOO_LONG)))
    assert (trajectory.reward, trajectory.error.kind, trajectory.error.where) == (None, "data", "prompt")
    assert "maximum context length" in trajectory.error.message


def test_its_tokenizer_refuses_every_use():
    tokenizer = NoTokenizer()
    for use in (tokenizer.encode, tokenizer.decode, tokenizer.apply_chat_template):
        with pytest.raises(ConfigError, match="got chat, which returns no token ids"):
            use([])


async def test_a_message_of_the_prompt_may_have_calls_with_arguments_as_objects():
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    shots = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "1"}]

    class Shots(Asks):
        async def reset(self, states):
            return {**states, "observation": [*shots, *states["observation"]]}

    _, server = await play(in_turn("3"), Shots, max_turns=1)
    sent = server.requests[0]["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"a": 1}
    assert call["function"]["arguments"] == {"a": 1}


class InWords(Asks):
    """Describes its tool in the prompt and offers none."""

    async def reset(self, states):
        self.seen.clear()
        return states


async def test_where_no_tools_are_offered_calls_are_read_from_text_and_answered_in_words():
    text = 'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    _, server = await play(in_turn(text), InWords, max_turns=2)
    assert Asks.seen[0]["tool_calls"].calls[0].arguments == {"a": 1}
    assert [each["role"] for each in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": text}
    assert server.requests[1]["messages"][2]["content"] == "3"
    await play(in_turn(text), max_turns=1)  # which offers a tool
    assert Asks.seen[0]["tool_calls"].items == ()
