"""`agentenv rm eval | check | serve | compare`: what a reward model is worth, its traps, its server; how far several
disagree.

Exit codes of `eval`: 0 done, 1 a subset differs too much from its reference, 2 usage, 3 too many items have no score.
Of `check`: 0, or 1 where there is a problem. Of `compare`: 0.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from agentenv.cli_flags import parse, print_json, subcommand
from agentenv.cli_rm_serve import RMServeConfig, serve
from agentenv.errors import ConfigError, RunStopped

if TYPE_CHECKING:
    from agentenv.rm.evaluate import Invariance, Outcome
    from agentenv.rm.log import Log
    from agentenv.rm.report import Report
    from agentenv.rm.rows import Item
    from agentenv.rm.specs import RewardModel, RMOptions

TOO_MANY_FAILED = 3
_MAX_ERRORS = 20
_TELL_S = 5.0
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
OverflowName = Literal["error", "left", "right"]


@dataclass(frozen=True)
class RMEvalConfig:
    """Measure a reward model or a judge on preference data: RewardBench 1 and 2, or any pairs."""

    data: tuple[str, ...] = ()
    """Built-in pairs (as `agentenv list` names them), files (.jsonl, .json, also .gz, .parquet) or Hugging Face
    datasets. A row is {"prompt": TEXT or MESSAGES, "chosen": ANSWER, "rejected": ANSWER}, where an answer is a text,
    messages that end with it, or (RewardBench 2) a list of texts; or {"chosen", "rejected"} alone, as whole
    conversations: messages, or hh-rlhf's "Human: … Assistant: …". "subset" and "id" may be there too."""
    rm: str = ""
    """hf:PATH, vllm:PATH, ray:PATH, http://…/get_reward, classify:http://…, FILE.py, judge:MODEL@http://…/v1,
    judge-score:MODEL@http://…/v1, or reward:NAME."""
    rm_args: str = "{}"
    """JSON object of further arguments of its constructor."""
    out: str | None = None
    """Folder for items.jsonl, report.json and report.md; default: the report is only shown."""
    resume: bool = False
    """Go on with the evaluation in --out, whose flags need not be said again: only what has no score yet is asked
    about."""
    split: str | None = None
    """Of a Hugging Face dataset, such as `filtered` of allenai/reward-bench."""
    limit: int | None = None
    """Only the first items of each file."""
    bench: Literal["auto", "pairs", "rewardbench", "rewardbench2"] = "auto"
    """Whose rules; by default those that the data look like."""
    ties: Literal["auto", "strict", "half"] = "auto"
    """What equal scores are worth: nothing, or a half; by default a half for judges that compare, else nothing."""
    reference: str | None = None
    """JSON of accuracies by subset (RewardBench's result file, or a report.json): the exit code is 1 beyond it."""
    tolerance: float = 3.0
    """Items by which a subset may differ from the reference."""
    max_length: int | None = None
    """Most tokens of a conversation; default: what the model takes."""
    overflow: OverflowName | None = None
    """What becomes of longer ones: an item that failed, or one cut at its beginning or its end; default: error."""
    device: str | None = None
    """As torch names it."""
    dtype: str | None = None
    """Of the weights; default: float32 on a CPU, the checkpoint's on a GPU."""
    max_batch: int | None = None
    """Most conversations of one batch."""
    max_concurrent: int = 64
    """Items that are asked about at once."""
    limit_s: float = 3600.0
    """Longest that one answer may take."""
    max_failed: float = 0.0
    """Share of the items that may have no score; beyond it the exit code is 3."""
    invariance: int = 16
    """Answers that are scored alone and all at once, to say how much scores depend on their batch; 0 for none."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class RMCheckConfig:
    """Find the traps of a reward model: template, pooled token, BOS, pad, activation, batches."""

    rm: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A folder or name, or what `rm eval --rm` takes."""
    rm_args: str = "{}"
    """JSON object of further arguments of its constructor."""
    max_length: int | None = None
    """Most tokens of a conversation; default: what the model takes."""
    overflow: OverflowName | None = None
    """What becomes of longer ones."""
    device: str | None = None
    """As torch names it."""
    dtype: str | None = None
    """Of the weights; default: float32 on a CPU, the checkpoint's on a GPU."""
    max_batch: int | None = None
    """Most conversations of one batch."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class RMCompareConfig:
    """Say how far the reward models of several evaluations of the same data disagree."""

    outs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of `rm eval --out`, two or more."""
    json: bool = False
    """Print JSON."""


def rm(args: Sequence[str]) -> int:
    """Measure reward models and judges, find their traps, serve one, compare them."""
    command = subcommand("rm", _COMMANDS, args)
    return 0 if command is None else command(args[1:])


