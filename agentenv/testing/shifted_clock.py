"""Shifts the wall clock that the code of an environment reads; event loops and deadlines have another clock.

`elapsing_clock` moves the clocks of durations, too, between calls.

In the modules of the environment, the functions and classes of `time` and `datetime` that tell the time of day are
replaced by ones that are ahead, and further ahead at each call. So are those that its code imports within the block.
"""

from __future__ import annotations

import builtins
import datetime
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from agentenv._util.paths import PACKAGE

_AHEAD_S = 400 * 86_400 + 100_003.0
"""More than a year, and no multiple of a minute: the year, month, weekday, hour and second differ."""
_PER_CALL_S = 111_103.0
"""More than a day, so that a few calls see both halves of a day and both parts of a week."""
_CLOCKS = re.compile(r"\b(time|datetime|monotonic|perf_counter|process_time)\b")
_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def own_classes(cls: type[object]) -> list[type[object]]:
    """Return a class and its bases, except for those of agentenv and of Python."""
    return [base for base in cls.__mro__ if not f"{base.__module__}.".startswith(("agentenv.", "builtins."))]


def modules_of(cls: type[object]) -> list[ModuleType]:
    """Return the modules of a class and its bases, and the others of their folders unless of installed packages."""
    own = [sys.modules[each.__module__] for each in own_classes(cls) if each.__module__ in sys.modules]
    files = [Path(file) for module in own if (file := getattr(module, "__file__", None))]
    folders = {file.parent for file in files if not set(_LIBRARIES) & {*file.parts}}
    beside = [
        module
        for module in [*sys.modules.values()]
        if (file := getattr(module, "__file__", None)) and Path(file).parent in folders
    ]
    return list({id(module): module for module in [*own, *beside]}.values())


@contextmanager
def shifted_clock(modules: Iterable[ModuleType] = ()) -> Iterator[dict[tuple[str, int], None]]:
    """Shift the clock that these modules read within the block, and that other code imports, except for libraries.

    Yields:
        The files and lines that have read the clock, in the order of their first read.
    """
    clock = _AheadClock()
    with _replaced(clock, modules):
        yield clock.reads


@contextmanager
def elapsing_clock(modules: Iterable[ModuleType]) -> Iterator[Callable[[float], None]]:
    """Let the clocks that these modules read, also those of durations, be ahead by what the caller adds.

    Between two additions the clocks run as usual, so deadlines within one call hold.

    Yields:
        A function that adds seconds.
    """
    clock = _ElapsingClock()
    with _replaced(clock, modules):
        yield clock.add


def reads_clocks(modules: Iterable[ModuleType]) -> bool:
    """Return True if the source code of a module names a clock, or if there is no source code."""
    for module in modules:
        try:
            if _CLOCKS.search(inspect.getsource(module)):
                return True
        except (OSError, TypeError):
            return True
    return False


@contextmanager
def _replaced(clock: _AheadClock, modules: Iterable[ModuleType]) -> Iterator[None]:
    replacements = clock.replacements()
    shifted = {old.__name__: new for old, new in replacements if isinstance(old, ModuleType)}
    original = builtins.__import__

    def imported(name: str, names: Any = None, *more: Any, **options: Any) -> ModuleType:
        module, file = original(name, names, *more, **options), (names or {}).get("__file__")
        if name not in shifted or not file or set(_LIBRARIES) & {*Path(file).parts}:
            return module
        is_own = not file.startswith((f"{_STANDARD_LIBRARY}{os.sep}", f"{PACKAGE}{os.sep}"))
        return shifted[name] if is_own else module

    with ExitStack() as stack:
        stack.enter_context(patch.object(builtins, "__import__", imported))
        for module in modules:
            for name, value in [*vars(module).items()]:
                new = next((new for old, new in replacements if value is old), None)
                if new is not None:
                    stack.enter_context(patch.object(module, name, new))
        yield


class _Shifted(ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, names: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update({**vars(module), **names})


class _AheadClock:
    """A clock that is ahead, and further ahead at each call."""

    def __init__(self) -> None:
        self.ahead_s = _AHEAD_S
        self.reads: dict[tuple[str, int], None] = {}

    def now_s(self) -> float:
        self.ahead_s += _PER_CALL_S
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        self.reads.setdefault((frame.f_code.co_filename, frame.f_lineno))
        return time.time() + self.ahead_s

    def durations(self) -> dict[str, Callable[[], Any]]:
        """Return what replaces the functions of `time` that measure durations, by name."""
        return {}

    def replacements(self) -> list[tuple[Any, Any]]:
        """Return what to replace, and by what."""

        def of_seconds(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda seconds=None: function(self.now_s() if seconds is None else seconds)

        def strftime(form: str, *of: Any) -> str:
            return time.strftime(form, *(of or (time.localtime(self.now_s()),)))

        functions: dict[str, Any] = {
            **self.durations(),
            "time": self.now_s,
            "time_ns": lambda: int(self.now_s() * 1e9),
            "strftime": strftime,
            **{name: of_seconds(getattr(time, name)) for name in ("localtime", "gmtime", "ctime")},
        }
        classes = {"datetime": _shifted_class(datetime.datetime, self), "date": _shifted_class(datetime.date, self)}
        return [
            (time, _Shifted(time, functions)),
            (datetime, _Shifted(datetime, classes)),
            *((getattr(time, name), new) for name, new in functions.items()),
            *((getattr(datetime, name), new) for name, new in classes.items()),
        ]


class _ElapsingClock(_AheadClock):
    """A clock that is ahead by what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0

    def add(self, seconds: float) -> None:
        self.ahead_s += seconds

    def now_s(self) -> float:
        return time.time() + self.ahead_s

    def durations(self) -> dict[str, Callable[[], Any]]:
        def ahead(function: Callable[[], Any], unit: float) -> Callable[[], Any]:
            return lambda: function() + type(function())(self.ahead_s * unit)

        names = ("monotonic", "perf_counter", "process_time")
        nanoseconds = {f"{name}_ns": ahead(getattr(time, f"{name}_ns"), 1e9) for name in names}
        return {name: ahead(getattr(time, name), 1.0) for name in names} | nanoseconds


def _shifted_class(original: type[Any], clock: _AheadClock) -> type[Any]:
    """Return a subclass whose instances are those of the original, and whose now and today are the clock's."""

    class Shifting(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __eq__(cls, other: object) -> bool:  # a table by classes, as of type hints, has the original
            return other is original or other is cls

        def __hash__(cls) -> int:
            return hash(original)

    def new(cls: type[Any], *args: Any, **more: Any) -> Any:
        return original(*args, **more)

    def now(cls: type[Any], tz: Any = None) -> Any:
        return original.fromtimestamp(clock.now_s(), tz)

    body: dict[str, Any] = {
        "__new__": new,
        "today": classmethod(lambda cls: original.fromtimestamp(clock.now_s())),
        # pydantic knows classes by identity, and refuses others in its models.
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: handler(original)),
    }
    if hasattr(original, "now"):
        utcnow = classmethod(lambda cls: now(cls, datetime.UTC).replace(tzinfo=None))
        body |= {"now": classmethod(now), "utcnow": utcnow}
    return Shifting(original.__name__, (original,), body)
