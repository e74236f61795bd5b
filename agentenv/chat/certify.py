"""What a model's chat template does to tokens: `certify`, which tries it on small conversations.

An example is exact if the ids that `Chat` puts after an action equal those of the whole conversation as rendered by the
tokenizer's own `apply_chat_template`. A token is forged if a message that contains its text has one more added token
than a message without it.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from agentenv.chat.chat import Chat, ChatOptions
from agentenv.chat.encoding import encoder_of
from agentenv.chat.template import DUMMY_TOOLS, FOLLOW_UPS, Template, as_parts, calling, probe, render, says
from agentenv.chat.tool_calls.learn import tool_format
from agentenv.chat.tool_calls.syntax import ANY_ID, ANY_NAME
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Message
from agentenv.errors import ConfigError

CertificateKind = Literal["prefix-stable", "needs-bridge", "unsupported", "no template"]
Ending = Literal["", "stop", "length"]
Context = Literal["", "second cycle", "system and tools"]

_HEAD = [
    says("user", "What is six times seven?"),
    says("assistant", "Forty two"),
    says("user", "And  twice that?\n\n1. In words: ¿sí?"),
]
_ANSWER = "that is eighty four"  # letters and spaces only: the same text in a message and in a call's JSON
_TOOL = "get_parity"
_ADVICE = {
    "unsupported": "Use a model whose template renders user, assistant and user messages, put such a template into its "
    "folder (chat_template.jinja), or give prompts and observations as text, which needs no template.",
    "no template": "Messages become 'User: …' and 'Assistant:' paragraphs. Put the template that the model was trained "
    "with into its folder (chat_template.jinja), or give prompts and observations as text.",
    "differs": "Do not train on messages with this template: give prompts and observations as text, and report it.",
    "forged": "Do not pass untrusted text to this model as messages: it can forge these tokens.",
}


def _with_contents(name: str) -> list[dict[str, Any]]:
    """Return the messages of a shape of FOLLOW_UPS with contents that could merge with what is around them."""
    made = []
    for index, message in enumerate(FOLLOW_UPS[name]):
        is_result = message["role"] == "tool"
        content = f'{{"even": {index}}}' if is_result else f"Is it\n  even? ☃ 12345 {index}"
        made.append({**message, "content": content, **({"name": _TOOL} if is_result else {})})
    return made


@dataclass(frozen=True, slots=True)
class Example:
    """A small conversation, encoded by `Chat` and rendered by the template."""

    shape: str
    """What follows the action, one of `template.FOLLOW_UPS`; "prompt" for the episode's first prompt."""
    ending: Ending = ""
    """How the action ended: with its close, or cut off within its text."""
    context: Context = ""
    """What precedes the action besides turns of text: a call with its result, or a system message and offered tools."""
    difference: str = ""
    """Where the ids first differ, why there are none, or how a call is misread; empty if equal."""

    def __str__(self) -> str:
        """Return the example and its difference on one line."""
        name = " ".join(filter(None, [self.shape, self.ending, self.context and f"({self.context})"]))
        return f"{name}: {self.difference or 'equal'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The tested behavior of a model's chat template."""

    model: str
    kind: CertificateKind
    reasons: tuple[str, ...]
    """Why it needs a bridge."""
    error: str
    """Why it is unsupported, in the template's own words."""
    tools: str
    """Whether it renders tools, and how calls are read: json, named, markup or keywords, and what opens one."""
    examples: tuple[Example, ...]
    num_tried: int
    """Added tokens whose texts were put into messages."""
    forged: tuple[str, ...]
    """Those that text can forge."""
    warnings: tuple[str, ...]
    """What is harmless here and may matter to the engine."""

    @property
    def is_exact(self) -> bool:
        """True if there are examples, and all of them are equal."""
        return bool(self.examples) and not any(example.difference for example in self.examples)

    @property
    def exit_code(self) -> int:
        """1 if the template is unsupported, an example differs or a token can be forged; else 0."""
        differs = self.kind != "no template" and not self.is_exact
        return int(differs or bool(self.forged))

    @property
    def verdict(self) -> str:
        """The result in one line."""
        who = self.model or "this tokenizer"
        if self.kind == "unsupported":
            return f"{who}: unsupported, {self.error}"
        equal = sum(not example.difference for example in self.examples)
        exact = f"exact on {equal} of {len(self.examples)} examples" if self.examples else "plain paragraphs"
        return f"{who}: {self.kind}, {exact}, {len(self.forged)} of {self.num_tried} added tokens can be forged"

    @property
    def advice(self) -> str:
        """What to do; empty if there is nothing to do."""
        differs = self.kind not in _ADVICE and not self.is_exact
        found = [_ADVICE.get(self.kind), differs and _ADVICE["differs"], self.forged and _ADVICE["forged"]]
        return " ".join(text for text in found if text)

    def lines(self) -> list[str]:
        """Return what a terminal shows: verdict, reasons, tools, differences, forged tokens, warnings and advice."""
        different = [f"differs: {example}" for example in self.examples if example.difference]
        forged = [f"forged: {', '.join(map(repr, self.forged))}"] if self.forged else []
        reasons = [f"{self.kind}: {'; '.join(self.reasons)}"] if self.reasons else []
        facts = [*reasons, f"tools: {self.tools}"]
        return [self.verdict, *facts, *different, *forged, *self.warnings, *filter(None, [self.advice])]

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON values, with its derived properties."""
        derived = {name: getattr(self, name) for name in ("verdict", "is_exact", "exit_code", "advice")}
        return {**derived, **asdict(self)}


def certify(
    tokenizer: Tokenizer,
    *,
    model: str = "",
    stop_token_ids: Sequence[int] = (),
    variables: Mapping[str, Any] | None = None,
) -> Certificate:
    """Test a tokenizer's chat template: an example of every shape, every added token in every message.

    `stop_token_ids` are the ids besides EOS on which the engine stops; `variables` go to every rendering. Never fails
    because of a template.
    """
    given = dict(variables or {})
    has_template = bool(getattr(tokenizer, "chat_template", None))
    template = probe(tokenizer, stop_token_ids, given) if has_template else Template("prefix-stable", "")
    trial = _Trial(tokenizer, template, stop_token_ids, given)
    num_tried, forged = trial.forged()
    kind: CertificateKind = template.kind if has_template else "no template"
    examples = trial.examples() if kind not in ("no template", "unsupported") else ()
    form = tool_format(tokenizer, stop_token_ids, given)
    opened = form.call_open.replace(ANY_NAME, "NAME").replace(ANY_ID, "ID").strip()
    tools = "rendered; calls are read as " if template.renders_tools else "not rendered; calls are read as "
    tools += ("json" if form.kind == "plain" else form.kind) + (f", after {opened!r}" if opened else "")
    return Certificate(
        model=model, kind=kind, reasons=template.reasons, error=template.error, tools=tools, examples=examples,
        num_tried=num_tried, forged=forged, warnings=trial.warnings(stop_token_ids),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Before:
    """The messages before an action."""

    messages: Sequence[Message]
    tools: Any
    context: Context = ""


class _Whole(NamedTuple):
    """The ids of a whole conversation by `apply_chat_template`, and the action's position in them."""

    ids: list[int]
    start: int
    inside: int
    """A position within the answer's text."""
    close_start: int
    close_end: int
    is_read: bool
    """True if the answer is calls, all of whose ids belong to the action."""


