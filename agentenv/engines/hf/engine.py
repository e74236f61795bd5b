"""HFEngine: sample from a causal language model of transformers in this process, for many concurrent episodes.

One worker thread owns the model. Requests join and leave the batch between forward passes, so a short action never
waits for a long one (continuous batching; that of transformers does not support per-request seeds, min-p, stop strings
or reuse between turns). The event loop only submits requests and receives results.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv._util.virtual_time import external_work
from agentenv.core.engine import Engine, EngineOptions, Tokenizer
from agentenv.core.types import Completion, FinishReason, SamplingParams
from agentenv.engines.constraints import Constrainer, GrammarWalk, missing_xgrammar
from agentenv.errors import ConfigError, EngineError, MissingDependency

if TYPE_CHECKING:
    from torch import Tensor

    from agentenv.engines.hf.sampling import StopStrings
    from agentenv.engines.weights import SharedWeights, WeightFile

MAX_PREFILL_TOKENS = 4096
"""Prompt tokens per forward pass, padding included. Longer prompts need several, with decode steps in between."""

MAX_LOGITS = 1 << 25
"""C × V of a piece: 128 MiB in float32, about three times that during log-softmax."""
MAX_PIECE_TOKENS = 1024


@dataclass(slots=True, eq=False)
class GenerationJob:
    """A generation in progress. Its slot is its index in the running batch."""

    token_ids: list[int]
    """The prompt and the sampled tokens."""
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    episode: str
    """Key of its cached prefix; empty if the request id has no turn."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    rng: random.Random
    stop_strings: StopStrings | None
    walk: GrammarWalk | None
    num_prompt: int
    num_computed: int = 0
    """Number of tokens whose keys and values are in the slot."""
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class ScoreJob:
    """A sequence to score. Only the constructor may run outside the engine's worker thread.

    It goes through the model in pieces, without slots, so that scores are an independent check of sampling. Shapes: C
    tokens of a piece, V tokens of the vocabulary.
    """

    model: Any
    token_ids: list[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[float]]
    logprobs: list[float] = field(default_factory=lambda: [math.nan])
    """Log-probabilities of the tokens scored so far."""
    cache: Any = None

    @property
    def done(self) -> bool:
        """True if every token is scored."""
        return len(self.logprobs) == len(self.token_ids)

    def restart(self) -> None:
        """Start again after new weights."""
        self.logprobs, self.cache = [math.nan], None

    def advance(self) -> None:
        """Score the next piece.

        Raises:
            EngineError: the logits are not finite.
        """
        import torch
        from transformers import DynamicCache

        if self.done:  # a single token has no context
            return
        if self.cache is None:
            self.cache = DynamicCache(config=self.model.config)
        vocab_size = self.model.get_input_embeddings().num_embeddings
        start, num = len(self.logprobs), max(1, min(MAX_PIECE_TOKENS, MAX_LOGITS // vocab_size))
        ids_1C = torch.tensor([self.token_ids[start - 1 : -1][:num]], device=self.model.device)
        next_C = torch.tensor(self.token_ids[start : start + num], device=self.model.device)
        output = self.model(input_ids=ids_1C, past_key_values=self.cache, use_cache=True)
        logprobs_CV = output.logits[0].float().log_softmax(-1)
        scored = logprobs_CV.gather(1, next_C[:, None])[:, 0].tolist()
        if not all(map(math.isfinite, scored)):
            raise EngineError("HFEngine.score: expected finite logits, got others. Check the weights.")
        self.logprobs += scored


class HFEngine(Engine):
    """Samples from a transformers model; implements `agentenv.core.engine.Engine`.

    Log-probabilities and finish reasons follow vLLM 0.32 with `logprobs_mode="processed_logprobs"`. Tokens of a
    request with a seed do not depend on the batch, up to rounding in the forward pass. On a CPU, a model under
    20 million parameters runs on one thread, the fastest on busy cores, unless OMP_NUM_THREADS is set.

    Example::

        engine = HFEngine("Qwen/Qwen2.5-0.5B-Instruct")
        completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=64), request_id="episode-0/0")
        await engine.close()
    """

    words = "transformers"
    context_argument = "max_length"

    @classmethod
    def from_options(cls, options: EngineOptions) -> HFEngine:
        """See `Engine`."""
        given = {"tokenizer": options.tokenizer, "device": options.device, "dtype": options.dtype}
        return cls(options.model, **{**given, **options.args})

    def __init__(
        self,
        model: str | Path | Any,
        *,
        tokenizer: Tokenizer | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_num_seqs: int = 64,
        max_length: int | None = None,
        prefix_cache_tokens: int = 32_768,
    ) -> None:
        """Load a model by path or name, or take a PreTrainedModel as it is (put in eval mode, its attention in sdpa's).

        `dtype="auto"` is the checkpoint's on an accelerator and float32 on a CPU, where bfloat16 is slow. `max_length`
        is the context, by default the model's. Memory for keys and values grows to the most requests ever run at once,
        at most `max_num_seqs`, times the longest; `prefix_cache_tokens` more are kept of finished turns.

        Raises:
            MissingDependency: torch or transformers is not installed.
            ConfigError: the model's cache is of a kind that this engine has no slots for, or a limit does not fit it.
        """
        try:
            from transformers import AutoTokenizer

            from agentenv.engines.hf import sampling as _sampling
            from agentenv.engines.hf import slot_model

        except ImportError as error:
            raise MissingDependency(
                f"HFEngine: expected torch and transformers, got {error}. pip install --upgrade agentenv-rl"
            ) from error
        if tokenizer is None and isinstance(model, str | Path):
            tokenizer = AutoTokenizer.from_pretrained(str(model))
        self._sampling, self._tokenizer = _sampling, tokenizer
        self._slots = slot_model.SlotModel(model, device=device, dtype=dtype, max_length=max_length)
        self._new_cache, self._prefixes = slot_model.SlotCache, slot_model.PrefixStore(prefix_cache_tokens)
        self._constrainer = None if tokenizer is None else Constrainer(tokenizer, self._slots.vocab_size)
        self._eos_id, self._eos_ids = slot_model.eos_ids(self._slots.model, tokenizer)
        self._max_num_seqs = max(1, max_num_seqs)
        # The condition guards what both sides touch: queues and flags. The batch is the worker's alone.
        self._changed = threading.Condition()
        self._waiting: deque[GenerationJob] = deque()
        self._commands: deque[tuple[Callable[[], None], asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._cancelled = self._paused = self._closing = False
        self._running: list[GenerationJob] = []
        self._scores: deque[ScoreJob] = deque()
        self._outbox: list[tuple[GenerationJob | ScoreJob, Any]] = []
        self._thread: threading.Thread | None = None

    @property
    def constraint_problem(self) -> str:
        """See `Engine`."""
        return missing_xgrammar() if self._constrainer is not None else "HFEngine has no tokenizer: pass tokenizer=..."

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action. Cancelling frees its place in the batch.

        `request_id` is "<episode>/<turn>": a prompt that extends an earlier one of the episode is only computed from
        where they differ. Stop strings see special tokens as text, and keep all tokens up to the completing one.

        Raises:
            EngineError: the prompt cannot be sampled from, the logits are NaN, the worker failed, or the engine closed.
            ConfigError: a structural tag cannot be followed without a tokenizer or xgrammar.
            DataError: the structural tag is not a grammar.
        """
        loop, prompt, where = asyncio.get_running_loop(), list(prompt_token_ids), f"HFEngine.generate({request_id!r})"
        self._slots.check_prompt(prompt, where)
        strings = None
        if sampling.stop:
            if self._tokenizer is None:
                raise EngineError(f"{where}: expected a tokenizer for stop strings, got none. Pass tokenizer=... .")
            strings = self._sampling.StopStrings(self._tokenizer, sampling, prompt)
        room, stop_ids = self._slots.max_length - len(prompt), self._eos_ids.union(sampling.stop_token_ids)
        walk = None
        if sampling.structural_tag is not None:
            if self._constrainer is None or self.constraint_problem:
                raise ConfigError(f"{where}: expected to follow a structural tag, got none: {self.constraint_problem}.")
            walk = await self._constrainer.follow(sampling.structural_tag, stop_ids)
        request = GenerationJob(
            token_ids=prompt,
            sampling=sampling,
            max_tokens=min(room, sampling.max_tokens or room),
            stop_ids=stop_ids,
            episode=request_id.rpartition("/")[0],
            loop=loop,
            future=loop.create_future(),
            rng=random.Random(sampling.seed if sampling.seed != -1 else None),
            stop_strings=strings,
            walk=walk,
            num_prompt=len(prompt),
        )
        with self._changed:
            self._check_open()
            self._waiting.append(request)
            self._changed.notify()
        try:
            with external_work():
                return await request.future
        except asyncio.CancelledError:
            with self._changed:
                request.cancelled = self._cancelled = True
                self._changed.notify()
            raise

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after those before it; see `Engine`.

        Sequences are scored one after another, in pieces between forward passes of sampling.
        """
        loop, ids = asyncio.get_running_loop(), list(token_ids)
        self._slots.check_prompt(ids, "HFEngine.score", room=0)
        job = ScoreJob(self._slots.model, ids, loop, loop.create_future())
        with self._changed:
            self._check_open()
            self._scores.append(job)
            self._changed.notify()
        return await job.future

    async def pause(self) -> None:
        """Stop between two forward passes. Requests keep their state; new ones wait."""
        await self._command(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """Resume after `pause`."""
        await self._command(lambda: setattr(self, "_paused", False))

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Write new weights between two forward passes; any subset of `model.state_dict()`.

        Running requests keep their tokens and continue with the new weights and recomputed keys and values (like vLLM's
        pause with mode "keep" and `clear_cache`). Cached prefixes are dropped. `pause` is not needed.

        Raises:
            ConfigError: a name or shape differs from the model's; nothing was written.
        """
        tensors = list(named_tensors)

        def write() -> None:
            self._slots.write_weights(tensors)
            self.policy_version = policy_version
            self._prefixes.clear()
            for request in self._running:
                request.num_computed = 0
            for job in self._scores:
                job.restart()

        await self._command(write)

    async def load_offer(self, offer: SharedWeights | WeightFile, policy_version: int) -> None:
        """Load weights from shared memory; see `agentenv.engines.weights`."""
        await self.update_weights(offer, policy_version)

    async def close(self) -> None:
        """End the worker thread and fail requests in flight. May be called again."""

        def end() -> None:
            self._closing = True
            self._fail_all("expected an open engine, got close() while sampling. Close it after the last episode.")

        with contextlib.suppress(EngineError):
            await self._command(end)
        if self._thread is not None:
            self._thread.join()

    async def _command(self, action: Callable[[], None]) -> None:
        """Run an action in the worker thread, between two forward passes."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            self._check_open()
            self._commands.append((action, loop, future))
            self._changed.notify()
        with external_work():
            await future

    def _check_open(self) -> None:
        if self._closing:
            raise EngineError("HFEngine: expected an open engine, got a closed one. Make a new HFEngine.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="agentenv-hf", daemon=True)
            self._thread.start()

    # Everything below runs in the worker thread.

    def _work(self) -> None:
        with self._slots.session():
            while not self._closing:
                self._cycle()  # a function, so that its locals, such as new weights, are freed while it waits
        with self._changed:
            late, self._commands = self._commands, deque()
        for _, loop, future in late:
            post(loop, settle, [(future, EngineError("HFEngine: expected an open engine, got a closed one."))])

    def _cycle(self) -> None:
        def has_work() -> bool:
            requests = () if self._paused else (self._waiting, self._running, self._scores)
            return any((self._commands, self._cancelled, *requests))

        with self._changed:
            self._changed.wait_for(has_work)
            commands, self._commands = self._commands, deque()
        self._slots.set_num_threads()
        for action, loop, future in commands:
            post(loop, settle, [(future, _attempt(action))])
        try:
            with self._changed:
                has_cancelled, self._cancelled = self._cancelled, False
                if has_cancelled:
                    self._waiting = deque(request for request in self._waiting if not request.cancelled)
            for slot in reversed(range(len(self._running))):
                if has_cancelled and self._running[slot].cancelled:
                    self._free(slot)
            if not self._paused and not self._closing:
                self._step()
        except Exception as error:  # noqa: BLE001 - passed to every caller, whose retry policy decides
            self._fail_all(f"expected a forward pass, got {type(error).__name__}: {error}. Try again.")
        self._deliver()

    def _step(self) -> None:
        """Admit requests, run one forward pass over prompts, one over rows with a single new token, and score a piece.

        An error fails only the sequence that is scored.
        """
        while self._waiting and len(self._running) < self._max_num_seqs:
            slot, request = len(self._running), self._waiting.popleft()
            common, saved = self._prefixes.take(request.episode, request.token_ids)
            if common:
                self._slots.cache.reserve(slot + 1, common)
                self._slots.cache.load(slot, saved, common)
            request.num_computed = request.num_cached = common
            self._running.append(request)
        slots: list[int] = []  # the first request with a prompt to compute, and others of similar length
        longest = first = 0
        for slot, request in enumerate(self._running):
            num_new = min(len(request.token_ids) - request.num_computed, MAX_PREFILL_TOKENS)
            first = first or (num_new if num_new > 1 else 0)
            fits = max(longest, num_new) * (len(slots) + 1) <= MAX_PREFILL_TOKENS
            if num_new > 1 and fits and first <= 2 * num_new and num_new <= 2 * first:
                slots.append(slot)
                longest = max(longest, num_new)
        if slots:
            self._forward(slots)
        if slots := [i for i, r in enumerate(self._running) if r.num_computed == len(r.token_ids) - 1]:
            self._forward(slots)
        while self._scores and self._scores[0].future.cancelled():
            self._scores.popleft()
        if self._scores:
            failed = _attempt(self._scores[0].advance)
            if failed or self._scores[0].done:
                job = self._scores.popleft()
                self._outbox.append((job, failed or job.logprobs))

    def _forward(self, slots: Sequence[int]) -> None:
        """Compute missing tokens of rows, sample for complete rows, and finish requests."""
        requests = [self._running[slot] for slot in slots]
        starts = [r.num_computed for r in requests]
        new_ids = [r.token_ids[r.num_computed : r.num_computed + MAX_PREFILL_TOKENS] for r in requests]
        logits_BV = self._slots.forward(slots, new_ids, starts)
        for request, ids in zip(requests, new_ids, strict=True):
            request.num_computed += len(ids)
        ready = [i for i, r in enumerate(requests) if r.num_computed == len(r.token_ids)]
        if not ready:
            return
        if len(ready) < len(requests):
            logits_BV, requests, slots = logits_BV[ready], [requests[i] for i in ready], [slots[i] for i in ready]
        legal = [r.walk.legal() if r.walk is not None else None for r in requests]
        is_constrained = any(mask_V is not None for mask_V in legal)
        if is_constrained:
            logits_BV = self._sampling.forbid(logits_BV, legal)
        params, uniforms = [r.sampling for r in requests], [r.rng.random() for r in requests]
        banned = [r.stop_ids if len(r.logprobs) < r.sampling.min_tokens else () for r in requests]
        tokens_B, logprobs_B = self._sampling.draw(logits_BV, params, uniforms, banned)
        tokens = tokens_B.tolist()
        if is_constrained:
            for request, mask_V, token in zip(requests, legal, tokens, strict=True):
                if request.walk is not None and mask_V is not None:
                    request.walk.take(token, mask_V)
        sampled = zip(slots, requests, tokens, logprobs_B.tolist(), strict=True)
        finished = [slot for slot, request, token, logprob in sampled if self._append(request, token, logprob)]
        for slot in reversed(finished):
            self._free(slot)

    def _append(self, request: GenerationJob, token: int, logprob: float) -> bool:
        """Take in one token; True when the request is finished, with its outcome in the outbox."""
        if not math.isfinite(logprob):
            error = f"HFEngine: expected finite logits, got {logprob} as a log-probability. Check the weights."
            self._outbox.append((request, EngineError(error)))
            unused = range(len(self._running), self._slots.cache.num_slots)
            self._slots.cache.wipe([self._running.index(request), *unused])
            request.episode = ""
            return True
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        request.policy_versions.append(self.policy_version)
        found = request.stop_strings.push(token) if request.stop_strings and token not in request.stop_ids else None
        if token in request.stop_ids:
            self._finish(request, "stop", None if token == self._eos_id else token)
        elif found is not None:
            self._finish(request, "stop", found)
        elif len(request.logprobs) >= request.max_tokens:
            self._finish(request, "length", None)
        else:
            return False
        return True

    def _finish(self, request: GenerationJob, reason: FinishReason, matched_stop: int | str | None) -> None:
        versions = tuple(request.policy_versions)
        completion = Completion(
            tuple(request.token_ids[request.num_prompt :]), reason, matched_stop,
            logprobs=tuple(request.logprobs),
            policy_versions=versions if len(set(versions)) > 1 else (), policy_version=versions[-1],
            num_cached_tokens=request.num_cached,
            forced=None if request.walk is None else request.walk.forced,
        )  # fmt: skip
        self._outbox.append((request, completion))

    def _free(self, slot: int) -> None:
        """Take a request out of the batch, keep its prefix if it finished, and put the last row in its place."""
        request, cache = self._running[slot], self._slots.cache
        if request.episode and not request.cancelled:
            length = request.num_computed
            self._prefixes.put(request.episode, request.token_ids[:length], cache.save(slot, length))
        last = self._running.pop()
        if last is not request:
            self._running[slot] = last
            cache.move(len(self._running), slot, last.num_computed)

    def _fail_all(self, message: str) -> None:
        with self._changed:
            failed: list[GenerationJob | ScoreJob] = [*self._running, *self._waiting, *self._scores]
            self._running, self._waiting, self._scores = [], deque(), deque()
        self._slots.cache = self._new_cache()
        self._prefixes.clear()
        self._outbox += [(request, EngineError(f"HFEngine: {message}")) for request in failed]
        self._deliver()

    def _deliver(self) -> None:
        """Wake each event loop once for all that finished in a step."""
        outbox, self._outbox = self._outbox, []
        for loop in {request.loop for request, _ in outbox}:
            post(loop, settle, [(request.future, outcome) for request, outcome in outbox if request.loop is loop])


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - carried to the caller of the command
        return error
    return None


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call `function(*args)` on a loop from another thread; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def settle(outcomes: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set results and exceptions of futures on the running loop, except cancelled ones."""
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
