"""Every instruction id of IFEval: texts that follow it, texts that do not, and texts that do only when read loosely."""

import importlib.util

import pytest

from agentenv.rewards.rules.ifeval.instructions import RULES, check_text, instructions_of, variants

NEEDS_LANGDETECT = pytest.mark.skipif(
    importlib.util.find_spec("langdetect") is None, reason="pip install langdetect: it tells languages of one script"
)

CASES = {
    "keywords:existence": [
        (
            {"keywords": ["Cat", "dog+"]},
            ["a cat and a dog+", "CONCATENATE DOG+S", "x\ncat\ndog+ y"],
            ["a cat and a dog", "", "dog+ only"],
            [],
        ),
        ({"keywords": ["ab cd"]}, ["say ab cd!", "Ab Cd", "xab cdx"], ["ab  cd", "ab-cd", "cd ab"], ["ab* cd"]),
    ],
    "keywords:frequency": [
        (
            {"keyword": "war", "frequency": 2, "relation": "at least"},
            ["war and War", "warwar", "Star wars, war"],
            ["war", "", "w a r war"],
            ["wa*r war"],
        ),
        (
            {"keyword": "war", "frequency": 2, "relation": "less than"},
            ["war", "peace", "WAR!"],
            ["war war", "warfare is war", "War\nwar"],
            ["war\nwar is here"],
        ),
    ],
    "keywords:forbidden_words": [
        (
            {"forbidden_words": ["art", "le"]},
            ["start", "Please", "leg, arts"],
            ["Art", "the art.", "le chat"],
            ["Le first line\nstart", "start\nart."],
        ),
    ],
    "keywords:letter_frequency": [
        (
            {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
            ["Aaa", "banana", "a b a c A"],
            ["aa", "", "bbb"],
            [],
        ),
        (
            {"letter": "A", "let_frequency": 1, "let_relation": "less than"},
            ["bbb", "é", "1"],
            ["a", "bA", "Alpha"],
            ["Sure, again\nhello"],
        ),
        (
            {"letter": "#", "let_frequency": 2, "let_relation": "at least"},
            ["# a #", "##", "a#b#"],
            ["#", "", "aa"],
            [],
        ),
    ],
    "length_constraints:number_sentences": [
        (
            {"num_sentences": 3, "relation": "at least"},
            ["One. Two! Three?", "One.\nTwo is it. C.", '"Hi!" he said. Bye.'],
            ["One. Two!", "", "Dr. Smith met Mr. Jones at 3.14 p.m. today"],
            [],
        ),
        (
            {"num_sentences": 2, "relation": "less than"},
            ["No end", "Just one.", "a\n\nb\n\nc"],
            ["One. Two.", "1. First", "What? Me"],
            ["Sure.\nOne."],
        ),
    ],
    "length_constraints:number_words": [
        (
            {"num_words": 3, "relation": "at least"},
            ["a b c", "don't go", "one-two three"],
            ["a b", "", "- - - a"],
            [],
        ),
        (
            {"num_words": 3, "relation": "less than"},
            ["a b", "x", "… b!"],
            ["a b c", "don't go", "a, b, c, d"],
            ["Here you are:\nyes"],
        ),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["a\n***\nb", "a *** b", "***\na\n***\nb\n***"],
            ["a\n\nb", "a\n***\nb\n***\nc", "a ****** b"],
            ["Sure:\n***\na\n***\nb"],
        ),
        ({"num_paragraphs": 1}, ["a", "a\n\nb", "***\na"], ["a\n***\nb", "", "*** ***"], ["a\n***\nb"]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
            ["a\n\nElm trees", 'a\n\n"elm" is', "a\n\n\nelm, b"],
            ["a\n\nelms", "elm", "a\n\nelm\n\nb"],
            ["a\n\n**Elm** trees"],
        ),
        (
            {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"},
            [],
            ["a", "a\n\na", "b\n\n\n\na"],
            [],
        ),
        (
            {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "It's"},
            [],
            ["It's\n\nb", "Its\n\nb", "x\n\ny"],
            [],
        ),
    ],
    "detectable_content:number_placeholders": [
        (
            {"num_placeholders": 2},
            ["[a] [b]", "[name] and [street] and [town]", "[x][y]"],
            ["[a]", "[] []", "[ ] [a]", "[a\nb] [c]"],
            [],
        ),
    ],
    "detectable_content:postscript": [
        (
            {"postscript_marker": "P.S."},
            ["a\nP.S. b", "a\np. s. b", "P.S."],
            ["a\nPS b", "P.P.S b", ""],
            ["a\nP*.S.* b"],
        ),
        (
            {"postscript_marker": "P.P.S"},
            ["a\nP.P.S b", "p. p. s. x", "x p.p.s"],
            ["P.S. b", "PPS b", "a"],
            ["P.P.*S*"],
        ),
        ({"postscript_marker": "NB+"}, ["nb+ x", "a NB+", "NB++"], ["NBB", "NB", "n b +"], ["N*B+"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* a\n* b", "- a\n\n  - b", "x\n* a\ny\n-b"],
            ["* a", "**a**\n* b", "* a\n* b\n---"],
            ["- Sure\n* a\n* b"],
        ),
        ({"num_bullets": 1}, ["* a", "---", "x\n *a*"], ["**a**", "*\n", "1. a"], ["- a\n- b"]),
    ],
    "detectable_format:constrained_response": [
        (
            {},
            ["My answer is yes.", "Well: My answer is maybe. Bye", "**My answer is no.**"],
            ["yes", "my answer is yes.", "My answer is yes. My answer is no."],
            ["My answer is **yes**.", "My answer is yes.\nMy answer is no."],
        ),
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*a* b *c*", "**a** and *b*", "**a** **b**"],
            ["**a**", "* * **", "*a\nb* *c*"],
            [],
        ),
        ({"num_highlights": 1}, ["*a*", "x **a b** y", "* a *"], ["**", "*a", "****"], []),
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "SECTION", "num_sections": 2},
            ["SECTION 1\na\nSECTION 2\nb", "x SECTION1 a SECTION 22 b", "SECTION 1 a SECTION 2 b SECTION 3 c"],
            ["SECTION 1\na", "Section 1 a\nSection 2 b", "SECTION 1 - SECTION 2 -", "SECTION A a SECTION B b"],
            ["**SECTION** 1 a\nSECTION *2* b"],
        ),
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": [1, null]}', '```json\n{"a": 1}\n```', "```\n[]\n```", f"[{'9' * 5000}]"],
            ["{'a': 1}", "", 'Sure: {"a": 1}', "[" * 100_000],
            ['Sure:\n{"a": 1}', '{"a": 1}\nBye.', '**{"a": 1}**'],
        ),
    ],
    "detectable_format:title": [
        (
            {},
            ["<<a>>", "x <<My title>> y", "<<<a>>>"],
            ["<<>>", "<a>", "<<a\nb>>", "<< >>", ">>a<<"],
            ["<*<a>*>"],
        ),
    ],
    "combination:two_responses": [
        (
            {},
            ["a******b", "******\na\n******\nb\n******", "a\n******\n\nb"],
            ["a", "a******a", "a******b******c", "a************b", "******"],
            ["a******b\n******c"],
        ),
    ],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": "Say hi. "},
            ["Say hi. Hi!", "SAY HI.", " say hi.\nhi"],
            ["Say hi", "hi. Say hi.", ""],
            ["Sure!\nSay hi. Hi!", "**Say hi.** Hi!"],
        ),
    ],
    "startend:end_checker": [
        (
            {"end_phrase": "The end."},
            ["a. The end.", 'a "THE END."', "the end.\n\n"],
            ["The end. Bye", "the end", ""],
            ["a The end.\nBye!", "a **The end.**"],
        ),
    ],
    "startend:quotation": [
        (
            {},
            ['"a"', ' "a "b" c"\n', '"1\n2"'],
            ["a", '"a', '""', '"', "“a”"],
            ['Sure:\n"a"', '**"a"**', '"a"\nBye'],
        ),
    ],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            ["A B", "NASA is IT", "IT'S", "U.S., NATO"],
            ["A b", "Nasa Is", "READ-ONLY", ""],
            [],
        ),
        (
            {"capital_frequency": 1, "capital_relation": "less than"},
            ["a b", "Ab", "1 %"],
            ["A b", "I am", "NASA's"],
            ["OK\nso"],
        ),
    ],
    "punctuation:no_comma": [
        ({}, ["a b", "a; b.", "1.000"], ["a, b", ",", "1,000"], ["Sure, here:\na b", "a b\nBye, Tom"]),
    ],
    "language:response_language": [
        (
            {"language": "th"},
            ["สวัสดี", "นี่คือคำตอบ 123", "ใช่ (ok) ครับผมยินดีช่วยเหลือ"],
            ["hello", "123", "", "привет"],
            ["Sure, here is the translation of all that you have asked for, my dear friend:\nสวัสดี"],
        ),
        (
            {"language": "ko"},
            ["안녕하세요", "네, 맞습니다!", "1. 서울 2. 부산"],
            ["こんにちは", "你好吗朋友", "hello"],
            ["Here is the translation of all that you asked:\n네"],
        ),
        (
            {"language": "hi"},
            [],
            ["hello there", "ನಮಸ್ಕಾರ", "...", "مرحبا"],
            [],
        ),
    ],
    "change_case:english_capital": [
        ({}, [], ["Hello there", "123", "", "ΚΑΛΗΜΕΡΑ", "นี่คือ"], []),
    ],
    "change_case:english_lowercase": [
        ({}, [], ["Hello there", "123", "", "καλημέρα", "นี่คือ"], []),
    ],
}
NEED_LANGDETECT = {
    "language:response_language": (
        {"language": "de"},
        ["Das ist ein kurzer deutscher Satz über das Wetter.", "Ich weiß es leider nicht.", "Guten Morgen, mein Herr."],
        ["This is a short English sentence about it.", "Je ne sais pas du tout.", "Esto es una frase en español."],
        ["Here is the translation that you asked me to give:\nIch weiß es nicht."],
    ),
    "change_case:english_capital": (
        {},
        ["THIS IS A SHORT SENTENCE.", "THE WEATHER IS NICE TODAY, IS IT NOT?", "I HAVE 3 VERY OLD CATS AT HOME."],
        ["DAS IST EIN KURZER DEUTSCHER SATZ ÜBER DAS WETTER.", "JE NE SAIS PAS DU TOUT.", "THIS IS A SHORT sENTENCE."],
        ["Sure:\nTHIS IS A SHORT SENTENCE."],
    ),
    "change_case:english_lowercase": (
        {},
        ["this is a short sentence.", "the weather is nice today, is it not?", "i have 3 very old cats at home."],
        ["das ist ein kurzer deutscher satz über das wetter.", "je ne sais pas du tout.", "this is a short Sentence."],
        ["Sure:\nthis is a short sentence."],
    ),
}  # fmt: skip


