"""`agentenv export`: the tables of a run, or the records of a trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from agentenv._util.plurals import counted
from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL


@dataclass(frozen=True)
class ExportConfig:
    """Write a run as flat tables of episodes and turns, or as the training records of another framework."""

    run: Annotated[str, POSITIONAL]
    """Run directory, of `run` or `train`."""
    to: Literal["parquet", "csv", "jsonl", "hf", "verl", "nemo_rl"]
    """`parquet`, `csv`, `jsonl` and `hf` (folders that `datasets.load_from_disk` reads) are tables: `episodes` and
    `turns`. The others are JSON lines for a trainer."""
    out: str | None = None
    """Folder for the files, which replace those of an earlier export. Default: RUN/export."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer, for formats that need text of tokens. Default: the run's."""


def export(args: Sequence[str]) -> int:
    """Write a run as flat tables of episodes and turns, or as the training records of another framework."""
    config = parse(ExportConfig, "export", args)
    from agentenv.runs.records.export import export as export_run
    from agentenv.runs.records.scan import ReadReport

    run, report = Path(config.run), ReadReport()

    def decode() -> Callable[[Sequence[int]], str]:
        from agentenv.chat.chat import Chat
        from agentenv.runs.display.report import quiet_transformers
        from agentenv.runs.tokens.view import load_run_tokenizer

        quiet_transformers()
        return Chat(load_run_tokenizer(run, config.tokenizer)).decode

    folder = Path(config.out) if config.out else (run if run.is_dir() else run.parent) / "export"
    exported = export_run(run, config.to, folder, decode=decode, report=report)
    for path, num in exported.num_rows.items():
        sys.stdout.write(f"{path}: {counted(num, 'row')}\n")
    if exported.num_left_out:
        left_out = counted(exported.num_left_out, "episode without a reward is", "episodes without a reward are")
        sys.stderr.write(f"agentenv export: {left_out} left out\n")
    if report.damage:
        sys.stderr.write(f"agentenv: {config.run}: {report.damage}\n")
    return int(bool(report.damage))
