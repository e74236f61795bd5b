"""The twenty invariants of exact tokens, over random conversations on every family of templates.

Invariants of the loop are held by whole episodes (`strategies.plans`: family x messages x engine), invariants of what
follows an action by `Chat` alone. Elsewhere: 12, what contents can forge (`test_bridge.py`), 17's scoring of stored ids
by an engine (`tokens/test_replay.py`), 19's other formats (`interop/test_records.py`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import random
from array import array
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentenv.core.trajectory import NO_VERSION
from agentenv.core.types import Limits, SamplingParams, StepResult, Task
from agentenv.core.views import spans_of
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.setup import EpisodeKey
from agentenv.interop.openrlhf import from_response, to_response
from agentenv.runs.records.lines import trajectory_from_dict, trajectory_to_dict
from tests.chat.families import load
from tests.chat.test_bridge import STABLE, holds_added
from tests.chat.test_families import ANSWER, FOLLOW_UPS, asks, render, says, try_render
from tests.strategies import (
    LASTING,
    OPTIONS,
    SUPPORTED,
    Talking,
    chat_of,
    generations,
    harmless,
    plans,
    play,
    playing,
    spoken,
    strange_texts,
    with_contents,
)

RERENDER = OPTIONS.map(lambda options: {**options, "history": "rerender"})
ANY_OPTIONS = OPTIONS | RERENDER


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    """Failed episodes are many here, and each would be logged."""
    logger = logging.getLogger("agentenv")
    before, logger.disabled = logger.level, False
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def examples(num):
    return settings(max_examples=num, deadline=None)


def segment_of(played, turn):
    return played.trajectory.segments[turn.segment]


def followed(played):
    """Every turn that something follows in its segment: (turn, start and end of what follows)."""
    turns = played.trajectory.turns
    for turn, after in zip(turns, [*turns, None][1:], strict=True):
        if after is not None and after.segment == turn.segment:
            yield turn, turn.end, after.start
        elif turn.bridge not in (None, "rerendered"):
            yield turn, turn.end, len(segment_of(played, turn))


# --- the loop: prompts, arrays, actions -------------------------------------------------------------------------------


@pytest.mark.long
@examples(600)
@given(plan=plans(options=ANY_OPTIONS))
def test_invariants_02_to_05_17_and_19_every_episode_leaves_a_faithful_record(plan):
    played = play(plan)
    trajectory = played.trajectory
    check_prompts_and_actions(played)
    for index, segment in enumerate(trajectory.segments):
        check_segment(trajectory, index, segment)
    again = trajectory_from_dict(json.loads(json.dumps(trajectory_to_dict(trajectory))))
    assert trajectory_to_dict(again) == trajectory_to_dict(trajectory)
    assert [repr(s.logprobs) for s in again.segments] == [repr(s.logprobs) for s in trajectory.segments]
    if trajectory.reward is not None:
        total = math.fsum(x for segment in trajectory.segments for x in segment.rewards)
        assert total == pytest.approx(trajectory.reward, abs=1e-5)
    missing = any(x is None or math.isnan(x) for c in played.sent for x in c.logprobs or [None])
    if missing and len(trajectory.segments) == 1 and len(trajectory.turns) == len(played.sent):
        assert to_response(trajectory)["rollout_log_probs"] is None


def check_prompts_and_actions(played):
    """Invariants 2, 5 and 17: what the engine was sent, and its ids and log-probabilities untouched."""
    turns, sent, requests = played.trajectory.turns, played.sent, played.engine.requests
    for turn, completion, request in zip(turns, sent, requests, strict=False):
        segment = segment_of(played, turn)
        assert request.prompt_token_ids == tuple(segment.token_ids[: turn.start])
        assert tuple(segment.token_ids[turn.start : turn.end]) == completion.token_ids
        assert turn.finish_reason == completion.finish_reason
        values = segment.logprobs[turn.start : turn.end]
        given_ = completion.logprobs or (math.nan,) * len(completion.token_ids)
        assert [repr(x) for x in values] == [repr(x) for x in array("f", given_)]
    assert all(r.prompt_token_ids == tuple(played.trajectory.segments[-1].token_ids) for r in requests[len(turns) :])
    for lost in sent[len(turns) :]:  # refused whole, with an error, or nothing at all
        error = played.trajectory.error
        assert error is not None
        assert not lost.token_ids or lost.finish_reason == "error" or "Fix the engine" in error.message


def check_segment(trajectory, index, segment):
    """Invariants 3, 4, 17, 19: equal lengths, the mask on the actions, spans over all, nothing off the mask."""
    columns = (segment.token_ids, segment.action_mask, segment.logprobs, segment.policy_versions, segment.rewards)
    assert len({len(column) for column in columns}) == 1
    turns = [turn for turn in trajectory.turns if turn.segment == index]
    edges = [edge for turn in turns for edge in (turn.start, turn.end)]
    assert edges == sorted(edges)
    assert all(turn.start < turn.end for turn in turns)
    sampled = {i for turn in turns for i in range(turn.start, turn.end)}
    assert [i for i, flag in enumerate(segment.action_mask) if flag] == sorted(sampled)
    spans = spans_of(trajectory, index)
    assert [i for span in spans for i in range(span.start, span.end)] == list(range(len(segment)))
    assert {i for span in spans if span.kind == "action" for i in range(span.start, span.end)} == sampled
    assert all(x == 0.0 for i, x in enumerate(segment.logprobs) if i not in sampled)
    ends = {turn.end - 1 for turn in turns}
    assert all(x == 0.0 for i, x in enumerate(segment.rewards) if i not in ends)


# --- what follows an action -------------------------------------------------------------------------------------------


@pytest.mark.long
@examples(200)
@given(
    family=st.sampled_from(STABLE),
    questions=st.lists(strange_texts(), min_size=2, max_size=4),
    answers=st.lists(harmless, min_size=4, max_size=4),
)
def test_invariant_06_an_episode_of_canonical_actions_is_the_rendering_of_its_conversation(family, questions, answers):
    assume(not any(holds_added(family, question) for question in questions))
    chat, messages, said = chat_of(family), [says("user", questions[0])], []
    for question, answer in zip([*questions[1:], None], answers, strict=False):
        upto = chat.encode(render(family, [*messages, says("assistant", answer), says("user", "x")]))
        tail = chat.reply([], [says("user", "x")])
        start = len(chat.encode(render(family, messages)))
        said.append([*upto[start : len(upto) - len(tail)], *chat.template.close_ids])
        messages += [says("assistant", answer), *([says("user", question)] if question is not None else [])]
    steps = [StepResult([says("user", question)]) for question in questions[1:]] + [StepResult(terminated=True)]
    trajectory, _ = episode(family, steps, said, prompt=[says("user", questions[0])], limits=Limits(9_000))
    whole = chat.encode(render(family, [*messages, says("user", "x")]))
    assert trajectory.token_ids.tolist() == whole[: len(whole) - len(tail) + len(chat.template.close_ids)]


def episode(family, steps, said, *, prompt=None, limits=None, **options):
    """A short way to run one episode; gives its record and its engine."""
    chat = chat_of(family, **options)
    engine = ScriptedEngine(said, chat.tokenizer)

    async def make():
        return Talking(steps)

    trajectory = asyncio.run(
        run_episode(
            make,
            Task(prompt or [says("user", "q")]),
            engine=engine,
            chat=chat,
            sampling=SamplingParams(),
            limits=limits or Limits(2_000),
        )
    )
    assert trajectory.error is None, trajectory.error
    return trajectory, engine


BRIDGED = [family for family in SUPPORTED if family.expected_class == "needs-bridge"]


@pytest.mark.long
@examples(600)
@given(data=st.data(), family=st.sampled_from(BRIDGED), said=LASTING)
def test_invariant_07_where_a_template_rewrites_history_all_from_the_close_on_is_its_own(data, family, said):
    shape = data.draw(st.sampled_from(family.shapes))
    new = with_contents(shape, data.draw(st.tuples(strange_texts(family), strange_texts(family))))
    assume(not any(holds_added(family, message["content"]) for message in new))
    chat = chat_of(family)
    action = list(spoken(said, chat, 50).token_ids)
    bridge = chat.bridge(action, new)
    answer = says("assistant", ANSWER)
    num_results = sum(message["role"] == "tool" for message in new)
    if num_results and chat.template.calls:
        as_json, content = chat.template.calls[0]
        answer = asks(num_results, as_json=as_json, content=content)
    text = try_render(family, [says("user", "q"), answer, *new])
    assume(text is not None and text.count(ANSWER) == 1)
    whole = chat.encode(text)
    assert bridge.ids
    assert whole[-len(bridge.ids) :] == bridge.ids
    if bridge.kind == "truncated" and chat.template.close_ids and not num_results:  # a call may end otherwise
        assert tuple(bridge.ids[: bridge.num_synthesized]) == chat.template.close_ids


@st.deferred
def closed_plans():
    closed = [family for family in SUPPORTED if chat_of(family).template.close_ids]
    return plans(said=LASTING, families=closed, rooms=st.just(2_000))


@pytest.mark.long
@examples(300)
@given(plan=closed_plans)
def test_invariant_08_there_is_one_close_between_an_action_and_the_next_header(plan):
    played = play(plan)
    close = list(played.chat.template.close_ids)
    for turn, start, end in followed(played):
        if turn.bridge == "text":
            continue
        is_tool = as_messages(turn.result.observation)[0]["role"] == "tool"
        if is_tool and played.chat.template.markers:
            continue  # calls end with the marker of the result (Gemma 4)
        ids = segment_of(played, turn).token_ids.tolist()
        action, feedback = ids[turn.start : turn.end], ids[start:end]
        tail = played.chat.reply(close, as_messages(turn.result.observation))
        assert feedback[len(feedback) - len(tail) :] == tail
        assert turn.num_synthesized == len(feedback) - len(tail)
        if is_tool:
            continue  # calls may end in another way than text
        assert [*action, *feedback[: len(feedback) - len(tail)]][-1:] in ([close[-1]], action[-1:])
        missing = {"exact": 0, "truncated": len(close), "foreign-terminator": 0, "non-canonical-close": 0}
        missing["partial-close"] = len(close) - common(action, close)
        missing["role-marker-mismatch"] = len(close)
        assert turn.num_synthesized == missing[turn.bridge]
        whole = common(action, close) == len(close)
        assert (turn.bridge == "exact", turn.bridge == "partial-close") == (
            whole,
            0 < common(action, close) < len(close),
        )


def as_messages(observation):
    return [says("user", observation)] if isinstance(observation, str) else observation


def common(action, close):
    return next((n for n in range(len(close), 0, -1) if action[-n:] == close[:n]), 0)


@pytest.mark.long
@examples(400)
@given(plan=plans(said=LASTING, options=OPTIONS))
def test_invariants_01_and_09_prompts_only_grow_and_what_closes_a_turn_for_the_model_is_masked(plan):
    played = play(plan)
    assert len(played.trajectory.segments) == 1
    for (before, after), completion in zip(pairwise(played.engine.requests), played.sent, strict=False):
        sofar = array("i", before.prompt_token_ids + completion.token_ids).tobytes()
        assert array("i", after.prompt_token_ids).tobytes().startswith(sofar)
    for turn, start, end in followed(played):
        segment, close = segment_of(played, turn), range(start, start + turn.num_synthesized)
        assert close.stop <= end
        assert not any(segment.action_mask[i] for i in range(start, end))
        assert all(segment.logprobs[i] == 0.0 for i in range(start, end))
        assert all(segment.policy_versions[i] == NO_VERSION for i in range(start, end))
        spans = [
            span for span in spans_of(played.trajectory, turn.segment) if span.start == start and span.kind == "close"
        ]
        assert [(span.start, span.end) for span in spans] == ([(close.start, close.stop)] if close else [])
        ends = played.chat.template.close_ids
        if turn.bridge == "truncated" and ends and as_messages(turn.result.observation)[0]["role"] != "tool":
            assert len(close) >= len(ends)
            assert tuple(segment.token_ids[close.stop - len(ends) : close.stop]) == ends


@pytest.mark.long
@examples(300)
@given(data=st.data(), family=st.sampled_from(SUPPORTED), ends=st.tuples(LASTING, strange_texts(), strange_texts()))
def test_invariant_10_what_follows_an_action_depends_on_its_last_tokens_only(data, family, ends):
    said, one, other = ends
    new = with_contents(data.draw(st.sampled_from(family.shapes)), [data.draw(strange_texts(family))])
    chat = chat_of(family)
    last = list(spoken(said, chat, 50).token_ids)[-len(chat.template.close_ids) - 1 :]
    before = [chat.encode(f"{text} x") for text in (one, other)]
    first, second = (chat.bridge([*history, *last], new) for history in before)
    assert first == second


@pytest.mark.long
@examples(300)
@given(data=st.data(), family=st.sampled_from(SUPPORTED), said=LASTING)
def test_invariant_11_several_messages_have_one_generation_prompt_behind_the_last(data, family, said):
    shape = data.draw(st.sampled_from([s for s in family.shapes if s in ("tools", "tool+user", "2xuser")] or ["user"]))
    new = with_contents(shape, [data.draw(harmless), data.draw(harmless)])
    chat = chat_of(family)
    before, begins = parted(family, new)
    action = list(spoken(said, chat, 50).token_ids)
    bridge = chat.bridge(action, new)
    own = 1 + before.count(begins)  # DeepSeek-Coder's results look like it
    assert squeezed(chat, bridge.ids).count("".join(begins.split())) == own or not begins
    # In two calls the second closes the turn that the first opened: there are never two openings side by side.
    for num in range(1, len(new)):
        if chat.template.close_ids and new[num]["role"] != "tool":
            second = chat.bridge([], new[num:])
            assert second.num_synthesized == len(chat.template.close_ids)


def squeezed(chat, ids):
    """Ids as text without whitespace, some of which SentencePiece makes when it decodes."""
    return "".join(chat.decode(ids).split())


def generation_prompt(family, new):
    """The text by which a rendering that asks for an answer is longer; the template's own words."""
    return parted(family, new)[1]


