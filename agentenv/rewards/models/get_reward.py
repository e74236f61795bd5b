"""GetRewardScorer: OpenRLHF's reward servers, `POST /get_reward` of `openrlhf.cli.serve_rm` or of `agentenv rm serve`.

Example:
    >>> scorer = GetRewardScorer("http://localhost:5000/get_reward", tokenizer="my-rm")
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from agentenv.agent import Tokenizer
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.openrlhf_rewards import read_rewards
from agentenv.rewards._http import checked_url
from agentenv.rewards.models._asking import Asker, Asking, AskingFields, AskingScorer, Send
from agentenv.rewards.models._http import Failure, JSONClient
from agentenv.rewards.models._rendering import Rendering, Text
from agentenv.rewards.models.render import Overflow, checked
from agentenv.rewards.models.types import Conversation, Scored
from agentenv.types import StepResult

_PATH = "/get_reward"


class TextScorer(AskingScorer[Text, Scored]):
    """A scorer that is asked about texts: with a tokenizer also about messages, which are rendered here."""

    def __init__(
        self,
        where: str,
        send: Send[Text, Scored],
        asking: Asking,
        *,
        tokenizer: str | Path | Tokenizer | None,
        max_length: int | None,
        overflow: Overflow,
    ) -> None:
        name = type(self).__name__
        self.rendering = Rendering(name, tokenizer, max_length=max_length, overflow=overflow)
        if not self.rendering.has_tokenizer and (max_length is not None or overflow != "error"):
            raise ConfigError(
                f"{name}.tokenizer: expected one to count and cut tokens with, got None beside max_length {max_length} "
                f"and overflow {overflow!r}. Give its folder or name, or leave these out: whoever is asked decides."
            )
        super().__init__(where, send, asking)

    async def _scored(self, conversation: Conversation) -> Scored:
        text = await self._text(conversation)
        scored = await self.asker.ask(text)
        num_tokens = text.num_tokens if scored.num_tokens is None else scored.num_tokens
        return Scored(scored.value, num_tokens, text.truncated or scored.truncated)

    async def _text(self, conversation: Conversation) -> Text:
        return await self.rendering.text(conversation)

    async def check_messages(self) -> None:
        """See `AskingScorer.check_messages`."""
        await self.rendering.check()


class GetRewardScorer(TextScorer):
    """Asks `POST {"query": […], "prompts": […], "labels": […]}` for `{"rewards": […]}`, several at once.

    Args:
        url: all of it, with `/get_reward`.
        tokenizer: the reward model's folder, its name or an object, for messages, whose texts are the queries; they
            are only as safe from forged special tokens as the server's own tokenizer makes them. Text is as it is.
        send_messages: messages are sent as `{"messages": […]}` for the server to render, which that of `agentenv rm
            serve` does, and OpenRLHF's does not; then no tokenizer is needed. None: where there is no tokenizer, the
            server is asked once what it is, with the first messages; False never sends them so.
        max_length: most tokens, counted by the tokenizer, without which nothing is; OpenRLHF's server cuts longer ones
            off without a word.
        overflow: see Renderer; what is cut is decoded again.
        asking: see Asking; `max_batch` is 32 unless given.

    Rewards that are no finite numbers, answers of another length and servers that fail are tried again, and then fail
    for the conversations that they are about. Labels are sent as null: a reward model knows none.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        send_messages: bool | None = None,
        max_length: int | None = None,
        overflow: Overflow = "error",
        **asking: Unpack[AskingFields],
    ) -> None:
        how = Asking.of("GetRewardScorer", asking, max_batch=32)
        address = checked_url("GetRewardScorer.url", url)
        self._path = _PATH if address.endswith(_PATH) else ""
        self._client = JSONClient(address.removesuffix(_PATH), api_key=how.api_key)
        self.url = self._client.url + self._path
        # Many may want to know the same: who comes while it is asked has the next answer, not a request of its own.
        once = replace(how, max_batch=1 << 20, max_wait_s=0.0, max_concurrent=1)
        self._looker: Asker[None, bool] = Asker(self.url, self._look, once)
        super().__init__(self.url, self._send, how, tokenizer=tokenizer, max_length=max_length, overflow=overflow)
        self._sends_messages = False if send_messages is None and self.rendering.has_tokenizer else send_messages

    @property
    def num_retried(self) -> int:
        """Attempts that were not the first."""
        return self.asker.num_retried + self._looker.num_retried

    async def check_messages(self) -> None:
        """See `AskingScorer.check_messages`."""
        if not await self._renders():
            await super().check_messages()

    async def close(self) -> None:
        """Ask nobody any more; what this loop still asks fails. Calling it again does nothing."""
        await self._looker.close()
        await super().close()
        await self._client.close()

    async def _renders(self) -> bool:
        """Whether the server renders messages.

        Raises:
            ConfigError: nobody does, and the address is not that of a server which might.
        """
        found = await self._looker.ask(None) if self._sends_messages is None else self._sends_messages
        if not (found or self._path or self.rendering.has_tokenizer):
            raise ConfigError(
                f"GetRewardScorer.url: expected …{_PATH} of OpenRLHF or `agentenv rm serve`, or a tokenizer, got "
                f"{self.url!r}. Write the address with its path; for another server give the option tokenizer."
            )
        return found

    async def _look(self, asked: list[None]) -> Sequence[bool | Failure] | Failure:
        """What `GET /` says: that of `agentenv rm serve` names itself, others have no such page or another one."""
        if self._sends_messages is None:
            answer = await self._client.attempt("/") if self._path else None
            if isinstance(answer, Failure) and not _is_of_another(answer):
                return answer
            self._sends_messages = isinstance(answer, dict) and "agentenv" in answer
        return [self._sends_messages] * len(asked)

    async def _text(self, conversation: Conversation) -> Text:
        if isinstance(conversation, str) or not await self._renders():
            return await super()._text(conversation)
        bare = [{name: item for name, item in each.items() if name != "trusted"} for each in checked(conversation)]
        return Text("", messages=bare)

    async def _send(self, texts: list[Text]) -> Sequence[Scored | Failure] | Failure:
        body: dict[str, Any] = {
            "query": [text.query for text in texts],
            "prompts": [text.prompt for text in texts],
            "labels": [None for _ in texts],
        }
        sent = [text.messages for text in texts if text.messages is not None]
        if 0 < len(sent) < len(texts):  # two forms: each alone
            return Failure(InfraError(f"{self.url}: expected one form, got text and messages."), suspect=True)
        body = {"messages": sent} if sent else body
        answer = await self._client.attempt(self._path, body)
        return answer if isinstance(answer, Failure) else rewards_of(answer, len(texts), self.url)


