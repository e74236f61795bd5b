"""HFEngine: what it samples, and that neighbors in the batch, turns, weights, cancels and crashes do not change it."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch
import transformers

from agentenv.core.types import SamplingParams
from agentenv.engines.hf import engine as hf
from agentenv.engines.hf.engine import HFEngine
from agentenv.errors import ConfigError, EngineError
from tests.models import make_tiny_qwen2
from tests.waits import until

PROMPTS = [[40 + i, *range(50, 50 + 7 * i), 60 + i] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
EOS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For the reference models: on busy cores, two threads take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("hf") / "qwen2")


@pytest.fixture(scope="module")
def reference(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture
async def engine(path):
    engine = HFEngine(path, max_length=512)
    yield engine
    await engine.close()


def without_eos(model):
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def seeded(build, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return without_eos(build(config).float())


SMALL = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def llama():
    return seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL))


def gpt2():
    return seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None,
    ))  # fmt: skip


def mistral(window):
    return seeded(transformers.MistralForCausalLM, transformers.MistralConfig(**SMALL, sliding_window=window))


def rescore(model, prompt, completion, sampling):
    """The log-probabilities of an action from one forward pass over all of it, truncated row by row."""
    ids = prompt + list(completion.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
    scores = []
    for row, token in zip(logits, completion.token_ids, strict=True):
        if sampling.temperature > 0:
            row = row / sampling.temperature
            probs = row.softmax(-1)
            row = row.masked_fill(probs < sampling.min_p * probs.max(), -torch.inf)
            if sampling.top_k > 0:
                row = row.masked_fill(row < row.topk(sampling.top_k).values[-1], -torch.inf)
            if sampling.top_p < 1:
                order = row.argsort(descending=True)
                before = row.softmax(-1)[order].cumsum(0) - row.softmax(-1)[order]
                row = row.index_fill(0, order[before >= sampling.top_p], -torch.inf)
        scores.append(float(row.log_softmax(-1)[token]))
    return scores


def plain_greedy(model, prompt, num):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


async def sample_all(engine, prompts, sampling):
    asked = [engine.generate(p, sampling, request_id=f"{sampling.seed}-{i}/0") for i, p in enumerate(prompts)]
    return list(await asyncio.gather(*asked))


def in_step_with_the_loop(engine, monkeypatch):
    """Make each forward pass wait for a turn of this event loop: a request ends no earlier than a slow loop sees it.

    Returns a list that gets, for each pass, whether the loop turned.
    """
    loop, forward, turns = asyncio.get_running_loop(), engine._slots.forward, []

    def watched(*args):
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        turns.append(turned.wait(60))
        return forward(*args)

    monkeypatch.setattr(engine._slots, "forward", watched)
    return turns


@pytest.mark.long
@pytest.mark.parametrize("build", [llama, gpt2, lambda: mistral(window=8)], ids=["llama", "gpt2", "window"])
async def test_other_architectures_agree_with_a_plain_forward_pass(build):
    engine, model = HFEngine(build()), build().eval()
    try:
        for prompt, completion in zip(PROMPTS, await sample_all(engine, PROMPTS, GREEDY), strict=True):
            assert completion.token_ids == plain_greedy(model, prompt, 24)
            assert completion.logprobs == pytest.approx(rescore(model, prompt, completion, GREEDY), abs=1e-4)
    finally:
        await engine.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.6, max_tokens=32, seed=2),
        SamplingParams(temperature=0.9, top_p=0.7, max_tokens=32, seed=4),
        SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, max_tokens=32, seed=6),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=3, max_tokens=32),
    ],
    ids=str,
)
async def test_logprobs_are_those_of_a_full_forward_pass(engine, reference, sampling):
    for prompt, completion in zip(PROMPTS, await sample_all(engine, PROMPTS, sampling), strict=True):
        assert completion.logprobs == pytest.approx(rescore(reference, prompt, completion, sampling), abs=1e-4)


@pytest.mark.long
async def test_long_prompts_are_computed_in_pieces(engine, reference, monkeypatch):
    monkeypatch.setattr(hf, "MAX_PREFILL_TOKENS", 16)
    prompts = [list(range(20, 20 + n)) for n in (1, 2, 15, 16, 17, 60, 130)]
    for prompt, completion in zip(prompts, await sample_all(engine, prompts, GREEDY), strict=True):
        assert completion.logprobs == pytest.approx(rescore(reference, prompt, completion, GREEDY), abs=1e-4)


# How a generation ends


@pytest.fixture
async def endless(path):
    """An engine that knows no end of sequence."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = None
    model = without_eos(transformers.Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32))
    engine = HFEngine(model, tokenizer=tokenizer, max_length=512)
    yield engine
    await engine.close()