def parted(family, new):
    """What the template renders after an answer: all that is said, and the generation prompt behind it."""
    results = [message for message in new if message["role"] == "tool"]
    answers = [asks(len(results), as_json=j, content=c) for j in (False, True) for c in (None, "")] if results else []
    for answer in (*answers, says("assistant", ANSWER)):
        talk = [says("user", "q"), answer, *new]
        text, without = try_render(family, talk), try_render(family, talk, gen=False)
        if text is not None and without is not None and text.startswith(without) and ANSWER in text:
            return without[without.rindex(ANSWER) :], text[len(without) :]
    return "", ""


BOS = [family for family in SUPPORTED if family.bos_token is not None]
REPEATS_BOS = {"Llama-2", "Granite-3.0", "OLMo-2", "Seed-OSS"}
"""Their templates put it before every turn, or end turns with it."""


@pytest.mark.long
@examples(300)
@given(data=st.data(), family=st.sampled_from(BOS))
def test_invariant_13_the_beginning_of_sequence_comes_once_and_first(data, family):
    chat, bos = chat_of(family), load(family).bos_token_id
    texts = data.draw(st.lists(strange_texts(family), min_size=3, max_size=3))
    said = [[*chat._encoder.follow("one"), *chat.template.close_ids]]
    steps = [StepResult([says("user", text)]) for text in texts[:2]] + [StepResult(terminated=True)]
    trajectory, _ = episode(family, steps, said, prompt=[says("user", texts[2])], limits=Limits(9_000))
    places = [i for i, token in enumerate(trajectory.token_ids) if token == bos]
    talk = [says("user", "x"), says("assistant", "one"), says("user", "x"), says("assistant", "one")]
    whole = chat.encode(render(family, [*talk, says("user", "x")]))
    own = [i for i, token in enumerate(whole) if token == bos]
    if family.name in REPEATS_BOS:
        ended = said[0].count(bos)  # the last action's close, which the rendering goes on without
        assert len(places) == len(own) + ended
    else:
        assert places == own == ([0] if chat.template.renders_bos else [])


