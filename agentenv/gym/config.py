"""GymConfig and EpisodeMaker: the parts that the single and the vector environment share.

The maker draws a task and a seed (`draw`), makes an episode of the one loop (`episode`), and translates its results
for Gymnasium: `begin` returns (observation, info), `act` (observation, reward, terminated, truncated, info).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Space

from agentenv._util.calls import create
from agentenv._util.suggest import did_you_mean
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Completion, Limits, Task
from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.episode.endpoint.agent import owns_its_loop
from agentenv.episode.loop import AgentFactory
from agentenv.episode.registry import builtin_datasets, load_env
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.source import check_arguments
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import ConfigError, ContractError
from agentenv.gym import views
from agentenv.gym.spaces import AnyText, Messages, TokenSeq

ObsMode = Literal["text", "messages", "tokens"]
_NO_LIMIT = 2**31 - 1
_MAX_CHARS = 1_000_000
"""`max_length` of episodes in text and messages, in which a character is a token."""
_SEEDS = 2**31

Taken = str | list[int] | Completion
"""An action in the form that an episode takes."""
Outcome = tuple[Any, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymConfig:
    """Arguments of `AgentEnv` and `AgentVectorEnv`; all but `tokenizer` are JSON."""

    env: str
    """An installed environment's name, `module:Attr` or `file.py:Class`."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    data: str | None = None
    """Tasks: a file, a built-in name or a Hugging Face dataset; None selects the environment's own data."""
    limit: int | None = None
    """Maximum number of tasks, from the first."""
    obs_mode: ObsMode = "text"
    """text: the latest observation; messages: the conversation so far; tokens: all ids so far."""
    model: str | None = None
    """For tokens: the model that provides tokenizer and chat template; a shipped name, folder or Hugging Face id."""
    tokenizer: Tokenizer | None = None
    """For tokens: replaces `model`; a picklable environment needs a picklable tokenizer."""
    max_episode_steps: int | None = None
    """Number of actions after which the episode is truncated; None leaves it to the environment, `max_length` and
    TimeLimit."""
    max_length: int | None = None
    """Tokens of the whole episode; characters in text and messages. None is 1,000,000 characters, or as many tokens as
    `max_length` of the class, else 2048."""
    step_timeout_s: float = 60.0
    """Time limit of one call of the environment, in seconds; the episode fails beyond it."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ConfigError: an argument is wrong; the message names it.
        """
        steps, length, limit_s = self.max_episode_steps, self.max_length, self.step_timeout_s
        is_limit = isinstance(limit_s, int | float) and not isinstance(limit_s, bool) and limit_s > 0
        checks = (
            ("env", self.env, isinstance(self.env, str) and self.env, "a name, module:Attr or file.py:Class"),
            ("env_kwargs", self.env_kwargs, isinstance(self.env_kwargs, Mapping), "a mapping"),
            ("obs_mode", self.obs_mode, self.obs_mode in ("text", "messages", "tokens"), "text, messages or tokens"),
            ("max_episode_steps", steps, _is_none_or(steps, least=1), "None or an integer >= 1"),
            ("max_length", length, _is_none_or(length, least=2), "None or an integer >= 2"),
            ("data", self.data, _is_path(self.data), "None, a file or a name"),
            ("limit", self.limit, _is_none_or(self.limit, least=1), "None or an integer >= 1"),
            ("model", self.model, _is_path(self.model), "None, a name, a folder or a Hugging Face id"),
            ("step_timeout_s", limit_s, is_limit, "seconds above 0"),
        )
        for name, value, holds, expected in checks:
            if not holds:
                raise ConfigError(f"AgentEnv.{name}: expected {expected}, got {value!r}. Change it.")
        if self.obs_mode == "tokens" and self.model is None and self.tokenizer is None:
            raise ConfigError('AgentEnv.model: expected one for obs_mode "tokens", got None. Name a model.')

    @classmethod
    def of(cls, env: str, settings: Mapping[str, Any]) -> GymConfig:
        """Return the config for the keyword arguments of an environment's constructor.

        Raises:
            ConfigError: an argument is unknown or wrong.
        """
        known = [item.name for item in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"AgentEnv: expected arguments of {known}, got {name!r}.{did_you_mean(name, known)} "
                    "Pass the environment's own arguments in env_kwargs."
                )
        return cls(env=env, **settings)

    def limits(self, cls: type[AgentInstance]) -> Limits:
        """Return the limits of one episode of an environment."""
        length = self.max_length
        if length is None:
            length = (cls.max_length or Limits().max_length) if self.obs_mode == "tokens" else _MAX_CHARS
        try:
            return Limits(length, self.max_episode_steps or _NO_LIMIT, step_timeout_s=self.step_timeout_s)
        except ValueError as error:
            raise ConfigError(f"AgentEnv: {error}") from error


