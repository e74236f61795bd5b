"""Milliseconds to compute the tokens of the next observation after a long history, in three ways.

    python benchmarks/chat_bridge.py

`bridge` is `Chat.bridge`: it renders and encodes only what is new. `rerender` is transformers' `apply_chat_template`
over the whole conversation, to ids, as in loops that store messages instead of tokens. `renderers` is the hand-written
`bridge_to_next_turn` of the package of that name, where it is installed (0.1.12). The three alternate on one thread,
so that other load affects all of them equally. The tokenizers are those of the tests: real rules, small vocabularies,
with which the same number of tokens is less text than with a real one, which favors `rerender`.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.chat.chat import Chat

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.chat.families import FAMILIES, load  # after the path is set

HISTORY_TOKENS = 28_000
ROUNDS = 200
RENDERERS = {"Qwen3-2507": "qwen3", "Llama-3.1": "llama-3", "Kimi-K2-Thinking": "kimi-k2"}
"""Families of templates, and the renderers that support them."""
WORDS = "The sum of 17 and 25 is 42, so we carry on; if x:\n    return f(x) # next, please. " * 2
NEW: dict[str, list[dict[str, Any]]] = {
    "user, 15 characters": [{"role": "user", "content": "second question"}],
    "tool, 15 characters": [{"role": "tool", "content": "result of a run", "tool_call_id": "call0", "name": "lookup"}],
    "tool, 2,000 characters": [
        {"role": "tool", "content": (WORDS * 20)[:2000], "tool_call_id": "call0", "name": "lookup"}
    ],
}


def conversation(chat: Chat) -> tuple[list[dict[str, str]], list[int]]:
    """Return messages with the requested number of tokens, the last one a user's, and their ids."""

    def say(num: int) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": f"{i}. {WORDS}"} for i in range(num)]

    one, three = len(chat.prompt(say(1))), len(chat.prompt(say(3)))
    messages = say(1 + 2 * math.ceil((HISTORY_TOKENS - one) / (three - one)))
    return messages, chat.prompt(messages)


def their_bridge(tokenizer: Any, name: str, prompt: list[int], action: list[int], new: Any) -> Callable[[], Any] | None:
    if importlib.util.find_spec("renderers") is None:
        return None
    import renderers

    config = type(renderers.config_from_name(name))(thinking_retention="all")
    renderer = renderers.create_renderer(tokenizer, config)
    return lambda: renderer.bridge_to_next_turn(prompt, action, new)


def time_all(ways: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the milliseconds of each round and variant, without the first rounds, which fill caches."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for round_index in range(-5, ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if round_index >= 0:
                spent[name].append(1000 * (time.perf_counter() - start))
    return spent


def measure(family: Any, new: list[dict[str, Any]]) -> tuple[dict[str, list[float]], int]:
    tokenizer = load(family)
    chat = Chat(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(family.stop_tokens)))
    messages, prompt = conversation(chat)
    answer = "so the answer is 42"
    action = [*chat.encode(answer), *chat.template.close_ids]
    whole = [*messages, {"role": "assistant", "content": answer}, *new]
    ways: dict[str, Callable[[], Any]] = {
        "bridge": lambda: chat.bridge(action, new),
        "rerender": lambda: tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_dict=False),
    }
    theirs = their_bridge(tokenizer, RENDERERS[family.name], prompt, action, new)
    if theirs is not None:
        ways["renderers"] = theirs
    return time_all(ways), len(prompt)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def main() -> None:
    print(f"ms, p50 / p99 of {ROUNDS} rounds; a ratio is the p50 beside that of bridge")
    print(f"{'template':<18}{'observation':<24}{'history':>8}{'bridge':>16}{'rerender':>18}{'ratio':>7}", end="")
    print(f"{'renderers':>18}{'ratio':>7}")
    for family in (family for family in FAMILIES if family.name in RENDERERS):
        for kind, new in NEW.items():
            spent, num_tokens = measure(family, new)
            base = statistics.median(spent["bridge"])
            print(f"{family.name:<18}{kind:<24}{num_tokens:>8}{base:>8.2f} / {p99(spent['bridge']):<5.2f}", end="")
            for name in ("rerender", "renderers"):
                values = spent.get(name)
                cell = f"{statistics.median(values):.2f} / {p99(values):.2f}" if values else "-"
                print(
                    f"{cell:>18}{f'{statistics.median(values) / base:.1f}' if values else '-':>7}", end="", flush=True
                )
            print()


if __name__ == "__main__":
    main()
