"""Send new weights from a trainer to engines: vLLM's transfers between GPUs, otherwise memory that processes share.

CUDA IPC (one GPU) and NCCL (several GPUs) use vLLM 0.32's trainer-side engines and have never run on a GPU. Transfers
through shared memory, which is written once and mapped by readers, are tested.

trainer:  training/loop.py → Rollouts.update_weights →
          engine.update_weights(named_tensors, version)      the only method that callers use
            └─ WeightSender.send                             chooses the transfer
                 ├─ shared memory: share_weights → WeightFile
                 └─ between GPUs: vLLM's trainer side (CUDA IPC or NCCL) → Offer
engine:   engine.load_offer(offer, version)                  the receiving half; vLLM's workers: vllm/worker.py
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import os
import pickle
import socket
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentenv.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Alignment of tensors in bytes, enough for every dtype."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file with a model's weights, sent between processes. Iterating yields (name, tensor), mapped without a copy.

    The mapping is private: writing to a tensor does not change the file.
    """

    path: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch dtypes."""
    shapes: tuple[tuple[int, ...], ...]
    place: str
    """Processes with the same `here()` can open `path`."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        kinds = zip(self.dtypes, self.shapes, strict=True)
        sizes = [getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in kinds]
        starts = itertools.accumulate(map(_aligned, sizes), initial=0)
        spans = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        num_bytes = _aligned(spans[-1][1]) if spans else 0
        if num_bytes:
            content = torch.from_file(self.path, shared=False, size=num_bytes, dtype=torch.uint8)
        else:
            content = torch.empty(0, dtype=torch.uint8)
        for name, dtype, shape, (start, end) in zip(self.names, self.dtypes, self.shapes, spans, strict=True):
            yield name, content[start:end].view(getattr(torch, dtype)).reshape(shape)


class SharedWeights:
    """The owner of a `WeightFile`. Its memory is freed by `close`, with this object, or when the process ends."""

    def __init__(self, file: WeightFile, store: _Store) -> None:
        self.file = file
        self._close = weakref.finalize(self, store.close)
        self.elsewhere: Any = None
        """The same bytes for other machines: a future of Ray's object reference, or None."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.file)

    def close(self) -> None:
        """Free the memory when the last process unmaps it. May be called again."""
        self._close()


class _Store:
    """A file in memory if the system supports it, otherwise a temporary file.

    A file in /dev/shm is not an option: containers limit it to 64 MB by default, and a killed process leaves it there.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("agentenv-weights")
            self.path, self._on_disk = f"/proc/{os.getpid()}/fd/{self.fd}", False
            os.close(os.open(self.path, os.O_RDONLY))
        except (AttributeError, OSError) as error:  # not Linux, or another user's process may not open it
            logger.debug("Weights are shared through files in %s, not through memory: %s", tempfile.gettempdir(), error)
            self.fd, self.path = tempfile.mkstemp(prefix="agentenv-weights-")
            self._on_disk = True

    def close(self) -> None:
        """Close the file; existing mappings stay valid."""
        os.close(self.fd)
        if self._on_disk:
            Path(self.path).unlink(missing_ok=True)


@functools.cache
def here() -> str:
    """Return an id shared by all processes in the same host and namespaces, which see the same paths."""
    parts = [os.uname().nodename]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/mnt"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return " ".join(parts)


