"""The property `contract`: odd actions, with every call watched; what breaks the contract is named with its line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentenv.agent import AgentInstance, hacks_of
from agentenv.check_watch import Hung, Seen
from agentenv.conformance import chats
from agentenv.conformance.cases import CALL_OF_NOTHING, LABEL, ODD_ACTIONS
from agentenv.conformance.problems import (
    Problem,
    attribute_at,
    place_of_method,
    problem_at,
    raised,
    read_message,
    short,
    unique,
)
from agentenv.conformance.scene import Scene
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode import EpisodeKey
from agentenv.errors import ConfigError, ContractError
from agentenv.executor import AgentFunc
from agentenv.molt_files import Env as MoltEnv
from agentenv.openrlhf import parse_step
from agentenv.trajectory import Trajectory
from agentenv.types import SamplingParams, StepResult, StopReason


def contract(scene: Scene) -> list[Problem]:
    """Every call gives what it may, and raises nothing, whatever the policy says."""
    cls = scene.agent_cls
    problems = _static_run(cls) if scene.own_loop else _static(cls)
    return problems or _tried(scene)  # running it would only say the same again


def _tried(scene: Scene) -> list[Problem]:
    problems = _Trial(scene).run() or _of_gold(scene)
    if not scene.own_task:
        return problems
    hint = f" It was tried on a task of check's own, with the label {LABEL!r}: --label or --data name another."
    raises = ("no exception", "an episode without an error")
    return [replace(each, mend=each.mend + hint) if each.expected in raises else each for each in problems]


def _of_gold(scene: Scene) -> list[Problem]:
    if scene.own_loop or isinstance(scene.source, AgentFunc):
        return []
    cls, problems = scene.agent_cls, []
    for index, task in enumerate(scene.tasks):
        error = scene.gold(task, 1_000 * index if task.seed is None else task.seed)[1]
        if isinstance(error, ContractError):
            problems.append(problem_at(cls, "gold", *read_message(str(error), f"{cls.__name__}.gold")))
    return unique(problems)


def of_hung(scene: Scene, hung: Hung) -> Problem:
    """The problem of a call that blocks.

    Raises:
        ConfigError: it is the import of the file.
    """
    call, cls = hung.call, scene.cls
    if cls is None:
        at = f" at line {call.line}" if call.line else ""
        raise ConfigError(
            f"{scene.name}: expected to be imported within {call.limit_s:g} s, got no end{at}. Put what takes so "
            "long into `reset`, or raise --step_timeout_s."
        ) from hung
    mend = "It blocks the event loop, on which all episodes run, or does not end when it is cancelled: make it a "
    mend += "plain `def`, or await instead."
    if call.method == "__init__":
        mend = "It blocks the event loop, on which all episodes run: what takes time belongs in `reset`."
    problem = problem_at(cls, call.method, f"an answer within {call.limit_s:g} s", "none", mend)
    return replace(problem, line=scene.watch.lines.get(call.method, problem.line))


class _Trial:
    """The episodes of odd actions, each action once the first."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.watch = scene, scene.watch
        self.limits = replace(scene.limits, max_length=20_000)
        if scene.own_loop:
            self.limits = replace(self.limits, episode_timeout_s=2 * self.limits.step_timeout_s)

    def run(self) -> list[Problem]:
        """Run the episodes, on event loops of their own."""
        scene, cls, problems = self.scene, self.scene.agent_cls, []
        label = scene.tasks[0].label
        actions = (*ODD_ACTIONS, str(label), f"#### {label}", *([CALL_OF_NOTHING] if scene.own_loop else ()))
        for first in range(len(actions)):
            seen: list[Seen] = []
            trajectory = scene.run(self.episode([*actions[first:], *actions[:first]], seen))
            problems += self.judge_run(cls, trajectory) if scene.own_loop else self.judge(cls, seen, trajectory)
            if trajectory.stop_reason in (StopReason.STEP_TIMEOUT, StopReason.EPISODE_TIMEOUT):
                break  # each further episode would hang as long
        return unique(problems)

    async def episode(self, actions: list[str], seen: list[Seen]) -> Trajectory:
        """One episode of a policy that says these actions."""
        # The template of tiny-math has tools.
        chat = chats.with_tools() if self.scene.own_loop else chats.plain()
        return await self.scene.spied(seen).episode(
            self.scene.tasks[0],
            engine=ScriptedEngine(actions * 3, chat.tokenizer),
            chat=chat,
            sampling=SamplingParams(max_tokens=100),
            limits=self.limits,
            key=EpisodeKey("check", seed=0),
        )

    def at_line(self, problem: Problem, method: str) -> Problem:
        """The same problem in the line where the method was last seen."""
        return replace(problem, line=self.watch.lines.get(method, problem.line))

    def timed_out(self, cls: type[Any], trajectory: Trajectory) -> Problem:
        """The problem of a call that its deadline ended."""
        where = trajectory.error.where if trajectory.error is not None else "step"
        method = {"create": "__init__"}.get(where, where)
        expected = f"an answer within {self.limits.step_timeout_s:g} s"
        mend = "It hangs: give what it waits for a deadline of its own."
        if self.scene.left and not self.scene.own_loop:
            mend = "It hangs, and does not end when it is cancelled: let CancelledError pass."
        return self.at_line(problem_at(cls, method, expected, "none", mend), method)

    def judge_run(self, cls: type[Any], trajectory: Trajectory) -> list[Problem]:
        """What one episode of an agent with a loop of its own broke."""
        if trajectory.stop_reason is StopReason.EPISODE_TIMEOUT:
            mend = "Give up after a bounded number of requests, and where the endpoint refuses one."
            expected = f"an end within {self.limits.episode_timeout_s:g} s"
            return [self.at_line(problem_at(cls, "run", expected, "none", mend), "run")]
        if trajectory.stop_reason is StopReason.STEP_TIMEOUT:
            return [self.timed_out(cls, trajectory)]
        error = trajectory.error
        if error is not None:
            method = {"create": "__init__"}.get(error.where, error.where)
            where = f"{cls.__name__}.{method}"
            if error.message.startswith(f"{where}: expected "):
                return [problem_at(cls, method, *read_message(error.message, where))]
            file, line = place_of_method(cls, method)
            path, _, number = error.place.rpartition(":")
            mend = "Handle every answer a policy may give: empty, cut, a call of a tool that is not there."
            mend = mend if method == "run" else "Mend it."
            got = f"{error.type}: {error.message}".rstrip(".")
            return [Problem(short(path or file), int(number or line), where, "no exception", got, mend)]
        score = trajectory.score
        if score is not None and not 0.0 <= score <= 1.0:
            return [
                problem_at(cls, "run", "a score in [0, 1]", f"{score!r}", "Score quality; put the rest in the reward.")
            ]
        return []

    def judge(self, cls: type[AgentInstance], seen: list[Seen], trajectory: Trajectory) -> list[Problem]:
        """What one episode of an environment broke."""
        if trajectory.stop_reason is StopReason.STEP_TIMEOUT:
            return [self.timed_out(cls, trajectory)]
        problems: list[Problem] = []
        for one in seen:
            if one.error is not None:
                problems.append(raised(cls, one.method, one.error))
            elif one.method == "step":
                problems += _judge_step(cls, one.value)
        error = trajectory.error
        if error is not None and not problems:
            method = {"create": "__init__", "prompt": "reset"}.get(error.where, error.where)
            problems.append(
                problem_at(cls, method, "an episode without an error", f"{error.type}: {error.message}", "Mend it.")
            )
        if error is None and len([one for one in seen if one.method == "step"]) >= self.limits.max_turns:
            problems.append(
                problem_at(
                    cls, "step", f"an end within {self.limits.max_turns} turns", "none",
                    "Set terminated or truncated (in a dict: done) after a bounded number of attempts.",
                )
            )  # fmt: skip
        return problems


