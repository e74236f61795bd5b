"""R4: pytest in the interpreter that imports the solution. What it says is evidence; the label says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from agentenv.errors import ConfigError
from agentenv.sandbox.grading._bench import Bench, inside, shortened, verdict_of
from agentenv.sandbox.grading._codec import CodecError, dump_line, parse_line
from agentenv.sandbox.grading.decoys import Disguised, disguise
from agentenv.sandbox.grading.results import TestResult, Verdict
from agentenv.sandbox.grading.suites import PytestSuite
from agentenv.sandbox.types import ExecResult, Status

_CONFIGURATION = {
    ".coveragerc", ".pytest.ini", ".pytest.toml", "conftest.py", "pyproject.toml", "pytest.ini", "pytest.toml",
    "setup.cfg", "sitecustomize.py", "tox.ini", "usercustomize.py",
}  # fmt: skip
_CONFIG_FILE = "agentenv-pytest.ini"
_NO_SHADOWS = "sys.path = [path for path in sys.path if path not in ('', '.', os.getcwd())]"
"""No file of the policy's is imported in the place of a library's."""
_PHASES = ("setup", "call", "teardown")


@dataclass(slots=True)
class _Reports:
    """What pytest reported, or what wrote in its place."""

    phases: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    """Node id to phase to (outcome, text)."""
    collection: str = ""
    exit_code: int | None = None
    signals: tuple[str, ...] = ()
    begun: bool = False
    """Whether pytest came as far as to the tests; what happened before is the sandbox's."""
    broken: str = ""


async def grade_pytest(bench: Bench, code: str, suite: PytestSuite) -> list[TestResult]:
    """A verdict per node id, the visible ones first; the two kinds never share a process."""
    results: list[TestResult] = []
    for visible, nodes in ((True, suite.visible), (False, suite.hidden)):
        failed = {result.verdict for result in results} - {Verdict.PASSED}
        if bench.stop_on_fail and failed:
            verdict = Verdict.INFRA if Verdict.INFRA in failed else Verdict.SKIPPED
            results += [TestResult(node, visible, verdict) for node in nodes]
        elif nodes:
            results += await _graded(bench, code, suite=suite, nodes=nodes, visible=visible)
    return results


async def _graded(
    bench: Bench, code: str, *, suite: PytestSuite, nodes: Sequence[str], visible: bool
) -> list[TestResult]:
    """The verdicts of one run of pytest."""
    trusted, names, decoys = _tests(suite, nodes)
    files = {**_kept(bench, suite), suite.solution: code.encode(errors="replace"), **trusted}
    request = {
        "path": _pytest_path(),
        "options": [
            "-q", "--tb=short", "--capture=sys", "--import-mode=importlib", "--rootdir=.", f"-c={_CONFIG_FILE}",
            "-p", "no:cacheprovider", *([] if _own_conftest(suite) else ["--noconftest"]),
        ],
        "solution": suite.solution,
        "files": sorted({node.split("::")[0] for node in nodes}),
        "nodes": sorted([*names.values(), *decoys]),
    }  # fmt: skip
    program = inside("_codec.py", "_serve.py", "_pytest.py", entry="run_pytest()", first=_NO_SHADOWS)
    execution = await bench.run(program, stdin=dump_line(request), files=files, fetch=tuple(trusted), channel=True)
    reports = _read_reports(execution.channel)
    bench.signals.update(reports.signals)
    whole = _whole(bench, reports, execution, trusted=trusted, decoys=decoys)
    results = []
    for node in nodes:
        verdict, detail = whole or _verdict(bench, reports, execution, node=names[node])
        text = detail.replace(names[node].split("::")[-1].split("[")[0], node.split("::")[-1].split("[")[0])
        results.append(TestResult(node, visible, verdict, detail=shortened(text, 2000)))
    if visible and reports.collection and not bench.load_error:
        bench.load_error = shortened(reports.collection, 2000)
    return results


def _tests(suite: PytestSuite, nodes: Sequence[str]) -> tuple[dict[str, bytes], dict[str, str], list[str]]:
    """The trusted files, the node id that each test has in them, and the decoys' node ids.

    Tests that are not of this run are taken out: a solution that shows its folder shows no hidden test.
    """
    every = {node.split("::")[0] for node in (*suite.visible, *suite.hidden)}
    trusted = {name: content for name, content in suite.files.items() if name not in every}
    trusted[_CONFIG_FILE] = b"[pytest]\n"
    names: dict[str, str] = {}
    decoys: list[str] = []
    for file in sorted({node.split("::")[0] for node in nodes}):
        own = {node: node.partition("::")[2] for node in nodes if node.split("::")[0] == file}
        wanted = {test.partition("[")[0] for test in own.values()}
        listed = {node.partition("::")[2].partition("[")[0] for node in (*suite.visible, *suite.hidden)
                  if node.split("::")[0] == file}  # fmt: skip
        try:
            made = disguise(suite.files[file], wanted if suite.decoys else (), without=listed - wanted)
        except SyntaxError as error:
            raise ConfigError(f"PytestSuite.files: expected Python in {file!r}, got {error}. Correct it.") from error
        trusted[file] = made.source
        for node, test in own.items():
            name, bracket, parameters = test.partition("[")
            names[node] = f"{file}::{made.names.get(name, name)}{bracket}{parameters}"
            decoys += _decoy_of(made, name, f"{file}::", bracket + parameters)
    return trusted, names, decoys


