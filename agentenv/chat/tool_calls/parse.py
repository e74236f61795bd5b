"""`ToolFormat.parse`: find the calls in an action's text.

The parser scans the text once, from mark to mark (a call's opening, reasoning's opening or close), and continues after
the part it read, so the time is linear in the text's length for every input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentenv._util.lenient_json import LiteralError, read_literal, skip_space
from agentenv.chat.tool_calls.bodies import ARGUMENT_KEYS, Bad, call_in, is_call, keywords, mapping, markup, name_in
from agentenv.chat.tool_calls.messages import call_id
from agentenv.chat.tool_calls.syntax import ANY_ID, ANY_NAME, REASONING, Syntax
from agentenv.core.tool_calls import MalformedCall, ParsedAction, ToolCall
from agentenv.core.tool_schemas import Parameter

_BARE_START = re.compile(r"(?:<\|python_(?:tag|start|end)\|>|\s)*+(?=[\[{])")
_HERMES_OPEN = re.compile(r"<tool_call>\s*+")
_HERMES_CLOSE = re.compile(r"\s*+</tool_call>")
_NAMED = re.compile(r'(?:\[\s*+)?\{\s*+"(?:name|type)"\s*+:')
_ID_AS_NAME = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
_STRICT_ID = re.compile(r"[A-Za-z0-9]{9}")


class ToolFormat(Syntax):
    """How a model writes calls, with a parser for them. `tool_format` returns a tokenizer's; `ToolFormat()` is Hermes'.

    Example: `tool_format(tokenizer).parse(states["action_text"], turn_index=states["turn_index"]).calls`.
    """

    def parse(
        self, text: str, *, turn_index: int = 0, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ParsedAction:
        """Return the calls in an action decoded with special tokens; never fails.

        Calls within reasoning are ignored. Reasoning is the text between the marks of `REASONING`, and the text before
        a close without an opening. Unclosed reasoning that contains a call yields one malformed call. `turn_index`
        makes generated ids unique. With the JSON schemas of `tools`, unquoted values (kinds markup and keywords) take
        the type in the schema, also behind `$ref` and `allOf`; without a schema, text that parses as a number,
        constant, list or object becomes one.
        """
        functions = [tool.get("function", tool) for tool in tools or ()]
        schemas = {str(f.get("name")): Parameter(f.get("parameters")) for f in functions}
        return _Scan(self, text, turn_index, schemas).run()


class _Scan:
    """One scan of one action."""

    def __init__(self, syntax: Syntax, text: str, turn_index: int, schemas: Mapping[str, Parameter]) -> None:
        self.syntax, self.patterns, self.schemas, self.turn_index = syntax, syntax.patterns, schemas, turn_index
        self.keys = (*ARGUMENT_KEYS, syntax.arguments_key)
        ended = next((end for end in syntax.ends if end and text.endswith(end)), "")
        self.text = syntax.lead + text[: len(text) - len(ended)]
        self.items: list[ToolCall | MalformedCall] = []
        self.spans: list[tuple[int, int]] = []
        self.ids: set[str] = set()
        self.begin = 0
        self.opened_id = ""  # of the call that is read, if it stands in the call's opening

    def run(self) -> ParsedAction:
        """Return the content and the calls of the action."""
        at = self._close_of(0, self.syntax.reasoning_close) if self.syntax.reasoning_close else 0
        if at is not None and self._bare(at):
            return ParsedAction(self._content(), tuple(self.items))
        while at is not None and (mark := self.patterns.marks.search(self.text, at)):
            if mark["call"] is not None:
                at = self._section(mark.start())
                continue
            if mark["open"] is not None:
                at = self._close_of(mark.end(), dict(REASONING)[mark["open"]])
            else:  # all of it is reasoning
                self.items, self.spans, at = [], [], mark.end()
                self.ids.clear()
            if at is not None and not self.items and self._bare(at):
                break
        return ParsedAction(self._content(), tuple(self.items))

    def _close_of(self, start: int, close: str) -> int | None:
        """Return the end of the reasoning's close; if it is missing, None, and a call in the rest is malformed."""
        end = self.text.find(close, start)
        if end >= 0:
            return end + len(close)
        mark = self.patterns.call.search(self.text, start)
        if mark and not self.items:
            problem = f"it stands in reasoning that is never closed: write {close} and then the call"
            self._malformed(Bad(problem, len(self.text)), mark.start(), len(self.text))
        return None

    def _content(self) -> str:
        start = len(self.syntax.lead)
        if not self.spans:
            return self.text[start:]
        pieces = []
        for begin, end in self.spans:
            pieces.append(self.text[start:begin])
            start = max(start, end)
        return "".join([*pieces, self.text[start:]]).strip()

    def _section(self, start: int) -> int:
        """Read the calls that begin at a mark; return where to continue."""
        opened = self.patterns.section_open.match(self.text, start)
        at, num_before = opened.end() if opened else start, len(self.items)
        while True:
            begin = skip_space(self.text, at)
            while len(self.items) > num_before and self.text[begin : begin + 1] in (",", ";"):
                begin = skip_space(self.text, begin + 1)
            found = self.patterns.call_open.match(self.text, begin) if opened or self.syntax.call_open.strip() else None
            if not found or (not self.syntax.call_open.strip() and self._is_over(begin, num_before)):
                break
            self.opened_id = found.groupdict().get("id") or ""
            at = self._guarded(start if len(self.items) == num_before else begin, found.end(), self._call)
        if len(self.items) == num_before:
            # A mark without a call of this format after it: Hermes' form, or a malformed call.
            hermes = _HERMES_OPEN.match(self.text, start)
            if hermes and self.text[hermes.end() : hermes.end() + 1] == "{":
                end = self._guarded(start, hermes.end(), lambda at: self._objects(at, _HERMES_CLOSE))
                return self._took(start, end)
            expected = _shown(self.syntax.call_open) or _shown(self.syntax.section_open) or "<tool_call>"
            problem = f"a call begins with {expected!r}, got {self.text[at : at + 40]!r}"
            end = self._resync(max(at, start + 1))
            self._malformed(Bad(problem, at), start, end)
            return self._took(start, end)
        closed = self.patterns.section_close.match(self.text, at)
        return self._took(start, closed.end() if closed else at)

    def _is_over(self, at: int, num_before: int) -> bool:
        """Return True if no further call begins at `at`, in a format whose calls have no opening."""
        if self.syntax.kind == "json":
            return self.text[at : at + 1] not in ("{", "[")
        return len(self.items) > num_before and not self.patterns.name.match(self.text, at)

    def _took(self, start: int, end: int) -> int:
        self.spans.append((start, end))
        return end

    def _guarded(self, start: int, body: int, reader: Callable[[int], int]) -> int:
        """Read one call's body; return where it ends. Record an unreadable one as malformed."""
        self.begin = start
        try:
            return reader(body)
        except Bad as error:
            end = self._resync(max(error.at, body, start + 1))
            self._malformed(error, start, end)
            return end

    def _resync(self, at: int) -> int:
        found = self.patterns.resync.search(self.text, min(at, len(self.text)))
        if not found:
            return len(self.text)
        return found.end() if found["end"] is not None else found.start()

    def _malformed(self, error: Bad, start: int, end: int) -> None:
        text, name = self.text[max(start, len(self.syntax.lead)) : end].strip(), error.name
        self.items.append(MalformedCall(text, error.problem, self._id(""), name))

    def _id(self, given: str) -> str:
        if self.syntax.strict_ids and not _STRICT_ID.fullmatch(given):
            given = ""
        if not given or given in self.ids:
            given = call_id(self.turn_index, len(self.items))
        self.ids.add(given)
        return given

    def _call(self, at: int) -> int:
        """Read the call after its opening; return where it ends."""
        syntax = self.syntax
        if syntax.kind in ("json", "plain"):
            return self._objects(at, self.patterns.call_close)
        found = self.patterns.name.match(self.text, at)
        if not found and self.text[(body := skip_space(self.text, at)) : body + 1] == "{":
            hermes = self.text.startswith("<tool_call>", self.begin)
            return self._objects(body, _HERMES_CLOSE if hermes else self.patterns.call_close)
        if not found:
            between = _shown(syntax.after_name)
            after = f" and {between!r}" if between else ""
            raise Bad(f"expected the name of a tool{after}, got {self.text[at : at + 40]!r}", at)
        name, given = found["name"], found.groupdict().get("id") or self.opened_id
        if syntax.id_is_name:
            given, name = name, (_ID_AS_NAME.fullmatch(name) or [name, name])[1]
        at, schema = found.end(), self.schemas.get(name) or Parameter(None)
        try:
            if syntax.kind == "named":
                arguments, end = mapping(self.text, at)
            elif syntax.kind == "markup":
                arguments, end = markup(syntax, self.text, at, schema)
            else:
                arguments, end = keywords(syntax, self.text, at, schema)
        except LiteralError as error:
            raise self._unread(error, at, name) from error
        except Bad as error:
            raise Bad(error.problem, error.at, name) from error
        end = self._closed(end, self.patterns.call_close, name, needed=syntax.kind == "markup")
        self._add(name, arguments, given, end)
        return end

    def _unread(self, error: LiteralError, start: int, name: str = "") -> Bad:
        if error.at >= len(self.text):
            return Bad(f"it is never closed: the action ends inside it ({error})", error.at, name)
        return Bad(f"its arguments cannot be read: {error}, at character {error.at - start + 1}", error.at, name)

    def _closed(self, at: int, close: re.Pattern[str], name: str, *, needed: bool = False) -> int:
        """Return the end of a call's close; the last call, or one followed by another, may lack it."""
        if found := close.match(self.text, at):
            return found.end()
        after = skip_space(self.text, at)
        if needed:
            if found := self.patterns.close_tag.match(self.text, after):
                return found.end()
            if after == len(self.text):
                raise Bad("it is never closed: the action ends inside it", after, name)
        over = after == len(self.text) or self.patterns.call.match(self.text, after)
        if over or (self.syntax.section_close.strip() and self.patterns.section_close.match(self.text, at)):
            return at
        raise Bad(f"text between its arguments and its end: {self.text[after : after + 40]!r}", after, name)

    def _add(self, name: str, arguments: Mapping[str, Any], given: str, end: int) -> None:
        text = self.text[max(self.begin, len(self.syntax.lead)) : end].strip()
        self.items.append(ToolCall(name, arguments, self._id(given), text))

    # --- an object with the name and the arguments

    def _objects(self, at: int, close: re.Pattern[str]) -> int:
        try:
            value, end = read_literal(self.text, at)
        except LiteralError as error:
            raise self._unread(
                error, skip_space(self.text, at), name_in(self.text[at : min(at + 300, error.at)])
            ) from error
        values = value if isinstance(value, list) else [value]
        calls = [call_in(item, end, self.keys) for item in values]
        if not calls:
            raise Bad("a list of calls with no call in it", end)
        end = self._closed(end, close, calls[-1][0])
        for name, arguments, given in calls:
            self._add(name, arguments, given or self.opened_id, end)
        return end

    def _bare(self, start: int) -> bool:
        """Read an answer that consists only of objects or lists of them, in formats whose calls have no opening."""
        bare = self.syntax.kind == "plain" or (self.syntax.kind == "json" and not self.syntax.call_open.strip())
        found = _BARE_START.match(self.text, start) if bare else None
        if not found:
            return False
        at, looks_like_one = found.end(), _NAMED.match(self.text, found.end())
        self.begin = at
        try:
            while at < len(self.text):
                value, end = read_literal(self.text, at)
                values = value if isinstance(value, list) else [value]
                if not any(is_call(item, self.keys) for item in values):
                    if self.items:
                        raise Bad("text after the call", at)
                    return False
                for call in [call_in(item, end, self.keys) for item in values]:  # all are read before one is added
                    self._add(*call, end)
                at = self.begin = skip_space(self.text, end)
                if self.text[at : at + 1] == ";":
                    at = self.begin = skip_space(self.text, at + 1)
        except (LiteralError, Bad) as error:
            if not looks_like_one:
                return False
            bad = self._unread(error, at) if isinstance(error, LiteralError) else error
            self._malformed(bad, self.begin, len(self.text))
        self._took(start, len(self.text))
        return True


def _shown(text: str) -> str:
    """Return a text of a Syntax for a message."""
    return text.strip().replace(ANY_ID, "ID").replace(ANY_NAME, "NAME")
