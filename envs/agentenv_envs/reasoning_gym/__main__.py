"""`python -m agentenv_envs.reasoning_gym --datasets chain_sum,countdown=2 --size 500 --out FILE.jsonl`: write rows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agentenv.cli.flags import parse
from agentenv.errors import AgentEnvError, ConfigError
from agentenv_envs.reasoning_gym.data_only import CHANCE, EXECUTED, REPAIRED
from agentenv_envs.reasoning_gym.rows import RowsConfig, dataset_names, make_rows, num_levels


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
    out = Path(config.out).expanduser()
    if not out.parent.is_dir() or not out.name.endswith(".jsonl"):
        raise ConfigError(f"--out: expected a .jsonl file in an existing folder, got {config.out!r}.")
    weights = _weights(config.datasets, config.max_chance)
    rows = make_rows(weights, config)
    for name in sorted(CHANCE.keys() & weights):
        _note(f"note: one constant answer solves {CHANCE[name]:.0%} of {name}; compare results with that.")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    _note(f"{len(rows)} rows of {len(weights)} datasets, split {config.split}: {out}")
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
            raise ConfigError(f"--datasets: expected NAME=WEIGHT, got {part!r}.") from None
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
