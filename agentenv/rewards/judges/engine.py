"""A judge that one of our engines samples: a local model, in this process or where its engine is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from agentenv.core.arguments import number, whole_number
from agentenv.core.engine import Engine, sample
from agentenv.core.types import Message, SamplingParams
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.judges.openai import JUDGING
from agentenv.rewards.judges.protocol import JudgeRefused, JudgeTimeout, JudgeTruncated, JudgeUnavailable, ReplyIndex
from agentenv.rewards.judges.usage import JudgeUsage
from agentenv.rewards.judges.wire import ConcurrencyLimit, sampling_fields


class MessageRenderer(Protocol):
    """Converts messages to ids and back: the part of `agentenv.chat.chat.Chat` that a judge needs."""

    def prompt(self, observation: Sequence[Message], /) -> list[int]:
        """Return the ids of a conversation up to the assistant's turn; no text can become a special token."""

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """Return a reply as text, without the end of its turn."""


class EngineJudge:
    """A judge that asks an engine on its event loop, with the model's own chat template.

    Args:
        engine: the engine, which the caller closes.
        chat: the chat format of the engine's model, such as `agentenv.chat.chat.Chat(tokenizer)`.
        model: the model's name, part of the cache key; use another one for other weights.
        sampling: sampling parameters; the seed is varied for each vote and attempt.
        limit_s: time limit of one generation; waiting for a slot does not count.
        max_prompt_tokens: longer conversations are refused; None leaves the limit to the engine.
        max_concurrent: maximum number of concurrent generations.
        usage: the counts to add to; default: its own, `judge.usage`.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        chat: MessageRenderer,
        *,
        model: str,
        sampling: SamplingParams = JUDGING,
        limit_s: float = 300.0,
        max_prompt_tokens: int | None = None,
        max_concurrent: int = 64,
        usage: JudgeUsage | None = None,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"EngineJudge.model: expected a name, got {model!r}. Pass one.")
        self.engine = engine
        self.chat = chat
        self.model = model
        self.sampling = sampling
        self.limit_s = number("EngineJudge.limit_s", limit_s, low=0.001)
        self.max_prompt_tokens = max_prompt_tokens
        if max_prompt_tokens is not None:
            whole_number("EngineJudge.max_prompt_tokens", max_prompt_tokens, low=1)
        self.usage = usage or JudgeUsage()
        self._limit = ConcurrencyLimit(whole_number("EngineJudge.max_concurrent", max_concurrent, low=1))

    @property
    def identity(self) -> str:
        """Model and sampling, on which replies depend besides the messages; for `cache.CachedJudge`."""
        return json.dumps([self.model, sampling_fields(self.sampling)], sort_keys=True)

    async def complete(self, messages: Sequence[Message]) -> str:
        """Return its reply.

        Raises:
            InfraError: there is none; of the class in `protocol.py` for the reason.
            ConfigError: the chat template refuses the messages.
        """
        return await self.reply_at(messages, ReplyIndex())

    async def reply_at(self, messages: Sequence[Message], index: ReplyIndex) -> str:
        """Return the reply with this index; if the sampling has a seed, it is varied by the index. See `complete`."""
        sampling = replace(self.sampling, seed=index.seed(self.sampling.seed))
        try:
            async with self._limit.slot():
                prompt = self.chat.prompt(messages)
                if self.max_prompt_tokens is not None and len(prompt) > self.max_prompt_tokens:
                    raise JudgeRefused(
                        f"judge: expected at most {self.max_prompt_tokens} tokens, got {len(prompt)}. "
                        "Lower JudgeRetry.max_chars."
                    )
                self.usage.add(requests=1)
                request_id = f"judge-{uuid.uuid4().hex}/0"
                try:
                    completion = await sample(
                        self.engine, prompt, sampling, request_id=request_id, limit_s=self.limit_s
                    )
                except InfraError as error:
                    late = isinstance(error.__cause__, TimeoutError)
                    raise (JudgeTimeout if late else JudgeUnavailable)(f"judge {self.model}: {error}") from error
                self.usage.add(replies=1, prompt_tokens=len(prompt), completion_tokens=len(completion.token_ids))
                if completion.finish_reason in ("length", "repetition"):
                    raise JudgeTruncated(
                        f"judge {self.model}: expected a whole reply, got one that was cut off after "
                        f"{len(completion.token_ids)} tokens. Raise max_tokens, or let the judge think less."
                    )
                if completion.finish_reason != "stop":
                    reason = completion.finish_reason
                    raise JudgeUnavailable(f"judge {self.model}: expected a reply, got finish reason {reason!r}.")
                return self.chat.action_text(completion.token_ids, sampling.stop_token_ids)
        except InfraError as error:
            self.usage.fail(error)
            raise

    async def close(self) -> None:
        """Do nothing: the caller closes the engine."""
