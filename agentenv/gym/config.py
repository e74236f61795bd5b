"""GymConfig and EpisodeMaker: what the single and the vector environment have in common.

The maker draws a task and a seed (`draw`), makes the episode of the one loop (`episode`), and puts what it says into
Gymnasium's words: `begin` gives (observation, info), `act` gives (observation, reward, terminated, truncated, info).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Space

from agentenv.agent import AgentInstance, Tokenizer, check_arguments, create
from agentenv.chat import Chat
from agentenv.dataset import in_messages, read_tasks
from agentenv.endpoint.agent import owns_its_loop
from agentenv.episode import EpisodeKey
from agentenv.errors import ConfigError, ContractError
from agentenv.gym import views
from agentenv.gym.plain_text import plain_text_chat
from agentenv.gym.spaces import AnyText, Messages, TokenSeq
from agentenv.loading import (
    builtin_datasets,
    load_env,
    load_stop_token_ids,
    load_tokenizer,
    nearest,
    resolve_model,
)
from agentenv.stepping import SteppedEpisode
from agentenv.types import Completion, Limits, Task

ObsMode = Literal["text", "messages", "tokens"]
_NO_LIMIT = 2**31 - 1
_MAX_CHARS = 1_000_000
"""`max_length` of episodes in text and messages, where a character is a token."""
_SEEDS = 2**31

Taken = str | list[int] | Completion
"""An action as an episode takes it."""
Outcome = tuple[Any, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymConfig:
    """What `AgentEnv` and `AgentVectorEnv` are made with; all of it but `tokenizer` is JSON."""

    env: str
    """An installed environment's name, `module:Attr` or `file.py:Class`."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    data: str | None = None
    """Tasks: a file, a built-in name, a Hugging Face dataset; None is the environment's own."""
    limit: int | None = None
    """Only the first so many tasks."""
    obs_mode: ObsMode = "text"
    """text: what the environment says now; messages: the conversation so far; tokens: all ids so far."""
    model: str | None = None
    """For tokens: whose tokenizer and chat template; a shipped name, a folder or a Hugging Face id."""
    tokenizer: Tokenizer | None = None
    """For tokens: in place of `model`; it has to be picklable where the environment is to be."""
    max_episode_steps: int | None = None
    """Actions, after which the episode is truncated; None leaves that to the environment, `max_length` and
    TimeLimit."""
    max_length: int | None = None
    """Tokens of the whole episode (`Limits.max_length`); characters in text and messages. None is 1,000,000 there."""
    step_timeout_s: float = 60.0
    """Longest one call of the environment may take; beyond it the episode has failed."""

    def __post_init__(self) -> None:
        """Refuse what no environment can be made of.

        Raises:
            ConfigError: naming the argument.
        """
        steps, length = self.max_episode_steps, self.max_length
        checks = (
            ("env", self.env, isinstance(self.env, str) and self.env, "a name, module:Attr or file.py:Class"),
            ("env_kwargs", self.env_kwargs, isinstance(self.env_kwargs, Mapping), "a mapping"),
            ("obs_mode", self.obs_mode, self.obs_mode in ("text", "messages", "tokens"), "text, messages or tokens"),
            ("max_episode_steps", steps, _is_none_or(steps, least=1), "None or an integer >= 1"),
            ("max_length", length, _is_none_or(length, least=2), "None or an integer >= 2"),
            ("data", self.data, _is_path(self.data), "None, a file or a name"),
            ("limit", self.limit, _is_none_or(self.limit, least=1), "None or an integer >= 1"),
            ("model", self.model, _is_path(self.model), "None, a name, a folder or a Hugging Face id"),
            ("step_timeout_s", self.step_timeout_s, _is_seconds(self.step_timeout_s), "seconds above 0"),
        )
        for name, value, holds, expected in checks:
            if not holds:
                raise ConfigError(f"AgentEnv.{name}: expected {expected}, got {value!r}. Change it.")
        if self.obs_mode == "tokens" and self.model is None and self.tokenizer is None:
            raise ConfigError('AgentEnv.model: expected one for obs_mode "tokens", got None. Name a model.')

    @classmethod
    def of(cls, env: str, settings: Mapping[str, Any]) -> GymConfig:
        """Of keyword arguments as an environment's constructor gets them.

        Raises:
            ConfigError: one of them is unknown or wrong.
        """
        known = [item.name for item in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"AgentEnv: expected arguments of {known}, got {name!r}.{nearest(name, known)} "
                    "What the environment itself takes goes into env_kwargs."
                )
        return cls(env=env, **settings)

    @property
    def limits(self) -> Limits:
        """The budgets of one episode."""
        length = self.max_length
        if length is None:
            length = Limits().max_length if self.obs_mode == "tokens" else _MAX_CHARS
        try:
            return Limits(length, self.max_episode_steps or _NO_LIMIT, step_timeout_s=self.step_timeout_s)
        except ValueError as error:
            raise ConfigError(f"AgentEnv: {error}") from error


@dataclass(frozen=True, slots=True)
class Start:
    """What an episode begins with: the same start and actions give the same episode."""

    task: Task
    seed: int
    """The environment's; the task's own where it has one."""