LONG = SamplingParams(max_tokens=60, seed=5)


async def test_length_ends_at_max_tokens_and_at_the_context(engine):
    capped = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=5, min_tokens=5), request_id="")
    assert (len(capped.token_ids), capped.finish_reason, capped.matched_stop) == (5, "length", None)
    prompt = list(range(50, 361)) + list(range(50, 250))
    last = await engine.generate(prompt, SamplingParams(max_tokens=99), request_id="")
    assert len(prompt) == 511
    assert len(last.token_ids) == 1
    open_ended = await engine.generate(prompt[:490], SamplingParams(min_tokens=22), request_id="")
    assert (len(open_ended.token_ids), open_ended.finish_reason) == (22, "length")


async def test_end_of_sequence_comes_before_length_and_stays_in_the_action(path):
    model = transformers.Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt, action = PROMPTS[3], plain_greedy(model, PROMPTS[3], 8)
    first = action.index(action[7])
    model.generation_config.eos_token_id = [action[7], 7]
    model.config.eos_token_id = None
    engine = HFEngine(model, max_length=512)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=first + 1)
        completion = await engine.generate(prompt, sampling, request_id="")
        assert completion.token_ids == action[: first + 1]
        assert (completion.finish_reason, completion.matched_stop) == ("stop", None)
    finally:
        await engine.close()


@pytest.mark.long
async def test_stop_token_ids_end_it_and_are_named(endless):
    free = await endless.generate(PROMPTS[3], LONG, request_id="")
    stop_id = free.token_ids[9]
    end = free.token_ids.index(stop_id) + 1
    for max_tokens in (end, 60):
        sampling = replace(LONG, max_tokens=max_tokens, stop_token_ids=(383, stop_id))
        completion = await endless.generate(PROMPTS[3], sampling, request_id="")
        assert completion.token_ids == free.token_ids[:end]
        assert (completion.finish_reason, completion.matched_stop) == ("stop", stop_id)


async def test_min_tokens_forbids_every_end_before_it(engine, reference):
    stop_ids = tuple(range(3, 300))
    sampling = SamplingParams(max_tokens=30, min_tokens=6, seed=5, stop_token_ids=stop_ids)
    completion = await engine.generate(PROMPTS[2], sampling, request_id="")
    assert not {EOS, *stop_ids} & set(completion.token_ids[:6])
    assert completion.logprobs[0] > rescore(reference, PROMPTS[2], completion, sampling)[0]


@pytest.mark.long
async def test_a_stop_string_keeps_the_token_that_completes_it(endless):
    free = await endless.generate(PROMPTS[3], LONG, request_id="")
    decode = endless._tokenizer
    texts = [decode.decode(free.token_ids[:n], skip_special_tokens=False) for n in range(61)]
    stops = sorted({text[-2:] for text in texts[5:] if "�" not in text[-2:]})
    assert len(stops) >= 5
    for stop in stops[:5]:
        end = next(n for n in range(61) if stop in texts[n])
        for max_tokens in (end, 60):
            sampling = replace(LONG, max_tokens=max_tokens, stop=("never said", stop))
            completion = await endless.generate(PROMPTS[3], sampling, request_id="")
            assert completion.token_ids == free.token_ids[:end]
            assert (completion.finish_reason, completion.matched_stop) == ("stop", stop)


async def test_stop_strings_need_a_tokenizer():
    engine = HFEngine(llama())
    with pytest.raises(EngineError, match="tokenizer"):
        await engine.generate([1], SamplingParams(stop=("x",)), request_id="")
    await engine.close()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "at least one prompt token"), ([1] * 512, "shorter than max_length=512"), ([1, 384], "384"), ([-1], "-1")],
)
async def test_prompts_that_cannot_be_followed_are_refused(engine, prompt, words):
    with pytest.raises(EngineError, match=words):
        await engine.generate(prompt, GREEDY, request_id="e/0")


async def test_models_and_limits_that_do_not_fit_are_refused():
    small = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=1, d_kv=16)
    with pytest.raises(ConfigError, match="T5"):
        HFEngine(transformers.T5ForConditionalGeneration(small))
    with pytest.raises(ConfigError, match="max_length <= 256"):
        HFEngine(llama(), max_length=257)


async def test_windows_in_some_layers_are_refused_unless_never_reached(path):
    model = transformers.Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.config.use_sliding_window, model.config.sliding_window = True, 64
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ConfigError, match="Pass max_length=64"):
        HFEngine(model)
    await HFEngine(model, max_length=64).close()


