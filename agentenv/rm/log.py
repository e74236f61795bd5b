"""What is kept of an evaluation: each outcome as a line of JSON, so that an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.rm.evaluate import Outcome
from agentenv.rm.rows import Item

_MEND = {"data_sha256": "Evaluate the same data"}


def fingerprint(items: Sequence[Item]) -> str:
    """A hash of the data: the same for the same items in the same order."""
    content = hashlib.sha256()
    for item in items:
        content.update(json.dumps(asdict(item), sort_keys=True, default=str).encode())
    return content.hexdigest()


class Log:
    """The outcomes of an evaluation in `items.jsonl`, and in `config.json` what it is of.

    Args:
        folder: made where it is not there.
        config: what must be the same when the evaluation goes on.
        resume: whether to go on with what is there.
        flags: all flags of the command, for `kept_flags`.

    `config.json` is written by `begin`, or with the first outcome: a model that cannot be opened leaves none behind.

    Raises:
        ConfigError: there is an evaluation and `resume` is not said, or it is one of something else.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self._path = self.folder / "items.jsonl"
        self._config, self.begun = {**config, "flags": dict(flags or {})}, False
        self.num_kept = 0
        """Items that have their scores, those of before included."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check(self.folder / "config.json", config, resume)
            self.done = self._read()
            self.num_kept = len(self.done)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: expected a folder to write to, got {error}. Name another.") from error

    def _check(self, path: Path, config: Mapping[str, Any], resume: bool) -> None:
        """Refuse to mix two evaluations, also where the one that is kept has no outcome yet."""
        if self._path.exists() and self._path.stat().st_size > 0 and not resume:
            raise ConfigError(
                f"--out: expected a new folder, got {self.folder}. Set --resume to go on, or name another."
            )
        stored = _parsed(path.read_bytes(), str(path)) if path.exists() else dict(config)
        for name in {**stored, **config}:
            kept, given = stored.get(name), config.get(name)
            if name != "flags" and kept != given:
                raise ConfigError(
                    f"--out: {self.folder} keeps an evaluation: expected its {name}, which is {kept!r:.200}, got "
                    f"{given!r:.200}. {_MEND.get(name, f'Leave --{name} out')}, or use another --out."
                )

    def begin(self) -> None:
        """Keep what this is an evaluation of.

        Raises:
            RunStopped: the disk took no more.
        """
        self._kept(lambda: (self.folder / "config.json").write_text(json.dumps(self._config, indent=2) + "\n", "utf-8"))
        self.begun = True

    def _read(self) -> dict[int, Outcome]:
        """The items that have their scores, by index; the lines that were cut off, and failures, are done again."""
        if not self._path.exists():
            return {}
        data = self._path.read_bytes()
        whole, _, torn = data.rpartition(b"\n")
        if torn:
            self._path.write_bytes(whole + b"\n" if whole else b"")
        outcomes = [Outcome.from_dict(_parsed(line, str(self._path))) for line in whole.splitlines()]
        return {outcome.index: outcome for outcome in outcomes if not outcome.error}

    def write(self, outcome: Outcome) -> None:
        """Keep an outcome.

        Raises:
            RunStopped: the disk took no more.
        """
        if not self.begun:
            self.begin()
        self._kept(lambda: self._append(json.dumps(outcome.to_dict()) + "\n"))
        self.num_kept += not outcome.error

    def _append(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def _kept(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise RunStopped(
                f"{self._path}: expected to write an item, got {error}. Make room, then --resume."
            ) from error

    def close(self) -> None:
        """Close the file; again is harmless."""
        with suppress(OSError):  # what could not be written has been told
            self._file.close()


def kept_flags(folder: str | Path) -> dict[str, Any] | None:
    """The flags of the evaluation in a folder; None where there is none.

    Raises:
        DataError: what is kept cannot be read.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        return None
    stored = _parsed(path.read_bytes(), str(path))
    flags = stored.get("flags")
    return (
        flags if isinstance(flags, dict) and flags else {name: stored[name] for name in stored.keys() - {"data_sha256"}}
    )


def read_margins(folders: Sequence[str | Path]) -> dict[str, list[float | None]]:
    """Of each evaluation, by its folder, how far each item's best chosen answer is ahead; None without scores.

    Raises:
        ConfigError: a folder has no evaluation, or they are of different data.
    """
    found: dict[str, list[float | None]] = {}
    data = None
    for folder in folders:
        path = Path(folder).expanduser()
        try:
            config = _parsed((path / "config.json").read_bytes(), str(path / "config.json"))
            lines = (path / "items.jsonl").read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(
                f"{folder}: expected a folder of `rm eval --out`, got {error}. Check the path."
            ) from error
        data = data or config.get("data_sha256")
        if config.get("data_sha256") != data:
            raise ConfigError(f"{folder}: expected the data of {folders[0]}, got others. Evaluate both on the same.")
        outcomes = [Outcome.from_dict(_parsed(line, str(path))) for line in lines]
        margins = {each.index: each.margin for each in outcomes}
        found[str(folder)] = [margins.get(index) for index in range(max(margins, default=-1) + 1)]
    longest = max(map(len, found.values()), default=0)
    return {name: margins + [None] * (longest - len(margins)) for name, margins in found.items()}


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: expected JSON, got {text[:60]!r} ({error}). Use another --out.") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: expected a JSON object, got {found!r:.60}. Use another --out.")
    return found


def remaining(items: Sequence[Item], done: Collection[int]) -> list[Item]:
    """The items that are still to be asked about."""
    return [item for item in items if item.index not in done]
