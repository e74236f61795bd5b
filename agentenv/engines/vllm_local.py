"""vLLM in this process: `AsyncLLM`, token ids in and out, with weight updates while it runs."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.engines._vllm_weights import Offer, WeightSender
from agentenv.engines._vllm_wire import completion_of_output, scores_of_output, vllm_sampling, vllm_scoring
from agentenv.engines._weights import SharedWeights, WeightFile
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Completion, SamplingParams
from agentenv.vllm_start import RunningLLM, with_cpu_cache

if TYPE_CHECKING:
    import torch

CPU_KV_CACHE_BYTES = 2 << 30
"""Memory for keys and values on vLLM's CPU build; `kv_cache_memory_bytes` and VLLM_CPU_KVCACHE_SPACE (GiB) win."""


class VLLMEngine:
    """An engine over vLLM's `AsyncLLM`; it starts on the first `generate`, or with `await engine.start()`.

    The log-probabilities are those of the distribution that was sampled from (`processed_logprobs`). vLLM logs warnings
    only, and to stderr, unless VLLM_LOGGING_LEVEL and VLLM_LOGGING_STREAM say otherwise. Ctrl-C reaches the caller and
    not vLLM's processes, so episodes in flight can be finished before `close`.

    Example::

        engine = VLLMEngine("Qwen/Qwen2.5-0.5B-Instruct", max_model_len=4096)
        completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=64), request_id="0/0")
        await engine.close()

    Args:
        model: a folder or a Hugging Face id.
        dtype: vLLM's names; "auto" follows the checkpoint, except that float32 becomes a half type.
        max_model_len: tokens of prompt and action together; None takes the model's own limit.
        tensor_parallel_size: GPUs to spread the model over.
        gpu_memory_utilization: share of each GPU's memory to use; without effect on the CPU build.
        seed: of the requests that bring none.
        max_num_seqs: requests sampled at once; None takes vLLM's default.
        engine_args: anything else that `AsyncEngineArgs` takes; wins over what is set here. And `transfer`, the way of
            new weights: "ipc" on one GPU, "nccl" between GPUs, "shm" (shared memory), or "auto", the first of them that
            can be.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        seed: int = 0,
        max_num_seqs: int | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy_version = 0
        self._engine_args: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "seed": seed,
            "max_num_seqs": max_num_seqs,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": "agentenv.engines._vllm_worker.WorkerExtension",
            "weight_transfer_config": {"backend": "agentenv"},
            **(engine_args or {}),
        }
        self._sender = WeightSender(self._engine_args.pop("transfer", "auto"))
        self.devices: tuple[str, ...] = ()
        """The GPU of each worker, or "cpu"; known once it has started."""
        self._llm: Any = None
        self._running: RunningLLM
        self._closed = False
        self._failed: Exception | None = None
        self._half_updated = False
        self._joined = ""  # the transfer that the workers are set up for
        self._updating = asyncio.Lock()
        self._start_lock = asyncio.Lock()  # one vLLM, however many episodes ask for it first
        self._in_flight: set[str] = set()
        self._counter = itertools.count()

    async def start(self) -> None:
        """Load the model and start vLLM's processes, once; the event loop stays free meanwhile.

        Raises:
            MissingDependency: vLLM is not installed.
            ConfigError: vLLM refuses the model or an argument.
            EngineError: vLLM could not start, or this engine was closed.
        """
        async with self._start_lock:
            if self._closed:
                raise EngineError("VLLMEngine: expected an open engine, got one that was closed. Make a new one.")
            if self._failed is not None:  # the others that wait need not find out one after another
                raise self._failed
            if self._llm is not None:
                return
            try:
                self._running = await RunningLLM.started("VLLMEngine", self._arguments, failed=EngineError)
            except Exception as error:
                self._failed = error
                raise
            self._llm = self._running.llm
            await self._llm.update_weight_version(str(self.policy_version))
            self.devices = tuple(await self._llm.collective_rpc("agentenv_device"))

    def _arguments(self, is_cpu: bool) -> Mapping[str, Any]:
        if not is_cpu:
            return self._engine_args
        # vLLM 0.32 dies on a CPU when it splits the prompt of a request with a seed ("Generator does not use offset").
        return with_cpu_cache({"enable_chunked_prefill": False, **self._engine_args}, CPU_KV_CACHE_BYTES)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.agent.Engine`. Cancelling it aborts the request in vLLM."""
        prompt = list(prompt_token_ids)
        await self.start()
        out = await self._answer(prompt, vllm_sampling(sampling), request_id)
        return completion_of_output(out, prompt, self.policy_version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token after those before it; see `agentenv.engines.Scorer`.

        vLLM samples a token after what it scores: of a sequence as long as `max_model_len`, the last token gets NaN.
        When weights are replaced meanwhile, all of it is scored again, with the new ones. On a GPU the logits of up to
        `max_num_batched_tokens` tokens are in memory at once: lower that (engine_args) where it does not fit.

        Raises:
            EngineError: the tokens cannot be scored, or vLLM has died.
        """
        await self.start()
        scored = list(token_ids)[: self._llm.model_config.max_model_len - 1]
        unscored = len(token_ids) - len(scored)
        if unscored > 1:
            scored = list(token_ids)  # for vLLM to refuse, in its words
        version = None
        while version != self.policy_version:
            version = self.policy_version
            out = await self._answer(scored, vllm_scoring(), "score")
        return scores_of_output(out, scored) + [math.nan] * unscored

    async def _answer(self, prompt: list[int], params: Any, request_id: str) -> Any:
        """The one output of vLLM for a prompt."""
        if self._half_updated:
            raise EngineError(
                "VLLMEngine: expected whole weights, got those of an update that failed. "
                "Update them again; if that fails too, make a new engine."
            )
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineGenerateError

        unique_id = f"{request_id}#{next(self._counter)}"  # vLLM refuses an id that it still knows

        async def sample() -> Any:
            """Wait for the one final output."""
            outputs = self._llm.generate(tokens_input(prompt), params, unique_id)
            return [output async for output in outputs][-1]  # FINAL_ONLY: there is one

        self._in_flight.add(unique_id)
        try:
            return await self._while_alive(sample())
        except (VLLMValidationError, EngineGenerateError, ValueError) as error:
            cause = error.__cause__ or error
            raise EngineError(
                f"VLLMEngine: expected a request that vLLM can serve, got {type(cause).__name__} for "
                f"{len(prompt)} prompt tokens: {cause} Change the prompt, the limits or `max_model_len`."
            ) from error
        finally:
            self._in_flight.discard(unique_id)

    async def pause(self) -> None:
        """Stop sampling; requests in flight are kept and go on after `resume`, their prefix computed anew."""
        await self.start()
        await self._while_alive(self._llm.pause_generation(mode="keep", clear_cache=True))

    async def resume(self) -> None:
        """Go on sampling."""
        await self.start()
        await self._while_alive(self._llm.resume_generation())

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]] | Offer, policy_version: int
    ) -> None:
        """Replace all weights while requests may be in flight; the tokens sampled afterwards carry `policy_version`.

        Requests in flight go on with the new weights, over keys and values computed anew. Sampling stops only while
        vLLM loads: before that the tensors were brought where its workers find them, in shared memory, or on their GPU.

        Args:
            named_tensors: the model's `state_dict().items()`, complete, with the checkpoint's names, on any device; or
                what a `WeightSender` made of them.
            policy_version: version of these weights.

        Raises:
            ConfigError: the transfer that was asked for cannot be between the devices of tensors and engine.
            EngineError: vLLM could not load them; requests in flight were aborted, and `generate` refuses to sample
                from half-replaced weights until an update succeeds.
        """
        await self.start()
        if isinstance(named_tensors, SharedWeights):
            named_tensors = named_tensors.file
        if isinstance(named_tensors, WeightFile):
            named_tensors = Offer("agentenv_shm", pickle.dumps({"file": named_tensors}))
        if isinstance(named_tensors, Offer):
            async with self._updating:
                await self._while_alive(self._reload(named_tensors, policy_version))
            return
        shipment = await self._sender.load(named_tensors, [self])
        try:
            await shipment.send([self], lambda ask: ask(self), policy_version)
        finally:
            shipment.close()

    async def join_transfer(self, backend: str, info: Mapping[str, Any]) -> None:
        """Set the workers up for one of vLLM's weight transfers; `WeightSender` asks for it."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.start()
        request = WeightTransferInitRequest({"backend": backend, "info": dict(info)})
        await self._while_alive(self._llm.init_weight_transfer_engine(request))
        self._joined = backend

    async def _reload(self, offer: Offer, policy_version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._joined != offer.backend:
            await self.join_transfer(offer.backend, {})
        was_paused = await self._llm.is_paused()
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        try:
            if self._half_updated:
                await self._llm.collective_rpc("agentenv_give_up_update")
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest({"pickled": offer.pickled}))
            await self._llm.finish_weight_update()
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("the prefix cache could not be reset")
            await self._llm.update_weight_version(str(policy_version))
            self.policy_version, self._half_updated = policy_version, False
        except asyncio.CancelledError:
            self._half_updated = True
            raise
        except Exception as error:
            self._half_updated = True  # not before: what is asked for during an update waits for its end
            await self._llm.pause_generation(mode="abort")
            raise EngineError(
                "VLLMEngine.update_weights: expected the model's weights under the checkpoint's names, got "
                f"{type(error).__name__}: {error} Check names and shapes, then update again or make a new engine."
            ) from error
        finally:
            if not was_paused:
                await self._llm.resume_generation()

    async def sleep(self) -> None:
        """Free the GPU for the trainer: weights go to the host's memory, keys and values are dropped.

        Requests in flight are kept and go on after `wake_up`, their prefix computed anew. New weights need an engine
        that is awake. Never run on a GPU.

        Raises:
            ConfigError: the engine computes on a CPU, or was made without `enable_sleep_mode`.
        """
        await self.start()
        if "cpu" in self.devices or not self._engine_args.get("enable_sleep_mode"):
            raise ConfigError(
                "VLLMEngine.sleep: expected a GPU and engine_args with enable_sleep_mode=True, got "
                f"{', '.join(self.devices)} and {self._engine_args.get('enable_sleep_mode')!r}. "
                "Leave --vllm_enable_sleep out."
            )
        await self._while_alive(self._llm.sleep(level=1, mode="keep"))

    async def wake_up(self) -> None:
        """Take the GPU back and go on sampling; nothing happens where it is awake.

        Raises:
            EngineError: the GPU has no room for it.
        """
        await self.start()
        if await self._llm.is_sleeping():
            await self._while_alive(self._llm.wake_up())

    async def _while_alive(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await `call`, but no longer than vLLM's process lives."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await self._running.while_alive(call)
        except EngineDeadError as error:
            raise EngineError(
                f"VLLMEngine: expected a running vLLM, got EngineDeadError ({error}). "
                "Its process has died: read its last log lines, then make a new engine."
            ) from error

    async def close(self) -> None:
        """Abort what is in flight and end vLLM's processes; calling it again does nothing."""
        self._closed = True
        async with self._start_lock:
            llm, self._llm = self._llm, None
        if llm is None:
            return
        if self._in_flight and not llm.errored:
            await llm.abort(list(self._in_flight))
            await asyncio.sleep(0)
        await self._running.close()
