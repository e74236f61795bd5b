"""The engine that plays a script: what its script sees, and what it keeps."""

import pytest

from agentenv import SamplingParams, ScriptedEngine
from agentenv.core.engine import EngineOptions
from agentenv.engines.factory import make_engine
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.errors import ConfigError
from agentenv.testing.tokenizers import CharTokenizer


async def asked(engine, *prompts):
    tokenizer = engine.tokenizer
    return [
        tokenizer.decode((await engine.generate(tokenizer.encode(each), SamplingParams(), request_id="e/0")).token_ids)
        for each in prompts
    ]


async def test_a_script_sees_the_text_of_each_prompt_and_the_number_of_the_call():
    engine = ScriptedEngine(lambda request: f"{request.call_index} {request.prompt}", CharTokenizer())
    assert [text[:3] for text in await asked(engine, "a", "b")] == ["0 a", "1 b"]
    assert [request.prompt for request in engine.requests] == ["a", "b"]


async def test_the_engine_of_a_run_keeps_no_request_and_counts_its_calls():
    script = [str(number) for number in range(3)]
    engine = make_engine("scripted", EngineOptions("", CharTokenizer(), args={"script": script, "crash_at": 7}))
    await asked(engine, "a", "b")
    assert engine.requests == []
    seen = []
    counting = ScriptedEngine(lambda request: seen.append(request.call_index) or "x", keeps_requests=False)
    await asked(counting, "a", "b", "c")
    assert seen == [0, 1, 2]


async def test_a_list_of_replies_decodes_no_prompt():
    class Encoding(CharTokenizer):
        def decode(self, token_ids, **options):
            raise AssertionError("decoded")

    engine = ScriptedEngine(["yes"], Encoding())
    completion = await engine.generate([97] * 10, SamplingParams(), request_id="e/0")
    assert CharTokenizer().decode(completion.token_ids).startswith("yes")


@pytest.mark.parametrize("script", ["no_such_module:f", "json:no_such_function", "json"])
def test_a_script_that_is_not_a_function_is_refused(script):
    with pytest.raises(ConfigError, match="script: expected a list of replies or module:function"):
        make_engine("scripted", EngineOptions("", CharTokenizer(), args={"script": script}))


def test_the_plain_tokenizer_is_called_as_openrlhfs_files_call_one():
    tokenizer = PlainTextTokenizer()
    assert tokenizer("aé", add_special_tokens=False)["input_ids"] == [97, 233]
    assert tokenizer(text="aé", add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist() == [97, 233]
