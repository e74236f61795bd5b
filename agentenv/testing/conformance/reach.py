"""Finds episodes that reach code of an environment which the usual policies do not, such as after right actions.

Candidates begin with gold actions, also of other rows, say commands that the prompt names, and call tools with words
of the prompt, of the row and of earlier results. A candidate is kept if it runs instructions of the environment's files
that no earlier episode has run, or says lines of the prompt; its actions are then a case of every property. Lines that
none of them has run are named.
"""

from __future__ import annotations

import ast
import linecache
import random
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from types import CodeType, FrameType
from typing import Any

from agentenv.core.types import Task
from agentenv.errors import AgentEnvError, EpisodeFailed
from agentenv.interop.openrlhf.executor import AgentFunc
from agentenv.testing.chats import observation_text
from agentenv.testing.conformance.cases import ODD_ACTIONS, EpisodeCase, Script
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import relative_path
from agentenv.testing.shifted_clock import modules_of
from agentenv.testing.tool_calls import calls_with_world, commands_of, options_of, words_of

_MAX_EPISODES, _MAX_IN_VAIN, _MAX_KEPT = 26, 9, 8
"""Candidates beside gold of other rows, in a row that reach nothing new, and kept."""
_NUM_ROWS = 8
"""Other rows whose gold actions are played."""
_MAX_S = 6.0
"""Time after which no further candidate is played, except for the first ones."""
_MAX_TURNS, _MAX_REPEATED = 8, 3
"""Turns after the gold actions, and repetitions of the last one."""
_NUMBERS = ("1", "2", "3", "10", "0", "100")
_PLACE = re.compile(r"<[^<>\n]{1,30}>|\[[^\[\]\n]{1,30}\]|\{[^{}\n]{1,30}\}")
_WORD = re.compile(r"[\w.-]+")
_NAME = re.compile(r"\w+")
_MAX_FILLED = 24
_MAX_EVENTS = 50_000
"""Instructions that are recorded within one block; a long computation continues without a record."""
Instruction = tuple[CodeType, int]
"""A code object, and the offset in it."""
_OTHER_METHODS = ("__init__", "reset", "gold", "on_truncate", "close", "<module>")
"""Code whose course does not depend on actions, or that other properties run."""


@dataclass
class Recording:
    """The instructions that ran within a block."""

    seen: set[Instruction] = field(default_factory=set)
    num_left: int = _MAX_EVENTS
    """At 0, the record is not whole."""


@dataclass
class _Candidate:
    """How to play one episode: gold actions first, then others."""

    name: str
    task: Task
    seed: int
    num_gold: int = 0
    """Number of gold actions at the beginning."""
    repeats: bool = False
    """Repeat the last gold action."""
    says_prompt: bool = False
    """Say the lines of the prompt in turn: one may name all that can be said. It is kept if it says one."""
    draws: random.Random = field(default_factory=lambda: random.Random(0))


