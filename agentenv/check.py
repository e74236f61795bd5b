"""`agentenv check`: run an agent against a scripted policy, watch every call, and name what breaks the contract.

An agent with a loop of its own is run against an endpoint of that policy; its errors are those of its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentenv.agent import AgentInstance, Tokenizer, as_agent
from agentenv.chat import Chat
from agentenv.check_watch import CallWatch, Hung, Seen, watched_class
from agentenv.config import parse_json_object
from agentenv.dataset import read_tasks
from agentenv.endpoint.agent import ChatAgentSource
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode import EpisodeKey, place_of
from agentenv.errors import AgentEnvError, ConfigError, ContractError, DataError
from agentenv.executor import AgentFunc
from agentenv.loading import EnvSource, EpisodeSource, env_source, load_agent_func, load_tokenizer, resolve_model
from agentenv.molt_files import Env as MoltEnv
from agentenv.openrlhf import parse_step
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.trajectory import Trajectory
from agentenv.types import Limits, SamplingParams, StepResult, StopReason, Task

_ACTIONS = ("I do not know.", "The answer is 42.\n#### 42", "", "é 漢 \x00 {}[]<|im_start|>", "7 " * 200)
_CALL_OF_NOTHING = '<tool_call>\n{"name": "no_such_tool", "arguments": {"x": [1, null]}}\n</tool_call>'
STEP_TIMEOUT_S = 30.0
_MAX_TURNS = 12
_PROMPT, _LABEL = "What is 6 times 7?", "42"
"""Of the task where none is given: an environment that comes with data is tried on that."""
_IMPORT_LIMITS = 10
"""A file may take so many times as long to be imported as a step: it may load a model."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One breach of the contract."""

    file: str
    line: int
    where: str
    """Class.method"""
    expected: str
    got: str
    mend: str

    def __str__(self) -> str:
        """One line."""
        got = self.got.removesuffix(".")
        return f"{self.file}:{self.line}: {self.where}: expected {self.expected}, got {got}. {self.mend}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def check(
    target: str,
    *,
    env_kwargs: str = "{}",
    prompt: str = "",
    label: Any = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Problem]:
    """The contract errors of an agent_func.py or an environment; none when it may be trained with.

    One call of its methods may take `step_timeout_s`, a loop of its own twice as long; `tell` shows a line to the
    person who waits, about a call that takes long.

    Raises:
        ConfigError: the target cannot be loaded at all.
    """
    if not step_timeout_s > 0:
        raise ConfigError(f"--step_timeout_s: expected seconds > 0, got {step_timeout_s!r}. Change the value.")
    task = Task([{"role": "user", "content": prompt or _PROMPT}], label, task_id="check")
    given = prompt not in ("", _PROMPT) or label not in (None, _LABEL)
    trial = _Trial(target, task, step_timeout_s, CallWatch(tell), own_data=not given)
    try:
        problems: list[Problem] = asyncio.run(trial.watch.over(partial(trial.run, env_kwargs)))
    except Hung as hung:
        problems = [trial.hung(hung)]
    return problems


