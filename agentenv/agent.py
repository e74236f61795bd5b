"""The contracts: AgentInstance (environment authors write this), Engine, Tokenizer, and OpenRLHF's dicts as types."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypedDict

from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.outside import outside as outside
from agentenv.types import Completion, Message, SamplingParams, StepResult

_THREAD_WAITS_S = (0.05, 0.2, 0.8)
"""Waits for a thread where the machine gives none: others may end meanwhile."""


class ResetState(TypedDict, total=False):
    """What `reset` gets, and returns with the observation it wants: OpenRLHF's keys first."""

    observation: str | Sequence[Message]
    """The task's prompt: text, or messages for the model's chat template."""
    label: Any
    metadata: Mapping[str, Any]
    images: tuple[Any, ...]
    seed: int | None
    """Seed of this episode's environment, the same whenever the episode is run again."""
    renders_tools: bool
    """Only given: whether the model's chat template has a place for `tools`."""
    tools: Sequence[Mapping[str, Any]]
    """Only returned: schemas of the tools to offer, rendered in the head of the first messages by the template."""


class StepState(TypedDict, total=False):
    """What `step` gets: OpenRLHF's four keys, then what OpenRLHF leaves out."""

    observation_text: str
    """Everything before the action, each piece decoded as it was added."""
    action_text: str
    """The action, decoded from its ids, without the final terminator."""
    label: Any
    sampling_params: Any
    action_ids: list[int]
    """The sampled ids, untouched."""
    finish_reason: str
    """stop, length, abort, error or repetition."""
    turn_index: int
    """0 on the first turn."""
    tokens_left: int
    """Room in `Limits.max_length` after this action."""
    metadata: Mapping[str, Any]
    seed: int | None
    tool_calls: Any
    """After a prompt in messages: the action as `tools.ParsedAction`, its calls and those that cannot be read."""


class StepDict(TypedDict, total=False):
    """OpenRLHF's step result (0.9.1 to 0.11.2); `StepResult` is the recommended form.

    Source: openrlhf/utils/agent.py, MultiTurnAgentExecutor.execute, 0.11.2.
    """

    rewards: Any
    """A number, or anything of one element with `.item()`."""
    scores: Any
    environment_feedback: str
    done: bool
    truncated: bool
    sampling_params: Any
    extra_logs: Mapping[str, Any]
    environment_images: Sequence[Any]


class ResponseDict(TypedDict, total=False):
    """What OpenRLHF's trainer reads of an episode (0.9.1 to 0.11.2).

    Source: openrlhf/trainer/ppo_utils/samples_generator.py, 0.11.2.
    """

    prompt: Any
    label: Any
    observation_tokens: list[int]
    """[T]"""
    action_ranges: list[tuple[int, int]]
    rollout_log_probs: list[float] | None
    """[T] 0.0 off the actions."""
    reward: float | None
    scores: float | None
    truncated: bool
    extra_logs: dict[str, float]
    images: Any
    mm_train_inputs: Any


class AgentInstance:
    """The environment's side of one episode: made for it, run through it, closed, dropped.

    Write `step`; override the others where needed. Every method may be `async` or plain; plain ones run in a thread, so
    a slow one never holds the engine up. The constructor takes what `--env_kwargs` gives and must be quick: what takes
    time belongs in `reset`.

    Example::

        class Echo(AgentInstance):
            async def step(self, states):
                return StepResult(reward=float(states["action_text"] == states["label"]), terminated=True)
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {}
    """Data that comes with the environment, by the name under which `--data` finds it; the first is the default."""
    needs_label: ClassVar[bool] = True
    """False: rows without the column `label` have the label None."""

    hacks: ClassVar[Mapping[str, str]] = {}
    """Actions that try to earn a reward without solving anything, by name: `agentenv audit` plays them, and none may
    earn a full score."""

    async def reset(self, states: ResetState) -> ResetState:
        """Give the first observation under the key `observation`; the default is the task's prompt."""
        return states

    async def step(self, states: StepState) -> StepResult | StepDict:
        """Judge an action and reply to it."""
        raise NotImplementedError(f"{type(self).__name__}.step: expected an implementation, got none. Write `step`.")

    async def on_truncate(self, states: StepState) -> StepResult | StepDict | None:
        """Give a last word when a limit ends the episode: the reward adds to the last turn's, the score replaces it.

        `states` are those of the last step. None leaves the last result as it is. Observations are ignored.
        """
        return None

    async def gold(self, states: StepState) -> str | None:
        """An action that earns the full score from here; None where nobody knows one. No policy is ever shown it.

        For `agentenv audit` and simulations. `states` has observation_text, label, turn_index, metadata and seed.
        """
        return None

    async def close(self) -> None:
        """Let go of what the episode held. Always called, once."""


def as_agent(cls: Any) -> type[AgentInstance]:
    """A foreign agent class with our defaults for the methods it lacks; ours are passed through."""
    return cls if issubclass(cls, AgentInstance) else _completed(cls)


