"""Weights in memory that the processes of a machine share: written once, mapped by readers."""

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

        sizes = [
            getattr(torch, dtype).itemsize * math.prod(shape)
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
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
