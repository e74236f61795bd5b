"""The properties of single calls.

What they return: `rewards`, `ends`, `truncation`, `feedback`, `mutation`, `pickling`. The start, every row and the end:
`constructor`, `data`, `close`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.calls import bounded, create, create_here
from agentenv._util.plurals import counted
from agentenv.chat.chat import Chat, text_of
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import MAX_REWARD, Message, StepResult, StopReason, Task
from agentenv.errors import AgentEnvError, ContractError, InfraError
from agentenv.interop.openrlhf.executor import AgentFunc
from agentenv.testing import chats
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import FORGED, EpisodeCase
from agentenv.testing.conformance.context import ConformanceContext, NotApplicable, raise_outage
from agentenv.testing.conformance.probes import IO_EVENTS, record_events
from agentenv.testing.conformance.problems import (
    Problem,
    attribute_at,
    exception_problem,
    info_problems,
    own_files,
    problem_at,
    record_problem,
    relative_path,
    source_of,
)
from agentenv.testing.shifted_clock import own_classes

_EPS = 1e-4
"""Rewards and scores that differ by less are the same."""
_ROLES = ("system", "user", "assistant", "tool")
_INPUTS = ("observation", "label", "metadata")
_CANNOT = (pickle.PickleError, TypeError, AttributeError, ValueError, RecursionError, ImportError)


def rewards(context: ConformanceContext) -> list[Problem]:
    """Every policy gets finite rewards, a score within its range, and numbers or text in info; no call raises."""
    context.require_steps()
    cls, problems = context.agent_cls, list[Problem]()
    for one in context.recorded_episodes:
        if one.case.cut:
            continue  # as in `truncation`
        raised = [exception_problem(cls, call.method, call.error) for call in one.seen if call.error is not None]
        problems += raised or _of_record(cls, one.trajectory, "step")
    return problems or _of_logs(context)


def _of_logs(context: ConformanceContext) -> list[Problem]:
    """Return a note of the `logs` of an agent_func's executor that no turn has as a number."""
    executor_cls: Any = getattr(context.source, "executor_cls", None)
    results = [turn.result for one in context.recorded_episodes for turn in one.trajectory.turns if turn.result]
    had = {name for result in results for name, value in result.info.items() if not isinstance(value, str)}
    if not results or not (missing := sorted(set(getattr(executor_cls, "logs", {})) - had)):
        return []
    file, line = attribute_at(executor_cls, "logs")
    where, expected = f"{executor_cls.__name__}.logs", "names of numbers in the turns' `info`"
    fix = "Check them: OpenRLHF logs 0.0 for an episode without such a number."
    got = f"{missing}, which no episode had"
    return [Problem(relative_path(file), line, where, expected, got, fix, is_note=True)]


def ends(context: ConformanceContext) -> list[Problem]:
    """Every episode ends by itself, or at `max_turns` of the class, for any policy, and nothing follows the end.

    An environment with tools may leave the end to the limit of a run, which is a note.
    """
    context.require_steps()
    problems = []
    # Right calls of tools may continue until the limit of a run ends the episode.
    unjudged = {case.policy for case in context.reached or ()}
    for one in context.recorded_episodes:
        trajectory, turns = one.trajectory, context.limits.max_turns
        is_judged = context.must_end and not one.case.cut and one.case.policy not in unjudged
        if trajectory.stop_reason is StopReason.MAX_TURNS and is_judged:
            got = f"none with the policy {one.case.policy!r}"
            fix = "Set terminated or truncated (in a dict: done) after a bounded number of attempts. If episodes are "
            fix += "meant to be longer, set `max_turns` in the class, or pass --max_turns."
            if context.may_go_on:
                fix = "Only --max_turns of a run ends it. Set `max_turns` in the class, so that every run does the "
                fix += "same."
            problem = problem_at(context.agent_cls, "step", f"an end within {counted(turns, 'turn')}", got, fix)
            problems.append(replace(problem, is_note=context.may_go_on))
        elif trajectory.terminated and len(trajectory.segments[-1]) != trajectory.turns[-1].end:
            got, fix = "further tokens", "Return the result of `super().execute`."
            problems.append(problem_at(context.agent_cls, "step", "nothing after the last action", got, fix))
    return problems