class EpisodeMaker:
    """Makes the episodes of one configuration; keeps no state of any of them, so one serves many environments at once.

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
            ConfigError: one of them cannot be had.
            DataError: a row of the data cannot be used.
        """
        self.config, self.limits = config, config.limits
        self.cls = _steppable(config.env)
        check_arguments(self.cls, config.env_kwargs, "env_kwargs")
        self.tasks: Sequence[Task] = _tasks(config, self.cls)
        self.chat = _chat(config)
        self._index = {task.task_id: index for index, task in enumerate(self.tasks)}
        self.observation_space, self.action_space = self._spaces()

    def __reduce__(self) -> tuple[Any, ...]:
        return EpisodeMaker, (self.config,)

    def __deepcopy__(self, memo: dict[int, Any]) -> EpisodeMaker:
        return self

    def draw(self, np_random: np.random.Generator, task: int | str | None = None) -> Start:
        """A task and a seed from the generator, or the task of this index or id; the generator moves on alike.

        Raises:
            ConfigError: there is no such task.
        """
        index, seed = int(np_random.integers(len(self.tasks))), int(np_random.integers(_SEEDS))
        chosen = self.tasks[index if task is None else self._index_of(task)]
        return Start(chosen, seed if chosen.seed is None else chosen.seed)

    def episode(self, start: Start) -> SteppedEpisode:
        """An episode that has not begun."""
        key = EpisodeKey(f"{start.task.task_id}/0", start.task.task_id, seed=start.seed)
        make = partial(create, self.cls, self.config.env_kwargs)
        return SteppedEpisode(make, start.task, chat=self.chat, limits=self.limits, key=key)

    async def begin(self, episode: SteppedEpisode) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation and info.

        Raises:
            EpisodeFailed: the environment failed.
        """
        await episode.begin()
        return self.observation(episode), views.first_info(episode)

    async def act(self, episode: SteppedEpisode, action: Any) -> Outcome:
        """Take an action: observation, reward, terminated, truncated, info.

        Raises:
            ContractError: the action is none of this mode's; the episode goes on.
            EpisodeFailed: the environment failed: there is no reward.
        """
        return await self.take(episode, self.action(action))

    async def take(self, episode: SteppedEpisode, action: Taken) -> Outcome:
        """`act` with what `action` gave."""
        result = await episode.act(action)
        return (
            self.observation(episode), float(result.reward), bool(result.terminated), bool(result.truncated),
            views.info_of(episode, result),
        )  # fmt: skip

    def observation(self, episode: SteppedEpisode) -> Any:
        """What the episode shows now, as an element of `observation_space`; nobody else holds it."""
        if self.config.obs_mode == "text":
            return views.text_now(episode.trajectory)
        if self.config.obs_mode == "messages":
            return views.conversation(episode.trajectory)
        return np.array(episode.trajectory.segments[-1].token_ids, np.int64)

    def action(self, value: Any) -> Taken:
        """An action as `SteppedEpisode.act` takes it.

        Raises:
            ContractError: it is none of this mode's.
        """
        if isinstance(value, Completion):
            return value
        if self.config.obs_mode != "tokens":
            if isinstance(value, str):
                return str(value)
            raise ContractError(f"AgentEnv.step: expected a text, got {value!r:.100}. Give the action as a str.")
        if value not in self.action_space:
            raise ContractError(
                f"AgentEnv.step: expected token ids of {self.action_space}, got {value!r:.100}. Give a list of ids."
            )
        return [int(i) for i in value]

    def _index_of(self, task: int | str) -> int:
        index = self._index.get(task, -1) if isinstance(task, str) else task
        if not _is_index(index) or not 0 <= index < len(self.tasks):
            raise ConfigError(
                f"AgentEnv.reset: options['task']: expected an index below {len(self.tasks)} or a task's id, got "
                f"{task!r}. The first id is {self.tasks[0].task_id!r}."
            )
        return index

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        if self.config.obs_mode == "text":
            return AnyText(), AnyText(self.limits.max_length)
        if self.config.obs_mode == "messages":
            return Messages(), AnyText(self.limits.max_length)
        size = _vocab_size(self.chat.tokenizer)
        return TokenSeq(size, self.limits.max_length), TokenSeq(size, self.limits.max_length, min_len=1)


def _is_none_or(value: Any, *, least: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)


def _is_path(value: Any) -> bool:
    return value is None or isinstance(value, str | os.PathLike)


def _is_index(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _steppable(env: str) -> type[AgentInstance]:
    cls = load_env(env)
    if owns_its_loop(cls):
        raise ConfigError(
            f"AgentEnv.env: expected an environment with `step`, got {env!r}, which has a loop of its own (`run`). "
            "Run it with `agentenv run`."
        )
    return cls


def _tasks(config: GymConfig, cls: type[AgentInstance]) -> list[Task]:
    own = {key: Path(path) for key, path in cls.datasets.items()}
    data = config.data if config.data is not None else next(iter(own), None)
    if data is None:
        raise ConfigError(f"AgentEnv.data: expected tasks, got None; {config.env} has none of its own. Name a file.")
    builtin = own if data in own else builtin_datasets()
    tasks = read_tasks(data, limit=config.limit, builtin=builtin, needs_label=cls.needs_label)
    return [in_messages(task) for task in tasks]


def _chat(config: GymConfig) -> Chat:
    if config.obs_mode != "tokens":
        return plain_text_chat()
    if config.tokenizer is not None:
        return Chat(config.tokenizer)
    model = resolve_model(config.model or "")
    return Chat(load_tokenizer(model), stop_token_ids=load_stop_token_ids(model))


def _vocab_size(tokenizer: Any) -> int:
    """One more than the largest id there is; of a tokenizer that does not say, all that a record can hold."""
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", None)
    if size is None:
        return _NO_LIMIT
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return max(int(size), *(int(i) + 1 for i in (*added, *tokenizer.all_special_ids)), 1)
