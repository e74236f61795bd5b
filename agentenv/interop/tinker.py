"""Our environments in tinker-cookbook's reinforcement learning: its Env, EnvGroupBuilder, RLDataset and its builder.

Source: tinker_cookbook/rl/types.py, rollout_runner.py and data_processing.py, 0.6.1. tinker's rollout samples after the
tokens that an Env returns. Here they are those that an episode asks its engine with, so that each observation extends
the last one and its action. tinker uses these classes by their methods, and never asks what they derive from.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentenv._util.calls import create
from agentenv.chat.chat import Chat, ChatOptions, stop_token_ids_of
from agentenv.core.arguments import settings_from
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.types import Completion, Limits, StopReason, Task
from agentenv.episode.registry import builtin_datasets
from agentenv.episode.runner import derive_seed
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.source import EnvSource, needs_label
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import ConfigError
from agentenv.interop.hosted import check_numbers, limits_of, stepped_source

_WHERE = "interop.tinker"
_STOP_REASONS = {StopReason.TERMINATED: "completed", StopReason.MAX_LENGTH: "max_tokens"}
"""tinker's words for ours, where they differ."""


class _ActionLimit:
    """tinker's RolloutLimits of one rollout, of which only the next action's tokens are limited: our loop knows how
    many there are.
    """

    def __init__(self, episode: SteppedEpisode) -> None:
        self._episode = episode

    @property
    def max_turn_tokens(self) -> int | None:
        asked = self._episode.asked
        return None if asked is None else asked.sampling.max_tokens

    def __getattr__(self, name: str) -> Any:
        from tinker_cookbook.rl.rollout_limits import RolloutLimits

        return getattr(RolloutLimits(), name)


class EpisodeEnv:
    """tinker's Env of one episode: token ids in, token ids out.

    A failed episode raises EpisodeFailed and has no reward; what follows is for `rollout_error_tolerance` to decide.

    Args:
        episode: the episode, before its start.
        stops: ids that end an action.
    """

    def __init__(self, episode: SteppedEpisode, stops: Sequence[int]) -> None:
        self.episode, self._stops = episode, list(stops)
        self.rollout_limits = _ActionLimit(episode)
        """tinker's rollout looks here for the maximum number of tokens of each action."""

    async def initial_observation(self) -> tuple[Any, list[int]]:
        """Begin the episode; return its prompt, and the ids that end the first action.

        Raises:
            EpisodeFailed: the environment raised, or its prompt leaves no room.
            ConfigError: the environment asks for stop strings or a grammar.
        """
        await self.episode.begin()
        return self._observation()

    async def step(self, action: Sequence[int], *, extra: Mapping[str, Any] | None = None) -> Any:
        """Pass an action as it was sampled, and return tinker's StepResult.

        Raises:
            EpisodeFailed: the environment raised, or the action has no tokens or more than fit.
            ConfigError: the environment asks for stop strings or a grammar.
        """
        from tinker_cookbook.rl.types import StepResult

        is_cut = (extra or {}).get("stop_reason") == "length"
        result = await self.episode.act(Completion(tuple(map(int, action)), "length" if is_cut else "stop"))
        observation, stops = self._observation()
        trajectory, metrics = self.episode.trajectory, {}
        if self.episode.over and trajectory.stop_reason is not None:
            reason = _STOP_REASONS.get(trajectory.stop_reason, trajectory.stop_reason.value)
            metrics = {f"stop/{reason}": 1.0, "truncated": float(trajectory.truncated)}
            metrics |= {} if trajectory.score is None else {"score": trajectory.score}
        numbers = {key: float(value) for key, value in result.info.items() if not isinstance(value, str)}
        return StepResult(
            reward=result.reward,
            episode_done=self.episode.over,
            next_observation=observation,
            next_stop_condition=stops,
            metrics={**numbers, **metrics},
            logs={key: value for key, value in result.info.items() if isinstance(value, str)},
        )

    def _observation(self) -> tuple[Any, list[int]]:
        """Return what the next action follows, which is nothing after the end, and the ids that end the action."""
        from tinker import ModelInput

        asked = self.episode.asked
        if asked is None:
            return ModelInput.from_ints([]), self._stops
        if asked.sampling.stop or asked.sampling.structural_tag is not None:
            raise ConfigError(
                f"{_WHERE}: expected an environment without stop strings and grammars, got {asked.sampling}. tinker "
                "takes either strings or ids, and no grammar: use stop_token_ids."
            )
        ids = ModelInput.from_ints([int(token) for token in asked.prompt_token_ids])
        return ids, sorted({*self._stops, *asked.sampling.stop_token_ids})


