"""Levels, the doctor and the filter: what they say is what is so; and where nothing holds, nothing runs."""

import asyncio
import json
import os
import signal

import pytest

from agentenv.sandbox import Isolation, LocalSandbox, SandboxUnavailable
from agentenv.sandbox.guest import linux, seccomp
from agentenv.sandbox.local import levels
from agentenv.sandbox.local import plan as _plan
from agentenv.sandbox.local.doctor import doctor
from tests.sandbox.conftest import opened


@pytest.mark.long
async def test_the_doctors_level_is_the_one_that_a_sandbox_takes():
    report = await doctor()
    if report.chosen is None:
        with pytest.raises(SandboxUnavailable):
            await LocalSandbox().open()
        return
    async with LocalSandbox() as sandbox:
        assert sandbox.isolation is report.chosen
    assert report.ok
    assert report.speed.num_runs > 0
    assert 0 < report.speed.p50_ms <= report.speed.p95_ms
    works = {level.isolation: level for level in report.levels}[report.chosen]
    assert works.num_canaries >= 12
    text = "\n".join(report.lines())
    assert f"chosen: {report.chosen}" in text
    assert json.loads(json.dumps(report.to_dict()))["chosen"] == str(report.chosen)


@pytest.mark.long
async def test_a_level_that_lets_something_through_is_not_used(monkeypatch):
    leaky = levels._ATTEMPTS.replace("attempts = {", "attempts = {'do as it likes': lambda: None,")
    monkeypatch.setattr(levels, "_ATTEMPTS", leaky)
    with pytest.raises(SandboxUnavailable) as refused:
        await LocalSandbox().open()
    assert "canary programs could do as it likes" in str(refused.value)
    monkeypatch.setattr(levels, "_FORBIDDEN", "pass")
    monkeypatch.setattr(levels, "_ATTEMPTS", "print('[1, []]')")
    with pytest.raises(SandboxUnavailable, match="expected isolation"):
        await LocalSandbox().open()


@pytest.mark.long
@pytest.mark.parametrize("deaths", [1, levels.MAX_STARTS])
async def test_a_level_is_not_given_up_because_its_zygote_died_once(monkeypatch, caplog, deaths):
    original, died = levels.escapes, []

    async def escapes(zygote, isolation):
        if isolation is Isolation.NAMESPACES and len(died) < deaths:
            died.append(zygote.pid)
            os.kill(zygote.pid, signal.SIGKILL)
            await asyncio.to_thread(zygote._process.wait)
        return await original(zygote, isolation)

    async with await opened(isolation=Isolation.NAMESPACES):
        monkeypatch.setattr(levels, "escapes", escapes)
    async with await opened() as sandbox:
        lost = deaths == levels.MAX_STARTS
        assert sandbox.isolation is (Isolation.LANDLOCK if lost else Isolation.NAMESPACES)
    assert len(died) == deaths
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for words in ("is not used: its zygote died", "landlock is the strongest level here"):
        assert any(words in message for message in warnings) is lost


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_tables_have_what_the_filter_names(machine):
    numbers = linux.numbers(machine)
    assert len(set(numbers.values())) == len(numbers)
    needed = {"unshare", "setns", "mount_setattr", "pivot_root", "openat2", "landlock_restrict_self", "prctl", "capset"}
    assert needed <= numbers.keys()
    assert {"fork", "open", "stat"} <= linux.numbers("x86_64").keys() - linux.numbers("aarch64").keys()


def test_an_unknown_processor_is_refused(monkeypatch):
    assert linux.numbers("riscv64") == {}
    monkeypatch.setattr(linux, "NUMBERS", {})
    monkeypatch.setattr(linux, "AUDIT_ARCH", 0)
    with pytest.raises(linux.StepError, match="no such call"):
        linux.unshare(0)
    with pytest.raises(linux.StepError, match="no system call table"):
        seccomp.assemble(processes=False)


# --- the filter, interpreted ----------------------------------------------------------------------------------------


def answer(code, number, arguments=(0,) * 6, arch=linux.AUDIT_ARCH):
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


PURE, PROC = seccomp.assemble(processes=False), seccomp.assemble(processes=True)
ON_HOST, PROC_ON_HOST = (seccomp.assemble(processes=processes, on_host=True) for processes in (False, True))
CLONE_THREAD_FLAGS = 0x3D0F00
HIGH = 1 << 32