def _is_of_another(failure: Failure) -> bool:
    """Whether a server without a page of ours gave it, and not one that is busy or wants another key."""
    return failure.status is not None and failure.status not in (401, 403, 408, 429) and failure.status < 500


def rewards_of(answer: Any, num: int, where: str) -> Sequence[Scored | Failure] | Failure:
    """A reward, or a failure that may pass, for each of `num` queries; one for all where nothing can be read.

    What `agentenv rm serve` logs of a query, `rm_num_tokens` and `rm_truncated`, is taken over.
    """
    try:
        outcomes = read_rewards(answer, num, where)
    except ContractError as error:
        return _failure(error)
    return [_failure(each) if isinstance(each, ContractError) else _scored(each, where) for each in outcomes]


def _scored(result: StepResult, where: str) -> Scored | Failure:
    reward, num_tokens = result.reward, result.info.get("rm_num_tokens")  # what no float32 holds is an error before
    if reward is None:
        return _failure(ContractError(f"{where}: expected a reward, got None. Mend it."))
    known = int(num_tokens) if isinstance(num_tokens, float) else None
    return Scored(reward, known, result.info.get("rm_truncated") == 1.0)


def _failure(error: ContractError) -> Failure:
    failed = InfraError(str(error))
    failed.__cause__ = error
    return Failure(failed, may_pass=True, suspect=True)
