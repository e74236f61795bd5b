"""`llm_engine` called from another event loop, as servers in threads do: the engine is asked on its own."""

import asyncio
import threading

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.types import SamplingParams
from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import EngineError
from agentenv.interop.openrlhf.engine import LLMEngine, VLLMStyleSampling
from agentenv.testing.tokenizers import CharTokenizer
from tests.waits import until
from tests.with_openrlhf.fakes import Params

TOKENIZER = CharTokenizer()
PROMPT = TOKENIZER.encode("prompt")


class Watched(ScriptedEngine):
    """Notes the loops that it was asked on."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.loops = []

    async def generate(self, *args, **options):
        self.loops.append(asyncio.get_running_loop())
        return await super().generate(*args, **options)


class Elsewhere:
    """An event loop in a thread."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def start(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def do(self, coroutine):
        return await asyncio.wrap_future(self.start(coroutine))


def engine_of(script=("hi",), **options):
    engine = Watched(script, TOKENIZER, **options)
    return LLMEngine(engine, Chat(TOKENIZER), "episode"), engine


async def test_the_engine_is_asked_on_its_own_loop_wherever_the_call_comes_from():
    llm, engine = engine_of()
    with Elsewhere() as thread:
        outs = [await thread.do(llm.generate(PROMPT, Params(max_tokens=9))), await llm.generate(PROMPT, Params())]
        own = await thread.do(llm.generate(PROMPT, SamplingParams(max_tokens=9), request_id="mine/0"))
    assert [out.outputs[0].text for out in outs] == ["hi", "hi"]
    assert own.token_ids[:2] == tuple(TOKENIZER.encode("hi"))
    assert engine.loops == [asyncio.get_running_loop()] * 3


async def test_objects_made_outside_a_loop_are_used_on_the_callers_loop():
    made = await asyncio.to_thread(engine_of)
    out = await made[0].generate(PROMPT, VLLMStyleSampling(max_tokens=9))
    assert (out.outputs[0].text, made[1].loops) == ("hi", [asyncio.get_running_loop()])


async def test_a_shared_servers_requests_are_known_as_conversations_by_their_tokens():
    llm, engine = engine_of(["one", "two"], latency_s=0.05)
    with Elsewhere() as thread:
        first = [await thread.do(llm.generate(PROMPT, Params(max_tokens=9))) for _ in range(2)]
        (ids,) = {(*out.prompt_token_ids, *out.outputs[0].token_ids, *TOKENIZER.encode("more")) for out in first}
        said = await asyncio.gather(*(thread.do(llm.generate(ids, Params(max_tokens=9))) for _ in first))
        assert [out.outputs[0].text for out in said] == ["two", "two"]
        await thread.do(llm.generate([*ids[:-1], 5], Params(max_tokens=9)))
    await llm.generate(PROMPT, Params(max_tokens=9))
    asked = [request.request_id.removeprefix("episode") for request in engine.requests]
    assert asked == ["-served-0/0", "-served-1/0", "-served-1/1", "-served-0/1", "-served-2/0", "/0"]


async def test_errors_cross_with_their_class():
    llm, _ = engine_of(crash_at=[0])
    with Elsewhere() as thread, pytest.raises(EngineError):
        await thread.do(llm.generate(PROMPT, Params(max_tokens=9)))


async def test_cancelling_there_cancels_the_generation_here():
    llm, engine = engine_of(latency_s=60)
    with Elsewhere() as thread:
        asked = thread.start(llm.generate(PROMPT, Params(max_tokens=9)))
        await until(lambda: engine.loops)
        asked.cancel()
        await until(lambda: engine.num_cancelled)
    assert engine.num_cancelled == 1


def test_a_server_that_outlives_the_run_reports_it():
    async def made():
        return engine_of()[0]

    async def ask(llm):
        with pytest.raises(EngineError, match="expected the event loop of the run"):
            await llm.generate(PROMPT, Params(max_tokens=9))

    asyncio.run(ask(asyncio.run(made())))


def test_the_end_of_the_run_cancels_what_a_server_still_waits_for():
    async def begun(thread):
        llm, engine = engine_of(latency_s=60)
        asked = thread.start(llm.generate(PROMPT, Params(max_tokens=9)))
        await until(lambda: engine.loops)
        return asked

    with Elsewhere() as thread:
        asked = asyncio.run(begun(thread))
        with pytest.raises(BaseException) as raised:  # noqa: PT011
            asked.result(timeout=300)
    assert "Cancelled" in type(raised.value).__name__
