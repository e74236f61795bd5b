"""The long tail within a budget of time: `python -m tests.long_tail --seconds 1200`, as `.ci/run` does.

First come the tests of what the change touches, by the newest commit that touches it; then the others, in an order that
follows from the commit, so that each gets its turn. What fails runs again alone, twice at most: only what fails each
time makes the run fail. More than 12 failures end it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

MAX_FAILURES = 12
AGAIN_S = 900
"""Seconds after the end of the budget in which tests begin to run again."""
MAX_COMMITS = 40
"""The change, where git does not know what landed last."""
NUM_PROCESSES = 4  # tests of servers and clusters mostly wait
PLAN = "AGENTENV_LONG_TAIL"
"""Names the file with the order of the test files and the moment after which no test begins."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "--timeout", "900"]
ROOMS = {
    "gymnasium_env": {"gym"}, "util": {"_util"}, "with_openrlhf": {"interop"}, "with_molt": {"interop"},
    "with_verl": {"interop"}, "peers": {"interop"}, "faults": {"runs", "training", "engines"},
    "contract": {"interop", "episode"}, "test_docs.py": {"docs"}, "test_examples.py": {"examples", "agent_funcs"},
}  # fmt: skip
"""What the tests in a folder are about, where it has another name."""


# --- the order --------------------------------------------------------------------------------------------------------


def room_of(path: str) -> str:
    """Return the room of a source file: a folder of `agentenv`, or one beside it; `tests/ROOM` of what tests share."""
    first, _, rest = path.partition("/")
    if first == "agentenv":
        return rest.partition("/")[0]
    if first == "tests":
        return "" if Path(path).name.startswith("test_") else f"tests/{rest.partition('/')[0]}"
    return {"view_src": "view", "README.md": "docs", "benchmarks": ""}.get(first, first if rest else "")


def order_of_files(files: Iterable[str], commits: list[list[str]], seed: str) -> list[str]:
    """Return test files in the order in which they run.

    Args:
        files: Paths of test files from the root of the repository.
        commits: The paths that each commit of the change touches, the newest commit first.
        seed: Decides the order of files that no commit touches, or the same one.
    """
    shuffled = sorted(files)
    random.Random(seed).shuffle(shuffled)
    touched = [set(paths) for paths in commits]
    rooms = [{room_of(path) for path in paths} for paths in commits]

    def age(file: str) -> tuple[int, bool]:
        folder = file.split("/")[1]
        own = {f"tests/{folder}", *ROOMS.get(folder, {folder})}
        ages = (index for index, paths in enumerate(touched) if file in paths or own & rooms[index])
        newest = next(ages, len(commits))
        return newest, newest == len(commits) or file not in touched[newest]

    return sorted(shuffled, key=age)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def changed_by_commit() -> list[list[str]]:
    """Return the paths that each commit since the last landed one touches, the newest commit first."""
    landed = git("merge-base", "HEAD", "origin/HEAD")
    since = [f"{landed}..HEAD"] if landed not in ("", git("rev-parse", "HEAD")) else [f"-{MAX_COMMITS}", "HEAD"]
    # Without the first commit, which has all files, as the last one that a shallow clone has.
    shown = git("log", "--min-parents=1", "--format=%x00", "--name-only", "--no-renames", *since)
    return [commit.split("\n") for commit in shown.split("\0")[1:]]


# --- in pytest: `-p tests.long_tail` ----------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tail(Path(os.environ[PLAN])))


class Tail:
    """The order, the end, and what ran: hooks of pytest, in each process."""

    def __init__(self, path: Path) -> None:
        plan = json.loads(path.read_text())
        self.rank = {file: place for place, file in enumerate(plan["files"])}
        self.until, self.report, self.stop = plan["until"], path.with_name("report.json"), path.with_name("stop")
        self.collected: set[str] = set()
        self.ran: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put files into the order of the plan; files beside it come last."""
        items.sort(key=lambda item: self.rank.get(item.nodeid.partition("::")[0], len(self.rank)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Begin no test when the time is over, or when too many have failed."""
        return True if time.time() > self.until or self.stop.exists() else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of each test, and end what has too many failures."""
        worse = ("passed", "skipped", "failed")
        self.ran[report.nodeid] = max(report.outcome, self.ran.get(report.nodeid, "passed"), key=worse.index)
        if report.failed and list(self.ran.values()).count("failed") > MAX_FAILURES:
            self.stop.touch()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self.report.write_text(json.dumps({"collected": len(self.collected), "ran": self.ran}))


# --- the command ------------------------------------------------------------------------------------------------------


def run_once(folder: Path, files: list[str], until: float, *arguments: str) -> tuple[int, dict]:
    """Run pytest, and return its exit code and what the plugin reports."""
    report, plan = folder / "report.json", folder / "plan.json"
    report.unlink(missing_ok=True)
    plan.write_text(json.dumps({"files": files, "until": until}))
    sys.stdout.flush()
    command = [*PYTEST, "-p", "tests.long_tail", *arguments]
    done = subprocess.run(command, env={**os.environ, PLAN: str(plan)}, check=False)
    return done.returncode, json.loads(report.read_text()) if report.exists() else {"collected": 0, "ran": {}}


def run(seconds: float, log: str) -> int:
    """Run the long tail, and what failed again; return the exit code."""
    commits = changed_by_commit()
    files = git("ls-files", "tests/test_*.py", "tests/**/test_*.py").splitlines()
    ordered = order_of_files(files, commits, git("rev-parse", "HEAD"))
    print(f"the long tail: {seconds:.0f} s; the change has {len(commits)} commits; first {', '.join(ordered[:3])}")
    many = [
        "-n", str(NUM_PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder", "-m", "long or slow",
        "--durations", "40",
    ]  # fmt: skip
    until = time.time() + seconds
    with tempfile.TemporaryDirectory() as folder:
        code, report = run_once(Path(folder), ordered, until, *many)
        failed = [name for name, outcome in report["ran"].items() if outcome == "failed"]
        if len(failed) > MAX_FAILURES or code != bool(failed):  # or an error beside the tests
            return finish(report, [], failed or [f"pytest, with exit code {code}"], log)
        alone = [name for name in failed if passes_alone(Path(folder), name, until + AGAIN_S)]
    return finish(report, alone, [name for name in failed if name not in alone], log)


def passes_alone(folder: Path, name: str, until: float) -> bool:
    """Return True if a test that failed passes with nothing beside it, in one of two tries."""
    for _ in range(2):
        print(f"\nagain, alone: {name}")
        code, report = run_once(folder, [], until, name)
        if code == 0 and report["ran"].get(name) == "passed":
            return True
    return False


def finish(report: dict, alone: list[str], failed: list[str], log: str) -> int:
    """Print what ran, and the line that counts the tests, together with those of `make test`; return the exit code."""
    outcomes = list(report["ran"].values())
    print(f"\nthe long tail: {len(outcomes):,} of {report['collected']:,} tests ran")
    for name in alone:
        print(f"passes alone: {name}")
    for name in failed:
        print(f"FAILED: {name}")
    passed, skipped = outcomes.count("passed") + len(alone), outcomes.count("skipped")
    fast = (re.findall(r"(\d+) passed(?:, (\d+) skipped)?.* in [\d.]+s", Path(log).read_text()) if log else []) or [
        (0, 0)
    ]
    passed, skipped = passed + int(fast[-1][0]), skipped + int(fast[-1][1] or 0)
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, required=True, help="no test begins later")
    parser.add_argument("--log", default="", help="the output of `make test`, whose counts are added")
    given = parser.parse_args()
    sys.exit(run(given.seconds, given.log))