def truncation(context: ConformanceContext) -> list[Problem]:
    """If a limit ends the episode, `on_truncate` returns None or a result, and pays no more than the whole task."""
    context.require_steps()
    cls, problems, num_truncated = context.agent_cls, list[Problem](), 0
    later = {"gold", *(case.policy for case in context.reached or ())}
    for case in context.cases:
        last = case.num_turns - 1 if case.policy in later else 1
        for max_turns in sorted({1, max(1, min(last, context.limits.max_turns))}):
            seen, trajectory = context.run(_cut_off(context, case, max_turns))
            calls = [one for one in seen if one.method == "on_truncate"]
            num_truncated += len(calls)
            raised = [exception_problem(cls, one.method, one.error) for one in calls if one.error is not None]
            problems += raised or (_of_record(cls, trajectory, "on_truncate") if calls else [])
    if not num_truncated:
        raise NotApplicable("every episode ends with its first turn")
    return problems or _of_payments(context)


def _of_payments(context: ConformanceContext) -> list[Problem]:
    """Return the problem of gold actions that are cut off and earn more than all of them, or lose what they earned."""
    cls = context.agent_cls
    if cls.on_truncate is AgentInstance.on_truncate:
        return []
    for case in (each for each in context.cases if each.policy == "gold" and each.num_turns > 1):
        whole = context.run(context.episode(case))
        if not whole.terminated or whole.reward is None:
            continue
        for num in range(1, case.num_turns):
            earned = [turn.result for turn in whole.turns[:num] if turn.result is not None]
            _, cut = context.run(_cut_off(context, case, num))
            if cut.reward is None or len(cut.turns) != num or len(earned) != num:
                continue
            paid, after = sum(each.reward for each in earned), f"after {num} of {case.num_turns} gold actions"
            if cut.reward > whole.reward + _EPS and cut.reward > paid + _EPS:
                expected = f"at most the reward of the whole task, {whole.reward:g}, if a limit ends it"
                fix = "Return only what is not paid yet: its reward is added to those of the turns."
                return [problem_at(cls, "on_truncate", expected, f"{cut.reward:g} {after}", fix)]
            score = earned[-1].score
            if score is None or cut.score is None or whole.score is None or score < whole.score - _EPS:
                continue
            if cut.score < score - _EPS:
                expected = f"the score of the last turn, {score:g}, if a limit ends the episode"
                fix = "Return no score, or a lower one in the turns: a score is the quality so far."
                return [problem_at(cls, "on_truncate", expected, f"{cut.score:g} {after}", fix)]
    return []


async def _cut_off(
    context: ConformanceContext, case: EpisodeCase, max_turns: int
) -> tuple[list[MethodCall], Trajectory]:
    """Return the calls and the trajectory of an episode that a limit ends after so many turns."""
    seen: list[MethodCall] = []
    limits = replace(context.limits, max_turns=max_turns)
    return seen, await context.episode(case, source=context.recording_source(seen), limits=limits)


def _of_record(cls: type[AgentInstance], trajectory: Trajectory, method: str) -> list[Problem]:
    if trajectory.error is not None:
        return [record_problem(cls, trajectory.error)]
    infos = [turn.result.info for turn in trajectory.turns if turn.result is not None]
    problems = [problem for info in infos for problem in info_problems(cls, method, info)]
    if trajectory.reward is not None and not abs(trajectory.reward) <= MAX_REWARD:
        fix = "Keep rewards near 1: a sum like this distorts the advantages of a batch."
        problems.append(problem_at(cls, method, "a finite sum of rewards", f"{trajectory.reward!r}", fix))
    return problems


# --- observations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """One observation: a prompt (`method` is reset) or the reply to an action."""

    method: str
    observation: str | Sequence[Message]
    is_raw: bool
    """The conversation is raw text, to which no template is applied."""
    tools: Any = None


