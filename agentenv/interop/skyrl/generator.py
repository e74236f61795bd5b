"""EnvGenerator: SkyRL's GeneratorInterface over our loop. SkyRL's engines sample, our environment answers, tokens are
never encoded again.

Source: skyrl/train/generators/base.py and utils.py, trainer.py, evaluate.py and
backends/skyrl_train/inference_servers/remote_inference_client.py, 0.3.0. SkyRL's experiment makes the generator:

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return EnvGenerator(cfg.generator, inference_engine_client, tokenizer, env="math_retry")
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.arguments import settings_from
from agentenv.core.engine import Engine, engine_errors
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Limits, SamplingParams, StopReason, Task, own_limits
from agentenv.episode.registry import env_source
from agentenv.episode.runner import PlannedEpisode
from agentenv.episode.setup import EpisodeSetup
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.interop._records import columns, records
from agentenv.interop.hosted import (
    FailureCount,
    chat_of,
    check_numbers,
    client_params,
    limits_of,
    problem_of,
    run_planned,
    task_dataset,
    task_of,
)

_WHERE = "interop.skyrl"
_CONCURRENCY = 256
"""Maximum number of episodes of one call that run at the same time."""
_EXPECTED = {
    "batched": False,
    "use_conversation_multi_turn": True,
    "vision_language_generator": False,
    "apply_overlong_filtering": False,
    "zero_reward_on_non_stop": False,
    "chat_template.name_or_path": None,
    "inference_engine.enable_return_routed_experts": False,
}
"""Settings of SkyRL's own generator that change what it returns."""


def dataset(rows: Sequence[Mapping[str, Any] | Task], *, data_source: str | None = None) -> Any:
    """Return a `datasets.Dataset` in SkyRL's columns, for `to_parquet`; each row holds its whole task.

    Without `data_source`, by which SkyRL groups an evaluation, it is the row's own, or "agentenv".

    SkyRL shows the prompt, and drops rows whose prompt is too long. What the model sees comes from the environment's
    `reset`.

    Raises:
        MissingDependency: `datasets` is not installed.
        DataError: a row is not a task, has images, or is not JSON.
    """
    return task_dataset(rows, _WHERE, data_source)


@dataclass(frozen=True)
class SkyRLEngine(Engine):
    """The engine behind the episodes of one call of the generator: SkyRL's client of its inference servers."""

    client: Any
    """SkyRL's InferenceEngineInterface."""
    params: Mapping[str, Any]
    """SkyRL's sampling parameters, in vLLM's names; they win over the episode's."""
    model: str | None
    """The policy's name in the servers; None: the client's own."""
    cache_salt: str | None
    """Keeps what the servers cached of earlier weights out of this call."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`.

        Raises:
            ConfigError: the action must match a grammar.
        """
        asked = {
            "prompt_token_ids": [list(prompt_token_ids)],
            "session_ids": [request_id.rpartition("/")[0]],  # the episode
            "sampling_params": client_params(self.params, sampling, sampling.max_tokens, _WHERE),
            "cache_salt": self.cache_salt,
        }
        version = int(getattr(self.client, "weight_version", 0))
        with engine_errors("generate"):
            out = await self.client.generate(asked, model=self.model)
        logprobs = (out.get("response_logprobs") or [None])[0]
        return Completion(
            tuple(map(int, out["response_ids"][0])),
            out["stop_reasons"][0],
            logprobs=None if logprobs is None else tuple(map(float, logprobs)),
            policy_version=version,
        )


