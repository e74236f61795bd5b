"""Learn how a tokenizer's chat template writes calls, once, by rendering dummy calls: `tool_format`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from agentenv.chat.encoding import encoder_of
from agentenv.chat.template import CALL_FORMS, DUMMY_TOOLS, CallForm, Template, as_parts, probe, render
from agentenv.chat.tool_calls.parse import ToolFormat
from agentenv.chat.tool_calls.syntax import ANY_ID, ANY_NAME, NAME, REASONING
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Message
from agentenv.errors import ConfigError

NOTHING: Mapping[str, Any] = {}

_USER, _CONTENT, _RESULT = "qzaskqz", "qzcontentqz", "qzresultqz"
_NAMES = ("qznameaqz", "qznamebqz")
_ARGUMENTS = {"qzkeyaqz": "qzvalueaqz", "qzkeybqz": "qzvaluebqz"}
_KEYS, _VALUES = tuple(_ARGUMENTS), tuple(_ARGUMENTS.values())
_IDS, _NUMBER = ("qzid00001", "qzid00002"), 271828
_CACHE: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...], str], ToolFormat]] = WeakKeyDictionary()


def tool_format(
    tokenizer: Tokenizer, stop_token_ids: Sequence[int] = (), variables: Mapping[str, Any] = NOTHING
) -> ToolFormat:
    """Return how the tokenizer's template writes calls, cached after the first call. Never fails because of a template.

    A template that renders no calls has the kind plain. `stop_token_ids` are the ids besides EOS on which the engine
    stops.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ToolFormat()
    key = (str(tokenizer.chat_template), tuple(stop_token_ids), repr(sorted(variables.items())))
    try:
        cached = _CACHE.setdefault(tokenizer, {})
    except TypeError:  # does not support weak references
        cached = {}
    if key not in cached:
        cached[key] = _Learner(tokenizer, probe(tokenizer, stop_token_ids, variables), variables).run()
    return cached[key]