Wrong = tuple[str, str, str]
"""What was expected of an observation, what it is, and the fix."""


_BUGS = (TypeError, AttributeError, NameError)
"""Exceptions of Python that say nothing to a policy; a ValueError may be meant for it."""


def feedback(context: ConformanceContext) -> list[Problem]:
    """Observations are not empty, have common roles, render in any template, stay text; tools return text or JSON."""
    context.require_steps()
    problems = []
    kinds = [*([context.model_chat] if context.model_chat is not None else []), *chats.every_kind()]
    outputs: list[_Output] = []
    for one in context.recorded_episodes:
        prompt = one.trajectory.prompt
        is_raw = isinstance(prompt, str)
        outputs += [_Output("reset", prompt, is_raw, one.trajectory.tools or None)] if prompt else []
        results = [turn.result for turn in one.trajectory.turns if turn.result is not None]
        outputs += [_Output("step", result.observation, is_raw) for result in results if not result.done]
    for output in {repr(output): output for output in outputs}.values():
        found = [*_of_messages(output)] or [wrong for chat in kinds for wrong in _rendered(output, chat)]
        for expected, got, fix in found:
            problems.append(problem_at(context.agent_cls, output.method, expected, got[:200], fix))
    return [*problems, *_of_raw_prompts(context), *_of_tools(context)]


def _of_tools(context: ConformanceContext) -> Iterator[Problem]:
    """Yield the problem of a result that is neither text nor JSON, and notes of other bugs and of gold that fails."""
    cls = context.agent_cls
    for one in context.recorded_episodes:
        for name, error in one.tool_errors:
            problem = exception_problem(cls, name if hasattr(cls, name) else "step", error)
            if isinstance(error, ContractError):
                yield problem
            elif isinstance(error, _BUGS):
                fix = "The policy is told of it. Fix it, or raise ToolError with words for the policy."
                yield replace(problem, expected=f"no exception of the tool {name}", fix=fix, is_note=True)
        for turn in one.trajectory.turns if one.case.policy == "gold" else ():
            said = turn.result.observation if turn.result is not None else ""
            texts = [text_of(each) for each in said if each.get("role") == "tool"] if not isinstance(said, str) else []
            if texts and all(text.startswith("Error: ") for text in texts):
                expected, got = "gold actions whose calls are answered", f"{brief(texts[0])} for {brief(turn.action)}"
                fix = "Fix the tool, or what `gold` calls."
                yield replace(problem_at(cls, "gold", expected, got, fix), is_note=True)


def _of_raw_prompts(context: ConformanceContext) -> Iterator[Problem]:
    """Yield the note that an episode begins with a text although its task has messages."""
    for one in context.recorded_episodes if not isinstance(context.source, AgentFunc) else ():
        prompt = one.trajectory.prompt
        if isinstance(prompt, str) and not isinstance(one.case.task.prompt, str) and not context.chat.is_prompt(prompt):
            expected, got = "messages, as the task has", f"the text {brief(prompt)}, which gets no chat template"
            fix = "Return [{'role': 'user', 'content': text}], unless the policy continues raw text."
            yield replace(problem_at(context.agent_cls, "reset", expected, got, fix), is_note=True)
            return


def _of_messages(output: _Output) -> Iterator[Wrong]:
    """Yield what is wrong with the messages of an observation, or with its text."""
    said = output.observation
    messages: Sequence[Message] = [{"role": "user", "content": said}] if isinstance(said, str) else said
    empty: list[Any] = [] if messages else [said]
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        has_other = any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in parts)
        if message.get("role") in ("user", "tool") and not has_other and not text_of(message).strip():
            empty.append(said if isinstance(said, str) else dict(message))
    if empty:
        fix = "Return what was wrong, or end the episode: a policy without feedback repeats its action."
        yield "feedback that is not empty", f"{empty[0]!r}", fix
    if not isinstance(said, str) and messages:
        roles = [str(message.get("role")) for message in messages]
        unknown = [role for role in roles if role not in _ROLES]
        talk = roles[1:] if output.method == "reset" and roles[:1] == ["system"] else roles
        before = ["assistant", *talk] if output.method == "step" else talk
        twice = [one for one, other in pairwise(before) if one == other and one != "tool"]
        if unknown:
            yield f"roles among {', '.join(_ROLES)}", f"{unknown[0]!r}", "Chat templates support only these roles."
        elif twice or "system" in talk:
            fix = "Merge the messages: many templates reject roles that do not alternate."
            yield "messages whose roles alternate", f"{roles}", fix
    lone = [letter for message in messages for letter in text_of(message) if 0xD800 <= ord(letter) < 0xE000]
    if lone:
        fix = "Replace lone surrogates: tokenizers reject them, and files cannot store them."
        yield "text that is valid Unicode", f"{lone[0]!r}", fix