@dataclass(frozen=True)
class EnvGenerator:
    """SkyRL's GeneratorInterface: runs an episode for each prompt and returns SkyRL's GeneratorOutput.

    SkyRL's settings are the episode's: `max_turns`, `max_input_length` and `sampling_params.max_generate_length`, which
    together limit the tokens of an episode, and `chat_template_kwargs`.

    Under `generator.step_wise_trajectories` each segment is a row, and a failed episode has none: SkyRL's baseline is
    that of its siblings. Otherwise SkyRL needs one row of each prompt, so that a failed episode raises, and so do
    several segments.
    """

    config: Any
    """SkyRL's `cfg.generator`."""
    client: Any
    """SkyRL's client of its inference servers."""
    tokenizer: Any
    """The policy's."""
    env: str | type[Any]
    """An installed environment's name, `module:Attr`, `FILE.py:Attr`, or the class."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    limits: Limits | Mapping[str, Any] | None = None
    """Time limits of each episode: `Limits`, or fields by name. `max_turns` and `max_length` are the smaller of
    SkyRL's and the class's."""
    chat_options: ChatOptions | Mapping[str, Any] = field(default_factory=ChatOptions)
    """How messages become tokens: `ChatOptions`, or fields by name."""
    model: str | None = None
    """The policy's name in the servers: SkyRL's `resolve_policy_model_name(cfg)`. None: the client's own."""
    max_retries: int = 1
    """How often an episode is run again after an infrastructure error."""
    failures: FailureCount = field(default_factory=partial(FailureCount, "EnvGenerator"), repr=False, compare=False)
    """The failed episodes so far."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong argument, or a setting of SkyRL's own generator that has no effect here."""
        check_numbers(self)
        _ = self.options, self.episode_limits  # raise here, not in the first step
        for name, expected in _EXPECTED.items():
            if (value := attrgetter(name)(self.config)) != expected:
                raise ConfigError(
                    f"EnvGenerator.config: expected generator.{name}={expected!r}, got {value!r}. Remove it: only "
                    "SkyRL's own generator follows it."
                )

    @cached_property
    def source(self) -> Any:
        """The source of episodes."""
        return env_source(self.env, self.env_kwargs)

    @cached_property
    def chat(self) -> Chat:
        """The chat of all episodes."""
        given = {**self.config.chat_template_kwargs, **self.options.chat_template_kwargs}
        return chat_of(self.tokenizer, replace(self.options, chat_template_kwargs=given))

    @cached_property
    def options(self) -> ChatOptions:
        """The chat's options of the caller."""
        return settings_from("EnvGenerator.chat_options", self.chat_options, ChatOptions())

    @cached_property
    def episode_limits(self) -> Limits:
        """The budgets of each episode."""
        return replace(
            limits_of(self.limits, self.source.cls, "EnvGenerator.limits"),
            **own_limits(
                self.source.cls,
                max_turns=self.config.max_turns,
                max_length=self.config.max_input_length + self.config.sampling_params.max_generate_length,
            ),
        )

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """Run the episodes and return SkyRL's GeneratorOutput, in the order of the prompts.

        Raises:
            InfraError: an episode failed and SkyRL needs its row, or fewer than two episodes of a task are left.
            ContractError: an episode has several segments, and `step_wise_trajectories` is not set.
        """
        ids, params = input_batch["trajectory_ids"], dict(input_batch["sampling_params"])
        rows = zip(input_batch["prompts"], input_batch["env_extras"], ids, strict=True)
        planned = [
            PlannedEpisode(task_of(prompt, row, each.instance_id, self.source), each.repetition_id)
            for prompt, row, each in rows
        ]
        version = getattr(self.client, "weight_version", None)
        salt = None  # what SkyRL's own generator salts the servers' caches with: the weights at the start of the call
        if version is not None and self.config.use_cache_salt:
            salt = str(version) if self.model is None else f"{self.model}@{version}"
        engine = SkyRLEngine(self.client, params, self.model, salt)
        setup = EpisodeSetup(engine, self.chat, SamplingParams(max_tokens=params["max_tokens"]), self.episode_limits)
        slots = asyncio.Semaphore(_CONCURRENCY)

        async def run(episode: PlannedEpisode) -> Trajectory:
            async with slots:
                try:
                    (trajectory,) = await run_planned(self.source, setup, [episode], max_retries=self.max_retries)
                finally:
                    await self.client.finish_session(episode.episode_id)
            return trajectory

        ended = await asyncio.gather(*map(run, planned))
        kept, max_in_a_row = [], 64 if self.config.step_wise_trajectories else 1
        for each, trajectory in zip(ids, ended, strict=True):
            problem = problem_of(trajectory)
            self.failures.add(trajectory, problem, max_in_a_row=max_in_a_row, result="It has no row.")
            if problem is None:
                kept.append((each, trajectory))
        self._check_groups([each.instance_id for each in ids], [each.instance_id for each, _ in kept], input_batch)
        made = self._output(kept)
        made["rollout_metrics"]["environment/avg_failed"] = 1 - len(kept) / len(ended)
        return made

    def _check_groups(self, asked: Sequence[str], left: Sequence[str], input_batch: Mapping[str, Any]) -> None:
        """Raise InfraError where SkyRL would train on one episode of several, with its reward as the advantage."""
        metadata, sizes, num = input_batch["batch_metadata"], Counter(asked), Counter(left)
        least = 1 if metadata and metadata.training_phase == "eval" else 2
        few = [uid for uid, size in sizes.items() if num[uid] < min(size, least)]
        if (few and least == 2) or not left:
            raise InfraError(
                f"EnvGenerator: expected two episodes of each task that did not fail, got {num[few[0]]} of "
                f"{sizes[few[0]]} in row {few[0]}. Fix the cause; the log has each failure."
            )

    def _output(self, kept: Sequence[tuple[Any, Trajectory]]) -> dict[str, Any]:
        from skyrl.train.generators.utils import get_rollout_metrics

        rows, is_step_wise = [], self.config.step_wise_trajectories
        for each, trajectory in kept:
            segments = segment_rows(trajectory, each)
            if len(segments) > 1 and not is_step_wise:
                raise ContractError(
                    f"EnvGenerator: expected one segment with actions, got {len(segments)} in {trajectory.episode_id}. "
                    "Set generator.step_wise_trajectories=true."
                )
            last = segments[-1]  # SkyRL learns from the rewards of the last one, which has those of all
            place = max((at for at, chosen in enumerate(last["loss_masks"]) if chosen), default=-1)
            for row in segments[:-1]:
                last["rewards"][place] += math.fsum(row["rewards"])
                row["rewards"] = [0.0] * len(row["rewards"])
            rows += segments
        made = columns(rows)
        metrics = get_rollout_metrics(made["response_ids"], made["rewards"], loss_masks=made["loss_masks"])
        scores = [trajectory.score for _, trajectory in kept if trajectory.score is not None]
        metrics |= {"environment/avg_score": math.fsum(scores) / len(scores)} if scores else {}
        metrics["environment/avg_truncated"] = sum(trajectory.truncated for _, trajectory in kept) / len(kept)
        has_logprobs = all(row is not None for row in made["rollout_logprobs"])
        return {
            **made,
            "rollout_logprobs": made["rollout_logprobs"] if has_logprobs else None,
            "trajectory_ids": made["trajectory_ids"] if is_step_wise else None,
            "is_last_step": made["is_last_step"] if is_step_wise else None,
            "rollout_metrics": metrics,
            "trajectory_generation_times": None,
            "rollout_expert_indices": None,
            "env_metrics": None,
        }


