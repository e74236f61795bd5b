"""OpenAI's chat completions as JSON: read and check requests, write answers and errors.

Source: the reference of `POST /v1/chat/completions` and the request and response models of openai-python 1 to 3.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentenv._util.brief import brief
from agentenv._util.http.json_bodies import json_text
from agentenv.core.arguments import is_finite
from agentenv.core.messages import normalized, normalized_message
from agentenv.core.types import Completion, Message
from agentenv.errors import DataError
from agentenv.tools.calling import ParsedAction

_NO_LOGPROB = -9999.0
"""OpenAI's value for a missing log-probability; JSON has no NaN."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_UNSUPPORTED = (
    "reasoning_effort", "prediction", "web_search_options", "audio", "allowed_token_ids", "truncate_prompt_tokens",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
)  # fmt: skip
"""Fields without a neutral value."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template_kwargs": ({},),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    **dict.fromkeys(_UNSUPPORTED, ()),
}
"""Fields that are accepted only with neutral values, because no engine here supports the others."""


class RequestError(DataError):
    """A request whose own content prevents an answer."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"


class OutOfRoom(RequestError):
    """The session's budget of tokens is exhausted. Clients know it by the code, or by "maximum context length is"."""

    code = "context_length_exceeded"


class OutOfTurns(RequestError):
    """The session's budget of turns is exhausted.

    After 404, no client of chat completions sends the request again. litellm takes the type "invalid_request_error" for
    400, and has no error for 403: after both, mini-swe-agent asks ten times.
    """

    status, code = 404, "max_turns_exceeded"


class OutOfTurnsForStream(OutOfTurns):
    """The same for a stream of responses: Codex, which asks for one, takes only 400 for final."""

    status = 400


class UnknownSession(RequestError):
    """No session has this id: it was never opened, or is closed."""

    status, code = 404, "unknown_session"


class BodyTooLarge(RequestError):
    """The body is larger than the server accepts."""

    status, code = 413, "body_too_large"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One checked request."""

    messages: tuple[Message, ...]
    """Role, text content, and tool fields; arguments of calls are objects if they are valid JSON."""
    tools: tuple[Mapping[str, Any], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the request sets."""
    max_tokens: int | None = None
    wants_calls: bool = True
    """False where `tool_choice` is "none": calls stay text."""
    must_call: tuple[str, ...] = ()
    """Names of the tools one of which `tool_choice` demands; empty if a call is optional."""
    one_call: bool = False
    """True if at most one call is wanted: `tool_choice` names a tool, or `parallel_tool_calls` is false."""
    json_schema: Mapping[str, Any] | None = None
    """The schema of an answer in JSON that `response_format` demands."""
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    model: str = ""


def read_request(body: Any) -> ChatRequest:
    """Return the request in a body.

    Fields that affect neither sampling nor the conversation (`user`, `metadata`, `store`, …) are ignored.

    Raises:
        RequestError: a field is missing, wrong, or asks for an unsupported feature.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"request: expected a JSON object, got {type(body).__name__}.")
    check_neutral(body, _NEUTRAL)
    is_optional = body.get("tool_choice") in (None, "auto")
    if body.get("parallel_tool_calls") is False and body.get("tools") and is_optional:
        raise RequestError(
            "parallel_tool_calls: expected True with tools whose call is optional, got False. Leave it out."
        )
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: expected a list of at least one message, got {brief(messages)}.")
    read = tuple(read_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    tools = tuple(_tools(body.get("tools") or []))
    names = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    options = body.get("stream_options")
    return ChatRequest(
        tuple(normalized(read)),
        tools,
        _sampling(body),
        _number(body, names[0], int) if names else None,
        wants_calls=body.get("tool_choice") != "none",
        must_call=_must_call(body.get("tool_choice"), [tool["function"]["name"] for tool in tools]),
        one_call=isinstance(body.get("tool_choice"), Mapping) or body.get("parallel_tool_calls") is False,
        json_schema=_json_schema(body.get("response_format")),
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        model=str(body.get("model") or ""),
    )


def check_neutral(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that are neither absent nor neutral.

    Raises:
        RequestError: there is one.
    """
    for name, taken in neutral.items():
        if body.get(name) is not None and body[name] not in taken:
            expected = " or ".join(map(repr, taken)) or "no value"
            raise RequestError(f"{name}: expected {expected}, got {brief(body[name])}. Leave it out.")


