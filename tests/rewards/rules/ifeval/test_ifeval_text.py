"""Sentences and words: what ends one, and what only looks so."""

import pytest

from agentenv.rewards.rules.ifeval.counts import num_capital_tokens, num_sentences, num_spaced_words, num_word_runs


@pytest.mark.parametrize(("text", "count"), [
    ("", 0), ("...", 0), ("! ! !", 0), ("No end", 1), ("One.", 1), ("One. Two", 2), ("One! Two? Three.", 3),
    ("a\n\nb\n\nc", 1), ("* a\n* b", 1), ("hello. world.", 2),
    ("Dr. Smith met Mrs. Jones.", 1), ("See e.g. Paris, i.e. the city.", 1), ("Fig. 3 vs. Fig. 4.", 1),
    ("We met at 5 p.m. The train left.", 2), ("At 5 p.m. today it left.", 1), ("At 5 p.m. the train left.", 1),
    ("The U.S. Senate met.", 1),
    ("J. R. R. Tolkien wrote it.", 1), ("It was vitamin C. It works.", 2), ("He lives on Main St. He is well.", 2),
    ("Pi is 3.14. Go to foo.com. Then stop.", 3), ("It is 5. It is 6.", 2),
    ("See no. 5 there. It says no. I agree.", 3),
    ("Wait... what? No... The end.", 3), ("So… it goes.", 1), ("What?! Really?", 2), ("Inc.. Next", 2),
    ('He said "Hello!" and left.', 2), ('"Is it?" (Yes.) Good.', 3), ("**Bold.** Next one. **End.**", 3),
    ("It's 90°F. Sit down.", 2), ("Yes.No.", 1), ("你好。再见！", 2), ("यह है। वह है।", 2),
])  # fmt: skip
@pytest.mark.parametrize("list_numbers", [True, False])
def test_sentences(text, count, list_numbers):
    assert num_sentences(text, list_numbers=list_numbers) == count


@pytest.mark.parametrize(("text", "published", "plain"), [
    ("1. One.\n2. Two.", 4, 2), ("1. First\n2. Second", 3, 1), ("1. first\n2. second", 1, 1), ("**3. Third** is", 2, 1),
])  # fmt: skip
def test_a_lists_numbers_are_sentences_in_the_published_counts_only(text, published, plain):
    assert num_sentences(text, list_numbers=True) == published
    assert num_sentences(text, list_numbers=False) == plain


@pytest.mark.parametrize(("text", "runs", "spaced"), [
    ("चौच्य-शर्व्हस सूरजकोणाला इराजाविन", 4, 3), ("நான் தமிழ்", 2, 2), ("می\u200cخواهم", 1, 1), ("cafe\u0301s", 1, 1),
    ("❤️ a", 1, 1),
    ("", 0, 0), ("don't", 2, 1), ("a - b", 2, 2), ("well-known fact", 3, 2), ("1,000 €", 2, 1), ("* **a**", 1, 1),
])  # fmt: skip
def test_words(text, runs, spaced):
    assert num_word_runs(text) == runs
    assert num_spaced_words(text) == spaced


@pytest.mark.parametrize(("text", "count"), [
    ("IT'S A U.S. THING", 5), ("DON'T", 2), ("It’S", 1), ("AND/OR", 1), ("COVID-19", 1), ("A--B", 2), ("A,B;C", 3),
    ("NASA's", 1), ("**BOLD** (YES)", 2), ("Mixed AbC", 0), ("123 !", 0), ("O'BRIEN", 1), ("X1", 1),
])  # fmt: skip
def test_capital_words_as_published(text, count):
    assert num_capital_tokens(text) == count
