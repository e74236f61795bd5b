"""`agentenv export`: the tables of a run as files, and its episodes as records of trainers.

A run is read twice, one episode at a time: first for the columns, then for the rows.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from agentenv._util.brief import brief
from agentenv._util.disk import replaced
from agentenv._util.jsonable import jsonable
from agentenv.core.trajectory import Trajectory
from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.runs.records.directory import check_run, read_trajectories
from agentenv.runs.records.scan import ReadReport
from agentenv.runs.records.tables import EPISODE_COLUMNS, FLOATS, INTEGERS, TURN_COLUMNS, Row, episode_row, turn_rows

TableFormat = Literal["csv", "jsonl", "parquet", "hf"]
TrainerFormat = Literal["verl", "nemo_rl"]
Write = Callable[[Row], None]
MakeDecode = Callable[[], Callable[[Sequence[int]], str]]
"""Returns the function from token ids to text."""

_BATCH = 256
"""Rows of Parquet in memory."""
_TABLES: Mapping[str, tuple[Mapping[str, str], Callable[[Trajectory], Sequence[Row]]]] = {
    "episodes": (EPISODE_COLUMNS, lambda trajectory: [episode_row(trajectory)]),
    "turns": (TURN_COLUMNS, turn_rows),
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    num_rows: dict[Path, int] = field(default_factory=dict)
    """Rows by file or folder."""
    num_left_out: int = 0
    """Failed episodes, which a trainer's format cannot hold."""


def export(
    run: str | Path,
    to: str,
    out: str | Path,
    *,
    decode: MakeDecode | None = None,
    report: ReadReport | None = None,
) -> Exported:
    """Write a run into the folder `out`: `episodes` and `turns` as tables, or records of a trainer as JSON lines.

    `decode` makes the function from token ids to text that some trainers' records need; it is called only for them.

    Raises:
        ConfigError: the run is missing, or `out` cannot be written.
        DataError: an episode does not fit the format, such as one without log-probabilities, or the columns, because it
            was recorded during the export.
        MissingDependency: the format needs a package that is not installed.
    """
    check_run(run)
    report, folder = report or ReadReport(), Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if to in get_args(TrainerFormat):
            return _export_records(run, to, folder, decode, report)
        kinds = _kinds(run, report)
        with contextlib.ExitStack() as stack:
            tables = {name: stack.enter_context(_WRITERS[to](folder, name, kinds[name])) for name in _TABLES}
            counts = dict.fromkeys(_TABLES, 0)
            for trajectory in read_trajectories(run, report=ReadReport()):
                for name, (_, rows) in _TABLES.items():
                    for row in rows(trajectory):
                        tables[name](_cells(row, kinds[name]))
                        counts[name] += 1
    except OSError as error:
        raise ConfigError(f"--out: expected a writable folder, got {error}. Fix it, or use another.") from error
    return Exported({_path(folder, name, to): num for name, num in counts.items()})


# --- tables -----------------------------------------------------------------------------------------------------------


def _kinds(run: str | Path, report: ReadReport) -> dict[str, dict[str, type]]:
    """Return for each table the type of each column."""
    found = {
        name: {column: int if column in INTEGERS else float if column in FLOATS else str for column in columns}
        for name, (columns, _) in _TABLES.items()
    }
    for trajectory in read_trajectories(run, report=report):
        for name, (columns, rows) in _TABLES.items():
            for row in rows(trajectory):
                for column in [key for key in row if key not in columns]:
                    kind = float if isinstance(row[column], int | float) else str
                    found[name][column] = kind if found[name].get(column, kind) is kind else str
    return {
        name: dict(sorted(kinds.items(), key=lambda item: item[0].startswith("info."))) for name, kinds in found.items()
    }


