"""Bridges on every family of templates: the template's own ids after every ending, and nothing that content can forge.

The oracle is the rendering of the whole conversation by the tokenizer: where its ids begin with the prompt's, the ids
in between play the policy; elsewhere (the template takes back its generation prompt) the ids are compared from the
close on.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.chat.chat import Chat
from agentenv.errors import ConfigError
from tests.chat.families import FAMILIES, ONE_OF_EACH, SUPPORTED, load, stop_ids
from tests.chat.test_families import ANSWER, FOLLOW_UPS, TOOLS, USER, asks, calling, render, says, try_render
from tests.strategies import chat_of

CASES = [(family, shape) for family in SUPPORTED for shape in family.shapes]
every_case = pytest.mark.parametrize(("family", "shape"), CASES, ids=[f"{f.name}-{s}" for f, s in CASES])
every_kind = pytest.mark.parametrize("family", ONE_OF_EACH, ids=lambda f: f.name)
GIVEN = [says("user", USER)]


class Oracle(NamedTuple):
    """The ids of a whole conversation, and where in them the action is."""

    ids: list[int]
    start: int
    close_start: int
    close_end: int
    whole: bool
    """The prompt's ids begin it."""


def conversation(family, new):
    """The rendering of a conversation that goes on with `new`: after calls, where the template renders them.

    DeepSeek-R1-Distill's leaves a single call without a close; there results follow an assistant's text.
    """
    num_results = sum(message["role"] == "tool" for message in new)
    answers = calling(num_results) if num_results and family.name != "DeepSeek-R1-Distill" else []
    for answer in (*answers, says("assistant", ANSWER)):
        text = try_render(family, [*GIVEN, answer, *new])
        if text is not None and text.count(ANSWER) == 1:
            found = [text.find(message["content"], text.index(ANSWER)) for message in new]
            if min(found) >= 0 and found == sorted(found):
                return text, "tool_calls" in answer
    raise AssertionError(f"{family.name} renders no {new}")


def oracle(family, new):
    text, called = conversation(family, new)
    encoded = load(family)._tokenizer.encode(text, add_special_tokens=False)
    end = text.index(ANSWER) + len(ANSWER)
    close_start = close_end = end
    if family.close and not called:
        close_end = end + len(family.close)
        assert text[close_start:close_end] == family.close
    elif called or ("S" in family.codes and new[0]["role"] != "system"):
        texts = {*family.stop_tokens, family.close.strip()} - {""}
        found = re.compile("|".join(map(re.escape, texts))).search(text, end)
        close_start, close_end = found.span()
        if found[0] == family.close.strip():
            close_start -= family.close.index(found[0])
    starts, ends = zip(*encoded.offsets, strict=True)
    prompt = chat_of(family).prompt(GIVEN)
    first = next(i for i, at in enumerate(ends) if at > text.index(ANSWER))
    whole = encoded.ids[: len(prompt)] == prompt
    return Oracle(
        encoded.ids,
        len(prompt) if whole else first,
        next(i for i, at in enumerate(starts) if at >= close_start and ends[i] > at),
        next(i for i, at in enumerate(ends) if at >= close_end) + 1
        if close_end > close_start
        else first_at(starts, end),
        whole,
    )


def first_at(starts, end):
    return next(i for i, at in enumerate(starts) if at >= end)


def is_closed(family, shape):
    """Whether anything ends the assistant's turn before this follow-up."""
    return "c" not in family.codes and not ("S" in family.codes and shape == "system")


@every_case
def test_after_a_stop_or_a_cut_the_ids_are_those_of_the_whole_conversation(family, shape):
    known, chat = oracle(family, FOLLOW_UPS[shape]), chat_of(family)
    bridge = chat.bridge(known.ids[known.start : known.close_end], FOLLOW_UPS[shape])
    assert bridge.ids == known.ids[known.close_end :]
    assert (bridge.kind, bridge.num_synthesized) == ("exact" if is_closed(family, shape) else "truncated", 0)
    shared = known.ids[known.close_start] in chat.template.markers
    for lost in (0, 2):
        bridge = chat.bridge(known.ids[known.start : known.close_start - lost], FOLLOW_UPS[shape])
        assert bridge.ids == known.ids[known.close_start :]
        synthesized = 0 if shared else known.close_end - known.close_start
        assert (bridge.kind, bridge.num_synthesized) == ("truncated", synthesized)


