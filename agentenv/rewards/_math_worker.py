r"""The process that runs math-verify: `python -m agentenv.rewards._math_worker`, started by `math_pool`.

It reads length-prefixed JSON from standard input and answers on standard output, one request at a time. It works in its
main thread, where SIGPROF interrupts even the big-integer arithmetic that would freeze a thread, after so much CPU time
(user and system) and not after so much waiting for a processor. It ends with its parent: at end of input, and on Linux
by the parent-death signal.

What math-verify 0.9 gets wrong and this repairs: factorials too small to tell apart, an irrational gold matched by a
decimal, `12.5%` against `12.5`, a gold `0.333` against `1/3`, anagrams of words, text behind the first number, `5 6`
read as a sum. What remains:
- accepted though different: variables in another case (`x` equals `X`), `a = 5` for a bare `5`, other units, values
  that differ by less than 1e-15 after cancellation;
- refused though equal: an inequality for an interval gold, `0.1\overline{6}` for `1/6`, `e^{i\pi}` for `-1`, decimals
  for an irrational gold, times of day in another case, number words ("eighteen").
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

from agentenv.rewards import _math_text as text

_MAX_MEMORY_BYTES = 4 << 30
_MEMORY_LIMIT = f"{_MAX_MEMORY_BYTES >> 30} GiB of memory"
_RETIRE_AT_RSS_BYTES = 1 << 30

Verdict = tuple[str, str]


class _DeadlineReached(BaseException):
    """Not an Exception: math-verify and sympy swallow those."""


def main() -> None:
    """Serves requests until the input ends."""
    _end_with_parent()
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_resources()
    _grade("x^2+1", ("1+x^2",))  # imports and warms up what the first request would pay for
    _write(replies, {"ready": True, "cpu_s": time.process_time()})
    os.dup2(null, 2)
    while (request := _read(requests)) is not None:
        started_s = time.process_time()
        outcome, detail = _in_time(request["timeout_s"], partial(_grade, request["answer"], tuple(request["golds"])))
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        cpu_s = time.process_time()
        interrupted = outcome == "timeout" or cpu_s - started_s >= request["timeout_s"]
        reply = {"id": request["id"], "outcome": outcome, "detail": detail, "cpu_s": cpu_s}
        _write(replies, {**reply, "retire": interrupted or peak_bytes > _RETIRE_AT_RSS_BYTES})


def _end_with_parent() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if len(sys.argv) > 1 and os.getppid() != int(sys.argv[1]):
        sys.exit(0)  # the parent ended before the signal was set


def _limit_resources() -> None:
    os.nice(5)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses RLIMIT_AS
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MAX_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _read(fd: int) -> dict[str, Any] | None:
    header = _read_exactly(fd, 4)
    body = _read_exactly(fd, struct.unpack(">I", header)[0]) if header else None
    return json.loads(body) if body else None


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def _write(fd: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    frame = struct.pack(">I", len(body)) + body
    while frame:
        frame = frame[os.write(fd, frame) :]


def _in_time(timeout_s: float, check: Callable[[], Verdict]) -> Verdict:
    """The check's verdict; `timeout` when it needs more CPU time or memory than it may have."""

    def interrupt(*_: object) -> None:
        """Raise in the middle of a check that takes too long."""
        raise _DeadlineReached(f"{timeout_s:g} s of CPU time")

    signal.signal(signal.SIGPROF, interrupt)
    try:
        # Repeats, because an exception raised inside a finalizer or a bare except is lost.
        signal.setitimer(signal.ITIMER_PROF, timeout_s, 0.25)
        try:
            return check()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _DeadlineReached as limit:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return "timeout", f"the check took more than {limit}"
    except MemoryError:
        return "timeout", f"the check took more than {_MEMORY_LIMIT}"
    except Exception as error:  # noqa: BLE001 - a bug here must reach the caller as a failed grader
        return "infra", f"the grader failed: {type(error).__name__}: {error}"[:500]


def _grade(answer: str, golds: tuple[str, ...]) -> Verdict:
    """The verdict on an answer: correct if any gold matches; wrong only if every gold could be compared.

    Outcomes are those of `Outcome`, and `label`: a gold that cannot be compared, said as a DataError says it.
    """
    ranking = ("correct", "label", "wrong", "parse_error")
    return min((_compare(answer, gold) for gold in golds), key=lambda verdict: ranking.index(verdict[0]))


def _compare(answer: str, gold: str) -> Verdict:
    if text.same_text(gold, answer):
        return "correct", ""
    if text.is_text(gold):
        return "wrong", ""
    number, gold_number = text.read_number(answer), text.read_number(gold)
    if gold_number and number is None:
        number = text.read_assigned_number(answer)
    if number and gold_number:
        return ("correct" if text.numbers_equal(gold_number, number) else "wrong"), ""
    try:
        expected = _parse_gold(gold)
    except (_DeadlineReached, MemoryError) as error:
        limit = str(error) if isinstance(error, _DeadlineReached) else _MEMORY_LIMIT
        return "label", f"label: expected an answer that can be compared in {limit}, got {gold[:200]!r}. Correct it."
    if expected is None and not text.looks_mathematical(gold):
        return "wrong", ""
    if expected is None:
        return "label", f"label: expected an answer that math-verify can read, got {gold[:200]!r}. Correct it."
    if reason := text.unreadable(answer, words=gold_number is None):
        return "parse_error", reason
    try:
        pred = _parse(answer)
        if pred is None:
            return "parse_error", "math-verify cannot read the answer as an expression"
        return ("correct" if _verify(expected, pred, number) else "wrong"), ""
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the gold compares with itself, so it is the answer that does not
        return "parse_error", f"the answer cannot be compared: {type(error).__name__}: {error}"[:500]


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> Any | None:
    """The sympy expression of a gold that can be compared (at least with itself), or None."""
    try:
        number = text.read_number(gold)
        if number is not None and number.places is None and not number.percent:
            return _rational(number.value)
        expected = _parse(gold)
        return expected if expected is not None and _verify(expected, expected, None) else None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, this gold cannot be used
        return None


def _rational(value: Fraction) -> Any:
    from sympy import Rational  # type: ignore[import-untyped]

    return Rational(value.numerator, value.denominator)


def _parse(answer: str) -> Any | None:
    """The sympy expression of the whole answer, or None.

    Only the LaTeX reader is used: math-verify's plain-expression reader takes a number out of the middle of a text.
    """
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        f"${text.to_latex(answer)}$",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return found[0] if found else None


def _verify(gold: Any, pred: Any, number: text.Number | None) -> bool:
    from math_verify import verify

    if not verify(gold, pred, strict=True, timeout_seconds=None, raise_on_error=True):
        return False
    if not getattr(gold, "is_number", False) or not getattr(pred, "is_number", False):
        return True
    if number is not None and number.places is not None and gold.doit().is_rational is False:
        return False
    return _same_magnitude(gold, pred)


def _same_magnitude(gold: Any, pred: Any) -> bool:
    """Rejects what is equal only because both are nearly zero, as `1/2004!` and `1/2006!` are to 15 decimals."""
    a, b = gold.evalf(20), pred.evalf(20)
    if not (a.is_Float and b.is_Float) or abs(a) > 1e-3:
        return True
    return bool(abs(a - b) <= abs(a) / 1000)


if __name__ == "__main__":
    main()
