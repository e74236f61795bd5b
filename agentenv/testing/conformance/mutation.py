"""The property `mutation`: an environment changes neither its arguments nor results that it has returned."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.core.types import StepResult
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import Problem, problem_at, unique

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