@functools.cache
def _completed(cls: Any) -> type[AgentInstance]:
    return type(cls.__name__, (cls, AgentInstance), {})


class Engine(Protocol):
    """What samples tokens. Safe to call from many episodes at once, on one event loop."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action after `prompt_token_ids`, which is read before the call returns and never changed.

        `request_id` is the same for all turns of an episode, with the turn after its last "/": an engine may use it to
        find the cached prefix. Cancelling the call frees what the request held.

        Raises:
            EngineError: no completion can be had.
        """


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that agentenv uses."""

    eos_token_id: int | None
    all_special_ids: list[int]
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Ids to text."""

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """Render messages with the model's template."""


async def create(cls: type[AgentInstance], kwargs: Mapping[str, Any]) -> AgentInstance:
    """An instance of `cls`; `async def __init__`, as OpenRLHF's queue-era files write it, is awaited.

    A plain constructor runs on the event loop: nobody could close an instance whose making was given up in a thread.
    """
    instance = cls.__new__(cls)
    with _typed(cls.__init__):
        started = cls.__init__(instance, **kwargs)
        if inspect.isawaitable(started):
            await started
    return instance


def hacks_of(cls: type[Any]) -> Mapping[str, str]:
    """The hacks that a class names.

    Raises:
        ConfigError: they are no mapping of names to actions.
    """
    hacks = getattr(cls, "hacks", {})
    if not isinstance(hacks, Mapping) or not all(isinstance(text, str) for pair in hacks.items() for text in pair):
        raise ConfigError(
            f"{cls.__name__}.hacks: expected a mapping of names to actions, got {hacks!r:.200}. Write "
            'hacks = {"name": "action"} in the class.'
        )
    return hacks


def check_arguments(cls: type[Any], kwargs: Mapping[str, Any], where: str = "--env_kwargs") -> None:
    """Refuse arguments that the constructor of `cls` does not take, before the first episode.

    `where` is what the caller gave them as: a flag, or an argument in Python.

    Raises:
        ConfigError: with those that it takes.
    """
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        takes = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
        raise ConfigError(
            f"{where}: expected arguments of {cls.__name__} {takes}, got {dict(kwargs)!r}: {error}. "
            f"{'Change the JSON.' if where.startswith('--') else 'Change them.'}"
        ) from error


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `function` names, or all of them where it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Await `function(*args)` if it is async; run it in a thread of its own if it is plain.

    A daemon thread per call and not a pool: a call that never returns costs its thread, but neither a pool slot that
    other episodes wait for nor the end of the interpreter.

    Raises:
        InfraError: no thread can be had; the function was not called.
    """
    if inspect.iscoroutinefunction(function):
        with _typed(function):
            return await function(*args)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        """Hand the outcome over, on the loop."""
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        """Call the function, in the thread."""
        result, error = None, None
        try:
            result = context.run(function, *args)
        except BaseException as raised:  # noqa: BLE001 - carried to the caller, not handled here
            whole = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if whole else _as_error(function, raised)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    with outside():
        await _start_thread(run, getattr(function, "__qualname__", "call"))
        result = await future
    if not inspect.isawaitable(result):
        return result
    with _typed(function):
        return await result


async def _start_thread(run: Callable[[], None], name: str) -> None:
    for wait_s in (*_THREAD_WAITS_S, None):
        try:
            return threading.Thread(target=run, name=f"agentenv-{name}", daemon=True).start()
        except RuntimeError as error:
            if wait_s is None:
                raise InfraError(
                    f"{name}: expected a thread to run in, got {error} ({threading.active_count()} are there). "
                    "Lower --concurrency, or raise the limit on processes (ulimit -u)."
                ) from error
        await asyncio.sleep(wait_s)


@contextmanager
def _typed(function: Callable[..., Any]) -> Iterator[None]:
    """Make an error of what `function` lets out, in here, that would end the event loop or pass for its end.

    A KeyboardInterrupt in the main thread is left as it is: it may well be the user's, and nobody's in others. So is a
    GeneratorExit that does not come from the task: it ends a coroutine that nobody waits for any more.
    """
    task = _current_task()
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as stopped:
        if isinstance(stopped, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        if isinstance(stopped, GeneratorExit) and (task is None or task is not _current_task()):
            raise
        raise _as_error(function, stopped) from stopped


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


def _as_error(function: Callable[..., Any], stopped: BaseException) -> Exception:
    # These cannot cross a future: they would end the event loop, pass for a cancellation or be refused.
    name = getattr(function, "__qualname__", repr(function))
    mend = "sys.exit would end the whole run: raise" if isinstance(stopped, SystemExit) else "Raise"
    error = ContractError(f"{name}: expected a return value, got {stopped!r}. {mend} an Exception instead.")
    error.__cause__ = stopped
    return error
