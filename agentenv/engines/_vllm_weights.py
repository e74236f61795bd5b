"""How new weights get from a trainer to engines: vLLM's own transfers between GPUs, shared memory for all else.

vLLM's transfers, CUDA IPC (one GPU) and NCCL (several), are driven by its own trainer-side engines, written against
vLLM 0.32; they have never run on a GPU. What goes through shared memory takes the same way inside vLLM, and is tested.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentenv.engines._weights import SharedWeights, share_weights
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    import torch

Transfer = Literal["auto", "ipc", "nccl", "shm"]

Named = Sequence[tuple[str, "torch.Tensor"]]
Tell = Callable[[Callable[[Any], Coroutine[Any, Any, Any]]], Awaitable[Any]]
"""Asks all engines the same at once, and waits for their answers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """New weights, as vLLM's workers are told of them."""

    backend: str
    """Name of the transfer in vLLM's registry."""
    pickled: bytes
    """What its `update_weights` takes."""


def check_transfer(transfer: str) -> Transfer:
    """The word, if it is one.

    Raises:
        ConfigError: it is none.
    """
    for known in get_args(Transfer):
        if transfer == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"transfer: expected one of {', '.join(get_args(Transfer))}, got {transfer!r}. Change it.")


def choose_transfer(transfer: str, trainer: str, engines: Sequence[Sequence[str]]) -> str:
    """The way that weights take.

    Args:
        transfer: what was asked for; "auto" is the first of ipc, nccl and shm that can be.
        trainer: the GPU that the weights are on, "cpu" for none.
        engines: for each engine, the GPUs that it computes on, one per worker, "cpu" for none.

    Raises:
        ConfigError: what was asked for cannot be between these.
    """
    devices = [device for engine in engines for device in engine]
    on_gpus = trainer != "cpu" and bool(devices) and "cpu" not in devices
    can_be = {
        "ipc": on_gpus and set(devices) == {trainer},
        # NCCL wants every member on a GPU of its own.
        "nccl": on_gpus and trainer not in devices and len(set(devices)) == len(devices),
        "shm": True,
    }
    if check_transfer(transfer) == "auto":
        return next(way for way, can in can_be.items() if can)
    if not can_be[transfer]:
        wanted = {"ipc": "trainer and engines on one GPU", "nccl": "trainer and engines on different GPUs"}[transfer]
        raise ConfigError(
            f"transfer: expected {wanted} for {transfer!r}, got weights on {trainer!r} and engines on {devices}. "
            'Use "auto".'
        )
    return transfer


class WeightSender:
    """The trainer's side: gets new weights to engines, and keeps what the last transfer between GPUs was set up with.

    Args:
        transfer: see `choose_transfer`.
        address: of this machine, for engines on others.
        keeps: leave a copy in shared memory for engines that come later, where those of today need none.
    """

    def __init__(self, transfer: str = "auto", *, address: str = "127.0.0.1", keeps: bool = False) -> None:
        self._transfer, self._address, self._keeps = check_transfer(transfer), address, keeps
        self._engines: list[Any] = []
        self._session: Any = None

    async def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]], engines: Sequence[Any]) -> Shipment:
        """New weights, ready to be sent to engines; these go on sampling meanwhile.

        Raises:
            ConfigError: the transfer that was asked for cannot be.
            EngineError: there is no room for them.
        """
        tensors = iter(named_tensors)
        first = list(itertools.islice(tensors, 1))
        trainer = _device_of(first[0][1]) if first else "cpu"
        way = choose_transfer(self._transfer, trainer, [getattr(engine, "devices", ("cpu",)) for engine in engines])
        if way == "shm":
            return Shipment(await asyncio.to_thread(share_weights, itertools.chain(first, tensors)))
        live = [*first, *tensors]
        kept = await asyncio.to_thread(share_weights, live) if self._keeps else None
        return Shipment(kept, live, way, self)

    async def send(self, live: Named, client: Client) -> None:
        """Have vLLM's trainer side send tensors of this process's GPU through `client`."""
        await asyncio.to_thread(self._send, live, client)

    def _send(self, live: Named, client: Client) -> None:
        source = _source_of(live)
        with _on_device_of(live):
            try:
                if self._engines != client.engines:  # one was replaced: a group cannot be joined later
                    self.close()
                    self._session, self._engines = self._open(client, source), client.engines
                self._session.client, self._session.source = client, source
                self._session.send_weights()
                self._session.client = self._session.source = None  # else this copy lives as long as the next one
            except BaseException:
                self.close()  # what failed for one is of no use to the others
                raise

    def _open(self, client: Client, source: Any) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        if client.way == "ipc":
            info: Any = IPCTrainerInitInfo(rank=0)
        else:
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            info = NCCLTrainerInitInfo(self._address, port, 1 + client.num_workers, rank=0)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    def close(self) -> None:
        """Leave the group of the last transfer; the next one sets up another."""
        session, self._session, self._engines = self._session, None, []
        if session is not None:
            session.shutdown()


