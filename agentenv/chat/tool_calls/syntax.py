"""How a template writes calls (`Syntax`), and the regular expressions that follow from it (`Patterns`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

FormatKind = Literal["json", "named", "markup", "keywords", "plain"]

REASONING = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|thought_start|>", "<|thought_end|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""The marks around reasoning, for families of models that reason."""

NAME = r"[\w.:/$-]{1,256}+"
"""The pattern of tool names."""

ANY_ID, ANY_NAME = "\uf8fe", "\uf8fd"
"""They stand for a call's id, and for its repeated name, in the texts of a Syntax."""

_ID = r"[\w.:-]{1,256}"
_PIECES = re.compile(r"\s+|<[^<>\s]*>|[^\s<]+|<")
_FIRST_TAG = re.compile(r"(?:<[^<>\s]{1,64}>|</?[\w:.-]+|\[[A-Z_]+\])")


def loose(text: str) -> str:
    """Return a regular expression for a text with flexible whitespace: any where the text has some and around tags.

    Whitespace at its ends is dropped. Decoding may add a space after a special token (SentencePiece), and models vary
    line breaks. `ANY_ID` stands for any id.
    """
    found = ""
    for piece in _PIECES.findall(text.strip()):
        is_tag = piece.startswith("<") and piece.endswith(">")
        found += r"\s*+" if piece.isspace() else rf"\s*+{re.escape(piece)}\s*+" if is_tag else re.escape(piece)
    return found.removeprefix(r"\s*+").removesuffix(r"\s*+").replace(ANY_ID, _ID).replace(ANY_NAME, NAME)


def _loose_with_id(text: str) -> str:
    """Return `loose` with the first id as a group."""
    return loose(text).replace(_ID, f"(?P<id>{_ID})", 1) if ANY_ID in text else loose(text)


@dataclass(frozen=True)
class Syntax:
    r"""How calls are written. Parts of the syntax are texts as the template renders them; empty if it has none.

    json: an object with the name and the arguments in it (Hermes, Qwen, Llama, Mistral). named: a name, then an object
    with the arguments (DeepSeek, gpt-oss, Kimi). markup: a name, then an element for each parameter (Qwen3-Coder, GLM).
    keywords: like a call in Python (LFM2, MiniCPM, Gemma 4). plain: the template renders no calls; they are written in
    Hermes' form, `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`, which every other kind also accepts.
    """

    kind: FormatKind = "plain"
    section_open: str = ""
    """Text before the first of several calls."""
    section_close: str = ""
    call_open: str = "<tool_call>"
    """Text before every call, up to its name or object."""
    call_close: str = "</tool_call>"
    listed: bool = False
    """True if the objects stand in a list, in the kind json."""
    arguments_key: str = "arguments"
    """The key of the arguments in an object, in the kind json."""
    after_name: str = ""
    """Text between a name and its arguments."""
    key_open: str = ""
    key_close: str = ""
    """Text between a parameter's name and its value."""
    literal_key_close: str = ""
    """The same before a value that is not a string, if the template makes a difference (DeepSeek V3.2)."""
    value_close: str = ""
    cdata: bool = False
    """True if the template writes strings with markup in them as `<![CDATA[…]]>` (MiniCPM5)."""
    adds_space: bool = False
    """True if the tokenizer decodes a space after the added token with which strings begin (SentencePiece)."""
    quote: str = ""
    """Text around strings, in the kind keywords."""
    escapes: bool = True
    """True if the template escapes quoted strings."""
    lead: str = ""
    """The end of the generation prompt, if calls begin in it."""
    not_calls: frozenset[str] = frozenset()
    """Names that are not tools: recipients to which the template addresses plain text."""
    id_is_name: bool = False
    """True if the name is only in the call's id, as in Kimi's `functions.NAME:0`."""
    has_ids: bool = False
    strict_ids: bool = False
    """True if the template accepts only ids of nine letters and digits."""
    arguments_as_json: bool = False
    """True if the template takes a call's arguments as JSON text instead of an object."""
    content_of_calls: str | None = ""
    """The content that the template takes beside calls without text."""
    parallel: bool = True
    """True if the template renders several calls in one message."""
    reasoning_close: str = ""
    """The close of the reasoning that the generation prompt opens; empty if it opens none."""
    ends: tuple[str, ...] = ()
    """Texts of the tokens that end an action."""

    @cached_property
    def patterns(self) -> Patterns:
        """The syntax as regular expressions."""
        return Patterns.of(self)


