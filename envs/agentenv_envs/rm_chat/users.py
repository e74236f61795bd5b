"""The user's side of a conversation: the row's script, or a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from agentenv._util.calls import StepTimeout, bounded
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.judges.protocol import Judge, judge_from
from agentenv.rewards.judges.voting import JudgeRetry, ask
from agentenv.rewards.rules.text import final_text

END = "[END]"
"""The message of a played user who has nothing more to ask."""
PERSONA = "A person who wants help with what their first message says, and has no more time than that takes."
PLAYING = """You play the user in a conversation with an assistant. The other side is the assistant; you never answer
for it, help it, or say that you play. Whom you play:

{persona}

Write the user's next message and nothing else: short, in their own words, about what is still missing, wrong or
unclear in the last answer, or the next thing that they need. Where nothing is left to ask, write {end} and no more."""
_BEGIN = "Write the user's first message."
_SILENCE = "(no answer)"
_SAMPLING = {"temperature": 1.0, "max_tokens": 256}


class User(Protocol):
    """The other side of one conversation."""

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Return the next message; None if the conversation is over.

        Raises:
            InfraError: no message is available.
        """


class Script:
    """Sends fixed texts in order, independently of the answers."""

    def __init__(self, turns: Any, column: str) -> None:
        if isinstance(turns, str) or not isinstance(turns, Sequence) or not all(map(_is_text, turns)):
            raise DataError(f"rm_chat: {column}: expected a list of texts, got {turns!r:.120}. Correct the row.")
        self._left = list(turns)

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Return the next text."""
        return self._left.pop(0) if self._left else None


class Played:
    """A language model that plays the user; it sees the conversation with swapped roles and without thinking.

    Args:
        judge: the language model; asked again if a reply is empty.
        persona: the person to play.
        limit_s: longest time for one message, including all attempts.
    """

    def __init__(self, judge: Judge, persona: str, *, limit_s: float) -> None:
        self._judge, self._limit_s = judge, limit_s
        self._head: list[Message] = [
            {"role": "system", "content": PLAYING.format(persona=persona, end=END)},
            {"role": "user", "content": _BEGIN},
        ]

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Return the model's message; None after `[END]`.

        Raises:
            InfraError: no message came in time.
        """
        retry = JudgeRetry(limit_s=self._limit_s)
        # As the playing model sees the conversation, the user's messages are the assistant's.
        roles = {"user": "assistant", "assistant": "user"}
        prompt = list(self._head)
        for message in messages:
            if message["role"] in roles:
                prompt.append({"role": roles[message["role"]], "content": message["content"] or _SILENCE})
        try:
            asking = partial(ask, self._judge, prompt, _message_in, retry, expected="what the user says")
            reply = await bounded(asking, limit_s=self._limit_s, flag="limit_s")
        except StepTimeout as error:
            raise InfraError(f"rm_chat: user: {error}") from error
        return None if END in reply else reply


def user_from(user: Any) -> Mapping[str, Any] | None:
    """Check the settings of a user: None, `{"script": column}`, or `{"judge": settings}` with or without `persona`.

    Raises:
        ConfigError: the settings have none of these forms.
    """
    if user is None:
        return None
    if isinstance(user, Mapping) and "base_url" in user and not {"script", "judge"} & user.keys():
        judge = {name: value for name, value in user.items() if name != "persona"}
        user = {"judge": judge, **({"persona": user["persona"]} if "persona" in user else {})}
    known = isinstance(user, Mapping) and any(
        name in user and user.keys() <= {name, *others} for name, others in (("script", ()), ("judge", ("persona",)))
    )
    if not known or not _is_text(user.get("persona", PERSONA)) or ("script" in user and not _is_text(user["script"])):
        raise ConfigError(
            "RMChat.user: expected None, {'script': column} or {'base_url': …, 'model': …}, the same as {'judge': "
            f"settings}}, with or without 'persona': text, got {user!r:.200}."
        )
    return dict(user)


def player_from(settings: Any) -> Any:
    """Return the language model that plays: an object with `complete`, or one from settings for `judge_from`.

    Raises:
        ConfigError: the settings do not describe one.
    """
    if callable(getattr(settings, "complete", None)) and not isinstance(settings, type):
        return settings
    if not isinstance(settings, Mapping):
        raise ConfigError(f"RMChat.user.judge: expected settings, got {settings!r:.200}. Set base_url and model.")
    sampling = settings.get("sampling") or {}
    return judge_from(
        {**settings, "sampling": {**_SAMPLING, **sampling} if isinstance(sampling, Mapping) else sampling}
    )


def _message_in(reply: str) -> str | None:
    """Return the message; None if it is empty or has half a surrogate pair, which no tokenizer accepts."""
    text = final_text(reply) or ""
    return None if not text or any("\ud800" <= char <= "\udfff" for char in text) else text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
