"""Tests of a chat template: small conversations encoded by `Chat` and rendered by `apply_chat_template`, and the text
of every added token in every kind of message.
"""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from agentenv.chat.chat import Chat, ChatOptions
from agentenv.chat.encoding import encoder_of
from agentenv.chat.template import DUMMY_TOOLS, FOLLOW_UPS, Template, as_parts, calling, render, says
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Message
from agentenv.errors import ConfigError

Ending = Literal["", "stop", "length"]
Compared = Literal["whole", "from the close on"]
Context = Literal["", "second cycle", "system and tools"]

_FIRST = [says("user", "What is six times seven?")]
_HEAD = [*_FIRST, says("assistant", "Forty two"), says("user", "And  twice that?\n\n1. In words: ¿sí?")]
_ANSWER = "that is eighty four"  # letters and spaces only: the same text in a message and in a call's JSON
_TOOL = "get_parity"
_NEXT = "Is it\n  even? ☃ 12345"
_AFTER = {  # the shapes of FOLLOW_UPS, with readable contents
    name: [
        {
            **new,
            **(
                {"content": f'{{"even": {i}}}', "name": _TOOL} if new["role"] == "tool" else {"content": f"{_NEXT} {i}"}
            ),
        }
        for i, new in enumerate(follow)
    ]
    for name, follow in FOLLOW_UPS.items()
}


@dataclass(frozen=True, slots=True)
class Example:
    """A small conversation, encoded by `Chat` and rendered by the template."""

    shape: str
    """What follows the action, one of `template.FOLLOW_UPS`; "prompt" for the episode's first prompt."""
    ending: Ending
    """How the action ended: with its close, or cut off within its text."""
    equal: bool
    """True if the ids are the same."""
    compared: Compared
    """Which ids are compared: not all if the template removes parts of the generation prompt from history."""
    bridge: str
    """The kind of bridge; empty for a prompt."""
    num_synthesised: int
    ours: str
    """Text from the action on."""
    template: str
    """The same text by `apply_chat_template`."""
    difference: str
    """Where the ids first differ, why there are none, or how a call is misread; empty if equal."""
    context: Context = ""
    """What precedes the action besides turns of text: a call with its result, or a system message and offered tools."""


@dataclass(frozen=True, slots=True)
class _Before:
    """The messages before an action."""

    messages: Sequence[Message]
    tools: Any
    context: Context = ""


@dataclass(frozen=True, slots=True)
class Injection:
    """Results of putting the texts of added tokens into messages."""

    num_tried: int
    places: tuple[str, ...]
    """Where the texts were tried: in a prompt, and in a user's and a tool's message after an action."""
    forged: tuple[str, ...]
    """Texts that changed the number of added tokens."""
    altered: tuple[str, ...]
    """Texts whose message changes when encoded and decoded."""
    text_markers: tuple[str, ...]
    """Role markers in plain text, which content can forge with any encoding."""


class _Whole(NamedTuple):
    """The ids of a whole conversation by `apply_chat_template`, and the action's position in them."""

    ids: list[int]
    start: int
    inside: int
    """A position within the answer's text."""
    close_start: int
    close_end: int
    is_whole: bool
    """True if the ids begin with the prompt's ids."""
    called: bool
    """True if the answer is calls."""


