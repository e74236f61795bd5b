"""Weights in memory that the processes of one machine share: written once, mapped where they are read."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.errors import EngineError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Bytes; more than any dtype needs to be viewed in place."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Where a model's weights lie; travels between processes. Iterating gives (name, tensor), mapped and not copied.

    The tensors are private to the reader: writing to them changes nothing for anybody else.
    """

    path: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch's names of them."""
    shapes: tuple[tuple[int, ...], ...]
    place: str
    """Who can open `path`: the processes whose `here()` is the same."""

    def _spans(self) -> list[tuple[int, int]]:
        """Where each tensor starts and ends, in bytes."""
        import torch

        sizes = [
            getattr(torch, dtype).itemsize * math.prod(shape)
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        starts = itertools.accumulate(map(_aligned, sizes), initial=0)
        return [(start, start + size) for start, size in zip(starts, sizes, strict=False)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        spans = self._spans()
        num_bytes = _aligned(spans[-1][1]) if spans else 0
        if num_bytes:
            whole = torch.from_file(self.path, shared=False, size=num_bytes, dtype=torch.uint8)
        else:
            whole = torch.empty(0, dtype=torch.uint8)
        for name, dtype, shape, (start, end) in zip(self.names, self.dtypes, self.shapes, spans, strict=True):
            yield name, whole[start:end].view(getattr(torch, dtype)).reshape(shape)


class SharedWeights:
    """The owner of a `WeightFile`: its memory is given back with `close`, with this object, or with this process."""

    def __init__(self, file: WeightFile, store: _Store) -> None:
        self.file, self._close = file, weakref.finalize(self, store.close)
        self.elsewhere: Any = None
        """The same bytes for other machines, where they were asked for: a future of what Ray calls them."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.file)

    def close(self) -> None:
        """Give it back once the last process that mapped it lets go; again is harmless."""
        self._close()


class _Store:
    """A file in memory where the system has such, else one in the folder of temporary files."""

    def __init__(self) -> None:
        in_memory = _in_memory()
        self.fd, self.path = in_memory or tempfile.mkstemp(prefix="agentenv-weights-")
        self._on_disk = in_memory is None

    def close(self) -> None:
        """Let it go; what is mapped of it stays."""
        os.close(self.fd)
        if self._on_disk:
            Path(self.path).unlink(missing_ok=True)


def _in_memory() -> tuple[int, str] | None:
    """A descriptor and the path by which others open it; None where the system has no such thing.

    Not a file in /dev/shm: that is 64 MB in a container unless its owner asked for more, and a process that is killed
    leaves it there.
    """
    if not hasattr(os, "memfd_create"):
        _say_once("this system has none")
        return None
    try:
        fd = os.memfd_create("agentenv-weights")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        _say_once(str(error))
        return None
    return fd, path


@functools.cache
def _say_once(reason: str) -> None:
    logger.debug("Weights go through %s and not through memory: %s", tempfile.gettempdir(), reason)


@functools.cache
def here() -> str:
    """Names the processes that see the same files and processes under the same names as this one."""
    parts = [os.uname().nodename]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/mnt"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return " ".join(parts)


def share_weights(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SharedWeights:
    """Copy weights, one after another, to where other processes of this machine can map them.

    Args:
        named_tensors: on any device; what is gathered while it is iterated needs memory for one tensor at a time.

    Raises:
        EngineError: there is no room for them.
    """
    import torch

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []

    def pieces() -> Iterator[memoryview]:
        """Their bytes, one tensor at a time."""
        for name, tensor in named_tensors:
            names.append(name)
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(tuple(tensor.shape))
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield flat.numpy().data

    store = _filled(pieces())
    return SharedWeights(WeightFile(store.path, tuple(names), tuple(dtypes), tuple(shapes), here()), store)


def share_bytes(file: WeightFile, content: memoryview) -> SharedWeights:
    """The weights of a file of another machine, whose bytes came here some other way."""
    store = _filled([content])
    return SharedWeights(replace(file, path=store.path, place=here()), store)


def _filled(pieces: Iterable[memoryview]) -> _Store:
    store, offset = _Store(), 0
    try:
        for piece in pieces:
            start, left = offset, piece
            while left:
                num_written = os.pwrite(store.fd, left, offset)
                left, offset = left[num_written:], offset + num_written
            offset = start + _aligned(offset - start)
        os.ftruncate(store.fd, offset)  # the last as well ends where the next would start
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
