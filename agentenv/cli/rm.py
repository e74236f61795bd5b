"""`agentenv rm eval | check | serve | compare`: evaluate, check, serve and compare reward models and judges.

Exit codes of `eval`: 0 done, 1 a subset differs too much from its reference, 2 usage, 3 too many items have no score.
Exit codes of `check`: 0 no problem, 1 a problem. Exit code of `compare`: 0. Exit codes of `serve`: 0 stopped by Ctrl-C
or SIGTERM; 2 wrong usage, unknown model, port in use, or missing token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from agentenv._util.http.responses import require_server
from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.cli.main import Commands, subcommand, summary_of
from agentenv.episode.registry import builtin_datasets
from agentenv.errors import ConfigError, RunStopped
from agentenv.runs.flat_config import flag_values, with_values
from agentenv.runs.shutdown import interruptible

if TYPE_CHECKING:
    from agentenv.rewards.evaluation.evaluate import ItemOutcome, RewardModel
    from agentenv.rewards.evaluation.rows import Item
    from agentenv.rewards.evaluation.tables import Report
    from agentenv.rewards.models.types import RewardScorer
    from agentenv.rewards.serving.server import RewardServer, ServeOptions

TOKEN_VARIABLE = "AGENTENV_RM_TOKEN"
TOO_MANY_FAILED = 3
_MAX_ERRORS = 20
_PROGRESS_EVERY_S = 5.0
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}


@dataclass(frozen=True)
class ModelFlags:
    """How a reward model reads conversations, and where it runs."""

    rm_args: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of further arguments for the model's constructor."""
    max_length: int | None = None
    """Maximum number of tokens per conversation. Default: the model's limit."""
    overflow: Literal["error", "left", "right"] | None = None
    """Treatment of longer conversations: `error` fails the item, or answers with status 422; `left` and `right` cut the
    beginning or the end. Default: error."""
    device: str | None = None
    """Torch device, such as cuda:0."""
    dtype: str | None = None
    """Dtype of the weights. Default: float32 on a CPU, the checkpoint's on a GPU."""
    max_batch: int | None = None
    """Maximum number of conversations per batch of the model."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the constructor: the flags that are given, and those of --rm_args."""
        flags = {name: value for name, value in vars(self).items() if name != "rm_args" and value is not None}
        return flags | dict(self.rm_args)


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
class RMServeConfig:
    """Serve a reward model over HTTP in OpenRLHF's format: POST /get_reward, and GET /health."""

    rm: Annotated[str, POSITIONAL]
    """Folder or name of a model, or any value of `rm eval --rm` except judges and rewards."""
    model: ModelFlags = field(default_factory=ModelFlags)
    """The model."""
    host: str = "127.0.0.1"
    """Address to listen on. All except the loopback address need a token, in AGENTENV_RM_TOKEN or --token_file."""
    port: int = 5000
    """Port to listen on; 0 takes a free one."""
    token_file: str | None = None
    """File with the token that clients must send, as Bearer or as the password in the address, which OpenRLHF's client
    supports: http://rm:TOKEN@node7:5000/get_reward."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of this server, such as node7 or node7:80; * allows any. Required with --host 0.0.0.0."""
    shift: float = 0.0
    """Added to the model's score; --shift -MEAN --scale 1/STD normalizes as OpenRLHF's models do."""
    scale: float = 1.0
    """Factor applied after --shift."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward."""
    max_waiting: int = 4096
    """Maximum number of conversations waiting for a score; further requests get status 429 with Retry-After."""
    max_items: int | None = None
    """Maximum number of conversations per request; larger ones get 413. Default: 1024, at most --max_waiting."""
    max_body_mb: int = 8
    """Largest request body, in MiB."""
    timeout_s: float = 170.0
    """Time limit per answer, in seconds; after it, the status is 503. OpenRLHF's client waits 180 s."""
    grace_s: float = 30.0
    """Time for conversations in progress after the server is stopped, in seconds."""


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
    config = parse(RMEvalConfig, "rm eval", args, _stored_config)
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
        items = read_items(config.data, split=config.split, limit=config.limit, builtin=builtin_datasets(*config.data))
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


