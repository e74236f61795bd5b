"""Probes and doctor: what they say is what is so; and where nothing holds, nothing runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.sandbox import Isolation, LocalSandbox, SandboxUnavailable, _canary, _linux, _plan, _seccomp
from agentenv.sandbox.doctor import Check, doctor
from agentenv.sandbox.probe import Outcome, Probe, run_probes

ROOT = Path(__file__).parents[2]


def plan(python=None):
    return _plan.Plan(Isolation.NAMESPACES, _plan.user_range(), python or _plan.interpreters()[0])


def test_each_probe_is_ok_or_says_why_and_what_mends_it():
    probes = run_probes(plan())
    assert len(probes) >= 10
    for probe in probes:
        assert probe.outcome is Outcome.OK or (probe.detail and (probe.hint or probe.outcome is Outcome.SKIPPED)), probe


def test_an_interpreter_that_is_none_is_a_failed_probe(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    broken.chmod(0o755)
    (probe,) = run_probes(plan(str(broken)))
    assert (probe.outcome, probe.detail) == (Outcome.FAIL, "broken")
    (absent,) = run_probes(plan(str(tmp_path / "none")))
    assert absent.errno == 2


def test_a_probe_reads_as_its_errno_and_mend():
    said = str(Probe("landlock", Outcome.FAIL, 38, "landlock_create_ruleset: no", "newer kernel"))
    assert said == "landlock fail ENOSYS: landlock_create_ruleset: no (newer kernel)"


async def test_the_doctors_level_is_the_one_that_a_sandbox_takes_and_its_matrix_has_to_hold():
    async def matrix(sandbox):
        return [Check("one", True), Check("two", (await sandbox.run("1 / 0")).exit_code == 0, "divides")]

    report = await doctor(deep=True, matrix=matrix)
    if report.chosen is None:
        with pytest.raises(SandboxUnavailable):
            await LocalSandbox().open()
        return
    async with LocalSandbox() as sandbox:
        assert sandbox.isolation is report.chosen
    assert not report.ok
    assert replace(report, deep=None).ok
    assert "NOT HELD two: divides" in "\n".join(report.lines())
    assert report.speed.num_runs == 50
    assert 0 < report.speed.p50_ms <= report.speed.p95_ms
    works = {level.isolation: level for level in report.levels}[report.chosen]
    assert works.num_canaries >= 12
    text = "\n".join(report.lines())
    assert f"chosen: {report.chosen}" in text
    assert json.loads(json.dumps(report.to_dict()))["chosen"] == str(report.chosen)


async def test_a_level_that_lets_something_through_is_not_used(monkeypatch):
    leaky = _canary._ATTEMPTS.replace("attempts = {", "attempts = {'do as it likes': lambda: None,")
    monkeypatch.setattr(_canary, "_ATTEMPTS", leaky)
    with pytest.raises(SandboxUnavailable) as refused:
        await LocalSandbox().open()
    assert "canary programs could do as it likes" in str(refused.value)
    monkeypatch.setattr(_canary, "_FORBIDDEN", "pass")
    monkeypatch.setattr(_canary, "_ATTEMPTS", "print('[1, []]')")
    with pytest.raises(SandboxUnavailable, match="expected isolation"):
        await LocalSandbox().open()


NOTHING = """
import asyncio, ctypes, os, sys
from agentenv.sandbox import _linux, _seccomp, LocalSandbox, SandboxUnavailable, Isolation
EPERM = [(6, 0, 0, 0x50001)]
blocked = ("unshare", "setns", "mount", "landlock_create_ruleset")
code = [(0x20, 0, 0, 0)]
for name in blocked:
    code += [(0x15, 0, 1, _linux.NUMBERS[name]), *EPERM]
code.append((6, 0, 0, 0x7FFF0000))
_linux.prctl(_linux.PR_SET_NO_NEW_PRIVS, 1)
_seccomp.Filter(code).install(os.getpid())
async def main():
    try:
        await LocalSandbox(allow_unsafe=True).run("print(1)")
    except SandboxUnavailable as error:
        print(error)
    os.environ["AGENTENV_ALLOW_UNSAFE_SANDBOX"] = "1"
    async with LocalSandbox(allow_unsafe=True) as sandbox:
        print(">", (await sandbox.run("print(1)")).isolation)