@dataclass
class _Explorer:
    """Plays candidates and keeps those that reach something new."""

    context: ConformanceContext
    files: set[str]
    known: set[Instruction] = field(default_factory=set)
    is_whole: bool = True
    """Whether `known` has all instructions that ran."""
    endings: set[str] = field(default_factory=set)
    """Actions that have ended an episode: said only if nothing else is left."""
    kept: list[EpisodeCase] = field(default_factory=list)

    def add(self, recording: Recording) -> set[Instruction]:
        """Add what a block ran to what is known, and return what is new."""
        new = recording.seen - self.known
        self.known |= new
        self.is_whole &= recording.num_left > 0
        return new

    async def play(self, candidate: _Candidate) -> bool:
        """Play a candidate; return True if it was kept."""
        context, said, failed = self.context, list[str](), False
        turns = _MAX_REPEATED if candidate.repeats else min(_MAX_TURNS, context.limits.max_turns)
        limits = replace(context.limits, max_turns=turns + candidate.num_gold)
        with recorded_instructions(self.files) as recording:
            async with context.stepped(candidate.task, candidate.seed, limits, is_watched=True) as episode:
                try:
                    prompt = observation_text(await episode.begin())
                    tools = episode.trajectory.tools or ()
                    seen = [prompt]
                    while not episode.over:
                        gold = await episode.gold() if len(said) < candidate.num_gold else None
                        action = self.next_action(candidate, gold, said, seen, tools)
                        said.append(action)
                        result = await episode.act(action)
                        if result.done:
                            self.endings.add(action)
                        seen.append(observation_text(result.observation))
                except EpisodeFailed:
                    failed = bool(said) and not self.kept
                except AgentEnvError:
                    return False
        new = self.add(recording)
        if not said or not (new or failed or (candidate.says_prompt and said[0].strip() and said[0] in prompt)):
            return False
        case = EpisodeCase(candidate.task, candidate.name, Script(tuple(said)), candidate.seed, len(said))
        self.kept.append(case)
        return True

    def next_action(
        self,
        candidate: _Candidate,
        gold: str | None,
        said: Sequence[str],
        seen: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """Return the next action of a candidate."""
        if gold is not None:
            return gold
        if candidate.repeats and said:
            return said[-1]
        watch = self.context.watch
        if candidate.says_prompt:
            pool = [line for line in seen[0].splitlines() if line.strip()]
        else:
            pool = self.pool(candidate.task, seen, tools, said)
        pool = [each for each in pool if each not in watch.slow]
        if watch.num_hangs:
            pool = [each for each in pool if each in watch.quick]
        left = [each for each in pool if each not in said]
        calm = [each for each in left if each not in self.endings]
        choice = calm or left or pool or ODD_ACTIONS[:1]
        return choice[0] if candidate.says_prompt else candidate.draws.choice(choice)

    def pool(
        self, task: Task, seen: Sequence[str], tools: Sequence[Mapping[str, Any]], said: Sequence[str]
    ) -> list[str]:
        """Return actions that may be valid now."""
        row = [str(each) for each in (task.label, *task.metadata.values())]
        if tools:
            texts = [*reversed(seen[-2:]), *row, seen[0]]
            return [*calls_with_world(tools, texts, each=8).values(), *commands_of(seen[0])[:4], str(task.label)]
        return filled(seen[0], [*row, *seen[-2:]], [*said[:1], str(task.label)])


def filled(prompt: str, texts: Sequence[str], examples: Sequence[str]) -> list[str]:
    """Return the commands that a prompt names with values in their places, and examples with other words.

    Args:
        prompt: the text that names commands, such as 'sell <item>'.
        texts: texts with words that may be values.
        examples: actions that may be valid, whose last word is replaced.
    """
    commands = commands_of(prompt)
    words = list(dict.fromkeys([*options_of(prompt), *(word for text in texts for word in words_of(text, 6))]))
    words = [stripped for word in words if (stripped := word.strip("\"'`"))]
    values = [*words[:6], *_NUMBERS[:4], *words[6:9], *_NUMBERS[4:]]
    made = []
    for command in commands:
        places = _PLACE.findall(command)
        if not places:
            made.append([command])
            continue
        own = []
        for index in range(len(values)):
            text = command
            for at, place in enumerate(places):
                text = text.replace(place, values[(index + at) % len(values)], 1)
            own.append(text)
        made.append(own)
    for example in examples:
        found = _WORD.findall(example)
        if found and len(example) < 80:
            made.append([example, *(value.join(example.rsplit(found[-1], 1)) for value in values)])
    longest = max((len(own) for own in made), default=0)
    mixed = [own[index] for index in range(longest) for own in made if index < len(own)]
    return list(dict.fromkeys([*mixed, *values[:4]]))[:_MAX_FILLED]


def explore(context: ConformanceContext) -> None:
    """Play candidates once, and add those that reach new code to the cases of the context."""
    if context.reached is not None:
        return
    context.reached = []
    if context.own_loop or isinstance(context.source, AgentFunc):
        return
    files = {file for module in modules_of(context.agent_cls) if (file := getattr(module, "__file__", ""))}
    candidates, cases = _candidates(context), context.cases  # computed first, since they run the event loop

    async def explored() -> _Explorer:
        explorer = _Explorer(context, files)

        async def play(case: EpisodeCase) -> None:
            with recorded_instructions(files) as recording:
                await context.episode(case, source=context.recording_source([]))
            explorer.add(recording)

        await context.survivors(cases, play)  # none is reached yet
        if context.outage is not None:
            explorer.is_whole = False
            return explorer
        started, in_vain = time.monotonic(), 0
        for number, candidate in enumerate(candidates):
            is_late = number > 4 and time.monotonic() - started > _MAX_S
            if is_late or in_vain >= _MAX_IN_VAIN or len(explorer.kept) >= _MAX_KEPT:
                break
            if await explorer.play(candidate):
                in_vain = 0
            elif candidate.task is candidates[0].task:
                in_vain += 1
        return explorer

    explorer = context.run(explored())
    context.reached = explorer.kept
    context.unreached = _unreached(explorer.known) if explorer.is_whole else []
    context.__dict__.pop("cases", None)
    if context.has_slow_calls:
        context.avoid_slow_calls()


def _candidates(context: ConformanceContext) -> list[_Candidate]:
    """Return the candidates, the most promising first: those of one task, in turn with gold of other rows."""
    task = [*context.tool_tasks, *context.tasks][0]
    seed = 0 if task.seed is None else task.seed
    num_gold = max(
        (case.num_turns for case in context.base_cases if case.policy == "gold" and case.task is task), default=0
    )
    found = [_Candidate("lines of the prompt", task, seed, says_prompt=True)]
    for number in range(6):
        found.append(_Candidate(f"valid actions {number + 1}", task, seed, draws=random.Random(number)))
    for turns in dict.fromkeys([num_gold - 1, 1, num_gold // 2]):
        if 0 < turns < num_gold:
            found.append(_Candidate(f"{turns} gold actions, repeated", task, seed, turns, repeats=True))
            for number in range(3):
                name = f"{turns} gold actions, then others {number + 1}"
                found.append(_Candidate(name, task, seed, turns, draws=random.Random(number)))
    for number in range(6, _MAX_EPISODES):
        found.append(_Candidate(f"valid actions {number + 1}", task, seed, draws=random.Random(number)))
    rows = [
        _Candidate(f"gold of {row.task_id}", row, seed if row.seed is None else row.seed, max(num_gold, _MAX_TURNS))
        for row in context.further_tasks(_NUM_ROWS)
    ]
    return [each for pair in zip_longest(found[:_MAX_EPISODES], rows) for each in pair if each is not None]


def _unreached(known: set[Instruction]) -> list[str]:
    """Return the lines that did not run of functions that did, as file:line or file:first-last."""
    offsets: dict[CodeType, set[int]] = {}
    for code, offset in known:
        offsets.setdefault(code, set()).add(offset)
    outages = {path: _lines_of_outages(path) for path in {code.co_filename for code in offsets}}
    found = []
    for code in sorted(offsets, key=lambda code: (code.co_filename, code.co_firstlineno)):
        has_run: dict[int, bool] = {}
        for start, end, line in code.co_lines():
            # No event has the beginning of a coroutine.
            if line not in (None, code.co_firstlineno) and line not in outages[code.co_filename]:
                has_run[line] = has_run.get(line, False) or not offsets[code].isdisjoint(range(start, end))
        for ran, lines in groupby(sorted(has_run), has_run.__getitem__):
            first, *more = lines
            if not ran and code.co_name not in _OTHER_METHODS:
                found.append(f"{relative_path(code.co_filename)}:{first}{f'-{more[-1]}' if more else ''}")
    return found


def _lines_of_outages(path: str) -> set[int]:
    """Return the lines of a file that only raise InfraError, or what becomes one: no action reaches them."""

    def is_outage(body: Sequence[ast.AST]) -> bool:
        return all(isinstance(each, ast.Raise) and "InfraError" in ast.unparse(each) for each in body)

    lines: set[int] = set()
    for node in ast.walk(ast.parse("".join(linecache.getlines(path)))):
        found: list[Any] = []
        if is_outage(node.body if isinstance(node, ast.ExceptHandler) else [node]):
            found = [node]
        elif isinstance(node, ast.Try) and node.handlers and all(is_outage(each.body) for each in node.handlers):
            within = [each for part in node.body for each in ast.walk(part) if isinstance(each, ast.Raise)]
            types = " ".join(ast.unparse(each.type or ast.Name("Exception")) for each in node.handlers)
            caught = {*_NAME.findall(types)}
            for each in within:
                said = {*_NAME.findall(ast.unparse(each))}
                if "ToolError" not in said and caught & {"Exception", *said}:  # a ToolError is for the policy
                    found.append(each)
        for each in found:
            lines.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return lines


@contextmanager
def recorded_instructions(files: Collection[str]) -> Iterator[Recording]:
    """Return a record to which the instructions of these files are added that this thread, and new ones, run."""
    recording = Recording()

    def of_frame(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files or recording.num_left <= 0:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return of_instruction

    def of_instruction(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            recording.seen.add((frame.f_code, frame.f_lasti))
            recording.num_left -= 1
        return of_instruction if recording.num_left > 0 else None

    before, start = sys.gettrace(), threading.Thread.start

    def traced(thread: threading.Thread) -> None:  # `threading.settrace` ends a thread that cannot be traced at once
        run = thread.run

        def traced_run() -> None:
            _trace(of_frame)
            run()

        thread.run = traced_run  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = traced  # type: ignore[assignment, method-assign]
    _trace(of_frame)
    try:
        yield recording
    finally:
        _trace(before)
        threading.Thread.start = start  # type: ignore[method-assign]


def _trace(function: Any) -> None:
    """Trace this thread, as soon as no other one is about to: Python 3.11 refuses two at once."""
    while True:
        try:
            return sys.settrace(function)
        except RuntimeError:
            time.sleep(0.0)
