"""The hf and vllm_local engines are the same policy: same greedy tokens, same log-probabilities, same ends."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest
import pytest_asyncio

from agentenv.core.types import SamplingParams
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.vllm.local import VLLMEngine
from tests.engines.vllm_marks import VLLM
from tests.models import make_tiny_qwen2

pytestmark = [pytest.mark.slow, *VLLM]

READABLE = [*range(5, 90), *range(300, 384)]
FEEDBACK = [2, 201, 1, 86, 84, 85, 201]
"""What the environment says after each action."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that says text only: between other bytes vLLM loses the place up to which it looked for stop strings."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    folder = make_tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][[token for token in range(384) if "\ufffd" in tokenizer.decode([token])]] *= 0.05
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(folder):
    """(hf, vllm_local) on the same weights in float32."""
    both = (
        HFEngine(folder, dtype="float32"),
        VLLMEngine(folder, dtype="float32", max_model_len=1024, engine_args={"enforce_eager": True}),
    )
    yield both
    for engine in both:
        await engine.close()
    gc.collect()


def prompts(number, seed=0):
    rng = random.Random(seed)
    return [[1, *(rng.choice(READABLE) for _ in range(rng.randrange(1, 90)))] for _ in range(number)]


async def episode(engine, prompt, sampling, name, turns=3):
    """Three turns over one growing prompt, as `run_episode` would have them: the list of completions."""
    token_ids, completions = list(prompt), []
    for turn in range(turns):
        completion = await engine.generate(token_ids, sampling, request_id=f"{name}/{turn}")
        completions.append(completion)
        token_ids += [*completion.token_ids, *FEEDBACK]
    return completions


async def episodes(engine, sampling, number=16):
    return await asyncio.gather(
        *(episode(engine, prompt, sampling, f"episode-{index}") for index, prompt in enumerate(prompts(number)))
    )


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for left, right in zip(one, other, strict=True):
            assert left.token_ids == right.token_ids
            assert (left.finish_reason, left.matched_stop) == (right.finish_reason, right.matched_stop)
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)


async def test_greedy_episodes_side_by_side_are_the_same(engines):
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    hf, vllm = [await episodes(engine, sampling) for engine in engines]
    assert_same(hf, vllm)
    assert {completion.finish_reason for each in hf for completion in each} == {"stop", "length"}


@pytest.mark.parametrize("min_tokens", [0, 5])
async def test_generations_end_at_the_same_stop_string(engines, min_tokens):
    sampling = SamplingParams(temperature=0.0, max_tokens=32, min_tokens=min_tokens, stop=("e", " a", "\n", "!"))
    hf, vllm = [await episodes(engine, sampling) for engine in engines]
    assert_same(hf, vllm)
    assert {completion.matched_stop for each in hf for completion in each} & {"e", " a", "\n", "!"}
