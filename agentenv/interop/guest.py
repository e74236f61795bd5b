"""Guest: a stepped environment of another library as an agent environment; `--env KIND:NAME` names one."""

from __future__ import annotations

import copyreg
import importlib
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.step_dict import scalar
from agentenv.core.types import Message, StepResult
from agentenv.episode.registry import load_env
from agentenv.errors import ConfigError, InfraError, MissingDependency
from agentenv.rewards.rules.text import final_text

_REASON_CHARS = 500
_GLOBAL_STATE = threading.RLock()


class OwnRandom:
    """The global random numbers that the code of one episode draws: of `random` and of numpy's global generator.

    Foreign code draws from them, whatever else draws at that time. While `active`, they are those of this episode;
    before and after, those of the process. One episode at a time is active in a process.
    """

    def __init__(self, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this episode's numbers within the context."""
        with _GLOBAL_STATE:
            outer = self._swap(self._state)
            try:
                yield
            finally:
                self._state = self._swap(outer)

    @staticmethod
    def _swap(state: Any) -> Any:
        before = random.getstate(), np.random.get_state()
        random.setstate(state[0])
        np.random.set_state(state[1])
        return before


class _ByName(type):
    """Metaclass that pickles a class of `guest_class` by its name: no module holds the class."""


def _reduce(cls: _ByName) -> str | tuple[Any, ...]:
    return (load_env, (vars(cls)["spec"],)) if "spec" in vars(cls) else cls.__qualname__


copyreg.pickle(_ByName, _reduce)


class Guest(AgentInstance, metaclass=_ByName):
    """One episode of a stepped environment of another library; `--env_kwargs` are arguments of that environment.

    A subclass per library writes `begin` and `act`. Each call of the library is made with random numbers that only the
    task's seed decides. What the library lacks from outside (data, a service) is an InfraError.
    """

    spec: ClassVar[str]
    """KIND:NAME"""
    datasets: ClassVar[Mapping[str, str | Path]] = {
        "gymnasium_seeds": Path(__file__).parents[1] / "gym/data/seeds.jsonl"
    }
    needs_label: ClassVar[bool] = False
    is_here: ClassVar[bool] = True
    """False if the environment's code runs in another process, whose random numbers are its own."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs
        self._numbers = OwnRandom(0)

    def begin(self, seed: int) -> str:
        """Make and reset the library's environment, and return its first text."""
        raise NotImplementedError(f"{type(self).__name__}.begin: expected an implementation, got none. Write it.")

    def act(self, action: str) -> StepResult:
        """Step the library's environment with an action."""
        raise NotImplementedError(f"{type(self).__name__}.act: expected an implementation, got none. Write it.")

    def reset(self, states: ResetState) -> ResetState:  # type: ignore[override]  # in a separate thread
        """Return the environment's first text as the user's message, which replaces the task's prompt.

        Raises:
            InfraError: the library lacks its data, or a service of its environment failed.
        """
        seed = states.get("seed") or 0
        self._numbers = OwnRandom(seed)
        with self._in_library("reset"):
            text = self.begin(seed)
        return {**states, "observation": [{"role": "user", "content": text}]}

    def step(self, states: StepState) -> StepResult:  # type: ignore[override]  # in a separate thread
        """Step the environment with the answer, the text behind the thoughts of the action.

        Raises:
            InfraError: a service of the environment failed.
            ContractError: its reward is not a finite number.
        """
        with self._in_library("step"):
            return self.act(answer_of(states))

    def number(self, reward: Any) -> float:
        """Return a reward of the library as a number.

        Raises:
            ContractError: it is not a finite number.
        """
        return scalar(reward, f"{self.spec}: reward", "Report it to the library.")

    @contextmanager
    def _in_library(self, call: str) -> Iterator[None]:
        try:
            with self._numbers.active() if self.is_here else nullcontext():
                yield
        except (OSError, ImportError, LookupError) as error:
            # nltk raises the plain LookupError where its data is missing.
            if isinstance(error, LookupError) and type(error) is not LookupError:
                raise
            reason = " ".join(str(error).partition("For more information")[0].replace("*", "").split())[:_REASON_CHARS]
            raise InfraError(
                f"{self.spec}: {call}: expected its data and services, got {type(error).__name__}: {reason}. "
                "Install what it names, or check the network."
            ) from error


def answer_of(states: StepState) -> str:
    """Return the action without its thoughts; empty if a thought does not end."""
    return final_text(states["action_text"], states.get("observation_text", "")) or ""


def text_of_content(message: Message, spec: str) -> str:
    """Return the text of a message whose content is text, or a list of parts.

    Raises:
        ConfigError: a part is media.
    """
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(part.get("type") != "text" for part in parts):
        raise ConfigError(f"{spec}: expected messages of text, got media. Engines sample without them.")
    return "".join(part["text"] for part in parts)


def import_library(module: str, kind: str, packages: str = "") -> Any:
    """Return a library's module; the process keeps its random numbers and root logger, which some imports change.

    Args:
        module: its name.
        kind: the library, as in `--env KIND:NAME`.
        packages: arguments of `pip install`; empty: our extra of the library's name.

    Raises:
        MissingDependency: it, or something that it imports, is not installed.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with OwnRandom(0).active():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"--env {kind}:…: expected the package {module}, got no module {error.name!r}. "
            + "pip install "
            + (packages or f"'agentenv-rl[{kind}]'")
        ) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


G = TypeVar("G", bound=Guest)


def guest_class(base: type[G], spec: str, summary: str, max_turns: int | None) -> type[G]:
    """Return the class of the environment `spec` (KIND:NAME), which other processes load by that name."""
    namespace = {"spec": spec, "max_turns": max_turns, "__doc__": summary, "__module__": base.__module__}
    return cast(type[G], _ByName(spec, (base,), namespace))


def clipped(reward: float) -> float:
    """Return the score of a reward: the nearest number in [0, 1]."""
    return min(1.0, max(0.0, reward))