def _stored_config(given: Mapping[str, Any]) -> RMEvalConfig | None:
    """Return the flags of the evaluation in --out, None if there is none yet but the flags of a new one are given."""
    from agentenv.rewards.evaluation.evaluate import stored_flags

    if given.get("out") is None:
        raise ConfigError("--resume: expected --out DIR with it, got none. Pass the folder.")
    flags = stored_flags(given["out"])
    if flags is None and not (given.get("rm") and given.get("data")):
        raise ConfigError(
            f"--resume: expected a folder of `rm eval --out`, got {given['out']!r}. Check the path, or pass --data and "
            "--rm to start an evaluation."
        )
    if flags is None:
        return None
    try:
        stored: RMEvalConfig = with_values(RMEvalConfig, None, {**flags, "resume": True})
    except ConfigError as error:
        raise ConfigError(f"--resume: expected flags of this version in {given['out']}, got {error}.") from error
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
    hygiene, errors = hygiene_of(items, outcomes), dict(counts.most_common(_MAX_ERRORS))
    changes = {} if reference is None else deltas(table, reference, tolerance=config.tolerance)
    return Report(config.rm, " ".join(config.data), table, hygiene, changes, judge=rm.metrics(), errors=errors)


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


# --- serve ------------------------------------------------------------------------------------------------------------


def serve(args: Sequence[str]) -> int:
    """Serve until a signal stops it; a second signal cancels conversations in progress."""
    config = parse(RMServeConfig, "rm serve", args)
    from agentenv._util.http.access import AccessPolicy, read_token
    from agentenv.rewards.models.factory import open_scorer
    from agentenv.rewards.serving.server import ServeOptions, Shaping

    require_server("rm serve")
    for name in ("max_waiting", "max_items", "max_body_mb", "timeout_s"):
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            raise ConfigError(f"--{name}: expected a number above 0, got {getattr(config, name)!r}. Raise it.")
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port: expected a port, got {config.port}.")
    token, hosts = read_token(config.token_file, TOKEN_VARIABLE), config.allowed_hosts
    options = ServeOptions(
        access=AccessPolicy(config.host, token, hosts, without_token=("/health",), variable=TOKEN_VARIABLE),
        port=config.port,
        model=config.rm,
        shaping=Shaping(config.shift, config.scale, config.clip),
        max_waiting=config.max_waiting,
        max_items=min(1024, config.max_waiting) if config.max_items is None else config.max_items,
        max_body_bytes=config.max_body_mb << 20,
        timeout_s=config.timeout_s,
        grace_s=max(config.grace_s, 0.0),
    )
    scorer = open_scorer(config.rm, **config.model.options)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_serve(scorer, options))
    return 0


async def _serve(scorer: RewardScorer, options: ServeOptions) -> None:
    import resource  # missing on some systems

    from agentenv.rewards.serving.server import RewardServer

    with contextlib.suppress(ValueError, OSError):  # each conversation may need its own connection
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    stopped = asyncio.Event()
    server = RewardServer(scorer, options)

    def drain() -> str:
        stopped.set()
        return f"{server.waiting} conversation{'s' * (server.waiting != 1)}"

    try:
        async with server:
            _print(f"serving {server.url}/get_reward, model {options.model}")
            work = asyncio.ensure_future(_serve_until(stopped, server))
            with interruptible(drain, work, options.grace_s, _print, closing_s=15.0):
                await work
    finally:
        await scorer.close()


async def _serve_until(stopped: asyncio.Event, server: RewardServer) -> None:
    """Load the model, serve until the event is set, and close the server.

    Raises:
        AgentEnvError: the model cannot be loaded.
    """
    started = time.monotonic()
    loading = asyncio.ensure_future(server.load())
    stop = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        _print(f"ready after {time.monotonic() - started:.1f} s")
        await stop
    loading.cancel()
    await server.close()


def _print(line: str) -> None:
    sys.stderr.write(f"agentenv rm serve: {line}\n")
    sys.stderr.flush()


_COMMANDS: Commands = {
    "eval": (summary_of(RMEvalConfig), _eval),
    "check": (summary_of(RMCheckConfig), _check),
    "serve": (summary_of(RMServeConfig), serve),
    "compare": (summary_of(RMCompareConfig), _compare),
}
