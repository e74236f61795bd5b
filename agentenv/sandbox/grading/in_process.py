"""Grading of PytestSuite: pytest runs in the interpreter that imports the solution, so a pass is only evidence."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from agentenv._util.off_loop import off_loop
from agentenv.errors import ConfigError, DataError
from agentenv.sandbox.grading.codec import CodecError, dump_line, parse_line
from agentenv.sandbox.grading.decoys import disguise
from agentenv.sandbox.grading.executions import GradingRun, guest_program, verdict_of
from agentenv.sandbox.grading.results import TestResult, Verdict, shorten
from agentenv.sandbox.grading.suites import PytestSuite
from agentenv.sandbox.guest.files import check_names
from agentenv.sandbox.local.sandbox import has_room
from agentenv.sandbox.types import ExecResult, ExecStatus

_CONFIGURATION = {
    ".coveragerc", ".pytest.ini", ".pytest.toml", "conftest.py", "pyproject.toml", "pytest.ini", "pytest.toml",
    "setup.cfg", "sitecustomize.py", "tox.ini", "usercustomize.py",
}  # fmt: skip
_CONFIG_FILE = "agentenv-pytest.ini"
_NO_SHADOWS = "sys.path = [path for path in sys.path if path not in ('', '.', os.getcwd())]"
"""Prevents files of the policy from shadowing libraries."""
_PHASES = ("setup", "call", "teardown")


@dataclass(slots=True)
class _Reports:
    """The reports of pytest, which the solution may have forged."""

    phases: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    """(outcome, text) by node id and phase."""
    collection: str = ""
    exit_code: int | None = None
    signals: tuple[str, ...] = ()
    started: bool = False
    """True once pytest runs, which may import the solution; an earlier end is a failure of the sandbox."""
    missing: str = ""
    """How pytest ended before it ran."""
    broken: str = ""


async def grade_pytest(grading: GradingRun, code: str, suite: PytestSuite, *, visible: bool) -> list[TestResult]:
    """Return a result per node id of the visible or hidden tests, which never share a process."""
    nodes = suite.visible if visible else suite.hidden
    if not nodes:
        return []
    if (late := grading.out_of_time()) is not None:
        return [TestResult(node, visible, late[0], detail=late[1]) for node in nodes]
    trusted, names, decoys = _prepare_tests(suite, nodes)
    has_conftest = any(PurePosixPath(name).name == "conftest.py" for name in suite.files)
    files = _submitted_files(grading, suite) | {suite.solution: code.encode(errors="replace"), **trusted}
    if (fault := _files_verdict(grading, files, trusted)) is not None:
        return [TestResult(node, visible, fault[0], detail=shorten(fault[1])) for node in nodes]
    request = {
        "path": _pytest_path(),
        "options": [
            "-q", "--tb=short", "--capture=sys", "--import-mode=importlib", "--rootdir=.", f"-c={_CONFIG_FILE}",
            "-p", "no:cacheprovider", *([] if has_conftest else ["--noconftest"]),
        ],
        "solution": suite.solution,
        "files": sorted({node.split("::")[0] for node in nodes}),
        "nodes": sorted([*names.values(), *(decoy.node for decoy in decoys.values())]),
    }  # fmt: skip
    program = guest_program(
        "codec.py", "guest/serve.py", "guest/pytest_runner.py", entry="run_pytest()", first=_NO_SHADOWS
    )
    execution = await grading.run(program, stdin=dump_line(request), files=files, fetch=tuple(trusted), channel=True)
    reports = await off_loop(len(execution.channel), _read_reports, execution.channel)
    grading.signals.update(reports.signals)
    common = _run_verdict(grading, reports, execution, trusted=trusted, decoys=decoys)
    results = []
    for node in nodes:
        verdict, detail = common or _test_verdict(
            grading, reports, execution, node=names[node], decoy=decoys.get(names[node])
        )
        text = detail.replace(names[node].split("::")[-1].split("[")[0], node.split("::")[-1].split("[")[0])
        results.append(TestResult(node, visible, verdict, detail=shorten(text, 2000)))
    if visible and reports.collection and not grading.load_error:
        grading.load_error = shorten(reports.collection, 2000)
    return results


def _submitted_files(grading: GradingRun, suite: PytestSuite) -> dict[str, bytes]:
    """Return the policy's files without those that configure Python or pytest."""
    files = {}
    for name, content in suite.workspace.items():
        path = PurePosixPath(name)
        configures = path.name in _CONFIGURATION or path.suffix in (".pth", ".pyc", ".egg-link")
        if configures or "__pycache__" in path.parts or ".git" in path.parts:
            grading.signals.add("configuration_submitted")
        elif name in suite.files:
            grading.signals.add("test_file_submitted")
        else:
            files[name] = content
    return files


def _files_verdict(
    grading: GradingRun, files: dict[str, bytes], trusted: dict[str, bytes]
) -> tuple[Verdict, str] | None:
    """Return the verdict on a policy whose files cannot be written, or None.

    Raises:
        ConfigError: the suite's own files do not fit.
    """
    limits = grading.limits
    room = f"{limits.disk_mb} MiB and {limits.num_inodes} entries"
    if not has_room(trusted, limits):
        raise ConfigError(f"PytestSuite.files: expected files that fit into {room}, got more. Raise the limits.")
    try:
        check_names(files, "workspace")
    except ConfigError as error:
        return Verdict.ERROR, str(error)
    return None if has_room(files, limits) else (Verdict.LIMIT, f"its files take more than {room}")


@dataclass(frozen=True, slots=True)
class _Decoy:
    node: str
    certain: bool
    """True if its test always reaches an assertion, so that no honest solution passes both."""


