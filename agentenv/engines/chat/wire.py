"""Write requests and read answers of `POST /chat/completions`, and price them.

Source: OpenAI's API reference, "Create chat completion"; vLLM's, DeepSeek's and OpenRouter's additions to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv._util.brief import brief, brief_json
from agentenv.chat.tool_calls.messages import call_id
from agentenv.core.arguments import number, parse_json_object
from agentenv.core.types import Answer, Completion, Conversation, FinishReason, SamplingParams
from agentenv.errors import ConfigError, EngineError

_FINISH: Mapping[str, FinishReason] = {
    "stop": "stop", "tool_calls": "stop", "function_call": "stop", "end_turn": "stop",
    "length": "length", "max_tokens": "length",
}  # fmt: skip
_MAX_COUNT = 20_000_000
"""Tokens, more than any model reads; a server that counts more counts wrongly, and its counts are unknown."""
_MAX_CALLS = 1000
_TOOL_KEYS = ("name", "description", "parameters", "strict")
_PRICES = ("input", "output", "cached_input")


class EmptyAnswer(EngineError):
    """An answer has neither text nor calls nor counted tokens."""


class FilteredAnswer(EngineError):
    """A filter of the server removed the answer."""


class RepeatedAnswer(EngineError):
    """An answer is that of an earlier request."""


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Dollars for a million tokens."""

    input: float
    output: float
    cached_input: float

    def cost_usd(self, num_input: int, num_cached: int, num_output: int) -> float:
        """Return the price of a request."""
        fresh = (num_input - num_cached) * self.input
        return (fresh + num_cached * self.cached_input + num_output * self.output) / 1e6


def read_prices(spec: str | Mapping[str, Any], model: str) -> dict[str, TokenPrices]:
    """Return prices by the name of the model.

    Args:
        spec: FILE.json, JSON text or an object, in dollars per million tokens:
            `{"MODEL": {"input": 2.5, "output": 10, "cached_input": 1.25}}`. Cached input costs as much as other input
            if its price is missing.
        model: a model whose prices are needed.

    Raises:
        ConfigError: the file cannot be read, a price is not valid, or those of `model` are missing.
    """
    if isinstance(spec, str):
        text, path = spec, Path(spec).expanduser()
        if not spec.lstrip().startswith("{"):
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--prices: expected FILE.json or a JSON object, got {spec!r}: {error}.") from error
        spec = parse_json_object("--prices", text)
    expected = '{"input": 2.5, "output": 10}, optionally with "cached_input"'
    found = {}
    for each, prices in {model: None, **spec}.items():
        if not isinstance(prices, dict) or not {"input", "output"} <= prices.keys() <= set(_PRICES):
            raise ConfigError(f"--prices: expected {expected} under {each!r}, got {brief(prices)}. Add the model's.")
        values = {name: number(f"--prices: {each}: {name}", value, low=0.0) for name, value in prices.items()}
        found[each] = TokenPrices(**{"cached_input": values["input"], **values})
    return found


def request_fields(model: str, asked: Conversation, sampling: SamplingParams) -> dict[str, Any]:
    """Return a request without its limit of tokens.

    What has the value of no effect is left out, except the temperature: some models refuse such fields.

    Raises:
        ConfigError: no such API has a parameter of the sampling.
    """
    for name in ("min_tokens", "stop_token_ids", "structural_tag"):
        if value := getattr(sampling, name):
            raise ConfigError(f"--{name}: expected none with --engine chat, got {value!r}. Leave it out.")
    fields: dict[str, Any] = {"model": model, "messages": asked.messages, "temperature": sampling.temperature}
    fields |= {"top_p": sampling.top_p} if sampling.top_p < 1.0 else {}
    fields |= {"top_k": sampling.top_k} if sampling.top_k > 0 else {}
    fields |= {"min_p": sampling.min_p} if sampling.min_p > 0.0 else {}
    fields |= {"stop": list(sampling.stop)} if sampling.stop else {}
    fields |= {"seed": sampling.seed} if sampling.seed is not None else {}
    if asked.tools:  # without what servers may refuse, such as the type of the result
        functions = [schema.get("function", schema) for schema in asked.tools]
        kept = [{key: function[key] for key in _TOOL_KEYS if key in function} for function in functions]
        fields["tools"] = [{"type": "function", "function": each} for each in kept]
    return fields


def completion_of(found: Mapping[str, Any], asked: Conversation, prices: TokenPrices | None) -> Completion:
    """Return the only choice of a chat completion.

    Raises:
        EngineError: it is something else, or a filter removed the answer, or it is empty.
    """
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise EngineError(f"expected a chat completion with one choice, got {brief_json(found)}. Check the address.")
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise FilteredAnswer("expected an answer, got finish_reason 'content_filter': the server refused it.")
    finish = _FINISH.get(reason) if isinstance(reason, str) else None
    if finish is None:
        raise EngineError(f"expected a finish_reason, one of {', '.join(_FINISH)}, got {reason!r:.80}.")
    calls = _calls(message.get("tool_calls"), len(asked.messages))
    content = _text(message.get("content"), "content") or _text(message.get("refusal"), "refusal")
    usage = found.get("usage")
    num_input, num_output = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    num_cached = _count(details, "cached_tokens") or _count(usage, "prompt_cache_hit_tokens") or 0
    if not content and not calls and finish == "stop" and not num_output:
        got = brief_json({"finish_reason": reason, "message": message, "usage": usage})
        raise EmptyAnswer(f"expected text or tool calls, got neither: {got}.")
    num_cached = min(num_cached, num_input or 0)
    cost = None
    if prices is not None and num_input is not None and num_output is not None:
        cost = prices.cost_usd(num_input, num_cached, num_output)
    reasoning = next(filter(None, (_text(message.get(key), key) for key in ("reasoning_content", "reasoning"))), "")
    model = found.get("model") if isinstance(found.get("model"), str) else ""
    answer = Answer(content, calls, reasoning, str(model), num_input, num_output, cost)
    return Completion((), finish, num_cached_tokens=num_cached, answer=answer)


def _calls(found: Any, turn_index: int) -> tuple[Mapping[str, Any], ...]:
    """Return the calls, with ids for those whose id is missing or repeated."""
    calls: list[Mapping[str, Any]] = []
    taken: set[str] = set()
    if found is not None and (not isinstance(found, list) or len(found) > _MAX_CALLS):
        raise EngineError(f"tool_calls: expected a list of at most {_MAX_CALLS}, got {brief_json(found)}.")
    for index, call in enumerate(found or ()):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise EngineError(f"tool_calls: expected calls of functions, got {brief_json(call)}.")
        given = call.get("id")
        name = given if isinstance(given, str) and given and given not in taken else call_id(turn_index, index)
        taken.add(name)
        calls.append({"type": "function", **call, "id": name})
    return tuple(calls)


def _text(found: Any, name: str) -> str:
    if isinstance(found, list) and all(isinstance(part, dict) for part in found):
        # Parts of other types are not the answer, such as reasoning.
        found = "".join(_text(part.get("text"), name) for part in found if part.get("type") == "text")
    if found is None or isinstance(found, str):
        return found or ""
    raise EngineError(f"{name}: expected text, got {brief_json(found)}.")


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT
    return value if is_count else None
