"""EnvContract, a test class for environments, and check_env, a function: two ways to run the conformance suite.

Example of all that the author of an environment writes::

    from agentenv.testing import EnvContract


    class TestMine(EnvContract):
        env = "my_env"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from agentenv.core.types import Task
from agentenv.errors import ConfigError, InfraError
from agentenv.testing.conformance import suite
from agentenv.testing.conformance.cases import Policy
from agentenv.testing.conformance.context import ConformanceContext, ConformanceOptions
from agentenv.testing.conformance.problems import Problem


def check_env(
    target: str | type[Any], *, env_kwargs: Mapping[str, Any] | None = None, task: Task | None = None, **more: Any
) -> list[Problem]:
    """Return the problems of an environment in all properties; an empty list if it is fit for training.

    Args:
        target: an installed environment, module:Attr, path/file.py[:Attr], an agent_func.py, or the class itself.
        env_kwargs: arguments of its constructor.
        task: the task to run; None for the environment's own data, or for a built-in question if it has no data.
        more: other fields of `ConformanceOptions`, such as `data`, `num_rows`, `max_turns` and `policy`.

    Raises:
        ConfigError: the target cannot be loaded.
        InfraError: infrastructure failed in every attempt, and no problem was found.
    """
    context = suite.make_context(ConformanceOptions(target, env_kwargs or {}, task, **more))
    outcomes = suite.run_suite(context)
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    outage = next((outcome.reason for outcome in outcomes if outcome.state == "outside"), None)
    if outage is not None and not problems:
        raise InfraError(f"{context.name}: {outage}")
    return problems


class EnvContract:
    """A base class with one test for each property of the conformance suite; a subclass names the environment.

    The tests are plain functions and need no pytest plugin. A property that does not apply to the environment is
    skipped with the reason. After `contract` fails, the others are skipped too. Set `__test__ = False` in a class that
    is only the base of other classes.
    """

    env: ClassVar[str | type[Any]] = ""
    """As `agentenv check` takes it, or the class itself."""
    env_kwargs: ClassVar[Mapping[str, Any]] = {}
    """Arguments of its constructor."""
    data: ClassVar[str | Path | None] = None
    """A file or the name of built-in data; None: the environment's own data."""
    prompt_key: ClassVar[str] = "prompt"
    """Column of the data with the prompt."""
    label_key: ClassVar[str] = "label"
    """Column of the data with the label."""
    task: ClassVar[Task | None] = None
    """A task to run in place of data."""
    num_rows: ClassVar[int] = 20
    """Number of rows of each dataset to call `reset` with."""
    max_turns: ClassVar[int | None] = None
    """Every episode must end by itself within this number of turns, for any policy. None: within 12, unless the class
    has `max_turns`, at which the loop ends it."""
    step_timeout_s: ClassVar[float] = 30.0
    """Maximum duration of one call."""
    policy: ClassVar[Policy | None] = None
    """More actions to try, such as those that solve the task. Wrap a function in `staticmethod`."""
    skip: ClassVar[Mapping[str, str]] = {}
    """Reason for each property to skip, by name."""
    __test__: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check `env` and `skip` of a subclass.

        Raises:
            ConfigError: the environment is missing, or `skip` has an unknown property or an empty reason.
        """
        super().__init_subclass__(**kwargs)
        suite.check_names(tuple(cls.skip), f"{cls.__name__}.skip")
        for name, reason in cls.skip.items():
            if not isinstance(reason, str) or not reason.strip():
                raise ConfigError(f"{cls.__name__}.skip[{name!r}]: expected a reason, got {reason!r}. Add the reason.")
        if "__test__" not in vars(cls):
            if not cls.env:
                raise ConfigError(
                    f'{cls.__name__}.env: expected an environment, got {cls.env!r}. Write env = "NAME" in the class; '
                    "in a base of other classes, __test__ = False."
                )
            cls.__test__ = True

    @classmethod
    def teardown_class(cls) -> None:
        """Close the event loop that the tests of the class share."""
        _STOPPED.pop(cls, None)
        context = _CONTEXTS.pop(cls, None)
        if context is not None:
            context.close()


_CONTEXTS: WeakKeyDictionary[type[EnvContract], ConformanceContext] = WeakKeyDictionary()
_STOPPED: WeakKeyDictionary[type[EnvContract], str] = WeakKeyDictionary()
"""The failed property that must be fixed first."""
_OPTIONS = ("env_kwargs", "task", "prompt_key", "label_key", "num_rows", "step_timeout_s", "max_turns", "policy")
"""Attributes of the class that are options of the suite."""
_FLAG = re.compile(r"--(env_kwargs|data|prompt_key|label_key|rows|max_turns|step_timeout_s|label)\b")
_ATTRIBUTES = {"rows": "num_rows", "label": "task"}


def _context(cls: type[EnvContract]) -> ConformanceContext:
    """Return the context that all tests of a class share, so that its episodes run once."""
    if cls not in _CONTEXTS:
        options = {name: getattr(cls, name) for name in _OPTIONS}
        data = None if cls.data is None else str(cls.data)
        _CONTEXTS[cls] = suite.make_context(ConformanceOptions(cls.env, data=data, **options))
    return _CONTEXTS[cls]


def _in_class(text: str) -> str:
    """Replace flags in a line by the attributes of the class."""
    return _FLAG.sub(lambda flag: f"`{_ATTRIBUTES.get(flag[1], flag[1])} = …`", text)


def _test_of(name: str) -> Callable[[EnvContract], None]:
    def test(self: EnvContract) -> None:
        import pytest

        __tracebackhide__ = True
        cls = type(self)
        if name in cls.skip:
            pytest.skip(cls.skip[name])
        if _STOPPED.get(cls, name) != name:
            pytest.skip(f"fix `{_STOPPED[cls]}` first")
        outcome = suite.check_property(_context(cls), name)
        if outcome.state == "skipped":
            pytest.skip(_in_class(outcome.reason))
        if outcome.state == "outside":
            pytest.fail(f"{name}: {outcome.reason}", pytrace=False)
        if outcome.problems:
            if suite.blocks_others(_context(cls), outcome):
                _STOPPED[cls] = name
            lines = "\n".join(_in_class(str(problem)) for problem in outcome.problems)
            pytest.fail(f"{name}: {suite.meaning(name)}\n{lines}", pytrace=False)

    test.__name__, test.__qualname__ = f"test_{name}", f"EnvContract.test_{name}"
    test.__doc__ = suite.PROPERTIES[name].__doc__
    return test


for _name in suite.PROPERTIES:
    setattr(EnvContract, f"test_{_name}", _test_of(_name))