def test_only_the_named_templates_repeat_the_beginning_of_sequence():
    talk = [says("user", "x"), says("assistant", "one"), says("user", "x")]
    found = {f.name for f in BOS if chat_of(f).encode(render(f, talk)).count(load(f).bos_token_id) > 1}
    assert found == REPEATS_BOS


@pytest.mark.long
@examples(400)
@given(data=st.data(), family=st.sampled_from(SUPPORTED), said=LASTING)
def test_invariant_14_what_follows_an_action_ends_where_the_assistant_begins(data, family, said):
    shape = data.draw(st.sampled_from(family.shapes))
    new = with_contents(shape, data.draw(st.tuples(strange_texts(family), strange_texts(family))))
    chat = chat_of(family)
    begins = generation_prompt(family, [{**message, "content": "x"} for message in new])
    ids = chat.reply(list(spoken(said, chat, 50).token_ids), new)
    assert squeezed(chat, ids).endswith("".join(begins.split()))
    prompt, plain = (chat.prompt([says("user", text)]) for text in (data.draw(strange_texts(family)), "x"))
    num = len(chat._encoder.follow(begins))
    assert prompt[len(prompt) - num :] == plain[len(plain) - num :]


def test_invariant_14_most_families_mark_where_the_assistant_begins():
    without = {f.name for f in SUPPORTED if not generation_prompt(f, [says("user", "x")])}
    assert without == {
        # The user's turn ends in it: [/INST].
        "Llama-2", "Mistral v0.1", "Mixtral", "Mistral v1 (axolotl)", "Mistral v0.3", "Mistral v2v3 (axolotl)",
        "Mistral-Nemo", "Mistral-Small v7", "Mistral-Small-3.2",
        # [/INST] begins the assistant's turn, but only in the history.
        "Mistral-Small (no close of the user)",
        # They have none, or write another end in its place.
        "gpt2 (no roles)", "CodeLlama-70B", "Phi-3", "Phi-3.5", "Phi-4-mini",
    }  # fmt: skip