class Trial:
    """Tests one tokenizer and its Chat."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        stop_token_ids: Sequence[int],
        variables: Mapping[str, Any],
    ) -> None:
        self._tokenizer, self._template, self._variables = tokenizer, template, variables
        self._tools = DUMMY_TOOLS if template.needs_tools else None
        options = ChatOptions(chat_template_kwargs=variables)
        self._chat = Chat(tokenizer, stop_token_ids=stop_token_ids, tools=self._tools, options=options)
        self._encoder = encoder_of(tokenizer)

    def texts(self, ids: Iterable[int]) -> tuple[tuple[int, str], ...]:
        """Return ids with their texts."""
        return tuple((i, self._chat.decode([i])) for i in sorted(ids))

    def generation_prompt(self) -> str:
        """Return the text that the template adds at the end for the assistant to continue."""
        first = _Before(_FIRST, self._tools)
        with_it = self._render(first)
        with suppress(ConfigError):
            without = self._render(first, gen=False)
            if with_it.startswith(without):
                return with_it[len(without) :]
        return with_it.rpartition(str(_FIRST[0]["content"]))[2]

    def refusal(self, shape: str) -> str:
        """Return why a shape is not accepted; empty if it is."""
        if not self._chat.has_template or shape in self._template.shapes:
            return ""
        if self._template.kind == "unsupported":
            return self._template.error
        try:
            self._chat.bridge([], FOLLOW_UPS[shape])
        except ConfigError as error:
            return str(error.__cause__ or error)
        return "it does not render all of it after the assistant's turn, in order"

    def call_format(self) -> str:
        """Return how the model writes tool calls according to its template."""
        found = self._chat.tool_format
        how = f"{found.kind}, {found.section_open}{found.call_open} … {found.call_close}{found.section_close}"
        return how if self._template.calls else f"the template renders none; read in Hermes' form, {how}"

    def opening_system(self) -> str:
        """Return why a system message at the beginning is not accepted; empty if it is."""
        if not self._chat.has_template or self._template.kind == "unsupported":
            return self._template.error
        try:
            text = self._render(_Before([says("system", "qzSYSTEMqz"), *_FIRST], self._tools))
        except ConfigError as error:
            return str(error.__cause__ or error)
        return "" if "qzSYSTEMqz" in text else "it is dropped"

    def examples(self) -> tuple[Example, ...]:
        """Return a prompt, and every accepted shape after a stop and after a cut; then those of other contexts."""
        plain = _Before(_HEAD, self._tools)
        found = []
        try:
            ours, known = self._chat.prompt(_HEAD), self._encode(self._render(plain))
            texts = self._chat.decode(ours), self._chat.decode(known)
            difference = self._difference(ours, known)
            found.append(Example("prompt", "", ours == known, "whole", "", 0, *texts, difference))
        except ConfigError as error:
            found.append(Example("prompt", "", False, "whole", "", 0, "", "", str(error)))
        endings: tuple[Ending, ...] = ("stop", "length")
        for before, shapes in ((plain, self._template.shapes), *self._contexts()):
            for shape, ending in itertools.product(shapes, endings):
                try:
                    found.append(self._example(shape, ending, before))
                except ConfigError as error:
                    found.append(Example(shape, ending, False, "whole", "", 0, "", "", str(error), before.context))
        return tuple(found)

    def _contexts(self) -> Iterator[tuple[_Before, Sequence[str]]]:
        """Yield further contexts, and the shapes to try in each: those that the template renders and does not rewrite.

        A template with code M moves system messages and tools; one with code R may render a later cycle of calls
        unlike the first.
        """
        (result,) = _AFTER["tool"]
        earlier = {**result, "tool_call_id": "callid000"}
        for form in self._template.calls[:1] if "tool" in self._template.shapes else ():
            again = _Before([*_HEAD, calling([earlier], "x", form), earlier], self._tools, "second cycle")
            tails = []
            for messages in (_HEAD, again.messages):
                with suppress(ConfigError):
                    text = self._render(_Before([*messages, calling([result], _ANSWER, form), result], self._tools))
                    tails.append(re.sub(r"\d+", "", text.rpartition(_ANSWER)[2]))
            if len(tails) == 2 and (tails[0] == tails[1] or "R" not in self._template.codes):
                yield again, ["tool"]
        if "M" not in self._template.codes and not self.opening_system():
            offered = DUMMY_TOOLS if self._template.renders_tools else self._tools
            system = _Before([says("system", "Be brief."), *_HEAD], offered, "system and tools")
            yield system, [shape for shape in ("user", "tool", "tool+user") if shape in self._template.shapes]

    def _example(self, shape: str, ending: Ending, before: _Before) -> Example:
        new = _AFTER[shape]
        whole = self._whole(new, before)
        cut = ending == "length"
        action = whole.ids[whole.start : whole.inside if cut else whole.close_end]
        known = whole.ids[whole.close_start if cut else whole.close_end :]
        bridge = self._chat.bridge(action, new, history=before.messages)
        difference = self._difference(bridge.ids, known)
        if whole.called and whole.is_whole and not cut:
            difference = difference or self._misread(action, new)
        return Example(
            shape,
            ending,
            equal=not difference,
            compared="whole" if whole.is_whole else "from the close on",
            bridge=bridge.kind,
            num_synthesised=bridge.num_synthesised,
            ours=self._chat.decode([*action, *bridge.ids]),
            template=self._chat.decode([*action, *known]),
            difference=difference,
            context=before.context,
        )

    def _misread(self, action: Sequence[int], new: Sequence[Message]) -> str:
        """Return how the calls of an action are read if not as the template was given them; empty if they are."""
        num_before, form = sum(message["role"] == "tool" for message in new) - 1, self._chat.tool_format
        given = [({"q": q}, _TOOL) for q in (*["x"] * num_before, _ANSWER)]
        parsed = form.parse(self._chat.action_text(action))
        read: list[Any] = [(dict(call.arguments), _TOOL if form.id_is_name else call.name) for call in parsed.calls]
        return "" if read == given else f"its calls are read as {[*read, *(bad.problem for bad in parsed.malformed)]}"

    def _whole(self, new: Sequence[Message], before: _Before) -> _Whole:
        """Return a conversation that continues with `new`, after calls if the template renders them."""
        results = [message for message in new if message["role"] == "tool"]
        calls = [calling(results, _ANSWER, form) for form in self._template.calls if results]
        for answer in (*calls, says("assistant", _ANSWER)):
            with suppress(ConfigError):
                ids = self._encode(self._render(_Before([*before.messages, answer, *new], before.tools)))
                if self._chat.decode(ids).count(_ANSWER) == 1:
                    return self._placed(ids, str(new[0]["role"]), before, called="tool_calls" in answer)
        raise ConfigError(f"certify: expected a template that renders {new}, got none of it. Report it.")

    def _placed(self, ids: list[int], role: str, before: _Before, *, called: bool) -> _Whole:
        """Return the ids with the action's position: from the prompt, or the answer's text, to the close."""

        def holds(part: list[int]) -> bool:
            return _ANSWER in self._chat.decode(part)

        end = bisect_left(range(len(ids)), True, key=lambda n: holds(ids[:n]))
        start = bisect_left(range(end), True, key=lambda n: not holds(ids[n:])) - 1
        prompt, close = self._chat.prompt(before.messages, before.tools), self._template.close_ids
        is_whole = ids[: len(prompt)] == prompt
        closes = end, end + (len(close) if tuple(ids[end : end + len(close)]) == close else 0)
        if called:
            begin, after = self._template.close_of_call(ids[end:]) or (0, 0)
            closes = end + begin, end + after
        elif "S" in self._template.codes and role != "system":
            at = next((i for i in range(end, len(ids)) if ids[i] in self._template.terminators), end)
            closes = at, at + 1
        return _Whole(ids, len(prompt) if is_whole else start, end - 1, *closes, is_whole, called)

    def _render(self, before: _Before, *, gen: bool = True) -> str:
        messages = [as_parts(message) for message in before.messages] if self._template.parts else before.messages
        return render(self._tokenizer, messages, gen=gen, tools=before.tools, variables=self._variables)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _difference(self, ours: Sequence[int], known: Sequence[int]) -> str:
        at = next((i for i, (a, b) in enumerate(zip(ours, known, strict=False)) if a != b), min(len(ours), len(known)))
        if at == len(ours) == len(known):
            return ""
        names = [f"{ids[at]} {self._chat.decode([ids[at]])!r}" if at < len(ids) else "none" for ids in (ours, known)]
        return f"id {at}: ours is {names[0]}, the template's {names[1]}"

    def injection(self) -> Injection:
        """Put every added token's text into every kind of message."""
        chat, plain = self._chat, not self._chat.has_template
        places: dict[str, Callable[[str], list[int]]] = {"prompt": lambda text: chat.prompt([says("user", text)])}
        for role in ("user", "tool"):
            if plain or role in self._template.shapes:
                new = FOLLOW_UPS[role][0]
                with suppress(ConfigError):  # some templates accept it only with the engine's stop ids
                    chat.reply([], [new])
                    places[role] = lambda text, new=new: chat.reply([], [{**new, "content": text}])  # type: ignore[misc]
        if self._template.kind == "unsupported":
            places = {}
        texts = list(self._encoder.added) if places else []
        size = 1 + len(texts) // 512  # thousands of reserved tokens are tried in batches
        chunks = [texts[i : i + size] for i in range(0, len(texts), size)]
        tried = [self._tried(place, chunk) for place in places.values() for chunk in chunks]
        forged, altered = (tuple(dict.fromkeys(t for pair in tried for t in pair[which])) for which in (0, 1))
        markers = ("User:", "Assistant:") if plain else self._template.text_markers
        return Injection(len(texts), tuple(places), forged, altered, markers)

    def _tried(self, place: Callable[[str], list[int]], texts: list[str]) -> tuple[list[str], list[str]]:
        """Return the texts that are forged at this place, and those that are altered."""
        watched = self._encoder.added_ids - {getattr(self._tokenizer, "unk_token_id", None)}
        usual = sum(i in watched for i in place("x y"))
        contents = "".join(texts), "".join(f"x{text[:1]}{text}{text[1:]}y" for text in texts)
        ids = [place(content) for content in contents]
        forged = any(sum(i in watched for i in part) != usual for part in ids)
        read = [self._chat.decode(part) for part in ids]
        altered = any(
            content.strip() not in text and json.dumps(content.strip(), ensure_ascii=False)[1:-1] not in text
            for content, text in zip(contents, read, strict=True)
        )
        if (forged or altered) and len(texts) > 1:
            parts = [self._tried(place, [text]) for text in texts]
            return [t for part in parts for t in part[0]], [t for part in parts for t in part[1]]
        return texts if forged else [], texts if altered else []