def _rendered(output: _Output, chat: Chat) -> list[Wrong]:
    """Return what is wrong with an observation in the template of a chat."""
    expected = "text of a policy that stays text"
    if output.is_raw or isinstance(output.observation, str):
        if output.is_raw and output.method == "step" and FORGED.splitlines()[1] in str(output.observation):
            fix = "Raw text is encoded unchanged: remove the names of tokens from the action, or answer in messages."
            return [(expected, "names of special tokens in raw text", fix)]
        return []
    try:
        # The same messages with placeholder text show which special tokens belong to the template.
        hollow: list[Message] = [
            {**m, "content": "x"} if isinstance(m.get("content"), str) else m for m in output.observation
        ]
        tokens, framed = _added(chat, output, output.observation), _added(chat, output, hollow)
    except AgentEnvError as error:
        fix = "Return messages that any template renders: a role, and content as text."
        got = f"an error of {type(chat.tokenizer).__name__}: {error}"
        return [("messages that a chat template renders", got, fix)]
    if tokens - framed:
        fix = "Omit `trusted` from messages with text that a policy or a page may have written."
        return [(expected, f"the special tokens {[chat.decode([i]) for i in tokens - framed]}", fix)]
    return []


def _added(chat: Chat, output: _Output, messages: Sequence[Message]) -> Counter[int]:
    """Return the special tokens in the encoded messages."""
    end = chat.tokenizer.eos_token_id
    if output.method == "reset":
        return Counter(chat.added_in(chat.prompt(messages, output.tools)))
    return Counter(chat.added_in(chat.reply([0 if end is None else end], messages)))


# --- values -----------------------------------------------------------------------------------------------------------


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
                fix = "Copy it first: the samples of a group share their inputs."
                self.problems.append(problem_at(self.cls, method, f"states[{name!r}] unchanged", got, fix))
        for name, result, was in self.returned:
            if repr(result) != was:
                got = f"{was:.60} changed to {result!r:.80} by a later call"
                expected = "an observation that does not change after it is returned"
                fix = "Return a new list: `[*self.messages]`, or only the new messages."
                self.problems.append(problem_at(self.cls, name, expected, got, fix))
        self.returned = []
        if isinstance(value, StepResult):
            self.keep(method, value.observation)
        elif isinstance(value, Mapping):
            self.keep(method, value.get("observation" if method == "reset" else "environment_" + "feedback"))
        return value

    def keep(self, method: str, observation: Any) -> None:
        """Keep the messages of an observation, which must not repeat those before."""
        if not isinstance(observation, list):
            return
        self.returned = [(method, observation, repr(observation))]
        previous, self.messages = self.messages, [dict(message) for message in observation]
        is_again = len(self.messages) > len(previous) and self.messages[: len(previous)] == previous
        # Results of tools may be the same again.
        if method == "step" and is_again and any(message.get("role") != "tool" for message in previous):
            got = f"{len(previous)} messages of the last one again, and {len(self.messages) - len(previous)} new"
            fix = "Return only the new messages: the loop keeps the conversation."
            self.problems.append(problem_at(self.cls, method, "an observation with only new messages", got, fix))


