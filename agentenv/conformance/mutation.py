"""The property `mutation`: an environment changes nothing that it is given, and nothing that it has given."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.check_watch import Seen
from agentenv.conformance.problems import Problem, problem_at, unique
from agentenv.conformance.scene import Scene
from agentenv.types import StepResult

_GIVEN = ("observation", "label", "metadata")
_COPY = "Copy it first: the samples of a group, and other loops, share what they give."
_OWN = "Return a new list: `[*self.messages]`, or the new messages alone."


@dataclass
class _Watched:
    """What the methods of one episode get and give."""

    cls: type[Any]
    problems: list[Problem] = field(default_factory=list)
    given_back: list[tuple[str, Any, str]] = field(default_factory=list)
    """Method, list that it returned, and what was in it then."""
    messages: list[Any] = field(default_factory=list)
    """Of the last observation in messages."""

    async def around(self, agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Compare before and after a call."""
        watched = {name: given[name] for name in _GIVEN if name in given} if isinstance(given, Mapping) else {}
        before = {name: repr(value) for name, value in watched.items()}
        value = await work
        for name, was in before.items():
            if method != "__init__" and repr(watched[name]) != was:
                got = f"{was:.60} made {watched[name]!r:.80}"
                self.problems.append(problem_at(self.cls, method, f"states[{name!r}] to be left as it is", got, _COPY))
        self._later()
        self._keep(method, value)
        return value

    def _later(self) -> None:
        """What was given before must be what it was."""
        for method, value, was in self.given_back:
            if repr(value) != was:
                got = f"{was:.60} made {value!r:.80} by a later call"
                expected = "an observation that stays what it was when it was given"
                self.problems.append(problem_at(self.cls, method, expected, got, _OWN))
        self.given_back = []

    def _keep(self, method: str, value: Any) -> None:
        if isinstance(value, StepResult):
            observation: Any = value.observation
        else:
            key = "observation" if method == "reset" else "environment_" + "feedback"
            observation = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(observation, list):
            return
        self.given_back = [*self.given_back, (method, observation, repr(observation))]
        said, self.messages = self.messages, [dict(message) for message in observation]
        if method == "step" and said and self.messages[: len(said)] == said and len(self.messages) > len(said):
            got = f"{len(said)} messages of the last one again, and {len(self.messages) - len(said)} new"
            mend = "Return the new messages alone: the conversation so far is there already."
            self.problems.append(problem_at(self.cls, method, "an observation of new messages", got, mend))


def mutation(scene: Scene) -> list[Problem]:
    """States, labels, messages and arguments are left as they are given; what is returned is not changed later."""
    scene.needs_steps()
    cls, problems = scene.agent_cls, list[Problem]()
    arguments = {name: repr(value) for name, value in scene.kwargs.items()}
    seen: list[Seen] = []
    for case in scene.cases:
        watched = _Watched(cls)
        scene.run(scene.episode(case, source=scene.spied(seen, watched.around)))
        problems += watched.problems
    for name, was in arguments.items():
        if repr(scene.kwargs[name]) != was:
            got = f"{was:.60} made {scene.kwargs[name]!r:.80}"
            mend = "Copy it in __init__: all episodes are made with the same arguments."
            problems.append(problem_at(cls, "__init__", f"the argument {name!r} to be left as it is", got, mend))
    return unique(problems)