# --- budget, purity ---------------------------------------------------------------------------------------------------


def lengthened(plan):
    """The plan with every content of its messages many times over."""
    steps = [
        replace(step, observation=[{**message, "content": message["content"] * 9} for message in step.observation])
        if not isinstance(step.observation, str)
        else step
        for step in plan.steps
    ]
    return replace(plan, steps=steps)


CUTTING = ANY_OPTIONS | ANY_OPTIONS.map(lambda options: {**options, "long_observation": "cut"})


@pytest.mark.long
@examples(600)
@given(
    plan=plans(said=LASTING, options=CUTTING, rooms=st.sampled_from([1, 2, 12, 40, 60, 90, 150, 300])),
    is_long=st.booleans(),
)
def test_invariant_15_no_segment_is_longer_than_allowed_and_no_generation_lacks_room(plan, is_long):
    played = play(lengthened(plan) if is_long else plan)
    trajectory = played.trajectory
    assert trajectory.error is None or trajectory.error.type == "ConfigError"
    assert all(len(segment) <= trajectory.max_length for segment in trajectory.segments)
    for request in played.engine.requests:
        room = trajectory.max_length - len(request.prompt_token_ids)
        assert request.sampling.max_tokens == min(plan.max_tokens or room, room) >= 1
    for turn, start, end in followed(played):
        if not turn.observation_cut or turn.bridge == "rerendered":
            continue
        ids = segment_of(played, turn).token_ids.tolist()
        assert has_structure_of(played, turn, ids[turn.start : turn.end], ids[start:end])


