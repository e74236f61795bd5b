"""The record of a failure: what failed, where, and with which message."""

from __future__ import annotations

import logging

from agentenv._util.calls import StepTimeout
from agentenv._util.paths import place_of, traceback_of, without_middle
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import StopReason
from agentenv.episode.setup import Stage
from agentenv.errors import AgentEnvError, InfraError

logger = logging.getLogger(__name__)


class Aborted(InfraError):
    """The engine gave up a generation."""


def error_name(error: BaseException) -> str:
    """Return the class of an error and, in parentheses, that of its cause."""
    cause = error.__cause__
    return type(error).__name__ if cause is None else f"{type(error).__name__} ({type(cause).__name__})"


def record_failure(trajectory: Trajectory, error: BaseException, stage: Stage) -> None:
    """Log an error of a stage and finish the trajectory with it."""
    name = type(error).__name__
    message = str(error).encode("utf-8", "backslashreplace").decode()  # a log file cannot hold lone surrogates
    logger.warning("episode %s: %s failed: %s: %s", trajectory.episode_id, stage, name, message)
    logger.debug("episode %s", trajectory.episode_id, exc_info=error)
    reason = StopReason.ERROR
    if isinstance(error, StepTimeout | Aborted):
        reason = StopReason.STEP_TIMEOUT if isinstance(error, StepTimeout) else StopReason.ABORTED
    kind = error.kind if isinstance(error, AgentEnvError) else "env"
    text, place = without_middle(str(error) or repr(error)), place_of(error)
    trajectory.finish(reason, EpisodeError(kind, name, text, stage.value, place, traceback_of(error)))