def _cells(row: Row, kinds: Mapping[str, type]) -> Row:
    """Return a row in the columns of its table.

    Raises:
        DataError: the first pass has not seen such a row, since the run continues.
    """
    for column, value in row.items():
        kind = kinds.get(column)
        if kind is None or (kind is not str and not isinstance(value, int | float | None)):
            expected = "a number" if kind else "a column that an earlier episode has"
            raise DataError(
                f"{column}: expected {expected}, got {brief(value)}, since the run changed while it was exported. "
                "Export again."
            )
    cells = {column: None if row.get(column) is None else kind(row[column]) for column, kind in kinds.items()}
    return {  # files cannot hold lone surrogates
        column: cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell
        for column, cell in cells.items()
    }


def _path(folder: Path, name: str, to: str) -> Path:
    return folder / (name if to == "hf" else f"{name}.{to}")


@contextlib.contextmanager
def _csv_table(folder: Path, name: str, kinds: Mapping[str, type]) -> Iterator[Write]:
    with replaced(_path(folder, name, "csv")) as path, path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(kinds))
        writer.writeheader()
        yield writer.writerow


@contextlib.contextmanager
def _json_lines(folder: Path, name: str, kinds: Mapping[str, type] | None = None) -> Iterator[Write]:
    with replaced(_path(folder, name, "jsonl")) as path, path.open("w", encoding="ascii") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row, allow_nan=False) + "\n")

        yield write


@contextlib.contextmanager
def _parquet_table(folder: Path, name: str, kinds: Mapping[str, type]) -> Iterator[Write]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency(
            "--to: expected pyarrow, got none. Run: pip install 'agentenv-rl[data]', or use csv or jsonl."
        ) from error
    arrow = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    schema = pa.schema([(column, arrow[kind]) for column, kind in kinds.items()])
    rows: list[Row] = []
    with replaced(_path(folder, name, "parquet")) as path, parquet.ParquetWriter(path, schema) as writer:

        def flush() -> None:
            try:
                writer.write_table(pa.Table.from_pylist(rows, schema))
            except (OverflowError, pa.ArrowException) as error:
                raise DataError(f"{path}: expected values that Parquet holds, got {error}. Use --to jsonl.") from error
            rows.clear()

        def write(row: Row) -> None:
            rows.append(row)
            if len(rows) >= _BATCH:
                flush()

        yield write
        flush()


@contextlib.contextmanager
def _hf_dataset(folder: Path, name: str, kinds: Mapping[str, type]) -> Iterator[Write]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            "--to hf: expected datasets, got none. Run: pip install 'agentenv-rl[data]', or use csv or jsonl."
        ) from error
    with tempfile.TemporaryDirectory() as temporary:
        with _parquet_table(Path(temporary), name, kinds) as write:
            yield write
        datasets.disable_progress_bars()
        table = _path(Path(temporary), name, "parquet")
        dataset = datasets.Dataset.from_parquet(str(table), cache_dir=temporary, keep_in_memory=False)
        dataset.save_to_disk(str(_path(folder, name, "hf")))


_WRITERS: Mapping[str, Callable[[Path, str, Mapping[str, type]], contextlib.AbstractContextManager[Write]]] = {
    "csv": _csv_table,
    "jsonl": _json_lines,
    "parquet": _parquet_table,
    "hf": _hf_dataset,
}


# --- records of trainers ----------------------------------------------------------------------------------------------


def _export_records(run: str | Path, to: str, folder: Path, decode: MakeDecode | None, report: ReadReport) -> Exported:
    to_records = importlib.import_module(f"agentenv.interop.{to}.records").to_records
    if to == "nemo_rl":
        if decode is None:
            raise ConfigError(f"export: expected `decode` for {to}, got none. Pass a function that makes it.")
        to_records = partial(to_records, decode=decode())
    num = num_left_out = 0
    with _json_lines(folder, to) as write:
        for trajectory in read_trajectories(run, report=report):
            try:
                records = to_records(trajectory)
            except DataError:
                if trajectory.reward is not None:
                    raise
                num_left_out += 1
                continue
            for record in records:
                write(jsonable(record))
            num += len(records)
    return Exported({_path(folder, to, "jsonl"): num}, num_left_out)