def has_structure_of(played, turn, action, feedback):
    """Whether the added tokens of what follows are those that any short content has around it."""
    observation = turn.result.observation
    roles = ["user"] if isinstance(observation, str) else [message["role"] for message in observation]
    if played.chat.options.tool_role == "user" and "tool" not in played.chat.template.shapes:
        return True  # merged into fewer messages; `test_dialogue.py` has these
    new = [{**FOLLOW_UPS.get(role, FOLLOW_UPS["user"])[0], "role": role, "content": "x"} for role in roles]
    known = played.chat._encoder.added_ids
    bridge = played.chat.bridge(action, new)
    return [i for i in feedback if i in known] == [i for i in bridge.ids if i in known]


def state_of(tokenizer):
    """What of a tokenizer could be changed by using it."""
    backend = tokenizer._tokenizer
    flags = (backend.encode_special_tokens, backend.truncation, backend.padding, tokenizer.chat_template)
    return *flags, tuple(tokenizer.all_special_ids), len(tokenizer)


@pytest.mark.long
@examples(300)
@given(plan=plans(options=ANY_OPTIONS))
def test_invariant_16_an_episode_changes_nothing_that_it_was_given(plan):
    tokenizer = load(plan.family)
    before = copy.deepcopy((plan.prompt, plan.steps, plan.said)), state_of(tokenizer)
    first = play(plan)
    assert ((plan.prompt, plan.steps, plan.said), state_of(tokenizer)) == before
    assert first.sampling == SamplingParams(max_tokens=plan.max_tokens)
    again = play(plan)
    assert record(first) == record(again)


