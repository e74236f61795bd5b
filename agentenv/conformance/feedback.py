"""The property `feedback`: what the environment says can be rendered in every kind of template, and stays text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentenv.agent import AgentInstance
from agentenv.chat import Chat, text_of
from agentenv.conformance import chats
from agentenv.conformance.cases import FORGED
from agentenv.conformance.passes import noted
from agentenv.conformance.problems import Problem, problem_at, unique
from agentenv.conformance.scene import Scene
from agentenv.errors import AgentEnvError
from agentenv.types import Message

_ROLES = ("system", "user", "assistant", "tool")
_STALLS = "Say what was wrong, or end the episode: a policy that hears nothing says the same again."
Observation = str | Sequence[Message]


@dataclass(frozen=True)
class _Said:
    """One observation: a prompt (`method` is reset) or the reply to an action."""

    method: str
    observation: Observation
    tools: Any = None
    is_raw: bool = False
    """The conversation is raw text, of which no template makes tokens."""


def feedback(scene: Scene) -> list[Problem]:
    """What it says is never empty, has roles that templates know, renders, and is text where it holds tokens' names."""
    scene.needs_steps()
    cls, problems = scene.agent_cls, []
    done: set[str] = set()
    for said in _all_said(scene):
        if repr(said) in done:
            continue
        done.add(repr(said))
        found = [*_stalls(cls, said), *_roles(cls, said), *_unicode(cls, said)]
        problems += found or [problem for chat in chats.every_kind() for problem in _rendered(cls, said, chat)]
    return unique(problems)


def _all_said(scene: Scene) -> Iterator[_Said]:
    """The prompts, and every observation that a policy gets to read."""
    for one in noted(scene):
        prompt = one.trajectory.prompt
        if prompt:
            yield _Said("reset", prompt, one.trajectory.tools or None, isinstance(prompt, str))
        for turn in one.trajectory.turns:
            if turn.result is not None and not turn.result.done:
                yield _Said("step", turn.result.observation, is_raw=isinstance(prompt, str))


def _stalls(cls: type[AgentInstance], said: _Said) -> list[Problem]:
    observation = said.observation
    if isinstance(observation, str):
        return [] if observation.strip() else [_problem(cls, said, "feedback that says something", f"{observation!r}")]
    empty = [dict(m) for m in observation if _may_be_read(m) and not _says(m)]
    if not observation or empty:
        return [_problem(cls, said, "feedback that says something", f"{empty[0] if empty else observation!r}")]
    return []


def _may_be_read(message: Message) -> bool:
    return message.get("role") in ("user", "tool")


def _says(message: Message) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    other = any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in parts)
    return other or bool(text_of(message).strip())


def _problem(cls: type[AgentInstance], said: _Said, expected: str, got: str, mend: str = _STALLS) -> Problem:
    return problem_at(cls, said.method, expected, got[:200], mend)


def _roles(cls: type[AgentInstance], said: _Said) -> list[Problem]:
    if isinstance(said.observation, str):
        return []
    roles = [str(message.get("role")) for message in said.observation]
    unknown = [role for role in roles if role not in _ROLES]
    if unknown:
        mend = "Templates of models know no other roles."
        return [_problem(cls, said, f"roles among {', '.join(_ROLES)}", f"{unknown[0]!r}", mend)]
    mend = "Put it into one message: many templates refuse roles that do not alternate."
    talk = roles[1:] if said.method == "reset" and roles[:1] == ["system"] else roles
    before = ["assistant", *talk] if said.method == "step" else talk
    twice = [one for one, other in pairwise(before) if one == other and one != "tool"]
    if twice or "system" in talk:
        return [_problem(cls, said, "messages whose roles alternate", f"{roles}", mend)]
    if roles[-1] == "assistant":
        return [
            _problem(cls, said, "a last message that the policy answers", f"{roles}", "End with a user's or a tool's.")
        ]
    return []


def _unicode(cls: type[AgentInstance], said: _Said) -> list[Problem]:
    texts = [said.observation] if isinstance(said.observation, str) else [text_of(m) for m in said.observation]
    for text in texts:
        bad = [letter for letter in text if 0xD800 <= ord(letter) < 0xE000]
        if bad:
            mend = "Replace lone surrogates: tokenizers refuse them, and no file can hold them."
            return [_problem(cls, said, "text that is valid Unicode", f"{bad[0]!r}", mend)]
    return []


def _rendered(cls: type[AgentInstance], said: _Said, chat: Chat) -> list[Problem]:
    name = type(chat.tokenizer).__name__
    if said.is_raw or isinstance(said.observation, str):
        return _forged_text(cls, said)
    try:
        tokens, framed = _added(chat, said, said.observation), _added(chat, said, _hollow(said.observation))
    except AgentEnvError as error:
        mend = "Say it in messages that any template renders: role, and content as text."
        return [_problem(cls, said, "messages that a chat template renders", f"an error of {name}'s: {error}", mend)]
    if tokens - framed:
        names = [chat.decode([i]) for i in tokens - framed]
        mend = "Leave `trusted` out of messages that hold what a policy, or a page, may have written."
        return [_problem(cls, said, "text of a policy to stay text", f"the tokens {names} of it", mend)]
    return []


def _forged_text(cls: type[AgentInstance], said: _Said) -> list[Problem]:
    if said.is_raw and said.method == "step" and FORGED.splitlines()[1] in str(said.observation):
        mend = "Raw text becomes tokens as it stands: take the names of tokens out of what the policy said, or answer "
        mend += "in messages."
        return [_problem(cls, said, "text of a policy to stay text", "the names of tokens of it in raw text", mend)]
    return []


def _added(chat: Chat, said: _Said, messages: Sequence[Message]) -> Counter[int]:
    """The added tokens that the messages become."""
    end = chat.tokenizer.eos_token_id
    ids = (
        chat.prompt(messages, said.tools)
        if said.method == "reset"
        else chat.reply([0 if end is None else end], messages)
    )
    return Counter(chat.added_in(ids))


def _hollow(messages: Sequence[Message]) -> list[Message]:
    """The same messages, saying nothing in particular; what is no text is left."""
    return [{**m, "content": "x"} if isinstance(m.get("content"), str) else m for m in messages]