def _static(cls: type[AgentInstance]) -> list[Problem]:
    """What the code shows without running: methods that are missing or take no states."""
    problems = []
    if cls.step is AgentInstance.step:
        problems.append(problem_at(cls, "step", "a `step` method", "none", "Write `async def step(self, states)`."))
    for name in ("reset", "step"):
        method = getattr(cls, name)
        try:
            inspect.signature(method).bind(None, {})
        except TypeError as error:
            takes = f"def {name}{inspect.signature(method)} ({error})"
            problems.append(
                problem_at(cls, name, "to be called with the states", takes, f"Write `{name}(self, states)`.")
            )
    return [*problems, *_static_hacks(cls)]


def _static_hacks(cls: type[AgentInstance]) -> list[Problem]:
    try:
        hacks_of(cls)
    except ConfigError as error:
        where = f"{cls.__name__}.hacks"
        file, line = attribute_at(cls, "hacks")
        return [Problem(short(file), line, where, *read_message(str(error), where))]
    return []


def _static_run(cls: type[Any]) -> list[Problem]:
    try:
        inspect.signature(cls.run).bind(None, None)
    except TypeError as error:
        takes = f"def run{inspect.signature(cls.run)} ({error})"
        return [problem_at(cls, "run", "to be called with the context", takes, "Write `run(self, context)`.")]
    return []


def _judge_step(cls: type[AgentInstance], value: Any) -> list[Problem]:
    where = f"{cls.__name__}.step"
    try:
        result = parse_step(value, where)
    except ContractError as error:
        return [problem_at(cls, "step", *read_message(str(error), where))]
    problems = []
    if result.score is not None and not 0.0 <= result.score <= 1.0:
        problems.append(
            problem_at(
                cls, "step", "a score in [0, 1]", f"{result.score!r}", "Score quality; put the rest in the reward."
            )
        )
    problems += _judge_info(cls, result)
    if (
        isinstance(value, Mapping)
        and not issubclass(cls, MoltEnv)
        and isinstance(value["rewards"], (int, float))
        and not hasattr(value["rewards"], "item")
    ):
        problems.append(
            problem_at(
                cls, "step", "rewards with .item(), as OpenRLHF reads them", f"{value['rewards']!r}",
                "Return torch.tensor([reward]), or a StepResult, which agentenv's AgentExecutor converts.",
            )
        )  # fmt: skip
    return problems


def _judge_info(cls: type[AgentInstance], result: StepResult) -> list[Problem]:
    bad = {
        key: value
        for key, value in result.info.items()
        if not isinstance(value, str) and not (hasattr(value, "__float__") and math.isfinite(float(value)))
    }
    if not bad:
        return []
    return [problem_at(cls, "step", "finite numbers or text in info", f"{bad!r}", "Convert them, or leave them out.")]
