"""Determine what a tokenizer's chat template does, once, by rendering dummy conversations: `probe`.

A template is prefix-stable if every rendering of a longer conversation begins with the rendering of the shorter one. It
needs a bridge if it rewrites earlier messages, which `Chat` never does. It is unsupported if it cannot render a user,
an assistant and a user message, or drops the assistant's text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakKeyDictionary

from agentenv.chat.encoding import Encoder, encoder_of
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Message
from agentenv.errors import ConfigError

TemplateKind = Literal["prefix-stable", "needs-bridge", "unsupported"]
CallForm = tuple[bool, str | None]
"""How to pass a call to the template: True if its arguments are JSON text, and the content beside it."""

REASONS = {
    "W": "trims or inserts whitespace around messages",
    "H": "history has an assistant header that the model must sample itself",
    "R": "rewrites reasoning or tool cycles once the conversation continues",
    "G": "tokens of the generation prompt vanish from history",
    "M": "moves system messages or tools to the newest user turn",
    "S": "the token that ends the assistant's turn is the next role's marker",
    "B": "the generation prompt ends in a space, which merges with the answer",
    "t": "role markers are plain text, which content can forge",
    "c": "nothing closes the assistant's turn",
}
"""The letters of `Template.codes`, in words."""

_QUERY = {"type": "object", "properties": {"q": {"type": "string", "description": "What."}}, "required": ["q"]}
_LOOKUP = {"name": "lookup", "description": "Look something up.", "parameters": _QUERY}
DUMMY_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": _LOOKUP}]
"""Passed to templates that require tools; the part of the rendering with the tools is cut off."""

CALL_FORMS: tuple[CallForm, ...] = ((False, None), (False, ""), (True, None), (True, ""))
_USER, _ANSWER, _NEXT, _SYSTEM = "qzfirstqz", "qzANSWERqz", "qznextqz", "qzsystemqz"
_CACHE: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...], str], Template]] = WeakKeyDictionary()
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_REASONING = (
    ("<think>", "</think>", "\n</think>\n\n"),
    ("<seed:think>", "</seed:think>", "\n</seed:think>\n\n"),
    ("[THINK]", "[/THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>", "\n<channel|>"),
)
"""Forms of reasoning: its opening, its close, and the close to add where it was cut off."""


@dataclass(frozen=True, slots=True)
class Template:
    """What a chat template does, including the effects of its tokenizer."""

    kind: TemplateKind
    sha256: str
    """SHA-256 of the template's text."""
    error: str = ""
    """Why it is unsupported, in the template's own words if it raised an error."""
    codes: str = ""
    """Letters of `REASONS`, sorted."""
    close_ids: tuple[int, ...] = ()
    """Ids that end the assistant's turn; empty if it has no close, or if the next role's marker ends it."""
    close: str = ""
    """`close_ids` as text."""
    terminators: frozenset[int] = frozenset()
    """Ids that always end a generation: the engine's stop ids, EOS, the last close id, the shared markers."""
    markers: frozenset[int] = frozenset()
    """Role markers that also end the assistant's turn: a user's and a tool's (GLM), or only a tool's (Gemma 4)."""
    shapes: tuple[str, ...] = ()
    """What may follow an assistant's turn, among: user, tool, tools, tool+user, 2xuser, system."""
    needs_tools: bool = False
    """True if it cannot render without a list of tools."""
    renders_tools: bool = False
    """True if it renders the tools offered."""
    parts: bool = False
    """True if it requires content as a list of parts instead of text."""
    calls: tuple[CallForm, ...] = ()
    """The ways to render an assistant's calls before tool results; if empty, text precedes tool results."""
    tools_change_turns: bool = False
    """True if it renders later turns differently when tools are offered (Hunyuan)."""
    numbered_roles: tuple[str, ...] = ()
    """Roles whose turns it numbers over the whole conversation: a tool's (Cohere), a user's (ChatGLM)."""
    text_markers: tuple[str, ...] = ()
    """Role markers that are plain text, so that content can forge them."""
    generation_prompt: str = ""
    """The text between a user's content and the assistant's."""
    reasoning: tuple[str, str, str] | None = None
    """The opening and close of reasoning, and the close to add where it was cut off; None if unknown."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """`codes` in words."""
        return tuple(REASONS[code] for code in self.codes)

    def close_of_call(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Return where the ids that end a turn begin and end behind a call; None if no terminator follows it.

        A call may have another close than text (Cohere): of the text's, what stands there counts.
        """
        end = next((i + 1 for i, token in enumerate(ids) if token in self.terminators), None)
        if end is None:
            return None
        sizes = range(min(end, len(self.close_ids)), 0, -1)
        return next((end - n for n in sizes if tuple(ids[end - n : end]) == self.close_ids[-n:]), end - 1), end


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    gen: bool = True,
    tools: Any = None,
    variables: Mapping[str, Any] = _NOTHING,
) -> str:
    """Return messages as the template's text; `variables` are further template variables.

    Raises:
        ConfigError: the template refuses them; includes the template's own message.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=gen, tools=tools, **variables
        )
    except Exception as error:
        roles = [message.get("role") for message in messages]
        raise ConfigError(
            f"Chat.render: expected messages that the chat template takes, got roles {roles}: {error}. "
            "Change the messages or use another model."
        ) from error
    return str(text)


def as_parts(message: Message) -> Message:
    """Return the message with its content as a list of parts."""
    if not isinstance(message.get("content", ""), (str, type(None))):
        return message
    return {**message, "content": [{"type": "text", "text": message.get("content") or ""}]}


def calling(results: Sequence[Message], last_argument: str, form: CallForm) -> Message:
    """Return an assistant's message with one call per tool result; the last call's argument is `last_argument`."""
    as_json, content = form
    calls = []
    for index, result in enumerate(results):
        arguments: Any = {"q": last_argument if index + 1 == len(results) else "x"}
        written = json.dumps(arguments) if as_json else arguments
        function = {"name": result.get("name") or "lookup", "arguments": written}
        call_id = result.get("tool_call_id") or f"callid{index:03d}"
        calls.append({"id": call_id, "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def probe(
    tokenizer: Tokenizer, stop_token_ids: Sequence[int] = (), variables: Mapping[str, Any] = _NOTHING
) -> Template:
    """Return what the tokenizer's template does, cached after the first call. Never fails because of a template.

    `stop_token_ids` are the ids besides EOS on which the engine stops; `variables` go to every rendering.
    """
    key = (str(tokenizer.chat_template), tuple(stop_token_ids), repr(sorted(variables.items())))
    try:
        cached = _CACHE.setdefault(tokenizer, {})
    except TypeError:  # does not support weak references
        cached = {}
    if key not in cached:
        cached[key] = _Probe(tokenizer, stop_token_ids, variables).run()
    return cached[key]


def says(role: str, content: str) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content}


def result(number: int) -> dict[str, Any]:
    """Return a tool's dummy result."""
    return {"role": "tool", "content": f"qzRESULT{number}qz", "tool_call_id": f"callid00{number}", "name": "lookup"}


