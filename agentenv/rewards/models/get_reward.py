"""OpenRLHF's reward servers and reward functions as reward models.

`GetRewardScorer` asks `POST /get_reward` of `openrlhf.cli.serve_rm` or of `agentenv rm serve`, `FunctionScorer` calls a
`reward_func(queries, prompts, labels)`.

Example:
    >>> scorer = GetRewardScorer("http://localhost:5000/get_reward", tokenizer="my-rm")
    >>> scorer = FunctionScorer("my_rm.py", tokenizer="my-rm")  # or "my_rm.py:other_name"
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from agentenv._util.http.client import AttemptFailure, HTTPClient, checked_url
from agentenv.core.engine import Tokenizer
from agentenv.core.types import StepResult
from agentenv.errors import AgentEnvError, ConfigError, ContractError, InfraError
from agentenv.rewards.loading import load_function
from agentenv.rewards.models.openrlhf_wire import Sample, read_rewards
from agentenv.rewards.models.render import Overflow, RenderedText, ThreadedRenderer, messages_for_server
from agentenv.rewards.models.request_queue import QueueOptionFields, QueueOptions, RequestQueue, RequestScorer, Send
from agentenv.rewards.models.types import Conversation, Scored
from agentenv.rewards.workers.threads import Threads

_PATH = "/get_reward"
_FUNCTION = "reward_func"


class TextScorer(RequestScorer[RenderedText, Scored]):
    """A scorer of texts; with a tokenizer it also renders messages."""

    def __init__(
        self,
        where: str,
        send: Send[RenderedText, Scored],
        asking: QueueOptions,
        *,
        tokenizer: str | Path | Tokenizer | None,
        max_length: int | None,
        overflow: Overflow,
    ) -> None:
        name = type(self).__name__
        self.rendering = ThreadedRenderer(name, tokenizer, max_length=max_length, overflow=overflow)
        if not self.rendering.has_tokenizer and (max_length is not None or overflow != "error"):
            raise ConfigError(
                f"{name}.tokenizer: expected one to count and cut tokens with, got None with max_length {max_length} "
                f"and overflow {overflow!r}. Pass its folder or name, or omit these: the server or function decides."
            )
        super().__init__(where, send, asking)

    async def score_sample(self, sample: Sample) -> Scored:
        """Return the raw score of a text whose prompt and label are known; see `score`."""
        return await self._counted(sample)

    async def _scored(self, conversation: Conversation | Sample) -> Scored:
        if isinstance(conversation, Sample):
            text = await self._text(conversation.query)
            text = replace(text, prompt="" if text.truncated else conversation.prompt, label=conversation.label)
        else:
            text = await self._text(conversation)
        scored = await self.asker.ask(text)
        num_tokens = text.num_tokens if scored.num_tokens is None else scored.num_tokens
        return replace(scored, num_tokens=num_tokens, truncated=text.truncated or scored.truncated)

    async def _text(self, conversation: Conversation) -> RenderedText:
        return await self.rendering.text(conversation)

    async def check_messages(self) -> None:
        """See `RequestScorer.check_messages`."""
        await self.rendering.check()


class GetRewardScorer(TextScorer):
    """Sends `POST {"query": […], "prompts": […], "labels": […]}` and reads `{"rewards": […]}`, several at once.

    Args:
        url: complete address, with `/get_reward`.
        tokenizer: the reward model's folder, its name or an object, to render messages as text. Text is as safe from
            forged special tokens as the server's tokenizer makes it; text conversations are sent unchanged.
        send_messages: send messages as `{"messages": […]}` for the server to render, without a tokenizer here. The
            server of `agentenv rm serve` does so, OpenRLHF's does not. None: without a tokenizer, the server is asked
            once, at the first messages, which it is.
        max_length: maximum number of tokens, counted by the tokenizer. OpenRLHF's server silently cuts longer
            conversations.
        overflow: see ConversationRenderer; cut conversations are decoded again.
        asking: see QueueOptions; `max_batch` defaults to 32.

    Non-finite rewards, answers of another length and server errors are retried; afterwards the conversations concerned
    fail. Labels are null except in `score_sample`, since a reward model has none.

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
        **asking: Unpack[QueueOptionFields],
    ) -> None:
        how = QueueOptions.of("GetRewardScorer", asking, max_batch=32)
        address = checked_url("GetRewardScorer.url", url)
        self._path = _PATH if address.endswith(_PATH) else ""
        self._client = HTTPClient(address.removesuffix(_PATH), api_key=how.api_key)
        self.url = self._client.url + self._path
        self._looker: RequestQueue[None, bool] = RequestQueue(self.url, self._look, how.one_at_once())
        super().__init__(self.url, self._send, how, tokenizer=tokenizer, max_length=max_length, overflow=overflow)
        self._helpers = (self._looker,)
        self._sends_messages = False if send_messages is None and self.rendering.has_tokenizer else send_messages

    async def check_messages(self) -> None:
        """See `RequestScorer.check_messages`."""
        if not await self._renders():
            await super().check_messages()

    async def close(self) -> None:
        """Accept no further requests, and fail those of this loop. Calling it again does nothing."""
        await super().close()
        await self._client.close()

    async def _renders(self) -> bool:
        """Return True if the server renders messages.

        Raises:
            ConfigError: no tokenizer is given, and the server does not render messages.
        """
        found = await self._looker.ask(None) if self._sends_messages is None else self._sends_messages
        if not (found or self._path or self.rendering.has_tokenizer):
            raise ConfigError(
                f"GetRewardScorer.url: expected …{_PATH} of OpenRLHF or `agentenv rm serve`, or a tokenizer, got "
                f"{self.url!r}. Write the address with its path; for another server pass the option tokenizer."
            )
        return found

    async def _look(self, asked: list[None]) -> Sequence[bool | AttemptFailure] | AttemptFailure:
        """Ask `GET /`: the server of `agentenv rm serve` names itself; others have no such page, or another."""

        def names_itself(page: Any) -> bool:
            return isinstance(page, dict) and "agentenv" in page

        if self._sends_messages is None:
            answer = await self._client.attempt_json("/", None, names_itself) if self._path else False
            # Other statuses mean that the server has no such page; these, that it is busy or needs another key.
            if isinstance(answer, AttemptFailure) and (
                answer.status is None or answer.status in (401, 403, 408, 429) or answer.status >= 500
            ):
                return answer
            self._sends_messages = answer is True
        return [self._sends_messages] * len(asked)

    async def _text(self, conversation: Conversation) -> RenderedText:
        if isinstance(conversation, str) or not await self._renders():
            return await super()._text(conversation)
        return RenderedText("", messages=await messages_for_server(conversation))

    async def _send(self, texts: list[RenderedText]) -> Sequence[Scored | AttemptFailure] | AttemptFailure:
        body: dict[str, Any] = {
            "query": [text.query for text in texts],
            "prompts": [text.prompt for text in texts],
            "labels": [text.label for text in texts],
        }
        sent = [text.messages for text in texts if text.messages is not None]
        if 0 < len(sent) < len(texts):  # two forms: each alone
            return AttemptFailure(InfraError(f"{self.url}: expected one form, got text and messages."), suspect=True)
        body = {"messages": sent} if sent else body
        read = partial(rewards_of, num=len(texts), where=self.url)
        return await self._client.attempt_json(self._path, body, read)


