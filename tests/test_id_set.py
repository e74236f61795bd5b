"""The ids of finished episodes: exactly a set's answers, in a few ranges."""

from hypothesis import given
from hypothesis import strategies as st

from agentenv.id_set import IdSet

IDS = st.one_of(
    st.text(),
    st.from_regex(r"[a0]{0,2}[0-9]{0,3}(/[0-3])?", fullmatch=True),
    st.builds("{:0{}}/{}".format, st.integers(0, 30), st.integers(1, 3), st.integers(0, 2)),
)


@given(st.lists(IDS, max_size=60), st.lists(IDS, max_size=20))
def test_it_is_a_set_of_the_ids_whatever_they_look_like(ids, others):
    finished, reference = IdSet(), set()
    for episode_id in ids:
        finished.add(episode_id)
        reference.add(episode_id)
        assert episode_id in finished
    assert sorted(finished) == sorted(reference)
    assert len(finished) == len(reference)
    assert [other in finished for other in others] == [other in reference for other in others]


@given(st.permutations(range(40)))
def test_ids_that_count_on_end_in_one_range_whatever_their_order(numbers):
    finished = IdSet(f"task-{number:04d}/0" for number in numbers)
    assert list(finished._ranges.values()) == [[0, 40]]


def test_ids_that_differ_in_zeros_are_not_the_same():
    finished = IdSet(["7/0", "007/0", "7", "a7"])
    assert {"07/0", "7/1", "07", "7a", "a07", "", "a"}.isdisjoint(finished)
    assert 7 not in finished


def test_a_hundred_thousand_episodes_in_order_take_one_range_per_sample():
    finished = IdSet(f"{number // 2:06d}/{number % 2}" for number in range(100_000))
    assert len(finished) == 100_000
    assert sum(map(len, finished._ranges.values())) == 4
