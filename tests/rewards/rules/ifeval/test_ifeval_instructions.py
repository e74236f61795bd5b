"""Every instruction of IFEval and function of open-instruct: texts that follow it, that do not, and that do loosely.

Known bugs of the verifiers that ROLL ships are among `cases.jsonl`, each as a text.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from agentenv.rewards.rules.ifeval.functions import RULES as FUNCTIONS
from agentenv.rewards.rules.ifeval.instructions import RULES, check_text, instructions_of, variants
from agentenv.rewards.rules.ifeval.official import RULES as OFFICIAL

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
    assert by_id[0].type == by_name[0].type == "keywords:existence"


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
