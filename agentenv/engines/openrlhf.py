"""OpenRLHF's `llm_engine` as an Engine, and an Engine as the `llm_engine` that OpenRLHF's files expect.

Source: openrlhf/trainer/ray/vllm_engine.py, 0.9.1 to 0.11.2 (`RolloutRayActor.generate`); until 0.9.0 it is vLLM's own
AsyncLLMEngine, whose `generate` yields outputs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from agentenv.agent import Engine
from agentenv.chat import Chat
from agentenv.engines._vllm_wire import versions_of
from agentenv.errors import ConfigError, EngineError, RunStopped
from agentenv.openrlhf import to_sampling
from agentenv.types import Completion, FinishReason, SamplingParams


def as_engine(llm_engine: Any, sampling_params: Any) -> Engine:
    """What a trainer hands to `execute`, as an Engine: ours are passed through, OpenRLHF's and vLLM's adapted."""
    generate = getattr(llm_engine, "generate", None)
    if generate is not None and _is_foreign(getattr(generate, "__func__", generate)):
        return OpenRLHFEngine(llm_engine, sampling_params)
    engine: Engine = llm_engine
    return engine


@functools.lru_cache(maxsize=64)  # of a function, not of the engine's bound method, which would keep the engine
def _is_foreign(generate: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(generate) or "request_id" not in inspect.signature(generate).parameters


async def last_of(outputs: AsyncIterator[Any]) -> Any:
    """The last thing that is yielded, which of vLLM's outputs is the whole one; None where nothing is."""
    last = None
    async for output in outputs:
        last = output
    return last


