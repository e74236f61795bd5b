"""Languages: told by script where that decides, by langdetect where it is there, and never guessed."""

import sys

import pytest

from agentenv.errors import MissingDependency
from agentenv.rewards.rules.ifeval import language
from agentenv.rewards.rules.ifeval.instructions import check_text, instructions_of
from agentenv.rewards.rules.ifeval.language import CODES, code_of, is_in

TEXTS = {
    "th": "สวัสดีครับ วันนี้อากาศดี",
    "ko": "안녕하세요, 날씨가 좋네요.",
    "ja": "今日は天気がいいですね。",
    "el": "Καλημέρα σας.",
    "he": "שלום לכולם",
    "bn": "আজ আবহাওয়া ভালো",
    "pa": "ਸਤ ਸ੍ਰੀ ਅਕਾਲ ਜੀ",
    "gu": "આજે હવામાન સારું છે",
    "ta": "வணக்கம் நண்பரே",
    "te": "నమస్కారం మిత్రమా",
    "kn": "ನಮಸ್ಕಾರ ಗೆಳೆಯ",
    "ml": "നമസ്കാരം സുഹൃത്തേ",
}  # fmt: skip
SHARED = {
    "hi": "आज मौसम बहुत अच्छा है और मैं बाहर जा रहा हूँ।",
    "ar": "الطقس جميل اليوم وأنا ذاهب إلى الخارج.",
    "fa": "هوا امروز خیلی خوب است و من بیرون می‌روم.",
    "ur": "آج موسم بہت اچھا ہے اور میں باہر جا رہا ہوں۔",
    "ru": "Сегодня хорошая погода, и я иду гулять.",
    "bg": "Днес времето е много хубаво и аз излизам навън.",
    "fr": "Il fait très beau aujourd'hui et je vais dehors.",
    "sw": "Hali ya hewa ni nzuri leo na mimi ninakwenda nje.",
    "zh-cn": "今天天气很好，我要出去玩。",
    "vi": "Hôm nay thời tiết rất đẹp và tôi đi ra ngoài.",
    "mr": "आज हवामान खूप छान आहे आणि मी बाहेर जात आहे.",
}  # fmt: skip


@pytest.fixture
def no_langdetect(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    monkeypatch.setattr(language, "_loaded", [])


@pytest.mark.parametrize("code", TEXTS)
def test_a_script_of_one_language_decides_alone(code, no_langdetect):
    assert is_in(TEXTS[code], code)
    assert is_in(f"{TEXTS[code]} 123 {TEXTS[code]} (a)", code)
    assert not any(is_in(TEXTS[code], other) for other in CODES if other != code)


@pytest.mark.parametrize("code", SHARED)
def test_a_script_of_several_languages_excludes_the_others_and_needs_langdetect(code, no_langdetect):
    with pytest.raises(MissingDependency, match=r"agentenv-rl\[ifeval\]"):
        is_in(SHARED[code], code)
    assert not is_in(SHARED[code], "th")


@pytest.mark.long
@pytest.mark.parametrize("code", SHARED)
def test_langdetect_distinguishes_languages_of_one_script(code):
    pytest.importorskip("langdetect", reason="pip install langdetect")
    assert is_in(SHARED[code], code)
    assert not is_in(SHARED[code], "de")
    assert is_in(SHARED[code], "zh") == code.startswith("zh")


@pytest.mark.parametrize("text", ["", "123", "... !", "\n", "ⴰⵣⵓⵍ"])
@pytest.mark.parametrize("code", ["en", "th", "zh"])
def test_text_without_letters_of_a_known_script_is_in_no_language(text, code, no_langdetect):
    assert not is_in(text, code)


def test_a_text_of_two_scripts_is_not_decided_by_script(no_langdetect):
    with pytest.raises(MissingDependency):
        is_in("안녕하세요 hello there my friend", "ko")


def test_a_loose_reading_that_its_script_decides_needs_no_langdetect(no_langdetect):
    instruction = instructions_of({"func_name": "validate_response_language", "language": "ko"}, {})
    assert check_text(instruction, "Sure:\n안녕하세요", "loose") == [True]
    with pytest.raises(MissingDependency):
        check_text(instruction, "Sure:\n안녕하세요", "strict")
    with pytest.raises(MissingDependency):
        check_text(instruction, "Sure: 안녕하세요", "loose")


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

    language.load()
    assert set(detector_factory._factory.langlist) | {"zh"} == set(CODES)
