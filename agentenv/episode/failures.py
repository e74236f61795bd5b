"""The record of a failure: what failed, where, and with which message."""

from __future__ import annotations

import logging

from agentenv._util.calls import StepTimeout
from agentenv._util.paths import place_of, traceback_of, without_middle
from agentenv.core.trajectory import EpisodeError, ErrorKind, Trajectory
from agentenv.core.types import StopReason
from agentenv.episode.setup import Stage
from agentenv.errors import ConfigError, ContractError, DataError, InfraError

logger = logging.getLogger(__name__)


class Aborted(InfraError):
    """The engine gave up a generation."""


def error_name(error: BaseException) -> str:
    """Return the class of an error and, in parentheses, that of its cause."""
    cause = error.__cause__
    return type(error).__name__ if cause is None else f"{type(error).__name__} ({type(cause).__name__})"


def record_failure(trajectory: Trajectory, error: BaseException, stage: Stage) -> None:
    """Log an error of a stage and finish the trajectory with it."""
    kind: ErrorKind = "env"
    if isinstance(error, InfraError) or stage is Stage.GENERATE:
        kind = "infra"
    elif isinstance(error, ContractError):
        kind = "contract"
    elif isinstance(error, DataError) or (isinstance(error, ConfigError) and stage is Stage.PROMPT):
        kind = "data"
    name = type(error).__name__
    message = str(error).encode("utf-8", "backslashreplace").decode()  # a log file cannot hold lone surrogates
    logger.warning("episode %s: %s failed: %s: %s", trajectory.episode_id, stage, name, message)
    logger.debug("episode %s", trajectory.episode_id, exc_info=error)
    reason = StopReason.ERROR
    if isinstance(error, StepTimeout | Aborted):
        reason = StopReason.STEP_TIMEOUT if isinstance(error, StepTimeout) else StopReason.ABORTED
    text, place = without_middle(str(error) or repr(error)), place_of(error)
    trajectory.finish(reason, EpisodeError(kind, name, text, stage.value, place, traceback_of(error)))
