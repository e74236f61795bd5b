"""OpenRLHF's `llm_engine` as an Engine, and an Engine as the `llm_engine` that OpenRLHF's files expect.

Source: openrlhf/trainer/ray/vllm_engine.py, 0.9.1 to 0.11.2 (`RolloutRayActor.generate`); until 0.9.0 it is vLLM's own
AsyncLLMEngine, whose `generate` yields outputs.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, get_args

from agentenv.chat.chat import Chat
from agentenv.core.engine import Engine, checked_errors, engine_errors
from agentenv.core.step_dict import to_sampling
from agentenv.core.types import Completion, FinishReason, SamplingParams
from agentenv.engines.vllm.wire import versions_of
from agentenv.errors import ConfigError, ContractError, EngineError, MissingDependency, RunStopped

_TAKEN = tuple(name for name in SamplingParams.__dataclass_fields__ if name != "structural_tag")
"""Fields that both sides have: vLLM's class has grammars elsewhere, and OpenRLHF asks for none."""


def as_engine(llm_engine: Any, sampling_params: Any) -> Engine:
    """Return what a trainer passes to `execute` as an Engine: ours unchanged, OpenRLHF's and vLLM's adapted."""
    return llm_engine if isinstance(llm_engine, Engine) else OpenRLHFEngine(llm_engine, sampling_params)


async def last_of(outputs: AsyncIterator[Any]) -> Any:
    """Return the last item, which for vLLM is the complete output; None if the iterator is empty."""
    last = None
    async for output in outputs:
        last = output
    return last


class OpenRLHFEngine(Engine):
    """The engine behind one `execute` call of OpenRLHF.

    Every request starts from a copy of the caller's sampling parameters and so keeps fields that we do not have (the
    number of log-probabilities, `include_stop_str_in_output`, …). The caller's object is never changed: all samples of
    a prompt share it.

    Args:
        llm_engine: `await generate(token_ids, sampling_params, multi_modal_data=None)`, or vLLM's async generator.
        sampling_params: the caller's parameters: vLLM's class, or any class with its fields.
    """

    def __init__(self, llm_engine: Any, sampling_params: Any) -> None:
        self._llm = llm_engine
        self._caller_params = copy(sampling_params)
        self._sampling = to_sampling(self._caller_params) or SamplingParams()
        self._yields_outputs = inspect.isasyncgenfunction(llm_engine.generate)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `Engine`. The log-probabilities are None if the caller did not request them."""
        prompt = list(prompt_token_ids)  # a copy: the episode's list grows, and a foreign engine may keep it
        with engine_errors("llm_engine.generate"):
            out = await self._output(prompt, self._params(sampling), request_id)
        if out is None or len(getattr(out, "outputs", ())) != 1:
            raise EngineError(
                f"llm_engine.generate: expected a RequestOutput with one completion, got {out!r:.200}. "
                "Look at the engine's log; set n to 1."
            )
        return _completion(out, prompt)

    async def _output(self, prompt: list[int], params: Any, request_id: str) -> Any:
        if not self._yields_outputs:
            return await self._llm.generate(prompt, params)
        return await last_of(self._llm.generate({"prompt_token_ids": prompt}, params, request_id=request_id))

    def _params(self, sampling: SamplingParams) -> Any:
        """Return the caller's parameters with the fields that the episode changed."""
        caller = self._caller_params
        changed = {
            name: value for name in _TAKEN if (value := getattr(sampling, name)) != getattr(self._sampling, name)
        }
        changed |= {"max_tokens": sampling.max_tokens, "min_tokens": sampling.min_tokens}
        rebuild = bool(changed.keys() - {"max_tokens", "min_tokens", "seed"}) and hasattr(caller, "__post_init__")
        # OpenRLHF's actor makes its own deep copy; vLLM itself writes into the object that it gets.
        params = deepcopy(caller) if self._yields_outputs or rebuild else copy(caller)
        for name, value in changed.items():
            setattr(params, name, list(value) if isinstance(value, tuple) else value)
        if rebuild:
            params.__post_init__()  # vLLM derives other fields from these
        if hasattr(params, "detokenize") and not sampling.stop:
            params.detokenize = False  # the loop decodes the ids; decoding token by token costs vLLM's event loop more
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
    entries, logprobs = output.logprobs, None
    if entries is not None:  # None if the caller did not request them
        if len(entries) != len(token_ids):
            raise EngineError(
                f"llm_engine.generate: expected {len(token_ids)} log-probabilities, got {len(entries)}. "
                "A shifted log-probability would spoil training: look at the engine."
            )
        try:
            logprobs = tuple([entry[i].logprob for entry, i in zip(entries, token_ids, strict=True)])
        except KeyError:  # rare: a sampled token is missing among the candidates
            pairs = zip(entries, token_ids, strict=True)
            logprobs = tuple(entry[i].logprob if i in entry else math.nan for entry, i in pairs)
    spans = [(span.version, span.start, span.end) for span in getattr(output, "weight_versions", None) or ()]
    return Completion(
        token_ids=token_ids,
        finish_reason=output.finish_reason,
        matched_stop=getattr(output, "stop_reason", None),
        logprobs=logprobs,
        num_cached_tokens=getattr(out, "num_cached_tokens", None) or 0,
        **versions_of(spans, len(token_ids), default=0),
    )


