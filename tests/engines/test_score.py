"""Scoring: the model's own log-probabilities of given tokens, beside generations that it does not disturb."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentenv.core.types import SamplingParams
from agentenv.engines.hf import engine as _score
from agentenv.engines.hf.engine import HFEngine
from agentenv.errors import EngineError
from tests.engines.test_hf import gpt2, mistral, one_thread  # noqa: F401 - a fixture of all tests here
from tests.engines.test_vllm_http import Fake, engine_over
from tests.models import make_tiny_qwen2

IDS = [40 + (7 * i * i) % 150 for i in range(200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def engine(folder):
    engine = HFEngine(folder, max_length=512)
    yield engine
    await engine.close()


@pytest.fixture
def one_token_at_a_time(monkeypatch):
    """Scoring takes many pieces, and the last one waits for the event that this returns."""
    may_end, advance = threading.Event(), _score.ScoreJob.advance
    monkeypatch.setattr(_score, "MAX_PIECE_TOKENS", 1)

    def held(job):
        if len(job.logprobs) < len(job.token_ids) - 1 or may_end.is_set():
            advance(job)

    monkeypatch.setattr(_score.ScoreJob, "advance", held)
    return may_end


def by_transformers(model, token_ids):
    """One forward pass over all of it."""
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor([token_ids[1:]]).T)[:, 0].tolist()


# --- hf ---------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("piece", [7, 1024])
@pytest.mark.parametrize("build", [gpt2, lambda: mistral(16), None], ids=["gpt2", "mistral", "qwen2"])
async def test_scores_are_those_of_one_plain_forward_pass(folder, monkeypatch, build, piece):
    monkeypatch.setattr(_score, "MAX_PIECE_TOKENS", piece)
    ids = IDS if build else [*IDS, *range(300, 384)]
    expected = by_transformers(build().eval() if build else AutoModelForCausalLM.from_pretrained(folder), ids)
    engine = HFEngine(build() if build else folder)
    try:
        scores = await engine.score(tuple(ids))
    finally:
        await engine.close()
    assert math.isnan(scores[0])
    assert scores[1:] == pytest.approx(expected, abs=1e-4)


async def test_sampled_tokens_score_what_was_recorded(engine):
    sampling = SamplingParams(max_tokens=40, seed=4)
    completion = await engine.generate(IDS[:30], sampling, request_id="0/0")
    scores = await engine.score([*IDS[:30], *completion.token_ids])
    assert scores[30:] == pytest.approx(completion.logprobs, abs=1e-5)


@pytest.mark.long
async def test_generations_are_the_same_and_not_delayed_by_scores(engine, one_token_at_a_time, monkeypatch):
    advance, beside_scores = _score.ScoreJob.advance, []

    def noted(job):
        beside_scores.extend([job] if engine._running else ())
        advance(job)

    monkeypatch.setattr(_score.ScoreJob, "advance", noted)
    sampling = [GREEDY, SamplingParams(max_tokens=24, seed=1), SamplingParams(max_tokens=24, seed=2, temperature=0.8)]

    async def sample():
        return await asyncio.gather(
            *(engine.generate(IDS[i : i + 30], each, request_id="one turn") for i, each in enumerate(sampling))
        )

    alone = await sample()
    scoring = [asyncio.create_task(engine.score(IDS)) for _ in range(3)]
    beside = await sample()
    # At most one piece for each pass of the generations, 24 if they are in one batch and three times that if not.
    assert 0 < len(beside_scores) < 80
    for there, here in zip(beside, alone, strict=True):
        assert there.token_ids == here.token_ids
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)  # they may have shared other batches
    one_token_at_a_time.set()
    scores = await asyncio.gather(*scoring)
    assert all(each[1:] == pytest.approx(scores[0][1:], abs=1e-4) for each in scores)


@pytest.mark.long
async def test_scores_are_of_one_policy_version_when_weights_change_meanwhile(engine, folder, one_token_at_a_time):
    other = AutoModelForCausalLM.from_pretrained(make_tiny_qwen2(folder.parent / "other", seed=1))
    scoring = asyncio.create_task(engine.score(IDS))
    while not (engine._scores and len(engine._scores[0].logprobs) > 20):
        await asyncio.sleep(0)
    await engine.update_weights(list(other.state_dict().items()), 1)
    assert not scoring.done()
    one_token_at_a_time.set()
    assert (await scoring)[1:] == pytest.approx(by_transformers(other, IDS), abs=1e-5)


async def test_cancelled_score_is_given_up(engine, one_token_at_a_time):
    scoring = asyncio.create_task(engine.score(IDS))
    while not engine._scores:
        await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    one_token_at_a_time.set()
    assert len(await engine.score(IDS[:3])) == 3
    assert not engine._scores


async def test_scores_wait_while_the_engine_is_paused(engine):
    await engine.pause()
    scoring = asyncio.create_task(engine.score(IDS))
    done, _ = await asyncio.wait([scoring], timeout=0.2)
    assert not done
    await engine.resume()
    assert len(await scoring) == len(IDS)


async def test_a_failed_score_affects_no_other(engine, monkeypatch):
    advance = _score.ScoreJob.advance

    def failing(job):
        if len(job.token_ids) == 7:
            raise RuntimeError("out of memory")
        advance(job)

    monkeypatch.setattr(_score.ScoreJob, "advance", failing)
    alone = await engine.generate(IDS[:30], GREEDY, request_id="alone")
    results = await asyncio.gather(
        engine.generate(IDS[:30], GREEDY, request_id="beside"),
        engine.score(IDS[:7]),
        engine.score(IDS[:8]),
        return_exceptions=True,
    )
    assert results[0].token_ids == alone.token_ids
    assert (type(results[1]), len(results[2])) == (RuntimeError, 8)


async def test_weights_that_are_not_finite_are_an_error(engine):
    name, weight = next((n, w) for n, w in engine._slots.model.state_dict().items() if n.endswith("lm_head.weight"))
    await engine.update_weights([(name, torch.full_like(weight, math.nan))], 1)
    with pytest.raises(EngineError, match="finite logits"):
        await engine.score(IDS)


async def test_whole_context_can_be_scored_and_no_more(engine):
    ids = [40 + i % 100 for i in range(512)]
    assert len(await engine.score(ids)) == 512
    assert [math.isnan(score) for score in await engine.score([5])] == [True]
    with pytest.raises(EngineError, match="at most max_length=512, got 513"):
        await engine.score([*ids, 1])
    with pytest.raises(EngineError, match="at least one"):
        await engine.score([])
    with pytest.raises(EngineError, match="384"):
        await engine.score([1, 384])


async def test_close_fails_what_is_being_scored(folder, one_token_at_a_time):
    engine = HFEngine(folder, max_length=512)
    scoring = asyncio.create_task(engine.score(IDS))
    while not engine._scores:
        await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="open engine"):
        await scoring
    with pytest.raises(EngineError, match="closed"):
        await engine.score(IDS)


# --- vllm_http --------------------------------------------------------------------------------------------------------


async def score_over_http(token_ids, change=lambda choice: None):
    """The scores and the bodies of a vLLM that answers `prompt_logprobs`; `change` may spoil a choice of its answer."""

    def answer(body):
        choice = {"finish_reason": "length", "prompt_token_ids": body["prompt"], "token_ids": [9]}
        choice["prompt_logprobs"] = [None, *({str(t): {"logprob": -t / 4, "rank": 1}} for t in body["prompt"][1:])]
        change(choice)
        return {"choices": [choice]}

    fake = Fake(answer, max_model_len=6)
    async with engine_over(fake, max_retries=0) as engine:
        return await engine.score(token_ids), fake.bodies


async def test_http_scores_are_the_prompt_logprobs_of_the_tokens_sent():
    scores, (body,) = await score_over_http((4, 2, 8))
    assert math.isnan(scores[0])
    assert scores[1:] == [-0.5, -2.0]
    assert (body["prompt"], body["max_tokens"], body["prompt_logprobs"], body["model"]) == (
        [4, 2, 8],
        1,
        0,
        "the-model",
    )


async def test_http_score_of_a_full_context_lacks_its_last_token():
    scores, (body,) = await score_over_http([1, 2, 3, 4, 5, 6])
    assert body["prompt"] == [1, 2, 3, 4, 5]
    assert scores[1:5] == [-0.5, -0.75, -1.0, -1.25]
    assert [math.isnan(score) for score in scores] == [True, False, False, False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda choice: choice.update(prompt_token_ids=[1, 2, 4]),
        lambda choice: choice.update(prompt_logprobs=None),
        lambda choice: choice["prompt_logprobs"].pop(),
        lambda choice: choice.update(prompt_logprobs=[None, 1, 2]),
        lambda choice: choice.update(prompt_logprobs=[None, {"2": {}}, {"3": {}}]),
    ],
)
async def test_http_answer_about_other_tokens_is_refused(change):
    with pytest.raises(EngineError, match="server's answer"):
        await score_over_http([1, 2, 3], change)