class _Trial:
    """Tests one tokenizer and its Chat."""

    def __init__(
        self, tokenizer: Tokenizer, template: Template, stop_token_ids: Sequence[int], variables: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._template, self._variables = tokenizer, template, variables
        self._tools = DUMMY_TOOLS if template.needs_tools else None
        options = ChatOptions(chat_template_kwargs=variables)
        self._chat = Chat(tokenizer, stop_token_ids=stop_token_ids, tools=self._tools, options=options)

    def examples(self) -> tuple[Example, ...]:
        """Return a prompt, and every accepted shape after a stop and after a cut; then those of other contexts."""
        plain = _Before(_HEAD, self._tools)
        prompt = self._difference(lambda: (self._chat.prompt(plain.messages), self._ids(plain)))
        found = [Example("prompt", difference=prompt)]
        endings: tuple[Ending, ...] = ("stop", "length")
        for before, shapes in ((plain, self._template.shapes), *self._contexts()):
            for shape, ending in itertools.product(shapes, endings):
                difference = self._difference(self._after, before, _with_contents(shape), ending)
                found.append(Example(shape, ending, before.context, difference))
        return tuple(found)

    def _difference(self, compare: Callable[..., tuple[list[int], list[int]]], *args: Any) -> str:
        """Return where the ids of a comparison first differ, or the template's refusal; empty if they are equal."""
        try:
            ours, known = compare(*args)
        except ConfigError as error:
            return str(error)
        at = next((i for i, (a, b) in enumerate(zip(ours, known, strict=False)) if a != b), min(len(ours), len(known)))
        if at == len(ours) == len(known):
            return ""
        names = [f"{ids[at]} {self._chat.decode([ids[at]])!r}" if at < len(ids) else "none" for ids in (ours, known)]
        return f"id {at}: ours is {names[0]}, the template's {names[1]}"

    def _contexts(self) -> Iterator[tuple[_Before, Sequence[str]]]:
        """Yield further contexts, and the shapes to try in each: those that the template renders and does not rewrite.

        A template with code M moves system messages and tools; one with code R may render a later cycle of calls
        unlike the first.
        """
        (result,) = _with_contents("tool")
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
        system = [says("system", "Be brief."), *_HEAD]
        try:
            is_rendered = "Be brief." in self._render(_Before(system, self._tools))
        except ConfigError:
            return
        if is_rendered and "M" not in self._template.codes:
            offered = DUMMY_TOOLS if self._template.renders_tools else self._tools
            shapes = [shape for shape in ("user", "tool", "tool+user") if shape in self._template.shapes]
            yield _Before(system, offered, "system and tools"), shapes

    def _after(self, before: _Before, new: Sequence[Message], ending: Ending) -> tuple[list[int], list[int]]:
        """Return what `Chat` and the template put after an action that ended so.

        Raises:
            ConfigError: the template refuses the conversation, or its calls are not read as it was given them.
        """
        whole = self._whole(new, before)
        is_cut = ending == "length"
        action = whole.ids[whole.start : whole.inside if is_cut else whole.close_end]
        known = whole.ids[whole.close_start if is_cut else whole.close_end :]
        bridge = self._chat.bridge(action, new, history=before.messages)
        if whole.is_read and not is_cut:
            num_before, form = sum(message["role"] == "tool" for message in new) - 1, self._chat.tool_format
            given = [({"q": q}, _TOOL) for q in (*["x"] * num_before, _ANSWER)]
            parsed = form.parse(self._chat.action_text(action))
            read: list[Any] = [(dict(call.arguments), _TOOL if form.id_is_name else call.name) for call in parsed.calls]
            if read != given:
                read += [bad.problem for bad in parsed.malformed]
                raise ConfigError(f"its calls are read as {read}")
        return bridge.ids, known

    def _whole(self, new: Sequence[Message], before: _Before) -> _Whole:
        """Return a conversation that continues with `new`, after calls if the template renders them."""
        results = [message for message in new if message["role"] == "tool"]
        calls = [calling(results, _ANSWER, form) for form in self._template.calls if results]
        for answer in (*calls, says("assistant", _ANSWER)):
            with suppress(ConfigError):
                ids = self._ids(_Before([*before.messages, answer, *new], before.tools))
                if self._chat.decode(ids).count(_ANSWER) == 1:
                    break
        else:
            raise ConfigError(f"certify: expected a template that renders {new}, got none of it. Report it.")

        # The action's position: from the prompt, or the answer's text, to the close.
        def holds(part: list[int]) -> bool:
            return _ANSWER in self._chat.decode(part)

        end = bisect_left(range(len(ids)), True, key=lambda n: holds(ids[:n]))
        start = bisect_left(range(end), True, key=lambda n: not holds(ids[n:])) - 1
        prompt, close = self._chat.prompt(before.messages, before.tools), self._template.close_ids
        is_whole, called = ids[: len(prompt)] == prompt, "tool_calls" in answer
        closes = end, end + (len(close) if tuple(ids[end : end + len(close)]) == close else 0)
        if called:
            begin, after = self._template.close_of_call(ids[end:]) or (0, 0)
            closes = end + begin, end + after
        elif "S" in self._template.codes and new[0]["role"] != "system":
            at = next((i for i in range(end, len(ids)) if ids[i] in self._template.terminators), end)
            closes = at, at + 1
        return _Whole(ids, len(prompt) if is_whole else start, end - 1, *closes, called and is_whole)

    def _render(self, before: _Before) -> str:
        messages = [as_parts(message) for message in before.messages] if self._template.parts else before.messages
        return render(self._tokenizer, messages, tools=before.tools, variables=self._variables)

    def _ids(self, before: _Before) -> list[int]:
        return list(self._tokenizer.encode(self._render(before), add_special_tokens=False))

    def forged(self) -> tuple[int, tuple[str, ...]]:
        """Put every added token's text into every kind of message; return their number, and those that are forged."""
        chat = self._chat
        places: list[Callable[[str], list[int]]] = [lambda text: chat.prompt([says("user", text)])]
        for role in ("user", "tool"):
            if not chat.has_template or role in self._template.shapes:
                new = FOLLOW_UPS[role][0]
                with suppress(ConfigError):  # some templates accept it only with the engine's stop ids
                    chat.reply([], [new])
                    places.append(lambda text, new=new: chat.reply([], [{**new, "content": text}]))  # type: ignore[misc]
        encoder = encoder_of(self._tokenizer)
        texts = [] if self._template.kind == "unsupported" else list(encoder.added)
        watched = encoder.added_ids - {getattr(self._tokenizer, "unk_token_id", None)}
        size = 1 + len(texts) // 512  # thousands of reserved tokens are tried in batches
        chunks = [texts[i : i + size] for i in range(0, len(texts), size)]
        found = [text for place in places for chunk in chunks for text in _forged_at(place, chunk, watched)]
        return len(texts), tuple(dict.fromkeys(found))

    def warnings(self, stop_token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return what an engine's settings and the template do not agree on, and markers that are plain text."""
        template, found = self._template, []
        stops = {*stop_token_ids, getattr(self._tokenizer, "eos_token_id", None)}
        ends = set(template.close_ids[-1:] or template.markers)
        if ends and not ends & stops:
            found.append(
                f"In history a turn ends with {self._chat.decode(sorted(ends))!r}, at which the engine does not stop. "
                "Add it to eos_token_id in the model's generation_config.json if the model is trained to end its "
                "turns so."
            )
        markers = template.text_markers if self._chat.has_template else ("User:", "Assistant:")
        if markers:
            found.append(f"Role markers are plain text, which any message can contain: {list(markers)}.")
        return tuple(found)


def _forged_at(place: Callable[[str], list[int]], texts: list[str], watched: frozenset[Any]) -> list[str]:
    """Return the texts that add a token of `watched` to a message, alone or next to parts of themselves."""
    usual = sum(i in watched for i in place("x y"))
    contents = "".join(texts), "".join(f"x{text[:1]}{text}{text[1:]}y" for text in texts)
    if all(sum(i in watched for i in place(content)) == usual for content in contents):
        return []
    return texts if len(texts) == 1 else [found for text in texts for found in _forged_at(place, [text], watched)]