class _Trial:
    """One check: the agent, and the calls that are made of it."""

    def __init__(
        self, target: str, task: Task, step_timeout_s: float, watch: CallWatch, *, own_data: bool = False
    ) -> None:
        self.target, self.task, self.watch, self.step_timeout_s = target, task, watch, step_timeout_s
        self.own_data = own_data
        self.cls: type[Any] | None = None
        self.limits = Limits(
            max_length=20_000,
            max_turns=_MAX_TURNS,
            step_timeout_s=step_timeout_s,
            episode_timeout_s=step_timeout_s * (_MAX_TURNS + 3),  # no limit but that of a step
        )

    def run(self, env_kwargs: str) -> list[Problem]:
        """Load the agent and run its episodes, in a thread of its own."""
        with self.watch.during("import", self.target.partition(":")[0], self.step_timeout_s * _IMPORT_LIMITS):
            source, cls = _load(self.target, env_kwargs)
        self.cls = cls
        own_loop = isinstance(source, ChatAgentSource)
        problems = _static_run(cls) if own_loop else _static(cls)
        if problems:
            return problems  # running it would only say the same again
        if own_loop:
            self.limits = replace(self.limits, episode_timeout_s=2 * self.step_timeout_s)
        if self.own_data:
            self.task = _first_task(source) or self.task
        label = self.task.label
        actions = (*_ACTIONS, str(label), f"#### {label}", *([_CALL_OF_NOTHING] if own_loop else ()))
        # Its template has tools.
        tokenizer = load_tokenizer(resolve_model("tiny-math")) if own_loop else CharTokenizer()
        for first in range(len(actions)):
            seen: list[Seen] = []
            watched = self.watched(source, cls, seen)
            trajectory = asyncio.run(self.episode(watched, [*actions[first:], *actions[:first]], tokenizer))
            problems += self.judge_run(cls, trajectory) if own_loop else self.judge(cls, seen, trajectory)
            if trajectory.stop_reason in (StopReason.STEP_TIMEOUT, StopReason.EPISODE_TIMEOUT):
                break  # each further episode would hang as long
        unique = {(p.where, p.line, p.expected): p for p in problems}
        return sorted(unique.values(), key=lambda p: (p.file, p.line))

    def hung(self, hung: Hung) -> Problem:
        """The problem of a call that blocks.

        Raises:
            ConfigError: it is the import of the file.
        """
        call = hung.call
        if self.cls is None:
            at = f" at line {call.line}" if call.line else ""
            raise ConfigError(
                f"{self.target}: expected to be imported within {call.limit_s:g} s, got no end{at}. Put what takes so "
                "long into `reset`, or raise --step_timeout_s."
            ) from hung
        mend = "It blocks the event loop, on which all episodes run, or does not end when it is cancelled: make it a "
        mend += "plain `def`, or await instead."
        if call.method == "__init__":
            mend = "It blocks the event loop, on which all episodes run: what takes time belongs in `reset`."
        expected = f"an answer within {call.limit_s:g} s"
        return self.at_line(_problem(self.cls, call.method, expected, "none", mend), call.method)

    def at_line(self, problem: Problem, method: str) -> Problem:
        """The same problem in the line where the method was last seen."""
        return replace(problem, line=self.watch.lines.get(method, problem.line))

    def watched(self, source: EpisodeSource, cls: type[Any], seen: list[Seen]) -> EpisodeSource:
        """The same source with an agent class that keeps what its methods get and give."""
        watcher = watched_class(cls, self.watch, self.limits, seen)
        if isinstance(source, AgentFunc):
            return source.with_agent(watcher)
        kind = ChatAgentSource if isinstance(source, ChatAgentSource) else EnvSource
        return kind(watcher, source.kwargs)  # type: ignore[attr-defined]

    async def episode(self, source: EpisodeSource, actions: list[str], tokenizer: Tokenizer) -> Trajectory:
        """One episode of a policy that says these actions."""
        return await source.episode(
            self.task,
            engine=ScriptedEngine(actions * 3, tokenizer),
            chat=Chat(tokenizer),
            sampling=SamplingParams(max_tokens=100),
            limits=self.limits,
            key=EpisodeKey("check", seed=0),
        )

    def timed_out(self, cls: type[Any], trajectory: Trajectory) -> Problem:
        """The problem of a call that its deadline ended."""
        where = trajectory.error.where if trajectory.error is not None else "step"
        method = {"create": "__init__"}.get(where, where)
        expected = f"an answer within {self.limits.step_timeout_s:g} s"
        mend = "It hangs: give what it waits for a deadline of its own."
        return self.at_line(_problem(cls, method, expected, "none", mend), method)

    def judge_run(self, cls: type[Any], trajectory: Trajectory) -> list[Problem]:
        """What one episode of an agent with a loop of its own broke."""
        if trajectory.stop_reason is StopReason.EPISODE_TIMEOUT:
            mend = "Give up after a bounded number of requests, and where the endpoint refuses one."
            expected = f"an end within {self.limits.episode_timeout_s:g} s"
            return [self.at_line(_problem(cls, "run", expected, "none", mend), "run")]
        if trajectory.stop_reason is StopReason.STEP_TIMEOUT:
            return [self.timed_out(cls, trajectory)]
        error = trajectory.error
        if error is not None:
            method = {"create": "__init__"}.get(error.where, error.where)
            where = f"{cls.__name__}.{method}"
            if error.message.startswith(f"{where}: expected "):
                return [_problem(cls, method, *_read(error.message, where))]
            file, line = _place(cls, method)
            path, _, number = error.place.rpartition(":")
            mend = "Handle every answer a policy may give: empty, cut, a call of a tool that is not there."
            mend = mend if method == "run" else "Mend it."
            got = f"{error.type}: {error.message}".rstrip(".")
            return [Problem(_short(path or file), int(number or line), where, "no exception", got, mend)]
        score = trajectory.score
        if score is not None and not 0.0 <= score <= 1.0:
            return [
                _problem(cls, "run", "a score in [0, 1]", f"{score!r}", "Score quality; put the rest in the reward.")
            ]
        return []

    def judge(self, cls: type[AgentInstance], seen: list[Seen], trajectory: Trajectory) -> list[Problem]:
        """What one episode of an environment broke."""
        if trajectory.stop_reason is StopReason.STEP_TIMEOUT:
            return [self.timed_out(cls, trajectory)]
        problems: list[Problem] = []
        for one in seen:
            if one.error is not None:
                problems.append(_raised(cls, one.method, one.error))
            elif one.method == "step":
                problems += _judge_step(cls, one.value)
        error = trajectory.error
        if error is not None and not problems:
            method = {"create": "__init__", "prompt": "reset"}.get(error.where, error.where)
            problems.append(
                _problem(cls, method, "an episode without an error", f"{error.type}: {error.message}", "Mend it.")
            )
        if error is None and len([one for one in seen if one.method == "step"]) >= self.limits.max_turns:
            problems.append(
                _problem(
                    cls, "step", f"an end within {self.limits.max_turns} turns", "none",
                    "Set terminated or truncated (in a dict: done) after a bounded number of attempts.",
                )
            )  # fmt: skip
        return problems


