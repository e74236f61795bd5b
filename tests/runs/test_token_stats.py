"""token_stats.jsonl: float32 as they are, the last line of an episode counts, a resume cuts, damage is an error."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import DataError
from agentenv.runs.records.steps import append_rows, cut_steps
from agentenv.runs.records.token_stats import TOKEN_STATS, TokenStats, hash_actions, read_token_stats


def stats(step=1, episode_id="a/0", logprobs=(-0.5,), advantages=(1.0,)):
    return TokenStats(step, episode_id, hash_actions([7]), logprobs, advantages)


def write(folder, *rows):
    append_rows(folder / TOKEN_STATS, [each.to_dict() for each in rows])


NUMBERS = st.tuples(st.floats(width=32), st.floats(width=32))


@given(st.lists(NUMBERS, max_size=40), st.text(max_size=20))
def test_a_line_keeps_each_float32_and_any_id(tmp_path_factory, pairs, episode_id):
    folder = tmp_path_factory.mktemp("run")
    logprobs, advantages = ([pair[k] for pair in pairs] for k in (0, 1))
    write(folder, stats(3, episode_id, logprobs, advantages))
    (found,) = read_token_stats(folder).values()
    assert (found.step, found.episode_id, found.action_hash) == (3, episode_id, hash_actions([7]))
    for was, now in ((logprobs, found.logprobs), (advantages, found.advantages)):
        assert len(was) == len(now)
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(was, now, strict=True))


def test_the_last_line_of_an_episode_counts_and_a_resume_cuts_later_steps_and_a_torn_line(tmp_path):
    write(tmp_path, stats(1), stats(1, "b/0"), stats(2, advantages=(2.0,)))
    with (tmp_path / TOKEN_STATS).open("ab") as file:
        file.write(b'{"v":1,"step":2,"epis')
    assert {key: each.step for key, each in read_token_stats(tmp_path).items()} == {"a/0": 2, "b/0": 1}
    cut_steps(tmp_path / TOKEN_STATS, 1)
    assert {key: each.step for key, each in read_token_stats(tmp_path).items()} == {"a/0": 1, "b/0": 1}
    write(tmp_path, stats(2, "c/0"))
    assert list(read_token_stats(tmp_path)) == ["a/0", "b/0", "c/0"]
    assert read_token_stats(tmp_path / "nothing") == {}


def test_tokens_in_another_order_or_of_another_episode_have_another_hash():
    hashes = {hash_actions(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1], [2**31 - 1])}
    assert len(hashes) == 6


@pytest.mark.parametrize(
    "change",
    [{"v": 2}, {"step": "one"}, {"logprobs": "AA=="}, {"logprobs": "%%%%"}, {"logprobs": None}, {"advantages": ""}],
    ids=str,
)
def test_a_line_that_is_not_one_of_this_schema_is_an_error(tmp_path, change):
    write(tmp_path, stats())
    append_rows(tmp_path / TOKEN_STATS, [stats().to_dict() | change])
    with pytest.raises(DataError, match=r"token_stats\.jsonl: expected a line of schema version 1, got .*Remove it"):
        read_token_stats(tmp_path)
