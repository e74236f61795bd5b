"""The property `isolation`: episodes that run at the same time know nothing of each other."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

from agentenv.conformance.cases import Case, yielding
from agentenv.conformance.passes import alone
from agentenv.conformance.problems import Problem, attribute_at, problem_at, short, unique
from agentenv.conformance.records import culprit, difference, own_classes
from agentenv.conformance.scene import NotApplicable, Scene
from agentenv.trajectory import Trajectory

NUM_TOGETHER = 32
_PLAIN = (
    list, dict, set, bytearray, deque, Counter, defaultdict, OrderedDict, MappingProxyType, tuple, frozenset, int,
    float, str, bool, type(None),
)  # fmt: skip
_SHARED_ON_PURPOSE = ("cache", "lock")
_REPLACED = (int, float, str, bool, type(None))
"""They change by `cls.name = …` alone, which nobody writes by mistake: a counter is one's own where no episode shows
it. A list or dict of the class is what `self.name.append` changes for all."""


def isolation(scene: Scene) -> list[Problem]:
    """Of 32 episodes at the same time each is as it is alone, and none changes what belongs to the class."""
    scene.needs_steps()
    cls = scene.agent_cls
    before = _class_state(cls), _module_state(cls)
    records = alone(scene)
    together = scene.run(_together(scene))
    differs = _difference(scene, records, together)
    changed = [name for name, value in _class_state(cls).items() if before[0].get(name, value) != value]
    changed = [name for name in changed if differs or not isinstance(getattr(cls, name, None), _REPLACED)]
    said = f"; {differs[1]}" if differs else ""
    problems = [_shared(cls, name, said) for name in changed]
    if differs and not problems:
        if scene.run(_differs_alone(scene, records)):
            raise NotApplicable("episodes differ when they are run alone, too: mend `determinism` first")
        meanwhile = [name for name, value in _module_state(cls).items() if before[1].get(name, value) != value]
        hint = f" Look at {', '.join(meanwhile)} of the module, which changed meanwhile." if meanwhile else ""
        expected = f"the same episode alone and among {NUM_TOGETHER}"
        mend = f"Keep what belongs to an episode on `self`, set in __init__ or reset.{hint}"
        problems.append(problem_at(cls, differs[0], expected, differs[1], mend))
    return unique(problems)


async def _together(scene: Scene) -> list[tuple[int, Trajectory]]:
    numbered = list(islice(cycle(enumerate(scene.cases)), NUM_TOGETHER))

    async def one(index: int, case: Case, late: int) -> tuple[int, Trajectory]:
        """One of them, begun a little later than the others."""
        for _ in range(late % 7):
            await asyncio.sleep(0)
        return index, await scene.episode(case, engine=yielding(case, scene.tokenizer))

    return await asyncio.gather(*(one(index, case, late) for late, (index, case) in enumerate(numbered)))


def _difference(
    scene: Scene, records: list[Trajectory], together: list[tuple[int, Trajectory]]
) -> tuple[str, str] | None:
    """The method and the first fact of an episode among others that is not as it was alone."""
    for index, trajectory in together:
        found = difference(records[index], trajectory, ("alone", f"among {NUM_TOGETHER}"))
        if found is not None:
            return culprit(found, trajectory), f"{found} (the policy {scene.cases[index].policy!r})"
    return None


async def _differs_alone(scene: Scene, records: list[Trajectory]) -> bool:
    """Whether episodes are not the same again even where nothing else runs."""
    again = [await scene.episode(case, engine=yielding(case, scene.tokenizer)) for case in scene.cases]
    return any(difference(one, other, ("", "")) for one, other in zip(records, again, strict=True))


def _shared(cls: type[Any], name: str, said: str) -> Problem:
    file, line = attribute_at(cls, name)
    return Problem(
        short(file), line, f"{cls.__name__}.{name}", "nothing of the class that episodes change",
        f"another value after episodes than before{said}",
        f"Set it in __init__ (`self.{name} = …`): all episodes of a process share what belongs to the class. What is "
        "the same for all of them may stay there with `cache` in its name.",
    )  # fmt: skip


def _class_state(cls: type[Any]) -> dict[str, str]:
    """Plain values that the class, or one that it extends, has in its body."""
    return {name: text for base in reversed(own_classes(cls)) for name, text in _plain(vars(base)).items()}


def _module_state(cls: type[Any]) -> dict[str, str]:
    module = sys.modules.get(own_classes(cls)[0].__module__) if own_classes(cls) else None
    return _plain(vars(module)) if module is not None else {}


def _plain(names: Any) -> dict[str, str]:
    """The values of builtin kinds among these names, as text: whatever else changes is nobody's to judge."""
    own = {name: value for name, value in dict(names).items() if not name.startswith("__")}
    shared = {name for name in own if any(word in name.lower() for word in _SHARED_ON_PURPOSE)}
    return {name: repr(value) for name, value in own.items() if type(value) in _PLAIN and name not in shared}
