"""The property `contract`: runs odd actions, watches every call, and reports each breach with its line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.chat.chat import Chat
from agentenv.chat.tool_roles import REFUSED_TOOLS
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, SamplingParams, StopReason
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.failures import FAILED_SERVICE, NO_METADATA, may_be_a_service
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.interop.openrlhf.executor import AgentExecutor, AgentFunc
from agentenv.testing import chats
from agentenv.testing.conformance.call_watch import Hung, MethodCall
from agentenv.testing.conformance.cases import CALL_OF_NOTHING, LABEL, ODD_ACTIONS, hacks_of
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import (
    HANDLE_ACTIONS,
    Problem,
    after_action,
    attribute_at,
    exception_problem,
    info_problems,
    problem_at,
    read_message,
    record_problem,
    relative_path,
    source_of,
    unique,
)
from agentenv.testing.odd_actions import marked, marked_actions, marked_calls, odd_forms, recorded_marks, slow_pattern
from agentenv.testing.tool_calls import calls_with_number, calls_with_texts, late_tool, right_calls, wrong_calls

_POWER = "9**9**9"
"""A number that takes minutes to compute, for code that evaluates arithmetic. Only a child process can be ended."""
_MAX_ODD_TURNS = 4
"""Maximum number of gold actions that are changed."""


def contract(context: ConformanceContext) -> list[Problem]:
    """Every call returns a valid result and raises nothing, for any action."""
    cls = context.agent_cls
    static = _static(context)
    if not all(each.is_note for each in static):
        return static  # a run would only repeat them
    trial = _Trial(context, context.chat if context.own_loop or context.model_chat else chats.without_tools())
    problems = trial.run()
    if not problems and not context.own_loop and (trial.refusal or context.tools):
        problems = _Trial(context, context.chat, context.tools).run()
    if not problems and not context.own_loop and not isinstance(context.source, AgentFunc):
        for index, task in enumerate(context.tasks):
            gold, error = context.gold(task, 1_000 * index if task.seed is None else task.seed)
            if isinstance(error, ContractError):
                problems.append(problem_at(cls, "gold", *read_message(str(error), f"{cls.__name__}.gold")))
            elif gold and not index:
                problems += _Trial(context, context.chat, gold=gold).run()
    problems += static if trial.refusal is None else [*static, trial.refusal]
    if not context.uses_default_task:
        return problems
    hint = f" The task was the built-in question with the label {LABEL!r}; set another with --label or --data."
    raises = ("no exception", "an episode without an error")
    return [replace(each, fix=each.fix + hint) if each.expected in raises else each for each in problems]


def hung_problem(context: ConformanceContext, hung: Hung) -> Problem:
    """Return the problem of a call that blocks.

    Raises:
        ConfigError: the call is the import of the file.
    """
    call = hung.call
    if "loaded" not in vars(context):
        at = f" at line {call.line}" if call.line else ""
        raise ConfigError(
            f"{context.name}: expected an import within {call.limit_s:g} s, got no end{at}. Move slow work "
            "to `reset`, or raise --step_timeout_s."
        ) from hung
    fix = "It blocks the event loop of all episodes, or ignores cancellation. Make it a plain `def`, await instead of "
    fix += "blocking, or set a deadline for what a plain function waits for."
    if call.method == "__init__":
        fix = "Every episode waits for it. Move slow work to `reset`."
    expected, got = f"an answer within {call.limit_s:g} s", f"none{after_action(call.action)}"
    line = context.watch.lines.get(call.method)
    return problem_at(context.agent_cls, call.method, expected, got, fix, line=line)


class _Trial:
    """Episodes of odd actions, in which each action and each call of a tool comes first once."""

    def __init__(
        self, context: ConformanceContext, chat: Chat, tools: Sequence[Mapping[str, Any]] = (), gold: Sequence[str] = ()
    ) -> None:
        self.context = context
        self.chat = chat
        self.task = [*(context.tool_tasks if tools else ()), *context.tasks][0]
        self.gold = gold
        """The gold actions of the first task; with them, only actions that are nearly right come first."""
        self.powers = [] if context.watch.progress is None else [_POWER, f"#### {_POWER}"]
        power_calls = calls_with_texts(tools if self.powers else [], lambda tool: _POWER)
        calls = (right_calls(tools), wrong_calls(tools), marked_calls(tools), power_calls)
        self.calls = [text for each in calls for text in each.values()]
        self.refusal: Problem | None = None
        """The note that the environment needs a chat template that renders tools."""
        self.watch = context.watch
        self.limits = replace(context.limits, max_length=200_000)
        if context.own_loop:
            self.limits = replace(self.limits, episode_timeout_s=2 * self.limits.step_timeout_s)

    def run(self) -> list[Problem]:
        """Run the episodes and return their problems."""
        with recorded_marks() as marks:
            problems = self.run_episodes()
        if not marks:
            return problems
        expected, got = "no code of an action in this process", f"`{marked(min(marks))}` of an action, which was run"
        fix = "Parse it (json, ast.literal_eval), or run it with agentenv.sandbox: code of a policy can do everything."
        method = "run" if self.context.own_loop else "step"
        return [problem_at(self.context.agent_cls, method, expected, got, fix), *problems]

    def run_episodes(self) -> list[Problem]:
        """Run the episodes and return the problems of their calls."""
        context, cls, problems = self.context, self.context.agent_cls, list[Problem]()
        label = self.task.label
        actions = [*ODD_ACTIONS, str(label), f"#### {label}", *([CALL_OF_NOTHING] if context.own_loop else ())]
        scripts = []
        if not self.gold:
            scripts = [[*actions[first:], *actions[:first]] for first in range(len(actions))]
            given = [*self.calls, *marked_actions().values(), *self.powers, *context.options.actions]
            scripts += [[*said, *actions] for said in (*hacks_of(cls).values(), *([action] for action in given))]
        for turn, action in enumerate(self.gold[:_MAX_ODD_TURNS]):
            forms = [*odd_forms(action).values(), *filter(None, [slow_pattern(action)])]
            forms += [call for number in (0, -1) for call in calls_with_number(action, context.tools, number)]
            scripts += [[*self.gold[:turn], form, *ODD_ACTIONS] for form in forms]
        firsts, num_played = list[Problem](), 0
        for script in scripts:
            actions = [action for action in script if self.may_say(action)]
            if script[0] not in actions:
                continue
            num_played += 1
            seen: list[MethodCall] = []
            try:
                trajectory = context.run(self.episode(actions, seen))
            except InfraError:
                if not problems:
                    raise
                break
            message = "" if trajectory.error is None else trajectory.error.message
            if message.startswith(REFUSED_TOOLS) and context.model_chat is None:
                self.refusal = replace(problem_at(cls, "reset", *read_message(message, "reset")), is_note=True)
                return []
            problems += self.judge_run(cls, seen, trajectory) if context.own_loop else self.judge(cls, seen, trajectory)
            # The end of a call that ignores cancellation is never seen.
            is_stuck = context.own_loop or self.watch.is_stuck or context.pending_tasks
            reason = trajectory.stop_reason
            if reason is StopReason.EPISODE_TIMEOUT or (reason is StopReason.STEP_TIMEOUT and is_stuck):
                break  # each further episode would hang as long
            first = next((one for one in seen if one.method == "step"), None)
            if first is not None and first.error is not None:
                firsts.append(exception_problem(cls, "step", first.error))
        found = unique(problems)
        if len(firsts) == num_played and len(unique(firsts)) == 1:
            found = [self.of_any_action(problem) if problem == firsts[0] else problem for problem in found]
        return found

    def may_say(self, action: str) -> bool:
        """Return True unless the call of an action is known to be slow, or may hang as another one did."""
        watch = self.watch
        if not watch.quick:
            return True
        return action not in watch.slow and (not watch.num_hangs or action in watch.quick or action in self.gold)

    def of_any_action(self, problem: Problem) -> Problem:
        """Return the problem of an exception that every action causes."""
        if not problem.fix.endswith(HANDLE_ACTIONS):
            return problem
        cls, is_missing = self.context.agent_cls, not self.task.metadata
        advice = NO_METADATA if is_missing and "metadata" in source_of(cls) else "Fix it."
        fix = problem.fix.replace(HANDLE_ACTIONS, f"It happens with every action. {advice}")
        return replace(problem, fix=fix)

    async def episode(self, actions: list[str], seen: list[MethodCall]) -> Trajectory:
        """Run one episode of these actions."""
        engine = ScriptedEngine(actions * 3, self.chat.tokenizer)
        sampling = SamplingParams(max_tokens=max(map(len, actions)) + 1)
        setup = EpisodeSetup(engine, self.chat, sampling, self.limits)
        source = self.context.recording_source(seen)
        return await self.context.run_episode(source, self.task, setup, EpisodeKey("check", seed=0))

    def timed_out(self, cls: type[Any], trajectory: Trajectory) -> Problem:
        """Return the problem of a call that exceeded its deadline."""
        where = trajectory.error.where if trajectory.error is not None else "step"
        method = {"create": "__init__"}.get(where, where)
        expected = f"an answer within {self.limits.step_timeout_s:g} s"
        got = f"none{after_action(trajectory.turns[-1].action)}" if method == "step" and trajectory.turns else "none"
        fix = "It hangs. Set a deadline for what it waits for."
        if self.context.pending_tasks and not self.context.own_loop:
            fix = "It hangs and ignores cancellation. Let CancelledError pass."
        return problem_at(cls, method, expected, got, fix, line=self.watch.lines.get(method))

    def judge_run(self, cls: type[Any], seen: list[MethodCall], trajectory: Trajectory) -> list[Problem]:
        """Return the problems of one episode of an agent that runs its own loop."""
        if trajectory.stop_reason is StopReason.EPISODE_TIMEOUT:
            fix = "Stop after a bounded number of requests, and when the endpoint rejects one."
            expected = f"an end within {self.limits.episode_timeout_s:g} s"
            return [problem_at(cls, "run", expected, "none", fix, line=self.watch.lines.get("run"))]
        if trajectory.stop_reason is StopReason.STEP_TIMEOUT:
            return [self.timed_out(cls, trajectory)]
        if trajectory.error is None:
            return []
        fix = "Handle every answer a policy may give: empty, cut off, or a call of an unknown tool."
        fix = fix if trajectory.error.where == "run" else "Fix it."
        fix = FAILED_SERVICE if any(may_be_a_service(one.error) for one in seen) else fix
        return [record_problem(cls, trajectory.error, "no exception", fix)]

    def judge(self, cls: type[AgentInstance], seen: list[MethodCall], trajectory: Trajectory) -> list[Problem]:
        """Return the problems of one episode of an environment."""
        if trajectory.stop_reason is StopReason.STEP_TIMEOUT:
            return [self.timed_out(cls, trajectory)]
        problems = [exception_problem(cls, one.method, one.error) for one in seen if one.error is not None]
        for turn in trajectory.turns:
            problems += info_problems(cls, "step", turn.result.info) if turn.result is not None else []
            late = late_tool(str(turn.result.observation)) if self.gold and turn.result is not None else ""
            if late:
                expected, got = f"a result of the tool {late}", f"none within its limit{after_action(turn.action)}"
                problems.append(problem_at(cls, "step", expected, got, "It hangs. Check its arguments."))
        # OpenRLHF reads the dicts of these itself; those of other classes go through agentenv's AgentExecutor.
        of_openrlhf = any(base.__name__ == "AgentInstanceBase" for base in cls.__mro__)
        for value in (one.value for one in seen if one.method == "step" and of_openrlhf):
            reward = value.get("rewards") if isinstance(value, Mapping) else None
            if isinstance(reward, int | float) and not hasattr(reward, "item"):
                expected, fix = "rewards with .item(), as OpenRLHF reads them", "Return torch.tensor([reward]), or a "
                fix += "StepResult, which agentenv's AgentExecutor converts."
                problems.append(problem_at(cls, "step", expected, f"{reward!r}", fix))
            logs = value.get("extra_logs") if isinstance(value, Mapping) else None
            if isinstance(logs, Mapping) and (texts := {key: log for key, log in logs.items() if isinstance(log, str)}):
                expected, fix = "numbers in extra_logs, which OpenRLHF makes tensors of", "Leave text out, or return a "
                fix += "StepResult, whose info may have it."
                problems.append(problem_at(cls, "step", expected, f"{texts!r:.80}", fix))
        error = trajectory.error
        if error is not None and not problems:
            problems.append(record_problem(cls, error))
        is_cut = error is None and trajectory.stop_reason is StopReason.MAX_TURNS
        if is_cut and self.context.must_end and not self.context.may_go_on:
            fix = "Set terminated or truncated (in a dict: done) after a bounded number of attempts."
            problems.append(problem_at(cls, "step", f"an end within {self.limits.max_turns} turns", "none", fix))
        return problems


def _static(context: ConformanceContext) -> list[Problem]:
    """Return the problems that show without running, such as methods that are missing or do not take their argument."""
    cls: type[Any] = context.agent_cls
    names, argument = (("run",), "context") if context.own_loop else (("reset", "step"), "states")
    problems = []
    if not context.own_loop and cls.step is AgentInstance.step:
        problems.append(problem_at(cls, "step", "a `step` method", "none", "Write `async def step(self, states)`."))
    for name in names:
        signature = inspect.signature(getattr(cls, name))
        try:
            signature.bind(None, None)
        except TypeError as error:
            expected, takes = f"a method that takes the {argument}", f"def {name}{signature} ({error})"
            problems.append(problem_at(cls, name, expected, takes, f"Write `{name}(self, {argument})`."))
    if not context.own_loop:
        try:
            hacks_of(cls)
        except ConfigError as error:
            where = f"{cls.__name__}.hacks"
            file, line = attribute_at(cls, "hacks")
            problems.append(Problem(relative_path(file), line, where, *read_message(str(error), where)))
    return [*problems, *_of_executor(context)]


def _of_executor(context: ConformanceContext) -> Iterator[Problem]:
    """Yield notes of attributes of an agent_func's executor: those that nothing reads there, and other turns than here.

    Names that do not resemble one of ours are the file's.
    """
    executor_cls: Any = getattr(context.source, "executor_cls", None)
    if executor_cls is None:
        return
    cls, limits = context.agent_cls.__name__, getattr(executor_cls, "limits", AgentExecutor.limits)

    def note(name: str, expected: str, got: str, fix: str) -> Problem:
        file, line = attribute_at(executor_cls, name)
        return Problem(relative_path(file), line, f"{executor_cls.__name__}.{name}", expected, got, fix, is_note=True)

    known = [name for name in vars(AgentExecutor) if not name.startswith("_")]
    of_env = [name for name, value in vars(AgentInstance).items() if not name.startswith("_") and not callable(value)]
    of_limits = [each.name for each in fields(Limits) if each.name != "max_length"]  # which is always the caller's
    is_own = not executor_cls.execute.__module__.startswith("agentenv.")  # it may read attributes of any name
    for name, value in vars(executor_cls).items():
        if name in known or callable(value):
            continue
        places = [f"in {cls}"] * (name in of_env)
        places += [f"in `limits = agentenv.Limits({name}=…)`, for OpenRLHF"] * (name in of_limits)
        meant = did_you_mean(name, [*known, *of_env, *of_limits], cutoff=0.8).strip()
        if fix := f"Set it {' or '.join(places)}." * (not is_own) if places else meant:
            yield note(name, "an attribute that agentenv reads", "none", fix)
    agent_cls = getattr(executor_cls, "agent_cls", None)
    here = getattr(agent_cls, "max_turns", None) or Limits().max_turns
    if agent_cls is not None and limits is not AgentExecutor.limits and limits.max_turns != here:
        expected, got = "the same number of turns in OpenRLHF and here", f"{limits.max_turns} there and {here} here"
        fix = f"Set `max_turns` in {cls}, or pass --max_turns to `run` and `train`, which do not read `limits`."
        yield note("limits", expected, got, fix)