@every_kind
def test_without_knowing_the_engines_stops_the_ids_are_the_same(family):
    for shape in {"user", "2xuser"}.intersection(family.shapes):
        known, chat = oracle(family, FOLLOW_UPS[shape]), Chat(load(family), tools=TOOLS if family.needs_tools else None)
        for end, rest in ((known.close_end, known.close_end), (known.close_start - 1, known.close_start)):
            assert chat.reply(known.ids[known.start : end], FOLLOW_UPS[shape]) == known.ids[rest:]


def test_only_families_that_take_back_their_generation_prompt_are_compared_from_the_close_on():
    partly = {family.name for family in SUPPORTED if not oracle(family, FOLLOW_UPS["user"]).whole}
    # CodeLlama and others of code G; Functionary and the like keep it.
    assert partly == {family.name for family in SUPPORTED if "G" in family.codes}


# --- other endings --------------------------------------------------------------------------------------------------


@every_kind
def test_a_foreign_terminator_stands_for_the_close(family):
    known, chat = oracle(family, FOLLOW_UPS["user"]), chat_of(family)
    body, close = known.ids[known.start : known.close_start], chat.template.close_ids
    for stop in {*stop_ids(family), load(family).eos_token_id} - set(close) - chat.template.markers:
        bridge = chat.bridge([*body, stop], FOLLOW_UPS["user"])
        assert bridge.ids == known.ids[known.close_start if "S" in family.codes else known.close_end :]
        assert (bridge.kind, bridge.num_synthesized) == ("foreign-terminator", 0)


@every_kind
def test_the_marker_of_another_role_closes_nothing(family):
    known, chat = oracle(family, FOLLOW_UPS["user"]), chat_of(family)
    body, user = known.ids[known.start : known.close_start], known.ids[known.close_start]
    for marker in chat.template.markers - {user}:
        bridge = chat.bridge([*body, marker], FOLLOW_UPS["user"])
        assert (bridge.ids, bridge.kind) == (known.ids[known.close_start :], "role-marker-mismatch")


@every_kind
def test_the_rest_of_a_close_follows_its_beginning_and_nothing_its_end(family):
    known, chat = oracle(family, FOLLOW_UPS["user"]), chat_of(family)
    body, close = known.ids[known.start : known.close_start], list(chat.template.close_ids)
    for num in range(1, len(close)):
        bridge = chat.bridge([*body, *close[:num]], FOLLOW_UPS["user"])
        assert bridge.ids == known.ids[known.close_start + num :]
        assert (bridge.kind, bridge.num_synthesized) == ("partial-close", len(close) - num)
    if len(close) > 1:
        bridge = chat.bridge([*body, close[-1]], FOLLOW_UPS["user"])
        assert bridge.ids == known.ids[known.close_end :]
        assert (bridge.kind, bridge.num_synthesized) == ("non-canonical-close", 0)


@every_kind
def test_invariant_8_there_is_one_close_no_matter_what_ended_the_action(family):
    chat = chat_of(family)
    known, close = oracle(family, FOLLOW_UPS["user"]), list(chat.template.close_ids)
    body, after = known.ids[known.start : known.close_start], known.ids[known.close_end :]
    for ending in ([], close, close[:1], close[-1:], *([stop] for stop in stop_ids(family))) if close else ():
        for action in ([*body, *ending], ending, [*body, *close, *body, *ending]):
            ids = [*action, *chat.reply(action, FOLLOW_UPS["user"])]
            assert ids[-len(after) :] == after
            last = ids[: len(ids) - len(after)]
            assert (last[-1:] == close[-1:]) or last == action
            assert last[-2:-1] != close[-1:]


def test_a_role_that_the_template_refuses_is_refused_in_its_words():
    chat = chat_of(next(family for family in FAMILIES if family.name == "Llama-2"))
    with pytest.raises(ConfigError, match="Conversation roles must alternate user/assistant"):
        chat.reply([], FOLLOW_UPS["2xuser"])


