"""Records of other trainers as run directories of this one, for the page; nothing of a record is executed or opened."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from agentenv._util.disk import write_json
from agentenv._util.plurals import counted
from agentenv.errors import ConfigError
from agentenv.runs.records.directory import CONFIG
from agentenv.runs.records.index import FIELDS, HEADER, TRAJECTORIES, IndexWriter, entry_of
from agentenv.runs.records.lines import SCHEMA_VERSION
from agentenv.view.foreign.building import Reader, records_in
from agentenv.view.foreign.harbor import HarborReader
from agentenv.view.foreign.nemo_gym import NemoGymReader
from agentenv.view.foreign.prime_rl import PrimeReader
from agentenv.view.foreign.verl import VerlReader

_READERS: tuple[type[Reader], ...] = (PrimeReader, NemoGymReader, VerlReader, HarborReader)
KINDS = ", ".join(f"{each.peer}'s {each.files}" for each in _READERS)
"""What is read, for messages."""
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_PARTS = ("token ids", "log-probabilities", "rewards", "reasons for the end of episodes")
_MEAN_LOGPROB = list(FIELDS).index("mean_logprob")
_kept: list[TemporaryDirectory[str]] = []  # removed at the end of the process


def end_by_signal(number: int, _frame: FrameType | None) -> None:
    """Remove the directories of `convert`, and end the process by the signal, which otherwise leaves them."""
    for each in _kept:
        each.cleanup()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def reader_of(path: Path) -> Reader | None:
    """Return what reads a file or folder; None if it is of no kind that is known."""
    readers = [each() for each in _READERS]
    if path.is_dir():
        return next((each for each in readers if each.files_in(path)), None)
    for _, load in records_in(path) if path.is_file() else []:
        with suppress(*_UNREADABLE):
            value = load()
            return next((each for each in readers if each.is_record(value)), None)
    return None


def convert(path: Path, reader: Reader) -> tuple[Path, str]:
    """Return a run directory of the episodes in a record, and what was read and what the record lacks.

    The directory is removed at the end of the process; for an end by a signal, `end_by_signal` has to handle it.

    Raises:
        ConfigError: no episode can be read.
    """
    _kept.append(TemporaryDirectory(prefix="agentenv-view-"))
    folder = Path(_kept[-1].name)
    ids, lacking, damaged = set[str](), Counter[str](), list[str]()
    with (folder / TRAJECTORIES).open("wb") as file, closing(IndexWriter(folder, HEADER, b"")) as index:
        for place, load in reader.sources(path):
            try:
                episodes = [(each, *entry_of(each)) for each in reader.episodes(load())]
            except _UNREADABLE as error:
                damaged.append(f"{place}: {type(error).__name__}: {' '.join(str(error).split())}"[:200])
                continue
            for episode, line, row, _ in episodes:
                if episode.episode_id in ids:
                    continue  # the first counts
                index.add([file.tell(), *row[1:]])
                file.write(line)
                ids.add(episode.episode_id)
                has_tokens = any(map(len, episode.segments)) or None
                known = (has_tokens, row[_MEAN_LOGPROB], episode.reward, episode.stop_reason)
                lacking.update(part for part, known_part in zip(_PARTS, known, strict=True) if known_part is None)
        index.flush()
    shown = "; ".join(damaged[:3]) + ("; …" if len(damaged) > 3 else "")
    left_out = f"; {counted(len(damaged), 'record')} left out: {shown}" if damaged else ""
    if not ids:
        raise ConfigError(f"{path}: expected episodes of {reader.peer}, got none{left_out}.")
    write_json(folder / CONFIG, {"schema_version": SCHEMA_VERSION, "versions": {}, "config": {}})
    parts = [f"no {part}" if num == len(ids) else f"{num} without {part}" for part, num in lacking.items()]
    lacks = f" ({', '.join(parts)})" if parts else ""
    return folder, f"{path}: {counted(len(ids), 'episode')} of {reader.peer}{lacks}{left_out}"
