"""The property `feedback`: observations can be rendered in every kind of template, and stay text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentenv.chat.chat import Chat, text_of
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Message
from agentenv.errors import AgentEnvError
from agentenv.testing import chats
from agentenv.testing.conformance.cases import FORGED
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import Problem, problem_at, unique

_ROLES = ("system", "user", "assistant", "tool")
_EMPTY_FIX = "Return what was wrong, or end the episode: a policy without feedback repeats its action."
Observation = str | Sequence[Message]


@dataclass(frozen=True)
class _Output:
    """One observation: a prompt (`method` is reset) or the reply to an action."""

    method: str
    observation: Observation
    tools: Any = None
    is_raw: bool = False
    """The conversation is raw text, to which no template is applied."""


def feedback(context: ConformanceContext) -> list[Problem]:
    """Observations are never empty, have common roles, render in any template, and stay text if they name tokens."""
    context.require_steps()
    cls, problems = context.agent_cls, []
    kinds = [*([context.model_chat] if context.model_chat is not None else []), *chats.every_kind()]
    for output in {repr(output): output for output in _outputs(context)}.values():
        found = [*_empty(cls, output), *_roles(cls, output)]
        observation = output.observation
        texts = [observation] if isinstance(observation, str) else [text_of(m) for m in observation]
        lone = [letter for text in texts for letter in text if 0xD800 <= ord(letter) < 0xE000]
        if lone:
            fix = "Replace lone surrogates: tokenizers reject them, and files cannot store them."
            found.append(_problem(cls, output, "text that is valid Unicode", f"{lone[0]!r}", fix))
        problems += found or [problem for chat in kinds for problem in _rendered(cls, output, chat)]
    return unique(problems)


def _outputs(context: ConformanceContext) -> Iterator[_Output]:
    """Return the prompts, and every observation that a policy reads."""
    for one in context.recorded_episodes:
        prompt = one.trajectory.prompt
        if prompt:
            yield _Output("reset", prompt, one.trajectory.tools or None, isinstance(prompt, str))
        for turn in one.trajectory.turns:
            if turn.result is not None and not turn.result.done:
                yield _Output("step", turn.result.observation, is_raw=isinstance(prompt, str))


def _empty(cls: type[AgentInstance], output: _Output) -> list[Problem]:
    observation = output.observation
    if isinstance(observation, str):
        return [] if observation.strip() else [_problem(cls, output, "feedback that is not empty", f"{observation!r}")]
    empty: list[Any] = [] if observation else [observation]
    for message in observation:
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        has_other = any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in parts)
        if message.get("role") in ("user", "tool") and not has_other and not text_of(message).strip():
            empty.append(dict(message))
    return [_problem(cls, output, "feedback that is not empty", f"{empty[0]!r}")] if empty else []


def _problem(cls: type[AgentInstance], output: _Output, expected: str, got: str, fix: str = _EMPTY_FIX) -> Problem:
    return problem_at(cls, output.method, expected, got[:200], fix)


def _roles(cls: type[AgentInstance], output: _Output) -> list[Problem]:
    if isinstance(output.observation, str):
        return []
    roles = [str(message.get("role")) for message in output.observation]
    unknown = [role for role in roles if role not in _ROLES]
    if unknown:
        fix = "Chat templates support only these roles."
        return [_problem(cls, output, f"roles among {', '.join(_ROLES)}", f"{unknown[0]!r}", fix)]
    fix = "Merge the messages: many templates reject roles that do not alternate."
    talk = roles[1:] if output.method == "reset" and roles[:1] == ["system"] else roles
    before = ["assistant", *talk] if output.method == "step" else talk
    twice = [one for one, other in pairwise(before) if one == other and one != "tool"]
    if twice or "system" in talk:
        return [_problem(cls, output, "messages whose roles alternate", f"{roles}", fix)]
    if roles[-1] == "assistant":
        return [
            _problem(
                cls,
                output,
                "a last message for the policy to answer",
                f"{roles}",
                "End with a message of the role user or tool.",
            )
        ]
    return []


def _rendered(cls: type[AgentInstance], output: _Output, chat: Chat) -> list[Problem]:
    name = type(chat.tokenizer).__name__
    if output.is_raw or isinstance(output.observation, str):
        if output.is_raw and output.method == "step" and FORGED.splitlines()[1] in str(output.observation):
            fix = "Raw text is encoded unchanged: remove the names of tokens from the action, or answer in messages."
            got = "names of special tokens in raw text"
            return [_problem(cls, output, "text of a policy that stays text", got, fix)]
        return []
    try:
        # The same messages with placeholder text show which special tokens belong to the template.
        hollow: list[Message] = [
            {**m, "content": "x"} if isinstance(m.get("content"), str) else m for m in output.observation
        ]
        tokens, framed = _added(chat, output, output.observation), _added(chat, output, hollow)
    except AgentEnvError as error:
        fix = "Return messages that any template renders: a role, and content as text."
        return [_problem(cls, output, "messages that a chat template renders", f"an error of {name}: {error}", fix)]
    if tokens - framed:
        names = [chat.decode([i]) for i in tokens - framed]
        fix = "Omit `trusted` from messages with text that a policy or a page may have written."
        return [_problem(cls, output, "text of a policy that stays text", f"the special tokens {names}", fix)]
    return []


def _added(chat: Chat, output: _Output, messages: Sequence[Message]) -> Counter[int]:
    """Return the special tokens in the encoded messages."""
    end = chat.tokenizer.eos_token_id
    ids = (
        chat.prompt(messages, output.tools)
        if output.method == "reset"
        else chat.reply([0 if end is None else end], messages)
    )
    return Counter(chat.added_in(ids))
