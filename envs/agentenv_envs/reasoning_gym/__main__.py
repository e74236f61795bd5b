"""`python -m agentenv_envs.reasoning_gym --datasets chain_sum,countdown=2 --size 500 --out FILE.jsonl`: write rows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.cli.flags import parse
from agentenv.core.arguments import parse_json_object
from agentenv.errors import AgentEnvError, ConfigError
from agentenv_envs.reasoning_gym.data_only import CHANCE, EXECUTED, REPAIRED
from agentenv_envs.reasoning_gym.reward import INSTRUCTIONS, AnswerForm
from agentenv_envs.reasoning_gym.rows import Mixture, Split, dataset_names, make_rows, num_levels


@dataclass(frozen=True)
class RowsConfig:
    """Write rows of reasoning-gym's datasets for `agentenv run --env reasoning_gym --data FILE`."""

    datasets: str = "all"
    """Names, categories (see --list) or `all`, separated by commas; NAME=WEIGHT for another share than 1; then -NAME to
    exclude one."""
    size: int = 500
    """Total number of rows, divided by the weights."""
    seed: int = 0
    split: Split = "train"
    """train and eval never share a question, with any seeds; all is both."""
    out: str = "reasoning_gym.jsonl"
    """The file to write."""
    level: int | None = None
    """Difficulty in the datasets' own curricula, from 0. Datasets with fewer levels use their highest, those without
    any their defaults."""
    config: str = "{}"
    """JSON object with settings of a dataset by its name, such as {"chain_sum": {"min_terms": 3}}."""
    answer: AnswerForm = "auto"
    """The form in which the policy is told to answer: tag (also auto) or boxed. Use the same in --env_kwargs."""
    instruction: str | None = None
    """Text below every question instead of the default; empty for none."""
    max_chance: float = 0.66
    """Refuse a dataset of which one constant answer solves a larger share; exclude it from a category or `all`."""
    list: bool = False
    """Show the datasets by category, with known problems of each, and write nothing."""


def main(args: Sequence[str]) -> int:
    """Write the rows, or list the datasets; return the exit code."""
    config = parse(RowsConfig, "reasoning_gym", args)
    if config.list:
        for category, names in dataset_names().items():
            sys.stdout.write(f"{category} ({len(names)})\n")
            for name in names:
                facts = [f"levels 0..{most - 1}" if (most := num_levels(name)) else "no levels"]
                facts += [f"a constant answer solves {CHANCE[name]:.0%}"] if name in CHANCE else []
                facts += ["answers must be data"] * (name in EXECUTED)
                facts += [f"repaired: {REPAIRED[name]}"] if name in REPAIRED else []
                sys.stdout.write(f"  {name:27} {'; '.join(facts)}\n")
        return 0
    mixture = Mixture(
        _weights(config.datasets, config.max_chance),
        size=config.size,
        seed=config.seed,
        split=config.split,
        level=config.level,
        configs=parse_json_object("--config", config.config),
        instruction=INSTRUCTIONS[config.answer] if config.instruction is None else config.instruction,
        max_chance=config.max_chance,
    )
    for name in sorted(CHANCE.keys() & mixture.weights):
        _note(f"note: one constant answer solves {CHANCE[name]:.0%} of {name}; compare results with that.")
    out = Path(config.out).expanduser()
    if not out.parent.is_dir() or not out.name.endswith(".jsonl"):
        raise ConfigError(f"--out: expected a .jsonl file in an existing folder, got {config.out!r}. Change it.")
    count = 0
    partly = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with partly.open("w", encoding="utf-8") as file:
            for row in make_rows(mixture):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        partly.replace(out)
    finally:
        partly.unlink(missing_ok=True)
    _note(f"{count} rows of {len(mixture.weights)} datasets, split {config.split}: {out}")
    return 0


def _weights(text: str, max_chance: float) -> dict[str, float]:
    """Return names and weights; of a category, only datasets that pass `max_chance`."""
    groups = dataset_names()
    groups["all"] = [name for names in groups.values() for name in names]
    weights: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, weight = part.partition("=")
        try:
            share = float(weight or 1.0)
        except ValueError:
            raise ConfigError(f"--datasets: expected NAME=WEIGHT, got {part!r}. Fix it.") from None
        known = [other for other in groups.get(name, ()) if CHANCE.get(other, 0.0) <= max_chance]
        if excluded := sorted(set(groups.get(name, ())) - set(known)):
            _note(f"note: excluded (one constant answer solves more than {max_chance:.0%}): {', '.join(excluded)}")
        if name.startswith("-"):
            weights = {
                other: share for other, share in weights.items() if other not in groups.get(name[1:], [name[1:]])
            }
        else:
            weights |= dict.fromkeys(known if name in groups else [name], share)
    return weights


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AgentEnvError as error:
        _note(str(error))
        sys.exit(error.exit_code)
