"""The property `pickling`: the class, its arguments and its results can be sent to other processes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from agentenv.core.types import StepResult
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import Problem, problem_at, unique
from agentenv.testing.conformance.records import own_classes
from agentenv.testing.conformance.shared_episodes import recorded_episodes

_CANNOT = (pickle.PickleError, TypeError, AttributeError, ValueError, RecursionError, ImportError)


def pickling(context: ConformanceContext) -> list[Problem]:
    """Check that the class, its arguments and its methods' results can be pickled and copied; arguments are JSON."""
    context.require_steps()
    cls = context.agent_cls
    problems = []
    for own in own_classes(cls)[:1]:
        error = _refusal(own)
        if error is not None:
            fix = "Define it at the top level of a module: --env_actors and `spawn` import it by name."
            problems.append(problem_at(cls, "step", "a class that can be pickled", error, fix))
    problems += _of_arguments(cls, context.kwargs)
    for one in recorded_episodes(context):
        for call in one.seen:
            if call.error is None and call.method in ("reset", "step", "on_truncate"):
                problems += _of_value(cls, call.method, call.value)
    return unique(problems)


def _of_arguments(cls: type[Any], kwargs: Any) -> Iterator[Problem]:
    for name, value in kwargs.items():
        error = _refusal(value)
        if error is not None:
            fix = f"Pass the arguments from which to build `{name}`, and build it in __init__ or reset."
            yield problem_at(cls, "__init__", f"an argument {name!r} that can be pickled", error, fix)
            continue
        try:
            plain = json.loads(json.dumps(value))
        except (TypeError, ValueError) as not_json:
            plain, error = None, str(not_json)
        if plain != value and not isinstance(value, tuple):
            fix = "Accept text, numbers, lists and objects: --env_kwargs and the record of a run are JSON."
            got = error or f"{value!r:.80}, which comes back as {plain!r:.80}"
            yield problem_at(cls, "__init__", f"an argument {name!r} that is JSON", got, fix)


def _of_value(cls: type[Any], method: str, value: Any) -> Iterator[Problem]:
    error = _refusal(value)
    if error is not None:
        fix = "Return text, numbers and messages: --env_actors moves them between processes."
        yield problem_at(cls, method, "a result that can be pickled", error, fix)
    elif isinstance(value, StepResult):
        again = pickle.loads(pickle.dumps(value))
        if repr(again) != repr(value) or repr(deepcopy(value)) != repr(value):
            fix = "Return text, numbers and messages, or define __repr__ and pickling on the object."
            yield problem_at(cls, method, "a result that is the same when pickled", f"{again!r:.120}", fix)


def _refusal(value: Any) -> str | None:
    """Return why a value cannot be pickled or copied; None if it can."""
    try:
        pickle.loads(pickle.dumps(value))
        deepcopy(value)
    except _CANNOT as error:
        return f"{type(error).__name__}: {error}"
    return None
