"""`read_tasks`: tasks from files, built-in data and Hugging Face datasets, always in the order of the data."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.core.messages import normalized
from agentenv.core.types import Message, Task
from agentenv.errors import ConfigError, DataError, MissingDependency

_BOM = b"\xef\xbb\xbf"
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_NO_LABELS = "An environment without labels has needs_label = False, which read_tasks takes, too."
_NOTHING: Mapping[str, Path] = MappingProxyType({})


def read_tasks(
    spec: str | Iterable[Mapping[str, Any] | Task],
    *,
    prompt_key: str = "prompt",
    label_key: str | None = "label",
    limit: int | None = None,
    split: str | None = None,
    builtin: Mapping[str, Path] = _NOTHING,
    needs_label: bool = True,
) -> list[Task]:
    """Return the tasks of a built-in set, a file (.jsonl, .json, both also .gz, .parquet) or a Hugging Face dataset.

    A Hugging Face dataset is `name` or `name:configuration`, and `split` is for these only. Each row becomes a task:
    the prompt is text or chat messages; `task_id` or `id`, which no two rows share, names the task, else the row's
    number from 000000; an integer `seed` seeds it; `images` belong to it; other columns become metadata.
    Blank lines, CRLF and a byte order mark are accepted. With `label_key` None or '' rows have no labels; unless
    `needs_label`, a row without the column `label` has the label None, and a label may be null.

    `spec` may also be the rows themselves, as mappings or as Tasks, which are returned unchanged.

    Raises:
        ConfigError: the data does not exist, or a flag does not fit it.
        DataError: a row cannot be used; the message says which and what to do.
        MissingDependency: the data needs a package that is not installed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: expected a number of tasks >= 1, got {limit}. Leave it out for all of them.")
    if isinstance(spec, Task | Mapping):
        raise ConfigError(f"data: expected a list of rows, got one, {brief(spec, 80)}. Put it in a list.")
    tasks: list[Task] = []
    taken: dict[str, str] = {}  # the row that gave itself the id, empty for a number, by id
    rows = read_rows(spec, split, builtin) if isinstance(spec, str) else _numbered("data", spec)
    for where, row in islice(rows, limit):
        if isinstance(row, str) and not isinstance(spec, str):
            raise DataError(f"{where}: expected a row, got the text {brief(row, 60)}. Read each file with read_tasks.")
        if isinstance(row, Task):
            tasks.append(replace(row, task_id=_task_id(where, {"id": row.task_id}, len(tasks), taken)))
            continue
        key = label_key or None
        if not needs_label and key == "label" and isinstance(row, Mapping) and key not in row:
            key = None
        task = _task(where, row, prompt_key, key, _task_id(where, row, len(tasks), taken))
        if task.label is None and key and needs_label:
            raise DataError(f"{where}, {key!r}: expected a label, got None. Remove the row, or fix it. {_NO_LABELS}")
        tasks.append(task)
    if not tasks:
        where = f"{spec}: expected" if isinstance(spec, str) else "data: expected"
        raise DataError(f"{where} at least one row, got none. Check the data.")
    return tasks


