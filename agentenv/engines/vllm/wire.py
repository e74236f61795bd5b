"""Convert requests and answers of vLLM: its own objects in this process, and JSON for `/v1/completions` of a server.

Source: vllm 0.32, vllm/entrypoints/openai/completion/protocol.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from agentenv._util.brief import brief_json
from agentenv.core.engine import MAX_LOGPROB
from agentenv.core.types import Completion, FinishReason, SamplingParams
from agentenv.errors import AgentEnvError, ConfigError, EngineError

MISSING_LOGPROB = -9999.0
"""vLLM's value for a missing log-probability."""
_SCORING: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
"""Parameters for the log-probabilities of a prompt: its own tokens' and no other. vLLM samples at least one token."""
_MAX_INT = 2**31 - 1
"""Largest id, version and count that a record can hold."""


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return vLLM's fields of sampling parameters, without the structural tag."""
    same = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed")
    return {
        **{name: getattr(sampling, name) for name in same},
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,  # a stop string may be one
        "logprobs": 0,  # the sampled token's and no other
    }


def request_body(prompt: list[int], sampling: SamplingParams) -> dict[str, Any]:
    """Return the request without model and id. It sets everything that the model's generation config could change."""
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    returned = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body: dict[str, Any] = {**sampling_fields(sampling), **penalties, **returned, "prompt": prompt, "n": 1}
    if sampling.structural_tag is not None:
        body["structured_outputs"] = {"structural_tag": sampling.structural_tag}
    return body


def whole(value: Any, name: str) -> int:
    """Return a whole number of an answer, or raise EngineError if it is not one or no record can hold it."""
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise _wrong(f"{name} to be a whole number from 0 to {_MAX_INT}", value)
    return value


def field_of(answer: dict[str, Any], name: str, kind: type) -> Any:
    """Return the value of a required field, or raise EngineError if it has another type."""
    value = answer.get(name)
    if not isinstance(value, kind):
        raise _wrong(f"{name} to be a {kind.__name__}", value)
    return value


def _wrong(expected: str, got: Any, more: str = "Is it a vLLM server?") -> EngineError:
    return EngineError(f"The server's answer: expected {expected}, got {brief_json(got)}. {more}".rstrip())


def completion_of(answer: dict[str, Any], prompt: list[int]) -> Completion:
    """Parse an answer. Raise EngineError if it is invalid, ConfigError if the server lacks a feature."""
    try:
        choices = field_of(answer, "choices", list)
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise _wrong("one choice", choices, "")
        choice = choices[0]
        echo = choice.get("prompt_token_ids")
        if choice.get("token_ids") is None or echo is None:
            raise ConfigError(
                "The server's answer: expected token ids (return_token_ids), got text only. "
                "Use a vLLM server of version 0.10.2 or later: vllm serve MODEL --logprobs-mode processed_logprobs"
            )
        if echo != prompt:
            raise EngineError(
                f"The server's answer: expected an action after the {len(prompt)} prompt tokens sent, got one after "
                f"others ({brief_json(echo)}). Something between here and the model changes the prompt."
            )
        token_ids = tuple(whole(token, "token_ids") for token in field_of(choice, "token_ids", list))
        if choice.get("finish_reason") not in get_args(FinishReason):
            raise _wrong("a finish_reason", choice.get("finish_reason"), "")
        matched_stop = choice.get("stop_reason")
        if matched_stop is not None and not isinstance(matched_stop, str):
            matched_stop = whole(matched_stop, "stop_reason")
        answered = field_of(choice, "logprobs", dict)
        names, values = field_of(answered, "tokens", list), field_of(answered, "token_logprobs", list)
        pairs = [(int(name.removeprefix("token_id:")), value) for name, value in zip(names, values, strict=False)]
        if [token_id for token_id, _ in pairs] != list(token_ids):
            raise EngineError(
                f"The server's answer: expected log-probabilities of the {len(token_ids)} sampled tokens, got "
                f"{len(pairs)} of others ({brief_json(answered)})."
            )
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        logprobs, cached = tuple(_logprob(value) for _, value in pairs), details.get("cached_tokens")
        num_cached = 0 if cached is None else whole(cached, "cached_tokens")
        return Completion(token_ids, choice["finish_reason"], matched_stop, logprobs, num_cached_tokens=num_cached)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, AgentEnvError):
            raise
        raise EngineError(
            f"The server's answer: expected vLLM's fields, got {brief_json(answer)} ({error!r:.200}). Is it vLLM?"
        ) from error


def _logprob(value: Any) -> float:
    """Return a log-probability of an answer, NaN if it is missing.

    Raises:
        EngineError: it is not a number, or positive beyond rounding.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or value > MAX_LOGPROB:
        raise _wrong("log-probabilities of at most 0", value)
    return math.nan if value <= MISSING_LOGPROB else float(value)


def score_body(token_ids: list[int]) -> dict[str, Any]:
    """Return the request for log-probabilities of a prompt to `/v1/completions`, without the model's name."""
    return {**_SCORING, "prompt": token_ids, "return_token_ids": True}


