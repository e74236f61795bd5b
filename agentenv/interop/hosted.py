"""What adapters share in which we run the loop and the host generates: an engine, a row's episode, failed episodes.

The host is another trainer. It hands over rows and a way to sample after token ids; it gets trajectories, and learns of
a failed one in its own way. A failed episode is never a reward of 0. The call raises (Molt, NeMo Gym, verifiers, verl,
tinker, and SkyRL but for `step_wise_trajectories`, where it has no row); its row has the reward None (TRL); or its
sample is masked (NeMo RL, OpenRLHF: groups keep their size, and it gets the mean of its siblings, `SiblingRewards`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from agentenv._util.calls import create
from agentenv.chat.chat import Chat, ChatOptions, stop_token_ids_of
from agentenv.core.arguments import construct, whole_number
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.engine import Engine, engine_errors
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Limits, SamplingParams, StopReason, Task, own_limits
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.episode.registry import env_source
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, PlannedEpisode, derive_seed
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource, EpisodeSource, needs_label
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import ConfigError, DataError, EngineError, ErrorKind, InfraError, MissingDependency

logger = logging.getLogger(__name__)

_MAX_EPISODES = 256
"""Episodes of one call that run at the same time."""
_LEAST = {"max_tokens": 1, "max_retries": 0, "max_failed_in_a_row": 1, "group_size": 1}
"""The least value of each number that an entry may have."""


def problem_of(trajectory: Trajectory) -> str | None:
    """Return why an episode has no reward, or None if it has one."""
    if trajectory.reward is not None:
        return None
    error = trajectory.error
    if error is None:
        return f"it ended as {trajectory.stop_reason}."
    place = f" at {error.place}" if error.place else ""
    return f"{error.where}{place}: {error.type}: {error.message}"


def kind_of(trajectory: Trajectory) -> ErrorKind:
    """Return the kind of an episode's failure: "infra" also for one that a time limit ended, or the engine gave up."""
    error, is_late = trajectory.error, trajectory.stop_reason in (StopReason.ABORTED, StopReason.STEP_TIMEOUT)
    return "infra" if error is None or is_late else error.kind


class FailureCount:
    """Counts the failed episodes of one host, and ends its job when the set-up is broken.

    Args:
        where: what errors and warnings name: the host's entry into our code.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.num_episodes = 0
        self.num_failed = 0
        self.num_step_retries = 0
        self.in_a_row = 0
        self._results: set[str] = set()

    def __repr__(self) -> str:
        """Return the counts."""
        failed = f"{self.num_failed} of {self.num_episodes} episodes failed"
        return f"{self.where}: {failed}, steps called again: {self.num_step_retries}"

    def add(self, trajectory: Trajectory, problem: str | None, *, max_in_a_row: int = 1, result: str = "") -> None:
        """Count an episode. `problem` says why it failed, and `result` what the host gets for it.

        Warn once of each result; of an episode also if it has no error, which the loop would have logged.

        Raises:
            InfraError: so many in a row failed; by default the first that fails raises.
        """
        self.num_episodes += 1
        self.num_step_retries += trajectory.num_step_retries
        self.in_a_row = 0 if problem is None else self.in_a_row + 1
        if problem is None:
            return
        self.num_failed += 1
        name, reason = trajectory.episode_id, problem.rstrip(".")
        message = f"{self.where}: expected an episode to train on, got {name!r}, which failed: {reason}."
        if self.in_a_row >= max_in_a_row:
            count = f" Failures in a row: {self.in_a_row}." if max_in_a_row > 1 else ""
            raise InfraError(f"{message}{count} Fix the cause.")
        if trajectory.error is None or result not in self._results:
            logger.warning("%s %s", message, result)
        self._results.add(result)


def check_numbers(host: Any) -> None:
    """Raise ConfigError for the first number of a host's entry, a dataclass, that is too small or none."""
    for each in fields(host):
        value, low = getattr(host, each.name), _LEAST.get(each.name)
        if low is not None and not (value is None and each.default is None):
            whole_number(f"{type(host).__name__}.{each.name}", value, low=low)


def stops_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end an action of the model that a host's tokenizer belongs to."""
    return stop_token_ids_of(str(getattr(tokenizer, "name_or_path", "")))


def chat_of(tokenizer: Any, options: ChatOptions) -> Chat:
    """Return the chat of a host's tokenizer."""
    return Chat(tokenizer, stop_token_ids=stops_of(tokenizer), options=options)


