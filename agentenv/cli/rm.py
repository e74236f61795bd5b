"""`agentenv rm eval | check | serve | compare`: evaluate, check, serve and compare reward models and judges.

Exit codes of `eval`: 0 done, 1 a subset differs too much from its reference, 2 usage, 3 too many items have no score.
Exit codes of `check`: 0 no problem, 1 a problem. Exit code of `compare`: 0.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.cli.main import Commands, subcommand, summary_of
from agentenv.cli.rm_serve import ModelFlags, RMServeConfig, serve
from agentenv.episode.registry import builtin_datasets
from agentenv.errors import ConfigError, RunStopped
from agentenv.runs.flat_config import flag_values, with_values

if TYPE_CHECKING:
    from agentenv.rewards.evaluation.evaluate import ItemOutcome, RewardModel
    from agentenv.rewards.evaluation.rows import Item
    from agentenv.rewards.evaluation.tables import Report

TOO_MANY_FAILED = 3
_MAX_ERRORS = 20
_PROGRESS_EVERY_S = 5.0
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}


@dataclass(frozen=True)
class RMEvalConfig:
    """Evaluate a reward model or a judge on preference data: RewardBench 1 and 2, or any pairs."""

    data: tuple[str, ...] = ()
    """Built-in pairs (as `agentenv list` names them), files (.jsonl, .json, also .gz, .parquet) or Hugging Face
    datasets. A row is {"prompt": TEXT or MESSAGES, "chosen": ANSWER, "rejected": ANSWER}, where an answer is a text,
    messages that end with it, or (RewardBench 2) a list of texts; or it is {"chosen", "rejected"} with complete
    conversations: messages, or hh-rlhf's "Human: … Assistant: …". "subset" and "id" are optional."""
    rm: str = ""
    """hf:PATH, ray:PATH, http://…/get_reward, classify:http://…, FILE.py, judge:MODEL@http://…/v1,
    judge-score:MODEL@http://…/v1, or reward:NAME."""
    out: str | None = None
    """Folder for items.jsonl, report.json and report.md. Without it, the report is only printed."""
    resume: bool = False
    """Resume the evaluation in --out: only items without a score are evaluated. Its flags need not be repeated."""
    split: str | None = None
    """Split of a Hugging Face dataset, such as `filtered` of allenai/reward-bench."""
    limit: int | None = None
    """Number of items to read from the start of each file. Default: all."""
    bench: Literal["auto", "pairs", "rewardbench", "rewardbench2"] = "auto"
    """Scoring rules. `auto` recognizes them from the data."""
    ties: Literal["auto", "strict", "half"] = "auto"
    """Credit for equal scores: `strict` 0, `half` 0.5. `auto` is `half` for judges that compare, else `strict`."""
    reference: str | None = None
    """JSON file of accuracies by subset (RewardBench's result file, or a report.json). If a subset differs by more than
    --tolerance, the exit code is 1."""
    tolerance: float = 3.0
    """Number of items by which a subset may differ from the reference."""
    model: ModelFlags = field(default_factory=ModelFlags)
    """The model."""
    max_concurrent: int = 64
    """Items evaluated concurrently."""
    limit_s: float = 3600.0
    """Time limit per answer, in seconds."""
    max_failed: float = 0.0
    """Share of the items that may end without a score; above it, the exit code is 3."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class RMCheckConfig:
    """Check a reward model for common traps: template, pooled token, BOS, pad token, activation, batching."""

    rm: Annotated[str, POSITIONAL]
    """Folder or name of a model, or any value of `rm eval --rm`."""
    model: ModelFlags = field(default_factory=ModelFlags)
    """The model."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class RMCompareConfig:
    """Compare evaluations: a table of their accuracies by subset."""

    outs: Annotated[tuple[str, ...], POSITIONAL]
    """Two or more folders of `rm eval --out`, or RewardBench's result files."""
    json: bool = False
    """Print JSON."""


def rm(args: Sequence[str]) -> int:
    """Evaluate, check, serve and compare reward models and judges."""
    command = subcommand("agentenv rm", _COMMANDS, args)
    return 0 if command is None else command(args[1:])


# --- eval -------------------------------------------------------------------------------------------------------------


