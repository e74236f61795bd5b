"""OpenAI's responses as JSON (`POST /v1/responses`): a translation to chat completions and back, for the same session.

Source: the reference of `POST /v1/responses` and the models of openai-python 3. The API keeps conversations: a
`ResponseLog` knows what `previous_response_id` and references to items name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.http.json_bodies import json_text
from agentenv._util.off_loop import size_of
from agentenv.core.types import Message
from agentenv.episode.endpoint.wire import ChatRequest, RequestError, check_neutral

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
}
"""Fields that are accepted only with neutral values, besides those of chat completions."""
_TRANSLATED = (
    "input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "max_output_tokens", "reasoning",
    "include",
)  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"


class ResponseLog:
    """The conversations of a session that later requests can name, by the id of their last response."""

    def __init__(self) -> None:
        self._conversations: dict[str, Sequence[Message]] = {}
        self._items: dict[str, Mapping[str, Any]] = {}

    def chat_body(self, body: Any) -> dict[str, Any]:
        """Return the body of the same request for chat completions; the session checks it.

        Raises:
            RequestError: a field is wrong or asks for an unsupported feature.
        """
        if not isinstance(body, Mapping):
            raise RequestError(f"request: expected a JSON object, got {type(body).__name__}.")
        check_neutral(body, _NEUTRAL)
        text, reasoning, instructions = _object(body, "text"), _object(body, "reasoning"), body.get("instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        return {
            **{name: value for name, value in body.items() if name not in _TRANSLATED},
            "messages": [*system, *self.conversation(body)],
            "tools": [_nested(tool, "function", "function") for tool in _list(body, "tools")],
            "tool_choice": _nested(body.get("tool_choice"), "function", "function"),
            "response_format": _nested(text.get("format"), "json_schema", "json_schema"),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": reasoning.get("effort"),
            "max_completion_tokens": body.get("max_output_tokens"),
            "logprobs": _LOGPROBS in _list(body, "include"),
        }

    def conversation(self, body: Mapping[str, Any]) -> list[Message]:
        """Return the messages of a request: those of the response that it continues, and its input.

        Raises:
            RequestError: the input is wrong, or names what is not known here.
        """
        earlier, given = body.get("previous_response_id"), body.get("input")
        if earlier is not None and str(earlier) not in self._conversations:
            raise RequestError(
                f"previous_response_id: expected the id of a response of this episode, got {brief(earlier)}. Send the "
                "conversation as input."
            )
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise RequestError(f"input: expected text or a list of items, got {brief(given)}.")
        messages = list(self._conversations.get(str(earlier), ()))
        if messages and messages[-1].get("tool_calls"):  # they get more calls, and are another response's, too
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1]["tool_calls"]]}
        for index, item in enumerate(items):
            self._append(messages, item, f"input[{index}]")
        return messages

    def _append(self, messages: list[Message], item: Any, where: str) -> None:
        """Add an item: message, call, result or reasoning. A call belongs to the assistant's message before it."""
        kind = (item.get("type") or "message") if isinstance(item, Mapping) else None
        if kind == "item_reference" and str(item.get("id")) in self._items:
            return self._append(messages, self._items[str(item["id"])], where)
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message":
            if last is not None and item.get("role") == "assistant" and set(last) == {"role", "reasoning_content"}:
                messages[-1] = {**last, "content": _content(item.get("content"))}
            else:
                messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if last is None:
                messages.append({"role": "assistant", "tool_calls": [call]})
            elif last.get("tool_calls"):
                last["tool_calls"].append(call)
            else:
                messages[-1] = {**last, "tool_calls": [call]}
        elif kind == "function_call_output":
            result = {"tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            messages.append({"role": "tool", **result})
        elif kind == "reasoning":
            parts = _list(item, "content")
            if text := "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping)):
                messages.append({"role": "assistant", "reasoning_content": text})
        else:
            raise RequestError(
                f"{where}: expected a message, function_call, function_call_output, reasoning or the reference of a "
                f"known item, got {brief(item)}. Leave it out."
            )
        return None

    def add(self, response: Mapping[str, Any], messages: Sequence[Message], answer: Message) -> None:
        """Keep a response, and the conversation that its answer ends."""
        self._conversations[response["id"]] = [*messages, answer]
        self._items.update({item["id"]: item for item in response["output"]})


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name}: expected an object, got {brief(value)}.")
    return value


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise RequestError(f"{name}: expected a list, got {brief(value)}.")
    return value


