"""Every function name of open-instruct: texts that follow it and texts that do not; each known bug is right here."""

import importlib.util

import pytest

from agentenv.rewards.rules.ifeval.functions import RULES as FUNCTIONS
from agentenv.rewards.rules.ifeval.instructions import RULES, check_text, instructions_of
from agentenv.rewards.rules.ifeval.official import RULES as OFFICIAL

CASES = [
    ("verify_keywords", {"keyword_list": ["cat", "red fox"]},
     ["A cat, a Red Fox.", "red fox (cat)", "cat\nred fox"],
     ["concatenate, red fox", "cat, red foxes", ""], ["ca*t* red fox"]),
    ("verify_keyword_frequency", {"word": "cat", "N": 2},
     ["Cat, cat!", "a cat and no cats but a cat", "cat\ncat"],
     ["cat", "cat cat cat", "concatenate cats"], ["cat cat\nand cat"]),
    ("verify_keyword_frequency", {"word": "cat", "N": 2, "quantifier": "at least"},
     ["cat cat cat"], ["cat"], []),
    ("validate_forbidden_words", {"forbidden_words": ["art", "no way"]},
     ["start", "No, way to go", "artful"], ["Art.", "no way", "the art"], ["Art:\nstart"]),
    ("verify_letter_frequency", {"letter": "a", "N": 2},
     ["aa", "banAa", "a\nA\na"], ["a", "aaa", "AA"], ["Sure again\nb aa"]),
    ("validate_response_language", {"language": "ko"},
     ["안녕하세요", "네!", "1. 서울"], ["hello", "你好", "123"],
     ["Here is the translation of all that you asked:\n네"]),
    ("validate_response_language", {"language": "Thai"}, ["สวัสดี"], ["안녕하세요"], []),
    ("verify_paragraph_count", {"N": 2},
     ["a\n* * *\nb", "a * * * b", "* * *\na\n***\nb", "a\n*****\nb"],
     ["a\n\nb", "a\n* * *\n* * *", "a\n* * *\nb\n* * *\nc"], ["Sure:\n* * *\na\n* * *\nb"]),
    ("validate_word_constraint", {"N": 3, "quantifier": "at least"},
     ["a b c", "don't you go", "1 2 3 4"], ["a b", "a - b", "don't go"], []),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"},
     ["a b c", "a"], ["a b c d"], ["Sure, my friend:\na"]),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"},
     ["a " * 27, "a " * 33, "a " * 30], ["a " * 26, "a " * 34, "a"], []),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"},
     ["One. Two.", "One. Two. Three. Four.", "Wow! So? Yes!"],
     ["One.", "1. One.\n2. Two. Three. Four. Five.", "a\nb\nc"], []),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at most"},
     ["One. Two.", "1. First\n2. Second\n3. Third"], ["One. Two. Three."], ["Sure.\nOne. Two."]),
    ("validate_paragraphs", {"N": 2, "first_word": "The", "i": 2},
     ["a\n\nThe end", 'a\n \n"the" b', "a\n\n\n\n**The** b"], ["a\n\nTheory", "The\n\na", "a\n\nb\n\nThe"],
     ["Sure!\n\na\n\nThe end"]),
    ("validate_paragraphs", {"N": 1, "first_word": "a", "i": 2}, [], ["a", "a\n\na"], []),
    ("verify_postscript", {"postscript_marker": "P.S."},
     ["a\nP.S. b", "a\n**P.S.** b", "p.s. more"], ["a P.S. b", "a\nP.S.", "a\nP.P.S. b"], ["a\nP*.S. b*"]),
    ("validate_placeholders", {"N": 2},
     ["[a] [b]", "[a][b][c]", "to [name],\n[street]"], ["[a]", "[] []", "[ ] [a]"], []),
    ("verify_bullet_points", {"N": 2},
     ["* a\n* b", "- a\n\n  - b\n---", "* a\n+ b\n**t**"], ["* a", "---\n* a", "**a**\n* b", "*a*\n* b"],
     ["- Sure\n* a\n* b"]),
    ("validate_title", {}, ["<<a>>", "x\n<<My title>>", "<<<a>>>"], ["<<>>", "a", "< <a> >"], ["<*<a>>"]),
    ("validate_choice", {"options": ["yes", "no", "not sure"]},
     ["yes", "I say: NO.", "I am not sure, sorry."], ["e", "maybe", "yes or no", "not"], ["yes\nno"]),
    ("validate_choice", {"options": "A, B, C"}, ["I believe it is B.", "b", "A"], ["AB", "A or B", "D"], []),
    ("validate_choice", {"options": "('My answer is yes.', 'My answer is no.')"},
     ["My answer is yes.", "My answer is no, then"], ["My answer is", "yes"], ["My *answer* is yes."]),
    ("validate_choice", {"options": '["yes/no", "a,b"]'}, ["a,b"], ["yes"], []),
    ("validate_choice", {"options": ["A", "B", "B plus"]}, ["It is a B.", "B plus", "a"], ["B and B plus", "A, B"], []),
    ("validate_highlighted_sections", {"N": 1}, ["*a*", "x **b c**"], ["* a*", "*a *", "**", "****"], []),
    ("validate_highlighted_sections", {"N": 2},
     ["*a* and *b c*", "**a** *b*", "* point *one* and *two*"], ["**a**", "* a * b *", "*a*b c*"],
     []),
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"},
     ["Intro\nSECTION 1\na\nSECTION 2\nb", "## SECTION I\na\n**SECTION II**\nb", "SECTION 1 a SECTION 2 b"],
     ["SECTION 1\na", "SECTION 1\nSECTION 2", "a\nSECTION 1\nb", "SECTIONS\na\nSECTIONAL\nb"],
     ["SECTION 1\na\nSECTION 2\nb\nSECTION 3 ends"]),
    ("validate_json_format", {},
     ['{"a": 1}', '```json\n{"a": 1}\n```', "[1, 2]"], ["{a: 1}", "", '{"a": 1} ok'], ['Here:\n{"a": 1}']),
    ("validate_repeat_prompt", {"original_prompt": "Say hi."},
     ["Say hi. Hi!", " Say hi.\nhi", "Say hi."], ["say hi. Hi!", "hi", "Sure. Say hi."], ["Sure:\nSay hi. Hi!"]),
    ("validate_two_responses", {},
     ["a******b", "a\n******\nb", "******a******b"], ["a", "a******a", "a******"], ["a******b\n******c"]),
    ("validate_uppercase", {}, ["ABC", "A 1!", "ÄÖ"], ["Abc", "123", "", "!"], ["Sure:\nABC"]),
    ("validate_lowercase", {}, ["abc", "a 1!", "äö"], ["Abc", "123", "", "!"], ["Sure:\nabc"]),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"},
     ["NASA IT", "READ-ONLY", "A B C"], ["NASA", "Nasa It", "IT'S"], []),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at most"},
     ["NASA IT", "a"], ["A B C"], ["OK SO\nA B"]),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "around"}, ["A B C", "A"], ["a", "A B C D"], []),
    ("validate_end", {"end_phrase": "The end."},
     ["a. The end.", "The end.\n\n", '"a The end."'], ["The end. Bye", "the end", ""], ["The end.\nBye!"]),
    ("validate_quotation", {}, ['"a"', "“a b”", '"1"\n'], ["a", '""', '"a', '"a”'], ['Sure:\n"a"']),
    ("validate_no_commas", {}, ["a b", "a; b", "x"], ["a, b", ",", "1,000"], ["Sure, so:\na b"]),
]  # fmt: skip


