"""Similarity: each metric against values counted by hand or by the plain algorithm."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import DataError
from agentenv.rewards.rules import similarity
from agentenv.rewards.rules.similarity import MAX_CHARS, METRICS, SimilarityReward, edit_ratio
from agentenv.rewards.types import Response, Status


async def alike(metric, answer, label, **options):
    result = await SimilarityReward(metric=metric, **options).grade(Response(answer, label))
    assert result.reward == result.score == result.components[metric]
    return result.reward


@pytest.mark.parametrize(
    ("metric", "answer", "label", "expected"),
    [
        ("exact", " Paris\n", "Paris", 1.0),
        ("exact", "<think>Rome</think>Paris<|im_end|>", "Paris", 1.0),
        ("normalized_exact", "the  paris!", "Paris", 1.0),
        ("normalized_exact", "Ｐａｒｉｓ", "paris", 1.0),
        ("normalized_exact", "U.S.", "US", 1.0),
        ("normalized_exact", "3.14", "314", 0.0),
        ("normalized_exact", "\u22125", "-5", 1.0),
        ("normalized_exact", "-.5", "5", 0.0),
        ("normalized_exact", "1/2", "12", 0.0),
        ("normalized_exact", "2:30.", "230", 0.0),
        ("normalized_exact", "1,000", "1000", 1.0),
        ("normalized_exact", "10²", "10^2", 1.0),
        ("normalized_exact", "½", "1/2", 1.0),
        ("normalized_exact", "2½", "2 1/2", 1.0),
        ("normalized_exact", "x ≤ y", "x ≥ y", 0.0),
        ("normalized_exact", "The", "an", 0.0),
        ("normalized_exact", "?!", "?!", 1.0),
        ("token_f1", "It is the Eiffel Tower", "Eiffel Tower", 2 / 3),
        ("token_f1", "yes yes yes", "yes", 0.5),
        ("token_f1", "我爱北京", "北京", 2 / 3),
        ("rouge_l", "the cat sat on the mat", "the cat is on the mat", 10 / 12),
        ("rouge_l", "?!", "?!", 1.0),
        ("rouge_l", "-42", "42", 1.0),  # as rouge_score has it
        ("edit", "kitten", "sitting", 1 - 3 / 7),
        ("char_ngram", "night", "nacht", 0.0),
        ("char_ngram", "nighty", "night", 6 / 7),
        ("char_ngram", "new\n york", "new york", 1.0),
        ("char_ngram", "ab", "abc", 0.0),
    ],
)
async def test_values_by_hand(metric, answer, label, expected):
    assert await alike(metric, answer, label) == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
async def test_the_best_of_several_references_counts(metric):
    assert await alike(metric, "Mount Everest", ["K2", "Mount Everest", "?"]) == 1.0
    assert await alike(metric, "Mount Everest", ["K2", "Zugspitze"]) < 0.5
    assert await alike(metric, "the mount everest", ["K2", "Mount Everest"]) >= (0.0 if metric == "exact" else 0.6)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("answer", ["", "<think>Paris", "<think>Paris</think>", "<|im_end|>"])
async def test_no_answer(metric, answer):
    result = await SimilarityReward(metric=metric).grade(Response(answer, "Paris"))
    assert (result.status, result.reward, dict(result.components)) == (Status.NO_ANSWER, 0.0, {metric: 0.0})


@pytest.mark.parametrize(
    "label",
    [None, "", "  ", [], ["a", ""], ["a", None], 5, float("nan"), {"a": 1}, [["a"]], ["a"] * 65, "x" * (MAX_CHARS + 1)],
)  # fmt: skip
async def test_a_label_that_is_not_a_reference_is_a_data_error(label):
    with pytest.raises(DataError, match="label"):
        await SimilarityReward().grade(Response("x", label))


async def test_a_long_text_never_computes_in_this_process(monkeypatch):
    """Sorting its combining marks takes quadratic time, however short the reference is."""
    monkeypatch.setattr(similarity, "handle", None)  # of this process; the workers import it anew
    assert await alike("token_f1", "a" + "\u0301" * 1500 + "\u0327" * 1500, "42") == 0.0
    with pytest.raises(TypeError):
        await alike("token_f1", "a", "42")


@pytest.mark.long
@pytest.mark.parametrize("metric", METRICS)
async def test_long_texts_cost_a_bounded_time_and_the_rest_counts_as_unlike(metric):
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta"], k=2500)
    reference = " ".join(words)
    assert await alike(metric, reference, reference) == 1.0
    near = await alike(metric, reference + " end", reference)
    assert near == 0.0 if "exact" in metric else 0.99 < near < 1.0
    result = await SimilarityReward(metric=metric).grade(Response((reference + " ") * 60, reference))
    assert (result.status, result.reward < 0.2) == (Status.OK, True)


def plain_edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[:], i
        for j, y in enumerate(b, 1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y))
    return row[-1]


SHORT = st.text("abc", max_size=70)


@pytest.mark.long
@given(SHORT, SHORT)
def test_the_edit_distance_is_levenshteins(a, b):
    expected = 1 - plain_edit_distance(a, b) / max(len(a), len(b)) if a or b else 1.0
    assert edit_ratio(a, b) == pytest.approx(expected)
