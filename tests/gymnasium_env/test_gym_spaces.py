"""Our spaces hold whatever models read and write, and go through Gymnasium's own machinery."""

import json
import pickle
from copy import deepcopy

import numpy as np
import pytest
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ConfigError
from agentenv.gym import AnyText, Messages, TokenSeq

SPACES = (AnyText(), AnyText(10), Messages(), TokenSeq(50, 20), TokenSeq(50, 20, min_len=2))
same_space = pytest.mark.parametrize("space", SPACES, ids=repr)


@given(st.text(st.characters()))
def test_any_text_holds_every_text(text):
    assert text in AnyText()


def test_any_text_is_at_most_as_long_as_the_limit_and_nothing_but_text():
    assert "ab" in AnyText(2)
    assert "abc" not in AnyText(2)
    for value in (b"ab", 3, None, ["a"], np.array("a")):
        assert value not in AnyText()


@same_space
def test_samples_come_from_the_spaces_seed_and_are_in_it(space):
    one, other = deepcopy(space), deepcopy(space)
    assert one.seed(3) == other.seed(3)
    for _ in range(50):
        sample, same = one.sample(), other.sample()
        assert sample in space
        assert np.array_equal(sample, same) if isinstance(sample, np.ndarray) else sample == same


@same_space
def test_spaces_are_equal_by_what_they_hold_and_survive_pickling(space):
    again = pickle.loads(pickle.dumps(space))
    assert again == space == deepcopy(space)
    assert [other for other in SPACES if other == space] == [space]
    assert not space.is_np_flattenable


@same_space
def test_samples_go_to_json_and_back(space):
    space = deepcopy(space)
    space.seed(1)
    samples = [space.sample() for _ in range(5)]
    again = space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples))))
    assert [list(one) for one in again] == [list(one) for one in samples]
    assert all(one in space for one in again)


@same_space
def test_a_space_without_masks_refuses_them(space):
    with pytest.raises(ConfigError, match="no mask"):
        space.sample(mask=np.ones(1, np.int8))


@same_space
def test_batches_are_tuples_of_what_was_put_in(space):
    space = deepcopy(space)
    space.seed(2)
    items = [space.sample() for _ in range(3)]
    batch = batch_space(space, 3)
    out = concatenate(space, items, create_empty_array(space, 3))
    assert isinstance(out, tuple)
    assert all(one is item for one, item in zip(out, items, strict=True))
    assert out in batch
    assert all(one is item for one, item in zip(iterate(batch, out), items, strict=True))
    assert batch.sample() in batch


def test_messages_hold_lists_and_tuples_of_dicts__trap_sequence_of_dict():
    messages = [{"role": "user", "content": "é"}, {"role": "tool", "content": None}, {"role": "user", "content": []}]
    assert messages in Messages()
    assert tuple(messages) in Messages()
    assert [] in Messages()
    for value in ("text", [1], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": ""}], {"role": "user"}):
        assert value not in Messages()


@pytest.mark.parametrize("kind", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_token_sequences_may_be_lists_tuples_and_arrays__trap_sequence_of_discrete(kind):
    space = TokenSeq(100, 8_000)
    assert kind(list(range(100)) * 80) in space
    assert kind([0, 99]) in space
    assert kind([0, 100]) not in space
    assert kind([-1]) not in space
    assert kind([0] * 8_001) not in space
    assert kind([0.5]) not in space
    assert kind([[1], [2]]) not in space


def test_input_that_is_not_a_sequence_of_ids_is_none():
    space = TokenSeq(100, 10, min_len=1)
    for value in ("12", None, 3, [True], ["1"], [None], [2**70], [], {1: 2}, np.array(3), np.array([True])):
        assert value not in space
    assert [] in TokenSeq(100, 10)
    assert [np.int64(3), 4] in space


def test_sizes_that_mean_nothing_are_refused():
    for make in (lambda: AnyText(-1), lambda: AnyText(1.5), lambda: TokenSeq(0, 3), lambda: TokenSeq(5, 1, min_len=2)):
        with pytest.raises(ConfigError, match="expected an integer"):
            make()
