"""EnvRollout: the `rollout_func` of TRL's GRPOTrainer, over our loop. Our loop, TRL's weights, TRL's loss.

Source: trl/trainer/grpo_trainer.py and grpo_config.py, 1.16.0. TRL calls the function with the process's prompts, each
repeated for its group, and takes one row for each. A prompt is all that it hands over, so its last message has the
task's id, which `dataset` puts there.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from zlib import crc32

from agentenv._util.brief import brief
from agentenv._util.loop_thread import is_loop_running, run_sync
from agentenv.chat.chat import ChatOptions
from agentenv.core.arguments import settings_from
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Limits, SamplingParams, Task
from agentenv.episode.registry import env_source
from agentenv.episode.runner import PlannedEpisode, derive_seed
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import needs_label
from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.interop._records import columns, facts, records, required_logprobs
from agentenv.interop.hosted import (
    FailureCount,
    GatheringEngine,
    GenerationRequest,
    chat_of,
    check_numbers,
    dataset_of,
    limits_of,
    problem_of,
    prompt_texts,
    run_planned,
)

_WHERE = "interop.trl"
_FACTS = (
    "reward", "actions", "turn_scores", "turn_spans", "policy_versions", "stop_reason", "finish_reason", "episode_id",
    "segment", "num_segments", "forced_tokens", "truncated", "failed", "label", "metadata",
)  # fmt: skip
"""Columns besides those that TRL reads; every row has all of them."""


def dataset(rows: str | Sequence[Mapping[str, Any] | Task]) -> Any:
    """Return a `datasets.Dataset` for TRL: a prompt of each task, whose last message has the task's id.

    `rows` may also be a file of them.

    TRL and its log show the prompt. What the model sees comes from the environment's `reset`.

    Raises:
        MissingDependency: `datasets` is not installed.
        DataError: a row is not a task.
    """
    named = [({"task_id": name, "task_crc": crc}, task) for (name, crc), task in _tasks(rows).items()]
    return dataset_of([{"prompt": [each | key for each in prompt_texts(task)]} for key, task in named], _WHERE, "trl")


def reward(completions: Sequence[Any], reward: Sequence[float | None], **columns: Any) -> list[float | None]:
    """Return the episodes' rewards, for `reward_funcs`."""
    return list(reward)


def _without_failed(function: Any, name: str) -> Any:
    """Return a reward function that does not get the failed episodes, and has None for each: TRL leaves these out.

    It also logs the shares of failed and of truncated episodes.
    """
    if getattr(function, "_is_without_failed", False):
        return function

    def spread(values: Any, failed: Sequence[bool]) -> list[Any]:
        given, expected = list(values), len(failed) - sum(failed)
        if len(given) != expected:
            raise ContractError(
                f"EnvRollout: expected {expected} values of the reward function {name!r}, got {len(given)}. Return one "
                "for each episode that it gets."
            )
        left = iter(given)
        return [None if lost else next(left) for lost in failed]

    def kept(columns: dict[str, Any]) -> dict[str, Any]:
        failed = columns["failed"]
        for share in ("failed", "truncated"):
            columns["log_metric"](share, sum(columns[share]) / len(failed))
        rows = {
            key: [each for each, lost in zip(values, failed, strict=True) if not lost]
            for key, values in columns.items()
            if isinstance(values, list)
        }
        return columns | rows | {"log_extra": lambda key, values: columns["log_extra"](key, spread(values, failed))}

    wrapped: Any
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__):  # as TRL tells them apart

        async def wrapped(**columns: Any) -> Any:
            rows = kept(columns)
            return spread(await function(**rows) if rows["failed"] else [], columns["failed"])

    else:

        def wrapped(**columns: Any) -> Any:
            rows = kept(columns)
            return spread(function(**rows) if rows["failed"] else [], columns["failed"])

    wrapped._is_without_failed = True
    return wrapped


def _tasks(rows: str | Sequence[Mapping[str, Any] | Task], needs_label: bool = False) -> dict[tuple[Any, Any], Task]:
    """Return the tasks by id and checksum: the rows of another file have other contents under the same numbers."""
    tasks = {}
    for task in read_tasks(rows, needs_label=needs_label):
        facts = [task.prompt, task.label, task.seed, dict(task.metadata)]
        text = json.dumps(facts, default=lambda value: type(value).__name__, skipkeys=True)
        tasks[task.task_id, f"{crc32(text.encode()):08x}"] = in_messages(task)
    return tasks