@dataclass(frozen=True, slots=True)
class Start:
    """Initial conditions of an episode: the same start and actions yield the same episode."""

    task: Task
    seed: int
    """Seed of the environment; the task's own seed if it has one."""


class EpisodeMaker:
    """Maker of the episodes of one configuration. It keeps no state of them, so many environments can share one.

    Example::

        maker = EpisodeMaker(GymConfig(env="guess_number"))
        episode = maker.episode(maker.draw(np.random.default_rng(0)))
        observation, info = await maker.begin(episode)
        observation, reward, terminated, truncated, info = await maker.act(episode, "7")
        await episode.aclose()
    """

    def __init__(self, config: GymConfig) -> None:
        """Load the environment, its tasks and, for tokens, the tokenizer.

        Raises:
            ConfigError: one of them is unavailable.
            DataError: a row of the data is invalid.
        """
        self.config, self.cls = config, load_env(config.env)
        if owns_its_loop(self.cls):
            raise ConfigError(
                f"AgentEnv.env: expected an environment with `step`, got {config.env!r}, which has its own loop "
                "(`run`). Run it with `agentenv run`."
            )
        self.limits = config.limits(self.cls)
        check_arguments(self.cls, config.env_kwargs, "env_kwargs")
        own = {key: Path(path) for key, path in self.cls.datasets.items()}
        data = config.data if config.data is not None else next(iter(own), None)
        if data is None:
            raise ConfigError(f"AgentEnv.data: expected tasks, got None; {config.env} ships no data. Name a file.")
        builtin = own if data in own else builtin_datasets()
        tasks = read_tasks(data, limit=config.limit, builtin=builtin, needs_label=self.cls.needs_label)
        self.tasks: Sequence[Task] = [in_messages(task) for task in tasks]
        self._index = {task.task_id: index for index, task in enumerate(self.tasks)}
        if config.obs_mode != "tokens":
            self.chat = _plain_text_chat()
        elif config.tokenizer is not None:
            self.chat = Chat(config.tokenizer)
        else:
            model = resolve_model(config.model or "")
            self.chat = Chat(load_tokenizer(model), stop_token_ids=load_stop_token_ids(model))
        self.observation_space, self.action_space = self._spaces()

    def __reduce__(self) -> tuple[Any, ...]:
        return EpisodeMaker, (self.config,)

    def __deepcopy__(self, memo: dict[int, Any]) -> EpisodeMaker:
        return self

    def draw(self, np_random: np.random.Generator, task: int | str | None = None) -> Start:
        """Draw a task and a seed, or select the task by index or id; the generator advances equally in both cases.

        Raises:
            ConfigError: the task does not exist.
        """
        index, seed = int(np_random.integers(len(self.tasks))), int(np_random.integers(_SEEDS))
        if task is not None:
            index = self._index.get(task, -1) if isinstance(task, str) else task
            is_number = isinstance(index, int | np.integer) and not isinstance(index, bool)
            if not is_number or not 0 <= index < len(self.tasks):
                raise ConfigError(
                    f"AgentEnv.reset: options['task']: expected an index below {len(self.tasks)} or a task's id, got "
                    f"{task!r}. The first id is {self.tasks[0].task_id!r}."
                )
        chosen = self.tasks[index]
        return Start(chosen, seed if chosen.seed is None else chosen.seed)

    def episode(self, start: Start, make: AgentFactory | None = None) -> SteppedEpisode:
        """Return an episode that has not started. `make` makes its agent elsewhere than in this process."""
        key = EpisodeKey(f"{start.task.task_id}/0", start.task.task_id, seed=start.seed)
        make = make or partial(create, self.cls, self.config.env_kwargs)
        return SteppedEpisode(make, start.task, chat=self.chat, limits=self.limits, key=key)

    async def begin(self, episode: SteppedEpisode) -> tuple[Any, dict[str, Any]]:
        """Start an episode and return its first observation and info.

        Raises:
            EpisodeFailed: the environment failed.
        """
        await episode.begin()
        return self.observation(episode), views.first_info(episode)

    async def act(self, episode: SteppedEpisode, action: Any) -> Outcome:
        """Take an action; return observation, reward, terminated, truncated and info.

        Raises:
            ContractError: the action does not fit the mode; the episode continues.
            EpisodeFailed: the environment failed; the reward is unknown.
        """
        return await self.take(episode, self.action(action))

    async def take(self, episode: SteppedEpisode, action: Taken) -> Outcome:
        """Take an action that `action` returned; otherwise as `act`."""
        result = await episode.act(action)
        return (
            self.observation(episode), float(result.reward), bool(result.terminated), bool(result.truncated),
            views.info_of(episode, result),
        )  # fmt: skip

    def observation(self, episode: SteppedEpisode) -> Any:
        """Return the current observation as a new element of `observation_space`."""
        if self.config.obs_mode == "text":
            return views.text_now(episode.trajectory)
        if self.config.obs_mode == "messages":
            return views.conversation(episode.trajectory)
        return np.array(episode.trajectory.segments[-1].token_ids, np.int64)

    def empty_observation(self) -> Any:
        """Return the observation of an environment without an episode."""
        return {"text": "", "messages": [], "tokens": np.zeros(0, np.int64)}[self.config.obs_mode]

    def action(self, value: Any) -> Taken:
        """Return an action in the form that `SteppedEpisode.act` takes.

        Raises:
            ContractError: the action does not fit the mode.
        """
        if isinstance(value, Completion):
            return value
        if self.config.obs_mode != "tokens":
            if isinstance(value, str):
                return str(value)
            raise ContractError(f"AgentEnv.step: expected a text, got {value!r:.100}. Pass the action as a str.")
        if value not in self.action_space:
            raise ContractError(
                f"AgentEnv.step: expected token ids of {self.action_space}, got {value!r:.100}. Pass a list of ids."
            )
        return [int(i) for i in value]

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        if self.config.obs_mode == "text":
            return AnyText(), AnyText(self.limits.max_length)
        if self.config.obs_mode == "messages":
            return Messages(), AnyText(self.limits.max_length)
        # The largest id plus one; for a tokenizer of unknown size, the largest size that a record can hold.
        tokenizer: Any = self.chat.tokenizer
        known = len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", None)
        size = _NO_LIMIT
        if known is not None:
            added = getattr(tokenizer, "added_tokens_decoder", {})
            size = max(int(known), *(int(i) + 1 for i in (*added, *tokenizer.all_special_ids)), 1)
        return TokenSeq(size, self.limits.max_length), TokenSeq(size, self.limits.max_length, min_len=1)


def _is_none_or(value: Any, *, least: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)


def _is_path(value: Any) -> bool:
    return value is None or isinstance(value, str | os.PathLike)


@functools.cache
def _plain_text_chat() -> Chat:
    """Return the one chat of a process: a template is studied once, not for each environment of a vector."""
    return Chat(PlainTextTokenizer())
