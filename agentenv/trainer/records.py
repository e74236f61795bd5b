"""The run directory of a training: opened alone, gone on with, or begun anew where there is nothing to go on from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError
from agentenv.metrics import Tally
from agentenv.opening import code_digest
from agentenv.record import CONFIG, TRAJECTORIES, RunWriter, read_config, write_json
from agentenv.serialize import jsonable
from agentenv.trainer.checkpoint import Checkpoints
from agentenv.trainer.config import TrainConfig
from agentenv.trainer.journal import METRICS, Journal
from agentenv.trainer.trackers import open_trackers

FIXED_ON_RESUME = (
    "pretrain", "critic_pretrain", "agent_func_path", "env", "env_kwargs", "remote_rm_url", "n_samples_per_prompt",
    "rollout_batch_size", "train_batch_size", "seed", "advantage_estimator", "lora_rank", "lora_alpha",
    "target_modules",
)  # fmt: skip
"""Flags that a training keeps when it goes on from a checkpoint; all others may change."""
UNTOLD = ("load_checkpoint", "save_path", "progress", "log_level")
"""Those of which a change is not told: they say nothing of what is learned."""


@dataclass(frozen=True, slots=True)
class Records:
    """Where a training is written down."""

    journal: Journal
    checkpoints: Checkpoints
    samples: RunWriter
    """Gets --save_samples episodes of each train step."""
    folder: Path
    newest: Path | None = None
    """The checkpoint to go on from."""


@contextlib.contextmanager
def open_records(
    config: TrainConfig, out: Path, resolved: Mapping[str, str], note: Callable[[str], None]
) -> Iterator[Records]:
    """Open `out`, alone in it, at the checkpoint to go on from; `resolved` is what flags alone do not say of the data.

    Raises:
        ConfigError: a training is there and is not to be gone on with, or it is another.
    """
    flags = config.to_dict()
    stored = {"flags": flags, "resolved": dict(resolved), "agent_file": code_digest(config.episodes)}
    free = ["agent_file", *(f"flags.{name}" for name in flags if name not in FIXED_ON_RESUME)]
    if (out / METRICS).exists() and not config.load_checkpoint:
        raise ConfigError(
            f"{out}: expected no training there, got one. Go on with it with --load_checkpoint, or use another "
            "--save_path."
        )

    def opened() -> RunWriter:
        """The directory's episodes, of which nobody else writes any."""
        begun = (out / METRICS).exists()
        return RunWriter.open(
            out, stored, resume=config.load_checkpoint, may_differ=free, tally=Tally(1), begun=begun
        )  # fmt: skip

    with contextlib.ExitStack() as stack:
        samples = stack.enter_context(opened())
        training = jsonable({name: flags[name] for name in FIXED_ON_RESUME} | dict(resolved))
        folder = Path(config.ckpt_path) if config.ckpt_path else out / "checkpoints"
        checkpoints = Checkpoints(folder, keep=config.max_ckpt_num, facts=training)
        newest = checkpoints.newest()
        if newest is not None:
            _check(config, newest, training)
            _tell_changes(out, jsonable(stored), checkpoints.step_of(newest), note)
        begins_again = config.load_checkpoint and newest is None
        if begins_again:
            samples.close()
            _set_aside(out, checkpoints, note)
            samples = stack.enter_context(opened())
        step = checkpoints.step_of(newest) if newest is not None else None
        trackers = open_trackers(config, out, resume_step=-1 if begins_again else step)
        journal = Journal(out, trackers=trackers, resume_step=step, logging_steps=config.logging_steps)
        stack.enter_context(contextlib.closing(journal))
        yield Records(journal, checkpoints, samples, out, newest)


def _check(config: TrainConfig, newest: Path, training: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint without being asked to, and from another training's."""
    if not config.load_checkpoint:
        raise ConfigError(
            f"--ckpt_path: expected no checkpoints, got some in {newest.parent}. "
            "Go on from them with --load_checkpoint, or name another folder."
        )
    facts = Checkpoints.facts_of(newest)
    changed = [
        f"{name} was {facts[name]!r:.80}, is now {now!r:.80}"
        for name, now in training.items()
        if name in facts and facts[name] != now
    ]
    if changed:
        raise ConfigError(
            f"{newest}: expected a checkpoint of this training, got one of another: {'; '.join(changed)}. Take that "
            "back, or begin anew with another --ckpt_path."
        )


def _tell_changes(out: Path, now: Mapping[str, Any], step: int, note: Callable[[str], None]) -> None:
    """Say which flags are not those of the session before, and make config.json say those in use and what changed.

    Raises:
        ConfigError: it cannot be written.
    """
    document = read_config(out)
    was = document["config"]
    before: dict[str, Any] = was.get("flags", {})
    changed = {
        name: [before[name], value]
        for name, value in now["flags"].items()
        if name in before and before[name] != value and name not in UNTOLD
    }
    if was.get("agent_file", now["agent_file"]) != now["agent_file"]:
        changed["agent_file"] = [was["agent_file"], now["agent_file"]]
    if not changed:
        return
    said = ", ".join(
        "the agent's file" if name == "agent_file" else f"--{name} {old} → {new}"
        for name, (old, new) in changed.items()
    )
    note(f"changed on resume, from step {step + 1} on: {said}")
    history = [*document.get("changed", []), {"from_step": step + 1, "was_and_is": changed}]
    try:
        write_json(out / CONFIG, document | {"config": now, "changed": history})
    except OSError as error:
        raise ConfigError(f"{out / CONFIG}: expected to be written, got {error}. Make room, or mend it.") from error


def _set_aside(out: Path, checkpoints: Checkpoints, note: Callable[[str], None]) -> None:
    """Make place for a training that was killed before its first checkpoint, or lost them; nothing of it is deleted."""
    damaged = checkpoints.num_damaged
    found = f"none in {checkpoints.folder}" + (f" but {damaged} damaged ones" if damaged else "")
    said = f"--load_checkpoint: expected a checkpoint to go on from, got {found}; beginning at step 1."
    names = [name for name in (METRICS, TRAJECTORIES) if (out / name).exists() and (out / name).stat().st_size]
    number = 1
    while any((out / f"{name}.{number}").exists() for name in names):
        number += 1
    for name in names:
        (out / name).rename(out / f"{name}.{number}")
    kept = ", ".join(f"{name}.{number}" for name in names)
    note(said + (f" What an earlier attempt wrote is kept in {out}: {kept}." if kept else ""))
