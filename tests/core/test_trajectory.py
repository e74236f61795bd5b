"""The record of an episode: what may be appended, what rewards mean, and views of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core.trajectory import EpisodeError, Segment, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.core.views import messages_of, spans_of

MAX_LENGTH = 24


def test_a_record_of_any_size_is_one_bounded_line():
    trajectory = Trajectory(Task("Q", task_id="7"), 10**6, episode_id="7/0" * 100)
    trajectory.append_observation([1] * 5000)
    trajectory.append_turn(Completion((2,) * 5000), "say\n\x1b[2J" * 5000)
    trajectory.set_result(StepResult(reward=0.5))
    trajectory.finish(StopReason.ERROR, EpisodeError("env", "KeyError", "'x'" * 5000, "step", "/e.py:3", "Trace" * 800))
    for record in (trajectory, trajectory.turns[0], trajectory.segments[0]):
        shown = repr(record)
        assert shown.isprintable()
        assert len(shown) < 250
    assert "KeyError in step" in repr(trajectory)
    assert "reward=0.5, stop, 5000 tokens" in repr(trajectory.turns[0])
    assert repr(trajectory.segments[0]) == "Segment(10000 tokens, 5000 of actions)"


def test_a_missing_logprob_is_nan_and_never_zero():
    trajectory = one_turn(logprobs=None)
    assert [math.isnan(x) for x in trajectory.logprobs] == [False, True, True]


def test_an_action_needs_a_token_before_it():
    with pytest.raises(ValueError, match="after at least one prompt token, got 1 after 0"):
        Segment().append_action(Completion((1,)))


def test_a_shifted_logprob_is_refused_with_both_lengths_and_leaves_the_segment_as_it_was():
    segment = Segment()
    segment.append_observation([1])
    with pytest.raises(ValueError, match="for each of 2 tokens, got 1 and 2"):
        segment.append_action(Completion((1, 2), logprobs=(-1.0,)))
    columns = segment.token_ids, segment.action_mask, segment.logprobs, segment.policy_versions, segment.rewards
    assert [len(column) for column in columns] == [1] * 5


def test_max_length_is_a_wall_for_observations_and_actions():
    trajectory = Trajectory(Task("q"), 4)
    trajectory.append_observation([1, 2, 3])
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        trajectory.append_observation([4, 5])
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        trajectory.append_turn(Completion((4, 5)), "")
    trajectory.append_turn(Completion((4,)), "")
    assert trajectory.num_tokens == 4


@pytest.mark.parametrize("end", [{"terminated": True}, {"truncated": True}])
def test_nothing_is_appended_after_the_last_step(end):
    trajectory = one_turn(result=StepResult(**end))
    with pytest.raises(ValueError, match="no token after the last step"):
        trajectory.append_observation([1])


def test_nothing_is_appended_after_the_end():
    trajectory = one_turn()
    trajectory.finish(StopReason.MAX_TURNS)
    with pytest.raises(ValueError, match="The episode is over"):
        trajectory.append_turn(Completion((1,)), "")


def test_the_first_stop_reason_stays():
    trajectory = one_turn()
    trajectory.finish(StopReason.TERMINATED)
    trajectory.finish(StopReason.ERROR, EpisodeError("env", "ValueError", "late"))
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.TERMINATED, None)


def test_the_reward_is_the_sum_over_turns_and_the_score_the_last_one_given():
    trajectory = one_turn(result=StepResult(reward=0.25, score=0.5))
    for result in (StepResult(reward=0.5, score=0.75), StepResult(reward=-1.0)):
        trajectory.append_turn(Completion((1,)), "")
        trajectory.set_result(result)
    trajectory.finish(StopReason.MAX_TURNS)
    assert (trajectory.reward, trajectory.score) == (-0.25, 0.75)


def test_a_later_result_of_the_same_turn_replaces_its_reward():
    trajectory = one_turn(result=StepResult(reward=0.25))
    trajectory.set_result(StepResult(reward=1.0))
    assert trajectory.segments[0].rewards.tolist() == [0.0, 0.0, 1.0]


def test_a_turn_without_a_result_leaves_the_reward_unknown():
    trajectory = one_turn(result=StepResult(reward=1.0, score=1.0))
    trajectory.append_turn(Completion((1,)), "")
    trajectory.finish(StopReason.STEP_TIMEOUT)
    assert (trajectory.reward, trajectory.score) == (None, None)


@pytest.mark.parametrize("reason", [StopReason.ERROR, StopReason.ABORTED])
def test_a_failed_episode_has_neither_reward_nor_score(reason):
    trajectory = one_turn(result=StepResult(reward=1.0, score=1.0))
    trajectory.finish(reason)
    assert (trajectory.reward, trajectory.score) == (None, None)


def one_turn(result=None, logprobs=(-0.5, -0.5)):
    trajectory = Trajectory(Task("q"), MAX_LENGTH)
    trajectory.append_observation([9])
    trajectory.append_turn(Completion((1, 2), logprobs=logprobs), "ab")
    if result is not None:
        trajectory.set_result(result)
    return trajectory


def talk(*replies):
    """An episode whose prompt [1, 2] and actions [3, 4] are followed by these replies: (ids, options) or a segment."""
    trajectory = Trajectory(Task("q"), 99, prompt=[{"role": "user", "content": "q"}])
    trajectory.append_observation([1, 2])
    for number, reply in enumerate(replies):
        trajectory.append_turn(Completion((3, 4), logprobs=(-1.0, -1.0)), f"a{number}")
        said = "" if reply is None or (reply[1].get("bridge") == "exact" and not reply[0]) else f"r{number}"
        trajectory.set_result(StepResult(said, reward=1.0))
        if reply is not None and reply[1].get("new"):
            trajectory.open_segment(reply[0])
        elif reply is not None:
            trajectory.append_observation(reply[0], **reply[1])
    return trajectory


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=4))
def test_spans_cover_every_token_once_and_in_order(shapes):
    replies = [
        ([9] * (close + num or 1), {"new": True} if new else {"bridge": "truncated", "num_synthesized": close})
        for close, num, new in shapes
    ]
    trajectory = talk(*replies, None)
    for index, segment in enumerate(trajectory.segments):
        spans = spans_of(trajectory, index)
        assert [i for span in spans for i in range(span.start, span.end)] == list(range(len(segment)))
        acted = [(span.start, span.end) for span in spans if span.kind == "action"]
        assert acted == [(turn.start, turn.end) for turn in trajectory.turns if turn.segment == index]
        closes = sum(span.end - span.start for span in spans if span.kind == "close")
        assert closes == sum(turn.num_synthesized for turn in trajectory.turns if turn.segment == index)
    assert sum(
        span.kind == "prompt" for i in range(len(trajectory.segments)) for span in spans_of(trajectory, i)
    ) == len(trajectory.segments)


def test_a_span_says_whose_tokens_they_are():
    spans = spans_of(talk(([8, 9, 9], {"bridge": "truncated", "num_synthesized": 1}), None))
    assert [(s.kind, s.start, s.end, s.turn) for s in spans] == [
        ("prompt", 0, 2, -1), ("action", 2, 4, 0), ("close", 4, 5, 0), ("feedback", 5, 7, 0), ("action", 7, 9, 1),
    ]  # fmt: skip


def test_a_new_segment_has_its_own_actions_and_rewards():
    trajectory = talk(([7, 7, 7], {"new": True}), None)
    first, second = trajectory.segments
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2, 3, 4], [7, 7, 7, 3, 4])
    assert (first.rewards.tolist(), second.rewards.tolist()) == ([0, 0, 0, 1], [0, 0, 0, 0, 1])
    assert [(turn.segment, turn.start, turn.bridge) for turn in trajectory.turns] == [
        (0, 2, "rerendered"),
        (1, 3, None),
    ]
    with pytest.raises(ValueError, match="expected one segment, got 2"):
        _ = trajectory.token_ids


def test_a_new_segment_has_the_whole_length_to_itself():
    trajectory = Trajectory(Task("q"), 6)
    trajectory.append_observation([1, 2])
    trajectory.append_turn(Completion((3, 4, 5)), "a")
    trajectory.set_result(StepResult("r"))
    with pytest.raises(ValueError, match="at most 6 tokens, got 7"):
        trajectory.open_segment([9] * 7)
    trajectory.open_segment([9] * 5)
    assert len(trajectory.segments[1]) == 5


def test_the_conversation_has_a_role_for_every_text():
    said = messages_of(talk(([8], {"bridge": "exact"}), None))
    assert said == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a0"},
        {"role": "user", "content": "r0"},
        {"role": "assistant", "content": "a1"},
    ]


def test_raw_text_in_a_conversation_has_no_role():
    assert messages_of(talk(([8], {"bridge": "text"}), None)) is None
    assert messages_of(Trajectory(Task("q"), MAX_LENGTH, prompt="q")) is None


def test_after_an_empty_observation_the_turn_continues():
    said = messages_of(talk(([], {"bridge": "exact"}), None))
    assert said == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a0a1"}]
