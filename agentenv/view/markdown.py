"""An episode as Markdown, for an issue or a paper: fenced texts, so that nothing in it is formatted, linked or run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence

from agentenv._util.jsonable import jsonable
from agentenv._util.plurals import counted
from agentenv._util.terminal import safe
from agentenv.chat.chat import text_of
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.types import Message
from agentenv.runs.display.conversation import number_text
from agentenv.view.excerpt import mean_logprob, probability_text
from agentenv.view.texts import TokenTexts

_MAX_IMPROBABLE = 8
_IMPROBABLE = -1.0
"""Log-probability below which a token is listed."""
_PING = re.compile(r"@(?=[\w-])|#(?=\d)")
_JOINER = "\u200d"


def episode_to_markdown(trajectory: Trajectory, texts: TokenTexts | None, run: str) -> str:
    """Return an episode of the run named `run` as Markdown.

    Texts of models and environments are in fences and code spans only. A joiner after `@`, and after `#` before a
    number, keeps sites from notifying people and linking issues; characters that are invisible are escaped.
    """
    reason = trajectory.stop_reason.value if trajectory.stop_reason else "unfinished"
    facts = [
        f"### Episode {_code(trajectory.episode_id)}: reward {number_text(trajectory.reward)}, {_code(reason)}",
        f"Run {_code(run)}, turns {len(trajectory.turns)}, tokens {trajectory.num_tokens}"
        + ("" if trajectory.task.label is None else f", label {_code(str(trajectory.task.label))}"),
    ]
    error = trajectory.error
    if error is not None:
        facts.append(f"Failed in {_code(error.where or '?')}: {_code(f'{error.type}: {error.message}')}")
    prompt = trajectory.prompt or trajectory.task.prompt
    return "\n\n".join([*facts, *_messages("prompt", prompt), _table(trajectory), *_turns(trajectory, texts)]) + "\n"


def _table(trajectory: Trajectory) -> str:
    rows = ["| turn | reward | tokens | mean log-prob | finish |", "|---|---|---|---|---|"]
    for number, turn in enumerate(trajectory.turns):
        mean = mean_logprob(trajectory, turn)
        cells = [
            str(number), number_text(turn.result.reward if turn.result else None), str(turn.num_tokens),
            "" if mean is None else f"{mean:.3f}", _code(str(turn.finish_reason)).replace("|", "\\|"),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _turns(trajectory: Trajectory, texts: TokenTexts | None) -> Iterator[str]:
    for number, turn in enumerate(trajectory.turns):
        result = turn.result
        reward = number_text(result.reward if result else None)
        yield f"<details open><summary>turn {number}, reward {reward}, {counted(turn.num_tokens, 'token')}</summary>"
        yield _fenced(turn.action)
        improbable = [] if texts is None else _improbable(trajectory, turn, texts)
        if improbable:
            yield f"Least probable: {', '.join(improbable)}"
        if result is not None:
            if result.info:
                info = json.dumps(jsonable(result.info), ensure_ascii=False)
                yield f"info {_code(info)}"
            yield from _messages("observation", result.observation)
        yield "</details>"


def _improbable(trajectory: Trajectory, turn: Turn, texts: TokenTexts) -> list[str]:
    """Return the least probable tokens of an action in words."""
    segment = trajectory.segments[turn.segment]
    found, _ = texts.of(segment.token_ids)
    logprobs = [(segment.logprobs[at], at) for at in range(turn.start, turn.end)]
    low = sorted(each for each in logprobs if each[0] < _IMPROBABLE)[:_MAX_IMPROBABLE]
    return [f"{_code(found[at])} p {probability_text(value)}" for value, at in low if not math.isnan(value)]


def _messages(title: str, messages: str | Sequence[Message]) -> Iterator[str]:
    given = [{"role": "", "content": messages}] if isinstance(messages, str) else messages
    for message in given:
        text = text_of(message)
        calls = message.get("tool_calls")
        if calls:
            text += f"\n{json.dumps(jsonable(calls), ensure_ascii=False)}"
        if text:
            role = str(message.get("role") or "")
            yield f"{title}{f' ({_code(role)})' if role else ''}:"
            yield _fenced(text)


def _fenced(text: str) -> str:
    """Return text between fences that are longer than any in it."""
    shown = _unlinked(safe(text))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}text\n{shown}\n{fence}"


def _code(text: str) -> str:
    """Return text as a code span on one line."""
    shown = _unlinked(safe(text).replace("\n", "↵").replace("\t", "⇥"))
    ticks = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if not shown or shown[0] in "` " or shown[-1] in "` " else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def _unlinked(text: str) -> str:
    return _PING.sub(lambda match: match[0] + _JOINER, text)