def record(played):
    """An episode's record as bytes, without times and lines of code."""
    values = trajectory_to_dict(played.trajectory)
    values["wait_s"], values["began_s"] = 0.0, None
    if values["error"]:
        values["error"]["place"] = values["error"]["traceback"] = ""
    for turn in values["turns"]:
        turn["generate_s"] = turn["step_s"] = turn["began_s"] = 0.0
    return json.dumps(values, sort_keys=True)


@pytest.mark.long
@examples(80)
@given(batch=st.lists(plans(options=ANY_OPTIONS), min_size=2, max_size=4), seed=st.integers(0, 1 << 32))
def test_invariant_16_episodes_at_the_same_time_do_not_touch_each_other(batch, seed):
    rng = random.Random(seed)

    class Slow(ScriptedEngine):
        async def generate(self, prompt_token_ids, sampling, *, request_id):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            return await super().generate(prompt_token_ids, sampling, request_id=request_id)

    async def together():
        keys = [EpisodeKey(f"{index}") for index in range(len(batch))]
        return await asyncio.gather(*(playing(p, engine_of=Slow, key=key) for p, key in zip(batch, keys, strict=True)))

    apart = [asyncio.run(playing(p, key=EpisodeKey(f"{i}"))) for i, p in enumerate(batch)]
    assert [record(played) for played in asyncio.run(together())] == [record(played) for played in apart]


# --- versions, other formats -----------------------------------------------------------------------


async def run_with(family, engine, agent, *, max_turns=3, **options):
    async def make():
        return agent

    limits = Limits(2_000, max_turns=max_turns)
    chat = chat_of(family, **options)
    return await run_episode(
        make, Task([says("user", "q")]), engine=engine, chat=chat, sampling=SamplingParams(), limits=limits
    )


@pytest.mark.long
@examples(300)
@given(plan=plans(said=generations("close", "cut", "foreign"), options=ANY_OPTIONS))
def test_invariant_18_versions_part_each_action_where_the_weights_changed(plan):
    played = play(plan)
    for turn, completion in zip(played.trajectory.turns, played.sent, strict=False):
        versions = list(segment_of(played, turn).policy_versions[turn.start : turn.end])
        assert versions == sorted(versions) == list(completion.policy_versions or [2] * len(versions))
        runs = [(version, len(list(run))) for version, run in groupby(versions)]
        said = plan.said[min(played.trajectory.turns.index(turn), len(plan.said) - 1)]
        if said.swap:
            first = min(said.swap, len(versions))
            assert runs == [(3, first), *([(5, len(versions) - first)] if len(versions) > first else [])]
    again = trajectory_from_dict(json.loads(json.dumps(trajectory_to_dict(played.trajectory))))
    assert [s.policy_versions for s in again.segments] == [s.policy_versions for s in played.trajectory.segments]