def _decoy_of(made: Disguised, name: str, prefix: str, parameters: str) -> list[str]:
    return [f"{prefix}{made.decoys[name]}{parameters}"] if name in made.decoys else []


def _kept(bench: Bench, suite: PytestSuite) -> dict[str, bytes]:
    """The policy's files without those that configure Python or pytest."""
    kept = {}
    for name, content in suite.workspace.items():
        path = PurePosixPath(name)
        configures = path.name in _CONFIGURATION or path.suffix in (".pth", ".pyc", ".egg-link")
        if configures or "__pycache__" in path.parts or ".git" in path.parts:
            bench.signals.add("configuration_submitted")
        elif name in suite.files:
            bench.signals.add("test_file_submitted")
        else:
            kept[name] = content
    return kept


def _own_conftest(suite: PytestSuite) -> bool:
    return any(PurePosixPath(name).name == "conftest.py" for name in suite.files)


def _pytest_path() -> list[str]:
    """The folders that pytest and what it needs are imported from."""
    found = [importlib.util.find_spec(name) for name in ("pytest", "pluggy", "iniconfig", "packaging")]
    origins = [spec.origin for spec in found if spec is not None and spec.origin]
    return sorted({str(Path(origin).resolve().parent.parent) for origin in origins})


def _read_reports(channel: bytes) -> _Reports:
    *lines, _ = channel.split(b"\n")
    reports = _Reports()
    try:
        for line in lines:
            _take(reports, parse_line(line))
    except CodecError as error:
        reports.broken = str(error)
    return reports


def _take(reports: _Reports, message: dict[str, Any]) -> None:
    match message:
        case _ if reports.exit_code is not None:
            raise CodecError("a line after the last one")
        case {"begin": True} if len(message) == 1 and not reports.begun:
            reports.begun = True
        case _ if not reports.begun:
            raise CodecError("a line before the first one")
        case {"collect": str(), "detail": str(detail)}:
            reports.collection = reports.collection or detail
        case {"node": str(node), "when": str(when), "outcome": str(outcome), "detail": str(detail)}:
            phases = reports.phases.setdefault(node, {})
            if when in phases or when not in _PHASES:
                raise CodecError("a test that is reported twice")
            phases[when] = (outcome, detail)
        case {"end": True, "exit": int(code), "signals": [*signals]}:
            reports.exit_code = code
            reports.signals = tuple(str(signal)[:40] for signal in signals[:16])
        case _:
            raise CodecError(f"a line that is no report, with the keys {sorted(message)[:4]!r}")


def _passed(reports: _Reports, node: str) -> bool:
    return [reports.phases.get(node, {}).get(phase, ("", ""))[0] for phase in _PHASES] == ["passed"] * 3


def _whole(
    bench: Bench, reports: _Reports, execution: ExecResult, *, trusted: dict[str, bytes], decoys: list[str]
) -> tuple[Verdict, str] | None:
    """The verdict on a run in which nothing can be believed."""
    if execution.status is Status.INFRA:
        return verdict_of(execution, bench.limits)
    if not reports.begun:
        if "No module named 'pytest'" in execution.stderr:  # nothing of the policy's has run yet
            raise ConfigError(
                "PytestSuite: expected a sandbox with pytest, got none. Open it with preimport=('pytest',)."
            )
        return bench.never_began(execution)
    found = {
        "broken_protocol": bool(reports.broken),
        "test_file_changed": any(execution.files.get(name) != content for name, content in trusted.items()),
        "decoy_passed": any(_passed(reports, decoy) for decoy in decoys),
        "exit_disagrees": _exit_disagrees(reports, execution),
    }
    if not any(found.values()):
        return None
    bench.signals.update(name for name, is_so in found.items() if is_so)
    why = next(name for name, is_so in found.items() if is_so)
    return Verdict.PROTOCOL, reports.broken or why.replace("_", " ")


def _exit_disagrees(reports: _Reports, execution: ExecResult) -> bool:
    """Whether the exit status and the reports tell two stories, one of which holds a test that passed."""
    if not any(_passed(reports, node) for node in reports.phases):
        return False
    failed = any(outcome == "failed" for phases in reports.phases.values() for outcome, _ in phases.values())
    return reports.exit_code != execution.exit_code or reports.exit_code != int(failed)


def _verdict(bench: Bench, reports: _Reports, execution: ExecResult, *, node: str) -> tuple[Verdict, str]:
    """The verdict on one test: each of its three phases must have passed."""
    if _passed(reports, node):
        return Verdict.PASSED, ""
    phases = reports.phases.get(node, {})
    for phase in _PHASES:
        outcome, detail = phases.get(phase, ("missing", ""))
        if outcome == "failed":
            return (Verdict.FAILED if phase == "call" else Verdict.ERROR), detail
        if outcome not in ("passed", "missing"):
            return Verdict.MISSING, f"it was {outcome}"
    if reports.collection:
        return Verdict.ERROR, reports.collection
    verdict, detail = verdict_of(execution, bench.limits)
    if reports.exit_code is None and execution.status in (Status.OK, Status.NONZERO):
        bench.signals.add("early_exit")
        return Verdict.MISSING, "pytest ended without a report of it"
    return (Verdict.MISSING, "pytest did not report it") if reports.exit_code is not None else (verdict, detail)
