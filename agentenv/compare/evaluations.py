"""The evaluations of a training, from its `steps.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentenv.core.types import StopReason
from agentenv.errors import ConfigError
from agentenv.runs.metrics import Summary
from agentenv.runs.records.steps import read_steps


def split_step(source: str) -> tuple[str, int | None]:
    """Return the path and the train step of `RUN@STEP`; the whole and None if it names a path, or no step."""
    path, _, step = source.rpartition("@")
    return (path, int(step)) if path and step.isdigit() and not Path(source).exists() else (source, None)


def first_and_last(path: str) -> tuple[str, str]:
    """Return the first and the last evaluation of a training, as `RUN@STEP`.

    Raises:
        ConfigError: there are fewer than two.
    """
    steps = list(read_steps(Path(path), "eval"))
    if len(steps) < 2:
        raise ConfigError(
            f"{path}: expected two runs, or a training with two evaluations, got one run with {len(steps)}. "
            "Name a second run."
        )
    return f"{path}@{steps[0]}", f"{path}@{steps[-1]}"


def evaluation_at(folder: Path, step: int | None) -> Mapping[str, Any] | None:
    """Return the evaluation at a train step, or the last one for None; None without a step and an evaluation.

    Raises:
        ConfigError: the step has no evaluation.
    """
    found = read_steps(folder, "eval")
    if step is None:
        return found[max(found)] if found else None
    if step not in found:
        steps = ", ".join(map(str, found)) or "none"
        raise ConfigError(
            f"{folder}@{step}: expected a train step with an evaluation, got those of steps {steps}. Choose one."
        )
    return found[step]


def evaluated(line: Mapping[str, Any]) -> Iterator[Summary]:
    """Yield the episodes of an evaluation; their `group_id` is the task."""
    names = line["episode_fields"]
    for group in line["groups"]:
        for row in group["episodes"]:
            facts = dict(zip(names, row, strict=True))
            stop = facts["stop_reason"]
            yield Summary(
                facts["episode_id"],
                group["group_id"],
                reward=facts["reward"],
                score=facts["score"],
                stop_reason=StopReason(stop) if stop else None,
                error_kind=facts["error"],
                num_action_tokens=facts["action_tokens"],
                info_last=facts["info"],
            )
