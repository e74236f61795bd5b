"""The reward: what it gives, what it says, what it judges, and where it does so."""

import os

import pytest

from agentenv.rewards.rules.ifeval import reward as reward_module
from agentenv.rewards.rules.ifeval.reward import MAX_CHARS, IFEvalReward
from agentenv.rewards.types import Response, Status
from agentenv.rewards.workers.pool import WorkerPool
from tests.rewards.workers.worker_processes import workers

ROW = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation", "detectable_format:title"],
    "kwargs": [{}, {}, {}],
}
SENTENCES = {"func_name": "verify_sentence_constraint", "N": 1, "quantifier": "at most"}
GERMAN = {"func_name": "validate_response_language", "language": "de"}


@pytest.fixture
async def pool(monkeypatch):
    """Workers of the test's own."""
    pool = WorkerPool(num_workers=1)
    monkeypatch.setattr(reward_module, "shared_pool", lambda: pool)
    yield pool
    await pool.close()


async def grade_with(text, label=ROW, **options):
    return await IFEvalReward(**options).grade(Response(text, label=label))


@pytest.mark.parametrize(("options", "text", "reward", "followed"), [
    ({}, '"<<a>>"', 1.0, 1.0),
    ({}, '"a"', 0.0, 2 / 3),
    ({"credit": "fraction"}, '"a"', 2 / 3, 2 / 3),
    ({"credit": "fraction"}, "a, b", 0.0, 0.0),
    ({"credit": "fraction"}, '"<<a>>"', 1.0, 1.0),
    ({"mode": "loose"}, 'Yes:\n"<<a>>"', 1.0, 1.0),
    ({"mode": "strict"}, 'Yes:\n"<<a>>"', 0.0, 2 / 3),
    ({"mode": "loose", "credit": "fraction"}, "Yes, <<a>>", 1 / 3, 1 / 3),
])  # fmt: skip
async def test_reward_score_and_components(options, text, reward, followed):
    result = await grade_with(text, **options)
    everything = float(followed == 1.0)
    assert (result.reward, result.score, result.status) == (reward, everything, Status.OK)
    assert result.components == {"followed": followed, "all": everything, "num_instructions": 3.0}


async def test_the_feedback_names_the_instructions_that_were_not_followed_and_no_parameter():
    label = {
        "instruction_id_list": ["keywords:existence", "startend:end_checker", "punctuation:no_comma"],
        "kwargs": [{"keywords": ["zebra"]}, {"end_phrase": "Sesame"}, {}],
    }
    result = await grade_with("Hello.", label)
    assert result.feedback == "1 of 3 instructions followed; not keywords:existence, startend:end_checker."
    assert (await grade_with("zebra Sesame", label)).feedback == "3 of 3 instructions followed."


@pytest.mark.parametrize("text", ["", "  \n", "<think>never ends", "<think>a</think>", "<|im_end|>"])
async def test_no_answer_follows_nothing(text):
    result = await grade_with(text, {"func_name": "validate_no_commas"})
    assert (result.reward, result.score, result.status) == (0.0, 0.0, Status.NO_ANSWER)
    assert result.components == {"followed": 0.0, "all": 0.0, "num_instructions": 1.0}


@pytest.mark.long
async def test_short_texts_are_judged_here_and_long_ones_in_the_pool(pool):
    before = workers()
    reward = IFEvalReward(mode="loose")
    short = await reward.grade(Response('"<<a>>"', label=ROW))
    assert workers() == before
    long = await reward.grade(Response('"<<a>> ' + "b " * 40_000 + '"', label=ROW))
    assert len(workers() - before) == 1
    assert short == long


async def test_a_text_that_is_too_long_is_refused_and_not_cut(pool):
    label = {"func_name": "validate_no_commas"}
    longest = await IFEvalReward().grade(Response("a" * MAX_CHARS, label=label))
    longer = await IFEvalReward().grade(Response("a" * (MAX_CHARS + 1), label=label))
    assert (longest.status, longest.reward) == (Status.OK, 1.0)
    assert (longer.status, longer.reward) == (Status.PARSE_ERROR, 0.0)


async def test_a_language_that_needs_langdetect_is_infra_without_it(pool, tmp_path, monkeypatch):
    (tmp_path / "langdetect.py").write_text("raise ImportError('hidden')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    reward = IFEvalReward()
    result = await reward.grade(Response("Guten Morgen, mein Herr.", label=GERMAN))
    assert (result.status, result.reward) == (Status.INFRA, None)
    assert "agentenv-rl[ifeval]" in result.detail


async def test_a_text_that_takes_too_much_computing_follows_nothing(pool, monkeypatch):
    monkeypatch.setattr(reward_module, "_CPU_LIMIT_S", 0.001)
    result = await IFEvalReward(mode="loose").grade(Response("p. " * 300_000, label=SENTENCES))
    assert (result.status, result.reward, result.score) == (Status.TIMEOUT, 0.0, 0.0)
    assert result.components == {"followed": 0.0, "all": 0.0, "num_instructions": 1.0}