class _Learner:
    """Learns the format of one template."""

    def __init__(self, tokenizer: Tokenizer, template: Template, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.template, self.variables = tokenizer, template, variables
        self.form: CallForm = (False, "")
        self.id_is_name = False
        added = sorted(encoder_of(tokenizer).added, key=len, reverse=True)
        tags = (*map(re.escape, added), r"<[^<>\s]{1,64}>", r"</?[\w:.-]+=?", r"\s+", r"\w+", ".")
        self.atoms = re.compile("|".join(tags), re.DOTALL)
        ids = sorted(template.terminators)
        texts = {str(tokenizer.decode([i], skip_special_tokens=False)) for i in ids}
        self.ends = tuple(sorted({*texts, template.close.strip()} - {""}, key=len, reverse=True))

    def run(self) -> ToolFormat:
        """Return the format; plain if the template renders no calls or writes them in an unknown way."""
        prompt = self._prompt()
        opened = (end for begin, end in REASONING if prompt.rfind(begin) > prompt.rfind(end))
        base = ToolFormat(ends=self.ends, reasoning_close=next(opened, ""))
        renderings = []
        for form in self.template.calls or CALL_FORMS:  # calls without a close are calls too
            self.form = form
            if (text := self._render(1)) is not None:
                # A mapping that the template writes as Python does is meant to be JSON text. If it takes both, JSON
                # text is passed through and a mapping is what the model writes. Longer renderings contain "None".
                renderings.append((str(_ARGUMENTS) in text, form[0], len(text), form))
        for *_, form in sorted(renderings, key=lambda rendering: rendering[:3]):
            self.form = form
            for self.id_is_name in (False, True):
                text = self._render(1) or ""
                if self._marker(0) in text and (found := self._learn(base, text)):
                    return found
        return base

    def _learn(self, base: ToolFormat, text: str) -> ToolFormat | None:
        has_ids, strict = _IDS[0] in text or ANY_ID in text, self._render(1, ids=("0", "1")) is None
        base = replace(base, id_is_name=self.id_is_name, has_ids=has_ids, strict_ids=strict)
        base = replace(base, arguments_as_json=self.form[0], content_of_calls=self.form[1])
        base = replace(base, parallel=self._second() is not None)
        whole = _object_around(text, (_VALUES[0], _NAMES[0]))
        if whole and not self.id_is_name:
            return self._json(base, text, whole)
        arguments = _object_around(text, _KEYS)
        if arguments and json.loads(text[arguments[0] : arguments[1]]) == _ARGUMENTS:
            return self._named(base, text, arguments)
        return self._parameters(base, text)

    # --- the three kinds of formats

    def _json(self, base: ToolFormat, text: str, span: tuple[int, int]) -> ToolFormat:
        begin, end = span
        before, after = text[:begin], text[end:]
        keys = [key for key, value in json.loads(text[begin:end]).items() if value == _ARGUMENTS]
        base = replace(base, arguments_key=keys[0] if keys else base.arguments_key)
        listed = before.rstrip().endswith("[") and after.lstrip().startswith("]")
        if listed:
            before, after = before.rstrip()[:-1], after.lstrip()[1:]
        second = self._second()
        other = _object_around(second, (_NAMES[1],)) if second and not listed else None
        first = _object_around(second, (_NAMES[0],)) if second and other else None
        between = second[first[1] : other[0]] if second and first and other else None
        gap = text[len(before) : text.find(_NAMES[0], begin)]
        return self._framed(replace(base, kind="json", listed=listed), before, after, between, gap=gap)

    def _named(self, base: ToolFormat, text: str, span: tuple[int, int]) -> ToolFormat | None:
        marker = self._marker(0)
        at = text.rfind(marker, 0, span[0])
        if at < 0:
            return None
        second, between = self._second(), None
        if second:
            first = _object_around(second, _KEYS)
            between = second[first[1] : second.rfind(self._marker(1))] if first else None
        before, after_name, gap = text[:at], text[at + len(marker) : span[0]], ""
        if not self.id_is_name and re.match(r":0(?!\d)", after_name):  # the template makes Kimi's ids itself
            gap = "functions." if before.endswith("functions.") else ""
            before, between = before.removesuffix(gap), between.removesuffix(gap) if between else between
            base, after_name = replace(base, id_is_name=True, has_ids=True), after_name.removeprefix(":0")
        base = replace(base, kind="named", after_name=after_name)
        return self._framed(base, before, text[span[1] :], between, gap=gap)

    def _parameters(self, base: ToolFormat, text: str) -> ToolFormat | None:
        marks = [self._marker(0), _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1]]
        found = re.compile("(.*?)".join(map(re.escape, marks)), re.DOTALL).search(text, text.rfind(_USER))
        if not found:
            return None
        to_key, to_value, to_next = found.group(1), found.group(2), found.group(3)
        after, second, between = text[found.end() :], self._second(), None
        if second and (other := second.find(self._marker(1))) > (last := second.find(_VALUES[1])) >= 0:
            between = second[last + len(_VALUES[1]) : other]
        closing = self._shared_start(after, between) if between is not None else self._until_end(after)
        key_open = self._shared_end(to_key, to_next)
        value_close = self._shared_start(to_next, closing)
        before = text[: found.start()]
        literal = re.compile(f"{_KEYS[0]}(.*?){_NUMBER}", re.DOTALL).search(self._render(1, value=_NUMBER) or "")
        if key_open.strip():
            after_name = to_key.removesuffix(key_open).replace(_NAMES[0], ANY_NAME)
            cdata = "<![CDATA[" in (self._render(1, value="a\n<b>&") or "")
            literal_close = literal[1] if literal and literal[1] != to_value else ""
            base = replace(base, kind="markup", after_name=after_name, cdata=cdata, key_open=key_open)
            base = replace(base, key_close=to_value, literal_key_close=literal_close, value_close=value_close)
            base = replace(base, adds_space=self._adds_space(to_value))
            between = None if between is None else between.removeprefix(value_close)
            return self._framed(base, before, after.removeprefix(value_close), between)
        odd = "qz\"'\\qz"
        first_atoms, value_atoms = self._split(to_next), self._split(to_value)
        quote = first_atoms[0] if first_atoms and value_atoms and first_atoms[0] == value_atoms[-1] else ""
        tail = after.removeprefix(quote)[1:]
        escapes = odd not in (self._render(1, value=odd) or "")
        base = replace(base, kind="keywords", after_name=to_key, key_close=to_value.removesuffix(quote))
        base = replace(base, quote=quote, adds_space=self._adds_space(quote), escapes=escapes)
        return self._framed(base, before, tail, None if between is None else between.removeprefix(quote)[1:])

    def _framed(self, base: ToolFormat, before: str, after: str, between: str | None, *, gap: str = "") -> ToolFormat:
        """Return the format with the text around calls, inferred from the text between two calls if it renders two."""
        # An action begins after the generation prompt; what precedes the user's text may change with what follows it.
        head = before.rpartition(_USER)[2]
        start = len(self._shared_start(self._prompt().rpartition(_USER)[2], head))
        with_content = self._render(1, content=_CONTENT) or ""
        find = with_content.rfind if base.kind == "json" else with_content.find  # the name is in the object
        at, call = with_content.find(_CONTENT), find(self._marker(0))
        # The text between content and the first call, if content comes first; without the gap.
        beside = with_content[at + len(_CONTENT) : call].removesuffix(gap) if -1 < at < call else ""
        if base.kind == "json":  # a tool may also be named before the object
            head, beside = head.replace(_NAMES[0], ANY_NAME), beside.replace(_NAMES[0], ANY_NAME)
            between = None if between is None else between.replace(_NAMES[1], ANY_NAME)
        head = head[start:]
        head = head[max(head.rfind(end) + len(end) if end in head else 0 for _, end in REASONING) :]
        lead, not_calls = "", frozenset[str]()
        if not head.strip() and base.kind != "json" and between is not None:
            call_open = self._shared_end(before, between).lstrip()
            lead = call_open
            section_open = ""
            # The name to which the template addresses content, if it writes content like a call.
            name, found, _ = with_content.rpartition(_USER)[2][start:].partition(base.after_name)
            if found and _CONTENT not in name and name.strip():
                not_calls = frozenset([name.strip()])
        else:
            said = self._try([{"role": "user", "content": _USER}, {"role": "assistant", "content": _CONTENT}]) or ""
            said = said.rpartition(_USER)[2][start:]
            own = head[len(self._shared_start(head, said)) :]
            if own.lstrip().startswith(("<", "[")):  # what also precedes text does not open a call
                head = own
            if beside.strip():
                head = self._shared_end(head, beside)
            call_open = self._shared_end(head, between) if between is not None else head
            section_open = head.removesuffix(call_open).strip()
            if call_open.strip() and said.startswith(call_open):  # it addresses text in the same way
                not_calls = frozenset(re.findall(NAME, said[len(call_open) :])[:1])
        after = self._until_end(after)
        call_close = self._shared_start(after, between) if between is not None else after
        base = replace(base, section_open=section_open, section_close=after.removeprefix(call_close))
        return replace(base, call_open=call_open, call_close=call_close, lead=lead, not_calls=not_calls)

    # --- renderings

    def _render(self, count: int, *, content: str = "", ids: Sequence[str] = _IDS, value: Any = "") -> str | None:
        """Return a rendering of a message with calls, alone or followed by results if the template requires them.

        Ids are replaced with `ANY_ID`, unless they stand for the names.
        """
        calls = []
        for name, call_id in list(zip(_NAMES, ids, strict=True))[:count]:
            arguments: Any = {**_ARGUMENTS, **({_KEYS[0]: value} if value else {})}
            function = {"name": name, "arguments": json.dumps(arguments) if self.form[0] else arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        answer = {"role": "assistant", "content": content or self.form[1], "tool_calls": calls}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": _RESULT}
            for call, name in zip(calls, _NAMES, strict=False)
        ]
        for follow in ([], results):
            text = self._try([{"role": "user", "content": _USER}, answer, *follow])
            if text is not None and (_VALUES[1] in text):
                text = text.partition(_RESULT)[0]
                return text if self.id_is_name else text.replace(_IDS[0], ANY_ID).replace(_IDS[1], ANY_ID)
        return None

    def _try(self, messages: Sequence[Mapping[str, Any]], *, gen: bool = False) -> str | None:
        shaped: list[Message] = [as_parts(message) if self.template.parts else message for message in messages]
        try:
            tools = DUMMY_TOOLS if self.template.needs_tools else None
            return render(self.tokenizer, shaped, gen=gen, tools=tools, variables=self.variables)
        except ConfigError:
            return None

    def _prompt(self) -> str:
        return self._try([{"role": "user", "content": _USER}], gen=True) or ""

    def _second(self) -> str | None:
        """Return the rendering of two calls, if it contains both."""
        text = self._render(2)
        return text if text and self._marker(1) in text else None

    # --- texts

    def _adds_space(self, text: str) -> bool:
        """Return True if a text ends in an added token after which the tokenizer decodes a space."""
        encoder = encoder_of(self.tokenizer)
        token = next((added for added in encoder.added if text.endswith(added)), None)
        if token is None:
            return False
        ids = encoder.start(f"{token}word")
        return str(self.tokenizer.decode(ids, skip_special_tokens=False)).endswith(f"{token} word")

    def _marker(self, index: int) -> str:
        return (_IDS if self.id_is_name else _NAMES)[index]

    def _split(self, text: str) -> list[str]:
        return self.atoms.findall(text)

    def _shared_start(self, one: str, other: str) -> str:
        pairs = zip(self._split(one), self._split(other), strict=False)
        return "".join(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _shared_end(self, one: str, other: str) -> str:
        pairs = zip(self._split(one)[::-1], self._split(other)[::-1], strict=False)
        return "".join([left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][::-1])

    def _until_end(self, text: str) -> str:
        """Return the text up to the token that ends an action."""
        return text[: min((at for end in self.ends if (at := text.find(end)) >= 0), default=len(text))]


def _object_around(text: str, inside: Sequence[str]) -> tuple[int, int] | None:
    """Return where the outermost JSON object that contains these texts begins and ends."""
    start, decoder, found = text.rfind(_USER), json.JSONDecoder(), None
    limit = min(text.rfind(word, start) for word in inside)
    at = text.rfind("{", start, limit) if limit >= 0 else -1
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            value, end = None, at
        dumped = json.dumps(value)
        if isinstance(value, dict) and all(word in dumped for word in inside):
            found = (at, end)
        at = text.rfind("{", start, at)
    return found