def followed(name, params, text, mode="strict"):
    return check_text(instructions_of({"func_name": name, **params}, {}), text, mode) == [True]


@pytest.mark.parametrize(("name", "params", "follow", "break_", "loose_only"), CASES, ids=[case[0] for case in CASES])
def test_function(name, params, follow, break_, loose_only):
    for text in follow:
        assert followed(name, params, text), text
        assert followed(name, params, text, "loose"), text
    for text in break_ + loose_only:
        assert not followed(name, params, text), text
    for text in loose_only:
        assert followed(name, params, text, "loose"), text


def test_every_function_has_three_texts_that_follow_and_three_that_do_not():
    assert {case[0] for case in CASES} == set(FUNCTIONS)
    for name in FUNCTIONS:
        mine = [case for case in CASES if case[0] == name]
        assert sum(len(case[2]) for case in mine) >= 3, name
        assert sum(len(case[3]) for case in mine) >= 3, name


def test_the_functions_are_other_names_of_the_25_instructions():
    assert len(FUNCTIONS) == len(OFFICIAL) == 25
    assert {rule.type for rule in FUNCTIONS.values()} == set(OFFICIAL)
    assert set(RULES) == set(FUNCTIONS) | set(OFFICIAL)


def test_either_form_takes_the_names_of_the_other():
    by_id = instructions_of({"func_name": "keywords:existence", "keywords": ["cat"]}, {})
    by_name = instructions_of({"instruction_id_list": ["verify_keywords"], "kwargs": [{"keyword_list": ["cat"]}]}, {})
    assert check_text(by_id, "concatenate", "strict") == [True]
    assert check_text(by_name, "concatenate", "strict") == [False]
    assert by_id[0].type == by_name[0].type == "keywords:existence"


