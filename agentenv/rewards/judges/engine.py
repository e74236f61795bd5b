"""A judge that an engine of ours samples: a local model, in this process or wherever its engine is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from agentenv.agent import Engine
from agentenv.deadlines import sample
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards.judges._turns import Turns
from agentenv.rewards.judges._wire import sampling_fields
from agentenv.rewards.judges.draws import Draw
from agentenv.rewards.judges.failures import JudgeRefused, JudgeTimeout, JudgeTruncated, JudgeUnavailable
from agentenv.rewards.judges.openai import JUDGING
from agentenv.rewards.judges.usage import Usage
from agentenv.types import Message, SamplingParams


class Renderer(Protocol):
    """Messages to ids and back: the part of `agentenv.chat.Chat` that a judge needs."""

    def prompt(self, observation: Sequence[Message], /) -> list[int]:
        """The ids of a conversation, up to where the assistant begins; no text in it can become a special token."""

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """A reply as text, without the close of its turn."""


class EngineJudge:
    """Asks an engine, with messages rendered by the model's own chat template; on the engine's event loop.

    Args:
        engine: who samples; it stays the caller's, who closes it.
        chat: of the engine's model, such as `agentenv.chat.Chat(tokenizer)`.
        model: its name, by which replies are cached; another one for other weights.
        sampling: how it samples; a seed is another one for each vote and attempt.
        limit_s: longest that one generation may take, without the wait for its turn.
        max_prompt_tokens: longer conversations are refused; None leaves that to the engine.
        max_concurrent: generations at a time.
        usage: where the counts are kept; by default its own, `judge.usage`.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Renderer,
        *,
        model: str,
        sampling: SamplingParams = JUDGING,
        limit_s: float = 300.0,
        max_prompt_tokens: int | None = None,
        max_concurrent: int = 64,
        usage: Usage | None = None,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"EngineJudge.model: expected a name, got {model!r}. Pass one.")
        self.engine, self.chat, self.model, self.sampling = engine, chat, model, sampling
        self.limit_s = number("EngineJudge.limit_s", limit_s, low=0.001)
        self.max_prompt_tokens = max_prompt_tokens
        if max_prompt_tokens is not None:
            whole_number("EngineJudge.max_prompt_tokens", max_prompt_tokens, low=1)
        self.usage = usage or Usage()
        self._turns = Turns(whole_number("EngineJudge.max_concurrent", max_concurrent, low=1))

    @property
    def identity(self) -> str:
        """What its replies depend on besides the messages: model and sampling; for `cache.CachedJudge`."""
        return json.dumps([self.model, sampling_fields(self.sampling)], sort_keys=True)

    async def complete(self, messages: Sequence[Message]) -> str:
        """Its reply.

        Raises:
            InfraError: none can be had; of the class in `failures.py` that says why.
            ConfigError: the chat template refuses the messages.
        """
        return await self.draw(messages, Draw())

    async def draw(self, messages: Sequence[Message], draw: Draw) -> str:
        """That one of its replies: it has a seed of its own, where the sampling has one; see `complete`."""
        sampling = replace(self.sampling, seed=draw.seed(self.sampling.seed))
        try:
            async with self._turns.one():
                return await self._reply(self.chat.prompt(messages), sampling)
        except InfraError as error:
            self.usage.fail(error)
            raise

    async def close(self) -> None:
        """Nothing is held: the engine is the caller's."""

    async def _reply(self, prompt: list[int], sampling: SamplingParams) -> str:
        most = self.max_prompt_tokens
        if most is not None and len(prompt) > most:
            raise JudgeRefused(f"judge: expected at most {most} tokens, got {len(prompt)}. Lower Asking.max_chars.")
        self.usage.add(requests=1)
        request_id = f"judge-{uuid.uuid4().hex}/0"
        try:
            completion = await sample(self.engine, prompt, sampling, request_id=request_id, limit_s=self.limit_s)
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