def share_weights(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SharedWeights:
    """Copy weights into shared memory, one tensor after another.

    Args:
        named_tensors: (name, tensor) pairs on any device; a lazy iterable needs memory for one tensor at a time.

    Raises:
        EngineError: memory is insufficient.
    """
    import torch

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []

    def pieces() -> Iterator[memoryview]:
        for name, tensor in named_tensors:
            names.append(name)
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(tuple(tensor.shape))
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield flat.numpy().data

    store = _write(pieces())
    return SharedWeights(WeightFile(store.path, tuple(names), tuple(dtypes), tuple(shapes), here()), store)


def share_bytes(file: WeightFile, content: memoryview) -> SharedWeights:
    """Return shared weights with the content of a file on another machine."""
    store = _write([content])
    return SharedWeights(replace(file, path=store.path, place=here()), store)


def _write(pieces: Iterable[memoryview]) -> _Store:
    store, offset = _Store(), 0
    try:
        for piece in pieces:
            start, left = offset, piece
            while left:
                num_written = os.pwrite(store.fd, left, offset)
                left, offset = left[num_written:], offset + num_written
            offset = start + _aligned(offset - start)
        os.ftruncate(store.fd, offset)  # so that the last tensor is padded too
    except OSError as error:
        store.close()
        raise EngineError(
            f"update_weights: expected room for the model's weights in memory or {tempfile.gettempdir()}, got {error} "
            f"after {offset} bytes. Make room, or set TMPDIR to another folder."
        ) from error
    except BaseException:
        store.close()
        raise
    return store


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# --- from a trainer to engines ----------------------------------------------------------------------------------------

Transfer = Literal["auto", "ipc", "nccl", "shm"]

Named = Sequence[tuple[str, "torch.Tensor"]]
CallEngines = Callable[[Callable[[Any], Coroutine[Any, Any, Any]]], Awaitable[Any]]
"""Runs a function on all engines concurrently and waits for them."""


@dataclass(frozen=True, slots=True)
class Offer:
    """New weights for vLLM's workers, to be received by a transfer."""

    backend: str
    """Name of the transfer in vLLM's registry."""
    pickled: bytes
    """Pickled argument of the transfer's `update_weights`."""


def choose_transfer(transfer: str, trainer: str, engines: Sequence[Sequence[str]]) -> str:
    """Return the transfer to use: "ipc", "nccl" or "shm".

    Args:
        transfer: the requested transfer; "auto" is the first possible one of ipc, nccl and shm.
        trainer: the GPU with the weights, or "cpu".
        engines: for each engine the GPU of each worker, or "cpu".

    Raises:
        ConfigError: the requested transfer is not possible between these devices.
    """
    devices = [device for engine in engines for device in engine]
    on_gpus = trainer != "cpu" and bool(devices) and "cpu" not in devices
    possible = {
        "ipc": on_gpus and set(devices) == {trainer},
        # NCCL needs a separate GPU for every member.
        "nccl": on_gpus and trainer not in devices and len(set(devices)) == len(devices),
        "shm": True,
    }
    if transfer == "auto":
        return next(name for name, is_possible in possible.items() if is_possible)
    if not possible[transfer]:
        wanted = {"ipc": "trainer and engines on one GPU", "nccl": "trainer and engines on different GPUs"}[transfer]
        raise ConfigError(
            f"transfer: expected {wanted} for {transfer!r}, got weights on {trainer!r} and engines on {devices}. "
            'Use "auto".'
        )
    return transfer


class WeightSender:
    """The trainer's side: sends new weights to engines, and keeps the setup of the last transfer between GPUs.

    Args:
        transfer: see `choose_transfer`.
        address: address of this machine, for engines on others.
        keeps: keep a copy in shared memory for engines that start later, even if today's engines do not need one.
    """

    def __init__(self, transfer: str = "auto", *, address: str = "127.0.0.1", keeps: bool = False) -> None:
        if transfer not in get_args(Transfer):
            raise ConfigError(f"transfer: expected one of {', '.join(get_args(Transfer))}, got {transfer!r}.")
        self._transfer = transfer
        self._address = address
        self._keeps = keeps
        self._engines: list[Any] = []
        self._session: Any = None

    async def send(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        engines: Sequence[Any],
        call: CallEngines,
        policy_version: int,
    ) -> SharedWeights | None:
        """Send new weights to engines, whose `load_offer` is run by `call`.

        Returns:
            The weights in shared memory, for engines that start later; None if no copy exists.

        Raises:
            ConfigError: the requested transfer is not possible.
            EngineError: memory is insufficient, or an engine could not load the weights.
        """
        tensors = iter(named_tensors)
        first = list(itertools.islice(tensors, 1))
        trainer = "cpu"
        if first and first[0][1].device.type == "cuda":
            import torch

            trainer = str(torch.cuda.get_device_properties(first[0][1].device).uuid)
        way = choose_transfer(self._transfer, trainer, [engine.devices for engine in engines])
        if way == "shm":
            shared = await asyncio.to_thread(share_weights, itertools.chain(first, tensors))
            try:
                await call(lambda engine: engine.load_offer(shared, policy_version))
            except BaseException:
                shared.close()
                raise
            return shared
        live = [*first, *tensors]
        kept = await asyncio.to_thread(share_weights, live) if self._keeps else None
        await self.send_between_gpus(live, way, engines, call, policy_version)
        return kept

    async def send_between_gpus(
        self, live: Named, way: str, engines: Sequence[Any], call: CallEngines, policy_version: int
    ) -> None:
        """Send tensors of this process's GPU by one of vLLM's transfers."""
        await asyncio.to_thread(self._send, live, _VLLMClient(way, list(engines), call, policy_version))

    def _send(self, live: Named, client: _VLLMClient) -> None:
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        class Tensors(WeightSource):  # type: ignore[misc]
            """Tensors that need no gathering, in the form of vLLM's trainer side."""

            def metadata(self) -> list[ParamMeta]:
                """Return name, data type and shape of each tensor."""
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in live]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(live)

        source, device = Tensors(), live[0][1].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                if self._engines != client.engines:  # an engine was replaced, and cannot join an existing group
                    self.close()
                    if client.way == "ipc":
                        info: Any = IPCTrainerInitInfo(rank=0)
                    else:
                        with socket.socket() as free:
                            free.bind(("", 0))
                            port = free.getsockname()[1]
                        info = NCCLTrainerInitInfo(self._address, port, 1 + client.num_workers, rank=0)
                    self._session = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
                    self._engines = client.engines
                self._session.client, self._session.source = client, source
                self._session.send_weights()
                # Otherwise the tensors stay alive until the next update.
                self._session.client = self._session.source = None
            except BaseException:
                self.close()  # a session that failed cannot be used again
                raise

    def close(self) -> None:
        """Close the session of the last transfer; the next one opens a new session."""
        session, self._session, self._engines = self._session, None, []
        if session is not None:
            session.shutdown()


