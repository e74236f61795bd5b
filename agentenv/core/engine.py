"""Protocols of an engine, which samples tokens, and of its tokenizer; and one checked engine call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

from agentenv.core.types import Completion, Conversation, Message, SamplingParams
from agentenv.errors import ConfigError, EngineError


class Engine(Protocol):
    """Samples tokens. Safe to call from many episodes concurrently, on one event loop."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action after `prompt_token_ids`, which is read before the call returns and never changed.

        `request_id` is the same for all turns of an episode, with the turn after its last "/": an engine may use it to
        find the cached prefix. Cancelling the call frees the request's resources.

        Raises:
            EngineError: the engine could not return a completion.
        """


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that agentenv uses."""

    eos_token_id: int | None
    all_special_ids: list[int]
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """Render messages with the model's template."""


class NoTokenizer:
    """The tokenizer of engines that take messages: every use of it as a tokenizer is refused."""

    def __init__(self) -> None:
        self.eos_token_id: int | None = None
        self.all_special_ids: list[int] = []
        self.chat_template: Any = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raise ConfigError: token ids are not available."""
        raise self._refusal()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any) -> str:
        """Raise ConfigError: token ids are not available."""
        raise self._refusal()

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """Raise ConfigError: a template is not available."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            "--engine: expected one with a tokenizer, got chat, which returns no token ids. Use another engine."
        )


MAX_LOGPROB = 1e-3
"""Maximum positive log-probability that is accepted as a rounding error of the engine."""


def place_of_engine(engine: Engine) -> str:
    """Return what errors about an engine's completions name: its server's address where it has one."""
    return str(getattr(engine, "base_url", "generate"))


async def sample(
    engine: Engine,
    prompt: Sequence[int] | Conversation,
    sampling: SamplingParams,
    *,
    request_id: str,
    limit_s: float,
) -> Completion:
    """Call an engine for at most `limit_s` seconds; return a valid or an aborted completion.

    `prompt` is a Conversation for an engine that takes messages, whose tokenizer is a NoTokenizer.

    Raises:
        EngineError: the engine failed, timed out, or returned a completion that cannot be recorded.
        ConfigError: the engine ignored the structural tag.
    """
    where = place_of_engine(engine)
    try:
        async with asyncio.timeout(limit_s) as deadline:
            completion = await engine.generate(cast(Sequence[int], prompt), sampling, request_id=request_id)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EngineError(
            f"{where}: expected a completion within {limit_s:g} s, got none. "
            "Look at the engine, or raise generate_timeout_s."
        ) from error
    num, logprobs = len(completion.token_ids), completion.logprobs or ()
    if completion.finish_reason == "error":
        raise EngineError(f"{where}: expected a completion, got finish reason 'error'. Look at the engine's log.")
    if sampling.structural_tag is not None and completion.forced is None and (num or completion.answer is not None):
        raise ConfigError(
            f"{where}: expected an engine that follows structural_tag, got one that ignores it: "
            f"{constraint_problem(engine)}. Choose another --engine."
        )
    if sampling.max_tokens is not None and num > sampling.max_tokens:
        raise EngineError(
            f"{where}: expected at most max_tokens={sampling.max_tokens} tokens, got {num}. Fix the engine."
        )
    # Fast path in C: if the sum is finite, no value is NaN or infinite, and `max` is right.
    if not math.isfinite(sum(logprobs)) or max(logprobs, default=0.0) > MAX_LOGPROB:
        wrong = [x for x in logprobs if x > MAX_LOGPROB or x == -math.inf]
        if wrong:
            raise EngineError(
                f"{where}: expected log-probabilities, finite and at most 0, got {wrong[0]!r}. Fix the engine."
            )
    if completion.logprobs is not None and len(logprobs) != num:
        raise EngineError(f"{where}: expected {num} log-probabilities, got {len(logprobs)}. Fix the engine.")
    return completion


def constraint_problem(engine: Engine) -> str:
    """Return why an engine cannot follow `SamplingParams.structural_tag`; empty if it can.

    An engine says so with its attribute `constraint_problem`; one without the attribute cannot.
    """
    return str(getattr(engine, "constraint_problem", f"{type(engine).__name__} does not constrain what it samples"))


def is_plain(sampling: SamplingParams) -> bool:
    """Return True if sampled tokens have the model's own log-probabilities: nothing was scaled, cut off or forbidden.

    This includes greedy sampling, for which engines report log-probabilities at temperature 1.
    """
    untouched = sampling.temperature == 1.0 and sampling.top_p == 1.0 and sampling.top_k <= 0 and sampling.min_p == 0.0
    free = sampling.min_tokens == 0 and sampling.structural_tag is None
    return (untouched or sampling.temperature == 0.0) and free


@runtime_checkable
class Scorer(Protocol):
    """Returns log-probabilities of given tokens. Every engine with a model is a Scorer."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return [T] the model's log-probability of each token given the preceding tokens, at temperature 1,
        untruncated.

        NaN for the first token, which has no context, and where the engine has no value. Safe to call from many tasks
        of one event loop while it samples. `token_ids` is read before the call returns and never changed.

        Raises:
            EngineError: the tokens cannot be scored.
        """