def _eval(args: Sequence[str]) -> int:
    config = parse(RMEvalConfig, "rm eval", args)
    stored = _stored_config(config) if config.resume else None
    if stored is not None:
        config = parse(RMEvalConfig, "rm eval", args, default=stored)
    if not config.data:
        raise ConfigError("--data: expected a file, got none.")
    if not config.rm:
        raise ConfigError("--rm: expected a reward model or judge, got none. Pass one, such as hf:PATH.")
    if not 0.0 <= config.max_failed <= 1.0:
        raise ConfigError(f"--max_failed: expected a share in 0..1, got {config.max_failed!r}.")
    from agentenv.rewards.evaluation.evaluate import flags_in_errors, parse_rm_spec
    from agentenv.rewards.evaluation.rows import read_items
    from agentenv.rewards.evaluation.tables import check_bench, read_reference

    reference = None if config.reference is None else read_reference(config.reference)
    with flags_in_errors():
        parse_rm_spec(config.rm)
        items = read_items(config.data, split=config.split, limit=config.limit, builtin=builtin_datasets())
        check_bench(config.bench, items)
        report = asyncio.run(_evaluated(config, items, reference))
    markdown = report.markdown()
    if config.out is not None:
        folder = Path(config.out).expanduser()
        try:
            (folder / "report.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", "utf-8")
            (folder / "report.md").write_text(markdown, "utf-8")
        except OSError as error:
            raise RunStopped(
                f"--out: expected to write the report, got {error}. Free disk space, then --resume."
            ) from error
    if config.json:
        print_json(report.to_dict())
    else:
        sys.stdout.write(markdown)
    failed, num = report.table.total.failed, report.table.total.num
    if failed > config.max_failed * num:
        reason = next(iter(report.errors), "")
        sys.stderr.write(
            f"agentenv: error: --max_failed: {failed} of {num} items have no score. First error: {reason}\n"
        )
        return TOO_MANY_FAILED
    return int(not report.ok)


def _stored_config(config: RMEvalConfig) -> RMEvalConfig | None:
    """Return the flags of the evaluation in --out, None if there is none yet but the flags of a new one are given."""
    from agentenv.rewards.evaluation.evaluate import stored_flags

    if config.out is None:
        raise ConfigError("--resume: expected --out DIR with it, got none. Pass the folder.")
    flags = stored_flags(config.out)
    if flags is None and not (config.rm and config.data):
        raise ConfigError(
            f"--resume: expected a folder of `rm eval --out`, got {config.out!r}. Check the path, or pass --data and "
            "--rm to start an evaluation."
        )
    if flags is None:
        return None
    try:
        stored: RMEvalConfig = with_values(RMEvalConfig, None, {**flags, "resume": True})
    except ConfigError as error:
        raise ConfigError(f"--resume: expected flags of this version in {config.out}, got {error}.") from error
    return stored


async def _evaluated(config: RMEvalConfig, items: Sequence[Item], reference: dict[str, float] | None) -> Report:
    from agentenv.rewards.evaluation.evaluate import EvaluationLog, evaluate, fingerprint, open_rm
    from agentenv.rewards.models.types import ready

    rm = open_rm(config.rm, **config.model.options)
    log = None
    if config.out is not None:
        flags = flag_values(config) | {"rm_args": json.dumps(dict(config.model.rm_args))}
        identity = {name: flags[name] for name in ("rm", "rm_args", "max_length", "overflow", "dtype")}
        identity["data_sha256"] = fingerprint(items)
        flags = {name: value for name, value in flags.items() if name not in ("out", "resume", "json")}
        log = EvaluationLog(config.out, identity, resume=config.resume, flags=flags)
    done = {} if log is None else dict(log.done)
    todo = [item for item in items if item.index not in done]
    count, last_printed = 0, 0.0

    def on_outcome(outcome: ItemOutcome) -> None:
        nonlocal count, last_printed
        count += 1
        done[outcome.index] = outcome
        if log is not None:
            log.write(outcome)
        if count == len(todo) or time.monotonic() - last_printed >= _PROGRESS_EVERY_S:
            last_printed = time.monotonic()
            sys.stderr.write(f"agentenv rm eval: {count} of {len(todo)} items\n")

    try:
        await ready(rm.scorer)  # first, so that a model that fails to load leaves no files
        if log is not None:
            log.start()
        last_printed = time.monotonic()
        await evaluate(rm, todo, max_concurrent=config.max_concurrent, limit_s=config.limit_s, on_outcome=on_outcome)
        return _report(config, rm, items, [done[item.index] for item in items], reference)
    except asyncio.CancelledError:
        if log is None:
            advice = "nothing is stored. With --out DIR, scored items would be."
        elif not log.started:
            advice = "no item was started."
        else:
            command = f"agentenv rm eval --resume --out {shlex.quote(str(config.out))}"
            advice = f"{log.num_stored} of {len(items)} items are stored. Resume with: {command}"
        sys.stderr.write(f"agentenv rm eval: interrupted: {advice}\n")
        raise
    finally:
        if log is not None:
            log.close()
        await rm.close()