# Turns of an episode


@pytest.mark.long
async def test_a_later_turn_reuses_what_the_earlier_computed(engine, reference):
    sampling = SamplingParams(max_tokens=20, min_tokens=20, seed=1)
    ids, num_computed = list(PROMPTS[4]), 0
    for turn in range(4):
        completion = await engine.generate(ids, sampling, request_id=f"episode/{turn}")
        fresh = await engine.generate(ids, sampling, request_id="")
        assert completion.num_cached_tokens == num_computed
        assert fresh.num_cached_tokens == 0
        assert completion.token_ids == fresh.token_ids
        assert completion.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
        num_computed = len(ids) + 19
        ids = ids + list(completion.token_ids) + [90, 91, 92]


@pytest.mark.long
async def test_a_prompt_that_departs_reuses_the_common_part_only(engine):
    prompt = list(range(30, 60))
    await engine.generate(prompt, GREEDY, request_id="e/0")
    departed = [*prompt[:12], 200, *prompt[13:]]
    completion = await engine.generate(departed, GREEDY, request_id="e/1")
    assert completion.num_cached_tokens == 12
    assert completion.token_ids == (await engine.generate(departed, GREEDY, request_id="")).token_ids
    same = await engine.generate(departed, GREEDY, request_id="e/2")
    assert same.num_cached_tokens == len(departed) - 1
    assert same.token_ids == completion.token_ids


@pytest.mark.long
async def test_the_least_recent_prefixes_are_forgotten(path):
    engine = HFEngine(path, max_length=512, prefix_cache_tokens=100)
    try:
        sampling = SamplingParams(max_tokens=10, min_tokens=10)
        for name in "abc":
            await engine.generate(list(range(30, 60)), sampling, request_id=f"{name}/0")
        kept = [
            (await engine.generate(list(range(30, 60)), sampling, request_id=f"{n}/1")).num_cached_tokens for n in "ca"
        ]
        assert kept == [29, 0]
    finally:
        await engine.close()


# Cancelling, weights, failures


@pytest.mark.long
async def test_cancelling_frees_the_slot_and_leaves_the_others(path, engine, monkeypatch):
    small = HFEngine(path, max_length=512, max_num_seqs=3)
    try:
        in_step_with_the_loop(small, monkeypatch)
        long = SamplingParams(temperature=0.0, max_tokens=200, min_tokens=200)
        tasks = [asyncio.create_task(small.generate(p, long, request_id=f"{i}/0")) for i, p in enumerate(PROMPTS[:4])]
        await until(lambda: len(small._running) == 3 and len(small._running[0].logprobs) > 5)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        rest = await asyncio.gather(*tasks[1:])
        expected = [await engine.generate(p, long, request_id="") for p in PROMPTS[1:4]]
        assert [c.token_ids for c in rest] == [c.token_ids for c in expected]
        assert not small._running
        assert not small._waiting
    finally:
        await small.close()


async def test_cancelling_while_paused_or_waiting_removes_the_request(engine):
    await engine.pause()
    task = asyncio.create_task(engine.generate(PROMPTS[0], GREEDY, request_id=""))
    await until(lambda: len(engine._waiting) == 1)
    task.cancel()
    await until(lambda: not engine._waiting)
    await engine.resume()


@pytest.mark.long
async def test_pause_holds_everything_and_resume_continues(engine, monkeypatch):
    sampling = SamplingParams(temperature=0.0, max_tokens=100, min_tokens=100)
    expected = await engine.generate(PROMPTS[1], sampling, request_id="")
    in_step_with_the_loop(engine, monkeypatch)
    task = asyncio.create_task(engine.generate(PROMPTS[1], sampling, request_id=""))
    await until(lambda: engine._running and len(engine._running[0].logprobs) > 3)
    await engine.pause()
    num = len(engine._running[0].logprobs)
    await asyncio.sleep(0.05)
    assert len(engine._running[0].logprobs) == num
    await engine.resume()
    assert (await task).token_ids == expected.token_ids


def shaken(path):
    model = transformers.Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(9)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


