"""Structural tags: what is sampled under one matches it, and which of its tokens were forced."""

import asyncio
import importlib.util
import json
import math
import random
from dataclasses import replace

import jsonschema
import pytest

from agentenv.chat.chat import Chat
from agentenv.chat.constraints import calls_tag, json_tag
from agentenv.core.engine import Engine, sample
from agentenv.core.types import Completion, SamplingParams
from agentenv.engines.constraints import Constrainer, with_forced
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.engines.pool import EnginePool
from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import ConfigError, DataError, EngineError
from agentenv.training.rollouts import FixedSamplingEngine

MODEL = resolve_model("tiny-math")
TOKENIZER = load_tokenizer(MODEL)
CHAT, CONSTRAINER = Chat(TOKENIZER), Constrainer(TOKENIZER)
END = TOKENIZER.eos_token_id
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}},
                "required": ["a", "b"],
            },
        },
    }
]
PROMPT = CHAT.prompt([{"role": "user", "content": "What is 3 plus 1?"}])


def constant(text):
    return json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": text}})


def drawn(tag, seed, num=300):
    """The text of an action of uniformly drawn legal tokens, or None if it did not end by itself."""
    walk, rng, ids = asyncio.run(CONSTRAINER.follow(tag, ())), random.Random(seed), []
    for _ in range(num):
        legal = walk.legal()
        token = END if legal[END] else rng.choice(legal.nonzero()[:, 0].tolist())
        assert walk.take(token, legal)
        if token == END:
            return TOKENIZER.decode(ids)
        ids.append(token)
    return None


# --- what is sampled matches ----------------------------------------------------------------------------------------

NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
SCHEMAS = [
    {"type": ["integer", "null"], "title": "A number"},
    {"enum": ["a", 2, None]},
    {"type": "integer", "exclusiveMinimum": -3, "maximum": 12},
    {"type": "number", "minimum": -1, "maximum": 4},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"const": "x y"}, {"type": "boolean"}]},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "c d": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "required": ["next"], "additionalProperties": False}}},
]


@pytest.mark.long
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_what_is_sampled_under_a_schema_validates(schema):
    texts = [text for seed in range(5) if (text := drawn(json_tag(CHAT, schema), seed)) is not None]
    assert texts
    for text in texts:
        if "\ufffd" not in text:  # bytes that are no character count as one in the grammar
            jsonschema.validate(json.loads(text), schema)


async def test_a_tag_that_is_no_grammar_is_the_datas_error():
    for tag in ("{}", "no JSON", json_tag(CHAT, {"type": "string", "pattern": "("})):
        with pytest.raises(DataError, match=r"structural_tag: expected one that xgrammar compiles, got"):
            await CONSTRAINER.follow(tag, ())


# --- which tokens were forced ---------------------------------------------------------------------------------------


async def test_a_token_is_forced_where_one_was_legal_or_only_the_end():
    walk = await CONSTRAINER.follow(constant("ab"), ())
    assert TOKENIZER.decode(walk.legal().nonzero()[:, 0].tolist()) == "aab"  # a, or both letters at once
    spelled = Completion((*TOKENIZER.encode("a"), *TOKENIZER.encode("b"), END))
    found = await with_forced(spelled, SamplingParams(structural_tag=constant("ab")), CONSTRAINER, "vLLM")
    assert found.forced == (1, 2)


async def test_an_end_that_only_the_server_knows_counts_as_the_end():
    other = 0  # <|endoftext|>
    ended = Completion((*TOKENIZER.encode("a"), *TOKENIZER.encode("b"), other), matched_stop=other)
    found = await with_forced(ended, SamplingParams(structural_tag=constant("ab")), CONSTRAINER, "vLLM")
    assert found.forced == (1, 2)


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_tokens_that_no_grammar_allows_are_an_engine_error(reason):
    wrong = Completion(tuple(TOKENIZER.encode("ac")), reason, matched_stop="c" if reason == "stop" else None)
    with pytest.raises(
        EngineError, match=r"http://x: expected tokens that the structural tag allows, got \d+ as token"
    ):
        await with_forced(wrong, SamplingParams(structural_tag=constant("ab")), CONSTRAINER, "http://x")