class Shipment:
    """New weights on their way: in shared memory, or still on the trainer's GPU, or both."""

    def __init__(
        self, shared: SharedWeights | None, live: Named = (), way: str = "shm", sender: WeightSender | None = None
    ) -> None:
        self.shared, self._live, self._way, self._sender = shared, live, way, sender

    async def send(self, engines: Sequence[Any], tell: Tell, policy_version: int) -> None:
        """Give them to engines, by `tell`; those that come later take what is `shared`."""
        if self._sender is None:
            await tell(lambda engine: engine.update_weights(self.shared, policy_version))
            return
        client = Client(self._way, list(engines), tell, policy_version)
        live, self._live = self._live, ()
        await self._sender.send(live, client)

    def close(self) -> None:
        """Give the shared memory back."""
        if self.shared is not None:
            self.shared.close()


class Client:
    """vLLM's `VLLMWeightSyncClient`: what its trainer side asks of all engines, called from a thread of its own.

    Start and finish do nothing here: an engine that is told to receive does all three, with its pause around them.
    """

    def __init__(self, way: str, engines: list[Any], tell: Tell, policy_version: int) -> None:
        self.way, self.engines, self._tell, self._policy_version = way, engines, tell, policy_version
        self._loop = asyncio.get_running_loop()

    @property
    def num_workers(self) -> int:
        """Of all engines together."""
        return sum(len(engine.devices) for engine in self.engines)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all engines join, each with ranks of its own."""
        counts = [len(engine.devices) for engine in self.engines]
        ranks = dict(zip(map(id, self.engines), itertools.accumulate(counts, initial=1), strict=False))

        def join(engine: Any) -> Coroutine[Any, Any, None]:
            """What one engine is asked."""
            own = {"rank_offset": ranks[id(engine)]} if "rank_offset" in init_info else {}
            answer: Coroutine[Any, Any, None] = engine.join_transfer(self.way, init_info | own)
            return answer

        self._all(join)

    def start_weight_update(self) -> None:
        """See above."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have all engines receive."""
        offer = Offer(self.way, pickle.dumps(update_info))
        self._all(lambda engine: engine.update_weights(offer, self._policy_version))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See above."""

    def _all(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        async def told() -> None:
            """A coroutine, as asyncio wants it from another thread."""
            await self._tell(ask)

        asyncio.run_coroutine_threadsafe(told(), self._loop).result()


def _device_of(tensor: torch.Tensor) -> str:
    import torch

    return str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.device.type == "cuda" else "cpu"


def _on_device_of(live: Named) -> AbstractContextManager[Any]:
    import torch

    device = live[0][1].device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _source_of(live: Named) -> Any:
    """The tensors as vLLM's trainer side reads them."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Tensors(WeightSource):  # type: ignore[misc]
        """They are there already: nothing is gathered."""

        def metadata(self) -> list[ParamMeta]:
            """Names, dtypes and shapes."""
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in live]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(live)

    return Tensors()
