"""`read_tasks`: tasks from files, built-in data and Hugging Face datasets, always in the order of the data."""

from __future__ import annotations

import difflib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.types import Message, Task

_BOM = b"\xef\xbb\xbf"
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_NOTHING: Mapping[str, Path] = MappingProxyType({})


def read_tasks(
    spec: str,
    *,
    prompt_key: str = "prompt",
    label_key: str | None = "label",
    limit: int | None = None,
    split: str | None = None,
    builtin: Mapping[str, Path] = _NOTHING,
    needs_label: bool = True,
) -> list[Task]:
    """The tasks of `spec`: a built-in name, a file (.jsonl, .json, both also .gz, .parquet) or a Hugging Face dataset.

    A Hugging Face dataset is `name` or `name:configuration`, and `split` is for these only. Each row gives a task: the
    prompt is text or chat messages; `task_id` or `id`, where no earlier row has it, names the task, else the row's
    number from 000000; an integer `seed` seeds it; `images` go with it; all other columns become metadata. Blank lines,
    CRLF and a byte order mark are accepted. With `label_key` None or '' there are no labels; unless `needs_label`, a
    row without that column has the label None.

    Raises:
        ConfigError: there is no such data, or a flag does not fit it.
        DataError: a row cannot be used; the message says which and what to do.
        MissingDependency: the data needs a package that is not installed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: expected a number of tasks >= 1, got {limit}. Leave it out for all of them.")
    tasks: list[Task] = []
    taken: set[str] = set()
    for where, row in islice(read_rows(spec, split, builtin), limit):
        key = label_key if needs_label or (isinstance(row, Mapping) and label_key in row) else None
        tasks.append(_task(where, row, prompt_key, key or None, _task_id(row, len(tasks), taken)))
    if not tasks:
        raise DataError(f"{spec}: expected at least one row, got none. Check the file.")
    return tasks


def read_rows(spec: str, split: str | None = None, builtin: Mapping[str, Path] = _NOTHING) -> Iterator[tuple[str, Any]]:
    """Each row of `spec` as it stands there, and where that is, for errors; see `read_tasks` for what is read."""
    path = Path(builtin.get(spec, spec)).expanduser()
    if not path.is_file() and _is_hub_name(spec, path):
        return _hub_rows(spec, split, builtin)
    if not path.exists():
        near = difflib.get_close_matches(path.name, _siblings(path), n=1)
        raise ConfigError(f"{spec}: expected a file, got none there.{_did_you_mean(near)} {_choices(builtin)}")
    suffix = next((suffix for suffix in _SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None or not path.is_file():
        raise ConfigError(f"{spec}: expected a file ending in {', '.join(_SUFFIXES)}, got another. Convert it to one.")
    if split is not None:
        raise ConfigError(f"--split: expected a Hugging Face dataset with it, got the file {spec}. Leave --split out.")
    return _parquet_rows(path) if suffix == ".parquet" else _json_rows(path)


def _is_hub_name(spec: str, path: Path) -> bool:
    return _HUB_NAME.fullmatch(spec) is not None and not path.exists() and not path.name.lower().endswith(_SUFFIXES)


def _siblings(path: Path) -> list[str]:
    return [entry.name for entry in islice(path.parent.iterdir(), 1000)] if path.parent.is_dir() else []


def _did_you_mean(near: Sequence[str]) -> str:
    return f" Did you mean {near[0]!r}?" if near else ""


def _choices(builtin: Mapping[str, Path]) -> str:
    names = ", ".join(sorted(builtin)) or "none installed"
    return f"Give a file, a Hugging Face dataset, or built-in data ({names})."


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    name = path.name.lower()
    open_file: Callable[..., Any] = gzip.open if name.endswith(".gz") else open
    with open_file(path, "rb") as file:
        try:
            if name.removesuffix(".gz").endswith(".jsonl") or not _starts_an_array(file):
                yield from _lines(path, file)
            else:
                yield from _array(path, file)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: expected a gzip file, got {error}. Compress or download it again.") from error


def _starts_an_array(file: BinaryIO) -> bool:
    start = file.read(1024).removeprefix(_BOM).lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, start=1):
        text = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if text:
            where = f"{path}, line {number}"
            yield where, _parsed(where, text, "a JSON object on each line")


def _array(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    rows = _parsed(str(path), file.read().removeprefix(_BOM), "a JSON array of objects")
    for number, row in enumerate(rows, start=1):
        yield f"{path}, item {number}", row


def _parsed(where: str, text: bytes, expected: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8, got {error}. Convert the file to UTF-8.") from error
    except (ValueError, RecursionError) as error:
        start = text[:60].decode("utf-8", "replace")
        raise DataError(f"{where}: expected {expected}, got {start!r} ({error}). Mend the file.") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingDependency(f"{path}: expected pyarrow, got none. Run: pip install 'agentenv[data]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (ArrowException, OSError) as error:
        message = f"{path}, after row {number}: expected a Parquet file, got {error}. Write or download it again."
        raise DataError(message) from error


def _hub_rows(spec: str, split: str | None, builtin: Mapping[str, Path]) -> Iterator[tuple[str, Any]]:
    name, _, configuration = spec.partition(":")
    near = difflib.get_close_matches(spec, builtin, n=1)
    missing = f"{spec}: expected built-in data or a file, got neither.{_did_you_mean(near)} {_choices(builtin)}"
    if near and "/" not in spec:
        raise ConfigError(missing)
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(f"{missing} For a Hugging Face dataset, run: pip install 'agentenv[data]'") from error
    try:
        data: Any = datasets.load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{spec}: expected a dataset that can be loaded, got {error}. {_choices(builtin)}") from error
    if split is None:
        if len(data) != 1:
            raise ConfigError(
                f"--split: expected one of {list(data)} for {spec}, got none. Set --split to one of them."
            )
        data = next(iter(data.values()))
    return _numbered(spec, data)


def in_messages(task: Task) -> Task:
    """The task with a prompt that is text as a user's message, for models with a chat template."""
    return replace(task, prompt=[{"role": "user", "content": task.prompt}]) if isinstance(task.prompt, str) else task