def segment_rows(trajectory: Trajectory, trajectory_id: Any) -> list[dict[str, Any]]:
    """Return one row of a GeneratorOutput for each segment; `trajectory_id` is the input's for this episode.

    `rollout_logprobs` is None for a row with a missing one.

    Raises:
        DataError: the episode failed or is still running.
    """
    rows = []
    for record in records(trajectory, _WHERE):
        # Each reward moves back to the nearest token that the policy chose: estimators skip tokens off the mask.
        rewards, mask, place = [0.0] * len(record.response_ids), record.response_mask, None
        for at, reward in enumerate((record.rewards or [])[record.num_prompt :]):
            place = at if mask[at] else place
            rewards[at if place is None else place] += reward
        is_last = record.segment == record.num_segments - 1
        is_cut = is_last and record.stop_reason is StopReason.MAX_LENGTH  # SkyRL's filter of overlong rows reads this
        row = {
            "prompt_token_ids": record.prompt_ids,
            "response_ids": record.response_ids,
            "rewards": rewards,
            "loss_masks": mask,
            "stop_reasons": "length" if is_cut else record.finish_reason,
            "rollout_logprobs": record.response_logprobs,
            "trajectory_ids": trajectory_id,
            "is_last_step": is_last,
        }
        rows.append(row)
    return rows