def scores_of(answer: dict[str, Any], token_ids: list[int]) -> list[float]:
    """Parse the answer to a `score_body`; raise EngineError if it belongs to other tokens."""
    choices = field_of(answer, "choices", list)
    choice = choices[0] if len(choices) == 1 and isinstance(choices[0], dict) else {}
    entries = choice.get("prompt_logprobs")
    if choice.get("prompt_token_ids") != token_ids or not isinstance(entries, list) or len(entries) != len(token_ids):
        expected = f"prompt_logprobs of the {len(token_ids)} tokens sent"
        raise _wrong(expected, answer, "Is it a vLLM server of version 0.10.2 or later?")
    try:
        values = [
            entry[str(token)]["logprob"] if entry else None for entry, token in zip(entries, token_ids, strict=True)
        ]
        return [_logprob(value) for value in values]
    except (KeyError, TypeError) as error:
        raise EngineError(
            f"The server's answer: expected the tokens' own log-probabilities, got {brief_json(entries)} "
            f"({error!r:.200}). Is it a vLLM server?"
        ) from error


def vllm_scoring() -> Any:
    """Return vLLM's sampling parameters for the log-probabilities of a prompt.

    With them vLLM does not read its prefix cache, which has no log-probabilities, and does not apply its processors.
    """
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    return VLLMSamplingParams(**_SCORING, flat_logprobs=True, detokenize=False, output_kind=kind)


def scores_of_output(out: Any, token_ids: list[int]) -> list[float]:
    """Parse a RequestOutput of `vllm_scoring`: a log-probability for each prompt token, NaN for the first."""
    echo, flat = list(out.prompt_token_ids or ()), out.prompt_logprobs
    num = 0 if flat is None else len(flat.start_indices)
    if echo != token_ids or num != len(token_ids):
        raise EngineError(
            f"VLLMEngine.score: expected log-probabilities of the {len(token_ids)} tokens sent, got {num} of "
            f"{len(echo)} tokens. Report it with vLLM's version."
        )
    return list(_own(flat, token_ids))


def vllm_sampling(sampling: SamplingParams) -> Any:
    """Convert sampling parameters to vLLM's class."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    tag = sampling.structural_tag
    outputs = None if tag is None else StructuredOutputsParams(structural_tag=tag)
    given = {**sampling_fields(sampling), "structured_outputs": outputs, "detokenize": bool(sampling.stop)}
    return VLLMSamplingParams(**given, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)


def completion_of_output(out: Any, prompt: list[int], policy_version: int) -> Completion:
    """Parse a RequestOutput. `policy_version` applies to tokens for which vLLM does not report a version."""
    if list(out.prompt_token_ids or ()) != prompt:
        raise EngineError(
            f"VLLMEngine.generate: expected an action after {len(prompt)} prompt tokens, got one after others "
            f"({len(out.prompt_token_ids or ())} tokens). The prompt was changed in transit; report it."
        )
    output = out.outputs[0]
    token_ids, flat = tuple(output.token_ids), output.logprobs
    num = 0 if flat is None else len(flat.start_indices)
    if num != len(token_ids):
        raise EngineError(
            f"VLLMEngine.generate: expected {len(token_ids)} log-probabilities, got {num}. "
            "Report it with vLLM's version."
        )
    spans = [(span.version, span.start, span.end) for span in output.weight_versions or ()]
    logprobs, num_cached = _own(flat, token_ids), out.num_cached_tokens or 0
    more = versions_of(spans, len(token_ids), default=policy_version)
    reason, stop = output.finish_reason, output.stop_reason
    return Completion(token_ids, reason, stop, logprobs, num_cached_tokens=num_cached, **more)


def _own(flat: Any, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return the first log-probability of each position, NaN if it belongs to another token."""
    return tuple(
        flat.logprobs[start] if start < end and flat.token_ids[start] == token_id else math.nan
        for start, end, token_id in zip(flat.start_indices, flat.end_indices, token_ids, strict=True)
    )


def versions_of(spans: Iterable[tuple[str, int, int]], length: int, *, default: int) -> dict[str, Any]:
    """Return `Completion`'s policy version fields for vLLM's spans (version, start, end) over `length` tokens."""
    spans = list(spans)
    if not spans:
        return {"policy_version": default}
    versions = [default] * length
    for version, start, end in spans:
        if version.isdecimal():  # vLLM's initial version is not a number
            versions[start:end] = [whole(int(version), "version")] * (min(end, length) - start)
    if len(set(versions)) > 1:
        return {"policy_versions": tuple(versions)}
    return {"policy_version": versions[0] if versions else default}