def _numbered(spec: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{spec}, row {number}", row


def _task_id(row: Any, index: int, taken: set[str]) -> str:
    # Looks at earlier rows only, so that ids do not depend on --limit.
    named = [row.get(key) for key in ("task_id", "id")] if isinstance(row, Mapping) else []
    own = [
        str(value) for value in named if isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    ]
    task_id = own[0] if own and own[0] not in taken else f"{index:06d}"
    while task_id in taken:
        task_id += "+"
    taken.add(task_id)
    return task_id


def _task(where: str, row: Any, prompt_key: str, label_key: str | None, task_id: str) -> Task:
    if not isinstance(row, Mapping):
        raise DataError(f'{where}: expected a JSON object, got {row!r:.60}. Write a row as {{"prompt": ...}}.')
    if prompt_key not in row:
        raise DataError(_lacks(where, row, prompt_key, "Set --prompt_key to one of them."))
    images, seed = row.get("images"), row.get("seed")
    has_images = isinstance(images, list | tuple)
    used = {prompt_key, label_key, *(["images"] if has_images else [])}
    return Task(
        prompt=_prompt(f"{where}, {prompt_key!r}", row[prompt_key]),
        label=None if label_key is None else _label(where, row, label_key),
        task_id=task_id,
        images=tuple(images) if isinstance(images, list | tuple) else (),
        metadata={str(key): value for key, value in row.items() if key not in used},
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
    )


def _label(where: str, row: Mapping[str, Any], key: str) -> Any:
    """The column of that name, or what `column.key` says is in one, as verl's data has it."""
    value: Any = row
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            advice = "Set --label_key to one of them, or to '' where the environment needs no label."
            raise DataError(_lacks(where, row, key, advice))
        value = value[name]
    return value


def _lacks(where: str, row: Mapping[str, Any], key: str, advice: str) -> str:
    return f"{where}: expected key {key!r}, got keys {list(row)}. {advice}"


def _prompt(where: str, value: Any) -> str | list[Message]:
    advice = "A prompt is text, or a list of messages such as {'role': 'user', 'content': '...'}."
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: expected a prompt, got {value!r}. Remove the row, or set --prompt_key.")
        return value
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{where}: expected a prompt, got {value!r:.60}. {advice}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            got = f"keys {list(message)}" if isinstance(message, Mapping) else f"{message!r:.60}"
            raise DataError(f"{where}, message {index}: expected role and content, got {got}. {advice}")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not role or not isinstance(content, str | list | None):
            got = f"role {role!r:.40} and content {content!r:.60}"
            raise DataError(
                f"{where}, message {index}: expected a role and text or parts as content, got {got}. {advice}"
            )
    return list(value)
