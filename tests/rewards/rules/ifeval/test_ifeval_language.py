"""Languages: told by langdetect where it is there, and never guessed."""

import sys

import pytest

from agentenv.errors import MissingDependency
from agentenv.rewards.rules.ifeval.rules import CODES, code_of, is_in, load_langdetect

TEXTS = {
    "th": "สวัสดีครับ วันนี้อากาศดี",
    "ar": "الطقس جميل اليوم وأنا ذاهب إلى الخارج.",
    "zh-cn": "今天天气很好，我要出去玩。",
}  # fmt: skip


def test_a_language_needs_langdetect_unless_the_text_has_no_letters(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    load_langdetect.cache_clear()
    with pytest.raises(MissingDependency, match=r"agentenv-rl\[ifeval\]"):
        is_in(TEXTS["th"], language="th")
    assert not any(is_in(text, language="en") for text in ("", "123", "... !", "\n"))


@pytest.mark.long
@pytest.mark.parametrize("code", TEXTS)
def test_langdetect_tells_the_language(code):
    pytest.importorskip("langdetect", reason="pip install langdetect")
    assert is_in(TEXTS[code], language=code)
    assert is_in(f"{TEXTS[code]} 123 {TEXTS[code]} (a)", language=code)
    assert not is_in(TEXTS[code], language="de")
    assert is_in(TEXTS[code], language="zh") == code.startswith("zh")


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