def stepped_source(env: str | type[Any], env_kwargs: Mapping[str, Any], where: str, advice: str) -> EnvSource:
    """Return the source of an environment that a host steps.

    Raises:
        ConfigError: there is no such environment, or it has a loop that calls an endpoint; starts with `where` and
            ends with `advice`.
    """
    source = env_source(env, env_kwargs)
    if isinstance(source, EnvSource):
        return source
    raise ConfigError(f"{where}: expected an environment with `step`, got {env!r}, which has a loop of calls. {advice}")


def limits_of(given: Limits | Mapping[str, Any] | None, env: Any, where: str) -> Limits:
    """Return a host's limits: all of `Limits`; or fields by name, and of what is not named the class's.

    Raises:
        ConfigError: a field is unknown or out of bounds; starts with `where`.
    """
    if isinstance(given, Limits):
        return given
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"{where}: expected Limits, or its fields by name, got {given!r}.")
    return construct(where, Limits, {**own_limits(env), **(given or {})})  # type: ignore[no-any-return]


def text_episode(
    source: EnvSource, task: Task, limits: Limits, *, episode_id: str = "", seed: int | None = None
) -> SteppedEpisode:
    """Return an episode in plain text, whose tokens are characters, for a host that makes the tokens itself.

    Without a seed it has the task's, or that of a run with --seed 0.
    """
    own = derive_seed(0, task.task_id) if task.seed is None else task.seed
    key = EpisodeKey(episode_id or task.task_id, seed=own if seed is None else seed)
    make_agent = partial(create, source.cls, source.kwargs)
    chat = Chat(PlainTextTokenizer())
    return SteppedEpisode(make_agent, task, chat=chat, limits=limits, key=key, host_samples=True)