@dataclass(frozen=True)
class EnvDatasetBuilder:
    """tinker's RLDatasetBuilder: the tasks of an environment, in groups of siblings.

    Example::

        config = train.Config(
            model_name=MODEL, dataset_builder=EnvDatasetBuilder("math_retry", "tasks.jsonl", MODEL),
            rollout_error_tolerance=MinViableGroup(), max_tokens=256, learning_rate=1e-4, log_path=..., recipe_name=...,
        )
        asyncio.run(train.main(config))
    """

    env: str | type[Any]
    """An installed environment's name, `module:Attr`, `FILE.py:Attr`, or the class."""
    data: str | Sequence[Mapping[str, Any] | Task]
    """Tasks: a file, a Hugging Face dataset id, a built-in name, or the rows."""
    model: str
    """tinker's `model_name`, or a folder: the tokenizer is its."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    group_size: int = 8
    """Episodes of each task."""
    batch_size: int = 8
    """Tasks of each batch; the tasks of an incomplete last one are left out."""
    limits: Limits | Mapping[str, Any] | None = None
    """Budgets of each episode: all of `Limits`, or fields by name, and of what is not named the class's `max_turns` and
    `max_length`. `max_length` counts the prompt, too. Of the time limits only `step_timeout_s`
    applies. tinker's `max_tokens` limits one action."""
    chat_options: ChatOptions | Mapping[str, Any] = field(default_factory=ChatOptions)
    """How messages become tokens: `ChatOptions`, or fields by name. Under `history="rerender"` each segment becomes a
    Datum."""
    seed: int = 0
    """Seed of the order of the tasks, and of the environments of tasks that have none."""

    async def __call__(self) -> tuple[EnvDataset, None]:
        """Return the dataset, and no test set.

        Raises:
            ConfigError: the environment has a loop that calls an endpoint, there is not one whole batch, or another
                argument is wrong.
            DataError: a row is not a task, or has no label that the environment needs.
        """
        check_numbers(self)
        _ = self.episode_limits(), self.options()
        is_needed = needs_label(self.source())
        tasks = read_tasks(self.data, builtin=builtin_datasets(self.data), needs_label=is_needed)
        random.Random(self.seed).shuffle(tasks)
        if not 1 <= self.batch_size <= len(tasks):
            raise ConfigError(
                f"EnvDatasetBuilder.batch_size: expected an integer from 1 to {len(tasks)}, the number of tasks, got "
                f"{self.batch_size}."
            )
        options = replace(self, data=())  # a group is pickled where rollouts run in other processes
        return EnvDataset([EnvGroup(options, in_messages(task)) for task in tasks], self.batch_size), None

    def source(self) -> EnvSource:
        """Return the source of episodes.

        Raises:
            ConfigError: there is no such environment, or it has a loop that calls an endpoint.
        """
        advice = "Train it with `agentenv train`."
        return stepped_source(self.env, self.env_kwargs, "EnvDatasetBuilder.env", advice)

    def episode_limits(self) -> Limits:
        """Return the budgets of each episode.

        Raises:
            ConfigError: as `source`, or `limits` is wrong.
        """
        return limits_of(self.limits, self.source().cls, "EnvDatasetBuilder.limits")

    def options(self) -> ChatOptions:
        """Return how messages become tokens.

        Raises:
            ConfigError: `chat_options` is wrong.
        """
        return settings_from("EnvDatasetBuilder.chat_options", self.chat_options, ChatOptions())


@dataclass(frozen=True)
class EnvDataset:
    """tinker's RLDataset: one EnvGroup for each task."""

    groups: Sequence[EnvGroup]
    batch_size: int

    def get_batch(self, index: int) -> Sequence[EnvGroup]:
        """Return the groups of a batch."""
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        """Return the number of whole batches."""
        return len(self.groups) // self.batch_size


@dataclass(frozen=True)
class EnvGroup:
    """tinker's EnvGroupBuilder: the episodes of one task. Siblings share the environment's seed."""

    options: EnvDatasetBuilder
    """The environment and how it runs; its data is not used."""
    task: Task
    envs: list[EpisodeEnv] = field(default_factory=list, init=False, repr=False, compare=False)
    """What `make_envs` has made."""

    async def make_envs(self) -> Sequence[EpisodeEnv]:
        """Return an Env for each sibling, and start none."""
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        options, task, source = self.options, self.task, self.options.source()
        stops, tokenizer = stop_token_ids_of(options.model, may_download=True), get_tokenizer(options.model)
        chat = Chat(tokenizer, stop_token_ids=stops, options=options.options())
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        seed = derive_seed(options.seed, task.task_id) if task.seed is None else task.seed
        limits, made = options.episode_limits(), []
        for index in range(options.group_size):
            episode = SteppedEpisode(
                partial(create, source.cls, source.kwargs),
                task,
                chat=chat,
                limits=limits,
                key=EpisodeKey(f"{task.task_id}/{index}", task.task_id, seed=seed),
            )
            made.append(EpisodeEnv(episode, sorted({*stops, *eos})))
        self.envs.extend(made)
        return made

    async def compute_group_rewards(self, trajectory_group: Sequence[Any], env_group: Sequence[Any]) -> list[Any]:
        """Return nothing to add: each turn has its reward."""
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        """Close the episodes that are not over."""
        await asyncio.gather(*[env.episode.aclose() for env in self.envs])
        self.envs.clear()

    def logging_tags(self) -> list[str]:
        """Return the environment's name, by which tinker groups its metrics."""
        return [self.options.env if isinstance(self.options.env, str) else self.options.env.__name__]