async def test_a_completion_without_a_tag_has_no_forced_tokens():
    free = Completion((5, 6))
    assert await with_forced(free, SamplingParams(), CONSTRAINER, "vLLM") is free


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_the_hf_engine_follows_a_tag_and_knows_what_it_forced():
    engine, tag = HFEngine(MODEL, tokenizer=TOKENIZER), calls_tag(CHAT, TOOLS, several=False)
    free = SamplingParams(max_tokens=30, seed=7)
    params = [SamplingParams(max_tokens=300, seed=seed, structural_tag=tag) for seed in range(4)]
    greedy = SamplingParams(max_tokens=300, temperature=0.0, structural_tag=tag)
    try:
        alone = await engine.generate(PROMPT, free, request_id="free/0")
        beside, *found = await asyncio.gather(
            *(engine.generate(PROMPT, each, request_id=f"{at}/0") for at, each in enumerate([free, *params, greedy]))
        )
    finally:
        await engine.close()
    assert beside.token_ids == alone.token_ids
    assert beside.forced is None
    for completion, sampling in zip(found, [*params, greedy], strict=True):
        # Another walk over the tokens, as it is done for vLLM, finds the same ones.
        again = await with_forced(replace(completion, forced=None), sampling, CONSTRAINER, "again")
        assert completion.forced == again.forced
        assert [completion.logprobs[index] for index in completion.forced] == pytest.approx([0.0] * len(again.forced))
        assert math.isfinite(sum(completion.logprobs))
    ended = [completion for completion in found if completion.finish_reason == "stop"]
    assert ended
    for completion in ended:
        (call,) = CHAT.tool_format.parse(TOKENIZER.decode(completion.token_ids), tools=TOOLS).calls
        jsonschema.validate(dict(call.arguments), TOOLS[0]["function"]["parameters"])
        assert len(completion.token_ids) - 1 in completion.forced  # nothing but the end may follow


@pytest.mark.long
async def test_without_xgrammar_the_pip_command_is_given(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xgrammar" else found(name))
    engine = HFEngine(MODEL, tokenizer=TOKENIZER)
    assert engine.constraint_problem == "xgrammar is not installed: pip install 'agentenv-rl[constrain]'"
    with pytest.raises(
        ConfigError, match=r"expected to follow a structural tag, .* pip install 'agentenv-rl\[constrain"
    ):
        await engine.generate(PROMPT, SamplingParams(structural_tag=constant("a")), request_id="0/0")
    await engine.close()


async def test_an_engine_that_ignores_a_tag_is_refused():
    class Ignorant(Engine):
        async def generate(self, prompt_token_ids, sampling, *, request_id):
            return Completion((5, END))

    with pytest.raises(ConfigError, match="structural_tag, got one that ignores it: Ignorant does not constrain"):
        await sample(Ignorant(), [1], SamplingParams(structural_tag=constant("a")), request_id="0/0", limit_s=60.0)


async def test_pools_and_training_say_what_their_engines_can():
    able, unable = ScriptedEngine(["a"]), ScriptedEngine(["a"])
    unable.constraint_problem = "it is old"
    for engine, problem in ((able, ""), (unable, "it is old")):
        pool = EnginePool([engine])
        assert pool.constraint_problem == FixedSamplingEngine(pool, SamplingParams()).constraint_problem == problem
        await pool.close()


def test_a_tag_and_a_least_length_contradict_each_other():
    with pytest.raises(ValueError, match=r"SamplingParams.min_tokens: expected 0 with a structural_tag, got 3"):
        SamplingParams(min_tokens=3, structural_tag=constant("a"))