def _must_call(choice: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the tools one of which a `tool_choice` demands."""
    if choice in (None, "auto", "none"):
        return ()
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    wanted = [str(function.get("name"))] if isinstance(function, Mapping) else []
    wanted = list(names) if choice == "required" else wanted
    if not wanted or not set(wanted) <= set(names):
        raise RequestError(
            f"tool_choice: expected 'auto', 'none', 'required' or a function among the tools {list(names)}, got "
            f"{brief(choice)}."
        )
    return tuple(wanted)


def _json_schema(response_format: Any) -> Mapping[str, Any] | None:
    """Return the schema that a `response_format` demands; None for text."""
    given = response_format if isinstance(response_format, Mapping) else {}
    kind = given.get("type")
    if response_format is None or kind == "text":
        return None
    named = given.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, Mapping):
        raise RequestError(
            "response_format: expected the type text, json_object, or json_schema with an object as its schema, got "
            f"{brief(response_format)}."
        )
    return schema


def _number(body: Mapping[str, Any], name: str, kind: Callable[[Any], Any]) -> Any:
    value = body[name]
    if isinstance(value, bool) or not is_finite(value) or kind(value) != value:
        what = "an integer" if kind is int else "a number"
        raise RequestError(f"{name}: expected {what}, got {brief(value)}.")
    return kind(value)


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, Callable[[Any], Any]] = {
        "temperature": float, "top_p": float, "min_p": float, "top_k": int, "min_tokens": int, "seed": int,
    }  # fmt: skip
    found = {name: _number(body, name, kind) for name, kind in kinds.items() if body.get(name) is not None}
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise RequestError(f"stop: expected text or a list of texts, none empty, got {brief(stop)}.")
    return {**found, "stop": tuple(stops)} if stops else found


def _tools(tools: Any) -> Iterator[Mapping[str, Any]]:
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function, kind = (tool.get("function"), tool.get("type")) if isinstance(tool, Mapping) else (None, None)
        if kind not in (None, "function"):
            raise RequestError(
                f"tools[{index}]: expected the type 'function', got {brief(kind)}, which needs its own server: "
                f"{brief(tool)}. Leave that tool out."
            )
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{index}]: expected a function with a name, got {brief(tool)}. Complete it.")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise RequestError(f"tools[{index}]: expected parameters as a JSON schema, got {brief(tool)}.")
        check_text(function, f"tools[{index}]")
        yield {"type": "function", "function": function}


def read_message(message: Any, where: str) -> Message:
    """Return a message with the fields that templates use; a request cannot mark its text as trusted."""
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise RequestError(f"{where}: expected a message with a role, got {brief(message)}. Complete it.")
    try:
        given = normalized_message(message)
    except DataError as error:
        raise RequestError(f"{where}.{error}") from error
    if not isinstance(given["content"], str):
        raise RequestError(f"{where}.content: expected text or text parts, got {brief(given['content'])}. Send text.")
    check_text(given["content"], f"{where}.content")
    read: dict[str, Any] = {"role": given["role"], "content": given["content"]}
    if given["role"] == "assistant":
        reasoning = given.get("reasoning_content")
        calls = []
        for index, call in enumerate(given.get("tool_calls", ())):
            function = {name: call["function"].get(name) for name in ("name", "arguments")}
            if not isinstance(function["name"], str):
                at = f"{where}.tool_calls[{index}]"
                raise RequestError(f"{at}: expected a call of a function, got {brief(call)}. Complete it.")
            calls.append({"id": str(call.get("id") or ""), "type": "function", "function": function})
        read |= {"reasoning_content": reasoning} if isinstance(reasoning, str) and reasoning else {}
        read |= {"tool_calls": calls} if calls else {}
    if given["role"] == "tool":
        read["tool_call_id"] = str(given.get("tool_call_id") or "")
    if isinstance(given.get("name"), str):
        read["name"] = given["name"]
    return read


def check_text(value: Any, where: str) -> None:
    """Refuse lone surrogates, which JSON can contain and tokenizers do not accept.

    Raises:
        RequestError: the text, or a text in a JSON value, contains one.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = text[max(0, error.start - 20) : error.start + 20]
        raise RequestError(f"{where}: expected Unicode text, got a lone surrogate in {got!r}.") from error


def answer_message(action: str, parsed: ParsedAction | None, reasoning: str | None = None) -> dict[str, Any]:
    """Return an action as OpenAI's assistant message: calls separate, malformed ones left in the text."""
    content: str | None = action
    if parsed is not None and parsed.calls:
        content = "\n".join(text for text in (parsed.content, *(bad.text for bad in parsed.malformed)) if text) or None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if parsed is not None and parsed.calls:
        message["tool_calls"] = calls = []
        for call in parsed.calls:
            function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
            calls.append({"id": call.call_id, "type": "function", "function": function})
    return message


def logprobs_of(completion: Completion, decode: Callable[[Sequence[int]], str]) -> dict[str, Any] | None:
    """Return log-probabilities of the sampled tokens only; `top_logprobs` stay empty."""
    if completion.logprobs is None:
        return None
    content = []
    for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = decode([token_id])
        known = logprob if math.isfinite(logprob) else _NO_LOGPROB
        content.append(
            {"token": text, "logprob": known, "bytes": [*text.encode("utf-8", "replace")], "top_logprobs": []}
        )
    return {"content": content, "refusal": None}


def chat_completion(
    completion: Completion,
    message: Mapping[str, Any],
    *,
    request_id: str,
    model: str,
    num_prompt_tokens: int,
    logprobs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return OpenAI's response object."""
    num = len(completion.token_ids)
    reason = "length" if completion.finish_reason != "stop" else "tool_calls" if "tool_calls" in message else "stop"
    choice = {"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": logprobs}
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num,
        "total_tokens": num_prompt_tokens + num,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
    }
    identity = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
    return {**identity, "object": "chat.completion", "choices": [choice], "usage": usage}


class ChatForm:
    """How a chat completion is sent: whole, or as the events of a stream."""

    size = 0
    """About how many characters it repeats of the request."""

    def __init__(self, request: ChatRequest, base: Mapping[str, Any]) -> None:
        self._request = request
        self._base = {**base, "id": f"chatcmpl-{base['id']}", "object": "chat.completion.chunk"}

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return OpenAI's response object."""
        return completion

    def opening(self) -> Iterator[str]:
        """Yield the event before the answer is known: the role."""
        yield self._chunk({"role": "assistant", "content": ""})

    def closing(self, completion: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events of an answer: reasoning, content, each call, the end, and usage if requested."""
        (choice,) = completion["choices"]
        message = choice["message"]
        if message.get("reasoning_content"):
            yield self._chunk({"reasoning_content": message["reasoning_content"]})
        if message["content"] or choice["logprobs"]:
            yield self._chunk({"content": message["content"] or ""}, logprobs=choice["logprobs"])
        for index, call in enumerate(message.get("tool_calls", ())):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, choice["finish_reason"])
        if self._request.include_usage:
            yield _event({**self._base, "choices": [], "usage": completion["usage"]})
        yield "data: [DONE]\n\n"

    def failure(self, error: Mapping[str, Any]) -> str:
        """Return the event of an error after the stream began."""
        return _event(error)

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        end = {"usage": None} if self._request.include_usage else {}
        choices = [{"index": 0, "delta": dict(delta), "finish_reason": finish, "logprobs": logprobs}]
        return _event({**self._base, "choices": choices, **end})


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json_text(data)}\n\n"


def error_type(status: int) -> str:
    """Return OpenAI's type of an error with this status."""
    if status >= 500:
        return "server_error"
    return "not_found_error" if status == 404 else "invalid_request_error"


def error_body(message: str, *, kind: str, code: str) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
