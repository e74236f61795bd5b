"""The properties `mutation` and `pickling`: arguments and results stay what they are, here and elsewhere."""

from __future__ import annotations

import json
import pickle
from collections.abc import Coroutine, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from agentenv.core.types import StepResult
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import Problem, problem_at, unique
from agentenv.testing.conformance.records import own_classes

_INPUTS = ("observation", "label", "metadata")
_COPY = "Copy it first: the samples of a group share their inputs."
_OWN = "Return a new list: `[*self.messages]`, or only the new messages."


@dataclass
class _Watched:
    """Arguments and results of the methods in one episode."""

    cls: type[Any]
    problems: list[Problem] = field(default_factory=list)
    returned: list[tuple[str, Any, str]] = field(default_factory=list)
    """Method, returned list, and its content at that time."""
    messages: list[Any] = field(default_factory=list)
    """Messages of the last observation that had messages."""

    async def around(self, agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Compare the arguments before and after a call."""
        watched = {name: given[name] for name in _INPUTS if name in given} if isinstance(given, Mapping) else {}
        before = {name: repr(value) for name, value in watched.items()}
        value = await work
        for name, was in before.items():
            if method != "__init__" and repr(watched[name]) != was:
                got = f"{was:.60} changed to {watched[name]!r:.80}"
                self.problems.append(problem_at(self.cls, method, f"states[{name!r}] unchanged", got, _COPY))
        for name, result, was in self.returned:
            if repr(result) != was:
                got = f"{was:.60} changed to {result!r:.80} by a later call"
                expected = "an observation that does not change after it is returned"
                self.problems.append(problem_at(self.cls, name, expected, got, _OWN))
        self.returned = []
        self._keep(method, value)
        return value

    def _keep(self, method: str, value: Any) -> None:
        if isinstance(value, StepResult):
            observation: Any = value.observation
        else:
            key = "observation" if method == "reset" else "environment_" + "feedback"
            observation = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(observation, list):
            return
        self.returned = [*self.returned, (method, observation, repr(observation))]
        previous, self.messages = self.messages, [dict(message) for message in observation]
        if (
            method == "step"
            and any(message.get("role") != "tool" for message in previous)  # results of tools may be the same again
            and self.messages[: len(previous)] == previous
            and len(self.messages) > len(previous)
        ):
            got = f"{len(previous)} messages of the last one again, and {len(self.messages) - len(previous)} new"
            fix = "Return only the new messages: the loop keeps the conversation."
            self.problems.append(problem_at(self.cls, method, "an observation with only new messages", got, fix))


def mutation(context: ConformanceContext) -> list[Problem]:
    """States, labels, messages and arguments stay unchanged, and returned results are not changed later."""
    context.require_steps()
    cls, problems = context.agent_cls, list[Problem]()
    arguments = {name: repr(value) for name, value in context.kwargs.items()}
    seen: list[MethodCall] = []
    for case in context.cases:
        watched = _Watched(cls)
        context.run(context.episode(case, source=context.recording_source(seen, watched.around)))
        problems += watched.problems
    for name, was in arguments.items():
        if repr(context.kwargs[name]) != was:
            got = f"{was:.60} changed to {context.kwargs[name]!r:.80}"
            fix = "Copy it in __init__: all episodes share their arguments."
            problems.append(problem_at(cls, "__init__", f"the argument {name!r} unchanged", got, fix))
    return unique(problems)


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
    for one in context.recorded_episodes:
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
