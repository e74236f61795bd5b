"""A chat template put to the test: small conversations as `Chat` puts them and as `apply_chat_template` renders them,
and the text of every added token in every kind of message.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from agentenv.agent import Tokenizer
from agentenv.chat import Chat
from agentenv.encoding import encoder_of
from agentenv.errors import ConfigError
from agentenv.template import DUMMY_TOOLS, FOLLOW_UPS, Template, as_parts, calling, render, says
from agentenv.types import ChatOptions, Message

Ending = Literal["", "stop", "length"]
Compared = Literal["whole", "from the close on"]

_FIRST = [says("user", "What is six times seven?")]
_HEAD = [*_FIRST, says("assistant", "Forty two"), says("user", "And  twice that?\n\n1. In words: ¿sí?")]
_ANSWER = "that is eighty four"  # letters and spaces: the same text in a message and in the JSON of a call
_NEXT = "Is it\n  even? ☃ 12345"
_AFTER = {  # the shapes of FOLLOW_UPS, with something to read in them
    name: [
        {**new, "content": f'{{"even": {i}}}' if new["role"] == "tool" else f"{_NEXT} {i}"}
        for i, new in enumerate(follow)
    ]
    for name, follow in FOLLOW_UPS.items()
}


@dataclass(frozen=True, slots=True)
class Example:
    """A small conversation as `Chat` puts it and as the template renders it."""

    shape: str
    """What follows the action, of `template.FOLLOW_UPS`; "prompt" for what comes before the first one."""
    ending: Ending
    """How the action ended: by its close, or cut within its text."""
    equal: bool
    """Whether the ids are the same."""
    compared: Compared
    """Which ids: not all of them where the template takes back what it prompted the answer with."""
    bridge: str
    """The kind of bridge; empty in a prompt."""
    num_synthesised: int
    ours: str
    """Text from the action on."""
    template: str
    """The same by `apply_chat_template`."""
    difference: str
    """Where the ids first differ, or why there are none; empty when equal."""


@dataclass(frozen=True, slots=True)
class Injection:
    """What became of the texts of added tokens inside messages."""

    num_tried: int
    places: tuple[str, ...]
    """Where: in a prompt, in a user's and in a tool's message after an action."""
    forged: tuple[str, ...]
    """Those that changed the number of added tokens."""
    altered: tuple[str, ...]
    """Those whose message does not read the same once encoded and decoded."""
    text_markers: tuple[str, ...]
    """Role markers of plain text, which content can forge: no encoding keeps it from that."""


class _Whole(NamedTuple):
    """The ids of a whole conversation by `apply_chat_template`, and where in them the action is."""

    ids: list[int]
    start: int
    inside: int
    """Within the answer's text."""
    close_start: int
    close_end: int
    is_whole: bool
    """The prompt's ids begin it."""