def client_params(
    params: Mapping[str, Any], sampling: SamplingParams, max_tokens: int | None, where: str
) -> dict[str, Any]:
    """Return a host's sampling parameters, in vLLM's names, with the stops that the episode asks for.

    Raises:
        ConfigError: the action must match a grammar; starts with `where`.
    """
    if sampling.structural_tag is not None:
        raise ConfigError(f"{where}: expected no structural_tag, got one. The trainer's client takes none: remove it.")
    stops = {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
    return {**params, "max_tokens": max_tokens, **{name: value for name, value in stops.items() if value}}


async def run_planned(
    source: EpisodeSource,
    setup: EpisodeSetup,
    planned: Sequence[PlannedEpisode],
    *,
    max_retries: int = 1,
) -> list[Trajectory]:
    """Run a host's episodes, again where infrastructure failed; return their records in order, failed ones included.

    Siblings, the episodes of one task, share the environment's seed and differ in the sampling seed.

    Raises:
        ConfigError: the engine is set up wrongly.
    """
    policy = ErrorPolicy(max_retries=max_retries, max_error_share=1.0)
    runner = EpisodeRunner(source, setup, concurrency=min(_MAX_EPISODES, max(1, len(planned))), policy=policy)
    ended: dict[str, Trajectory] = {}

    def keep(trajectory: Trajectory) -> None:
        ended[trajectory.episode_id] = trajectory

    if len(planned) == 1:  # as most hosts ask: a task for it would cost as much as a short turn
        await runner.run_one(planned[0], keep)
    else:
        await runner.run(planned, keep)
    return [ended[episode.episode_id] for episode in planned]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One action that a host is asked for."""

    prompt_ids: list[int]
    sampling: SamplingParams


AskAll = Callable[[list[GenerationRequest]], Sequence[Completion]]
"""Samples one completion for each request, in order; blocks until all of them are done."""


class GatheringEngine(Engine):
    """An engine over a host that samples one batch at a time, such as vLLM's `LLM.generate`.

    What episodes ask within `wait_s`, or while a batch is being sampled, becomes the next batch. The host is called in
    a thread, so that environments continue meanwhile, and never twice at a time.
    """

    def __init__(self, ask_all: AskAll, *, wait_s: float = 0.01) -> None:
        self._ask_all, self._wait_s = ask_all, wait_s
        self._open: list[GenerationRequest] = []
        self._answers: asyncio.Task[Sequence[Completion]] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`.

        Raises:
            EngineError: the host raised, or answered another number of requests.
        """
        if self._answers is None:
            batch = self._open = []

            async def send() -> Sequence[Completion]:
                await asyncio.sleep(self._wait_s)
                async with self._one_at_a_time:
                    self._answers = None  # what is asked from now on is the next batch
                    with engine_errors("generate"):
                        answers = await asyncio.to_thread(self._ask_all, batch)
                if len(answers) != len(batch):
                    raise EngineError(
                        f"generate: expected {len(batch)} completions, got {len(answers)}. Return one for each."
                    )
                return answers

            self._answers = asyncio.get_running_loop().create_task(send())
        index, answers = len(self._open), self._answers
        self._open.append(GenerationRequest(list(prompt_token_ids), sampling))
        return (await asyncio.shield(answers))[index]


# --- tasks as rows of a parquet file, in the columns that verl and SkyRL read -----------------------------------------

_TASK = "agentenv_task"
"""The key of `extra_info` that has our task as JSON: a parquet column has one type, and labels have any."""


def task_dataset(
    rows: Sequence[Mapping[str, Any] | Task], where: str, data_source: str | None, agent_key: str = ""
) -> Any:
    """Return a `datasets.Dataset` of tasks, for `to_parquet`; errors start with `where`.

    `agent_key` names the trainer's column that chooses a row's agent, which rows may have. Without `data_source` it is
    the row's own, or "agentenv".

    Raises:
        MissingDependency: `datasets` is not installed.
        DataError: a row is not a task, has images, is not JSON, or lacks the `agent_key` that others have.
    """
    made, tasks = [], list(map(in_messages, read_tasks(rows, needs_label=False)))
    lacking = [task.task_id for task in tasks if agent_key not in task.metadata]
    if agent_key and 0 < len(lacking) < len(tasks):
        raise DataError(f"{where}: expected {agent_key} in every row or in none, got none in {lacking[0]!r}. Add it.")
    for index, task in enumerate(tasks):
        if task.images:
            raise DataError(f"{where}: expected a task without images, got {task.task_id!r}. Remove the row.")
        try:
            text = json.dumps(asdict(task) | {"images": []}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: expected JSON in task {task.task_id!r}, got {error}. Change the row.") from error
        truth = task.label if isinstance(task.label, str) else json.dumps(task.label)  # of one type in all rows
        row = {
            "prompt": prompt_texts(task),
            "data_source": data_source or task.metadata.get("data_source", "agentenv"),
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index, _TASK: text},
            **({agent_key: task.metadata[agent_key]} if agent_key in task.metadata else {}),
        }
        made.append(row)
    return dataset_of(made, where)


def prompt_texts(task: Task) -> list[dict[str, str]]:
    """Return a task's messages as trainers store and show them: role, and content as text."""
    messages = [message for message in task.prompt if not isinstance(message, str)]
    return [{"role": str(each["role"]), "content": str(each.get("content") or "")} for each in messages]


def dataset_of(rows: list[dict[str, Any]], where: str, extra: str = "data") -> Any:
    """Return a `datasets.Dataset` of rows; errors start with `where`.

    Raises:
        MissingDependency: `datasets` is not installed; names the extra of ours that has it.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependency(
            f"{where}: expected datasets, got {error}. pip install 'agentenv-rl[{extra}]'"
        ) from error
    return Dataset.from_list(rows)


def task_of(prompt: Sequence[Any], columns: Mapping[str, Any], task_id: str, source: EpisodeSource) -> Task:
    """Return the task of a row: the one that `task_dataset` wrote, or one of the trainer's own columns.

    Args:
        prompt: the row's messages.
        columns: its other columns; `reward_model` or `reward_spec` has the label, `extra_info` the metadata.
        task_id: the id of a row that `task_dataset` did not write.
        source: what plays the task.

    Raises:
        DataError: the row has no label, and the environment needs one.
    """
    extra_info = dict(columns.get("extra_info") or {})
    if _TASK in extra_info:
        task = Task(**{**json.loads(extra_info[_TASK]), "images": ()})
        advice = "Give `dataset` rows with a label."
    else:
        graded = columns.get("reward_model") or columns.get("reward_spec") or {}
        task = Task(list(prompt), label=graded.get("ground_truth"), task_id=task_id, metadata=extra_info)
        advice = "Write rows with `dataset`, or give them ground_truth in reward_model or reward_spec."
    check_label(task, columns, source, advice)
    return task


def check_label(task: Task, columns: Iterable[str], source: EpisodeSource, advice: str) -> None:
    """Raise DataError if a trainer's row has no label, and the environment needs one."""
    if task.label is None and needs_label(source):
        raise DataError(
            f"row {task.task_id}: expected a label, got none in the columns {', '.join(columns)}. {advice} An "
            "environment without labels has needs_label = False."
        )