asyncio.run(main())
"""


def test_where_neither_namespaces_nor_landlock_can_be_had_nothing_runs():
    ran = subprocess.run(
        [sys.executable, "-c", NOTHING],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "expected isolation 'landlock' or stronger, got none here" in ran.stdout
    assert "level namespaces" in ran.stdout
    assert "EPERM: landlock_create_ruleset" in ran.stdout
    assert "probe mount namespace fail EPERM" in ran.stdout
    assert "--security-opt" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "> none"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_tables_have_what_the_filter_names(machine):
    numbers = _linux.numbers(machine)
    assert len(set(numbers.values())) == len(numbers)
    needed = {"unshare", "setns", "mount_setattr", "pivot_root", "openat2", "landlock_restrict_self", "prctl", "capset"}
    assert needed <= numbers.keys()
    assert {"fork", "open", "stat"} <= _linux.numbers("x86_64").keys() - _linux.numbers("aarch64").keys()


def test_an_unknown_processor_is_refused(monkeypatch):
    assert _linux.numbers("riscv64") == {}
    monkeypatch.setattr(_linux, "NUMBERS", {})
    monkeypatch.setattr(_linux, "AUDIT_ARCH", 0)
    with pytest.raises(_linux.StepError, match="no such call"):
        _linux.unshare(0)
    with pytest.raises(_linux.StepError, match="no system call table"):
        _seccomp.assemble(processes=False)


# --- the filter, interpreted ----------------------------------------------------------------------------------------


def answer(code, number, arguments=(0,) * 6, arch=_linux.AUDIT_ARCH):
    """What the kernel would do: BPF, interpreted."""
    words = {0: number, 4: arch}
    for index, value in enumerate(arguments):
        words[16 + 8 * index], words[20 + 8 * index] = value & 0xFFFFFFFF, value >> 32
    place = accumulator = 0
    while True:
        operation, true, false, constant = code[place]
        place += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            accumulator = words[constant]
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x05:
            place += constant
        else:
            tests = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: accumulator & constant}
            place += true if tests[operation] else false


PURE, PROC = _seccomp.assemble(processes=False), _seccomp.assemble(processes=True)
CLONE_THREAD_FLAGS = 0x3D0F00


@pytest.mark.parametrize(
    ("code", "name", "arguments", "expected"),
    [
        (PURE, "read", (), _seccomp.ALLOW),
        (PURE, "ptrace", (), _seccomp.KILL),
        (PURE, "io_uring_setup", (), _seccomp.ENOSYS),
        (PURE, "clone", (CLONE_THREAD_FLAGS,), _seccomp.ALLOW),
        (PURE, "clone", (17,), _seccomp.EPERM),
        (PROC, "clone", (17,), _seccomp.ALLOW),
        (PROC, "clone", (17 | _linux.CLONE_NEWUSER,), _seccomp.EPERM),
        (PROC, "clone3", (), _seccomp.ENOSYS),
        (PURE, "execve", (), _seccomp.EPERM),
        (PROC, "execve", (), _seccomp.ALLOW),
        (PURE, "socketpair", (1, 1), _seccomp.ALLOW),
        (PURE, "socketpair", (1, 1 | 0o2000000), _seccomp.ALLOW),
        (PURE, "socketpair", (1, 2), _seccomp.EPERM),
        (PURE, "socketpair", (40, 1), _seccomp.EPERM),
        (PROC, "socket", (1, 1), _seccomp.EPERM),
        (PURE, "sendto", (3, 1, 1, 0, 0), _seccomp.ALLOW),
        (PURE, "sendto", (3, 1, 1, 0, 1 << 40), _seccomp.EPERM),
        (PURE, "ioctl", (0, 0x5401), _seccomp.ALLOW),
        (PURE, "ioctl", (0, 0x5412), _seccomp.ENOTTY),
        (PURE, "prctl", (_linux.PR_SET_NAME,), _seccomp.ALLOW),
        (PURE, "prctl", (_linux.PR_SET_DUMPABLE,), _seccomp.EPERM),
        (PURE, "prlimit64", (0,), _seccomp.ALLOW),
        (PURE, "prlimit64", (1,), _seccomp.EPERM),
        (PURE, "mknodat", (0, 0, 0o010644), _seccomp.ALLOW),
        (PURE, "mknodat", (0, 0, 0o020644), _seccomp.EPERM),
        (PURE, "kill", (1, 9), _seccomp.ALLOW),
        (PURE, "fcntl", (1, 4, 0), _seccomp.ALLOW),
        (PURE, "fcntl", (1, 8, 1), _seccomp.EPERM),
        (PURE, "setsockopt", (1, 1, 7), _seccomp.ALLOW),
        (PURE, "setsockopt", (1, 1, 26), _seccomp.EPERM),
        (PURE, "getpgid", (1,), _seccomp.ALLOW),
    ],
)
def test_the_filter_answers(code, name, arguments, expected):
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    assert answer(code, _linux.numbers(_linux.MACHINE)[name], padded) == expected


def test_the_filter_ends_other_abis_and_refuses_what_it_does_not_know():
    assert answer(PURE, 0, arch=0x40000003) == _seccomp.KILL
    assert answer(PURE, 0x40000000) == _seccomp.KILL
    for number in (335, 600, 100_000):
        assert answer(PROC, number) == _seccomp.ENOSYS


def test_signals_and_metadata_can_be_kept_in():
    code = _seccomp.assemble(processes=False, own_signals=True, own_groups=True, metadata=_seccomp.ERRNO)
    numbers = _linux.NUMBERS
    assert answer(code, numbers["kill"], (_seccomp.OWN_PID, 9, 0, 0, 0, 0)) == _seccomp.ALLOW
    assert answer(code, numbers["kill"], (1, 9, 0, 0, 0, 0)) == _seccomp.EPERM
    assert answer(code, numbers["setsid"]) == _seccomp.EPERM
    assert answer(code, numbers["getpgid"], (77, 0, 0, 0, 0, 0)) == _seccomp.EPERM
    assert answer(code, numbers["getpriority"]) == _seccomp.ALLOW
    assert answer(code, numbers["fchmodat"]) == _seccomp.ERRNO
