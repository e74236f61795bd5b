"""Run the escape matrix at one level and print a report as JSON.

    python -m agentenv.sandbox.escapes landlock --cases read_canary,fork_bomb

The report has "cases", a list of [name, held, details]; "holes", the details of cases that did not hold; and
"excepted", the documented exceptions that occurred. Exit codes: 0 if every case held, 1 if not, 3 if the level is not
available; the report then has only "unavailable".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

from agentenv.sandbox.escapes.cases import EscapeCase
from agentenv.sandbox.escapes.run import all_cases, open_sandbox, run_matrix, swap_policies, verdicts
from agentenv.sandbox.escapes.world import plant_environment
from agentenv.sandbox.types import Isolation, SandboxUnavailable


async def _report(level: Isolation, cases: list[EscapeCase], jobs: int) -> dict[str, Any]:
    planted = plant_environment()
    os.environ.update(planted)
    started = time.monotonic()
    async with open_sandbox(level) as sandbox:
        outcomes = await run_matrix(sandbox, cases, planted, jobs=jobs)
    rows = verdicts(cases, outcomes, level)
    return {
        "uid": os.getuid(),
        "isolation": level,
        "cases": rows,
        "holes": {name: outcomes[name] for name, held, _ in rows if not held},
        "excepted": sorted(name for name, held, _ in rows if held and outcomes[name]),
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Run the matrix as the command line says and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentenv.sandbox.escapes", description="Run the escape matrix.")
    parser.add_argument("level", choices=[level.value for level in Isolation])
    parser.add_argument("--cases", default="", help="names of cases, separated by commas; default: all")
    parser.add_argument("--swap", action="store_true", help="run each case under the other policy")
    parser.add_argument("--jobs", type=int, default=4, help="number of cases that run concurrently")
    arguments = parser.parse_args()
    names = set(filter(None, arguments.cases.split(",")))
    cases = [case for case in all_cases() if not names or case.name in names]
    if arguments.swap:
        cases = swap_policies(cases)
    try:
        report = asyncio.run(_report(Isolation(arguments.level), cases, arguments.jobs))
    except SandboxUnavailable as error:
        report = {"unavailable": str(error)}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 3 if "unavailable" in report else int(bool(report["holes"]))


if __name__ == "__main__":
    sys.exit(main())
