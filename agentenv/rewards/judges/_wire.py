"""Requests and answers of `POST /chat/completions`, as JSON.

Source: OpenAI's API reference, "Create chat completion"; vLLM's additions to it (top_k, min_p, reasoning_content).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import scanner
from typing import Any

from agentenv.errors import DataError, InfraError
from agentenv.rewards._http import shown
from agentenv.rewards.judges.failures import JudgeRefused, JudgeTruncated, JudgeUnreadable
from agentenv.types import Message, SamplingParams

MAX_SHOWN = 300
"""Characters of an answer in an error."""
MAX_AT_ONCE = 65_536


class _Yielding(json.JSONDecoder):
    """Reads JSON without the scanner that is written in C."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered: a reply, or why it is none; and what it cost."""

    text: str
    failure: InfraError | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counted: bool = False
    """Whether the server told the tokens."""
    whole: bool = True
    """Whether it is a chat completion at all: a proxy's page and a torn body are none."""


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of a request that say how to sample; what is vLLM's alone only where it is asked for."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    beyond = {"top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0, "min_tokens": sampling.min_tokens > 0}
    beyond |= {"max_tokens": sampling.max_tokens is not None, "seed": sampling.seed is not None}
    fields |= {name: getattr(sampling, name) for name, given in beyond.items() if given}
    fields |= {"stop": list(sampling.stop)} if sampling.stop else {}
    return fields | ({"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {})


def request_bytes(
    model: str, messages: Sequence[Message], sampling: SamplingParams, extra_body: Mapping[str, Any]
) -> bytes:
    """A request's body; what `extra_body` names replaces the rest, and is left out where it is None.

    Raises:
        DataError: the messages are no JSON.
    """
    body = {"model": model, "messages": [dict(message) for message in messages], **sampling_fields(sampling)}
    body = {name: value for name, value in (body | dict(extra_body)).items() if value is not None}
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"judge: expected messages that are JSON, got {error}. Correct the row.") from error


def answer_of(body: bytes, where: str) -> Answer:
    """What a body of status 200 says; nothing in it raises.

    One of more than MAX_AT_ONCE bytes is read by Python's own code, slowly and so that other threads go on meanwhile:
    that of C holds them up, by 0.2 s for a megabyte of empty lists.
    """
    try:
        found = json.loads(body, cls=None if len(body) <= MAX_AT_ONCE else _Yielding)
    except (ValueError, RecursionError):
        found = None
    choices = found.get("choices") if isinstance(found, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(found, dict) or not isinstance(choice, dict) or not isinstance(message, dict):
        failure = JudgeUnreadable(f"{where}: expected a chat completion, got {shown(body)}. Check the address.")
        return Answer("", failure, whole=False)
    text = _text(message.get("content"))
    problem = _failure(choice.get("finish_reason"), text, message, where)
    usage = found.get("usage")
    counts = [_count(usage, name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count or 0 for count in counts)
    return Answer("" if problem else text, problem, prompt, completion, None not in counts)


def _failure(reason: Any, text: str, message: Mapping[str, Any], where: str) -> InfraError | None:
    if reason == "length":
        return JudgeTruncated(
            f"{where}: expected a whole reply, got one that was cut off (finish_reason 'length'): {text[-80:]!r}. "
            "Raise max_tokens, or let the judge think less."
        )
    if reason == "content_filter":
        return JudgeRefused(f"{where}: expected a reply, got finish_reason 'content_filter'. Use another judge.")
    if text.strip():
        return None
    if message.get("refusal"):
        return JudgeRefused(f"{where}: expected a reply, got the refusal {str(message['refusal'])[:MAX_SHOWN]!r}.")
    thought = message.get("reasoning_content") or message.get("reasoning")
    got = "reasoning and nothing after it" if thought else f"no text (finish_reason {reason!r:.40})"
    return JudgeUnreadable(f"{where}: expected a reply, got {got}. Look at the judge's chat template.")


def _text(content: Any) -> str:
    """What a message says: text, or the parts of it that are text. Reasoning is another field and no reply."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") != "thinking"]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None