# The bugs of the verifiers that ROLL ships, each by its name.


def test_keyword_frequency_counts_the_keyword_and_not_all_words():
    assert not followed("verify_keyword_frequency", {"word": "cat", "N": 3}, "one two three")
    assert followed("verify_keyword_frequency", {"word": "cat", "N": 1}, "one cat two three")


@pytest.mark.parametrize("text", ["", "e", "s"])
def test_a_part_of_an_option_is_not_a_choice(text):
    assert not followed("validate_choice", {"options": ["yes", "no"]}, text)


def test_a_whole_sentence_around_an_option_is_a_choice():
    assert followed("validate_choice", {"options": ["My answer is yes.", "My answer is no."]}, "So: My answer is yes. ")


def test_bold_is_one_highlight():
    assert not followed("validate_highlighted_sections", {"N": 2}, "**bold**")
    assert followed("validate_highlighted_sections", {"N": 1}, "**bold**")


def test_dividers_and_bold_lines_are_not_bullets():
    assert followed("verify_bullet_points", {"N": 1}, "---\n* a\n**t**\n* * *\n***")
    assert followed("verify_bullet_points", {"N": 0}, "---")


def test_text_before_the_first_section_is_not_a_section():
    text = "Welcome!\nSECTION 1\na\nSECTION 2\nb"
    assert followed("validate_sections", {"N": 2, "section_splitter": "SECTION"}, text)
    assert not followed("validate_sections", {"N": 3, "section_splitter": "SECTION"}, text)


def test_forbidden_art_does_not_fire_on_start():
    assert followed("validate_forbidden_words", {"forbidden_words": ["art"]}, "start")


@pytest.mark.parametrize("name", ["validate_uppercase", "validate_lowercase"])
@pytest.mark.parametrize("text", ["", "123"])
def test_a_text_without_letters_has_no_case(name, text):
    assert not followed(name, {}, text)


@pytest.mark.parametrize(("name", "params", "text"), [
    ("validate_title", {}, "<<>>"), ("validate_placeholders", {"N": 1}, "[]"), ("validate_quotation", {}, '""'),
])  # fmt: skip
def test_empty_titles_placeholders_and_quotations_do_not_count(name, params, text):
    assert not followed(name, params, text)


def test_json_in_a_fence_is_json():
    assert followed("validate_json_format", {}, '```json\n{"a": [1, 2]}\n```')


@pytest.mark.parametrize("end", ["\n", "\n\n  ", " "])
def test_white_space_after_the_last_phrase_does_not_matter(end):
    assert followed("validate_end", {"end_phrase": "The end."}, f"So. The end.{end}")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("langdetect") is None, reason="pip install langdetect")
def test_a_detected_language_is_the_same_every_time():
    text = "Die Katze la mesa on the table ist sehr gato"
    assert len({followed("validate_response_language", {"language": "de"}, text) for _ in range(20)}) == 1