class FunctionScorer(TextScorer):
    """Calls a function with lists of texts: queries, the prompts that they begin with ("" where unknown), labels.

    It returns a tensor, an array or a list of one number per query, or a dict with these as `rewards`. A plain function
    runs in one of `max_concurrent` threads, an async one on the event loop. A plain call that takes longer than
    `timeout_s` is abandoned in its thread and counted as `num_abandoned`.

    Args:
        function: `FILE.py`, whose `reward_func` it is, `FILE.py:name`, `module:name`, or a function.
        tokenizer: see GetRewardScorer, as for the next two.
        max_length: see there.
        overflow: see there.
        asking: see QueueOptions. Defaults: `max_batch` 1 (as OpenRLHF calls since 0.9.1), `max_concurrent` 16,
            `retries` 0.

    Raises:
        ConfigError: the function is missing, its file cannot be loaded, or it takes other arguments.
    """

    def __init__(
        self,
        function: str | Path | Callable[..., Any],
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        max_length: int | None = None,
        overflow: Overflow = "error",
        **asking: Unpack[QueueOptionFields],
    ) -> None:
        given = str(function) if isinstance(function, Path) else function
        self.where = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
        self._function: Any = given
        if isinstance(given, str):
            self._function = load_function(f"{given}:{_FUNCTION}" if given.endswith(".py") else given)
        try:
            inspect.signature(self._function).bind([], [], [])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.where}: expected a function of queries, prompts and labels by their places, got "
                f"{self._function!r:.200}: {error}. Write `def {_FUNCTION}(queries, prompts, labels)`."
            ) from error
        how = QueueOptions.of("FunctionScorer", asking, max_concurrent=16, retries=0)
        self._threads = Threads(how.max_concurrent)
        self._limit_s = 2 * how.timeout_s  # the request queue cancels it earlier
        super().__init__(self.where, self._send, how, tokenizer=tokenizer, max_length=max_length, overflow=overflow)

    @property
    def num_abandoned(self) -> int:
        """Abandoned calls that have not returned yet."""
        return self._threads.num_abandoned

    async def _send(self, texts: list[RenderedText]) -> Sequence[Scored | AttemptFailure] | AttemptFailure:
        queries, prompts = [text.query for text in texts], [text.prompt for text in texts]
        call = partial(self._function, queries, prompts, [text.label for text in texts])

        def called() -> Any:  # in a thread: rewards or failures, or what is still to be awaited
            found = call()
            return found if inspect.isawaitable(found) else rewards_of(found, len(texts), self.where)

        try:
            if inspect.iscoroutinefunction(self._function):
                return rewards_of(await call(), len(texts), self.where)
            found = await self._threads.run(called, limit_s=self._limit_s)
            return rewards_of(await found, len(texts), self.where) if inspect.isawaitable(found) else found
        except AgentEnvError:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {error}"[:400]
            raise InfraError(f"{self.where}: expected rewards, got {got}. Fix the function.") from error


# --- answers ----------------------------------------------------------------------------------------------------------


def rewards_of(answer: Any, num: int, where: str) -> Sequence[Scored | AttemptFailure] | AttemptFailure:
    """Return a reward or a retryable failure for each of `num` queries, or one failure if the answer is unreadable.

    The logs `rm_num_tokens` and `rm_truncated` of `agentenv rm serve` are read too.
    """
    try:
        outcomes = read_rewards(answer, num, where)
    except ContractError as error:
        return _failure(error)
    return [_failure(each) if isinstance(each, ContractError) else _scored(each, where) for each in outcomes]


def _scored(result: StepResult, where: str) -> Scored | AttemptFailure:
    reward, num_tokens = result.reward, result.info.get("rm_num_tokens")  # read_rewards refuses values beyond float32
    if reward is None:
        return _failure(ContractError(f"{where}: expected a reward, got None."))
    known = int(num_tokens) if isinstance(num_tokens, float) else None
    return Scored(reward, known, result.info.get("rm_truncated") == 1.0, result.score, result.info)


def _failure(error: ContractError) -> AttemptFailure:
    failed = InfraError(str(error))
    failed.__cause__ = error
    return AttemptFailure(failed, retryable=True, suspect=True)
