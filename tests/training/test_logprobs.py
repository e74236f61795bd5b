"""Scores in chunks against the plain way: values, gradients, the sampler's own numbers, and what is held at once."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from agentenv.core.types import SamplingParams
from agentenv.engines.hf.sampling import draw
from agentenv.training.algorithm.logprobs import applied_temperature, score_tokens

N, D, V = 37, 8, 50


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def setting(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    head, hidden = nn.Linear(D, V).to(dtype), torch.randn(N, D, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(0, V, (N,)), torch.randn(N, dtype=dtype), torch.randn(N, dtype=dtype)


def plain(head, hidden, ids, temperature):
    logprobs = (head(hidden).float() / applied_temperature(temperature)).log_softmax(-1)
    return logprobs.gather(1, ids[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def gradients(leaves, total):
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000])
def test_values_and_gradients_are_those_of_the_plain_way(chunk, temperature):
    head, hidden, ids, one, two = setting()
    found = score_tokens(
        head, hidden, ids, vocab_size=V, temperature=temperature, entropy_gradient=True, max_logits=chunk * V
    )
    logprobs, entropy = plain(head, hidden, ids, temperature)
    torch.testing.assert_close(found.logprobs_n, logprobs)
    torch.testing.assert_close(found.entropy_n, entropy)
    leaves = [hidden, *head.parameters()]
    ours = gradients(leaves, (found.logprobs_n * one + found.entropy_n * two).sum())
    theirs = gradients(leaves, (logprobs * one + entropy * two).sum())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.001, 0.0])
def test_they_are_the_samplers_log_probabilities(temperature):
    """Ratio 1 on policy: the same logits, through the engine's sampler and through the trainer."""
    logits, chances = torch.randn(N, V, generator=seeded(2)) * 3, torch.rand(N, generator=seeded(3)).tolist()
    ids, sampled = draw(logits, [SamplingParams(temperature=temperature)] * N, chances, [()] * N)
    found = score_tokens(lambda x: x, logits, ids, vocab_size=V, temperature=temperature, max_logits=7 * V)
    torch.testing.assert_close(found.logprobs_n, sampled, rtol=1e-5, atol=2e-6)


def test_half_precision_hidden_states_are_scored_in_float32():
    head, hidden, ids, *_ = setting(torch.bfloat16)
    found = score_tokens(head, hidden, ids, vocab_size=V)
    assert found.logprobs_n.dtype == found.entropy_n.dtype == torch.float32
    torch.testing.assert_close(found.logprobs_n, plain(head, hidden, ids, 1.0)[0])


def test_the_entropy_has_no_gradient_unless_asked_for():
    head, hidden, ids, *_ = setting()
    assert not score_tokens(head, hidden, ids, vocab_size=V).entropy_n.requires_grad
    with torch.no_grad():
        assert not score_tokens(head, hidden, ids, vocab_size=V).logprobs_n.requires_grad


def test_no_token_is_a_part_of_the_graph_all_the_same():
    hidden = torch.randn(0, D, requires_grad=True)
    score_tokens(nn.Linear(D, V), hidden, torch.empty(0).long(), vocab_size=V).logprobs_n.sum().backward()
    assert hidden.grad.shape == (0, D)


class Largest(TorchDispatchMode):
    """The most elements any tensor had."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


def test_no_tensor_is_larger_than_a_chunk_forward_or_backward():
    head, hidden, ids, *_ = setting()
    with Largest() as largest:
        found = score_tokens(head, hidden, ids, vocab_size=V, entropy_gradient=True, max_logits=9 * V)
        (found.logprobs_n + found.entropy_n).sum().backward()
    assert largest.numel == 9 * V  # 450, of 1850 logits and 400 weights
    with Largest() as largest:
        plain(head, hidden, ids, 1.0)[0].sum().backward()
    assert largest.numel == N * V
