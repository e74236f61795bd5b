"""Open the run directory of a training run: new, resumed, or restarted if no checkpoint exists."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv._util.disk import write_json
from agentenv._util.jsonable import jsonable
from agentenv.errors import ConfigError
from agentenv.runs.metrics import Tally
from agentenv.runs.prepare import changed_files, code_digests
from agentenv.runs.records.directory import CONFIG, RunWriter, describe_change, read_config
from agentenv.runs.records.index import TRAJECTORIES
from agentenv.runs.records.steps import STEPS, cut_steps
from agentenv.runs.records.token_stats import TOKEN_STATS
from agentenv.runs.records.tokenizer import EVAL
from agentenv.runs.trackers import Tracked, open_trackers
from agentenv.training.best_model import BEST, BestModel, EarlyStop
from agentenv.training.checkpoint import Checkpoints
from agentenv.training.config import TrainConfig
from agentenv.training.logs.journal import METRICS, Journal, read_metrics
from agentenv.training.logs.samples import cut_evaluations, cut_samples

FIXED_ON_RESUME = (
    "model", "critic_pretrain", "agent_func_path", "env", "env_kwargs", "remote_rm_url", "group_reward",
    "reference_key", "incomplete_groups", "n", "rollout_batch_size", "train_batch_size", "seed",
    "advantage_estimator", "lora_rank", "lora_alpha", "target_modules",
)  # fmt: skip
"""Flags that must not change when a training run is resumed."""
UNREPORTED = ("resume", "out", "progress", "log_level", "json")
"""Flags whose change is not reported, because they do not affect learning."""


@dataclass(frozen=True, slots=True)
class Records:
    """The journal, checkpoints and samples of a training run."""

    journal: Journal
    checkpoints: Checkpoints
    samples: RunWriter
    """Stores --save_samples episodes of each train step."""
    best: BestModel
    """Keeps the model with the best evaluation."""
    folder: Path
    newest: Path | None = None
    """The checkpoint to resume from."""


@contextlib.contextmanager
def open_records(
    config: TrainConfig, out: Path, resolved: Mapping[str, str], note: Callable[[str], None]
) -> Iterator[Records]:
    """Open `out` with a lock, at the checkpoint to resume from. `resolved` identifies data that flags do not determine.

    Raises:
        ConfigError: the folder holds a training run without --resume, or another training run.
    """
    flags = config.to_dict()
    stored = {
        "flags": flags,
        "resolved": dict(resolved),
        "agent_file": code_digests(config.episodes, config.curriculum),
    }
    free = ["agent_file", *(f"flags.{name}" for name in flags if name not in FIXED_ON_RESUME)]
    lines = [out / name for name in (METRICS, STEPS, TOKEN_STATS)]
    if not config.resume and any(each.exists() and each.stat().st_size for each in lines):
        raise ConfigError(f"{out}: expected no training there, got one. Resume it with --resume, or use another --out.")

    def opened() -> RunWriter:
        is_started = config.resume and (out / METRICS).exists()  # else it ended before its first step
        return RunWriter.open(out, stored, resume=config.resume, may_differ=free, tally=Tally(1), is_started=is_started)

    with contextlib.ExitStack() as stack:
        samples = stack.enter_context(opened())
        if samples.report.damage:
            note(f"{out}: {samples.report.damage}")
        training = jsonable({name: flags[name] for name in FIXED_ON_RESUME} | dict(resolved))
        folder = Path(config.ckpt_path) if config.ckpt_path else out / "checkpoints"
        checkpoints = Checkpoints(folder, keep=config.max_ckpt_num, facts=training)
        newest = checkpoints.newest()
        if newest is not None:
            _check(config, newest, training)
            _report_changes(out, jsonable(stored), checkpoints.step_of(newest), note)
        is_restart = config.resume and newest is None
        if is_restart:
            samples.close()
            _set_aside(out, checkpoints, note)
            samples = stack.enter_context(opened())
        step = checkpoints.step_of(newest) if newest is not None else None
        if step is not None:
            for name in (STEPS, TOKEN_STATS):
                cut_steps(out / name, step)
            cut_evaluations(out, step)
            samples.close()
            cut_samples(out)
            samples = stack.enter_context(opened())
        tracked = Tracked(config.trackers, flags, out, "agentenv_train")
        trackers = open_trackers(tracked, resume_step=-1 if is_restart else step)
        journal = Journal(out, trackers=trackers, resume_step=step, logging_steps=config.logging_steps)
        stack.enter_context(contextlib.closing(journal))
        early_stop = EarlyStop.parse(config.early_stop) if config.early_stop else None
        best = BestModel(out, read_metrics(out), early_stop, note)
        yield Records(journal, checkpoints, samples, best, out, newest)


def _check(config: TrainConfig, newest: Path, training: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkpoint exists without --resume, or belongs to another training run."""
    if not config.resume:
        raise ConfigError(
            f"--ckpt_path: expected no checkpoints, got some in {newest.parent}. "
            "Resume from them with --resume, or name another folder."
        )
    facts = Checkpoints.facts_of(newest)
    changed = [
        f"{name} {describe_change(facts[name], now)}"
        for name, now in training.items()
        if name in facts and facts[name] != now
    ]
    if changed:
        raise ConfigError(
            f"{newest}: expected a checkpoint of this training run, got one of another: {'; '.join(changed)}. Undo the "
            "change, or start again with another --ckpt_path."
        )


def _report_changes(out: Path, now: Mapping[str, Any], step: int, note: Callable[[str], None]) -> None:
    """Report flags that changed since the last session, and store them in config.json.

    Raises:
        ConfigError: config.json cannot be written.
    """
    document = read_config(out)
    was = document["config"]
    before = was.get("flags", {})
    changed = {
        name: [before[name], value]
        for name, value in now["flags"].items()
        if name in before and before[name] != value and name not in UNREPORTED
    }
    if files := changed_files(was.get("agent_file"), now["agent_file"]):
        changed["agent_file"] = [was["agent_file"], now["agent_file"]]
    if not changed and was.get("agent_file") == now["agent_file"]:
        return
    if changed:
        changes = ", ".join(
            ", ".join(files) if name == "agent_file" else f"--{name} {old} → {new}"
            for name, (old, new) in changed.items()
        )
        note(f"changed on resume, from step {step + 1} on: {changes}")
        document["changed"] = [*document.get("changed", []), {"from_step": step + 1, "was_and_is": changed}]
    try:
        write_json(out / CONFIG, document | {"config": now})
    except OSError as error:
        raise ConfigError(f"{out / CONFIG}: expected a writable file, got {error}. Make room, or fix it.") from error


def _set_aside(out: Path, checkpoints: Checkpoints, note: Callable[[str], None]) -> None:
    """Rename the files of a training without a checkpoint, so that it can start again. Nothing is deleted."""
    damaged = checkpoints.num_damaged
    found = f"none in {checkpoints.folder}" + (f" but {damaged} damaged ones" if damaged else "")
    message = f"--resume: expected a checkpoint, got {found}; starting at step 1."
    names = [
        name
        for name in (METRICS, TRAJECTORIES, STEPS, TOKEN_STATS, BEST, EVAL)
        if (out / name).exists() and (out / name).stat().st_size
    ]
    number = 1
    while any((out / f"{name}.{number}").exists() for name in names):
        number += 1
    for name in names:
        (out / name).rename(out / f"{name}.{number}")
    kept = ", ".join(f"{name}.{number}" for name in names)
    note(message + (f" Files of the earlier attempt are kept in {out}: {kept}." if kept else ""))