# --- our engine as OpenRLHF's llm_engine ------------------------------------------------------------------------------


_MAX_CONVERSATIONS = 512
"""Maximum number of conversations to remember. The next turn of a forgotten one may go to another engine of a pool."""


@dataclass(slots=True)
class VLLMStyleSampling:
    """Our sampling parameters with vLLM's field names, for an agent_func file to read and write.

    Each episode has its own copy.
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
    structural_tag: Any = None
    """Our grammar; vLLM's class has grammars elsewhere."""
    n: int = 1
    logprobs: int | None = 1
    """Log-probabilities are always returned."""
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    @classmethod
    def of(cls, sampling: SamplingParams) -> VLLMStyleSampling:
        """Return a copy of our parameters."""
        values = {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}
        return cls(**values | {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)})

    def clone(self) -> VLLMStyleSampling:
        """Return a copy; vLLM's class has this method."""
        return deepcopy(self)


class _Conversations:
    """Conversations identified by their tokens: finds the one that a prompt continues."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._last: OrderedDict[int, tuple[int, list[int]]] = OrderedDict()

    def find(self, prompt: list[int]) -> tuple[int, int]:
        """Return the conversation's number and turn; a new number if the prompt extends no known conversation."""
        for number, (turn, ids) in reversed(self._last.items()):
            if len(ids) < len(prompt) and prompt[len(ids) - 1] == ids[-1] and prompt[: len(ids)] == ids:
                del self._last[number]  # two with the same tokens are continued once each
                return number, turn + 1
        return next(self._numbers), 0

    def store(self, number: int, turn: int, ids: list[int]) -> None:
        """Remember a conversation's tokens; the oldest conversation is forgotten when too many are known."""
        self._last[number] = (turn, ids)
        if len(self._last) > _MAX_CONVERSATIONS:
            self._last.popitem(last=False)


