"""What the loop is handed for an episode: its key, its setup, and the object on which it publishes its progress."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentenv.chat.chat import Chat
from agentenv.core.engine import Engine
from agentenv.core.types import Limits, SamplingParams


class Stage(StrEnum):
    """What an episode in flight is doing."""

    QUEUED = "runner"
    """Nothing: it waits for its next attempt, or its record is being written."""
    CREATE = "create"
    RESET = "reset"
    PROMPT = "prompt"
    """The first observation becomes tokens."""
    GENERATE = "generate"
    STEP = "step"
    ON_TRUNCATE = "on_truncate"
    GOLD = "gold"
    CLOSE = "close"
    RUN = "run"
    """An agent with its own loop runs."""
    EXECUTE = "execute"
    """The `execute` of an agent_func file runs."""


@dataclass(slots=True)
class EpisodeProgress:
    """How far an episode in flight is; the loop writes it, the watchdog reads it."""

    task: asyncio.Task[Any] | None = None
    """The task that runs the episode."""
    attempt: int = 0
    stage: Stage = Stage.QUEUED
    turn_index: int = 0
    num_tokens: int = 0
    error: BaseException | None = None
    """The exception behind the error of the record."""


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """The identity of an episode: deterministic, so that a resumed run recognizes it."""

    episode_id: str = "episode"
    group_id: str = ""
    attempt: int = 0
    seed: int | None = None
    """Seed of the environment; handed to `reset` and `step`."""
    retried: tuple[str, ...] = ()
    """Names of the errors in earlier attempts, as `Trajectory.retried`."""


@dataclass(frozen=True, slots=True)
class StepRetries:
    """How often a step is called again after an InfraError with `retry_step`."""

    max_retries: int = 2
    wait_s: float = 1.0
    """Wait before the first retry; doubled for each one after it."""


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """What an episode runs with; all episodes of a run share the engine, the chat and the limits."""

    engine: Engine
    chat: Chat
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: Limits = field(default_factory=Limits)
    progress: EpisodeProgress = field(default_factory=EpisodeProgress, compare=False)
    """The loop publishes here how far the episode is; the runner puts a new one into each episode's setup."""
    step_retries: StepRetries = field(default_factory=StepRetries)
    host_samples: bool = False
    """Whether another system samples, in its own tokens: `StepResult.sampling` is for it, and changes nothing here."""
