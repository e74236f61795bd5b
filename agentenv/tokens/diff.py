"""`agentenv tokens diff`: where the recorded tokens differ from the conversation rendered anew, and why.

Of each segment what is compared is its last generation: the tokens before it with the template's rendering of the
messages before it, up to where the assistant begins, and its own tokens with the encoding of their text. A class says
why they differ:

- template: the template rewrites, trims, inserts or drops text;
- tool state: it does so in how it renders a tool's call or result;
- generation prompt: what it puts before a generation is not what it puts before the same turn in history;
- foreign terminator: the action ended with a token that the template does not put there;
- synthesised close: the action was cut, and what closes it in the model's place is not what the template writes;
- observation cut: the middle of an observation was left out, for want of room;
- injection protection: a string in what strangers said would become a special token, and was kept plain text;
- re-tokenization: the text is the same and the ids are not: those sampled are not canonical, or a seam merges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal
from unicodedata import normalize

from agentenv.agent import Tokenizer
from agentenv.encoding import encoder_of
from agentenv.endpoint.history import began_anew
from agentenv.errors import ConfigError
from agentenv.template import Template, as_parts, probe, render
from agentenv.tokens.alignment import Gap, equal_runs, gaps_between, slid
from agentenv.tokens.template_lines import Emitted, source_line, template_lines
from agentenv.tokens.text import TokenText
from agentenv.tools import assistant_message, tool_format
from agentenv.trajectory import Span, Trajectory, Turn
from agentenv.types import Message

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
"""Why tokens differ; see this module."""

_NEAR = 4
"""So many equal tokens part two mismatches; fewer are a coincidence."""
_LONG = 16
"""Equal text of so many characters between two differences is no coincidence."""
_CONTEXT = 24
"""Characters shown before and after a mismatch."""
_FOREIGN = ("foreign-terminator", "role-marker-mismatch", "non-canonical-close")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference: ours is what was recorded, theirs what the template and the tokenizer make of the messages."""

    kind: MismatchKind
    segment: int
    message: int | None
    """Index in `Trajectory.messages`; None where it is of no message, such as a default system prompt."""
    role: str
    """Of the message; empty without one."""
    line: int | None
    """Line of the chat template, from 1, that writes their text or the text around the gap; None where unknown."""
    template_line: str
    """That line."""
    ours: str
    theirs: str
    before: str
    """The end of our text before it."""
    after: str
    """The beginning of our text after it."""
    our_ids: tuple[int, ...]
    their_ids: tuple[int, ...]
    start: int
    """Of our ids in the segment."""
    their_start: int
    """Of their ids in the rendering."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def diff_episode(
    trajectory: Trajectory,
    tokenizer: Tokenizer,
    *,
    stop_token_ids: Sequence[int] = (),
    tools: Any = None,
    variables: Mapping[str, Any] | None = None,
) -> list[Mismatch]:
    """The differences in the order of the tokens, segment by segment; none where the record is canonical.

    `tools` are the schemas in the prompt where the trajectory names none, `variables` the template's further ones.

    Raises:
        ConfigError: the episode is not in messages, there is no template, or it refuses the messages.
    """
    messages = trajectory.messages
    if messages is None or not getattr(tokenizer, "chat_template", None):
        got = "raw text, which has no roles" if messages is None else "a tokenizer without a chat template"
        raise ConfigError(
            f"tokens diff: expected an episode in messages and a chat template, got {got}. "
            "There is nothing to render it with; `agentenv tokens show` shows its tokens."
        )
    template = probe(tokenizer, stop_token_ids, variables or {})
    offered = list(trajectory.tools) or tools or ([] if template.needs_tools else None)
    given = (offered, variables or {}, stop_token_ids)
    found: list[Mismatch] = []
    for segment in range(len(trajectory.segments)):
        found += _Comparison(trajectory, segment, tokenizer, template, given).run(messages)
    return found


class _Comparison:
    """One segment beside its rendering."""

    def __init__(
        self,
        trajectory: Trajectory,
        segment: int,
        tokenizer: Tokenizer,
        template: Template,
        given: tuple[Any, Mapping[str, Any], Sequence[int]],
    ) -> None:
        self.trajectory, self.segment, self.tokenizer, self.template = trajectory, segment, tokenizer, template
        self.tools, self.variables, self.stop_token_ids = given
        self.spans = trajectory.spans(segment) or [Span(0, 0, "prompt", -1)]
        self.ours = TokenText(tokenizer, trajectory.segments[segment].token_ids.tolist())
        self.added = encoder_of(tokenizer).added_ids
        says = _message_of_turns(trajectory)
        self.first = _first_message(trajectory, segment, says)
        self.says = [index - self.first for index in says]

    def run(self, messages: Sequence[Message]) -> list[Mismatch]:
        """The mismatches in the order of the tokens."""
        last = self.spans[-1]
        action = self.ours.text(last.start, last.end) if last.kind == "action" else ""
        messages = messages[self.first :]
        said = [{key: item for key, item in message.items() if key != "trusted"} for message in messages]
        for turn, index in zip(self.trajectory.turns, self.says, strict=True):
            if index < 0:
                continue  # of a conversation before this one
            said[index]["content"] = self._content(turn, str(said[index]["content"]))
        self.messages = said[: self._end(last, len(messages))]
        shaped = [as_parts(message) for message in self.messages] if self.template.parts else self.messages
        try:
            self.rendered = render(self.tokenizer, shaped, tools=self.tools, variables=self.variables)
        except ConfigError:  # some templates want the calls before results apart from the text
            shaped = self._with_calls(shaped)
            self.rendered = render(self.tokenizer, shaped, tools=self.tools, variables=self.variables)
        self.emitted = template_lines(
            self.tokenizer, shaped, tools=self.tools, add_generation_prompt=True, **self.variables
        )
        self.theirs, whole = self._encoded(action), self.rendered + action
        if action.startswith(" "):  # some tokenizers put that space there themselves
            bare = self._encoded(action[1:])
            if bare.whole == self._encoded("").whole + action:
                self.theirs, whole = bare, self.rendered + action[1:]
        self.to_rendered = _Offsets(self.theirs.whole, whole)
        return [self._mismatch(gap, messages) for gap in self._gaps()]

    def _with_calls(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the actions' calls apart; the template's refusal stands where there are none."""
        known = tool_format(self.tokenizer, self.stop_token_ids)
        parsed = {index: known.parse(str(messages[index]["content"]), turn_index=turn, tools=self.tools)
                  for turn, index in enumerate(self.says) if 0 <= index < len(messages)}  # fmt: skip
        as_json = known.arguments_as_json
        return [
            assistant_message(parsed[i], as_json=as_json) if i in parsed and parsed[i].items else message
            for i, message in enumerate(messages)
        ]

    def _encoded(self, action: str) -> TokenText:
        return TokenText(self.tokenizer, self.tokenizer.encode(self.rendered + action, add_special_tokens=False))

    def _content(self, turn: Turn, text: str) -> str:
        """An action's text without what the template closes a turn with: the record takes off EOS, not every close."""
        last = self.trajectory.segments[turn.segment].token_ids[turn.end - 1]
        ended = TokenText(self.tokenizer, [last]).whole if last in self.template.terminators else ""
        text, close = text.removesuffix(ended), self.template.close
        return text.removesuffix(close.removesuffix(ended)) if ended and close.endswith(ended) else text

    def _end(self, last: Span, number: int) -> int:
        """How many messages come before the last generation, or before the one that was still to come."""
        if last.turn < 0:
            later = [turn for turn in range(len(self.says)) if self.trajectory.turns[turn].segment >= self.segment]
            return self.says[later[0]] if later else number
        if last.kind == "action":
            return self.says[last.turn]
        return self.says[last.turn + 1] if last.turn + 1 < len(self.says) else number

    def _gaps(self) -> list[Gap]:
        """What differs: near gaps joined, then parted by text and, where ours goes from span to span, by span."""
        gaps: list[Gap] = []
        runs = equal_runs(self.ours.ids, self.theirs.ids)
        for gap in slid(gaps_between(runs, len(self.ours.ids), len(self.theirs.ids)), self.ours.ids, self.theirs.ids):
            if gaps and self._are_near(gaps[-1], gap):
                gaps[-1] = (gaps[-1][0], gap[1], gaps[-1][2], gap[3])
            else:
                gaps.append(gap)
        return [part for gap in gaps for same in self._parted(gap) for part in self._by_span(same)]

    def _are_near(self, one: Gap, next_one: Gap) -> bool:
        """Whether what is equal between two gaps of a span is so little that it is a coincidence."""
        between = self.ours.ids[one[1] : next_one[0]]
        same_span = self._span(one) == self._span(next_one)
        return same_span and len(between) < _NEAR and self.added.isdisjoint(between)

    def _parted(self, gap: Gap) -> Iterator[Gap]:
        """The parts of a gap whose text differs, apart from long ones whose text is the same, though not the ids."""
        a, a_end, b, b_end = gap
        ours, theirs = self.ours.text(a, a_end), self.theirs.text(b, b_end)
        if ours == theirs:
            yield gap
            return
        shift, other = self.ours.starts[a], self.theirs.starts[b]
        for i, j, size in equal_runs(ours, theirs):
            # An equal run counts from the first to the last place where a token begins in both.
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

    def _by_span(self, gap: Gap) -> Iterator[Gap]:
        """A gap in theirs, span by span of ours."""
        a, a_end, b, b_end = gap
        for end in [span.end for span in self.spans if a < span.end < a_end] if b == b_end else []:
            yield a, end, b, b
            a = end
        yield a, a_end, b, b_end

    def _mismatch(self, gap: Gap, messages: Sequence[Message]) -> Mismatch:
        a, a_end, b, b_end = gap
        emitted = self._writer(gap)
        index = self._message(gap, emitted)
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
        """Our span in which a gap begins; of what is missing in ours, that in which it would be."""
        return next((span for span in self.spans if gap[0] < span.end), self.spans[-1])

    def _kind(self, gap: Gap, role: str, line: str) -> MismatchKind:
        a, a_end = gap[:2]
        span = self._span(gap)
        untrusted = span.kind in ("prompt", "feedback")
        forged = self.added & (set(self.theirs.ids[slice(*gap[2:])]) - set(self.ours.ids[a:a_end]))
        texts = [normalize("NFC", text) for text in (self.ours.text(a, a_end), self.theirs.text(*gap[2:]))]
        if untrusted and forged and texts[0].split() == texts[1].split():
            return "injection protection"
        touched = range(a, a_end) if a < a_end else (a - 1, a)  # what is missing in ours is missing between two tokens
        if any(s.kind == "close" and any(s.start <= at < s.end for at in touched) for s in self.spans):
            return "synthesised close"
        if texts[0] == texts[1] or texts[0] == self.to_rendered.kept(*(self.theirs.starts[at] for at in gap[2:])):
            return "re-tokenization"  # of the second kind are spaces that a tokenizer puts in or takes away itself
        if (
            span.kind == "action"
            and a == span.start
            and texts[0] == " " + texts[1]
            and self.trajectory.turns[span.turn].action[:1] != " "
        ):
            return "re-tokenization"  # reading the action off its ids lost a space, as the first of a text
        turns = [turn for turn in self.trajectory.turns if turn.segment == self.segment]
        if any(turn.bridge in _FOREIGN and turn.end - 1 in touched for turn in turns):
            return "foreign terminator"
        if any(self._generation_prompt(turn.start) <= a < a_end <= turn.start for turn in turns):
            return "generation prompt"
        if untrusted and span.turn >= 0 and self.trajectory.turns[span.turn].observation_cut:
            return "observation cut"
        return "tool state" if role == "tool" or "tool" in line else "template"

    def _generation_prompt(self, start: int) -> int:
        """Where the generation prompt before an action begins."""
        text = self.template.generation_prompt
        before = self.ours.whole[: self.ours.starts[start]]
        return self.ours.at(len(before) - len(text)) if text and before.endswith(text) else start

    def _writer(self, gap: Gap) -> Emitted | None:
        """The part of the rendering that a gap is in; of one between two, that of the message it belongs to."""
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
        """The message of a token that the policy sampled, or that begins or ends its turn; None of other tokens."""
        if span.kind in ("action", "close"):
            return self.says[span.turn]
        turns = enumerate(self.trajectory.turns)
        said = [self.says[i] for i, turn in turns if turn.segment == self.segment and turn.start == span.end]
        return said[0] if said and self._generation_prompt(span.end) <= at else None

    def _message(self, gap: Gap, emitted: Emitted | None) -> int | None:
        span = self._span(gap)
        own = self._own(span, gap[0])
        if own is not None:
            return own
        if emitted is not None:
            return emitted.message
        return self.says[span.turn] + 1 if span.turn >= 0 and self.says[span.turn] + 1 < len(self.messages) else None


