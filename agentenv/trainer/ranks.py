"""Training with the GPUs of one node: `torchrun --nproc_per_node N -m agentenv.cli train …`.

Rank 0 is the whole of `agentenv train`: engines, rollouts, loop, records. The others hold their shards of the learner
and follow: each thing that rank 0 asks of its `RankedLearner` is told to them first, and done by all. They have no word
in when to end: signals are rank 0's to handle, and it dismisses them. Orders go by a group of processes of their own
(gloo), since minutes or hours pass between them while episodes are made.

It was tried with several processes on CPUs. It has never run on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from agentenv.errors import AgentEnvError, ConfigError, RunStopped
from agentenv.trainer.batch import Batch
from agentenv.trainer.learner import Learner
from agentenv.trainer.policy import Layout
from agentenv.trainer.sharding import Ranks, outline

if TYPE_CHECKING:
    from agentenv.trainer.config import TrainConfig

_BETWEEN_ORDERS = timedelta(days=30)
_WITHIN_ORDERS = timedelta(minutes=30)
_GOODBYE_S = 10.0
"""For an order that may find nobody."""
_END = "end"
_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""What torchrun tells its processes begins so; engines, which are processes of their own, are none of them."""


class RankLost(RunStopped):
    """Another rank does not answer any more."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun says of a process."""

    rank: int
    size: int

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch:
        """Take it from the environment.

        Raises:
            ConfigError: the processes are on several nodes.
        """
        size = int(environ["WORLD_SIZE"])
        if int(environ.get("LOCAL_WORLD_SIZE", size)) != size:
            raise ConfigError(
                "torchrun --nnodes: expected one node, got several. Train with OpenRLHF or verl there, they take the "
                "same agent file: `agentenv launch openrlhf …` prints the command."
            )
        return cls(int(environ["RANK"]), size)


def together(lead: Callable[[Crew], int]) -> int:
    """Be one of torchrun's processes: rank 0 does `lead`, and the others what it tells them; gives the exit code.

    Raises:
        ConfigError: the processes are on several nodes, or more than there are GPUs.
        RunStopped: another rank is gone.
    """
    launch = Launch.read(os.environ)
    if launch.rank:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    crew = Crew(launch)
    if launch.rank:
        crew.follow()
        return 0
    with contextlib.closing(crew):
        return lead(crew)


