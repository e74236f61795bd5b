"""EnvContract: the conformance suite as a class that an environment's tests inherit; check_env: the same as a call.

Example, all that a third party writes::

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

from agentenv.conformance.cases import Policy
from agentenv.conformance.problems import Problem
from agentenv.conformance.scene import Options, Scene
from agentenv.conformance.suite import PROPERTIES, hold, known_names, meaning, run_suite, scene_of, stops
from agentenv.errors import ConfigError
from agentenv.types import Task


def check_env(
    target: str | type[Any], *, env_kwargs: Mapping[str, Any] | None = None, task: Task | None = None, **more: Any
) -> list[Problem]:
    """What an environment breaks of all properties; empty when it may be trained with.

    Args:
        target: an installed environment, module:Attr, path/file.py[:Attr], an agent_func.py, or the class itself.
        env_kwargs: arguments of its constructor.
        task: to try it on; its own data, or a question of ours, where there is none.
        more: the other fields of `agentenv.conformance.scene.Options`, as `data`, `num_rows`, `max_turns`, `policy`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    scene = scene_of(Options(target, env_kwargs or {}, task, **more))
    return [problem for outcome in run_suite(scene) for problem in outcome.problems]


class EnvContract:
    """One test for each property of the conformance suite; inherit it, and name the environment.

    The tests are plain functions: no plugin of pytest is needed. A property that says nothing about the environment is
    skipped with the reason; once `contract` has failed, the others are skipped too. A base of other such classes says
    `__test__ = False`.
    """

    env: ClassVar[str | type[Any]] = ""
    """As `agentenv check` takes it, or the class itself."""
    env_kwargs: ClassVar[Mapping[str, Any]] = {}
    """Arguments of its constructor."""
    data: ClassVar[str | Path | None] = None
    """A file or the name of built-in data to try it on; None: its own."""
    prompt_key: ClassVar[str] = "prompt"
    """Column of the data with the prompt."""
    label_key: ClassVar[str] = "label"
    """Column of the data with the label."""
    task: ClassVar[Task | None] = None
    """A task to try it on in place of data."""
    num_rows: ClassVar[int] = 20
    """Rows of each data set that `reset` is tried on."""
    max_turns: ClassVar[int] = 12
    """An episode has to end within so many, whatever the policy says."""
    step_timeout_s: ClassVar[float] = 30.0
    """Longest that one call may take."""
    policy: ClassVar[Policy | None] = None
    """Further actions to try, such as those that solve the task; a function is wrapped in `staticmethod`."""
    skip: ClassVar[Mapping[str, str]] = {}
    """Properties that are left out, each with the reason."""
    __test__: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class that names no environment, and to leave out what is no property, or without a reason.

        Raises:
            ConfigError: naming it.
        """
        super().__init_subclass__(**kwargs)
        known_names(tuple(cls.skip), f"{cls.__name__}.skip")
        for name, reason in cls.skip.items():
            if not isinstance(reason, str) or not reason.strip():
                raise ConfigError(f"{cls.__name__}.skip[{name!r}]: expected the reason, got {reason!r}. Write it down.")
        if "__test__" not in vars(cls):
            if not cls.env:
                raise ConfigError(
                    f'{cls.__name__}.env: expected an environment, got {cls.env!r}. Write env = "NAME" in the class; '
                    "in a base of other classes, __test__ = False."
                )
            cls.__test__ = True

    @classmethod
    def teardown_class(cls) -> None:
        """End what the tests of the class shared: their event loop."""
        _STOPPED.pop(cls, None)
        scene = _SCENES.pop(cls, None)
        if scene is not None:
            scene.close()


_SCENES: WeakKeyDictionary[type[EnvContract], Scene] = WeakKeyDictionary()
_STOPPED: WeakKeyDictionary[type[EnvContract], str] = WeakKeyDictionary()
"""The property that is to be mended first, once its test has failed."""
_FLAG = re.compile(r"--(env_kwargs|data|prompt_key|label_key|rows|max_turns|step_timeout_s|label)\b")
_ATTRIBUTES = {"rows": "num_rows", "label": "task"}


def _scene(cls: type[EnvContract]) -> Scene:
    """One for all tests of a class: its episodes are run once."""
    if cls not in _SCENES:
        _SCENES[cls] = scene_of(_options(cls))
    return _SCENES[cls]


def _options(cls: type[EnvContract]) -> Options:
    data = None if cls.data is None else str(cls.data)
    return Options(
        cls.env,
        cls.env_kwargs,
        cls.task,
        data=data,
        prompt_key=cls.prompt_key,
        label_key=cls.label_key,
        num_rows=cls.num_rows,
        step_timeout_s=cls.step_timeout_s,
        max_turns=cls.max_turns,
        policy=cls.policy,
    )


def _in_class(text: str) -> str:
    """What a line says of flags, of the class's attributes."""
    return _FLAG.sub(lambda flag: f"`{_ATTRIBUTES.get(flag[1], flag[1])} = …`", text)


def _test_of(name: str) -> Callable[[EnvContract], None]:
    def test(self: EnvContract) -> None:
        """Fails with the problems of one property."""
        import pytest

        __tracebackhide__ = True
        cls = type(self)
        if name in cls.skip:
            pytest.skip(cls.skip[name])
        if _STOPPED.get(cls, name) != name:
            pytest.skip(f"mend `{_STOPPED[cls]}` first")
        outcome = hold(_scene(cls), name)
        if outcome.state == "skipped":
            pytest.skip(_in_class(outcome.reason))
        if outcome.problems:
            if stops(outcome):
                _STOPPED[cls] = name
            lines = "\n".join(_in_class(str(problem)) for problem in outcome.problems)
            pytest.fail(f"{name}: {meaning(name)}\n{lines}", pytrace=False)

    test.__name__, test.__qualname__ = f"test_{name}", f"EnvContract.test_{name}"
    test.__doc__ = PROPERTIES[name].__doc__
    return test


for _name in PROPERTIES:
    setattr(EnvContract, f"test_{_name}", _test_of(_name))