def _nested(value: Any, kind: str, key: str) -> Any:
    """Return an object of this type with its other fields under a key, where chat completions have them.

    Anything else stays as it is: chat completions refuse it.
    """
    if not isinstance(value, Mapping) or value.get("type") != kind:
        return value
    return {"type": kind, key: {name: each for name, each in value.items() if name != "type"}}


def _content(content: Any) -> Any:
    """Return the content of an item with its texts as chat completions have them; they refuse all other parts."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


class ResponseForm:
    """How a response is sent: whole, or as the events of a stream."""

    def __init__(
        self, log: ResponseLog, body: Mapping[str, Any], request: ChatRequest, base: Mapping[str, Any]
    ) -> None:
        self._log, self._body, self._request = log, body, request
        self._id, self._created, self._model = f"resp_{base['id']}", base["created"], base["model"]
        self._numbers = itertools.count()
        self.size = size_of(body)

    def whole(self, completion: Mapping[str, Any]) -> dict[str, Any]:
        """Return OpenAI's response for a chat completion, which the log keeps unless the request forbids it."""
        (choice,) = completion["choices"]
        is_cut = choice["finish_reason"] == "length"
        usage = completion["usage"]
        response = self._response("incomplete" if is_cut else "completed") | {
            "output": list(self._items(choice, "incomplete" if is_cut else "completed")),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        if self._body.get("store") is not False:
            self._log.add(response, self._log.conversation(self._body), choice["message"])
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        echoed = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "text": body.get("text") or {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "metadata": body.get("metadata") or {},
            "store": body.get("store") is not False,
            "truncation": "disabled",
            "usage": None,
            **{name: body.get(name) for name in echoed},
        }

    def _items(self, choice: Mapping[str, Any], status: str) -> Iterator[dict[str, Any]]:
        """Yield the items of an answer: reasoning, text, each call."""
        message = choice["message"]
        name = self._id.removeprefix("resp_")
        if message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            yield {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [part], "status": status}
        calls = message.get("tool_calls", ())
        if message["content"] or not calls:
            logprobs = (choice["logprobs"] or {}).get("content", [])
            text = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": logprobs}
            yield {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [text], "status": status}
        for index, call in enumerate(calls):
            identity = {"type": "function_call", "id": f"fc_{name}_{index}", "call_id": call["id"]}
            yield {**identity, **call["function"], "status": "completed"}

    def opening(self) -> Iterator[str]:
        """Yield the events before the answer is known."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def closing(self, completion: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events of an answer: each item with its parts, and the response."""
        response = self.whole(completion)
        for index, item in enumerate(response["output"]):
            blank: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
            at: dict[str, Any] = {"output_index": index}
            yield self._event("response.output_item.added", **at, item={**item, **blank, "status": "in_progress"})
            at["item_id"] = item["id"]
            if item["type"] == "message":
                part, at["content_index"] = item["content"][0], 0
                text = {"logprobs": part["logprobs"]}
                yield self._event("response.content_part.added", **at, part={**part, "text": "", "logprobs": []})
                yield self._event("response.output_text.delta", **at, **text, delta=part["text"])
                yield self._event("response.output_text.done", **at, **text, text=part["text"])
                yield self._event("response.content_part.done", **at, part=part)
            elif item["type"] == "function_call":
                arguments = item["arguments"]
                yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
                yield self._event("response.function_call_arguments.done", **at, arguments=arguments, name=item["name"])
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: Mapping[str, Any]) -> str:
        """Return the event of an error after the stream began."""
        inner = error["error"]
        return self._event("error", code=inner["code"], message=inner["message"], param=None, error=inner)

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\ndata: {json_text(data)}\n\n"
