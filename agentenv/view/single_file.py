"""The page as one file with its data, which opens from a disk without a server: `write_html`."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pstdev
from typing import Any

from agentenv._util.disk import replaced
from agentenv._util.version import __version__
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records.directory import read_trajectories
from agentenv.runs.records.filters import parse_filter
from agentenv.runs.records.scan import ReadReport
from agentenv.runs.records.selection import Selection, select
from agentenv.view.episodes import Place, parse_texts, read_episodes, read_heads, read_value
from agentenv.view.meta import Defaults, comparisons, run_meta
from agentenv.view.page import file_shell
from agentenv.view.redaction import TOLD, Redaction
from agentenv.view.tail import IndexTail, LearnedLines, TailPlace, read_tail
from agentenv.view.texts import TokenTexts, load_texts
from agentenv.view.viewed import STEPS, TRAIN_METRICS, TRAJECTORIES, ViewedRun

_DIGITS = 4
"""Decimals of log-probabilities, which hardly compress."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """What a page that is one file holds."""

    max_mb: float = 50.0
    """Maximum size of all episodes together, in megabytes; the others are left out by whole tasks."""
    where: str | None = None
    """A filter: only episodes for which it holds."""
    redaction: Redaction = field(default_factory=Redaction)
    tokenizer: str | None = None
    """Folder of the tokenizer for all runs; None takes that of each run."""
    defaults: Defaults | None = None
    """Default flags by kind of run, for the list of those that were changed."""
    cluster: str | None = None
    """Key of the tasks' metadata: the file also has the comparisons in which tasks with the same value are one unit."""
    go: str = ""
    """Where the page opens, such as `/compare/0/1`; by default the first run, or the list of runs."""


@dataclass(slots=True)
class _FileRun:
    """A run while it is collected."""

    run: ViewedRun
    texts: TokenTexts | str
    redaction: Redaction
    """What is left out of its episodes."""
    learned: LearnedLines
    header: str = ""
    rows: list[list[Any]] = field(default_factory=list)
    """Of the index."""
    groups: dict[str, list[list[Any]]] = field(default_factory=dict)
    """Rows by group id, in the order of the record."""
    column: Mapping[str, int] = field(default_factory=dict)
    written: dict[str, bytes] = field(default_factory=dict)
    """By group id: its episodes, compressed."""
    heads: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    table: dict[int, str] = field(default_factory=dict)

    def places(self, group: str) -> list[Place]:
        """Return the places of a group's lines."""
        return [(row[self.column["offset"]], row[self.column["length"]]) for row in self.groups[group]]

    def num_episodes(self, groups: Iterable[str]) -> int:
        """Return the number of episodes of groups, each of which may have several lines."""
        return len({row[self.column["episode_id"]] for group in groups for row in self.groups[group]})

    def spread(self, group: str) -> float:
        """Return the standard deviation of a group's rewards."""
        rewards = [row[self.column["reward"]] for row in self.groups[group]]
        known = [value for value in rewards if value is not None]
        return pstdev(known) if known else 0.0


def write_html(runs: Sequence[ViewedRun], path: str | Path, options: FileOptions | None = None) -> str:
    """Write runs as one file, and return a sentence about what it holds.

    If not all episodes fit, whole tasks are chosen: for half of the size those whose rewards differ most, for the rest
    by chance, always the same. The index is of all episodes.

    Raises:
        ConfigError: the filter is wrong or keeps no episode, or the file cannot be written.
        DataError: a run cannot be read.
        MissingDependency: the page was not built.
    """
    options = options or FileOptions()
    runs = [run for run in runs if not run.is_eval or run.has_episodes]
    before, after = file_shell()
    budget = options.max_mb * 1e6 / max(1, len(runs))
    files = []
    for run in runs:
        try:
            files.append(_collected(run, options))
            _fill(files[-1], budget)
        except (AttributeError, LookupError, TypeError, json.JSONDecodeError) as error:
            raise DataError(
                f"{run.path}: expected the rows of an index, got {error!r:.200}. Remove its index.jsonl."
            ) from error
    num_all = sum(file.num_episodes(file.groups) for file in files)
    if options.where is not None and not num_all:
        environments = (each.task.env for run in runs for each in read_trajectories(run.folder, report=ReadReport()))
        parse_filter(options.where).check_environments(", ".join(run.name for run in runs), environments)
        raise ConfigError(
            f"--where: expected a filter that keeps an episode, got {options.where!r}. Correct the filter."
        )
    num_written = sum(file.num_episodes(file.written) for file in files)
    chosen = "tasks whose rewards differ most, and others by chance"
    note = None if num_written == num_all else f"{num_written:,} of {num_all:,} episodes, chosen by: {chosen}"
    if options.where is not None:
        note = f"only episodes for which this holds: {options.where}" + (f"; {note}" if note else "")
    out = Path(path)
    try:
        with replaced(out) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as target:
            target.write(before)
            for element in _elements(files, note, options):
                target.write(element)
            target.write(after)
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a file that can be written, got {error}. Choose another --html."
        ) from error
    size_mb = out.stat().st_size / 1e6
    return f"{out}: {note or ('1 episode' if num_all == 1 else f'{num_all:,} episodes')}, {size_mb:.1f} MB"


