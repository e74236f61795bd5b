"""Who speaks after an answer: the row's script, or a language model that plays a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentenv.deadlines import StepTimeout, bounded
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.judges.asking import Asking, ask
from agentenv.rewards.judges.draws import Drawn, Judge
from agentenv.rewards.judges.settings import judge_from
from agentenv.rewards.text import final_text
from agentenv.types import Message

END = "[END]"
"""What a played user says who has nothing more to ask."""
PERSONA = "A person who wants help with what their first message says, and has no more time than that takes."
PLAYING = """You play the user in a conversation with an assistant. The other side is the assistant; you never answer
for it, help it, or say that you play. Whom you play:

{persona}

Write the user's next message and nothing else: short, in their own words, about what is still missing, wrong or
unclear in the last answer, or the next thing that they need. Where nothing is left to ask, write {end} and no more."""
_BEGIN = "Write the user's first message."
_SILENCE = "(no answer)"
_SAMPLING = {"temperature": 1.0, "max_tokens": 256}
_ADDRESS = "base_url"


class User(Protocol):
    """The other side of one conversation."""

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """What they say after these messages; None where the conversation is over.

        Raises:
            InfraError: nobody knows.
        """


class Script:
    """Says these texts, one after the other, whatever is answered."""

    def __init__(self, turns: Any, column: str) -> None:
        if isinstance(turns, str) or not isinstance(turns, Sequence) or not all(map(_is_text, turns)):
            raise DataError(f"rm_chat: {column}: expected a list of texts, got {turns!r:.120}. Correct the row.")
        self._left = list(turns)

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """The next text."""
        return self._left.pop(0) if self._left else None


class Played:
    """A language model plays the user; it sees the conversation with the roles turned around, without thinking.

    Args:
        judge: the language model; asked again where a reply says nothing.
        persona: whom it plays.
        limit_s: longest that one message may take, all attempts together.
    """

    def __init__(self, judge: Judge, persona: str, *, limit_s: float) -> None:
        self._judge, self._limit_s = judge, limit_s
        self._head: list[Message] = [
            {"role": "system", "content": PLAYING.format(persona=persona, end=END)},
            {"role": "user", "content": _BEGIN},
        ]

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """What the model says; None after `[END]`.

        Raises:
            InfraError: it gave no message in time.
        """
        asking = Asking(limit_s=self._limit_s)
        asked = [*self._head, *_turned(messages)]
        try:
            said = await bounded(self._ask, asked, asking, limit_s=self._limit_s, flag="limit_s")
        except StepTimeout as error:
            raise InfraError(f"rm_chat: user: {error}") from error
        return None if END in said else said

    async def _ask(self, asked: Sequence[Message], asking: Asking) -> str:
        return await ask(Drawn(self._judge), asked, _said, asking, expected="what the user says")


def user_from(user: Any) -> Mapping[str, Any] | None:
    """The user that settings describe: None, `{"script": column}`, or `{"judge": settings}` with `persona` or without.

    Raises:
        ConfigError: they are none of these, and no settings of a judge, with `persona` or without.
    """
    if user is None:
        return None
    if isinstance(user, Mapping) and _ADDRESS in user and not {"script", "judge"} & user.keys():
        judge = {name: value for name, value in user.items() if name != "persona"}
        user = {"judge": judge, **({"persona": user["persona"]} if "persona" in user else {})}
    known = isinstance(user, Mapping) and any(
        name in user and user.keys() <= {name, *others} for name, others in (("script", ()), ("judge", ("persona",)))
    )
    if not known or not _is_text(user.get("persona", PERSONA)) or ("script" in user and not _is_text(user["script"])):
        raise ConfigError(
            "RMChat.user: expected None, {'script': column} or {'base_url': …, 'model': …}, the same as {'judge': "
            f"settings}}, with 'persona': text or without, got {user!r:.200}. Change it."
        )
    found: Mapping[str, Any] = user
    return found


def player_from(settings: Any) -> Any:
    """The language model that plays: an object with `complete`, or settings for `judges.settings.judge_from`.

    Raises:
        ConfigError: they describe none.
    """
    if callable(getattr(settings, "complete", None)) and not isinstance(settings, type):
        return settings
    if not isinstance(settings, Mapping):
        raise ConfigError(f"RMChat.user.judge: expected settings, got {settings!r:.200}. Give base_url and model.")
    sampling = settings.get("sampling") or {}
    return judge_from(
        {**settings, "sampling": {**_SAMPLING, **sampling} if isinstance(sampling, Mapping) else sampling}
    )


def _said(reply: str) -> str | None:
    """What they say; None where that is nothing, or half of a surrogate pair, which no tokenizer takes."""
    text = final_text(reply) or ""
    return None if not text or any("\ud800" <= char <= "\udfff" for char in text) else text


def _turned(messages: Sequence[Message]) -> list[Message]:
    """What the user sees, as the model that plays them does: their own messages are the assistant's."""
    roles = {"user": "assistant", "assistant": "user"}
    return [
        {"role": roles[message["role"]], "content": message["content"] or _SILENCE}
        for message in messages
        if message["role"] in roles
    ]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
