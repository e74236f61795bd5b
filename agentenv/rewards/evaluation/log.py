"""The log of an evaluation: each outcome is a line of JSON, so that an interrupted evaluation can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.rewards.evaluation.evaluate import ItemOutcome
from agentenv.rewards.evaluation.rows import Item


def fingerprint(items: Sequence[Item]) -> str:
    """Return a hash of the items and their order."""
    content = hashlib.sha256()
    for item in items:
        content.update(json.dumps(asdict(item), sort_keys=True, default=str).encode())
    return content.hexdigest()


class EvaluationLog:
    """The outcomes of an evaluation in `items.jsonl`, and its settings in `config.json`.

    Args:
        folder: created if it is missing.
        config: settings that a resumed evaluation must have too.
        resume: continue the evaluation in the folder.
        flags: all flags of the command, for `stored_flags`.

    `config.json` is written by `start`, or with the first outcome, so that a model that fails to load leaves no files.

    Raises:
        ConfigError: the folder has an evaluation and `resume` is False, or its settings differ.
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
        self._config = {**config, "flags": dict(flags or {})}
        self.started = False
        self.num_stored = 0
        """Items with scores, including those of earlier runs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Another evaluation in the folder is an error, even one without outcomes.
            path = self.folder / "config.json"
            if self._path.exists() and self._path.stat().st_size > 0 and not resume:
                raise ConfigError(
                    f"--out: expected a new folder, got {self.folder}. Pass --resume to continue, or use another."
                )
            stored = _parse_object(path.read_bytes(), str(path)) if path.exists() else dict(config)
            for name in {**stored, **config}:
                if name != "flags" and stored.get(name) != config.get(name):
                    advice = "Evaluate the same data" if name == "data_sha256" else f"Omit --{name}"
                    raise ConfigError(
                        f"--out: {self.folder} has an evaluation: expected its {name}, which is "
                        f"{stored.get(name)!r:.200}, got {config.get(name)!r:.200}. {advice}, or use another --out."
                    )
            complete, _, torn = (self._path.read_bytes() if self._path.exists() else b"").rpartition(b"\n")
            if torn:
                self._path.write_bytes(complete + b"\n" if complete else b"")
            outcomes = [ItemOutcome.from_dict(_parse_object(line, str(self._path))) for line in complete.splitlines()]
            self.done = {outcome.index: outcome for outcome in outcomes if not outcome.error}
            """Items with scores by index. Incomplete lines and failed items are evaluated again."""
            self.num_stored = len(self.done)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: expected a writable folder, got {error}. Use another.") from error

    def start(self) -> None:
        """Write the settings.

        Raises:
            RunStopped: the disk is full, or the file cannot be written.
        """
        text = json.dumps(self._config, indent=2) + "\n"
        with self._stop_on_error():
            (self.folder / "config.json").write_text(text, "utf-8")
        self.started = True

    def write(self, outcome: ItemOutcome) -> None:
        """Append an outcome.

        Raises:
            RunStopped: the disk is full, or the file cannot be written.
        """
        if not self.started:
            self.start()
        with self._stop_on_error():
            self._file.write(json.dumps(outcome.to_dict()) + "\n")
            self._file.flush()
        self.num_stored += not outcome.error

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunStopped(
                f"{self._path}: expected to write an item, got {error}. Free disk space, then --resume."
            ) from error

    def close(self) -> None:
        """Close the file; calling it again is harmless."""
        with suppress(OSError):  # a failed write was already reported
            self._file.close()


def stored_flags(folder: str | Path) -> dict[str, Any] | None:
    """Return the flags of the evaluation in a folder, None if there is none.

    Raises:
        DataError: its settings cannot be read.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        return None
    flags = _parse_object(path.read_bytes(), str(path)).get("flags")
    if not isinstance(flags, dict):
        raise DataError(f"{path}: expected the flags of `rm eval`, got {flags!r:.60}. Use another --out.")
    return flags


def _parse_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: expected JSON, got {text[:60]!r} ({error}). Use another --out.") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {value!r:.60}. Use another --out.")
    return value
