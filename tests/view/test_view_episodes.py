"""Any episode on its way to the page: each token in one span, its text, and the learner's numbers in the same order."""

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.trajectory import Segment, Trajectory
from agentenv.core.types import StopReason, Task
from agentenv.core.views import spans_of
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.index import read_index
from agentenv.runs.records.steps import append_rows
from agentenv.runs.records.token_stats import TOKEN_STATS, TokenStats, hash_actions, sampled_tokens
from agentenv.view.episodes import episode_view, read_episodes
from agentenv.view.tail import LearnedLines
from agentenv.view.texts import load_texts
from agentenv.view.viewed import find_runs
from tests.runs.test_serialize import trajectories
from tests.view.viewed_runs import episode, tiny_math, write_run


def finished(episodes):
    """The episodes with an end and an id of their own."""
    for number, each in enumerate(episodes):
        if each.stop_reason is None:
            each.finish(StopReason.MAX_TURNS)
        yield replace(each, episode_id=f"{each.episode_id}{number}")


def shown(folder, episodes: list[Trajectory]):
    """What the page gets of episodes, with a number of the learner for each of their sampled tokens."""
    rows = []
    with RunWriter.open(folder, {"flags": {}}) as writer:
        writer.append_all(episodes)
    for each in episodes:
        tokens = sampled_tokens(each)
        numbers = [k / 4 for k in range(len(tokens))]
        rows.append(TokenStats(1, each.episode_id, hash_actions(tokens), numbers, numbers).to_dict())
    append_rows(folder / TOKEN_STATS, rows)
    (run,) = find_runs([str(folder)])
    places = [(row[0], row[1]) for row in read_index(folder)]
    return json.loads(read_episodes(run, places, None, learned=LearnedLines(run).of).to_json())["episodes"]


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=6))
def test_each_token_is_in_one_span_and_has_the_numbers_of_its_place_in_the_record(tmp_path_factory, drawn):
    episodes = list(finished(drawn))
    for trajectory, entry in zip(episodes, shown(tmp_path_factory.mktemp("run"), episodes), strict=True):
        record, view = entry["record"], entry["view"]
        noted = view["learned"]
        before = 0
        for index, (segment, known) in enumerate(zip(view["segments"], record["segments"], strict=True)):
            spans = [tuple(span[:4]) for span in segment["spans"]]
            assert spans == [(s.start, s.end, s.kind, s.turn) for s in spans_of(trajectory, index)]
            covered = [at for start, end, *_ in spans for at in range(start, end)]
            assert covered == list(range(len(known["token_ids"])))
            places = [at for start, end in known["action_spans"] for at in range(start, end)]
            assert places == [at for at, is_action in enumerate(trajectory.segments[index].action_mask) if is_action]
            assert len(known["logprobs"]) == len(places) == sum(num for _, num in known["policy_versions"])
            own = [k / 4 for k in range(before, before + len(places))]
            assert noted["logprobs"][before : before + len(places)] == own
            before += len(places)
        assert before == len(noted["advantages"]) == len(noted["logprobs"])


cached_tiny_math = cache(tiny_math)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return load_texts(find_runs([str(write_run(tmp_path_factory.mktemp("run"), episode()))])[0])


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_texts_of_tokens_joined_are_the_text_whatever_bytes_they_share(texts, text):
    tokenizer = cached_tiny_math()
    trajectory = episode("a/0", action=text, tokenizer=tokenizer)
    table = {}
    (segment,) = episode_view(trajectory, texts, table)["segments"]
    own = dict(map(tuple, segment["texts"]))
    joined = "".join(own.get(at, table[token]) for at, token in enumerate(trajectory.token_ids))
    assert joined == tokenizer.decode(list(trajectory.token_ids), skip_special_tokens=False)


def shown_text(texts, trajectory, segment=0):
    """What the page shows of the first span of a segment while template tokens are hidden."""
    table = {}
    view = episode_view(trajectory, texts, table)["segments"][segment]
    ids = trajectory.segments[segment].token_ids
    return ["".join(table[token] for token in ids[start:end]) for start, end in view["spans"][0][4]]


def test_a_prompt_that_a_template_renders_from_more_than_its_messages_is_shown_without_roles(texts):
    tokenizer = cached_tiny_math()
    trajectory = Trajectory(Task([{"role": "user", "content": "How many?"}], task_id="a"), 999, "a/0", "a")
    trajectory.tools = ({"type": "function", "function": {"name": "add"}},)
    text = (
        "<|im_start|>system\nCall add. user\n<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    trajectory.append_observation(list(tokenizer.encode(text, add_special_tokens=False)))
    assert shown_text(texts, trajectory) == ["Call add. user\n", "\n", "How many?", "\n"]


def test_a_later_segment_of_which_an_agent_left_messages_out_is_shown_without_roles(texts):
    tokenizer = cached_tiny_math()
    trajectory = episode("a/0", prompt="How many?", action="3", observation="No.", tokenizer=tokenizer)
    again = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    trajectory.segments.append(Segment())
    trajectory.segments[1].append_observation(list(tokenizer.encode(again, add_special_tokens=False)))
    assert shown_text(texts, trajectory, 1) == ["How many?", "\n", "No.", "\n"]