class LLMEngine(Engine):
    """An Engine as files of OpenRLHF 0.9.1 to 0.11.2 call it in their own `execute`.

    Calls in our form, with `request_id`, go straight to the engine. Calls from another event loop, such as that of a
    server in a thread, run on the loop on which this object was created: the engine belongs to it.
    """

    def __init__(self, engine: Engine, chat: Chat, episode_id: str, seed: int | None = None) -> None:
        self.engine = engine
        self._chat = chat
        self._episode_id = episode_id
        self._seed = seed
        self._turns = itertools.count()
        self._conversations = _Conversations()
        self.fatal: ConfigError | MissingDependency | RunStopped | None = None
        """The engine's error that ends the whole run."""
        self.failure: EngineError | ContractError | None = None
        """The engine's last error."""
        self.server_failures: deque[EngineError | ContractError] = deque(maxlen=1)
        """The last error of a request that names no episode; all episodes of a file share it."""
        self.is_over = False
        """True after the episode: who still asks this engine is a server of the file."""
        try:
            self._home: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._home = None  # created outside any loop: the caller's loop is the engine's

    async def generate(  # OpenRLHF calls it, too
        self,
        prompt_token_ids: Any,
        sampling_params: Any,
        multi_modal_data: Any = None,
        *,
        request_id: str | None = None,
    ) -> Any:
        """Sample after these ids; returns an object of the shape of vLLM's RequestOutput."""
        if isinstance(prompt_token_ids, Mapping):
            prompt_token_ids = prompt_token_ids["prompt_token_ids"]
        if isinstance(sampling_params, SamplingParams) and request_id is not None:
            return (await self._sample(prompt_token_ids, sampling_params, request_id))[0]
        if multi_modal_data:
            raise EngineError("llm_engine.generate: expected no images, got some. agentenv samples from text only.")
        prompt = list(map(int, prompt_token_ids))
        sampling = to_sampling(sampling_params, "llm_engine.generate") or SamplingParams()
        completion, request_id = await self._sample(prompt, sampling, request_id)
        ids = list(completion.token_ids)
        logprobs = None
        if completion.logprobs is not None:
            values = zip(ids, completion.logprobs, strict=True)
            logprobs = [{i: SimpleNamespace(logprob=each, rank=None, decoded_token=None)} for i, each in values]
        output = SimpleNamespace(
            index=0, token_ids=ids, text=self._chat.action_text(ids), logprobs=logprobs,
            finish_reason=completion.finish_reason, stop_reason=completion.matched_stop,
        )  # fmt: skip
        return SimpleNamespace(request_id=request_id, prompt_token_ids=prompt, outputs=[output], finished=True)

    async def _sample(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None
    ) -> tuple[Completion, str]:
        """Return the completion and the request's id; remember an error that ends the run.

        Cancellation and errors cross from one loop to the other.
        """
        try:
            if self._home is None or asyncio.get_running_loop() is self._home:
                if request_id is None:
                    turn = next(self._turns)
                    request_id = f"{self._episode_id}/{turn}"
                    if sampling.seed is not None and sampling.seed == self._seed:  # the run's: vary it for each call
                        sampling = replace(sampling, seed=sampling.seed + turn)
                with checked_errors("llm_engine.generate"):
                    return await self.engine.generate(prompt, sampling, request_id=request_id), request_id
            work = self._sample_for_server(list(prompt), sampling, request_id)
            try:
                crossing = asyncio.run_coroutine_threadsafe(work, self._home)
            except RuntimeError as error:
                work.close()
                raise EngineError(
                    "llm_engine.generate: expected the event loop of the run, got a closed one. Stop the server "
                    "when its episodes end."
                ) from error
            return await asyncio.wrap_future(crossing)
        except (ConfigError, MissingDependency, RunStopped) as error:
            self.fatal = error
            raise
        except (EngineError, ContractError) as error:
            self.failure = error
            if self.is_over or asyncio.get_running_loop() is not self._home:
                self.server_failures.append(error)
            raise

    async def _sample_for_server(
        self, prompt: list[int], sampling: SamplingParams, request_id: str | None
    ) -> tuple[Completion, str]:
        """Sample for a server that all episodes share, whose requests do not name their episode."""
        number, turn = self._conversations.find(prompt)
        request_id = request_id or f"{self._episode_id}-served-{number}/{turn}"
        with checked_errors("llm_engine.generate"):
            completion = await self.engine.generate(prompt, sampling, request_id=request_id)
        self._conversations.store(number, turn, [*prompt, *completion.token_ids])
        return completion, request_id

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the engine."""
        return getattr(self.engine, name)