@dataclass(frozen=True)
class EnvRollout:
    """TRL's `rollout_func`: runs an episode for each prompt and returns TRL's columns.

    The engine follows the trainer's arguments: transformers with the trainer's own model, or with `use_vllm` its vLLM,
    in this process or as a server. Sampling follows them, too, except for `max_tokens`.

    A failed episode is a row with one masked token and the reward None: TRL leaves it out of the group's baseline, and
    its advantage is 0. Reward functions do not get it. A reward model among them is refused.

    Under `mask_truncated_completions` the rows of truncated episodes are masked, and only those.

    Example::

        trainer = GRPOTrainer(
            model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=dataset(rows),
            rollout_func=EnvRollout("math_retry", rows, limits={"max_length": 512}),
        )
    """

    env: str | type[Any]
    """An installed environment's name, `module:Attr`, `FILE.py:Attr`, or the class."""
    rows: str | Sequence[Mapping[str, Any] | Task]
    """The rows that `dataset` got, or their file; those of an evaluation set, too. Each has its own id (column
    `task_id` or `id`)."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    limits: Limits | Mapping[str, Any] | None = None
    """Budgets of each episode: all of `Limits`, or fields by name, and of what is not named the class's `max_turns` and
    `max_length`. `max_length` counts the prompt, too; TRL's `max_completion_length` is not used."""
    max_tokens: int | None = None
    """Maximum number of new tokens of one action; None: limited only by the room in `max_length`."""
    chat_options: ChatOptions | Mapping[str, Any] = field(default_factory=ChatOptions)
    """How messages become tokens: `ChatOptions`, or fields by name; `history` must be `keep`, because TRL takes one row
    of an episode."""
    max_retries: int = 1
    """How often an episode is run again after an infrastructure error."""
    max_failed_in_a_row: int = 64
    """This many failures in a row end the training: the set-up is broken."""
    failures: FailureCount = field(default_factory=partial(FailureCount, "EnvRollout"), repr=False, compare=False)
    """The failed episodes so far."""
    _calls: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: the history is rendered again, there is no such environment, or it does not take the arguments;
                or another argument is wrong.
            DataError: a row is not a task.
        """
        if not isinstance(self.env, str | type):
            raise ConfigError(
                f"EnvRollout.env: expected a name or a class, got {brief(self.env, 80)}. "
                "Pass rollout_func=EnvRollout(env, rows), not the class."
            )
        check_numbers(self)
        _ = self.tasks, self.episode_limits  # raise here, not in the first step
        if self.options.history != "keep":
            raise ConfigError(
                f"EnvRollout.chat_options: expected history='keep', got {self.options.history!r}. Remove it: TRL takes "
                "one row of an episode."
            )

    @cached_property
    def tasks(self) -> dict[tuple[Any, Any], Task]:
        """The tasks, by id and checksum."""
        return _tasks(self.rows, needs_label(self.source))

    @cached_property
    def source(self) -> Any:
        """The source of episodes."""
        return env_source(self.env, self.env_kwargs)

    @cached_property
    def episode_limits(self) -> Limits:
        """The budgets of each episode."""
        return limits_of(self.limits, self.source.cls, "EnvRollout.limits")

    @cached_property
    def options(self) -> ChatOptions:
        """How messages become tokens."""
        return settings_from("EnvRollout.chat_options", self.chat_options, ChatOptions())

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Run the episodes and return TRL's columns, in the order of the prompts.

        Raises:
            ConfigError: the trainer has an argument that this function cannot follow, or has a reward model.
            ContractError: an episode has several segments.
            DataError: a prompt is of none of the rows, or the engine returned no log-probability for an action.
            InfraError: `max_failed_in_a_row` episodes failed.
        """
        named = [*zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)]
        if models := [name for function, name in named if hasattr(function, "forward")]:
            raise ConfigError(
                f"EnvRollout: expected reward functions, got the model {models[0]!r}. Call it in a function: TRL would "
                "give failed episodes its value, too."
            )
        trainer.reward_funcs = [_without_failed(function, name) for function, name in named]
        sampling = _sampling(trainer, self.max_tokens)
        first = trainer.accelerator.process_index * len(prompts)
        planned = [PlannedEpisode(self._task(prompt), number) for number, prompt in enumerate(prompts, first)]
        mode = "train" if trainer.model.training else "eval"
        seed = derive_seed(trainer.args.seed, mode, trainer.state.global_step, next(self._calls))

        async def run() -> list[Trajectory]:
            chat = chat_of(_tokenizer(trainer), self.options)
            async with _engine(trainer) as engine:
                setup = EpisodeSetup(engine, chat, replace(sampling, seed=seed), self.episode_limits)
                return await run_planned(self.source, setup, planned, max_retries=self.max_retries)

        trajectories = run_sync(run()) if is_loop_running() else asyncio.run(run())  # it runs in a notebook
        return columns([self._row(trajectory, trainer) for trajectory in trajectories])

    def _task(self, prompt: Any) -> Task:
        last = prompt[-1] if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, str) else {}
        name, crc = (last.get("task_id"), last.get("task_crc")) if isinstance(last, Mapping) else (None, None)
        if (task := self.tasks.get((name, crc))) is not None:
            return task
        expected = "the id of one of its rows in the prompt's last message, got"
        if crc is not None and any(name == known for known, _ in self.tasks):
            expected = f"a row with the content of task {name!r}, got another:"
        raise DataError(
            f"EnvRollout: expected {expected} {last!r:.200}. Pass agentenv.interop.trl.dataset(rows) as the trainer's "
            "dataset, with rows of EnvRollout, which has those of an evaluation set, too: give each row its own `id`."
        )

    def _row(self, trajectory: Trajectory, trainer: Any) -> dict[str, Any]:
        """Return TRL's row of an episode. TRL reads its last token: there is one, and an EOS means not truncated."""
        problem = problem_of(trajectory)
        self.failures.add(
            trajectory,
            problem,
            max_in_a_row=self.max_failed_in_a_row,
            result="Its row has no reward, and TRL leaves it out of its group.",
        )
        row: dict[str, Any] = dict.fromkeys(_FACTS)
        if problem is None:
            row |= _record(trajectory) | {"actions": [turn.action for turn in trajectory.turns]}
            step = trainer.state.global_step  # TRL generates with the weights of it; the engine does not know it
            row["policy_versions"] = [step if version >= 0 else version for version in row["policy_versions"]]
        else:  # its prompt and no completion
            ids, reason = (
                trajectory.segments[0].token_ids.tolist() if trajectory.segments else [],
                trajectory.stop_reason,
            )
            row |= {
                "prompt_ids": ids[: trajectory.turns[0].start] if trajectory.turns else ids,
                **{name: [] for name in ("completion_ids", "logprobs", "env_mask")},
                "episode_id": trajectory.episode_id,
                "stop_reason": None if reason is None else reason.value,
            }
        tokenizer, completion, mask = _tokenizer(trainer), row["completion_ids"], row["env_mask"]
        hides_truncated = trainer.args.mask_truncated_completions
        if hides_truncated and trajectory.truncated:
            mask = [0] * len(mask)
        looks_truncated = not completion or completion[-1] not in {*trainer.eos_token_ids, tokenizer.pad_token_id}
        if not completion or (hides_truncated and looks_truncated and not trajectory.truncated):
            row["logprobs"] = [*row["logprobs"], 0.0]
            completion, mask = [*completion, tokenizer.eos_token_id], [*mask, 0]
        return {
            **row,
            "prompt_ids": row["prompt_ids"] or [tokenizer.eos_token_id],
            "completion_ids": completion,
            "env_mask": mask,
            "truncated": trajectory.truncated and problem is None,
            "failed": problem is not None,
            "label": trajectory.task.label,
            "metadata": dict(trajectory.task.metadata),
        }


