"""Read what an agent's `reset` and `step` return: OpenRLHF's dicts, or a StepResult."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypedDict

from agentenv.core.types import SamplingParams, StepResult, as_flag
from agentenv.errors import ContractError

REQUIRED_STEP_KEYS = ("rewards", "environment_feedback", "done")


class StepDict(TypedDict, total=False):
    """OpenRLHF's step result (0.9.1 to 0.11.2); `StepResult` is the recommended form.

    Source: openrlhf/utils/agent.py, MultiTurnAgentExecutor.execute, 0.11.2.
    """

    rewards: Any
    """A number, or a one-element value with `.item()`."""
    scores: Any
    environment_feedback: str
    done: bool
    truncated: bool
    """Read only here: the environment cut the episode short. OpenRLHF's own executor reads no such key."""
    sampling_params: Any
    extra_logs: Mapping[str, Any]
    """Numbers by name, of a tensor its first; text is recorded here, and OpenRLHF cannot log it."""
    environment_images: Sequence[Any]


class FeedbackKind(StrEnum):
    """How to treat an observation that is text, if the episode began with messages."""

    PLAIN = "plain"
    """The content of a user message."""
    MAY_BE_RENDERED = "may_be_rendered"
    """Text that may be rendered by hand: if it contains role markers, it becomes raw tokens."""


def parse_reset(value: Any, where: str) -> tuple[Any, Any]:
    """Return the first observation and the schemas of tools that `reset` returned.

    Raises:
        ContractError: it is not a dict, or the observation is missing or invalid; names `where`.
    """
    if not isinstance(value, Mapping) or "observation" not in value:
        raise ContractError(
            f"{where}: expected a dict with the key 'observation', got {value!r:.200}. "
            "Return the states that were passed in, or {'observation': text_or_messages}."
        )
    return text_or_messages(value["observation"], f"{where}: observation"), value.get("tools")


def feedback_kind(value: Any) -> FeedbackKind:
    """Return how to treat the text of a step's return value: text in OpenRLHF's dict may be rendered."""
    return FeedbackKind.PLAIN if isinstance(value, StepResult) else FeedbackKind.MAY_BE_RENDERED


def parse_step(value: Any, where: str, score_range: tuple[float, float] | None = None) -> StepResult:
    """Return a step's return value as a StepResult; convert OpenRLHF's dict.

    `done` without `truncated` means terminated. A missing `scores` stays None.

    Args:
        value: what the step returned.
        where: start of the error messages.
        score_range: `AgentInstance.score_range` of the environment.

    Raises:
        ContractError: it is neither, a key is missing, or a value is invalid; names `where`.
    """
    if isinstance(value, StepResult):
        text_or_messages(value.observation, f"{where}: observation")
        check_score(value.score, where, score_range)
        sampling = to_sampling(value.sampling, where)
        return value if sampling is value.sampling else replace(value, sampling=sampling)
    if not isinstance(value, Mapping):
        raise ContractError(
            f"{where}: expected a StepResult or OpenRLHF's dict, got {type(value).__name__}. "
            "Return StepResult(observation, reward=…, terminated=…)."
        )
    missing = [key for key in REQUIRED_STEP_KEYS if key not in value]
    if missing:
        raise ContractError(
            f"{where}: expected the keys {list(REQUIRED_STEP_KEYS)}, got {sorted(map(str, value))}. "
            f"Add {missing}, or return StepResult(…)."
        )
    scores = value.get("scores")
    try:
        score = None if scores is None else scalar(scores, f"{where}: scores", SCORE_ADVICE)
        check_score(score, where, score_range)
        done = _flag(value["done"], f"{where}: done")
        truncated = _flag(value.get("truncated"), f"{where}: truncated")
        return StepResult(
            observation=text_or_messages(value["environment_feedback"], f"{where}: environment_feedback"),
            reward=scalar(value["rewards"], f"{where}: rewards"),
            terminated=done and not truncated,
            truncated=truncated,
            score=score,
            info=read_info(value.get("extra_logs"), where),
            sampling=to_sampling(value.get("sampling_params"), where),
            images=tuple(value.get("environment_images") or ()),
        )
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, ContractError) else ContractError(f"{where}: {error}") from error


_REWARD_ADVICE = "Return a number or a tensor of one element; raise InfraError if the value is unknown."
_ROUNDING = 1e-6
"""A sum of weighted parts may miss the end of its scale by this much."""
SCORE_ADVICE = "Leave it out where there is none."