def _options(config: RMEvalConfig | RMCheckConfig) -> RMOptions:
    from agentenv.rm.specs import RMOptions

    try:
        args = json.loads(config.rm_args)
    except ValueError:
        args = None
    if not isinstance(args, dict):
        raise ConfigError(f"--rm_args: expected a JSON object, got {config.rm_args!r}. Write it as '{{\"label\": 0}}'.")
    return RMOptions(config.max_length, config.overflow, config.device, config.dtype, config.max_batch, args)


# --- eval -------------------------------------------------------------------------------------------------------------


def _eval(args: Sequence[str]) -> int:
    config = parse(RMEvalConfig, "rm eval", args)
    kept = _kept(config) if config.resume else None
    if kept is not None:
        config = parse(RMEvalConfig, "rm eval", args, default=kept)
    _check_flags(config)
    from agentenv.rm.rows import read_items
    from agentenv.rm.specs import named, naming_flags
    from agentenv.rm.tables import check_bench, read_reference

    reference = None if config.reference is None else read_reference(config.reference)
    options = _options(config)
    with naming_flags():
        named(config.rm)
        items = read_items(config.data, split=config.split, limit=config.limit)
        check_bench(config.bench, items)
        report = asyncio.run(_evaluated(config, options, items, reference))
    shown = report.markdown()
    if config.out is not None:
        folder = Path(config.out).expanduser()
        try:
            (folder / "report.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", "utf-8")
            (folder / "report.md").write_text(shown, "utf-8")
        except OSError as error:
            raise RunStopped(f"--out: expected to write the report, got {error}. Make room, then --resume.") from error
    if config.json:
        print_json(report.to_dict())
    else:
        sys.stdout.write(shown)
    return _exit_code(config, report)


def _kept(config: RMEvalConfig) -> RMEvalConfig | None:
    """The flags of the evaluation in --out; None where none has begun there and others name one."""
    from agentenv.rm.log import kept_flags

    if config.out is None:
        raise ConfigError("--resume: expected --out DIR beside it, got none. Name the folder.")
    flags = kept_flags(config.out)
    if flags is None and not (config.rm and config.data):
        raise ConfigError(
            f"--resume: expected a folder of `rm eval --out`, got {config.out!r}. Check the path, or name --data and "
            "--rm to begin."
        )
    if flags is None:
        return None
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    try:
        return RMEvalConfig(**{**known, "resume": True})  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"--resume: expected flags of this version in {config.out}, got {error}.") from error


def _check_flags(config: RMEvalConfig) -> None:
    if not config.data:
        raise ConfigError("--data: expected a file, got none. Name one.")
    if not config.rm:
        raise ConfigError("--rm: expected a reward model or judge, got none. Name one, such as hf:PATH.")
    if not 0.0 <= config.max_failed <= 1.0:
        raise ConfigError(f"--max_failed: expected a share in 0..1, got {config.max_failed!r}. Change the value.")
    if config.invariance < 0:
        raise ConfigError(f"--invariance: expected a number of answers >= 0, got {config.invariance!r}. Change it.")


def _exit_code(config: RMEvalConfig, report: Report) -> int:
    failed, num = report.table.total.failed, report.table.total.num
    if failed > config.max_failed * num:
        why = next(iter(report.errors), "")
        sys.stderr.write(f"agentenv: error: --max_failed: {failed} of {num} items have no score. The first: {why}\n")
        return TOO_MANY_FAILED
    return int(not report.ok)


async def _evaluated(
    config: RMEvalConfig, options: RMOptions, items: Sequence[Item], reference: dict[str, float] | None
) -> Report:
    from agentenv.rewards.models.types import ready
    from agentenv.rm.evaluate import invariance
    from agentenv.rm.specs import open_rm

    rm = open_rm(config.rm, options)
    log = _log(config, items)
    try:
        await ready(rm.scorer)  # first: what cannot be opened leaves nothing behind
        outcomes = await _outcomes(config, rm, items, log)
        found = None
        if rm.scorer is not None and config.invariance:
            found = await invariance(rm.scorer, items, num=config.invariance)
        return _report(config, rm, items, outcomes, found=found, reference=reference)
    except asyncio.CancelledError:
        sys.stderr.write(f"agentenv rm eval: interrupted: {_left(config, log, len(items))}\n")
        raise
    finally:
        if log is not None:
            log.close()
        await rm.close()


def _left(config: RMEvalConfig, log: Log | None, num: int) -> str:
    """What an interrupted evaluation leaves behind, and how it goes on."""
    if log is None:
        return "nothing is kept. With --out DIR what has its score would be."
    if not log.begun:
        return "nothing had begun."
    again = f"agentenv rm eval --resume --out {shlex.quote(str(config.out))}"
    return f"{log.num_kept} of {num} items are kept. Go on with: {again}"