@dataclass(frozen=True, slots=True)
class Patterns:
    """Regular expressions of one format."""

    call: re.Pattern[str]
    """The start of a call."""
    marks: re.Pattern[str]
    """All marks at which the scan stops: groups open and close (of reasoning) and call."""
    resync: re.Pattern[str]
    """Where a malformed call may end: at a mark, or after the close of a call."""
    section_open: re.Pattern[str]
    section_close: re.Pattern[str]
    call_open: re.Pattern[str]
    call_close: re.Pattern[str]
    close_tag: re.Pattern[str]
    """The first tag of a call's close."""
    name: re.Pattern[str]
    """A name, and the text between it and the arguments."""
    key: re.Pattern[str]
    value_end: re.Pattern[str]
    """The end of a value in markup: the group ok, or the start of another call."""
    cdata_end: re.Pattern[str]

    @classmethod
    def of(cls, syntax: Syntax) -> Patterns:
        """Return the patterns of a format."""
        opens = [text for text in (syntax.section_open, syntax.call_open) if text.strip()]
        no_call = rf"(?!\s*+(?:{'|'.join(map(re.escape, sorted(syntax.not_calls)))})\b)" if syntax.not_calls else ""
        plain = syntax.not_calls and not _FIRST_TAG.match(syntax.call_open.strip())
        # Where plain text opens a call, the name and the tag after it must follow.
        ahead = rf"(?=\s*+{NAME}\s*+{loose(_trigger(syntax.after_name))})" if plain else ""
        triggers = [loose(text if no_call else _trigger(text)) + no_call + ahead for text in opens]
        call = "|".join([*triggers, r"<tool_call>\s*+(?=\{)"])
        thoughts = "|".join(re.escape(pair[0]) for pair in REASONING)
        ends = "|".join(re.escape(end) for end in dict.fromkeys(pair[1] for pair in REASONING if pair[1] != "<|end|>"))
        closes = [loose(text) for text in (syntax.call_close, syntax.section_close, "</tool_call>") if text.strip()]
        value_close, key_open = loose(syntax.value_close), loose(syntax.key_open)
        behind = "|".join(text for text in (key_open, loose(_trigger(syntax.call_close))) if text)
        exact, tags = _loose_with_id(syntax.after_name), re.findall(r"<\|[^<>\s]+\|>", syntax.after_name)
        tag = tags[-1] if tags and syntax.after_name.rstrip().endswith(tags[-1]) else ""
        between = rf"(?:{exact}|[^\n{{}}]{{0,100}}?{re.escape(tag)})" if tag else exact
        key_close, literal = loose(syntax.key_close), syntax.literal_key_close
        key_close = rf"(?:{key_close}|(?P<literal>{loose(literal) if literal else '(?!)'}))"
        return cls(
            call=re.compile(call),
            marks=re.compile(f"(?P<open>{thoughts})|(?P<close>{ends})|(?P<call>{call})"),
            resync=re.compile(f"(?P<end>{'|'.join(closes)})|{call}|{ends}"),
            section_open=re.compile(loose(syntax.section_open)),
            section_close=re.compile(r"\s*+" + loose(syntax.section_close)),
            call_open=re.compile(_loose_with_id(syntax.call_open) + no_call),
            call_close=re.compile(r"\s*+" + loose(syntax.call_close)),
            close_tag=re.compile(loose(_trigger(syntax.call_close))),
            name=re.compile(rf"\s*+(?P<name>{NAME})\s*+{between}"),
            key=re.compile(rf"\s*+{key_open}\s*+(?P<key>[^\n<>]{{1,256}}?)\s*+{key_close}"),
            value_end=re.compile(rf"(?P<ok>{value_close}(?=\s*+(?:{behind})))|{call}"),
            cdata_end=re.compile(rf"\]\]>\s*+{value_close}"),
        )


def _trigger(text: str) -> str:
    """Return the part of an opening that identifies a call: its first tag, or all of it."""
    found = _FIRST_TAG.match(text.strip())
    return found[0] if found else text.strip()