@pytest.mark.long
@examples(200)
@given(plan=plans(said=generations("close", "cut", "foreign"), options=OPTIONS))
def test_invariant_19_openrlhfs_response_keeps_tokens_actions_and_reward(plan):
    played = play(plan)
    trajectory = played.trajectory
    assume(trajectory.reward is not None)
    response = to_response(trajectory)
    made = from_response(response, played.task, max_length=trajectory.max_length, decode=played.chat.action_text)
    assert made.token_ids == trajectory.token_ids
    assert made.action_mask == trajectory.action_mask
    assert [(turn.start, turn.end) for turn in made.turns] == [(turn.start, turn.end) for turn in trajectory.turns]
    assert (made.reward, made.truncated) == (pytest.approx(trajectory.reward), trajectory.truncated)
    if response["rollout_log_probs"] is not None:
        assert made.logprobs == trajectory.logprobs
    assert to_response(made)["observation_tokens"] == response["observation_tokens"]


# --- cancellation, failures at any moment -----------------------------------------------------------------------------


class Waiting(Talking):
    """Gives way in every method, and fails in one of them if it is told to."""

    fails = None
    num_closed = 0

    async def _pass(self, name):
        await asyncio.sleep(0)
        if self.fails == name:
            raise RuntimeError(name)
        await asyncio.sleep(0)

    async def reset(self, states):
        await self._pass("reset")
        return states

    async def step(self, states):
        await self._pass("step")
        return await super().step(states)

    async def on_truncate(self, states):
        await self._pass("on_truncate")

    async def close(self):
        self.num_closed += 1
        await self._pass("close")


class Watched(ScriptedEngine):
    """Knows which requests are under way, and fails at one if it is told to."""

    fails_at = None
    in_flight = 0

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        self.in_flight += 1
        try:
            await asyncio.sleep(0)
            if len(self.requests) == self.fails_at:
                raise RuntimeError("generate")
            return await super().generate(prompt_token_ids, sampling, request_id=request_id)
        finally:
            self.in_flight -= 1


def check_whole(trajectory):
    """A valid record, however short: no action by halves, nothing off the mask."""
    assert trajectory.stop_reason is not None
    for index, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == index]
        assert sum(segment.action_mask) == sum(turn.end - turn.start for turn in turns)
        assert len(segment.token_ids) == len(segment.logprobs) == len(segment.rewards)
        assert spans_of(trajectory, index) == [] or spans_of(trajectory, index)[-1].end == len(segment)
    assert all(turn.result is not None for turn in trajectory.turns[:-1])
    trajectory_from_dict(json.loads(json.dumps(trajectory_to_dict(trajectory))))


def check_grown_by_whole_steps(trajectory, engine):
    """Every request was sent what stands before its action, or all there is where none came of it."""
    for index, request in enumerate(engine.requests):
        turn = trajectory.turns[index] if index < len(trajectory.turns) else None
        segment = trajectory.segments[-1 if turn is None else turn.segment]
        assert request.prompt_token_ids == tuple(segment.token_ids[: None if turn is None else turn.start])


@pytest.mark.long
@examples(150)
@given(
    plan=plans(options=ANY_OPTIONS),
    fails=st.sampled_from(["reset", "step", "on_truncate", "close", None]),
    at=st.sampled_from([None, 0, 1, 2]),
)
def test_invariant_20_a_failure_anywhere_leaves_a_whole_record(plan, fails, at):
    agent = Waiting(plan.steps)
    agent.fails = fails
    chat, sent = chat_of(plan.family, **plan.options), []
    engine = Watched(
        lambda r: sent.append(spoken(plan.said[min(r.turn_index, len(plan.said) - 1)], chat, 12)) or sent[-1],
        chat.tokenizer,
    )
    engine.fails_at = at
    trajectory = asyncio.run(run_with(plan.family, engine, agent, **plan.options))
    check_whole(trajectory)
    check_grown_by_whole_steps(trajectory, engine)
    assert (engine.in_flight, agent.num_closed) == (0, 1)
    if fails in ("reset", "step") and engine.requests == [] and at != 0:
        assert trajectory.error is not None
    assert (trajectory.reward is None) == (
        trajectory.error is not None or not trajectory.turns or any(t.result is None for t in trajectory.turns)
    )
