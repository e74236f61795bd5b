"""`agentenv tokens diff`: where the recorded tokens differ from the conversation rendered again, and why.

For each segment, the last generation is compared: the tokens before it with the template's rendering of the messages
before it, including the generation prompt, and its own tokens with the encoding of their text. Each difference has a
kind:

- template: the template rewrites, trims, inserts or drops text;
- tool state: it does so while rendering a tool's call or result;
- generation prompt: it renders a generation prompt that differs from the beginning of the same turn in history;
- foreign terminator: the action ended with a token that the template does not write there;
- synthesised close: the action was cut, and the close added for the model differs from the template's;
- observation cut: the middle of an observation was left out for lack of room;
- injection protection: a string in untrusted text would become a special token, and was kept as plain text;
- re-tokenization: the text is the same but the ids differ: the sampled ids are not canonical, or tokens merge.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal
from unicodedata import normalize

from agentenv.chat.certify.template_lines import Emitted, source_line, template_lines
from agentenv.chat.encoding import encoder_of
from agentenv.chat.template import Template, as_parts, probe, render
from agentenv.chat.token_text import TokenText
from agentenv.chat.tool_calls.messages import assistant_message, in_form
from agentenv.core.engine import Tokenizer
from agentenv.core.messages import normalized
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Message
from agentenv.core.views import Span, messages_of, spans_of
from agentenv.episode.endpoint.history import began_anew
from agentenv.errors import ConfigError
from agentenv.runs.tokens.alignment import Gap, equal_runs, gaps_between, slid
from agentenv.tools.calling import tool_format

MismatchKind = Literal[
    "template",
    "tool state",
    "generation prompt",
    "foreign terminator",
    "synthesised close",
    "observation cut",
    "injection protection",
    "re-tokenization",
]
"""Why tokens differ; see the module docstring."""

_NEAR = 4
"""Least number of equal tokens that separates two mismatches; fewer are a coincidence."""
_LONG = 16
"""Least number of equal characters that separates two differences."""
_CONTEXT = 24
"""Characters shown before and after a mismatch."""
_FOREIGN = ("foreign-terminator", "role-marker-mismatch", "non-canonical-close")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference: `ours` is recorded, `theirs` is rendered by the template and encoded by the tokenizer."""

    kind: MismatchKind
    segment: int
    message: int | None
    """Index in `messages_of(trajectory)`; None for text outside the messages, such as a default system prompt."""
    role: str
    """Role of the message; "" without a message."""
    line: int | None
    """Line of the chat template, from 1, that writes their text or the text around the gap; None if unknown."""
    template_line: str
    """Text of that line."""
    ours: str
    theirs: str
    before: str
    """The end of our text before it."""
    after: str
    """The beginning of our text after it."""
    our_ids: tuple[int, ...]
    their_ids: tuple[int, ...]
    start: int
    """Start of our ids in the segment."""
    their_start: int
    """Start of their ids in the rendering."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def diff_episode(
    trajectory: Trajectory,
    tokenizer: Tokenizer,
    *,
    stop_token_ids: Sequence[int] = (),
    tools: Any = None,
    variables: Mapping[str, Any] | None = None,
) -> list[Mismatch]:
    """Return the differences in the order of the tokens, segment by segment; none if the record is canonical.

    `tools` are the schemas in the prompt if the trajectory has none, `variables` the template's further variables.

    Raises:
        ConfigError: the episode is not in messages, the tokenizer has no template, or it refuses the messages.
    """
    trajectory.check_tokens("tokens diff")
    messages = messages_of(trajectory)
    if messages is None or not getattr(tokenizer, "chat_template", None):
        got = "raw text, which has no roles" if messages is None else "a tokenizer without a chat template"
        raise ConfigError(
            f"tokens diff: expected an episode in messages and a chat template, got {got}. "
            "It cannot be rendered; `agentenv tokens show` shows its tokens."
        )
    template = probe(tokenizer, stop_token_ids, variables or {})
    offered = list(trajectory.tools) or tools or ([] if template.needs_tools else None)
    prompt_arguments = (offered, variables or {}, stop_token_ids)
    mismatches: list[Mismatch] = []
    for segment in range(len(trajectory.segments)):
        mismatches += _Comparison(trajectory, segment, tokenizer, template, prompt_arguments).run(messages)
    return mismatches


class _Comparison:
    """Compares one segment with its rendering."""

    def __init__(
        self,
        trajectory: Trajectory,
        segment: int,
        tokenizer: Tokenizer,
        template: Template,
        prompt_arguments: tuple[Any, Mapping[str, Any], Sequence[int]],
    ) -> None:
        self.trajectory = trajectory
        self.segment = segment
        self.tokenizer = tokenizer
        self.template = template
        self.tools, self.variables, self.stop_token_ids = prompt_arguments
        self.spans = spans_of(trajectory, segment) or [Span(0, 0, "prompt", -1)]
        self.ours = TokenText(tokenizer, trajectory.segments[segment].token_ids.tolist())
        self.added = encoder_of(tokenizer).added_ids
        at, indices = len(trajectory.prompt), list[int]()  # of each turn's action in the messages
        for turn in trajectory.turns:
            indices.append(at)
            observation = turn.result.observation if turn.bridge is not None and turn.result is not None else ""
            if observation:  # otherwise the turn continues in the same message
                at += 2 if isinstance(observation, str) else 1 + len(observation)
        self.first = 0  # message of the segment's conversation, which an agent of the endpoint may have restarted
        for index, (turn, after) in enumerate(pairwise(trajectory.turns)):
            opened = turn.segment < after.segment <= segment
            if opened and turn.result is not None and began_anew(turn.result.info):
                self.first = indices[index] + 1
        self.message_of_turn = [index - self.first for index in indices]

    def run(self, messages: Sequence[Message]) -> list[Mismatch]:
        """Return the mismatches in the order of the tokens."""
        last = self.spans[-1]
        action = self.ours.text(last.start, last.end) if last.kind == "action" else ""
        messages = messages[self.first :]
        calling = tool_format(self.tokenizer, self.stop_token_ids)
        plain = [
            {key: item for key, item in message.items() if key != "trusted"}
            for message in in_form(normalized(messages, self.tools), calling)
        ]
        trajectory = self.trajectory
        for turn, index in zip(trajectory.turns, self.message_of_turn, strict=True):
            if index < 0:
                continue  # the turn belongs to an earlier conversation
            # The text of an action without the template's close of a turn: the record removes only EOS.
            final = trajectory.segments[turn.segment].token_ids[turn.end - 1]
            ended = TokenText(self.tokenizer, [final]).whole if final in self.template.terminators else ""
            text, close = str(plain[index]["content"]).removesuffix(ended), self.template.close
            is_closed = ended and close.endswith(ended)
            plain[index]["content"] = text.removesuffix(close.removesuffix(ended)) if is_closed else text
        self.messages = plain[: self._end(last, len(messages))]
        shaped: list[Message] = [as_parts(each) if self.template.parts else each for each in self.messages]
        try:
            self.rendered = render(self.tokenizer, shaped, tools=self.tools, variables=self.variables)
        except ConfigError:  # some templates require calls separate from the text
            joined, shaped = shaped, [*shaped]
            for at, index in enumerate(self.message_of_turn):
                if 0 <= index < len(joined):
                    parsed = calling.parse(str(joined[index]["content"]), turn_index=at, tools=self.tools)
                    as_json = calling.arguments_as_json
                    shaped[index] = assistant_message(parsed, as_json=as_json) if parsed.items else joined[index]
            self.rendered = render(self.tokenizer, shaped, tools=self.tools, variables=self.variables)
        self.emitted = template_lines(
            self.tokenizer, shaped, tools=self.tools, add_generation_prompt=True, **self.variables
        )
        self.theirs, whole = self._encoded(action), self.rendered + action
        if action.startswith(" "):  # some tokenizers add that space themselves
            bare = self._encoded(action[1:])
            if bare.whole == self._encoded("").whole + action:
                self.theirs, whole = bare, self.rendered + action[1:]
        self.to_rendered = _Offsets(self.theirs.whole, whole)
        return [self._mismatch(gap, messages) for gap in self._gaps()]

    def _encoded(self, action: str) -> TokenText:
        return TokenText(self.tokenizer, self.tokenizer.encode(self.rendered + action, add_special_tokens=False))

    def _end(self, last: Span, number: int) -> int:
        """Return the number of messages before the last generation, or before the next one if none followed."""
        if last.turn < 0:
            later = [
                turn for turn in range(len(self.message_of_turn)) if self.trajectory.turns[turn].segment >= self.segment
            ]
            return self.message_of_turn[later[0]] if later else number
        if last.kind == "action":
            return self.message_of_turn[last.turn]
        return self.message_of_turn[last.turn + 1] if last.turn + 1 < len(self.message_of_turn) else number

    def _gaps(self) -> list[Gap]:
        """Return the differences: nearby gaps are joined, then split where the text is equal and at our spans."""
        gaps: list[Gap] = []
        runs = equal_runs(self.ours.ids, self.theirs.ids)
        for gap in slid(gaps_between(runs, len(self.ours.ids), len(self.theirs.ids)), self.ours.ids, self.theirs.ids):
            between = self.ours.ids[gaps[-1][1] : gap[0]] if gaps else ()
            same_span = bool(gaps) and self._span(gaps[-1]) == self._span(gap)
            if same_span and len(between) < _NEAR and self.added.isdisjoint(between):
                gaps[-1] = (gaps[-1][0], gap[1], gaps[-1][2], gap[3])  # the few equal tokens are a coincidence
            else:
                gaps.append(gap)
        parts: list[Gap] = []
        for a, a_end, b, b_end in [part for gap in gaps for part in self._parted(gap)]:
            # Our spans split a gap whose other side is empty.
            for end in [span.end for span in self.spans if a < span.end < a_end] if b == b_end else []:
                parts.append((a, end, b, b))
                a = end
            parts.append((a, a_end, b, b_end))
        return parts

    def _parted(self, gap: Gap) -> Iterator[Gap]:
        """Yield the parts of a gap, with long parts of equal text but different ids separate from the others."""
        a, a_end, b, b_end = gap
        ours, theirs = self.ours.text(a, a_end), self.theirs.text(b, b_end)
        if ours == theirs:
            yield gap
            return
        shift, other = self.ours.starts[a], self.theirs.starts[b]
        for i, j, size in equal_runs(ours, theirs):
            # An equal run counts from the first to the last position at which tokens begin in both.
            both = self.ours.cuts(shift + i, size) & self.theirs.cuts(other + j, size)
            if size < _LONG or len(both) < 2:
                continue
            head, tail = min(both), max(both)
            a_cut, b_cut = self.ours.at(shift + i + head), self.theirs.at(other + j + head)
            if (a_cut, b_cut) != (a, b):
                yield a, a_cut, b, b_cut
            a, b = self.ours.at(shift + i + tail), self.theirs.at(other + j + tail)
            yield a_cut, a, b_cut, b
        if a < a_end or b < b_end:
            yield a, a_end, b, b_end

    def _mismatch(self, gap: Gap, messages: Sequence[Message]) -> Mismatch:
        a, a_end, b, b_end = gap
        span, emitted = self._span(gap), self._writer(gap)
        index = self._own(span, a)
        if index is None and emitted is not None:
            index = emitted.message
        elif index is None and span.turn >= 0 and self.message_of_turn[span.turn] + 1 < len(self.messages):
            index = self.message_of_turn[span.turn] + 1
        role = "" if index is None else str(messages[index].get("role", ""))
        line = None if emitted is None else emitted.line
        written = source_line(self.tokenizer, line, self.tools)
        return Mismatch(
            kind=self._kind(gap, role, written),
            segment=self.segment,
            message=None if index is None else index + self.first,
            role=role,
            line=line,
            template_line=written,
            ours=self.ours.text(a, a_end),
            theirs=self.theirs.text(b, b_end),
            before=self.ours.whole[: self.ours.starts[a]][-_CONTEXT:],
            after=self.ours.whole[self.ours.starts[a_end] :][:_CONTEXT],
            our_ids=self.ours.ids[a:a_end],
            their_ids=self.theirs.ids[b:b_end],
            start=a,
            their_start=b,
        )

    def _span(self, gap: Gap) -> Span:
        """Return our span in which a gap begins, or in which missing tokens would be."""
        return next((span for span in self.spans if gap[0] < span.end), self.spans[-1])

    def _kind(self, gap: Gap, role: str, line: str) -> MismatchKind:
        a, a_end = gap[:2]
        span = self._span(gap)
        untrusted = span.kind in ("prompt", "feedback")
        forged = self.added & (set(self.theirs.ids[slice(*gap[2:])]) - set(self.ours.ids[a:a_end]))
        texts = [normalize("NFC", text) for text in (self.ours.text(a, a_end), self.theirs.text(*gap[2:]))]
        if untrusted and forged and texts[0].split() == texts[1].split():
            return "injection protection"
        touched = range(a, a_end) if a < a_end else (a - 1, a)  # tokens missing in ours are missing between two tokens
        if any(s.kind == "close" and any(s.start <= at < s.end for at in touched) for s in self.spans):
            return "synthesised close"
        if texts[0] == texts[1] or texts[0] == self.to_rendered.characters_in_text(
            *(self.theirs.starts[at] for at in gap[2:])
        ):
            return "re-tokenization"  # the second case: spaces that a tokenizer adds or removes itself
        if (
            span.kind == "action"
            and a == span.start
            and texts[0] == " " + texts[1]
            and self.trajectory.turns[span.turn].action[:1] != " "
        ):
            return "re-tokenization"  # decoding the action lost the space at its beginning
        turns = [turn for turn in self.trajectory.turns if turn.segment == self.segment]
        if any(turn.bridge in _FOREIGN and turn.end - 1 in touched for turn in turns):
            return "foreign terminator"
        if any(self._generation_prompt(turn.start) <= a < a_end <= turn.start for turn in turns):
            return "generation prompt"
        if untrusted and span.turn >= 0 and self.trajectory.turns[span.turn].observation_cut:
            return "observation cut"
        return "tool state" if role == "tool" or "tool" in line else "template"

    def _generation_prompt(self, start: int) -> int:
        """Return the index at which the generation prompt before an action begins."""
        text = self.template.generation_prompt
        before = self.ours.whole[: self.ours.starts[start]]
        return self.ours.at(len(before) - len(text)) if text and before.endswith(text) else start

    def _writer(self, gap: Gap) -> Emitted | None:
        """Return the part of the rendering with the gap; between two parts, the part of the message it belongs to."""
        if not self.emitted:
            return None
        a, a_end, b, b_end = gap
        ours, theirs = self.ours.text(a, a_end), self.theirs.text(b, b_end)
        same = next(
            (i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(map(len, (ours, theirs)))
        )
        is_gap = same == len(theirs)
        at = self.to_rendered(self.theirs.starts[b] + (0 if ours == theirs else same))
        before, after = self._part(at - 1), self._part(at)
        if not is_gap or ours == theirs or before is None or after is None:
            return after if at < len(self.rendered) else None
        span = self._span(gap)
        mine = self._own(span, a)
        if mine is not None and (before.message == mine) != (after.message == mine):
            return before if before.message == mine else after
        return after if span.kind == "action" and a == span.start else before

    def _part(self, at: int) -> Emitted | None:
        emitted = self.emitted or []
        index = bisect_right(emitted, at, key=lambda part: part.start) - 1
        return emitted[index] if index >= 0 and at < emitted[index].end else None

    def _own(self, span: Span, at: int) -> int | None:
        """Return the message of a token that the policy sampled or that begins or ends its turn; None for others."""
        if span.kind in ("action", "close"):
            return self.message_of_turn[span.turn]
        turns = enumerate(self.trajectory.turns)
        own = [self.message_of_turn[i] for i, turn in turns if turn.segment == self.segment and turn.start == span.end]
        return own[0] if own and self._generation_prompt(span.end) <= at else None


class _Offsets:
    """Maps offsets in decoded ids to offsets in the encoded text: tokenizers add, drop and change characters."""

    def __init__(self, decoded: str, text: str) -> None:
        self.decoded, self.runs = decoded, equal_runs(decoded, text)
        self.starts = [start for start, _, _ in self.runs]

    def __call__(self, offset: int) -> int:
        """Return the offset in the text."""
        index = bisect_right(self.starts, offset) - 1
        start, other, size = self.runs[index] if index >= 0 else (0, 0, 0)
        return other + min(offset - start, size)

    def characters_in_text(self, start: int, end: int) -> str:
        """Return the decoded characters in [start, end) that are in the text."""
        first = max(0, bisect_right(self.starts, start) - 1)
        last = bisect_right(self.starts, end)
        parts = [(max(start, at), min(end, at + size)) for at, _, size in self.runs[first:last]]
        return "".join(self.decoded[at:to] for at, to in parts if at < to)