def mutation(context: ConformanceContext) -> list[Problem]:
    """States, labels, messages and arguments stay unchanged, and returned results are not changed later."""
    context.require_steps()
    cls, problems = context.agent_cls, list[Problem]()
    arguments = {name: repr(value) for name, value in context.kwargs.items()}
    for case in context.cases:
        watched = _Watched(cls)
        context.run(context.episode(case, source=context.recording_source([], watched.around)))
        problems += watched.problems
    for name, was in arguments.items():
        if repr(context.kwargs[name]) != was:
            got = f"{was:.60} changed to {context.kwargs[name]!r:.80}"
            fix = "Copy it in __init__: all episodes share their arguments."
            problems.append(problem_at(cls, "__init__", f"the argument {name!r} unchanged", got, fix))
    return problems


def pickling(context: ConformanceContext) -> list[Problem]:
    """Check that the class, its arguments and its methods' results can be pickled and copied; arguments are JSON."""
    context.require_steps()
    cls, problems = context.agent_cls, list[Problem]()
    for own in own_classes(cls)[:1]:
        if error := _refusal(own):
            fix = "Define it at the top level of a module: --env_actors and `spawn` import it by name."
            problems.append(problem_at(cls, "step", "a class that can be pickled", error, fix))
    problems += _of_arguments(cls, context.kwargs)
    calls = [call for one in context.recorded_episodes for call in one.seen if call.error is None]
    for call in calls:
        if call.method not in ("reset", "step", "on_truncate"):
            continue
        if error := _refusal(call.value):
            fix = "Return text, numbers and messages: --env_actors moves them between processes."
            problems.append(problem_at(cls, call.method, "a result that can be pickled", error, fix))
        elif isinstance(call.value, StepResult):
            again, was = pickle.loads(pickle.dumps(call.value)), repr(call.value)
            if repr(again) != was or repr(deepcopy(call.value)) != was:
                expected, got = "a result that is the same when pickled", f"{again!r:.120}"
                fix = "Return text, numbers and messages, or define __repr__ and pickling on the object."
                problems.append(problem_at(cls, call.method, expected, got, fix))
    return problems


