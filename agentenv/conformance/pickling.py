"""The property `pickling`: what travels between processes does, and what comes from the command line can."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from agentenv.conformance.passes import noted
from agentenv.conformance.problems import Problem, problem_at, unique
from agentenv.conformance.records import own_classes
from agentenv.conformance.scene import Scene
from agentenv.types import StepResult

_CANNOT = (pickle.PickleError, TypeError, AttributeError, ValueError, RecursionError, ImportError)


def pickling(scene: Scene) -> list[Problem]:
    """The class, its arguments and all that its methods give can be pickled and copied; arguments are JSON."""
    scene.needs_steps()
    cls = scene.agent_cls
    problems = [*_of_class(cls), *_of_arguments(cls, scene.kwargs)]
    for one in noted(scene):
        for call in one.seen:
            if call.error is None and call.method in ("reset", "step", "on_truncate"):
                problems += _of_value(cls, call.method, call.value)
    return unique(problems)


def _of_class(cls: type[Any]) -> Iterator[Problem]:
    for own in own_classes(cls)[:1]:
        error = _refusal(own)
        if error is not None:
            mend = "Define it at the top of a module: processes of --env_actors and of `spawn` import it by name."
            yield problem_at(cls, "step", "a class that can be pickled", error, mend)


def _of_arguments(cls: type[Any], kwargs: Any) -> Iterator[Problem]:
    for name, value in kwargs.items():
        error = _refusal(value)
        if error is not None:
            mend = f"Pass what `{name}` is made from, and make it in __init__ or reset."
            yield problem_at(cls, "__init__", f"an argument {name!r} that can be pickled", error, mend)
            continue
        try:
            plain = json.loads(json.dumps(value))
        except (TypeError, ValueError) as told:
            plain, error = None, str(told)
        if plain != value and not isinstance(value, tuple):
            mend = "Take text, numbers, lists and objects: --env_kwargs and a run's record are JSON."
            got = error or f"{value!r:.80}, which comes back as {plain!r:.80}"
            yield problem_at(cls, "__init__", f"an argument {name!r} that is JSON", got, mend)


def _of_value(cls: type[Any], method: str, value: Any) -> Iterator[Problem]:
    error = _refusal(value)
    if error is not None:
        mend = "Return text, numbers and messages: --env_actors moves them between processes."
        yield problem_at(cls, method, "what can be pickled", error, mend)
    elif isinstance(value, StepResult):
        again = pickle.loads(pickle.dumps(value))
        if repr(again) != repr(value) or repr(deepcopy(value)) != repr(value):
            mend = "Return text, numbers and messages, or give what is returned its own value as an object."
            yield problem_at(cls, method, "a result that is the same when pickled", f"{again!r:.120}", mend)


def _refusal(value: Any) -> str | None:
    """Why something cannot be pickled or copied; None where it can."""
    try:
        pickle.loads(pickle.dumps(value))
        deepcopy(value)
    except _CANNOT as error:
        return f"{type(error).__name__}: {error}"
    return None