class OpenRLHFEngine:
    """The engine behind one `execute` call of OpenRLHF.

    Every request starts from a copy of the caller's sampling parameters, so that what only they know (the number of
    log-probabilities, stop strings and whether they stay, …) is kept; the caller's own object is never changed, since
    all samples of a prompt share it.

    Args:
        llm_engine: `await generate(token_ids, sampling_params, multi_modal_data=None)`, or vLLM's async generator.
        sampling_params: the caller's, vLLM's or of any class with its fields.
    """

    def __init__(self, llm_engine: Any, sampling_params: Any) -> None:
        self._llm, self._asked = llm_engine, copy(sampling_params)
        self._known = to_sampling(self._asked) or SamplingParams()
        self._yields = inspect.isasyncgenfunction(llm_engine.generate)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.agent.Engine`. The log-probabilities are None where none were asked for."""
        prompt = list(prompt_token_ids)  # a copy: the episode's own grows, and whose engine this is nobody knows
        out = await self._output(prompt, self._params(sampling), request_id)
        if out is None or len(getattr(out, "outputs", ())) != 1:
            raise EngineError(
                f"llm_engine.generate: expected a RequestOutput with one completion, got {out!r:.200}. "
                "Look at the engine's log; set n to 1."
            )
        return _completion(out, prompt)

    async def _output(self, prompt: list[int], params: Any, request_id: str) -> Any:
        if not self._yields:
            return await self._llm.generate(prompt, params)
        return await last_of(self._llm.generate({"prompt_token_ids": prompt}, params, request_id=request_id))

    def _params(self, sampling: SamplingParams) -> Any:
        """The caller's parameters with what the episode changed of them."""
        changed = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if (value := getattr(sampling, name)) != getattr(self._known, name)
        }
        changed |= {"max_tokens": sampling.max_tokens, "min_tokens": sampling.min_tokens}
        anew = bool(changed.keys() - {"max_tokens", "min_tokens", "seed"}) and hasattr(self._asked, "__post_init__")
        # Their actor makes a deep copy of its own before vLLM sees it; vLLM itself writes into what it is given.
        params = deepcopy(self._asked) if self._yields or anew else copy(self._asked)
        for name, value in changed.items():
            setattr(params, name, list(value) if isinstance(value, tuple) else value)
        if anew:
            params.__post_init__()  # vLLM derives fields of its own from these
        if hasattr(params, "detokenize") and not sampling.stop:
            params.detokenize = False  # the loop decodes the ids; vLLM's way, token by token, costs its event loop more
        return params


def _completion(out: Any, prompt: list[int]) -> Completion:
    echo = getattr(out, "prompt_token_ids", None)
    if echo is not None and echo is not prompt and list(echo) != prompt:
        raise EngineError(
            f"llm_engine.generate: expected an action after the {len(prompt)} prompt tokens sent, got one after "
            f"{len(echo)} others. Something between here and the model changes the prompt."
        )
    output = out.outputs[0]
    token_ids = tuple(output.token_ids)
    if output.finish_reason not in get_args(FinishReason):
        raise EngineError(
            f"llm_engine.generate: expected a finish reason of vLLM, got {output.finish_reason!r}. "
            "The generation did not end: look at the engine's log."
        )
    spans = [(span.version, span.start, span.end) for span in getattr(output, "weight_versions", None) or ()]
    return Completion(
        token_ids=token_ids,
        finish_reason=output.finish_reason,
        stop_reason=getattr(output, "stop_reason", None),
        logprobs=_logprobs(output.logprobs, token_ids),
        num_cached_tokens=getattr(out, "num_cached_tokens", None) or 0,
        **versions_of(spans, len(token_ids), default=0),
    )


def _logprobs(entries: Any, token_ids: tuple[int, ...]) -> tuple[float, ...] | None:
    """The sampled tokens' own; None where the caller asked for none."""
    if entries is None:
        return None
    if len(entries) != len(token_ids):
        raise EngineError(
            f"llm_engine.generate: expected {len(token_ids)} log-probabilities, got {len(entries)}. "
            "A shifted log-probability would spoil training: look at the engine."
        )
    try:
        return tuple([entry[token_id].logprob for entry, token_id in zip(entries, token_ids, strict=True)])
    except KeyError:  # rare: the usual way is one pass
        pairs = zip(entries, token_ids, strict=True)
        return tuple(entry[token_id].logprob if token_id in entry else math.nan for entry, token_id in pairs)


# --- the other way round ----------------------------------------------------------------------------------------------


_MAX_TALKS = 512
"""Conversations that are remembered; of one that is forgotten the next turn may go to another engine of a pool."""


@dataclass(slots=True)
class VLLMStyleSampling:
    """Our sampling parameters with vLLM's field names, to be read and written by an agent_func file.

    A copy for one episode: writing into it changes nobody else's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = 1
    """Log-probabilities are always given."""
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    @classmethod
    def of(cls, sampling: SamplingParams) -> VLLMStyleSampling:
        """A copy of ours."""
        copied = cls()
        for name in SamplingParams.__dataclass_fields__:
            value = getattr(sampling, name)
            setattr(copied, name, list(value) if isinstance(value, tuple) else value)
        return copied

    def clone(self) -> VLLMStyleSampling:
        """A copy, as vLLM's have it."""
        return deepcopy(self)


@dataclass(frozen=True, slots=True)
class Logprob:
    """As vLLM's."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """As vLLM's: the text lacks the terminator that the ids have."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """As vLLM's, with the one output."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class _Talks:
    """Conversations known by their tokens: which of them a prompt goes on with, and at which turn."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._last: OrderedDict[int, tuple[int, list[int]]] = OrderedDict()

    def of(self, prompt: list[int]) -> tuple[int, int]:
        """Number and turn; a new number where the prompt begins with nothing that was kept."""
        for talk, (turn, ids) in reversed(self._last.items()):
            if len(ids) < len(prompt) and prompt[len(ids) - 1] == ids[-1] and prompt[: len(ids)] == ids:
                del self._last[talk]  # of two that say the same, each is gone on with once
                return talk, turn + 1
        return next(self._numbers), 0

    def keep(self, talk: int, turn: int, ids: list[int]) -> None:
        """Remember where a conversation stands."""
        self._last[talk] = (turn, ids)
        if len(self._last) > _MAX_TALKS:
            self._last.popitem(last=False)


class LLMEngine:
    """An Engine as files of OpenRLHF 0.9.1 to 0.11.2 call it in an `execute` of their own.

    Calls in our own form, with `request_id`, go to the engine itself. Calls from another event loop, such as that of a
    server in a thread, reach the engine on the loop that this was made on, where the engine lives.
    """

    def __init__(self, engine: Engine, chat: Chat, episode_id: str, seed: int | None = None) -> None:
        self.engine, self._chat, self._episode_id, self._seed = engine, chat, episode_id, seed
        self._turns, self._talks = itertools.count(), _Talks()
        self.fatal: ConfigError | RunStopped | None = None
        """What the engine said of the whole run."""
        try:
            self._home: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._home = None  # made outside of any: the caller's loop is the engine's

    async def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: Any,
        multi_modal_data: Any = None,
        *,
        request_id: str | None = None,
    ) -> Any:
        """Sample after these ids; gives vLLM's RequestOutput in shape."""
        if isinstance(prompt_token_ids, Mapping):
            prompt_token_ids = prompt_token_ids["prompt_token_ids"]
        if isinstance(sampling_params, SamplingParams) and request_id is not None:
            return (await self._sampled(prompt_token_ids, sampling_params, request_id))[0]
        if multi_modal_data:
            raise EngineError("llm_engine.generate: expected no images, got some. agentenv samples from text only yet.")
        prompt = list(map(int, prompt_token_ids))
        sampling = to_sampling(sampling_params, "llm_engine.generate") or SamplingParams()
        completion, request_id = await self._sampled(prompt, sampling, request_id)
        return RequestOutput(request_id, prompt, [self._output(completion)])

    async def _sampled(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None
    ) -> tuple[Completion, str]:
        """The engine's answer, and the id of the request."""
        try:
            return await self._asked(prompt, sampling, request_id)
        except (ConfigError, RunStopped) as error:
            self.fatal = error
            raise

    async def _asked(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None
    ) -> tuple[Completion, str]:
        """As `_sampled`; from another loop, cancelling and errors cross over."""
        if self._home is None or asyncio.get_running_loop() is self._home:
            if request_id is None:
                turn = next(self._turns)
                request_id = f"{self._episode_id}/{turn}"
                if sampling.seed is not None and sampling.seed == self._seed:  # the run's: each call gets other tokens
                    sampling = replace(sampling, seed=sampling.seed + turn)
            return await self.engine.generate(prompt, sampling, request_id=request_id), request_id
        work = self._served(list(prompt), sampling, request_id)
        try:
            crossing = asyncio.run_coroutine_threadsafe(work, self._home)
        except RuntimeError as error:
            work.close()
            raise EngineError(
                "llm_engine.generate: expected the event loop of the run, got one that is closed. End the server "
                "with its episodes."
            ) from error
        return await asyncio.wrap_future(crossing)

    async def _served(
        self, prompt: list[int], sampling: SamplingParams, request_id: str | None
    ) -> tuple[Completion, str]:
        """As `_sampled`, at home: a server that all episodes share does not say whose request it is."""
        talk, turn = self._talks.of(prompt)
        request_id = request_id or f"{self._episode_id}-served-{talk}/{turn}"
        completion = await self.engine.generate(prompt, sampling, request_id=request_id)
        self._talks.keep(talk, turn, [*prompt, *completion.token_ids])
        return completion, request_id

    def _output(self, completion: Completion) -> CompletionOutput:
        ids = list(completion.token_ids)
        logprobs = None
        if completion.logprobs is not None:
            logprobs = [{i: Logprob(value)} for i, value in zip(ids, completion.logprobs, strict=True)]
        text = self._chat.action_text(ids)
        return CompletionOutput(ids, text, logprobs, completion.finish_reason, completion.stop_reason)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the engine has."""
        return getattr(self.engine, name)