def _of_arguments(cls: type[Any], kwargs: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of arguments of the constructor that cannot be pickled, or that are not JSON."""
    for name, value in kwargs.items():
        if error := _refusal(value):
            fix = f"Pass the arguments from which to build `{name}`, and build it in __init__ or reset."
            yield problem_at(cls, "__init__", f"an argument {name!r} that can be pickled", error, fix)
            continue
        got = ""
        try:
            plain = json.loads(json.dumps(value))
            if plain != value:
                got = f"{value!r:.80}, which comes back as {plain!r:.80}"
        except (TypeError, ValueError) as not_json:
            got = str(not_json)
        if got and not isinstance(value, tuple):
            fix = "Accept text, numbers, lists and objects: --env_kwargs and the record of a run are JSON."
            yield problem_at(cls, "__init__", f"an argument {name!r} that is JSON", got, fix)


def _refusal(value: Any) -> str:
    """Return why a value cannot be pickled or copied; empty if it can."""
    try:
        pickle.loads(pickle.dumps(value))
        deepcopy(value)
    except _CANNOT as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- the start, the rows and the end ----------------------------------------------------------------------------------

QUICK_S = 0.1
"""Every episode pays for its constructor again, and makes an instance for each attempt."""
_NUM_TRIES = 5
_FIX = "Move slow work to `reset`, and cache what all episodes share."


def constructor(context: ConformanceContext) -> list[Problem]:
    """Check that the constructor is quick, and does no input or output after its first call."""
    context.require_steps()
    cls = context.agent_cls
    seconds = []
    for _ in range(_NUM_TRIES):
        with record_events(IO_EVENTS, own_files(cls), this_thread=True) as events:
            started = time.perf_counter()
            instance = context.run(context.retried(lambda: create_here(cls, context.kwargs)))
            seconds.append(time.perf_counter() - started)
        context.run(_closed(context, instance))
    own = [event for event in events if event.line]
    expected = "no input or output in the constructor"
    problems = [
        problem_at(cls, "__init__", expected, f"it {e.description}", _FIX, line=e.line, file=e.file) for e in own[:1]
    ]
    if min(seconds) > QUICK_S and not problems:
        expected, got = f"a constructor that takes less than {QUICK_S:g} s", f"{min(seconds):.2f} s"
        problems.append(problem_at(cls, "__init__", expected, got, _FIX))
    return problems


async def _closed(context: ConformanceContext, instance: AgentInstance) -> list[Problem]:
    limit_s = context.limits.step_timeout_s
    task = asyncio.ensure_future(context.retried(lambda: bounded(instance.close, limit_s=limit_s)))
    await asyncio.wait({task})
    error = task.exception()
    if isinstance(error, InfraError):
        raise error
    return [] if error is None else [exception_problem(context.agent_cls, "close", error)]


def close(context: ConformanceContext) -> list[Problem]:
    """`close` works before `reset`, after a failed `reset`, and when repeated."""
    context.require_steps()

    async def run() -> list[Problem]:
        task = context.tasks[0]
        prompt, label, metadata = deepcopy((task.prompt, task.label, dict(task.metadata)))
        states = {"observation": prompt, "label": label, "metadata": metadata, "images": task.images, "seed": 0}
        resets: dict[str, Any] = {"before any reset": None, "after `reset`": states, "after a `reset` that failed": {}}
        for when, given in resets.items():
            instance = await context.retried(lambda: create(context.agent_cls, context.kwargs))
            if given is not None:
                reset = bounded(instance.reset, given, limit_s=context.limits.step_timeout_s)
                await asyncio.gather(reset, return_exceptions=True)  # its errors are those of other properties
            for again in ("", " again"):
                problems = await _closed(context, instance)
                if problems:
                    fix = "Release only what exists, and only once."
                    expected = f"no exception from `close`{again} {when}"
                    return [replace(problem, expected=expected, fix=fix) for problem in problems]
        return []

    return context.run(run())


def data(context: ConformanceContext) -> list[Problem]:
    """Every row of the data can be read, and `reset` accepts a sample of the rows, spread evenly."""
    found = context.rows()
    if not found:
        raise NotApplicable("it has no data; pass --data")
    problems: list[Problem] = []
    for name, tasks in found.items():
        if isinstance(tasks, AgentEnvError):
            expected, fix, error = f"data {name!r} that can be read", "Fix the file.", str(tasks)
            if name != context.options.data:  # the data of the class
                problems.append(problem_at(context.agent_cls, "reset", expected, error, fix))
                continue
            line = re.search(r", (?:line|item|row) (\d+)\b", error.partition(": expected ")[0])
            problems.append(Problem(relative_path(name), int(line[1]) if line else 0, "data", expected, error, fix))
            continue
        if not context.own_loop:
            problems += context.run(_problems_of_rows(context, name, tasks))
        has_more = isinstance(context.source, AgentFunc) and any(task.metadata for task in tasks)
        if has_more and "metadata" in source_of(context.agent_cls):
            expected, got = "an environment that reads prompt and label", "'metadata', which is empty in OpenRLHF"
            fix = "Put what it needs of other columns into the label."
            problems.append(replace(problem_at(context.agent_cls, "reset", expected, got, fix), is_note=True))
    return problems


async def _problems_of_rows(context: ConformanceContext, name: str, tasks: list[Task]) -> list[Problem]:
    async def reset(task: Task, seed: int) -> AgentEnvError | None:
        async with context.stepped(task, seed) as episode:
            try:
                await episode.begin()
            except AgentEnvError as error:
                raise_outage(episode.trajectory)
                return error
        return None

    for number in range(0, len(tasks), max(1, len(tasks) // context.options.num_rows)):
        error = await context.retried(partial(reset, tasks[number], number))
        if error is not None:
            expected = f"`reset` to accept every row of {name!r}"
            got = f"an error at row {number + 1} ({tasks[number].task_id!r}): {error}"
            return [problem_at(context.agent_cls, "reset", expected, got, "Fix the row, or make `reset` accept it.")]
    return []
