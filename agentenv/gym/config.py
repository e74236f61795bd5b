"""GymConfig and EpisodeMaker: the parts that the single and the vector environment share.

The maker draws a task and a seed (`draw`), makes an episode of the one loop (`episode`), and translates its results
for Gymnasium: `begin` returns (observation, info), `act` (observation, reward, terminated, truncated, info). The views
of an episode's record (texts, conversations, infos) are built at each call.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Space

from agentenv._util.calls import create
from agentenv._util.suggest import did_you_mean
from agentenv.chat.chat import Chat, text_of
from agentenv.chat.tool_roles import tools_text
from agentenv.core.agent import AgentInstance
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.core.dataset import in_messages
from agentenv.core.engine import Tokenizer
from agentenv.core.messages import as_messages
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Limits, Message, Task
from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.episode.endpoint.agent import owns_its_loop
from agentenv.episode.loop import AgentFactory
from agentenv.episode.registry import load_env
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.source import check_arguments
from agentenv.episode.stepping import SteppedEpisode
from agentenv.episode.tasks import TaskSource
from agentenv.errors import ConfigError, ContractError
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
        types: tuple[tuple[str, Any, str], ...] = (
            ("env", str, "a name, module:Attr or file.py:Class"),
            ("env_kwargs", Mapping, "a mapping"),
            ("data", str | os.PathLike | None, "None, a file or a name"),
            ("model", str | os.PathLike | None, "None, a name, a folder or a Hugging Face id"),
        )
        for name, kind, expected in types:
            if not isinstance(getattr(self, name), kind) or getattr(self, name) == "":
                raise ConfigError(f"AgentEnv.{name}: expected {expected}, got {getattr(self, name)!r}.")
        for name, low in (("max_episode_steps", 1), ("max_length", 2), ("limit", 1)):
            if getattr(self, name) is not None:
                whole_number(f"AgentEnv.{name}", getattr(self, name), low=low)
        one_of("AgentEnv.obs_mode", self.obs_mode, ("text", "messages", "tokens"))
        number("AgentEnv.step_timeout_s", self.step_timeout_s, low=0.001, high=math.inf)
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
        tasks = TaskSource(str(data)).read(own, needs_label=self.cls.needs_label, limit=config.limit)
        self.tasks: Sequence[Task] = [in_messages(task) for task in tasks]
        self._index = {task.task_id: index for index, task in enumerate(self.tasks)}
        self.observation_space: Space[Any] = AnyText() if config.obs_mode == "text" else Messages()
        self.action_space: Space[Any] = AnyText(self.limits.max_length)
        self.chat = _plain_text_chat()
        if config.obs_mode == "tokens":
            if config.tokenizer is not None:
                self.chat = Chat(config.tokenizer)
            else:
                model = resolve_model(config.model or "")
                self.chat = Chat(load_tokenizer(model), stop_token_ids=load_stop_token_ids(model))
            # The largest id plus one; for a tokenizer of unknown size, the largest size that a record can hold.
            tokenizer: Any = self.chat.tokenizer
            size = len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", None)
            if size is not None:
                added = getattr(tokenizer, "added_tokens_decoder", {})
                size = max(int(size), *(int(i) + 1 for i in (*added, *tokenizer.all_special_ids)), 1)
            self.observation_space = TokenSeq(size or _NO_LIMIT, self.limits.max_length)
            self.action_space = TokenSeq(size or _NO_LIMIT, self.limits.max_length, min_len=1)

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
        """Start an episode and return its first observation and info: task_id, and the offered tools as text.

        Raises:
            EpisodeFailed: the environment failed.
        """
        await episode.begin()
        trajectory = episode.trajectory
        info: dict[str, Any] = {"task_id": trajectory.task.task_id}
        if trajectory.tools:
            info["tools"] = tools_text(trajectory.tools)
        return self.observation(episode), info

    async def act(self, episode: SteppedEpisode, action: Any) -> Outcome:
        """Take an action; return observation, reward, terminated, truncated and info.

        Raises:
            ContractError: the action does not fit the mode; the episode continues.
            EpisodeFailed: the environment failed; the reward is unknown.
        """
        return await self.take(episode, self.action(action))

    async def take(self, episode: SteppedEpisode, action: Taken) -> Outcome:
        """Take an action that `action` returned; otherwise as `act`.

        Numbers of the info are floats, everything else is text; nothing depends on the clock.
        """
        result = await episode.act(action)
        info: dict[str, Any] = {
            key: str(value) if isinstance(value, str) else float(value) for key, value in result.info.items()
        }
        if result.score is not None:
            info["score"] = float(result.score)
        reason = episode.trajectory.stop_reason
        if episode.over and reason is not None:
            info["stop_reason"] = str(reason)
        return self.observation(episode), float(result.reward), bool(result.terminated), bool(result.truncated), info

    def observation(self, episode: SteppedEpisode) -> Any:
        """Return the current observation as a new element of `observation_space`.

        A text is the reply to the last action, or the prompt with the offered tools.
        """
        trajectory = episode.trajectory
        if self.config.obs_mode == "text" and trajectory.turns:
            result = trajectory.turns[-1].result
            return as_text(result.observation) if result is not None else ""
        if self.config.obs_mode == "text":
            tools = [tools_text(trajectory.tools)] if trajectory.tools else []
            return "\n\n".join([*tools, as_text(trajectory.prompt)])
        if self.config.obs_mode == "messages":
            return conversation(trajectory)
        return np.array(trajectory.segments[-1].token_ids, np.int64)

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


@functools.cache
def _plain_text_chat() -> Chat:
    """Return the one chat of a process: a template is studied once, not for each environment of a vector."""
    return Chat(PlainTextTokenizer())


# --- Gymnasium's views of an episode's record ------------------------------------------------------------------------


def as_text(observation: str | Sequence[Message]) -> str:
    """Return an observation as text: one user message without its role, other messages with their roles."""
    if isinstance(observation, str):
        return str(observation)
    if len(observation) == 1 and observation[0].get("role") == "user":
        return text_of(observation[0])
    return "\n\n".join(f"{str(message.get('role')).capitalize()}: {text_of(message)}" for message in observation)


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return all messages so far: actions as the assistant's, raw text of the environment as a user's.

    An action without a reply and the next action form one message.
    """
    messages = as_messages(deepcopy(trajectory.prompt))
    is_open = False
    for turn in trajectory.turns:
        if is_open:
            messages[-1]["content"] += turn.action
        else:
            messages.append({"role": "assistant", "content": turn.action})
        observation = turn.result.observation if turn.result is not None else ""
        messages += as_messages(deepcopy(observation))
        is_open = not observation
    return messages


def transcript(trajectory: Trajectory) -> str:
    """Return the episode so far as readable text with roles and rewards. A later transcript extends an earlier one."""
    parts = [f"[{trajectory.task.task_id}]\n", *map(_paragraph, as_messages(trajectory.prompt))]
    for turn in trajectory.turns:
        parts.append(_paragraph({"role": "assistant", "content": turn.action}))
        if turn.result is not None:
            score = "" if turn.result.score is None else f", score {turn.result.score:g}"
            parts.append(f"(reward {turn.result.reward:g}{score})\n")
            parts += map(_paragraph, as_messages(turn.result.observation))
    return "".join(parts) + (f"[{trajectory.stop_reason}]\n" if trajectory.stop_reason is not None else "")


def _paragraph(message: Message) -> str:
    return f"{message.get('role')}: {text_of(message)}\n"