def followed(name, params, text, mode):
    return check_text(instructions_of({"instruction_id_list": [name], "kwargs": [params]}, {}), text, mode) == [True]


def tables(cases):
    return [pytest.param(name, *case, id=name.partition(":")[2]) for name, some in cases.items() for case in some]


def check(name, params, follow, break_, loose_only):
    for text in follow:
        assert followed(name, params, text, "strict"), text
        assert followed(name, params, text, "loose"), text
    for text in break_ + loose_only:
        assert not followed(name, params, text, "strict"), text
    for text in loose_only:
        assert followed(name, params, text, "loose"), text


@pytest.mark.parametrize(("name", "params", "follow", "break_", "loose_only"), tables(CASES))
def test_instruction(name, params, follow, break_, loose_only):
    check(name, params, follow, break_, loose_only)


@NEEDS_LANGDETECT
@pytest.mark.parametrize("name", NEED_LANGDETECT)
def test_instruction_about_a_language_of_a_shared_script(name):
    check(name, *NEED_LANGDETECT[name])


def test_every_instruction_has_three_texts_that_follow_and_three_that_do_not():
    ids = {rule.type for rule in RULES.values()}
    assert len(ids) == 25
    assert set(CASES) == ids
    for name, cases in CASES.items():
        both = [*cases, *([NEED_LANGDETECT[name]] if name in NEED_LANGDETECT else [])]
        assert sum(len(case[1]) for case in both) >= 3, name
        assert sum(len(case[2]) for case in both) >= 3, name


def test_loose_reads_a_text_in_eight_ways():
    assert variants("*a*\nb\nc*d") == [
        "*a*\nb\nc*d", "b\nc*d", "*a*\nb", "b", "a\nb\ncd", "b\ncd", "a\nb",
    ]  # fmt: skip
    assert len(variants("*a*\n*b*\n*c*")) == 8


@pytest.mark.parametrize("text", ["", " ", "\n\n", "\u200b", "\ufeff \u200e"])
def test_a_blank_text_follows_nothing(text):
    assert not followed("punctuation:no_comma", {}, text, "loose")
    assert not followed("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "less than"}, text, "loose")


def test_capitals_are_detected_as_english_although_langdetect_does_not_read_them():
    langdetect = pytest.importorskip("langdetect", reason="pip install langdetect")
    langdetect.DetectorFactory.seed = 0
    text = "I AM A CAT"
    assert langdetect.detect(text) != "en"
    assert followed("change_case:english_capital", {}, text, "strict") == (langdetect.detect(text.lower()) == "en")
