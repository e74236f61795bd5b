"""Run the attacks at one level, and print the holes that they found as JSON.

    python -m tests.sandbox.escapes landlock --cases read_canary,fork_bomb

Documented exceptions of a level are not tried. Exit codes: 0 if every case held, 1 if not, 3 if the level is not
available; the report then has only "unavailable".
"""

import argparse
import asyncio
import json
import os
import sys

from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.types import Isolation, SandboxUnavailable
from tests.sandbox.escapes.run import all_cases, run_case
from tests.sandbox.escapes.world import plant_environment


async def holes(level, names, but):
    planted = plant_environment()
    os.environ.update(planted)
    cases = [each for each in all_cases() if level not in each.excepted and each.name not in but]
    cases = [each for each in cases if not names or each.name in names]
    async with LocalSandbox(isolation=level) as sandbox:
        outcomes = {case.name: await run_case(sandbox, case, planted) for case in cases}
    return {name: problems for name, problems in outcomes.items() if problems}


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.sandbox.escapes")
    parser.add_argument("level", choices=["namespaces", "landlock", "uid"])
    parser.add_argument("--cases", default="", help="names of cases, separated by commas; default: all")
    parser.add_argument("--but", default="", help="names of cases that are left out")
    asked = parser.parse_args()
    names, but = (set(filter(None, each.split(","))) for each in (asked.cases, asked.but))
    try:
        report = {"uid": os.getuid(), "holes": asyncio.run(holes(Isolation(asked.level), names, but))}
    except SandboxUnavailable as error:
        report = {"unavailable": str(error)}
    print(json.dumps(report, indent=1))
    return 3 if "unavailable" in report else int(bool(report["holes"]))


if __name__ == "__main__":
    sys.exit(main())