FOLLOW_UPS: dict[str, list[dict[str, Any]]] = {
    "user": [says("user", _NEXT)],
    "tool": [result(1)],
    "tools": [result(1), result(2)],
    "tool+user": [result(1), says("user", _NEXT)],
    "2xuser": [says("user", _NEXT), says("user", "qzthirdqz")],
    "system": [says("system", _SYSTEM)],
}
"""A dummy conversation of every shape."""


@dataclass
class _Probe:
    """One probe of a template, with its intermediate findings."""

    tokenizer: Tokenizer
    stop_token_ids: Sequence[int]
    variables: Mapping[str, Any] = field(default_factory=dict)
    parts: bool = False
    needs_tools: bool = False
    encoder: Encoder = field(init=False)
    rendered: dict[str, str | None] = field(default_factory=dict)
    """Results of `_try` by its arguments, because the checks repeat renderings."""

    def __post_init__(self) -> None:
        self.encoder = encoder_of(self.tokenizer)

    def run(self) -> Template:
        """Return all findings; the order of the checks matters."""
        sha256 = hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()
        error = self._find_form()
        if error:
            return Template("unsupported", sha256, error)
        prompt = self._render([says("user", _USER)])
        whole = self._render([says("user", _USER), says("assistant", _ANSWER), says("user", _NEXT)])
        at = whole.index(_ANSWER)
        history, lead = whole[:at], whole[at + len(_ANSWER) : whole.index(_NEXT)]
        close_ids, header = self._close(prompt, lead)
        markers = frozenset[int]() if close_ids else self._shared(lead, header)
        eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        terminators = frozenset([*self.stop_token_ids, *eos, *close_ids[-1:], *markers])
        close = self._text(close_ids)
        odd = "S" if markers else "" if close_ids else "c"
        rest = lead[len(close) :] if lead.startswith(close) else lead
        in_text = not markers and not self._added_in(rest)
        codes = self._header_codes(prompt, history) + odd + "t" * in_text
        if self._rewrites(prompt_lost="G" in codes):
            codes += "R"
        if "B" not in codes and self._moves(prompt_lost="G" in codes or "H" in codes):
            codes += "M"
        talk = self._try([says("user", _USER), says("assistant", _ANSWER), result(1)]) or ""
        # A terminator with which a tool's turn always begins is a marker.
        before_tool = self.encoder.follow(talk[talk.find(_ANSWER) : talk.find(str(result(1)["content"]))])
        known = str(self.tokenizer.chat_template)
        calls = tuple(form for form in CALL_FORMS if self._ends_calls(form, terminators))
        return Template(
            kind="needs-bridge" if set(codes) - set("tc") else "prefix-stable",
            sha256=sha256,
            codes="".join(sorted(codes)),
            close_ids=close_ids,
            close=close,
            terminators=terminators,
            markers=markers | ((terminators - frozenset(close_ids)) & frozenset(before_tool)),
            shapes=tuple(name for name, new in FOLLOW_UPS.items() if self._accepts(new)),
            needs_tools=self.needs_tools,
            renders_tools=self._renders_tools(),
            parts=self.parts,
            calls=calls,
            tools_change_turns=self._tools_change_turns(),
            numbered_roles=self._numbered_roles(calls),
            text_markers=(rest.strip(),) if in_text and rest.strip() else (),
            generation_prompt=prompt[prompt.find(_USER) + len(_USER) :],
            reasoning=next((way for way in _REASONING if way[1] in known or way[1] in self.encoder.added), None),
        )

    def _render(self, messages: Sequence[Mapping[str, Any]], *, gen: bool = True, tools: Any = None) -> str:
        messages = [as_parts(message) for message in messages] if self.parts else messages
        tools = tools or (DUMMY_TOOLS if self.needs_tools else None)
        return render(self.tokenizer, messages, gen=gen, tools=tools, variables=self.variables)

    def _try(self, messages: Sequence[Mapping[str, Any]], *, gen: bool = True, tools: Any = None) -> str | None:
        key = repr((messages, gen, tools is None))
        if key not in self.rendered:
            try:
                self.rendered[key] = self._render(messages, gen=gen, tools=tools)
            except ConfigError:
                self.rendered[key] = None
        return self.rendered[key]

    def _renders_tools(self) -> bool:
        try:
            return len({self._render([says("user", _USER)], tools=DUMMY_TOOLS * num) for num in (1, 2)}) == 2
        except ConfigError:
            return False

    def _find_form(self) -> str:
        """Try text and parts, without and with tools, until a conversation renders; else return why none does."""
        talk = [says("user", _USER), says("assistant", _ANSWER), says("user", _NEXT)]
        refusals = []
        for self.parts, self.needs_tools in ((False, False), (False, True), (True, False), (True, True)):
            try:
                text = self._render(talk)
            except ConfigError as error:
                refusals.append(str(error.__cause__))
                continue
            refusals.append("it drops what the user or the assistant says")
            at = text.find(_ANSWER)
            if text.count(_ANSWER) == 1 and -1 < text.find(_USER) < at < text.find(_NEXT):
                self.rendered.clear()
                return "" if self._try(talk[:1]) is not None else "a first user message does not render"
        return refusals[0]

    def _added_in(self, text: str) -> list[int]:
        return [i for i in self.encoder.follow(text) if i in self.encoder.added_ids]

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of ids that continue a sequence; decoding may drop a space at a text's start."""
        if not ids:
            return ""
        before = self.encoder.start("a")
        both = str(self.tokenizer.decode([*before, *ids], skip_special_tokens=False))
        return both[len(str(self.tokenizer.decode(before, skip_special_tokens=False))) :]

    def _close(self, prompt: str, lead: str) -> tuple[tuple[int, ...], int | None]:
        """Return the leading ids of `lead` that end a turn, and the last added token before a user's content."""
        ids = self.encoder.follow(lead)
        added = [i for i in ids if i in self.encoder.added_ids]
        before_user = self._added_in(prompt[: max(0, prompt.find(_USER))])
        header = before_user[-1] if before_user else None
        eos = self.tokenizer.eos_token_id
        stops = [i for i in ids if i in self.stop_token_ids or (i == eos and eos is not None)]
        if stops and ids[0] == stops[0] == header != eos:
            return (), header
        end = stops[0] if stops else added[0] if len(added) > 1 or (added and added[0] != header) else None
        return (() if end is None else tuple(ids[: ids.index(end) + 1])), header

    def _shared(self, lead: str, header: int | None) -> frozenset[int]:
        """Return the role markers that end a turn: the user's that begins `lead`, and a tool's if it is another one."""
        first = self.encoder.follow(lead)[:1]
        if header is None or first != [header]:
            return frozenset()
        text = self._try([says("user", _USER), says("assistant", _ANSWER), result(1)])
        if text is None or not -1 < text.find(_ANSWER) < text.find(str(result(1)["content"])):
            return frozenset(first) if header in self.stop_token_ids else frozenset()
        tool = self.encoder.follow(text[text.index(_ANSWER) + len(_ANSWER) :])[:1]
        both = frozenset([header, *(i for i in tool if i in self.encoder.added_ids)])
        return both if header in self.stop_token_ids or len(both) > 1 else frozenset()

    def _header_codes(self, prompt: str, history: str) -> str:
        merges = "B" if prompt.endswith(" ") else ""
        if not history.startswith(prompt):
            return "G" + merges
        padded = f"  {_ANSWER}  "
        inserted = history[len(prompt) :]
        kept = padded in (self._try([says("user", _USER), says("assistant", padded), says("user", _NEXT)]) or "")
        return ("H" if inserted.strip() else "W" if inserted or not kept else "") + merges

    def _rewrites(self, *, prompt_lost: bool) -> bool:
        reasoned = f"<think>\nhmm\n</think>\n\n{_ANSWER}"
        if reasoned not in (self._try([says("user", _USER), says("assistant", reasoned), says("user", _NEXT)]) or ""):
            return True
        for form in CALL_FORMS:
            cycle = [says("user", _USER), calling([result(1)], _ANSWER, form), result(1)]
            before = self._try(cycle)
            then = self._try([*cycle, says("assistant", "qzDONEqz"), says("user", _NEXT)])
            if before is not None and then is not None and _ANSWER in before and not prompt_lost:
                return not then.startswith(before)
        return False

    def _moves(self, *, prompt_lost: bool) -> bool:
        later = [says("assistant", _ANSWER), says("user", _NEXT)]
        for head in ([says("user", _USER)], [says("system", _SYSTEM), says("user", _USER)]):
            for tools in (None, DUMMY_TOOLS):
                before = self._try(head, gen=not prompt_lost, tools=tools)
                after = self._try([*head, *later], tools=tools)
                if before is not None and after is not None and not after.startswith(before):
                    return True
        middle = self._try([says("user", _USER), later[0], says("system", _SYSTEM), later[1]])
        return middle is not None and -1 < middle.find(_SYSTEM) < middle.find(_ANSWER)

    def _accepts(self, new: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if an assistant's message before `new` renders once, followed by all of `new` in order."""
        results = [message for message in new if message["role"] == "tool"]
        answers = [calling(results, _ANSWER, form) for form in CALL_FORMS if results]
        for answer in (*answers, says("assistant", _ANSWER)):
            text = self._try([says("user", _USER), answer, *new])
            if text is not None and text.count(_ANSWER) == 1:
                found = [text.find(message["content"], text.index(_ANSWER)) for message in new]
                if min(found) >= 0 and found == sorted(found):
                    return True
        return False

    def _ends_calls(self, form: CallForm, terminators: frozenset[int]) -> bool:
        """Return True if a terminator follows a call in this form before the tool's result."""
        text = self._try([says("user", _USER), calling([result(1)], _ANSWER, form), result(1)])
        if text is None or text.count(_ANSWER) != 1:
            return False
        tail = text[text.index(_ANSWER) + len(_ANSWER) :]
        found = tail.find(str(result(1)["content"]))
        return found >= 0 and not terminators.isdisjoint(self.encoder.follow(tail[:found]))

    def _tools_change_turns(self) -> bool:
        """Return True if what follows an answer differs once tools are offered, but not by the tools themselves."""
        talk = [says("user", _USER), says("assistant", _ANSWER), says("user", _NEXT)]
        tails = [(self._try(talk, tools=tools) or "").rpartition(_ANSWER)[2] for tools in (None, DUMMY_TOOLS)]
        return all(tails) and tails[0] != tails[1] and DUMMY_TOOLS[0]["function"]["description"] not in tails[1]

    def _numbered_roles(self, forms: Sequence[CallForm]) -> tuple[str, ...]:
        """Return the roles after whose earlier turn a later one has other numbers, and nothing else that differs."""
        earlier, last = result(1), result(2)
        cycles = [
            ("tool", [calling([earlier], "x", form), earlier], [calling([last], _ANSWER, form), last]) for form in forms
        ]
        cycles.append(
            ("user", [says("assistant", "x"), says("user", "x")], [says("assistant", _ANSWER), FOLLOW_UPS["user"][0]])
        )
        found = []
        for role, first, then in cycles:
            talks = ([says("user", _USER), *then], [says("user", _USER), *first, *then])
            tails = [(self._try(talk) or "").rpartition(_ANSWER)[2] for talk in talks]
            if tails[0] != tails[1] and re.sub(r"\d+", "", tails[0]) == re.sub(r"\d+", "", tails[1]):
                found.append(role)
        return tuple(dict.fromkeys(found))
