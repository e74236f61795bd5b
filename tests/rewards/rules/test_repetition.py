"""Repetition penalties: golden values of RM-Gallery and ROLL, scopes, alphabets, cost."""

import time

import pytest

from agentenv.rewards.rules.repetition import MAX_CHARS, RepetitionReward, repeated_share
from agentenv.rewards.types import Response

ABC = "a b c " * 4


async def penalty(text, **options):
    reward = RepetitionReward(**options)
    result = await reward.grade(Response(text))
    assert result.reward == reward.penalty(text)
    return result.reward


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ngram_size": 3, "mode": "hard"}, -0.4),
        ({"ngram_size": 3, "min_scaling": 0.1}, -0.6667),
        ({"ngram_size": 5, "min_scaling": 0.1}, -0.5833),
        ({"ngram_size": 3}, -0.7),
        ({"ngram_size": 3, "max_penalty": -0.1}, -0.07),
        ({"ngram_size": 3, "max_penalty": -0.5}, -0.35),
        ({"ngram_size": 12}, 0.0),
        ({"ngram_size": 13}, 0.0),
        ({"ngram_size": 3, "min_scaling": 0.7}, 0.0),
        ({"ngram_size": 3, "max_penalty": 0.0}, 0.0),
    ],
)
async def test_golden_values(options, expected):
    assert await penalty(ABC, **options) == pytest.approx(expected, abs=5e-5)


def test_a_bonus_for_repetition_is_refused_as_rm_gallery_does():
    with pytest.raises(ValueError, match="max_penalty"):
        RepetitionReward(max_penalty=1.0)


@pytest.mark.parametrize(
    ("text", "unit", "share"),
    [
        ("A a", "words", 0.5), ("A a", "auto", 0.5), ("天天向上", "auto", 0.25), ("天天向上", "words", 0.0),
        ("天天向上", "chars", 0.25), ("GPT天 gpt天", "auto", 0.5), ("aab b", "chars", 0.5), ("", "auto", 0.0),
        ("  \n", "chars", 0.0), ("안안", "auto", 0.5), ("ああ", "auto", 0.5),
    ],
)  # fmt: skip
def test_tokens_are_words_or_characters(text, unit, share):
    assert repeated_share(text, 1, unit=unit) == pytest.approx(share)


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/en/articles/2026/the-history-of-the-lighthouse-at-the-end-of-the-world.html?page=12",
        r"\frac{-b\pm\sqrt{b^2-4ac}}{2a}=\frac{-3\pm\sqrt{3^2-4\cdot2\cdot(-5)}}{2\cdot2}=\frac{-3\pm7}{4}",
        "การเรียนรู้แบบเสริมกำลังเป็นสาขาหนึ่งของการเรียนรู้ของเครื่องซึ่งตัวแทนเรียนรู้จากการลองผิดลองถูก",
        "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
        "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4//8/w38GIAXDIBKE0DHxgljNBAAO9TXL0Y4OHwAAAABJRU5ErkJggg==",
        f"A title\n{'-' * 60}\nand a table\n|{'-' * 20}|{'-' * 20}|\nof {'=' * 80} rules",
    ],
)
async def test_a_long_word_that_goes_on_is_none(text):
    assert await penalty(text) == 0.0


async def test_the_scope_says_where_repetition_counts():
    text = f"<think>{ABC}</think> one two three four five six"
    assert await penalty(text, scope="thought") == pytest.approx(-0.7)
    assert await penalty(text, scope="final") == 0.0
    assert -0.7 < await penalty(text, scope="full") < 0.0
    assert await penalty("x y z", scope="thought") == 0.0


async def test_a_long_text_is_judged_in_a_thread_and_the_same():
    text = "all work and no play " * 2000
    result = await RepetitionReward().grade(Response(text))
    assert result.reward == RepetitionReward().penalty(text) == -result.components["repeated"]
    assert result.reward < -0.99


@pytest.mark.long
async def test_the_end_of_an_endless_text_is_graded():
    words = " ".join(map(str, range(60_000)))
    assert len(words) > MAX_CHARS
    looped = words + " again" * (MAX_CHARS // 6)
    assert RepetitionReward().penalty(looped) < -0.99
    assert (await RepetitionReward().grade(Response(looped))).reward < -0.99
    assert (await RepetitionReward().grade(Response(looped.removesuffix(" again" * (MAX_CHARS // 6))))).reward == 0.0


@pytest.mark.long
def test_the_cost_is_linear():
    started = time.process_time()
    assert repeated_share("ab " * 80_000, 5) > 0.99
    assert time.process_time() - started < 30.0  # some 50 ms; quadratic time would take minutes