def _prepare_tests(
    suite: PytestSuite, nodes: Sequence[str]
) -> tuple[dict[str, bytes], dict[str, str], dict[str, _Decoy]]:
    """Return the trusted files, the new node id of each test, and the decoys by the new node ids of their tests.

    Tests that are not part of this run are removed, so that a solution that prints its folder reveals no hidden test.
    """
    every = [node.partition("::") for node in (*suite.visible, *suite.hidden)]
    with_tests = {file for file, _, _ in every}
    trusted = {name: content for name, content in suite.files.items() if name not in with_tests}
    trusted[_CONFIG_FILE] = b"[pytest]\n"
    names: dict[str, str] = {}
    decoys: dict[str, _Decoy] = {}
    for file in sorted({node.split("::")[0] for node in nodes}):
        own = {node: node.partition("::")[2] for node in nodes if node.split("::")[0] == file}
        wanted = {test.partition("[")[0] for test in own.values()}
        listed = {test.partition("[")[0] for place, _, test in every if place == file}
        try:
            disguised = disguise(suite.files[file], wanted, without=listed - wanted, decoys=suite.decoys)
        except SyntaxError as error:
            raise ConfigError(f"PytestSuite.files: expected Python in {file!r}, got {error}.") from error
        if disguised.idle:
            idle = f"{file}::{disguised.idle[0]}"
            raise DataError(f"PytestSuite: expected tests that can fail, got {idle!r}. Correct or remove the test.")
        trusted[file] = disguised.source
        for node, test in own.items():
            name, bracket, parameters = test.partition("[")
            names[node] = f"{file}::{disguised.names.get(name, name)}{bracket}{parameters}"
            if name in disguised.decoys:
                decoy = f"{file}::{disguised.decoys[name]}{bracket}{parameters}"
                decoys[names[node]] = _Decoy(decoy, name in disguised.certain)
    return trusted, names, decoys


def _pytest_path() -> list[str]:
    """Return the folders of pytest and its dependencies."""
    specs = [importlib.util.find_spec(name) for name in ("pytest", "pluggy", "iniconfig", "packaging")]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin]
    return sorted({str(Path(origin).resolve().parent.parent) for origin in origins})


def _read_reports(channel: bytes) -> _Reports:
    *lines, _ = channel.split(b"\n")
    reports = _Reports()
    try:
        for line in lines:
            message = parse_line(line)
            match message:
                case _ if reports.exit_code is not None:
                    raise CodecError("a line after the last one")
                case {"begin": True} if len(message) == 1 and not reports.started:
                    reports.started = True
                case {"missing": str(error)} if not reports.started:
                    reports.missing = error
                case _ if not reports.started:
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
                    raise CodecError(f"a line that is not a report, with the keys {sorted(message)[:4]!r}")
    except CodecError as error:
        reports.broken = str(error)
    return reports


def _passed(reports: _Reports, node: str) -> bool:
    return [reports.phases.get(node, {}).get(phase, ("", ""))[0] for phase in _PHASES] == ["passed"] * 3


def _run_verdict(
    grading: GradingRun,
    reports: _Reports,
    execution: ExecResult,
    *,
    trusted: dict[str, bytes],
    decoys: dict[str, _Decoy],
) -> tuple[Verdict, str] | None:
    """Return the verdict on all tests of a run that cannot be trusted, or None."""
    if execution.status is ExecStatus.INFRA:
        return verdict_of(execution, grading.limits)
    if not reports.started:
        if reports.missing:  # no code of the policy has run yet
            how = shorten(f"{reports.missing}\n{execution.stderr}".strip())
            raise ConfigError(
                f"PytestSuite: expected a sandbox with pytest, got {how!r}. Open it with preimport=('pytest',)."
            )
        return grading.never_started(execution)
    any_passed = any(_passed(reports, node) for node in reports.phases)
    any_failed = any(outcome == "failed" for phases in reports.phases.values() for outcome, _ in phases.values())
    contradicted = reports.exit_code != execution.exit_code or reports.exit_code != int(any_failed)
    problems = {
        "broken_protocol": bool(reports.broken),
        "test_file_changed": any(execution.files.get(name) != content for name, content in trusted.items()),
        # A wrong result passes the decoy of `assert ok(3)`, so a decoy says something only if its test passed too.
        "decoy_passed": any(decoy.certain and _both_passed(reports, test, decoy) for test, decoy in decoys.items()),
        "exit_disagrees": any_passed and contradicted,
    }
    if not any(problems.values()):
        return None
    signals = [name for name, present in problems.items() if present]
    grading.signals.update(signals)
    return Verdict.PROTOCOL, reports.broken or signals[0].replace("_", " ")


def _both_passed(reports: _Reports, test: str, decoy: _Decoy) -> bool:
    return _passed(reports, test) and _passed(reports, decoy.node)


def _test_verdict(
    grading: GradingRun, reports: _Reports, execution: ExecResult, *, node: str, decoy: _Decoy | None
) -> tuple[Verdict, str]:
    """Return the verdict on one test; it passed only if all three phases did, and not if its decoy passed too."""
    if decoy is not None and _both_passed(reports, node, decoy):
        return Verdict.MISSING, "it also passes with other expectations: no assertion was reached, or it was caught"
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
    verdict, detail = verdict_of(execution, grading.limits)
    if reports.exit_code is None and execution.status in (ExecStatus.OK, ExecStatus.NONZERO):
        grading.signals.add("early_exit")
        return Verdict.MISSING, "pytest ended without reporting it"
    if reports.exit_code is not None:
        return Verdict.MISSING, f"pytest did not report it\n{execution.stderr[-2000:]}".strip()
    return verdict, detail
