"""What sequences begin with alike is computed once, and no score moves for it."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPTNeoConfig,
    GPTNeoForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    Phi3Config,
    Phi3ForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from agentenv.rewards.models import classifier as _classifier
from agentenv.rewards.models.batching import LEAST_SAVED, Family, MicroBatcher, families, family_batches
from agentenv.rewards.models.classifier import Classifier
from agentenv.rewards.models.hf import HFScorer
from tests.rewards.models.tiny import VOCAB_SIZE, said, tiny_rm

TOLERANCE = 1e-4
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)
GROUPS = st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=5)), min_size=1,
                  max_size=4)  # fmt: skip


def ids(num, seed):
    return torch.randint(0, VOCAB_SIZE, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def group(shared, ends, seed=0):
    """Sequences that begin with the same so many tokens, and go on for so many each."""
    return [ids(shared, seed) + ids(end, 1000 * seed + number + 1) for number, end in enumerate(ends)]


@pytest.fixture(scope="module")
def classifier():
    return Classifier(str(tiny_rm()), device="cpu", dtype="auto", label=None)


# --- families ---------------------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_are_a_family_and_a_stranger_is_in_none():
    sequences = [*group(40, [5, 9, 5], 1), ids(30, 7), *group(50, [3, 3], 2)]
    found = {frozenset(family.indices): family.num_shared for family in families(sequences)}
    assert found == {frozenset({0, 1, 2}): 40, frozenset({4, 5}): 50}


def test_a_system_prompt_of_all_joins_no_families():
    system = ids(30, 99)
    sequences = [system + row for row in (*group(60, [5, 5, 5], 1), *group(70, [5, 5], 2), ids(9, 3))]
    found = {frozenset(family.indices): family.num_shared for family in families(sequences)}
    assert found == {frozenset({0, 1, 2}): 90, frozenset({3, 4}): 100}


def test_a_common_system_prompt_is_shared():
    system = ids(30, 99)
    (family,) = families([system + ids(20, seed) for seed in range(4)])
    assert (family.num_shared, sorted(family.indices), family.num_saved) == (30, [0, 1, 2, 3], 90)


def test_each_sequence_keeps_its_own_token():
    same = ids(40, 1)
    (family,) = families([same, list(same), [*same, 5]])
    assert family.num_shared == 39


@pytest.mark.long
@given(st.lists(TOKENS, max_size=14), st.integers(1, 4))
def test_a_family_shares_its_beginning_and_no_sequence_is_in_two(sequences, least):
    found = families(sequences, least=least)
    members = [index for family in found for index in family.indices]
    assert len(members) == len(set(members))
    for family in found:
        assert len(family.indices) > 1
        assert family.num_shared >= least
        assert len({tuple(sequences[index][: family.num_shared]) for index in family.indices}) == 1
        assert all(len(sequences[index]) > family.num_shared for index in family.indices)


def num_computed(sequences):
    """Tokens that a batch of these computes, as the scorer shares them, padding of what is shared included."""
    kin = families(sequences)
    if sum(family.num_saved for family in kin) < LEAST_SAVED:
        return len(sequences) * max(map(len, sequences))
    own = sum(len(sequences[index]) - family.num_shared for family in kin for index in family.indices)
    lone = set(range(len(sequences))).difference(*(family.indices for family in kin))
    return len(kin) * max(family.num_shared for family in kin) + own + sum(len(sequences[index]) for index in lone)


@pytest.mark.long
@given(GROUPS, st.integers(1, 6), st.integers(1, 300), st.sampled_from([1, 10]))
def test_a_plan_has_every_sequence_once_and_no_batch_that_is_too_large(groups, max_batch, max_tokens, times):
    sequences = [row for seed, (shared, ends) in enumerate(groups) for row in group(times * shared, ends, seed)]
    plan = family_batches(sequences, max_batch, times * max_tokens)
    assert sorted(index for batch in plan for index in batch) == list(range(len(sequences)))
    assert all(0 < len(batch) <= max_batch for batch in plan)
    for batch in plan:
        assert len(batch) == 1 or num_computed([sequences[index] for index in batch]) <= times * max_tokens


def test_long_sequences_that_share_only_a_system_prompt_are_not_a_batch_of_all_tokens():
    system = ids(18, 9)
    sequences = [system + ids(2000, seed) for seed in range(32)]
    assert [len(batch) for batch in family_batches(sequences, 32, 2048)] == [1] * 32


def test_a_family_that_padding_would_slow_down_is_not_batched_with_a_long_one():
    sequences = [*group(1500, [10, 12], 1), *(row for seed in range(2, 17) for row in group(17, [5, 6], seed))]
    plan = family_batches(sequences, 32, 100_000)
    assert [len(batch) for batch in plan] == [2, 30]
    assert sum(num_computed([sequences[index] for index in batch]) for batch in plan) < 2300


def test_families_stay_whole_where_they_fit_and_are_cut_where_they_do_not():
    sequences = [row for seed in range(3) for row in group(400 + 100 * seed, [5] * 4, seed)]
    plan = family_batches(sequences[::2] + sequences[1::2], 8, 10_000)
    assert [len(batch) for batch in plan] == [8, 4]
    assert [len(batch) for batch in family_batches(sequences, 3, 10_000)] == [3, 3, 3, 3]
    assert [len(batch) for batch in family_batches(sequences, 8, 1000)] == [4, 4, 4]
    assert [len(batch) for batch in family_batches(sequences, 8, 611)] == [2, 2, 4, 4]


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@given(GROUPS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_score_is_the_same_regardless_of_what_is_shared(classifier, groups, rng):
    assert classifier.shares
    sequences = [row for seed, (shared, ends) in enumerate(groups) for row in group(shared, ends, seed)]
    rng.shuffle(sequences)
    with torch.inference_mode():
        found = classifier._kin_values(sequences, kin) if (kin := families(sequences)) else {}
    for index, value in found.items():
        assert value == pytest.approx(classifier.score_whole([sequences[index]])[0], abs=TOLERANCE)
    assert found.keys() == {index for family in kin for index in family.indices}


def test_the_shared_part_is_computed_once(classifier, monkeypatch):
    computed = []
    forward = classifier.model.base_model.forward

    def counted(*args, **kwargs):
        computed.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    monkeypatch.setattr(classifier.model.base_model, "forward", counted)
    assert classifier.shares
    computed.clear()
    sequences = [*group(120, [10] * 8), ids(20, 5)]
    scores = classifier.score_batch(sequences)
    assert sum(computed) == 120 + 8 * 10 + 20
    computed.clear()
    assert scores == pytest.approx([classifier.score_batch([row])[0] for row in sequences], abs=TOLERANCE)
    assert sum(computed) == 8 * 130 + 20


def test_no_more_is_held_than_allowed_and_no_score_moves_for_it(classifier, monkeypatch):
    sequences = group(120, [5, 30, 11, 17, 8, 2, 40, 1])
    expected = classifier.score_batch(sequences)
    monkeypatch.setattr(_classifier, "_MOST_SEEN", 350)
    assert classifier.score_batch(sequences) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.long
async def test_concurrent_episodes_of_one_prompt_share_it():
    scorer = HFScorer(tiny_rm())
    question = "How many clips did she sell in April and May together, if in May it were half as many? " * 3
    conversations = [said("clips " * num, question=question) for num in range(1, 17)]
    together = await asyncio.gather(*map(scorer.score, conversations))
    alone = [await scorer.score(conversation) for conversation in conversations]
    await scorer.close()
    assert [one.value for one in together] == pytest.approx([one.value for one in alone], abs=TOLERANCE)


# --- models that do not ----------------------------------------------------------------------------------------------


SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_labels": 1}
LLAMAS = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
MODELS = {
    "qwen2": (True, lambda: Qwen2ForSequenceClassification(Qwen2Config(**SMALL, **LLAMAS))),
    "gpt2": (True, lambda: GPT2ForSequenceClassification(
        GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, num_labels=1))),
    "a sliding window": (False, lambda: MistralForSequenceClassification(
        MistralConfig(**SMALL, **LLAMAS, sliding_window=8))),
    "a window of places, which padding fills": (False, lambda: GPTNeoForSequenceClassification(
        GPTNeoConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=64,
                     attention_types=[[["global", "local"], 2]], window_size=32, num_labels=1))),
    "positions that turn by the longest": (False, lambda: Phi3ForSequenceClassification(
        Phi3Config(**SMALL, **LLAMAS, initializer_range=0.15, max_position_embeddings=2048, pad_token_id=0,
                   eos_token_id=0, original_max_position_embeddings=96, rope_scaling={
                       "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}))),
    "no positions": (False, lambda: BloomForSequenceClassification(
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=2, num_labels=1))),
    "an encoder": (False, lambda: BertForSequenceClassification(
        BertConfig(**SMALL, intermediate_size=64, num_attention_heads=2))),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_only_models_whose_attention_is_whole_share_and_no_score_moves(name):
    shares, make = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    if hasattr(model, "score"):
        torch.nn.init.normal_(model.score.weight, std=2.0)
    classifier = Classifier(model, device="cpu", dtype="auto", label=None)
    assert classifier.shares is shares
    sequences = [*group(90, [5, 9, 2, 7, 30, 5, 5, 5, 4]), *group(30, [200, 3, 40], 2)]
    alone = [classifier.score_batch([row])[0] for row in sequences]
    assert classifier.score_batch(sequences) == pytest.approx(alone, abs=TOLERANCE)
    assert len({round(value, 6) for value in alone}) > 3


def test_the_padding_of_what_follows_has_no_position_that_the_model_lacks():
    """Behind 120 shared tokens of 128 it would have, where another family goes on for longer."""
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, num_labels=1, n_positions=128)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2ForSequenceClassification(config)
    classifier = Classifier(model, device="cpu", dtype="auto", label=None)
    sequences = [*group(120, [5, 8], 1), *group(20, [12, 9], 2)]
    with torch.inference_mode():
        found = classifier._kin_values(sequences, families(sequences))
    assert [found[at] for at in range(4)] == pytest.approx(classifier.score_whole(sequences), abs=TOLERANCE)


def test_16_bits_share_nothing():
    classifier = Classifier(str(tiny_rm()), device="cpu", dtype="bfloat16", label=None)
    assert not classifier.shares


def test_a_model_that_shares_wrongly_is_found_out(monkeypatch):
    """One that takes a cache and positions, and does not heed them."""
    right = Classifier._kin_values
    wrong = lambda *given: {at: value + 0.1 for at, value in right(*given).items()}  # noqa: E731
    monkeypatch.setattr(Classifier, "_kin_values", wrong)
    classifier = Classifier(str(tiny_rm()), device="cpu", dtype="auto", label=None)
    assert not classifier.shares
    sequences = group(90, [5] * 9)
    assert classifier.score_batch(sequences) == pytest.approx(classifier.score_whole(sequences), abs=TOLERANCE)


def test_a_model_whose_cache_is_another_kind_is_found_out(monkeypatch):
    def broken(*given):
        raise AttributeError("'tuple' object has no attribute 'batch_select_indices'")

    monkeypatch.setattr(Classifier, "_kin_values", broken)
    assert not Classifier(str(tiny_rm()), device="cpu", dtype="auto", label=None).shares


async def test_a_plan_that_fails_leaves_no_waiter():
    batcher = MicroBatcher(lambda rows: [float(sum(row)) for row in rows], plan=lambda *given: 1 // 0)
    found = asyncio.gather(*(batcher.score([num]) for num in range(5)))
    assert await asyncio.wait_for(found, 60) == [0.0, 1.0, 2.0, 3.0, 4.0]
    await batcher.close()


def test_a_family_says_what_it_saves():
    assert Family(40, (0, 2, 5)).num_saved == 80
