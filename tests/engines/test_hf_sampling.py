"""The sampling arithmetic of HFEngine by itself: distributions, truncation, seeds, stop strings."""

from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.types import SamplingParams
from agentenv.engines.hf.sampling import StopStrings, draw, truncate


def drawn(logits, params, seed=0, banned=None):
    rng = Random(seed)
    return draw(logits, params, [rng.random() for _ in params], banned or [()] * len(params))


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_p=0.6)], ids=str
)
def test_tokens_are_as_frequent_as_their_reported_probabilities(sampling):
    num, logits = 20_000, torch.tensor([2.0, 0.0, 1.0, -torch.inf, 1.5, -3.0])
    tokens, logprobs = drawn(logits.expand(num, -1), [sampling] * num)
    counts = Counter(tokens.tolist())
    for token, logprob in set(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        probability = float(torch.tensor(logprob).exp())
        assert counts[token] / num == pytest.approx(probability, abs=5 * (probability / num) ** 0.5)
    assert 3 not in counts


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-6, 0.003, 0.4, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
        top_k=st.sampled_from([-1, 0, 1, 3, 1000]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
    ),
    st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True)),
)
def test_a_row_does_not_depend_on_its_neighbors(values, sampling, uniform):
    row = torch.tensor(values)
    others = [SamplingParams(temperature=0.0), SamplingParams(top_k=2), SamplingParams(temperature=3.0)]
    alone, score = draw(row[None], [sampling], [uniform], [()])
    mixed, scores = draw(
        torch.stack([row.flip(0), row, -row, row]),
        [others[0], sampling, *others[1:]],
        [0.3, uniform, 0.9, 0.1],
        [()] * 4,
    )
    assert int(alone[0]) == int(mixed[1])
    assert float(score[0]) == float(scores[1])
    assert torch.isfinite(score[0])


def test_truncation_keeps_what_its_words_say():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 5))
    kinds = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.65),
        SamplingParams(min_p=0.4),
        SamplingParams(top_k=3, top_p=0.4),
        SamplingParams(top_p=0.01),
    ]
    kept = torch.isfinite(truncate(logits, kinds))
    assert kept.sum(-1).tolist() == [2, 2, 3, 1, 1]
    assert kept[:, 0].all()


def test_greedy_reports_the_plain_log_softmax():
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(4))
    kinds = [SamplingParams(temperature=0.0, top_p=0.1, top_k=1, min_p=0.9), SamplingParams(temperature=1e-6)]
    tokens, logprobs = drawn(logits, [*kinds, SamplingParams(temperature=0.5)])
    assert tokens[:2].tolist() == logits[:2].argmax(-1).tolist()
    torch.testing.assert_close(logprobs[:2], logits.log_softmax(-1).amax(-1)[:2])


def test_banned_tokens_are_not_drawn_and_the_callers_logits_stay():
    logits = torch.tensor([[5.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    tokens, logprobs = drawn(logits, [SamplingParams(temperature=0.0)] * 2, banned=[{0, 99}, ()])
    assert tokens.tolist() == [1, 0]
    assert float(logprobs[0]) == pytest.approx(float(torch.tensor([1.0, 0.0]).log_softmax(-1)[0]))
    assert logits[0, 0] == 5.0


class Bytes:
    """A tokenizer with one token per byte."""

    eos_token_id, chat_template = None, None

    def __init__(self):
        self.all_special_ids = []
        self.num_decoded = 0

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=False):
        self.num_decoded += len(token_ids)
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(self, conversation, **kwargs):
        raise NotImplementedError


def first_stop(text, *stop, min_tokens=0, prompt=b"ab"):
    strings = StopStrings(Bytes(), SamplingParams(stop=stop, min_tokens=min_tokens), list(prompt))
    found = ((n, strings.push(byte)) for n, byte in enumerate(text, 1))
    return next(((n, stop) for n, stop in found if stop is not None), None)


def test_stop_strings_are_found_where_they_end():
    assert first_stop(b"one two three", "two") == (7, "two")
    assert first_stop(b"one two three", "three", "ne t") == (5, "ne t")
    assert first_stop(b"aab", "ab", "b", "aab") == (3, "ab")
    assert first_stop(b"none", "two") is None
    assert first_stop(b"bcd", "abc") is None, "the prompt is not searched"


def test_stop_strings_wait_for_whole_characters():
    text = "naïve → 日本語 🙂 end"
    for stop in ("ï", "→", "本語", "🙂", "語 🙂 e"):
        end = len(text[: text.index(stop) + len(stop)].encode())
        assert first_stop(text.encode(), stop) == (end, stop)


def test_stop_strings_wait_for_characters_started_in_the_prompt():
    assert first_stop("é!".encode()[1:], "!", prompt="é".encode()[:1]) == (2, "!")


def test_stop_strings_survive_bytes_that_are_not_text():
    assert first_stop(b"\xff" * 40 + b" stop", "stop") == (45, "stop")


def test_stop_strings_are_looked_for_after_min_tokens():
    assert first_stop(b"xx xx", "x", min_tokens=2) == (4, "x")
    assert first_stop(b"abc", "ab", min_tokens=2) is None
    assert first_stop(b"abc", "bc", min_tokens=2) == (3, "bc")


@pytest.mark.parametrize("text", [b"word " * 400, b"\xff" * 2000, "🙂".encode() * 500])
def test_stop_strings_decode_in_linear_time(text):
    tokenizer = Bytes()
    strings = StopStrings(tokenizer, SamplingParams(stop=("never",)), [65] * 1000)
    for byte in text:
        strings.push(byte)
    assert tokenizer.num_decoded < 30 * len(text)