def read_rows(spec: str, split: str | None = None, builtin: Mapping[str, Path] = _NOTHING) -> Iterator[tuple[str, Any]]:
    """Yield each raw row of `spec` after its location for error messages; see `read_tasks` for accepted data."""
    path = Path(builtin.get(spec, spec)).expanduser()
    if not path.exists():
        if spec not in builtin and _HUB_NAME.fullmatch(spec) is not None and not path.name.lower().endswith(_SUFFIXES):
            return _hub_rows(spec, split, builtin)
        siblings = islice(path.parent.iterdir(), 1000) if path.parent.is_dir() else ()
        suggestion = did_you_mean(path.name, [entry.name for entry in siblings])
        if spec in builtin:
            advice = "Fix the `datasets` of the environment, or its package."
            raise ConfigError(f"{spec}: expected a file, got none at {path}.{suggestion} {advice}")
        raise ConfigError(f"{spec}: expected a file, got none at {path.absolute()}.{suggestion} {_choices(builtin)}")
    suffix = next((suffix for suffix in _SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None or not path.is_file():
        raise ConfigError(f"{spec}: expected a file ending in {', '.join(_SUFFIXES)}, got another. Convert it to one.")
    if split is not None:
        raise ConfigError(f"--split: expected a Hugging Face dataset with it, got the file {spec}. Leave --split out.")
    return _parquet_rows(path) if suffix == ".parquet" else _json_rows(path)


def _choices(builtin: Mapping[str, Path]) -> str:
    names = ", ".join(sorted(builtin)) or "none installed"
    return f"Give a file, a Hugging Face dataset, or built-in data ({names})."


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    name = path.name.lower()
    open_file: Callable[..., Any] = gzip.open if name.endswith(".gz") else open
    with open_file(path, "rb") as file:
        try:
            is_array = file.read(1024).removeprefix(_BOM).lstrip().startswith(b"[")
            file.seek(0)
            if is_array and not name.removesuffix(".gz").endswith(".jsonl"):
                rows = _parsed(str(path), file.read().removeprefix(_BOM), "a JSON array of objects")
                yield from ((f"{path}, item {number}", row) for number, row in enumerate(rows, start=1))
                return
            for number, line in enumerate(file, start=1):
                text = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if text:
                    where = f"{path}, line {number}"
                    yield where, _parsed(where, text, "a JSON object on each line")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: expected a gzip file, got {error}. Compress or download it again.") from error


def _parsed(where: str, text: bytes, expected: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8, got {error}. Convert the file to UTF-8.") from error
    except (ValueError, RecursionError) as error:
        start = text[:60].decode("utf-8", "replace")
        raise DataError(f"{where}: expected {expected}, got {start!r} ({error}). Fix the file.") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingDependency(f"{path}: expected pyarrow, got none. Run: pip install 'agentenv-rl[data]'") from error
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
    suggestion = did_you_mean(spec, builtin)
    missing = f"{spec}: expected built-in data or a file, got neither.{suggestion} {_choices(builtin)}"
    if suggestion and "/" not in spec:
        raise ConfigError(missing)
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(f"{missing} For Hugging Face datasets, run: pip install 'agentenv-rl[data]'") from error
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


def place_of_task(tasks: Sequence[Task], name: str) -> int:
    """Return the place of a task by its id, or by the number of its row from 0.

    Raises:
        ConfigError: no task has the id or the number.
    """
    for place, task in enumerate(tasks):
        if task.task_id == name:
            return place
    if name.isascii() and name.isdecimal() and int(name) < len(tasks):
        return int(name)
    raise ConfigError(
        f"--task: expected a task's id, such as {tasks[0].task_id}, or its number from 0 to {len(tasks) - 1}, got "
        f"{name!r}."
    )


def in_messages(task: Task) -> Task:
    """Return the task with a text prompt turned into a user message, for models with a chat template."""
    return replace(task, prompt=[{"role": "user", "content": task.prompt}]) if isinstance(task.prompt, str) else task


def _numbered(spec: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{spec}, row {number}", row


def _task_id(where: str, row: Any, index: int, taken: dict[str, str]) -> str:
    # Looks at earlier rows only, so that ids do not depend on --limit.
    named = [row.get(key) for key in ("task_id", "id")] if isinstance(row, Mapping) else []
    own = [
        str(value) for value in named if isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    ]
    if own and taken.get(own[0]):
        raise DataError(
            f"{where}: expected an id that no other row has, got {brief(own[0])}, the id of {taken[own[0]]}. "
            "Give each row its own `task_id` or `id`; to a Task, by `dataclasses.replace`."
        )
    task_id = own[0] if own else f"{index:06d}"
    while task_id in taken:  # a number may be the id of another row
        task_id += "+"
    taken[task_id] = where if own else ""
    return task_id


def _task(where: str, row: Any, prompt_key: str, label_key: str | None, task_id: str) -> Task:
    if not isinstance(row, Mapping):
        raise DataError(f'{where}: expected a JSON object, got {brief(row, 60)}. Write a row as {{"prompt": ...}}.')
    if prompt_key not in row:
        raise DataError(_lacks(where, row, prompt_key, "Set --prompt_key to one of them."))
    label: Any = None
    if label_key is not None:
        label = row
        for name in [label_key] if label_key in row else label_key.split("."):  # `column.key` inside a column: verl
            if not isinstance(label, Mapping) or name not in label:
                raise DataError(_lacks(where, row, label_key, f"Rename its column, or set --label_key. {_NO_LABELS}"))
            label = label[name]
    if not _is_finite(label):
        raise DataError(
            f"{where}, {label_key!r}: expected a label, got {brief(label)}. Remove the row, or fix its label."
        )
    images, seed = row.get("images"), row.get("seed")
    has_images = isinstance(images, list | tuple)
    used = {prompt_key, label_key, *(["images"] if has_images else [])}
    return Task(
        prompt=_prompt(f"{where}, {prompt_key!r}", row[prompt_key], row.get("tools")),
        label=label,
        task_id=task_id,
        images=tuple(images) if isinstance(images, list | tuple) else (),
        metadata={str(key): value for key, value in row.items() if key not in used},
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
    )


def _is_finite(value: Any) -> bool:
    """Return True unless NaN or an infinity is in the value, at any depth."""
    pending, seen = [value], {}  # a value may contain itself, and be deeper than the stack
    while pending:
        value = pending.pop()
        if isinstance(value, float):
            if not math.isfinite(value):
                return False
        elif id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, Mapping):
                pending += value.values()
            elif isinstance(value, list | tuple):
                pending += value
            elif callable(getattr(value, "tolist", None)):
                pending.append(value.tolist())
    return True


def _lacks(where: str, row: Mapping[str, Any], key: str, advice: str) -> str:
    return f"{where}: expected key {key!r}, got keys {list(row)}. {advice}"


def _prompt(where: str, value: Any, tools: Any) -> str | list[Message]:
    advice = "A prompt is text, or a list of messages such as {'role': 'user', 'content': '...'}."
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: expected a prompt, got {value!r}. Remove the row, or set --prompt_key.")
        return value
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{where}: expected a prompt, got {brief(value, 60)}. {advice}")
    for index, message in enumerate(value):
        at = f"{where}, message {index}: expected"
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & message.keys():
            got = f"keys {brief(list(message))}" if isinstance(message, Mapping) else brief(message, 60)
            raise DataError(f"{at} role and content, got {got}. {advice}")
        role, content = message["role"], message.get("content")
        if not isinstance(role, str) or not role or not isinstance(content, str | list | None):
            got = f"role {brief(role, 40)} and content {brief(content, 60)}"
            raise DataError(f"{at} a role and text or parts as content, got {got}. {advice}")
        if role not in _ROLES:
            got = f"{brief(role, 40)}. Chat templates have no other."
            raise DataError(f"{at} one of the roles {', '.join(_ROLES)}, got {got}")
    try:
        return normalized(value, tools)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