def _record(trajectory: Trajectory) -> dict[str, Any]:
    """Return the row of an episode with a reward. TRL passes the keys that it does not know to the reward functions."""
    made = records(trajectory, _WHERE)
    if len(made) != 1:
        raise ContractError(
            f"EnvRollout: expected one segment with actions, got {len(made)} in {trajectory.episode_id}. "
            "TRL takes one row of an episode: let the agent only append to its messages."
        )
    (record,) = made
    return {
        "prompt_ids": record.prompt_ids,
        "completion_ids": record.response_ids,
        "logprobs": required_logprobs(record, _WHERE)[record.num_prompt :],
        "env_mask": record.response_mask,
        "reward": record.reward,
        **facts(record),
    }


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _sampling(trainer: Any, max_tokens: int | None) -> SamplingParams:
    args = trainer.args
    refused = {
        "generation_kwargs": (args.generation_kwargs or None, None),
        "repetition_penalty": (args.repetition_penalty, 1.0),
    }
    if args.use_vllm and args.vllm_mode == "colocate":
        refused["vllm_enable_sleep_mode"] = (args.vllm_enable_sleep_mode, False)
        refused["vllm_tensor_parallel_size"] = (args.vllm_tensor_parallel_size, 1)
    for name, (value, expected) in refused.items():
        if value != expected:
            raise ConfigError(f"EnvRollout: expected {name}={expected!r} in GRPOConfig, got {value!r}. Remove it.")
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        max_tokens=max_tokens,
    )


@asynccontextmanager
async def _engine(trainer: Any) -> AsyncIterator[Engine]:
    """Yield an engine that samples with the trainer's present weights; what it cached of older ones is gone."""
    args = trainer.args
    if args.use_vllm and args.vllm_mode == "colocate":
        yield GatheringEngine(partial(_ask_vllm, trainer))
        return
    if args.use_vllm:
        from agentenv.engines.vllm.http import VLLMHTTPEngine

        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        server = VLLMHTTPEngine(url)
        try:
            yield server
        finally:
            await server.close()
        return
    from agentenv.engines.hf.engine import HFEngine

    model = trainer.accelerator.unwrap_model(trainer.model)
    was_training = model.training
    engine = HFEngine(model, tokenizer=_tokenizer(trainer))
    try:
        yield engine
    finally:
        await engine.close()
        model.train(was_training)


def _ask_vllm(trainer: Any, requests: list[GenerationRequest]) -> list[Completion]:
    """Sample with the vLLM that TRL holds in this process."""
    from agentenv.engines.vllm.wire import completion_of_output, vllm_sampling

    device = trainer.accelerator.device
    if device.type == "cuda":  # a thread begins with the first GPU
        import torch

        torch.cuda.set_device(device)
    prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
    params = [vllm_sampling(request.sampling) for request in requests]
    outputs = trainer.vllm_generation.llm.generate(prompts, params, use_tqdm=False)
    return [completion_of_output(out, request.prompt_ids, 0) for out, request in zip(outputs, requests, strict=True)]
