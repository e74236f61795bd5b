"""Every instruction of IFEval and function of open-instruct: texts that follow it, that do not, and that do loosely.

Known bugs of the verifiers that ROLL ships are among `cases.jsonl`, each as a text.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from agentenv.errors import MissingDependency
from agentenv.rewards.rules.ifeval.functions import RULES as FUNCTIONS
from agentenv.rewards.rules.ifeval.official import RULES as OFFICIAL
from agentenv.rewards.rules.ifeval.reward import RULES, check_text, instructions_of, variants
from agentenv.rewards.rules.ifeval.rules import (
    CODES,
    code_of,
    is_in,
    load_langdetect,
    num_capital_tokens,
    num_sentences,
    num_spaced_words,
    num_word_runs,
)

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text("utf-8").splitlines()]
KNOWS_LANGUAGES = importlib.util.find_spec("langdetect") is not None


def followed(name, params, text, mode="strict"):
    return check_text(instructions_of({"func_name": name, **params}, {}), text, mode) == [True]


@pytest.mark.parametrize("case", CASES, ids=[case["name"].rpartition(":")[2] for case in CASES])
def test_instruction(case):
    if case.get("langdetect") and not KNOWS_LANGUAGES:
        pytest.skip("pip install langdetect: it tells languages of one script")
    name, params = case["name"], case["params"]
    for text in case["follow"]:
        assert followed(name, params, text), text
        assert followed(name, params, text, "loose"), text
    for text in case["break"] + case["loose"]:
        assert not followed(name, params, text), text
    for text in case["loose"]:
        assert followed(name, params, text, "loose"), text


def test_the_functions_are_other_names_of_the_25_instructions_and_all_have_cases():
    assert len(FUNCTIONS) == len(OFFICIAL) == 25
    assert {rule.type for rule in FUNCTIONS.values()} == set(OFFICIAL)
    assert {case["name"] for case in CASES} == set(RULES) == set(FUNCTIONS) | set(OFFICIAL)


def test_either_form_takes_the_names_of_the_other():
    by_id = instructions_of({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["cat"]}]}, {})
    by_name = instructions_of({"instruction_id_list": ["verify_keywords"], "kwargs": [{"keyword_list": ["cat"]}]}, {})
    assert check_text(by_id, "concatenate", "strict") == [True]
    assert check_text(by_name, "concatenate", "strict") == [False]
    assert by_id[0].rule.type == by_name[0].rule.type == "keywords:existence"


def test_loose_reads_a_text_in_eight_ways():
    assert variants("*a*\nb\nc*d") == [
        "*a*\nb\nc*d", "b\nc*d", "*a*\nb", "b", "a\nb\ncd", "b\ncd", "a\nb",
    ]  # fmt: skip
    assert len(variants("*a*\n*b*\n*c*")) == 8


@pytest.mark.parametrize("text", ["", "\n\n", "\u200b"])
def test_a_blank_text_follows_nothing(text):
    assert not followed("punctuation:no_comma", {}, text, "loose")
    assert not followed("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "less than"}, text, "loose")


@pytest.mark.long
def test_languages_are_detected_the_same_every_time_and_capitals_in_lower_case():
    langdetect = pytest.importorskip("langdetect", reason="pip install langdetect")
    langdetect.DetectorFactory.seed = 0
    assert langdetect.detect("I AM A CAT") != "en"
    english = langdetect.detect("i am a cat") == "en"
    assert followed("change_case:english_capital", {}, "I AM A CAT") == english
    text = "Die Katze la mesa on the table ist sehr gato"
    assert len({followed("validate_response_language", {"language": "de"}, text) for _ in range(20)}) == 1


# --- languages: told by langdetect where it is there, and never guessed -----------------------------------------------


def test_a_language_needs_langdetect_unless_the_text_has_no_letters(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    load_langdetect.cache_clear()
    with pytest.raises(MissingDependency, match=r"agentenv-rl\[ifeval\]"):
        is_in("สวัสดีครับ", language="th")
    assert not any(is_in(text, language="en") for text in ("", "123", "... !", "\n"))


@pytest.mark.parametrize(("given", "code"), [
    ("de", "de"), ("DE", "de"), ("German", "de"), (" hindi ", "hi"), ("zh-cn", "zh-cn"), ("Chinese", "zh"),
    ("xx", None), ("-", None), ("", None), (None, None), (3, None),
])  # fmt: skip
def test_languages_are_given_by_code_or_name(given, code):
    assert code_of(given) == code


@pytest.mark.long
def test_every_language_that_langdetect_knows_can_be_asked_for():
    pytest.importorskip("langdetect", reason="pip install langdetect")
    from langdetect import detector_factory

    load_langdetect()
    assert set(detector_factory._factory.langlist) | {"zh"} == set(CODES)


# --- sentences and words: what ends one, and what only looks so -------------------------------------------------------


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