@pytest.mark.parametrize(
    ("code", "name", "arguments", "expected"),
    [
        (PURE, "clone", (CLONE_THREAD_FLAGS & ~linux.CLONE_FILES,), seccomp.EPERM),
        (PURE, "close_range", (3, 9, 4), seccomp.ALLOW),
        (PURE, "close_range", (3, 9, 2), seccomp.EPERM),
        (PROC, "close_range", (3, 9, 6 | HIGH), seccomp.EPERM),
        (PROC_ON_HOST, "sendmmsg", (), seccomp.EPERM),
        (ON_HOST, "sendto", (3, 1, 1, 0, 0), seccomp.ALLOW),
        (PURE, "socketpair", (1, 1 | 0o2000000), seccomp.ALLOW),
        (PURE, "socketpair", (1, 2), seccomp.EPERM),
        (PURE, "socketpair", (40, 1), seccomp.EPERM),
        (PURE, "sendto", (3, 1, 1, 0, 1 << 40), seccomp.EPERM),
        (PURE, "ioctl", (0, 0x5401), seccomp.ALLOW),
        (PURE, "ioctl", (0, 0x5412), seccomp.ENOTTY),
        (PURE, "prctl", (linux.PR_SET_NAME,), seccomp.ALLOW),
        (PURE, "mknodat", (0, 0, 0o010644), seccomp.ALLOW),
        (PURE, "mknodat", (0, 0, 0o020644), seccomp.EPERM),
        (PURE, "sched_yield", (), seccomp.ERRNO),
        (ON_HOST, "kill", (1, 9 | HIGH), seccomp.EPERM),
        (ON_HOST, "kill", (9, 15), seccomp.ALLOW),
        (ON_HOST, "tgkill", (9, 9, 10), seccomp.ALLOW),
        (ON_HOST, "tgkill", (1, 1, 9), seccomp.EPERM),
        (ON_HOST, "rt_tgsigqueueinfo", (1, 1, 9, 1), seccomp.EPERM),
        (ON_HOST, "setrlimit", (HIGH, 1), seccomp.ERRNO),
        (ON_HOST, "setrlimit", (3, 1), seccomp.ALLOW),
        (ON_HOST, "prlimit64", (0, 0, HIGH, 0), seccomp.ERRNO),
        (ON_HOST, "prlimit64", (0, 0, 0, 1), seccomp.ALLOW),
        (ON_HOST, "prlimit64", (0, 3, 1, 0), seccomp.ALLOW),
        (ON_HOST, "prlimit64", (1, 3, 1, 0), seccomp.EPERM),
        (PROC_ON_HOST, "kill", (1, 9), seccomp.ALLOW),
        (PROC_ON_HOST, "setrlimit", (0, 1), seccomp.ALLOW),
        (PURE, "fcntl", (1, 4, 0), seccomp.ALLOW),
        (PURE, "setsockopt", (1, 1, 7), seccomp.ALLOW),
    ],
)
def test_the_filter_answers(code, name, arguments, expected):
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    assert answer(code, linux.numbers(linux.MACHINE)[name], padded) == expected


def test_the_filter_ends_other_abis_and_refuses_what_it_does_not_know():
    assert answer(PURE, 0, arch=0x40000003) == seccomp.KILL
    assert answer(PURE, 0x40000000) == seccomp.KILL
    for number in (335, 600, 100_000):
        assert answer(PROC, number) == seccomp.ENOSYS


def test_signals_and_metadata_can_be_kept_in():
    code = seccomp.assemble(processes=False, own_signals=True, on_host=True, metadata=seccomp.ERRNO)
    numbers = linux.NUMBERS
    assert answer(code, numbers["kill"], (seccomp.OWN_PID, 15, 0, 0, 0, 0)) == seccomp.ALLOW
    assert answer(code, numbers["kill"], (1, 9, 0, 0, 0, 0)) == seccomp.EPERM
    assert answer(code, numbers["setsid"]) == seccomp.EPERM
    assert answer(code, numbers["getpgid"], (77, 0, 0, 0, 0, 0)) == seccomp.EPERM
    assert answer(code, numbers["getpriority"]) == seccomp.ALLOW
    assert answer(code, numbers["fchmodat"]) == seccomp.ERRNO
    code = seccomp.assemble(processes=True, own_signals=True, on_host=True)
    assert answer(code, numbers["kill"], (1, 9, 0, 0, 0, 0)) == seccomp.EPERM
    assert answer(code, numbers["pidfd_open"], (1, 0, 0, 0, 0, 0)) == seccomp.ALLOW
    assert answer(code, numbers["pidfd_send_signal"], (5, 9, 0, 0, 0, 0)) == seccomp.EPERM, "a descriptor of anyone"


@pytest.mark.parametrize(
    ("uid_map", "num_ranges"),
    [("0 0 4294967295", 1024), ("0 100000 65536", 32), ("0 100000 4096", 2), ("0 0 1900000000", 1024), ("0 0 4095", 0)],
)
def test_the_ranges_of_user_ids_lie_within_what_the_container_has(monkeypatch, uid_map, num_ranges):
    files = {"/proc/self/status": ["CapEff:\t000001ffffffffff"], "/proc/self/uid_map": [uid_map]}
    monkeypatch.setattr(_plan, "_lines", files.__getitem__)
    monkeypatch.setattr(_plan.os, "geteuid", lambda: 0)
    first, size, number = _plan.user_ranges() or (0, 0, 0)
    assert number == num_ranges
    if number:
        inside, _, count = map(int, uid_map.split())
        assert inside + 1000 < first
        assert first + size * number <= inside + count - (2 if count == 65536 else 0), "65534 is nobody"
