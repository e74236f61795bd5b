"""Write requests and read answers of `POST /chat/completions`.

Source: OpenAI's API reference, "Create chat completion"; vLLM's additions to it (top_k, min_p, reasoning_content).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentenv._util.calls import waiting
from agentenv._util.http.client import excerpt
from agentenv._util.http.json_bodies import parse_json
from agentenv._util.per_loop import PerLoop
from agentenv.core.types import Message, SamplingParams
from agentenv.errors import DataError, InfraError
from agentenv.rewards.judges.protocol import JudgeRefused, JudgeTruncated, JudgeUnreadable

MAX_SHOWN = 300
"""Maximum number of characters of an answer in an error message."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A server's answer: a reply, or why it has none; and its tokens."""

    text: str
    failure: InfraError | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counted: bool = False
    """True if the server reported the tokens."""
    whole: bool = True
    """True if it is a chat completion; False for a proxy's page or an incomplete body."""


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling fields of a request; those that only vLLM has are included only if set."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    beyond = {"top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0, "min_tokens": sampling.min_tokens > 0}
    beyond |= {"max_tokens": sampling.max_tokens is not None, "seed": sampling.seed is not None}
    fields |= {name: getattr(sampling, name) for name, given in beyond.items() if given}
    fields |= {"stop": list(sampling.stop)} if sampling.stop else {}
    return fields | ({"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {})


def request_bytes(
    model: str, messages: Sequence[Message], sampling: SamplingParams, extra_body: Mapping[str, Any]
) -> bytes:
    """Return a request's body; fields of `extra_body` replace the others, and None removes a field.

    Raises:
        DataError: the messages are not JSON.
    """
    body = {"model": model, "messages": [dict(message) for message in messages], **sampling_fields(sampling)}
    body = {name: value for name, value in (body | dict(extra_body)).items() if value is not None}
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"judge: expected messages that are JSON, got {error}. Correct the row.") from error


def read_chat_reply(body: bytes, where: str) -> ChatReply:
    """Read a body of status 200; nothing in it raises."""
    try:
        found = parse_json(body)
    except ValueError:
        found = None
    choices = found.get("choices") if isinstance(found, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(found, dict) or not isinstance(choice, dict) or not isinstance(message, dict):
        failure = JudgeUnreadable(f"{where}: expected a chat completion, got {excerpt(body)}. Check the address.")
        return ChatReply("", failure, whole=False)
    content = message.get("content")
    if isinstance(content, list):  # reasoning is not a reply
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") != "thinking"]
        text = "".join(part for part in parts if isinstance(part, str))
    else:
        text = content if isinstance(content, str) else ""
    reason = choice.get("finish_reason")
    problem: InfraError | None = None
    if reason == "length":
        problem = JudgeTruncated(
            f"{where}: expected a whole reply, got one that was cut off (finish_reason 'length'): {text[-80:]!r}. "
            "Raise max_tokens, or let the judge think less."
        )
    elif reason == "content_filter":
        problem = JudgeRefused(f"{where}: expected a reply, got finish_reason 'content_filter'. Use another judge.")
    elif not text.strip() and message.get("refusal"):
        problem = JudgeRefused(f"{where}: expected a reply, got the refusal {str(message['refusal'])[:MAX_SHOWN]!r}.")
    elif not text.strip():
        thought = message.get("reasoning_content") or message.get("reasoning")
        got = "reasoning and nothing after it" if thought else f"no text (finish_reason {reason!r:.40})"
        problem = JudgeUnreadable(f"{where}: expected a reply, got {got}. Look at the judge's chat template.")
    usage = found.get("usage")
    counts = [_count(usage, name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count or 0 for count in counts)
    return ChatReply("" if problem else text, problem, prompt, completion, None not in counts)


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


class ConcurrencyLimit:
    """Lets at most `max_concurrent` callers in, on each event loop; waiting does not count toward their time limits."""

    def __init__(self, max_concurrent: int) -> None:
        self._free = PerLoop(lambda: asyncio.Semaphore(max_concurrent))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it inside."""
        free = self._free.here()
        with waiting():
            await free.acquire()
        try:
            yield
        finally:
            free.release()
