"""The record of a failure: what failed, where, and with which message."""

from __future__ import annotations

import logging
import re
import traceback

from agentenv._util.calls import StepTimeout
from agentenv._util.paths import place_of, traceback_of, without_middle
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import StopReason
from agentenv.episode.setup import Stage
from agentenv.errors import AgentEnvError, InfraError

logger = logging.getLogger(__name__)
FAILED_SERVICE = "If a service failed, raise agentenv.errors.InfraError from it: the episode runs again."
"""What to do about an error of an environment of which `may_be_a_service` is true."""
_SERVICE_ERRORS = re.compile(r"Connect|ContentType|Disconnected|RemoteProtocol|gaierror|Timeout(Error|Exception)?$")
"""Parts of the names of exceptions, or of their bases, that clients raise if a service does not answer."""
_STATUS_NAMES = ("status_code", "status", "code")
_MAX_CAUSES = 16


class Aborted(InfraError):
    """The engine gave up a generation."""


def error_name(error: BaseException) -> str:
    """Return the class of an error and, in parentheses, that of its cause."""
    cause = error.__cause__
    return type(error).__name__ if cause is None else f"{type(error).__name__} ({type(cause).__name__})"


def may_be_a_service(error: BaseException | None) -> bool:
    """Return True if an exception, or one behind it, says that a service gave no answer, failed or is too busy."""
    for _ in range(_MAX_CAUSES):
        if error is None or isinstance(error, StepTimeout):
            break
        response = getattr(error, "response", None)
        codes = [getattr(each, name, None) for each in (error, response) for name in _STATUS_NAMES]
        names = [base.__name__ for base in type(error).__mro__]
        if any(code == 429 or code in range(500, 600) for code in codes) or any(map(_SERVICE_ERRORS.search, names)):
            return True
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, ValueError) and "json" in frames:  # a response's method: the answer is not JSON
            return True
        error = error.__cause__ or error.__context__
    return False


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