def _report(
    config: RMEvalConfig,
    rm: RewardModel,
    items: Sequence[Item],
    outcomes: Sequence[ItemOutcome],
    reference: dict[str, float] | None,
) -> Report:
    from agentenv.rewards.evaluation.tables import Report, bench_of, deltas, hygiene_of, table_of

    bench = bench_of(items) if config.bench == "auto" else config.bench
    by_kind: Literal["strict", "half"] = "half" if rm.comparer is not None else "strict"
    table = table_of(outcomes, bench=bench, ties=by_kind if config.ties == "auto" else config.ties)
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()  # errors that differ only in numbers count as the same
    for outcome in outcomes:
        if outcome.error:
            counts[first.setdefault(re.sub(r"\d+", "0", outcome.error), outcome.error)] += 1
    return Report(
        rm=config.rm,
        data=" ".join(config.data),
        table=table,
        hygiene=hygiene_of(items, outcomes),
        deltas={} if reference is None else deltas(table, reference, tolerance=config.tolerance),
        judge=rm.metrics(),
        errors=dict(counts.most_common(_MAX_ERRORS)),
    )


# --- check ------------------------------------------------------------------------------------------------------------


def _check(args: Sequence[str]) -> int:
    config = parse(RMCheckConfig, "rm check", args)
    from agentenv.rewards.evaluation.evaluate import flags_in_errors

    with flags_in_errors():
        findings = asyncio.run(_findings(config))
    if config.json:
        print_json([asdict(finding) for finding in findings])
    else:
        sys.stdout.write("".join(f"{_MARKS[each.state]} {each.name:17} {each.detail}\n" for each in findings))
    return int(any(finding.state == "problem" for finding in findings))


async def _findings(config: RMCheckConfig) -> list[Any]:
    from agentenv.rewards.evaluation.check import check
    from agentenv.rewards.evaluation.evaluate import open_rm

    rm = open_rm(config.rm, **config.model.options)
    try:
        if rm.scorer is None:
            raise ConfigError(
                f"MODEL: expected a reward model, got {config.rm!r}. Judges and rewards cannot be checked."
            )
        return await check(rm.scorer, exact=config.model.dtype in (None, "auto", "float32"))
    finally:
        await rm.close()


# --- compare ----------------------------------------------------------------------------------------------------------


def _compare(args: Sequence[str]) -> int:
    config = parse(RMCompareConfig, "rm compare", args)
    from agentenv.rewards.evaluation.tables import number_text, read_reference, table_rows

    if len(set(config.outs)) < 2:
        raise ConfigError(
            f"agentenv rm compare: expected two or more different evaluations, got {list(config.outs)}. "
            "Pass their folders."
        )
    paths = {out: Path(out).expanduser() for out in config.outs}
    accuracies = {
        out: read_reference(path / "report.json" if path.is_dir() else path, where=out) for out, path in paths.items()
    }
    subsets = sorted({name for by_subset in accuracies.values() for name in by_subset})
    if config.json:
        print_json({name: {out: each.get(name) for out, each in accuracies.items()} for name in subsets})
        return 0
    rows = [(name, *(number_text(each.get(name)) for each in accuracies.values())) for name in subsets]
    sys.stdout.write(table_rows(("subset", *accuracies), rows) + "\n")
    return 0


_COMMANDS: Commands = {
    "eval": (summary_of(RMEvalConfig), _eval),
    "check": (summary_of(RMCheckConfig), _check),
    "serve": (summary_of(RMServeConfig), serve),
    "compare": (summary_of(RMCompareConfig), _compare),
}
