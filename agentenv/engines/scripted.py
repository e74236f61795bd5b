"""ScriptedEngine: a policy that says what a test tells it to, with the failures of real engines on demand."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentenv.agent import Tokenizer
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Completion, FinishReason, SamplingParams

Reply = str | Sequence[int] | Completion | Exception
"""One generation: text (the terminator is added), token ids as they are, a whole Completion, or an error to raise."""
Latency = float | Callable[["Request"], float]
"""Seconds that a generation takes, or what says so for each request; `agentenv.testing.latency` has distributions."""
Script = Iterable[Reply] | Callable[["Request"], Reply | Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `generate`, as the script sees it and as `ScriptedEngine.requests` keeps it."""

    prompt_token_ids: tuple[int, ...]
    prompt: str
    sampling: SamplingParams
    request_id: str
    call_index: int
    """0 on the first call of all."""

    @property
    def turn_index(self) -> int:
        """Turn within the episode, from the request id."""
        return int(self.request_id.rpartition("/")[2]) if "/" in self.request_id else 0

    @property
    def episode_id(self) -> str:
        """The request id without its turn."""
        return self.request_id.rpartition("/")[0] or self.request_id


class ScriptedEngine:
    """Deterministic: the same request gives the same tokens, whatever else runs.

    The script is a list (turn i of every episode says item i, the last item repeats) or a callable of the request.

    Example::

        ScriptedEngine(["I think 41.", "#### 42"], tokenizer)
        ScriptedEngine(solves(0.5, right="#### 42", wrong="#### 41"), tokenizer, latency_s=0.01, crash_at=7)
    """

    def __init__(
        self,
        script: Script,
        tokenizer: Tokenizer,
        *,
        latency_s: Latency = 0.0,
        finish_reason: FinishReason | None = None,
        crash_at: int | Iterable[int] = (),
        logprob: float = -0.5,
        policy_version: int = 0,
    ) -> None:
        """Set the script and what goes wrong.

        Args:
            script: what to say.
            tokenizer: encodes text replies.
            latency_s: seconds that a generation takes; a number, or a function of the request.
            finish_reason: forced on every completion; None derives it ("length" where `max_tokens` cut it).
            crash_at: indices of calls that raise EngineError, counted over the engine's life.
            logprob: of every token; `math.nan` for an engine that lost them.
            policy_version: of every token.

        Raises:
            ConfigError: the script is a text, or has no reply.
        """
        self.script = script if callable(script) else list(script)
        if isinstance(script, str) or not self.script:
            raise ConfigError(f"ScriptedEngine.script: expected replies in a list, got {script!r:.60}. Give it some.")
        self.tokenizer, self.latency_s, self.finish_reason = tokenizer, latency_s, finish_reason
        self.crash_at = frozenset([crash_at] if isinstance(crash_at, int) else crash_at)
        self.logprob, self.policy_version = logprob, policy_version
        self.requests: list[Request] = []
        self.num_cancelled = 0
        self.closed = False

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Say the script's next words; see `agent.Engine`."""
        ids = tuple(prompt_token_ids)
        request = Request(ids, self.tokenizer.decode(ids), sampling, request_id, len(self.requests))
        self.requests.append(request)
        try:
            await asyncio.sleep(self.latency_s(request) if callable(self.latency_s) else self.latency_s)
            if request.call_index in self.crash_at:
                raise EngineError(
                    f"ScriptedEngine: expected to sample, got a crash at call {request.call_index}. Retry."
                )
            reply = self.script(request) if callable(self.script) else self._line(request)
            if inspect.isawaitable(reply):
                reply = await reply
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(reply, Exception):
            raise reply
        return self._completion(reply, sampling)

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """What is sampled from now on carries `policy_version`; the script stays what it is."""
        self.policy_version = policy_version

    async def close(self) -> None:
        """Nothing is held; remembered for tests."""
        self.closed = True

    def _line(self, request: Request) -> Reply:
        lines: list[Any] = self.script  # type: ignore[assignment]
        return lines[min(request.turn_index, len(lines) - 1)]  # type: ignore[no-any-return]

    def _completion(self, reply: Any, sampling: SamplingParams) -> Completion:
        if isinstance(reply, Completion):
            return reply
        if isinstance(reply, str):
            eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
            token_ids = self.tokenizer.encode(reply, add_special_tokens=False) + eos
        else:
            token_ids = list(reply)
        reason: FinishReason = "stop"
        if sampling.max_tokens is not None and len(token_ids) > sampling.max_tokens:
            token_ids, reason = token_ids[: sampling.max_tokens], "length"
        completion = Completion(
            tuple(token_ids), reason, logprobs=(self.logprob,) * len(token_ids), policy_version=self.policy_version
        )
        return replace(completion, finish_reason=self.finish_reason) if self.finish_reason else completion


def solves(probability: float, *, right: str, wrong: str, seed: int = 0) -> Callable[[Request], str]:
    """A script that says `right` with a probability, drawn from the seed, the request's id and its sampling seed."""
    if not 0.0 <= probability <= 1.0 or math.isnan(probability):
        raise ValueError(f"solves: expected a probability in [0, 1], got {probability!r}. Change it.")

    def script(request: Request) -> str:
        """Say the right or the wrong thing."""
        draw = random.Random(f"{seed}/{request.request_id}/{request.sampling.seed}").random()
        return right if draw < probability else wrong

    return script