class Crew:
    """The ranks, as one of them sees them."""

    def __init__(self, launch: Launch) -> None:
        """Meet the others."""
        self.rank, self.size = launch.rank, launch.size
        dist.init_process_group("gloo", timeout=_BETWEEN_ORDERS)
        for name in [name for name in os.environ if name.startswith(_LAUNCH)]:
            del os.environ[name]
        self._lock, self._is_broken, self._device = threading.Lock(), False, torch.device("cpu")

    def learner(self, config: TrainConfig, model: str, *, num_train_steps: int, gpus: Sequence[str]) -> RankedLearner:
        """Rank 0's learner, of which the others take their shards.

        Args:
            config: the flags.
            model: as `Learner` takes it.
            num_train_steps: of the whole run.
            gpus: torch's names of one for each rank; none for the first that there are.
        """
        with self.order("open", config, model, num_train_steps, list(gpus)):
            return RankedLearner(self, config, model, num_train_steps=num_train_steps, gpus=gpus)

    def seated(self, gpus: Sequence[str]) -> tuple[Ranks, str]:
        """What a learner needs to know of the ranks, and this one's device.

        Raises:
            ConfigError: fewer GPUs than ranks.
        """
        num_gpus = torch.cuda.device_count()
        if 0 < num_gpus < self.size:
            raise ConfigError(
                f"torchrun --nproc_per_node: expected at most {num_gpus}, as many as there are GPUs, got {self.size}. "
                "Start fewer."
            )
        found = list(gpus) or ([f"cuda:{rank}" for rank in range(self.size)] if num_gpus else ["cpu"] * self.size)
        self._device = torch.device(found[self.rank])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        group = dist.new_group(backend="nccl" if self._device.type == "cuda" else "gloo", timeout=_WITHIN_ORDERS)
        mesh = DeviceMesh.from_group(group, self._device.type)
        return Ranks(self.rank, self.size, mesh), found[self.rank]

    # --- rank 0 ---

    @contextlib.contextmanager
    def order(self, name: str, *args: Any) -> Iterator[None]:
        """Tell the others what to do; what is done inside is this rank's part of it.

        Raises:
            RankLost: one of them is gone.
        """
        with self._lock, self._on_device():
            try:
                with _reached():
                    dist.broadcast_object_list([name, args])
                    yield
            except AgentEnvError as error:
                self._is_broken |= isinstance(error, RankLost)
                raise
            except BaseException:
                self._is_broken = True  # the others are amid it, and hear nothing
                raise

    def close(self) -> None:
        """Dismiss the others; where they do not listen any more, they are torchrun's to end."""

        def dismiss() -> None:
            """Send the last order."""
            with contextlib.suppress(AgentEnvError), self.order(_END):
                dist.barrier()

        if not self._is_broken:
            goodbye = threading.Thread(target=dismiss, daemon=True)
            goodbye.start()
            goodbye.join(_GOODBYE_S)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Threads begin on the first GPU, and FSDP uses the streams of the one they are on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    # --- the others ---

    def follow(self) -> None:
        """Do what rank 0 says until it says no more.

        Raises:
            RankLost: it is gone.
        """
        learner: Learner | None = None
        while True:
            order: list[Any] = [None, None]
            with _reached():
                dist.broadcast_object_list(order)
            name, args = order
            if name == _END:
                dist.barrier()
                return
            try:
                with _reached():
                    learner = self._obey(learner, name, args)
            except RankLost:
                raise
            except AgentEnvError:
                continue  # rank 0 found the same, and tells it

    def _obey(self, learner: Learner | None, name: str, args: Sequence[Any]) -> Learner:
        if name == "open":
            config, model, num_train_steps, gpus = args
            ranks, device = self.seated(gpus)
            return Learner(config, model, num_train_steps=num_train_steps, device=device, ranks=ranks)
        assert learner is not None, name
        if name == "weights":
            for _ in learner.weights(layout="module"):  # the same weights in the same order as any layout
                pass
        else:
            getattr(learner, name)(*args)
        return learner


class RankedLearner(Learner):
    """Rank 0's learner: whatever is asked of it, all ranks do."""

    def __init__(
        self, crew: Crew, config: TrainConfig, model: str, *, num_train_steps: int, gpus: Sequence[str]
    ) -> None:
        """Load this rank's part; made by `Crew.learner`."""
        self._crew = crew
        ranks, device = crew.seated(gpus)
        super().__init__(config, model, num_train_steps=num_train_steps, device=device, ranks=ranks)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """As `Learner.train_step`, of the batch as a whole."""
        with self._crew.order("train_step", batch):
            return super().train_step(batch)

    def weights(self, *, layout: Layout = "checkpoint") -> Iterator[tuple[str, Tensor]]:
        """As `Learner.weights`, gathered before the first is given: on a GPU there has to be room for all of them."""
        with self._crew.order("weights"):
            return iter(list(super().weights(layout=layout)))

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """As `Learner.save_model`."""
        with self._crew.order("weights"):
            super().save_model(folder, tokenizer)

    def state(self) -> dict[str, Any]:
        """As `Learner.state`: any number of ranks goes on from it."""
        with self._crew.order("state"):
            return super().state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As `Learner.load_state`, of any number of ranks."""
        with self._crew.order("load_state", outline(state)):
            super().load_state(state)


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """What torch says where another process is gone, as an error of ours."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AgentEnvError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RankLost(
            f"torchrun: expected an answer of every rank, got none of one: {error}. Its own error is above or in "
            "torchrun's report: mend that, and go on from the last checkpoint."
        ) from error
