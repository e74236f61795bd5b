"""OpenRLHF's llm_engine as ours, and ours as OpenRLHF's."""

import importlib.util
import itertools
from types import SimpleNamespace

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.step_dict import to_sampling
from agentenv.core.types import Completion, SamplingParams
from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import ContractError, EngineError
from agentenv.interop.openrlhf.engine import LLMEngine, OpenRLHFEngine, VLLMStyleSampling, as_engine
from agentenv.testing.tokenizers import CharTokenizer
from tests.models import make_tiny_qwen2
from tests.with_openrlhf.fakes import LLM, AsyncLLM, Params

TOKENIZER = CharTokenizer()
PROMPT = TOKENIZER.encode("prompt")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.0, top_p=0.5, top_k=5, min_p=0.1),
    SamplingParams(max_tokens=50, min_tokens=3, stop=("a", "b"), stop_token_ids=(7, 8), seed=9),
]


async def ask(llm, sampling=None, *, params=None):
    params = params or Params()
    engine = as_engine(llm, params)
    return await engine.generate(PROMPT, sampling or SamplingParams(max_tokens=50), request_id="e/0")


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
async def test_an_output_becomes_a_completion(kind):
    completion = await ask(kind("hi", logprob=-0.25))
    assert completion == Completion((*TOKENIZER.encode("hi"), 0), "stop", logprobs=(-0.25,) * 3)


def test_our_engines_are_passed_through():
    ours = ScriptedEngine(["hi"], TOKENIZER)
    wrapped = LLMEngine(ours, Chat(TOKENIZER), "e")
    assert as_engine(ours, Params()) is ours
    assert as_engine(wrapped, Params()) is wrapped
    assert isinstance(as_engine(LLM("hi"), Params()), OpenRLHFEngine)
    assert isinstance(as_engine(AsyncLLM("hi"), Params()), OpenRLHFEngine)


async def test_fields_that_only_the_callers_parameters_have_are_kept():
    llm = LLM("hi")
    params = Params(temperature=0.5, top_k=-1, stop=["END"], logprobs=3, include_stop_str_in_output=False, seed=4)
    sampling = SamplingParams(temperature=0.5, stop=("END",), max_tokens=9, min_tokens=1, seed=5)
    await ask(llm, sampling, params=params)
    assert llm.requests[0][1] == Params(
        temperature=0.5, top_k=-1, stop=["END"], logprobs=3, include_stop_str_in_output=False,
        max_tokens=9, min_tokens=1, seed=5,
    )  # fmt: skip


@pytest.mark.parametrize("stop", [(), ("END",)])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
async def test_vllm_makes_text_of_tokens_only_where_stop_strings_are_looked_for_in_it(kind, stop):
    llm, params = kind("hi"), VLLMStyleSampling()
    await ask(llm, SamplingParams(max_tokens=50, stop=stop), params=params)
    assert llm.requests[0][1].detokenize is bool(stop)
    assert params.detokenize is True


@pytest.mark.parametrize(("asked", "wanted"), list(itertools.product(SAMPLINGS, repeat=2)))
def test_a_request_means_what_the_episode_wants(asked, wanted):
    caller = VLLMStyleSampling.of(asked)
    sent = OpenRLHFEngine(LLM("hi"), caller)._params(wanted)
    assert to_sampling(sent) == wanted
    assert caller == VLLMStyleSampling.of(asked)


async def test_no_log_probabilities_are_none_and_a_lost_one_is_nan():
    assert (await ask(LLM("hi"), params=Params(logprobs=None))).logprobs is None
    entries = [
        {106: SimpleNamespace(logprob=-0.5)},
        {999: SimpleNamespace(logprob=-0.5)},
        {0: SimpleNamespace(logprob=-0.25)},
    ]
    completion = await ask(LLM("hi", logprobs=entries, token_ids=[106, 107, 0]))
    assert repr(completion.logprobs) == "(-0.5, nan, -0.25)"


@pytest.mark.parametrize(
    ("llm", "message"),
    [
        (LLM("hi", logprobs=[{}]), "expected 3 log-probabilities, got 1"),
        (LLM("hi", finish_reason=None), "expected a finish reason of vLLM, got None"),
    ],
    ids=["misaligned", "unfinished"],
)
async def test_an_answer_that_cannot_be_trained_on_is_refused(llm, message):
    with pytest.raises(EngineError, match=message):
        await ask(llm)


async def test_an_answer_to_another_prompt_is_refused():
    class Cutting(LLM):
        def output(self, prompt_token_ids, sampling_params):
            return super().output(prompt_token_ids[1:], sampling_params)

    with pytest.raises(EngineError, match="expected an action after the 6 prompt tokens sent, got one after 5"):
        await ask(Cutting("hi"))


