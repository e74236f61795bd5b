"""`agentenv show`: an episode as a conversation, for a person who reads it in a terminal."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv._util.jsonable import jsonable
from agentenv._util.plurals import counted, decimal, histogram
from agentenv._util.terminal import safe
from agentenv.chat.chat import text_of
from agentenv.chat.tool_calls.parse import ToolFormat
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.types import Message

Piece = tuple[str, str]
"""A text, and its style in rich's words."""
_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_LABEL_CHARS = 500
_REQUESTS = "request retry", "request retries"
SPAN_TITLES = {"prompt": "prompt", "action": "action", "close": "synthesized close", "feedback": "feedback"}
SHADE_LIMITS = (-0.1, -1.0, -3.0, -6.0)
"""Bounds of the shades of log-probabilities, wherever tokens are shown."""


def conversation(trajectory: Trajectory) -> Iterator[Piece]:
    """Yield an episode as texts with styles: its facts, the messages by role, the reward of each turn, and the error.

    Line ends and tabs are real; other characters that a terminal would obey or hide are escaped.
    """
    yield f"━━ {episode_line(trajectory)}\n", "bold"
    task = trajectory.task
    label = "" if task.label is None else f" · label {_one_line(str(task.label))[:_LABEL_CHARS]}"
    yield f"task {_one_line(task.task_id)}{label}\n", "dim"
    if trajectory.tools:
        names = ", ".join(str(_function(tool).get("name")) for tool in trajectory.tools)
        yield f"tools {_one_line(names)}\n", "dim"
    prompt = trajectory.prompt or task.prompt
    yield from _messages([{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt)
    for index, turn in enumerate(trajectory.turns):
        yield from _turn(index, turn, with_tools=bool(trajectory.tools), is_text=isinstance(prompt, str))
    error = trajectory.error
    if error is not None:
        place = f" at {error.place}" if error.place else ""
        yield safe(f"\nerror ({error.kind}) in {error.where or '?'}{place}: {error.type}: "), "bold red"
        yield f"{safe(error.message)}\n", "red"
        yield f"{safe(error.traceback)}\n" if error.traceback else "", "dim"
    yield "\n", ""


def episode_line(trajectory: Trajectory) -> str:
    """Return the facts of an episode on one line."""
    parts = [
        f"episode {trajectory.episode_id}",
        f"stop reason {'none' if trajectory.stop_reason is None else trajectory.stop_reason.value}",
        f"reward {number_text(trajectory.reward)}",
        *([] if trajectory.score is None else [f"score {number_text(trajectory.score)}"]),
        *usage(trajectory),
        *([counted(trajectory.attempt, "earlier attempt")] if trajectory.attempt else []),
        *([f"retried after {histogram(Counter(trajectory.retried))}"] if trajectory.retried else []),
    ]
    return _one_line(" · ".join(parts))


def usage(trajectory: Trajectory) -> list[str]:
    """Return what an episode took: turns, and tokens, dollars and requests that were sent again where there are any."""
    cost, requests = trajectory.cost_usd, sum(turn.num_request_retries for turn in trajectory.turns)
    return [
        counted(len(trajectory.turns), "turn"),
        *([counted(trajectory.num_tokens, "token")] if trajectory.is_counted else []),
        *([] if cost is None else [f"cost ${decimal(cost, 4)}"]),
        *([counted(requests, *_REQUESTS)] if requests else []),
    ]


def turn_usage(turn: Turn) -> list[str]:
    """Return the tokens of an action, if they are known, and what ran again for it."""
    return [
        *([counted(turn.num_tokens, "token")] if turn.is_counted else []),
        *([counted(turn.num_retries, "step retry", "step retries")] if turn.num_retries else []),
        *([counted(turn.num_request_retries, *_REQUESTS)] if turn.num_request_retries else []),
        *([counted(turn.num_failovers, "failover")] if turn.num_failovers else []),
    ]


def number_text(value: float | None) -> str:
    """Return a number for display."""
    return "unknown" if value is None else "missing" if math.isnan(value) else f"{value:.4g}"


def _turn(index: int, turn: Turn, *, with_tools: bool, is_text: bool) -> Iterator[Piece]:
    result = turn.result
    facts = [f"turn {index}", f"reward {number_text(result.reward if result else None)}"]
    facts += [f"score {number_text(result.score)}"] if result is not None and result.score is not None else []
    facts += [*turn_usage(turn), *([turn.finish_reason] if turn.finish_reason != "stop" else [])]
    if turn.answer is not None and turn.answer.reasoning:
        yield from _messages([{"role": "reasoning", "content": turn.answer.reasoning}])
    yield from _head("assistant", " · ".join(facts))
    yield f"{safe(turn.action)}\n", ""
    for call in ToolFormat().parse(turn.action).calls if with_tools else ():
        if "\\" in call.text:  # escapes in JSON are hard to read
            yield from _call(call.name, call.arguments)
    if result is None:
        return
    if result.info:
        numbers = {key: number_text(each) if isinstance(each, float) else each for key, each in result.info.items()}
        yield _one_line(f"info {'  '.join(f'{key}={each}' for key, each in numbers.items())}") + "\n", "dim"
    note = "" if turn.bridge is not None else "not sent to the model"
    note = "the middle was cut out for the model" if turn.observation_cut else note
    observation = result.observation
    if isinstance(observation, str):
        role = "environment" if is_text or turn.bridge == "text" else "user"
        observation = [{"role": role, "content": observation}] if observation else []
    yield from _messages(observation, note)


def _messages(messages: Sequence[Message], note: str = "") -> Iterator[Piece]:
    for message in messages:
        name = f" {message['name']}" if message.get("name") else ""
        yield from _head(str(message.get("role")), note, name)
        content = message.get("content")
        if isinstance(content, list | tuple):
            others = [part for part in content if not (isinstance(part, Mapping) and "text" in part)]
            yield f"‹{len(others)} parts without text›\n" if others else "", "dim"
        yield f"{safe(text_of(message))}\n", ""
        for call in message.get("tool_calls") or ():
            function = _function(call)
            yield from _call(str(function.get("name")), function.get("arguments"))


def _function(given: Any) -> Mapping[str, Any]:
    """Return the function of a tool or a call; empty if there is none."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _head(role: str, note: str, name: str = "") -> Iterator[Piece]:
    yield "\n", ""
    yield f"[{_one_line(role + name)}]", f"bold {_ROLES.get(role, 'blue')}"
    yield f" {note}\n" if note else "\n", "dim"


def _call(name: str, arguments: Any) -> Iterator[Piece]:
    """Yield a tool call with an argument per line; the lines of a text are lines."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    yield f"→ {_one_line(name)}\n", "bold yellow"
    for key, value in arguments.items() if isinstance(arguments, Mapping) else [("arguments", arguments)]:
        text = value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False)
        shown = f"\n{safe(text)}".replace("\n", "\n      ") if "\n" in text else f" {safe(text)}"
        yield f"    {_one_line(str(key))}:{shown}\n", ""


def _one_line(text: str) -> str:
    return safe(text).replace("\n", " ").replace("\t", " ")