def _collected(run: ViewedRun, options: FileOptions) -> _FileRun:
    """Return a run with its index."""
    try:
        texts: TokenTexts | str = load_texts(run, options.tokenizer)
    except (ConfigError, DataError) as error:
        texts = str(error)
    file = _FileRun(run, texts, options.redaction.of_run(run.flags), LearnedLines(run))
    kept = None
    if options.where is not None:
        kept = {each.episode_id for each in select(run.folder, Selection(where=parse_filter(options.where)))}
    for line in _all_lines(IndexTail(run).read):
        if line.startswith("{"):
            file.header = line
            file.column = {name: number for number, name in enumerate(json.loads(line)["fields"])}
        else:
            row = json.loads(line)
            if kept is None or row[file.column["episode_id"]] in kept:
                number = file.column["error_text"]
                row[number] = list(map(file.redaction.text, row[number]))
                for name in TOLD:
                    row[file.column[name]] = file.redaction.text(row[file.column[name]])
                file.rows.append(row)
    for row in file.rows:
        file.groups.setdefault(row[file.column["group_id"]], []).append(row)
    if file.redaction.labels:
        with run.open(TRAJECTORIES) as record:
            for group, rows in file.groups.items():
                label = None
                with contextlib.suppress(DataError):  # siblings have the same task
                    label = parse_texts(read_value(run, record, file.places(group)[0]))["task"]["label"]
                for row in rows:
                    row[file.column["info"]] = file.redaction.info(row[file.column["info"]], label)
    return file


def _all_lines(read: Any) -> Iterator[str]:
    place = TailPlace()
    while True:
        tail = read(place)
        if not tail.lines and not tail.was_reset and tail.place == place:
            return
        place = tail.place
        yield from filter(None, tail.lines.decode("utf-8", "replace").split("\n"))


def _fill(file: _FileRun, budget: float) -> None:
    """Write groups until the budget is used up; the first group whatever its size."""
    by_spread = sorted(file.groups, key=file.spread, reverse=True)
    by_chance = list(file.groups)
    random.Random(0).shuffle(by_chance)
    used = 0
    for order, limit in ((by_spread, budget / 2), (by_chance, budget)):
        for group in order:
            if group in file.written:
                continue
            if used >= limit:
                break
            content = _group(file, group)
            if file.written and used + len(content) > limit:
                break
            file.written[group] = content
            used += len(content)


def _group(file: _FileRun, group: str) -> bytes:
    """Return the episodes of a group, compressed, and note their texts and heads."""

    def shortened(values: dict[str, Any]) -> None:
        file.redaction.record(values)
        for segment in values["segments"]:
            segment["logprobs"] = [
                round(value, _DIGITS) if isinstance(value, float) else value for value in segment["logprobs"]
            ]

    places = file.places(group)
    texts = file.texts if isinstance(file.texts, TokenTexts) else None
    episodes = read_episodes(file.run, places, texts, learned=file.learned.of, change=shortened)
    file.table |= episodes.texts
    heads = file.heads[group] = read_heads(file.run, places)
    for head in heads:
        if "error" in head:
            head["error"] = file.redaction.text(head["error"])
            continue
        head["info"] = file.redaction.info(head["info"], head["label"])
        head["label"] = None if file.redaction.labels else head["label"]
    return _packed(b'{"episodes":[' + b",".join(episodes.entries) + b"]}")


def _elements(files: Sequence[_FileRun], note: str | None, options: FileOptions) -> Iterator[str]:
    """Yield the elements with the data: `meta`, and compressed ones."""
    metas = []
    for number, file in enumerate(files):
        meta = file.redaction.meta(run_meta(number, file.run, file.texts, options.defaults))
        groups = [
            {"element": f"g-{number}-{index}", "group_id": group, "at": file.places(group)}
            for index, group in enumerate(file.groups)
            if group in file.written
        ]
        if options.where is not None and isinstance(meta["metrics"], dict):  # they are of all episodes
            meta["metrics"] = {"pass_score": meta["metrics"].get("pass_score")}
        metas.append(meta | {"is_writing": False, "groups": groups})
    diffs = list(comparisons([file.run for file in files], options.where, options.redaction, options.cluster))
    page = {"v": 1, "version": __version__, "note": note, "go": options.go, "runs": metas, "diffs": diffs}
    # `<` would end the element; a browser reads the escape as the same character.
    yield f'<script type="application/json" id="meta">{json.dumps(page).replace("<", chr(92) + "u003c")}</script>\n'
    for number, file in enumerate(files):
        index = "\n".join([file.header, *map(json.dumps, file.rows)])
        yield _element(f"index-{number}", _packed(index.encode()))
        for name, source in (("metrics", TRAIN_METRICS), ("steps", STEPS)):
            lines = "\n".join(_all_lines(lambda place, file=file, source=source: read_tail(file.run, source, place)))
            yield _element(f"{name}-{number}", _packed(lines.encode()))
        special = file.texts.special_ids if isinstance(file.texts, TokenTexts) else frozenset()
        texts = {"texts": sorted(file.table.items()), "special": sorted(special & file.table.keys())}
        yield _element(f"texts-{number}", _packed(json.dumps(texts).encode()))
        heads = {"heads": [head for group in file.groups for head in file.heads.get(group, [])]}
        yield _element(f"heads-{number}", _packed(json.dumps(heads).encode()))
        for index_of, group in enumerate(file.groups):
            if group in file.written:
                yield _element(f"g-{number}-{index_of}", file.written[group])


def _element(name: str, content: bytes) -> str:
    return f'<script type="text/plain" id="{name}">{content.decode("ascii")}</script>\n'


def _packed(content: bytes) -> bytes:
    """Return content for an element: raw deflate, in base64."""
    packer = zlib.compressobj(9, wbits=-15)
    return base64.b64encode(packer.compress(content) + packer.flush())
