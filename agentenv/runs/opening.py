"""Open a prepared job: its engine, its environments or the workers that run its episodes, and its runner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentenv.core.engine import Engine
from agentenv.engines.factory import engine_class
from agentenv.engines.opening import open_engine
from agentenv.engines.pool import PoolPolicy
from agentenv.engines.ray_actor import RayConfig
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.env_actors.host import EnvSpec
from agentenv.episode.runner import EpisodeRunner
from agentenv.episode.setup import EpisodeSetup
from agentenv.errors import ConfigError
from agentenv.runs.display.progress import waiting
from agentenv.runs.env_actors import in_actors
from agentenv.runs.prepare import Job, naming, open_source
from agentenv.runs.rollout_workers import WorkerSpec, open_workers


@asynccontextmanager
async def open_runner(
    job: Job,
    *,
    engine: Engine | None = None,
    note: Callable[[str], None] = lambda text: None,
    only_records: bool = False,
) -> AsyncIterator[EpisodeRunner]:
    """Open the job's engine and environments and yield the runner of its episodes; close them at the end.

    `engine` replaces the job's and is not closed. `only_records` is True if all that is done with an episode is to
    record it, as it then comes from a worker encoded.

    Raises:
        ConfigError: the engine's context is shorter than `max_length`, or the engine cannot be opened.
    """
    config, is_given = job.config, engine is not None
    starting = (lambda text: None) if config.output.progress == "none" else note
    async with contextlib.AsyncExitStack() as stack:
        source = None
        if not config.ray.rollout_workers:
            parts = []
            for part in job.parts:
                actors = in_actors(part.source, part.config, job.tokenizer, cluster=config.cluster)
                parts.append(replace(part, source=await stack.enter_async_context(actors)))
            source = await open_source(parts, stack)
        # The environment of a mixture that alone has the largest `max_length`.
        longest = [part.name for part in job.parts if part.limits.max_length == job.limits.max_length]
        with naming(longest[0] if len(longest) == 1 else "", "max_length"):
            if engine is None:
                engine = await _engine(job, stack, starting)
            context, max_length = engine.max_model_len, job.limits.max_length
            if context is not None and context < max_length:
                raise ConfigError(
                    f"--max_length: expected at most {context}, the server's context, got {max_length}. "
                    f"Add --max_length {context}, or start the server with --max-model-len {max_length}."
                )
        if engine.logprobs_mode == "raw":
            note(
                "the server returns raw log-probabilities. They are recorded as missing where temperature or "
                "truncation changes them. Start it with --logprobs-mode processed_logprobs."
            )
        if source is None:
            spec = replace(worker_spec(job, engine, is_given=is_given), encodes=only_records)
            opening = open_workers(spec, config.ray.rollout_workers)
            with waiting("starting the workers", starting):
                source = await stack.enter_async_context(opening)
        yield EpisodeRunner(
            source,
            EpisodeSetup(engine=engine, chat=job.chat, sampling=config.sampling, limits=job.limits),
            concurrency=config.concurrency,
            policy=config.errors.policy(),
        )


async def _engine(job: Job, stack: contextlib.AsyncExitStack, note: Callable[[str], None]) -> Engine:
    """Return the job's engine, open, which `stack` closes."""
    config, ray = job.config, job.config.ray
    # The pool must find a stalled engine before the episodes give up on their generations.
    pool = PoolPolicy(stall_s=0.9 * config.limits.generate_timeout_s)
    actors = RayConfig(
        config.num_engines, config.engine_backend, ray.engine_cpus, ray.engine_gpus, pool=pool, cluster=config.cluster
    )
    opening = open_engine(tokenizer=job.tokenizer, ray=actors, **_arguments(job))
    backend = config.engine_backend if job.engine == "ray" else job.engine
    words = (engine_class(backend).words or backend) + " in Ray actors" * (job.engine == "ray")
    with waiting(f"starting {words}", note):
        return await stack.enter_async_context(opening)


def worker_spec(job: Job, engine: Engine, *, is_given: bool) -> WorkerSpec:
    """Return what the workers of a job load. They ask `engine` if it is given, or shares a model between episodes.

    Raises:
        ConfigError: only this process has the class of an environment.
    """
    config = job.config
    if config.agent_func_path is None:
        for env in (entry for entry in config.env if isinstance(entry, str)):
            EnvSpec(env).check("--rollout_workers")
    return WorkerSpec(
        config,
        job.chat,
        os.getcwd(),
        engine=_arguments(job) if job.engine != "ray" and engine_class(job.engine).is_light and not is_given else None,
        engine_facts={"base_url": engine.base_url, "constraint_problem": engine.constraint_problem},
        agent_options=[part.source.options if isinstance(part.source, ChatAgentSource) else None for part in job.parts],
    )


def _arguments(job: Job) -> dict[str, Any]:
    """Return arguments of `open_engine`, as a worker can get them too."""
    config = job.config
    return {
        "name": job.engine, "model": job.model, "base_url": config.base_url, "device": config.device,
        "dtype": config.dtype, "args": job.engine_args,
    }  # fmt: skip