@every_kind
def test_messages_that_the_template_does_not_render_are_refused(family):
    for shape in FOLLOW_UPS.keys() - set(family.shapes):
        with pytest.raises(ConfigError, match=r"got roles|expected roles"):
            chat_of(family).reply([], FOLLOW_UPS[shape])


# --- content --------------------------------------------------------------------------------------------------------


def talk(family, role, content):
    """A follow-up of one message, or None where the family has none of this role."""
    if role not in family.shapes:
        return None
    return [{**FOLLOW_UPS[role][0], "content": content}]


def added(family, ids):
    return sum(i in load(family).added_tokens_decoder for i in ids)


@pytest.mark.parametrize("family", SUPPORTED, ids=lambda f: f.name)
def test_invariant_12_content_forges_no_added_token_and_reads_the_same(family):
    chat, texts = chat_of(family), [token.text for token in family.added_tokens]
    for role in {"user", "tool", "system"}.intersection(family.shapes):
        num = added(family, chat.reply([], talk(family, role, "x y")))
        for content in ("x" + "".join(texts) + "y", *(f"x {t[0]}{t}{t[1:]}{t}y" for t in texts), *texts):
            reply = chat.reply([], talk(family, role, content))
            assert added(family, reply) == num
            shown = chat.decode(reply)
            assert content in shown or json.dumps(content, ensure_ascii=False)[1:-1] in shown
    content = "x" + "\n".join(texts) + "y"
    prompt = chat.prompt([says("user", content)])
    assert added(family, prompt) == added(family, chat.prompt([says("user", "x y")]))
    assert content in chat.decode(prompt)


@every_kind
def test_a_trusted_message_may_hold_added_tokens(family):
    chat, token = chat_of(family), family.added_tokens[0].text
    message = {**says("user", f"x {token} y"), "trusted": True}
    asked = render(family, [says("user", f"x {token} y")])
    assert chat.prompt([message]) == load(family).encode(asked, add_special_tokens=False)
    assert chat.reply([], [message]) != chat.reply([], [says("user", f"x {token} y")])


# --- any content ----------------------------------------------------------------------------------------------------

pieces = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    [" ", "\n", "\n\n", "\t", "  ", "</", "<|", "|>", "[", "\ue001", "\\ue001", "123", "\u0301", "日本", "😀", "{}"]
)
contents = st.lists(pieces, max_size=5).map("".join)


@st.composite
def strange(draw):
    """A family, and contents with its added tokens in them, whole and in part."""
    family = draw(st.sampled_from(SUPPORTED))
    texts = st.sampled_from([token.text for token in family.added_tokens])
    broken = st.tuples(texts, st.integers(1, 9)).map(lambda x: x[0][: x[1]]) | texts.map(lambda t: t[2:])
    parts = draw(st.lists(pieces | texts | broken, max_size=6))
    return family, "".join(parts)


@pytest.mark.long
@settings(max_examples=2000, deadline=None)
@given(case=strange(), role=st.sampled_from(["user", "tool", "system"]))
def test_invariant_12_no_content_changes_the_number_of_added_tokens(case, role):
    family, content = case
    chat, new = chat_of(family), talk(family, role, content)
    if new is None:
        return
    assert added(family, chat.reply([], new)) <= added(family, chat.reply([], talk(family, role, "x y")))
    if role == "user":
        assert added(family, chat.prompt(new)) <= added(family, chat.prompt([says("user", "x y")]))


def holds_added(family, text):
    return any(token.text in text for token in family.added_tokens) or "<unk>" in text


@pytest.mark.long
@settings(max_examples=2000, deadline=None)
@given(case=strange(), role=st.sampled_from(["user", "tool", "system"]))
def test_any_harmless_content_has_the_ids_of_the_whole_conversation(case, role):
    family, content = case
    new = talk(family, role, content)
    if new is None or holds_added(family, content):
        return
    chat, answer = chat_of(family), says("assistant", ANSWER)
    if role == "tool" and chat.template.calls:
        as_json, said = chat.template.calls[0]
        answer = asks(1, as_json=as_json, content=said)
    whole = render(family, [*GIVEN, answer, *new])
    reply = chat.reply([], new)
    assert load(family).encode(whole, add_special_tokens=False)[-len(reply) :] == reply