@pytest.mark.parametrize("outputs", [[], [1, 2]], ids=["none", "two"])
async def test_none_or_several_completions_are_refused(outputs):
    class Other(LLM):
        def output(self, prompt_token_ids, sampling_params):
            return SimpleNamespace(outputs=outputs)

    with pytest.raises(EngineError, match="expected a RequestOutput with one completion"):
        await ask(Other("hi"))


async def test_versions_of_the_weights_are_read_where_vllm_says_them():
    spans = [SimpleNamespace(version="3", start=0, end=2), SimpleNamespace(version="4", start=2, end=3)]
    assert (await ask(LLM("hi", weight_versions=spans))).policy_versions == (3, 3, 4)


# --- ours as OpenRLHF's -----------------------------------------------------------------------------------------------


async def test_a_files_own_loop_gets_vllms_output_without_the_terminator_in_the_text():
    ours = ScriptedEngine(["hi"], TOKENIZER, logprob=-0.25)
    llm = LLMEngine(ours, Chat(TOKENIZER), "episode")
    out = await llm.generate(PROMPT, VLLMStyleSampling(max_tokens=9, seed=3), multi_modal_data=None)
    await llm.generate({"prompt_token_ids": PROMPT}, Params(max_tokens=9))
    output = out.outputs[0]
    assert (out.prompt_token_ids, output.token_ids, output.text) == (PROMPT, [*TOKENIZER.encode("hi"), 0], "hi")
    assert [entry[i].logprob for i, entry in zip(output.token_ids, output.logprobs, strict=True)] == [-0.25] * 3
    assert [request.request_id for request in ours.requests] == ["episode/0", "episode/1"]
    assert ours.requests[0].sampling == SamplingParams(max_tokens=9, seed=3)


async def test_a_file_in_our_form_talks_to_the_engine_itself():
    ours = ScriptedEngine(["hi"], TOKENIZER)
    llm = LLMEngine(ours, Chat(TOKENIZER), "episode")
    completion = await llm.generate(PROMPT, SamplingParams(max_tokens=9), request_id="mine/0")
    assert (type(completion), ours.requests[0].request_id) == (Completion, "mine/0")


async def test_images_and_penalties_are_refused_and_not_dropped():
    llm = LLMEngine(ScriptedEngine(["hi"], TOKENIZER), Chat(TOKENIZER), "episode")
    with pytest.raises(EngineError, match="expected no images"):
        await llm.generate(PROMPT, Params(), multi_modal_data={"image": [1]})
    with pytest.raises(ContractError, match="repetition_penalty"):
        await llm.generate(PROMPT, SimpleNamespace(temperature=1.0, repetition_penalty=1.1))


# --- vLLM's own objects -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*reduce_op.*:FutureWarning")
def test_vllms_own_parameters_change_only_where_the_episode_asks():
    from vllm import SamplingParams as VLLMParams

    params = VLLMParams(temperature=0.7, top_p=0.9, logprobs=1, stop=["END"], min_tokens=1, skip_special_tokens=False)
    before = repr(params)
    engine = OpenRLHFEngine(LLM("hi"), params)
    known = to_sampling(params)
    assert repr(engine._params(known)) == before
    sent = engine._params(SamplingParams(temperature=0.0, stop=("A LONG STOP",), max_tokens=5, min_tokens=1))
    assert (sent.temperature, sent.top_p, sent.stop, sent.max_tokens) == (0.0, 1.0, ["A LONG STOP"], 5)
    assert sent.output_text_buffer_length == len("A LONG STOP") - 1
    assert (sent.logprobs, sent.skip_special_tokens) == (1, False)
    assert repr(params) == before


@pytest.mark.slow
@needs_vllm
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*reduce_op.*:FutureWarning", "ignore:Unclosed context <zmq:ResourceWarning"
)
async def test_vllms_own_engine_is_an_engine_as_in_the_queue_era(tmp_path):
    from vllm import SamplingParams as VLLMParams

    from agentenv.engines.vllm.local import VLLMEngine

    model = make_tiny_qwen2(tmp_path / "model")
    owner = VLLMEngine(model, dtype="float32", max_model_len=256, engine_args={"enforce_eager": True})
    try:
        await owner.start()
        greedy = SamplingParams(temperature=0.0, max_tokens=12)
        engine = as_engine(owner._llm, VLLMParams(temperature=0.0, logprobs=1))
        assert isinstance(engine, OpenRLHFEngine)
        theirs, ours = [await each.generate([1, 349, 201, 285], greedy, request_id="e/0") for each in (engine, owner)]
        assert theirs.token_ids == ours.token_ids
        assert theirs.logprobs == pytest.approx(ours.logprobs, rel=1e-5)
    finally:
        await owner.close()