def _log(config: RMEvalConfig, items: Sequence[Item]) -> Log | None:
    if config.out is None:
        return None
    from agentenv.rm.log import Log, fingerprint

    asked = {name: getattr(config, name) for name in ("rm", "rm_args", "max_length", "overflow", "dtype")}
    flags = {name: value for name, value in asdict(config).items() if name not in ("out", "resume", "json")}
    return Log(config.out, {**asked, "data_sha256": fingerprint(items)}, resume=config.resume, flags=flags)


async def _outcomes(config: RMEvalConfig, rm: RewardModel, items: Sequence[Item], log: Log | None) -> list[Outcome]:
    """The outcome of every item: those of the log, and what is asked about now."""
    from agentenv.rm.evaluate import evaluate
    from agentenv.rm.log import remaining

    done = {} if log is None else dict(log.done)
    todo = remaining(items, done)
    if log is not None:
        log.begin()
    count, told = 0, time.monotonic()

    def each(outcome: Outcome) -> None:
        """Keep it; a line on stderr every few seconds, and for the last one."""
        nonlocal count, told
        count += 1
        done[outcome.index] = outcome
        if log is not None:
            log.write(outcome)
        if count == len(todo) or time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            sys.stderr.write(f"agentenv rm eval: {count} of {len(todo)} items\n")

    await evaluate(rm, todo, max_concurrent=config.max_concurrent, limit_s=config.limit_s, each=each)
    return [done[item.index] for item in items]


def _report(
    config: RMEvalConfig,
    rm: RewardModel,
    items: Sequence[Item],
    outcomes: Sequence[Outcome],
    *,
    found: Invariance | None,
    reference: dict[str, float] | None,
) -> Report:
    from agentenv.rm.report import Report
    from agentenv.rm.tables import bench_of, deltas, hygiene_of, table_of

    bench = bench_of(items) if config.bench == "auto" else config.bench
    by_kind: Literal["strict", "half"] = "half" if rm.comparer is not None else "strict"
    table = table_of(outcomes, bench=bench, ties=by_kind if config.ties == "auto" else config.ties)
    return Report(
        rm=config.rm,
        data=" ".join(config.data),
        table=table,
        hygiene=hygiene_of(items, outcomes),
        deltas={} if reference is None else deltas(table, reference, tolerance=config.tolerance),
        invariance=found,
        judge=rm.metrics(),
        errors=_errors(outcomes),
    )


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """The most frequent errors and how often each is there; those that differ in numbers alone are one."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.error:
            counts[first.setdefault(re.sub(r"\d+", "0", outcome.error), outcome.error)] += 1
    return dict(counts.most_common(_MAX_ERRORS))


# --- check ------------------------------------------------------------------------------------------------------------


def _check(args: Sequence[str]) -> int:
    config = parse(RMCheckConfig, "rm check", args)
    from agentenv.rm.specs import naming_flags

    with naming_flags():
        findings = asyncio.run(_found(config))
    if config.json:
        print_json([finding.to_dict() for finding in findings])
    else:
        sys.stdout.write("".join(f"{_MARKS[each.state]} {each.name:17} {each.detail}\n" for each in findings))
    return int(any(finding.state == "problem" for finding in findings))


async def _found(config: RMCheckConfig) -> list[Any]:
    from agentenv.rm.check import check
    from agentenv.rm.specs import open_rm

    rm = open_rm(config.rm, _options(config))
    try:
        if rm.scorer is None:
            raise ConfigError(f"MODEL: expected a reward model, got {config.rm!r}. Judges and rewards are not checked.")
        return await check(rm.scorer, exact=config.dtype in (None, "auto", "float32"))
    finally:
        await rm.close()


# --- compare ----------------------------------------------------------------------------------------------------------


def _compare(args: Sequence[str]) -> int:
    config = parse(RMCompareConfig, "rm compare", args)
    from agentenv.rm.hygiene import disagreements
    from agentenv.rm.log import read_margins

    if len(set(config.outs)) < 2:
        raise ConfigError(
            f"agentenv rm compare: expected two different folders or more, got {list(config.outs)}. "
            "Name the folders of two evaluations."
        )
    found = disagreements(read_margins(config.outs))
    if config.json:
        print_json([asdict(each) for each in found])
        return 0
    for each in found:
        rank = "not known" if each.spearman is None else f"{each.spearman:+.3f}"
        share = "not known" if each.opposite is None else f"{each.opposite:.1%}"
        sys.stdout.write(
            f"{each.first} and {each.second}: opposite on {share} of {each.num} items, "
            f"rank correlation of the margins {rank}\n"
        )
    return 0


_COMMANDS: dict[str, tuple[type, Callable[[Sequence[str]], int]]] = {
    "eval": (RMEvalConfig, _eval),
    "check": (RMCheckConfig, _check),
    "serve": (RMServeConfig, serve),
    "compare": (RMCompareConfig, _compare),
}