class _Offsets:
    """Offsets in decoded ids as offsets in the text that was encoded: tokenizers add, drop and change characters."""

    def __init__(self, decoded: str, text: str) -> None:
        self.decoded, self.runs = decoded, equal_runs(decoded, text)
        self.starts = [start for start, _, _ in self.runs]

    def __call__(self, offset: int) -> int:
        """The offset in the text."""
        index = bisect_right(self.starts, offset) - 1
        start, other, size = self.runs[index] if index >= 0 else (0, 0, 0)
        return other + min(offset - start, size)

    def kept(self, start: int, end: int) -> str:
        """Those of the decoded characters [start, end) that were in the text."""
        first = max(0, bisect_right(self.starts, start) - 1)
        last = bisect_right(self.starts, end)
        parts = [(max(start, at), min(end, at + size)) for at, _, size in self.runs[first:last]]
        return "".join(self.decoded[at:to] for at, to in parts if at < to)


def _message_of_turns(trajectory: Trajectory) -> list[int]:
    """The index of each turn's action in `Trajectory.messages`."""
    at, found = len(trajectory.prompt), list[int]()
    for turn in trajectory.turns:
        found.append(at)
        said = turn.result.observation if turn.bridge is not None and turn.result is not None else ""
        at += 0 if not said else 2 if isinstance(said, str) else 1 + len(said)  # after nothing the turn goes on
    return found


def _first_message(trajectory: Trajectory, segment: int, says: Sequence[int]) -> int:
    """Where the conversation of a segment begins: at the prompt, or where an agent of the endpoint began anew."""
    first = 0
    for index, (turn, after) in enumerate(pairwise(trajectory.turns)):
        opened = turn.segment < after.segment <= segment
        if opened and turn.result is not None and began_anew(turn.result.info):
            first = says[index] + 1
    return first