class Trial:
    """One tokenizer and its Chat, put to the test."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        stop_token_ids: Sequence[int],
        variables: Mapping[str, Any],
    ) -> None:
        self._tokenizer, self._template, self._variables = tokenizer, template, variables
        self._tools = DUMMY_TOOLS if template.needs_tools else None
        options = ChatOptions(template_kwargs=variables)
        self._chat = Chat(tokenizer, stop_token_ids=stop_token_ids, tools=self._tools, options=options)
        self._encoder = encoder_of(tokenizer)

    def texts(self, ids: Iterable[int]) -> tuple[tuple[int, str], ...]:
        """Ids with what they stand for."""
        return tuple((i, self._chat.decode([i])) for i in sorted(ids))

    def generation_prompt(self) -> str:
        """What the template puts at the end for the assistant to go on with."""
        with_it = self._render(_FIRST)
        with suppress(ConfigError):
            without = self._render(_FIRST, gen=False)
            if with_it.startswith(without):
                return with_it[len(without) :]
        return with_it.rpartition(str(_FIRST[0]["content"]))[2]

    def refusal(self, shape: str) -> str:
        """Why a shape is not accepted; empty when it is."""
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
        """How the model writes calls of tools, as its template shows it."""
        found = self._chat.tool_format
        how = f"{found.kind}, {found.section_open}{found.call_open} … {found.call_close}{found.section_close}"
        return how if self._template.calls else f"the template renders none; read in Hermes' form, {how}"

    def opening_system(self) -> str:
        """Why a system message at the beginning is not accepted; empty when it is."""
        if not self._chat.has_template or self._template.kind == "unsupported":
            return self._template.error
        try:
            text = self._render([says("system", "qzSYSTEMqz"), *_FIRST])
        except ConfigError as error:
            return str(error.__cause__ or error)
        return "" if "qzSYSTEMqz" in text else "it is dropped"

    def examples(self) -> tuple[Example, ...]:
        """A prompt, and every accepted shape after a clean stop and after a cut."""
        cases: list[tuple[str, Ending]] = [("prompt", "")]
        for shape in self._template.shapes:
            cases += [(shape, "stop"), (shape, "length")]
        found = []
        for shape, ending in cases:
            try:
                found.append(self._example(shape, ending) if ending else self._prompt_example())
            except ConfigError as error:
                found.append(Example(shape, ending, False, "whole", "", 0, "", "", str(error)))
        return tuple(found)

    def _prompt_example(self) -> Example:
        ours, known = self._chat.prompt(_HEAD), self._encode(self._render(_HEAD))
        texts = self._chat.decode(ours), self._chat.decode(known)
        return Example("prompt", "", ours == known, "whole", "", 0, *texts, self._difference(ours, known))

    def _example(self, shape: str, ending: Ending) -> Example:
        new = _AFTER[shape]
        whole = self._whole(new)
        cut = ending == "length"
        action = whole.ids[whole.start : whole.inside if cut else whole.close_end]
        known = whole.ids[whole.close_start if cut else whole.close_end :]
        bridge = self._chat.bridge(action, new)
        return Example(
            shape,
            ending,
            equal=bridge.ids == known,
            compared="whole" if whole.is_whole else "from the close on",
            bridge=bridge.kind,
            num_synthesised=bridge.num_synthesised,
            ours=self._chat.decode([*action, *bridge.ids]),
            template=self._chat.decode([*action, *known]),
            difference=self._difference(bridge.ids, known),
        )

    def _whole(self, new: Sequence[Message]) -> _Whole:
        """A conversation that goes on with `new`, after calls where the template renders them."""
        results = [message for message in new if message["role"] == "tool"]
        calls = [calling(results, _ANSWER, form) for form in self._template.calls if results]
        for answer in (*calls, says("assistant", _ANSWER)):
            with suppress(ConfigError):
                ids = self._encode(self._render([*_HEAD, answer, *new]))
                if self._chat.decode(ids).count(_ANSWER) == 1:
                    return self._placed(ids, str(new[0]["role"]), called="tool_calls" in answer)
        raise ConfigError(f"certify: expected a template that renders {new}, got none of it. Report it.")

    def _placed(self, ids: list[int], role: str, *, called: bool) -> _Whole:
        """Where the action is: from the prompt, or the answer's text, to the close."""

        def holds(part: list[int]) -> bool:
            """Whether the answer's text is whole in these ids."""
            return _ANSWER in self._chat.decode(part)

        end = bisect_left(range(len(ids)), True, key=lambda n: holds(ids[:n]))
        start = bisect_left(range(end), True, key=lambda n: not holds(ids[n:])) - 1
        prompt, close = self._chat.prompt(_HEAD), self._template.close_ids
        is_whole = ids[: len(prompt)] == prompt
        closes = end, end + len(close)
        if called or ("S" in self._template.codes and role != "system"):
            at = next((i for i in range(end, len(ids)) if ids[i] in self._template.terminators), end)
            closes = (at + 1 - len(close) if ids[at] in close[-1:] else at), at + 1
        return _Whole(ids, len(prompt) if is_whole else start, end - 1, *closes, is_whole)

    def _render(self, messages: Sequence[Message], *, gen: bool = True) -> str:
        shaped = [as_parts(message) for message in messages] if self._template.parts else messages
        return render(self._tokenizer, shaped, gen=gen, tools=self._tools, variables=self._variables)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _difference(self, ours: Sequence[int], known: Sequence[int]) -> str:
        at = next((i for i, (a, b) in enumerate(zip(ours, known, strict=False)) if a != b), min(len(ours), len(known)))
        if at == len(ours) == len(known):
            return ""
        names = [f"{ids[at]} {self._chat.decode([ids[at]])!r}" if at < len(ids) else "none" for ids in (ours, known)]
        return f"id {at}: ours is {names[0]}, the template's {names[1]}"

    def injection(self) -> Injection:
        """Every added token's text inside every kind of message."""
        chat, plain = self._chat, not self._chat.has_template
        places: dict[str, Callable[[str], list[int]]] = {"prompt": lambda text: chat.prompt([says("user", text)])}
        for role in ("user", "tool"):
            if plain or role in self._template.shapes:
                new = FOLLOW_UPS[role][0]
                with suppress(ConfigError):  # some take it only after what the engine's stops would tell
                    chat.reply([], [new])
                    places[role] = lambda text, new=new: chat.reply([], [{**new, "content": text}])  # type: ignore[misc]
        if self._template.kind == "unsupported":
            places = {}
        texts = list(self._encoder.added) if places else []
        size = 1 + len(texts) // 512  # thousands of reserved tokens are tried some at a time
        chunks = [texts[i : i + size] for i in range(0, len(texts), size)]
        tried = [self._tried(place, chunk) for place in places.values() for chunk in chunks]
        forged, altered = (tuple(dict.fromkeys(t for pair in tried for t in pair[which])) for which in (0, 1))
        markers = ("User:", "Assistant:") if plain else self._template.text_markers
        return Injection(len(texts), tuple(places), forged, altered, markers)

    def _tried(self, place: Callable[[str], list[int]], texts: list[str]) -> tuple[list[str], list[str]]:
        """Those of the texts that are forged there, and those that are altered."""
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
