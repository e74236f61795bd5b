"""The invariants of exact tokens that are the loop's, over random conversations on every family of templates.

They are held by whole episodes (`strategies.plans`: family x messages x engine). Elsewhere: 6 to 8, 11 to 14, what
follows an action is the template's own and forged by nothing (`test_bridge.py`), 17's scoring of stored ids by an
engine (`tokens/test_replay.py`), 19's other formats (`interop/test_records.py`).
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
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentenv.core.trajectory import NO_VERSION
from agentenv.core.types import Limits, SamplingParams, Task
from agentenv.core.views import spans_of
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.setup import EpisodeKey
from agentenv.interop.openrlhf import from_response, to_response
from agentenv.runs.records.lines import trajectory_from_dict, trajectory_to_dict
from tests.chat.families import load
from tests.chat.test_families import FOLLOW_UPS, says
from tests.strategies import (
    LASTING,
    OPTIONS,
    SUPPORTED,
    Talking,
    chat_of,
    generations,
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
def test_invariants_02_to_05_and_17_to_19_every_episode_leaves_a_faithful_record(plan):
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
    """Invariants 2, 5, 17 and 18: what the engine was sent, and its ids, log-probabilities and versions untouched."""
    turns, sent, requests = played.trajectory.turns, played.sent, played.engine.requests
    for turn, completion, request in zip(turns, sent, requests, strict=False):
        segment = segment_of(played, turn)
        assert request.prompt_token_ids == tuple(segment.token_ids[: turn.start])
        assert tuple(segment.token_ids[turn.start : turn.end]) == completion.token_ids
        assert turn.finish_reason == completion.finish_reason
        values = segment.logprobs[turn.start : turn.end]
        given_ = completion.logprobs or (math.nan,) * len(completion.token_ids)
        assert [repr(x) for x in values] == [repr(x) for x in array("f", given_)]
        versions = completion.policy_versions or (completion.policy_version,) * len(completion.token_ids)
        assert tuple(segment.policy_versions[turn.start : turn.end]) == versions
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


def as_messages(observation):
    return [says("user", observation)] if isinstance(observation, str) else observation


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
    assert (made.reward, made.truncated) == (pytest.approx(trajectory.reward), response["truncated"])
    if response["rollout_log_probs"] is not None:
        assert made.logprobs == trajectory.logprobs
    assert [to_response(made)[key] == response[key] for key in ("observation_tokens", "truncated")] == [True, True]


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
        check_segment(trajectory, index, segment)
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
    limits = Limits(2_000, max_turns=3)

    async def make():
        return agent

    trajectory = asyncio.run(run_episode(make, Task([says("user", "q")]), engine=engine, chat=chat, limits=limits))
    check_whole(trajectory)
    check_grown_by_whole_steps(trajectory, engine)
    assert (engine.in_flight, agent.num_closed) == (0, 1)
    if fails in ("reset", "step") and engine.requests == [] and at != 0:
        assert trajectory.error is not None
    assert (trajectory.reward is None) == (
        trajectory.error is not None or not trajectory.turns or any(t.result is None for t in trajectory.turns)
    )
