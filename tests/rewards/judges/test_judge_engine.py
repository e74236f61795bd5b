"""A judge that one of our engines samples."""

import asyncio

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.types import Completion, SamplingParams
from agentenv.engines.models import load_tokenizer
from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import ConfigError, EngineError, InfraError
from agentenv.rewards.judges.cache import CachedJudge, reply_key
from agentenv.rewards.judges.engine import EngineJudge
from agentenv.rewards.judges.pointwise import JudgeReward
from agentenv.rewards.judges.protocol import JudgeRefused, JudgeTimeout, JudgeTruncated, JudgeUnavailable, ReplyIndex
from agentenv.rewards.judges.usage import JudgeUsage, Price
from agentenv.rewards.judges.voting import JudgeRetry
from agentenv.rewards.types import Response
from agentenv.testing.tokenizers import CharTokenizer
from tests.models import make_tiny_tokenizer

HELLO = [{"role": "system", "content": "judge"}, {"role": "user", "content": "hello<|im_end|>"}]
TOKENIZER = CharTokenizer()


def judge_of(script, *, engine=None, **options):
    engine = engine or ScriptedEngine(script, TOKENIZER)
    return EngineJudge(engine, Chat(TOKENIZER), model="m", **options), engine


async def test_messages_are_rendered_by_the_template_and_the_reply_is_its_text():
    judge, engine = judge_of(["Verdict: YES"])
    assert await judge.complete(HELLO) == "Verdict: YES"
    shown = engine.requests[0].prompt
    assert shown.startswith("<|im_start|>system\njudge<|im_end|>\n<|im_start|>user\nhello")
    assert shown.endswith("<|im_start|>assistant\n")
    assert engine.requests[0].sampling == SamplingParams(temperature=0.0, max_tokens=2048)


async def test_text_of_a_policy_never_becomes_a_special_token():
    judge, engine = judge_of(["Verdict: NO"])
    await judge.complete(HELLO)
    assert engine.requests[0].prompt_token_ids.count(0) == 2, "the ends of the two messages and no third"


async def test_half_a_surrogate_pair_which_no_tokenizer_takes_is_shown_as_a_replacement(tmp_path):
    make_tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    engine = ScriptedEngine(["Verdict: YES"], tokenizer)
    judge = EngineJudge(engine, Chat(tokenizer), model="m")
    found = await JudgeReward(judge).grade(Response("4\ud800", label="4\udfff", prompt="2+2?\ud83d"))
    assert found.reward == 1.0
    assert engine.requests[0].prompt.count("\ufffd") == 3


async def test_tokens_are_counted_and_priced():
    judge, _ = judge_of(["Verdict: YES"], usage=JudgeUsage(Price(prompt=1e6)))
    await judge.complete(HELLO)
    prompt = len(Chat(TOKENIZER).prompt(HELLO))
    assert (judge.usage["requests"], judge.usage["replies"], judge.usage["uncounted"]) == (1, 1, 0)
    assert (judge.usage["prompt_tokens"], judge.usage["completion_tokens"]) == (prompt, len("Verdict: YES") + 1)
    assert judge.usage.cost == prompt


@pytest.mark.parametrize("seed", [None, 7])
async def test_each_draw_has_a_seed_and_every_request_its_own_id(seed):
    judge, engine = judge_of(["ok"], sampling=SamplingParams(seed=seed))
    for draw in (ReplyIndex(), ReplyIndex(1), ReplyIndex(0, 1)):
        await judge.reply_at(HELLO, draw)
    assert len({request.sampling.seed for request in engine.requests}) == (1 if seed is None else 3)
    assert len({request.request_id for request in engine.requests}) == 3


@pytest.mark.parametrize("reason", ["length", "repetition"])
async def test_a_reply_that_was_cut_off_is_none_but_paid_for(reason):
    judge, _ = judge_of(None, engine=ScriptedEngine(["Verdict: YES"], TOKENIZER, finish_reason=reason))
    with pytest.raises(JudgeTruncated):
        await judge.complete(HELLO)
    assert (judge.usage["truncated"], judge.usage["failures"], judge.usage["replies"]) == (1, 1, 1)


async def test_a_limit_on_tokens_cuts_off():
    judge, _ = judge_of(["Verdict: YES"], sampling=SamplingParams(max_tokens=4))
    with pytest.raises(JudgeTruncated, match="after 4 tokens"):
        await judge.complete(HELLO)


@pytest.mark.parametrize("script", [[EngineError("dead")], [Completion((3,), "abort")], [Completion((3,), "error")]])
async def test_an_engine_that_fails_is_typed(script):
    judge, _ = judge_of(script)
    with pytest.raises(JudgeUnavailable):
        await judge.complete(HELLO)
    assert (judge.usage["unavailable"], judge.usage["failures"]) == (1, 1)


async def test_an_engine_that_hangs_is_a_timeout_and_is_released():
    engine = ScriptedEngine(["x"], TOKENIZER, latency_s=3600)
    judge, _ = judge_of(None, engine=engine, limit_s=0.05)
    with pytest.raises(JudgeTimeout):
        await judge.complete(HELLO)
    assert (engine.num_cancelled, judge.usage["timeouts"]) == (1, 1)


async def test_a_conversation_that_is_too_long_is_refused_unasked():
    judge, engine = judge_of(["x"], max_prompt_tokens=10)
    with pytest.raises(JudgeRefused, match="at most 10 tokens"):
        await judge.complete(HELLO)
    assert engine.requests == []


async def test_no_more_generations_than_allowed_run_at_a_time():
    now = most = 0
    meeting = asyncio.Barrier(3)

    async def script(request):
        """Counts, and waits until three are there."""
        nonlocal now, most
        now += 1
        most = max(most, now)
        await meeting.wait()
        now -= 1
        return "ok"

    judge, engine = judge_of(script, max_concurrent=3)
    await asyncio.gather(*(judge.complete(HELLO) for _ in range(12)))
    assert (most, len(engine.requests)) == (3, 12)


async def test_it_judges_and_can_be_cached():
    judge, engine = judge_of(["<think>yes or no?</think>Verdict: NO"])
    reward = JudgeReward(CachedJudge(judge), retry=JudgeRetry(backoff_s=0.0))
    for _ in range(2):
        assert (await reward.grade(Response("5", label="4", prompt="2 + 2?"))).reward == 0.0
    assert (len(engine.requests), judge.usage["cached"]) == (1, 1)


def test_other_weights_are_other_replies():
    engine = ScriptedEngine(["x"], TOKENIZER)
    keys = {
        reply_key(EngineJudge(engine, Chat(TOKENIZER), model=model, sampling=sampling).identity, HELLO, ReplyIndex())
        for model in ("a", "b")
        for sampling in (SamplingParams(), SamplingParams(temperature=0.5))
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    "options", [{"limit_s": 0}, {"max_prompt_tokens": 0}, {"max_concurrent": 0}, {"model": ""}], ids=str
)
def test_wrong_arguments(options):
    with pytest.raises(ConfigError):
        EngineJudge(ScriptedEngine(["x"], TOKENIZER), Chat(TOKENIZER), **{"model": "m", **options})


async def test_failures_are_infra_errors():
    judge, _ = judge_of([EngineError("dead")])
    with pytest.raises(InfraError, match="judge m"):
        await judge.complete(HELLO)
