"""`agentenv diff`: two runs, paired over tasks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.errors import ConfigError

FAILING: Mapping[str, frozenset[str]] = {
    "worse": frozenset(["worse"]),
    "maybe_worse": frozenset(["worse", "maybe_worse", "no_difference"]),
    "not_better": frozenset(["worse", "maybe_worse", "no_worse", "no_difference"]),
    "different": frozenset(["better", "worse"]),
}
"""The verdicts for which each value of --fail_if fails."""


@dataclass(frozen=True)
class DiffRunsConfig:
    """Compare run B with run A: paired over tasks, with one interval that decides.

    What is not comparable is said first. Exit codes: 0; 1 if --fail_if holds; 2 if it cannot be decided.
    """

    runs: Annotated[tuple[str, ...], POSITIONAL]
    """Two run directories, of `run` or `train`; RUN@STEP is the evaluation of a training at a train step, RUN its last
    one. One training alone: its last evaluation against its first."""
    by: Literal["reward", "score", "passed"] = "reward"
    """What to compare: the reward of an episode, its score, or whether it passed."""
    where: str | None = None
    """Only episodes for which a filter holds, as for `agentenv show`; of evaluations by `task` or `env`."""
    cluster: str | None = None
    """Key of the tasks' metadata: tasks with the same value, such as the same passage, count as one unit."""
    margin: float = 0.0
    """Smallest difference that matters: better and worse are by more than this, and `no worse` is by less."""
    fail_if: Literal["worse", "maybe_worse", "not_better", "different"] | None = None
    """Exit with 1 if B is worse, if it may be worse by the margin, if it is not better, or if it is either. Runs that
    are not comparable are refused with 2."""
    json: bool = False
    """Print all numbers as JSON."""
    md: bool = False
    """Print Markdown."""
    html: str | None = None
    """Also write the page of both runs into this file, opened at their comparison; see `agentenv view --html`."""


def diff(args: Sequence[str]) -> int:
    """Compare two runs, paired over tasks, with one interval that decides."""
    config = parse(DiffRunsConfig, "diff", args)
    if not 1 <= len(config.runs) <= 2:
        raise ConfigError(f"agentenv diff: expected two runs, got {len(config.runs)}. Name A, then B.")
    if config.json and config.md:
        raise ConfigError("--md: expected no --json with it, got both. Leave one out.")
    if config.html is not None:
        _check_html(config)
    from rich.console import Console
    from rich.text import Text

    from agentenv.compare.comparison import compare
    from agentenv.compare.report import as_markdown, as_text, sections_of

    comparison = compare(*config.runs, by=config.by, where=config.where, cluster=config.cluster, margin=config.margin)
    if config.json:
        print_json(comparison.to_dict())
    elif config.md:
        sys.stdout.write(as_markdown(comparison))
    else:
        text = Text(as_text(comparison, min(shutil.get_terminal_size((80, 24)).columns, 100)))
        for title in sections_of(comparison):
            text.highlight_words([title], "bold")
        Console(soft_wrap=True, emoji=False).print(text, end="")
    if config.html is not None:
        from agentenv.view.single_file import FileOptions, write_html
        from agentenv.view.viewed import find_runs

        runs = sorted(find_runs(config.runs), key=lambda run: run.is_eval)  # the two are numbers 0 and 1
        unit = "" if config.cluster is None else f"&cluster={quote(config.cluster)}"
        options = FileOptions(where=config.where, cluster=config.cluster, go=f"/compare/0/1?by={config.by}{unit}")
        sys.stdout.write(f"{write_html(runs, config.html, options)}\n")
    if config.fail_if is None:
        return 0
    if comparison.refused or comparison.verdict == "unknown":
        found = "; ".join(each.text for each in comparison.refused) or "fewer than two tasks"
        raise ConfigError(f"--fail_if: expected runs that can be compared, got: {found}. Run both in the same way.")
    return int(comparison.verdict in FAILING[config.fail_if])


def _check_html(config: DiffRunsConfig) -> None:
    """Raise ConfigError for what the page of --html cannot show."""
    others = {"--json": config.json, "--md": config.md, "--margin": config.margin}
    for name, value in others.items():
        if value:
            raise ConfigError(f"--html: expected no {name} with it, got both. Leave one out.")
    folders = {Path(run).resolve() for run in config.runs if Path(run).is_dir()}
    if len(folders) != 2:
        runs = " ".join(config.runs)
        raise ConfigError(f"--html: expected two run directories, got {runs}. Leave it out for evaluations.")
