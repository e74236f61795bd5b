"""`agentenv check`: run an agent against a scripted policy, watch every call, and name what breaks the contract.

An agent with a loop of its own is run against an endpoint of that policy; its errors are those of its record.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentenv.agent import AgentInstance, Tokenizer, as_agent, call
from agentenv.chat import Chat
from agentenv.config import parse_json_object
from agentenv.endpoint.agent import ChatAgentSource
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode import EpisodeKey, place_of
from agentenv.errors import AgentEnvError, ConfigError, ContractError
from agentenv.executor import AgentFunc
from agentenv.loading import EnvSource, EpisodeSource, env_source, load_agent_func, load_tokenizer, resolve_model
from agentenv.molt_files import Env as MoltEnv
from agentenv.openrlhf import parse_step
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.trajectory import Trajectory
from agentenv.types import Limits, SamplingParams, StepResult, StopReason, Task

_ACTIONS = ("I do not know.", "The answer is 42.\n#### 42", "", "é 漢 \x00 {}[]<|im_start|>", "7 " * 200)
_CALL_OF_NOTHING = '<tool_call>\n{"name": "no_such_tool", "arguments": {"x": [1, null]}}\n</tool_call>'
_LIMITS = Limits(max_length=20_000, max_turns=12, step_timeout_s=10.0, episode_timeout_s=60.0)


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
        return f"{self.file}:{self.line}: {self.where}: expected {self.expected}, got {self.got}. {self.mend}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call of an agent's method."""

    method: str
    value: Any = None
    error: BaseException | None = None


def check(target: str, *, env_kwargs: str = "{}", prompt: str = "", label: Any = None) -> list[Problem]:
    """The contract errors of an agent_func.py or an environment; none when it may be trained with.

    Raises:
        ConfigError: the target cannot be loaded at all.
    """
    source, cls = _load(target, env_kwargs)
    task = Task([{"role": "user", "content": prompt or "What is 6 times 7?"}], label, task_id="check")
    own_loop = isinstance(source, ChatAgentSource)
    problems = _static_run(cls) if own_loop else _static(cls)
    if problems:
        return problems  # running it would only say the same again
    actions = (*_ACTIONS, str(label), f"#### {label}", *([_CALL_OF_NOTHING] if own_loop else ()))
    tokenizer = load_tokenizer(resolve_model("tiny-math")) if own_loop else CharTokenizer()  # whose template has tools
    for first in range(len(actions)):
        seen: list[_Seen] = []
        watched = source if own_loop else _watched(source, cls, seen)
        trajectory = asyncio.run(_episode(watched, task, [*actions[first:], *actions[:first]], tokenizer))
        problems += _judge_run(cls, trajectory) if own_loop else _judge(cls, seen, trajectory)
        if trajectory.stop_reason in (StopReason.STEP_TIMEOUT, StopReason.EPISODE_TIMEOUT):
            break  # each further episode would hang as long
    unique = {(p.where, p.line, p.expected): p for p in problems}
    return sorted(unique.values(), key=lambda p: (p.file, p.line))


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


def _watched(source: EpisodeSource, cls: type[AgentInstance], seen: list[_Seen]) -> EpisodeSource:
    """The same source with an agent class that keeps what its methods get and give."""

    def watch(name: str) -> Callable[..., Any]:
        """A method that also notes what it gives or raises."""
        method = getattr(cls, name)

        async def watched(self: AgentInstance, *args: Any) -> Any:
            """The method as the loop calls it."""
            try:
                value = await call(partial(method, self), *args)
            except BaseException as error:
                seen.append(_Seen(name, error=error))
                raise
            seen.append(_Seen(name, value))
            return value

        return watched

    async def made(self: AgentInstance, **kwargs: Any) -> None:
        """The constructor, with what it raises noted."""
        try:
            started: Any = cls.__init__(self, **kwargs)
            if inspect.isawaitable(started):
                await started
        except BaseException as error:
            seen.append(_Seen("__init__", error=error))
            raise

    body = {name: watch(name) for name in ("reset", "step", "on_truncate", "close")} | {"__init__": made}
    body["__signature__"] = inspect.signature(cls)
    watcher = type(cls.__name__, (cls,), body)
    return source.with_agent(watcher) if isinstance(source, AgentFunc) else EnvSource(watcher, source.kwargs)  # type: ignore[attr-defined]


async def _episode(source: EpisodeSource, task: Task, actions: list[str], tokenizer: Tokenizer) -> Trajectory:
    engine = ScriptedEngine(actions * 3, tokenizer)
    return await source.episode(
        task,
        engine=engine,
        chat=Chat(tokenizer),
        sampling=SamplingParams(max_tokens=100),
        limits=_LIMITS,
        key=EpisodeKey("check", seed=0),
    )


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


def _judge_run(cls: type[Any], trajectory: Trajectory) -> list[Problem]:
    """What one episode of an agent with a loop of its own broke."""
    if trajectory.stop_reason is StopReason.EPISODE_TIMEOUT:
        mend = "Give up after a bounded number of requests, and where the endpoint refuses one."
        return [_problem(cls, "run", f"an end within {_LIMITS.episode_timeout_s:g} s", "none", mend)]
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
        return [_problem(cls, "run", "a score in [0, 1]", f"{score!r}", "Score quality; put the rest in the reward.")]
    return []


def _judge(cls: type[AgentInstance], seen: list[_Seen], trajectory: Trajectory) -> list[Problem]:
    problems: list[Problem] = []
    if trajectory.stop_reason is StopReason.STEP_TIMEOUT and trajectory.error is not None:
        method = trajectory.error.where if trajectory.error.where in ("reset", "step", "close") else "__init__"
        expected = f"an answer within {_LIMITS.step_timeout_s:g} s"
        mend = "It hangs: give what it waits for a deadline of its own."
        return [_problem(cls, method, expected, "none", mend)]
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
    if error is None and len([one for one in seen if one.method == "step"]) >= _LIMITS.max_turns:
        problems.append(
            _problem(
                cls, "step", f"an end within {_LIMITS.max_turns} turns", "none",
                "Set terminated or truncated (in a dict: done) after a bounded number of attempts.",
            )
        )  # fmt: skip
    return problems


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
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    where, got = f"{cls.__name__}.{method}", f"{type(error).__name__}: {error}"
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