def scalar(value: Any, where: str, advice: str = _REWARD_ADVICE) -> float:
    """Return a number, or the single element of a tensor, array or list, as a float; `advice` ends the error message.

    Raises:
        ContractError: it is not one finite number.
    """
    if type(value) is float and math.isfinite(value):  # the usual case
        return value
    if hasattr(value, "reshape") and hasattr(value, "tolist"):
        value = value.tolist() if getattr(value, "ndim", 1) == 0 else value.reshape(-1).tolist()
    given = value
    while isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ContractError(f"{where}: expected one finite number, got {given!r:.200}. {advice}")
    return float(value)


def check_score(score: float | None, where: str, score_range: tuple[float, float] | None) -> None:
    """Check that a score is within the range that the environment declares, up to rounding.

    Raises:
        ContractError: it is outside; the message starts with `where`.
    """
    if score is None or score_range is None:
        return
    low, high = score_range
    if not low - _ROUNDING <= score <= high + _ROUNDING:
        raise ContractError(
            f"{where}: expected a score in [{low:g}, {high:g}], got {score!r}. Score quality and put the rest in the "
            "reward, or declare the scale in the class: score_range = (low, high)"
        )


def text_or_messages(value: Any, where: str) -> Any:
    """Return an observation unchanged.

    Raises:
        ContractError: it is neither text nor a list of messages.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        for message in value:
            role, content = map(message.get, ("role", "content")) if isinstance(message, Mapping) else (None, None)
            is_text = isinstance(content, (str, type(None)))
            is_parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
            if not isinstance(role, str) or not (is_text or is_parts):
                raise ContractError(
                    f"{where}: expected messages with a role and content of text or parts, got {message!r:.200}. "
                    "Write {'role': 'user', 'content': 'text'}; a row's prompt may be text."
                )
        return value
    raise ContractError(f"{where}: expected text or messages, got {type(value).__name__}. Return '' for none.")


def _flag(value: Any, where: str) -> bool:
    return value is not None and as_flag(scalar(value, where, "Return True or False."), where)


def read_info(logs: Any, where: str) -> dict[str, float | str]:
    """Return `extra_logs` as the info of a StepResult.

    Raises:
        ContractError: it is not a dict of numbers and text; the message starts with `where`.
    """
    if logs is None:
        return {}
    if not isinstance(logs, Mapping):
        raise ContractError(f"{where}: extra_logs: expected a dict of numbers, got {type(logs).__name__}.")
    return {
        str(key): value
        if isinstance(value, str)
        else scalar(_first(value), f"{where}: extra_logs[{key!r}]", "Leave it out.")
        for key, value in logs.items()
    }


def _first(value: Any) -> Any:
    """Return the first number of a tensor, as OpenRLHF logs it; anything else as it is."""
    return value.reshape(-1)[0] if hasattr(value, "numel") and value.numel() else value


_NOT_TAKEN = {
    "n": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "bad_words": None,
    "logit_bias": None, "allowed_token_ids": None, "structured_outputs": None, "guided_decoding": None,
}  # fmt: skip
"""Fields of vLLM's SamplingParams that agentenv does not support, with their values when unset."""


def to_sampling(value: Any, where: str = "sampling_params") -> SamplingParams | None:
    """Return agentenv's or vLLM's SamplingParams as agentenv's; None stays None.

    Raises:
        ContractError: it is neither, or sets a field that agentenv does not support.
    """
    if value is None or isinstance(value, SamplingParams):
        return value
    if not hasattr(value, "temperature"):
        raise ContractError(
            f"{where}: sampling_params: expected SamplingParams, got {type(value).__name__}. "
            "Return the ones in states['sampling_params'], changed with dataclasses.replace."
        )
    lost = {
        name: found for name, unset in _NOT_TAKEN.items() if (found := getattr(value, name, None) or unset) != unset
    }
    if lost:
        raise ContractError(
            f"{where}: sampling_params: expected only fields that agentenv supports, got {lost}. Leave these unset."
        )
    stop = getattr(value, "stop", None) or ()
    return SamplingParams(
        temperature=float(getattr(value, "temperature", 1.0)),
        top_p=float(getattr(value, "top_p", 1.0)),
        top_k=max(int(getattr(value, "top_k", 0)), 0),
        min_p=float(getattr(value, "min_p", 0.0)),
        max_tokens=getattr(value, "max_tokens", None),
        min_tokens=int(getattr(value, "min_tokens", 0) or 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(getattr(value, "stop_token_ids", None) or ()),
        seed=getattr(value, "seed", None),
        structural_tag=getattr(value, "structural_tag", None),
    )