class _VLLMClient:
    """Implements vLLM's `VLLMWeightSyncClient`: calls of its trainer side to all engines, from a separate thread.

    Start and finish do nothing here: an engine's `load_offer` includes them.
    """

    def __init__(self, way: str, engines: list[Any], call: CallEngines, policy_version: int) -> None:
        self.way = way
        self.engines = engines
        self._call = call
        self._policy_version = policy_version
        self._loop = asyncio.get_running_loop()

    @property
    def num_workers(self) -> int:
        """Number of workers of all engines."""
        return sum(len(engine.devices) for engine in self.engines)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make all engines join the transfer, each with its own ranks."""
        counts = [len(engine.devices) for engine in self.engines]
        ranks = dict(zip(map(id, self.engines), itertools.accumulate(counts, initial=1), strict=False))

        def join(engine: Any) -> Coroutine[Any, Any, None]:
            own = {"rank_offset": ranks[id(engine)]} if "rank_offset" in init_info else {}
            answer: Coroutine[Any, Any, None] = engine.join_transfer(self.way, init_info | own)
            return answer

        self._all(join)

    def start_weight_update(self) -> None:
        """Do nothing, see above."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make all engines receive."""
        offer = Offer(self.way, pickle.dumps(update_info))
        self._all(lambda engine: engine.load_offer(offer, self._policy_version))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing, see above."""

    def _all(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        async def run() -> None:
            await self._call(ask)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()
