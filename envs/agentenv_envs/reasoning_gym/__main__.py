"""`python -m agentenv_envs.reasoning_gym --datasets chain_sum,countdown=2 --size 500 --out FILE.jsonl`: makes rows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.cli_flags import parse
from agentenv.config import parse_json_object
from agentenv.errors import AgentEnvError, ConfigError
from agentenv_envs.reasoning_gym.answers import INSTRUCTIONS, AnswerForm
from agentenv_envs.reasoning_gym.hazards import CHANCE, EXECUTED, REPAIRED
from agentenv_envs.reasoning_gym.rows import Mixture, Split, dataset_names, make_rows, num_levels


@dataclass(frozen=True)
class RowsConfig:
    """Make rows of reasoning-gym's datasets for `agentenv run --env reasoning_gym --data FILE`."""

    datasets: str = "all"
    """Names, categories (see --list) or `all`, separated by commas; NAME=WEIGHT for another share than 1, and then
    -NAME to leave one out."""
    size: int = 500
    """Rows in all, shared by the weights."""
    seed: int = 0
    split: Split = "train"
    """train and eval never share a question, whatever the seeds; all is both."""
    out: str = "reasoning_gym.jsonl"
    """File to write."""
    level: int | None = None
    """Difficulty by the datasets' own curricula, from 0; those with fewer levels get their highest, those without any
    stay as they are."""
    config: str = "{}"
    """JSON object: settings of a dataset by its name, as {"chain_sum": {"min_terms": 3}}."""
    answer: AnswerForm = "auto"
    """How the policy is told to answer: tag (also auto) or boxed. Use the same in --env_kwargs."""
    instruction: str | None = None
    """Said under every question in place of that; empty for nothing."""
    max_chance: float = 0.66
    """A dataset of which one constant answer solves a larger share is refused, or left out of a category or `all`."""
    list: bool = False
    """Show the datasets by category, with what is to be known of each, and make nothing."""


def main(args: Sequence[str]) -> int:
    """Make the rows, or list the datasets; the exit code."""
    config = parse(RowsConfig, "reasoning_gym", args)
    if config.list:
        sys.stdout.write(_listing())
        return 0
    mixture = _mixture(config)
    for name in sorted(CHANCE.keys() & mixture.weights):
        _say(f"note: of {name} one constant answer solves {CHANCE[name]:.0%}; compare with that.")
    out = Path(config.out).expanduser()
    if not out.parent.is_dir() or not out.name.endswith(".jsonl"):
        raise ConfigError(f"--out: expected a .jsonl file in a folder that exists, got {config.out!r}. Change it.")
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
    _say(f"{count} rows of {len(mixture.weights)} datasets, split {config.split}: {out}")
    return 0


def _mixture(config: RowsConfig) -> Mixture:
    return Mixture(
        _weights(config.datasets, config.max_chance),
        size=config.size,
        seed=config.seed,
        split=config.split,
        level=config.level,
        configs=parse_json_object("--config", config.config),
        instruction=INSTRUCTIONS[config.answer] if config.instruction is None else config.instruction,
        max_chance=config.max_chance,
    )


def _weights(text: str, max_chance: float) -> dict[str, float]:
    """Names and weights; of a category, those datasets that chance does not rule out."""
    groups = dataset_names()
    groups["all"] = [name for names in groups.values() for name in names]
    weights: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, weight = part.partition("=")
        try:
            share = float(weight or 1.0)
        except ValueError:
            raise ConfigError(f"--datasets: expected NAME=WEIGHT, got {part!r}. Correct it.") from None
        known = [other for other in groups.get(name, ()) if CHANCE.get(other, 0.0) <= max_chance]
        if left_out := sorted(set(groups.get(name, ())) - set(known)):
            _say(f"note: left out, as one constant answer solves more than {max_chance:.0%}: {', '.join(left_out)}")
        if name.startswith("-"):
            weights = {
                other: share for other, share in weights.items() if other not in groups.get(name[1:], [name[1:]])
            }
        else:
            weights |= dict.fromkeys(known if name in groups else [name], share)
    return weights


def _listing() -> str:
    lines = []
    for category, names in dataset_names().items():
        lines.append(f"{category} ({len(names)})")
        for name in names:
            facts = [f"levels 0..{most - 1}" if (most := num_levels(name)) else "no levels"]
            facts += [f"a constant solves {CHANCE[name]:.0%}"] if name in CHANCE else []
            facts += ["answers must be data"] * (name in EXECUTED)
            facts += [f"repaired: {REPAIRED[name]}"] if name in REPAIRED else []
            lines.append(f"  {name:27} {'; '.join(facts)}")
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AgentEnvError as error:
        _say(str(error))
        sys.exit(error.exit_code)
