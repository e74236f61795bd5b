"""What `run`, `check` and `audit` find in environments of other libraries: the table in docs/interop/hub-audit.md.

    python benchmarks/hub_audit.py                              # every row; each library in its folder, as the tests
    python benchmarks/hub_audit.py gem:game:Sudoku-v0-easy      # some rows
    python benchmarks/hub_audit.py --out FOLDER                 # and the whole reports, as JSON

`make test-peers` installs the libraries into folders of the environment. Each command has its defaults, except that
`run` plays 4 tasks with the model tiny-math, and `audit` only 2 of RushHour, whose boards take a second each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "tests/peers/inspect_tasks/small.py"
ENVIRONMENTS = (
    *(f"textarena:{game}-v0" for game in ("Mastermind", "Blackjack", "RushHour", "GuessTheNumber", "Countdown")),
    *(f"gem:game:{game}-v0-easy" for game in ("GuessTheNumber", "Mastermind", "Minesweeper", "Sudoku", "TowerofHanoi")),
    *(f"textworld:{game}" for game in ("tw-simple", "tw-coin_collector", "tw-treasure_hunter", "tw-cooking", "custom")),
    *(f"inspect:{SMALL}@{task}" for task in ("arithmetic", "capitals", "guessing", "adding", "reacting")),
)
SLOW = {"textarena:RushHour-v0": ("--tasks", "2")}
"""More flags of `audit` where an episode takes a second."""
RUN = ("--model", "tiny-math", "--engine", "hf", "--limit", "4", "--max_tokens", "64", "--progress", "none", "--json")


def main(args: Sequence[str]) -> int:
    """Print a row for each environment; return 1 if a command printed no JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", default=ENVIRONMENTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(args)
    failed = False
    sys.stdout.write("| environment | `run` | `check` | `audit` |\n|---|---|---|---|\n")
    for env in options.envs:
        name = env.replace(f"{ROOT}/", "")
        reports = {
            "run": _report(env, "run", "--env", env, *RUN),
            "check": _report(env, "check", env, "--json"),
            "audit": _report(env, "audit", env, "--json", *SLOW.get(env, ())),
        }
        failed = failed or None in reports.values()
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name.replace(':', '_').replace('/', '_')}.json").write_text(
                json.dumps(reports, indent=1) + "\n"
            )
        sys.stdout.write(
            f"| {name} | {_run(reports['run'])} | {_check(reports['check'])} | {_audit(reports['audit'])} |\n"
        )
        sys.stdout.flush()
    return int(failed)


def _report(env: str, *words: str) -> Any:
    """Return the last JSON that a command prints, beside what the library prints, or None."""
    folder = Path(sys.prefix) / env.partition(":")[0]
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs"), str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "agentenv.cli", *words]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as cwd:
        done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    start = max((number for number, line in enumerate(lines) if line == "{" or line.startswith('{"')), default=0)
    try:
        return json.loads("\n".join(lines[start:]))
    except ValueError:
        return None


def _run(report: Any) -> str:
    return "no result" if report is None else f"{report['metrics']['num_rewarded']} of 4 rewarded"


def _check(report: Any) -> str:
    if report is None:
        return "no result"
    broken = [f"`{one['name']}`" for one in report["properties"] if one["state"] in ("broken", "outside")]
    return ", ".join(broken) or "passes"


def _audit(report: Any) -> str:
    if report is None:
        return "no result"
    found = [f"{one['severity']} `{one['id']}`" for one in report["findings"] if one["severity"] != "note"]
    return ", ".join(found) or "passes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