def _first_task(source: EpisodeSource) -> Task | None:
    """The first task of a file that comes with an environment; None without one that reads as usual."""
    found: Mapping[str, str | Path] = getattr(source, "datasets", {})
    for path in found.values():
        if Path(path).is_file():
            with contextlib.suppress(ConfigError, DataError):
                return read_tasks(str(path), limit=1)[0]
    return None


def _load(target: str, env_kwargs: str) -> tuple[EpisodeSource, type[Any]]:
    path = Path(target)
    code = path.read_text(errors="replace") if path.suffix == ".py" and path.is_file() else ""
    if "AgentExecutor" in code or "AgentRunner" in code:
        func = load_agent_func(path)
        cls = _agent_class(func, target)
        return func, cls
    source = env_source(target, parse_json_object("--env_kwargs", env_kwargs))
    return source, source.cls


def _agent_class(func: AgentFunc, target: str) -> type[AgentInstance]:
    tokenizer = CharTokenizer()
    try:
        cls = func.agent_class(ScriptedEngine([""], tokenizer), tokenizer)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{target}: expected AgentExecutor to be made, got {type(error).__name__}: {error} at {place_of(error)}. "
            "Mend its constructor."
        ) from error
    if not inspect.isclass(cls):
        raise ConfigError(
            f"{target}: expected AgentExecutor to name its agent class, got {cls!r}. "
            "Set `agent_cls`, or pass the class to super().__init__."
        )
    return as_agent(cls)


def _static(cls: type[AgentInstance]) -> list[Problem]:
    """What the code shows without running: methods that are missing or take no states."""
    problems = []
    if cls.step is AgentInstance.step:
        problems.append(_problem(cls, "step", "a `step` method", "none", "Write `async def step(self, states)`."))
    for name in ("reset", "step"):
        method = getattr(cls, name)
        try:
            inspect.signature(method).bind(None, {})
        except TypeError as error:
            takes = f"def {name}{inspect.signature(method)} ({error})"
            problems.append(
                _problem(cls, name, "to be called with the states", takes, f"Write `{name}(self, states)`.")
            )
    return problems


def _static_run(cls: type[Any]) -> list[Problem]:
    try:
        inspect.signature(cls.run).bind(None, None)
    except TypeError as error:
        takes = f"def run{inspect.signature(cls.run)} ({error})"
        return [_problem(cls, "run", "to be called with the context", takes, "Write `run(self, context)`.")]
    return []


def _judge_step(cls: type[AgentInstance], value: Any) -> list[Problem]:
    where = f"{cls.__name__}.step"
    try:
        result = parse_step(value, where)
    except ContractError as error:
        return [_problem(cls, "step", *_read(str(error), where))]
    problems = []
    if result.score is not None and not 0.0 <= result.score <= 1.0:
        problems.append(
            _problem(
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
            _problem(
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
    return [_problem(cls, "step", "finite numbers or text in info", f"{bad!r}", "Convert them, or leave them out.")]


def _read(message: str, where: str) -> tuple[str, str, str]:
    """What a message of ours expected, what it got and how to mend it."""
    subject, _, rest = message.removeprefix(f"{where}: ").partition("expected ")
    facts, _, mend = rest.rpartition(". ")
    expected, _, got = facts.partition(", got ")
    return subject + expected, got, mend


def _raised(cls: type[AgentInstance], method: str, error: BaseException) -> Problem:
    file, line = _place(cls, method)
    trace = (error.__cause__ or error).__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    where, got = f"{cls.__name__}.{method}", f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        got = repr(error)
    if isinstance(error, ContractError) and ", got " in got:
        return Problem(_short(file), line, where, *_read(str(error), where))
    mend = "Handle every action a policy may sample: empty, cut, in any language." if method == "step" else "Mend it."
    return Problem(_short(file), line, where, "no exception", got, mend)


def _problem(cls: type[AgentInstance], method: str, expected: str, got: str, mend: str) -> Problem:
    file, line = _place(cls, method)
    return Problem(_short(file), line, f"{cls.__name__}.{method}", expected, got, mend)


def _place(cls: type[AgentInstance], method: str) -> tuple[str, int]:
    """File and line of a method; of the class where the method is inherited from us or from C."""
    function = inspect.unwrap(getattr(cls, method, cls))
    code = getattr(function, "__code__", None)
    if code is not None and getattr(AgentInstance, method, None) is not function:
        return code.co_filename, code.co_firstlineno
    theirs = [base for base in cls.__mro__ if base is not object and not base.__module__.startswith("agentenv.")]
    try:
        own = next((base for base in theirs if "step" in vars(base)), theirs[0])
        return inspect.getfile(own), inspect.getsourcelines(own)[1]
    except (IndexError, TypeError, OSError):
        return "?", 0


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