@pytest.mark.long
async def test_new_weights_reach_running_requests_and_mark_their_tokens(engine, path, reference, monkeypatch):
    new = shaken(path)
    sampling = SamplingParams(max_tokens=200, min_tokens=200, seed=3)
    in_step_with_the_loop(engine, monkeypatch)
    await engine.generate(PROMPTS[2], GREEDY, request_id="turn/0")
    task = asyncio.create_task(engine.generate(PROMPTS[2], sampling, request_id="e/0"))
    await until(lambda: engine._running and len(engine._running[0].logprobs) > 3)
    await engine.update_weights(new.state_dict().items(), 7)
    mixed = await task
    assert engine.policy_version == 7
    num_old = mixed.policy_versions.count(0)
    assert mixed.policy_versions == (0,) * num_old + (7,) * (200 - num_old)
    assert 0 < num_old < 200
    banned = torch.zeros(384).index_fill(0, torch.tensor([EOS]), -torch.inf)
    for model, part in ((reference, slice(0, num_old)), (new, slice(num_old, 200))):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[2] + list(mixed.token_ids)])).logits[0, len(PROMPTS[2]) - 1 : -1]
        expected = (logits + banned).log_softmax(-1).gather(1, torch.tensor(mixed.token_ids)[:, None])[:, 0].tolist()
        assert mixed.logprobs[part] == pytest.approx(expected[part], abs=1e-4)
    after = await engine.generate(PROMPTS[2], GREEDY, request_id="turn/1")
    assert after.num_cached_tokens == 0
    assert (after.policy_versions, after.policy_version) == ((), 7)
    assert after.logprobs == pytest.approx(rescore(new, PROMPTS[2], after, GREEDY), abs=1e-4)


async def test_weights_that_are_not_the_models_are_refused_whole(engine, path):
    before = await engine.generate(PROMPTS[0], GREEDY, request_id="")
    good = dict(shaken(path).state_dict())
    for bad in ({**good, "nobody.weight": torch.zeros(1)}, {**good, "lm_head.weight": torch.zeros(2, 2)}):
        with pytest.raises(ConfigError, match=r"nobody|lm_head"):
            await engine.update_weights(bad.items(), 1)
    assert engine.policy_version == 0
    assert (await engine.generate(PROMPTS[0], GREEDY, request_id="")).token_ids == before.token_ids


async def test_a_crash_fails_what_is_in_flight_and_the_engine_continues(engine, monkeypatch):
    expected = await engine.generate(PROMPTS[1], GREEDY, request_id="")
    forward, calls = engine._slots.forward, []

    def failing(*args):
        while len(calls) < 3 and len(engine._running) + len(engine._waiting) < len(PROMPTS):
            time.sleep(0.001)  # in the engine's thread: until all are in flight, on however slow a loop
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("the floor gave way")
        return forward(*args)

    monkeypatch.setattr(engine._slots, "forward", failing)
    asked = [engine.generate(p, GREEDY, request_id="") for p in PROMPTS]
    failures = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(failure, EngineError) and "the floor gave way" in str(failure) for failure in failures)
    assert (await engine.generate(PROMPTS[1], GREEDY, request_id="")).token_ids == expected.token_ids


@pytest.mark.long
async def test_logits_that_are_not_numbers_fail_their_request_only(path):
    model = transformers.Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[333] = torch.nan
    engine = HFEngine(model, max_length=512)
    try:
        expected = await engine.generate(PROMPTS[1], GREEDY, request_id="")
        asked = [engine.generate(p, GREEDY, request_id="") for p in (PROMPTS[1], [40, 333, 41], PROMPTS[1])]
        first, failed, last = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(failed, EngineError)
        assert "finite" in str(failed)
        again = await sample_all(engine, [PROMPTS[1]] * 4, GREEDY)
        assert {c.token_ids for c in (first, last, *again)} == {expected.token_ids}
    finally:
        await engine.close()


async def test_close_fails_what_is_in_flight_and_leaves_no_thread(path):
    engine = HFEngine(path)
    tasks = [
        asyncio.create_task(engine.generate(p, SamplingParams(min_tokens=1500), request_id=f"{i}/0"))
        for i, p in enumerate(PROMPTS)
    ]
    await until(lambda: engine._running)
    await asyncio.gather(engine.close(), engine.close())
    await engine.close()
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(failure, EngineError) for failure in failures)
    assert not [t for t in threading.enumerate() if t.name == "agentenv-hf"]
    for call in (engine.generate(PROMPTS[0], GREEDY, request_id=""), engine.pause()):
        with pytest.raises(EngineError, match="closed"):
            await call


@pytest.mark.long
async def test_several_event_loops_may_share_an_engine(engine):
    expected = await engine.generate(PROMPTS[1], GREEDY, request_id="")
    here = engine.generate(PROMPTS[1], GREEDY, request_id="")
    there = asyncio.to_thread(asyncio.run, engine.generate(PROMPTS[1], GREEDY, request_id=""))
    assert {c.token_ids for c in await asyncio.gather(here, there)} == {expected.token_ids}
