"""The record of a failure: what failed, where, and with which message."""

from __future__ import annotations

import linecache
import logging
import re
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any

from agentenv._util.calls import StepTimeout
from agentenv._util.paths import place_of, traceback_of, without_middle
from agentenv._util.suggest import did_you_mean
from agentenv.core.trajectory import EpisodeError, Trajectory, with_cause
from agentenv.core.types import StopReason
from agentenv.episode.setup import Stage
from agentenv.errors import AgentEnvError, InfraError

logger = logging.getLogger(__name__)
FAILED_SERVICE = "If a service failed, raise agentenv.errors.InfraError from it: the episode runs again."
"""What to do about an error of an environment of which `may_be_a_service` is true."""
TELL_THE_POLICY = "raise no InfraError: tell the policy, in a tool with ToolError."
"""What to do about an InfraError of which `refused_request` tells."""
NO_METADATA = "The task has no metadata: name rows that have it with --data; in verl and SkyRL, by `extra_info`."
_STATES_KEYS = frozenset({"action_text", "renders_tools"})
"""Keys that only the states of `step` and of `reset` have."""
_SERVICE_ERRORS = re.compile(r"Connect|ContentType|Disconnected|RemoteProtocol|gaierror|Timeout(Error|Exception)?$")
"""Parts of the names of exceptions, or of their bases, that clients raise if a service does not answer."""
_STATUS_NAMES = ("status_code", "status", "code", "http_status")
_NOT_OF_ACTIONS = (401, 403, 407, 408, 429)
"""Statuses below 500 that are about keys or load."""
_MAX_CAUSES = 16


class Aborted(InfraError):
    """The engine gave up a generation."""


def error_name(error: BaseException) -> str:
    """Return the class of an error and, in parentheses, its cause."""
    return with_cause(type(error).__name__, cause_of(error))


def cause_of(error: BaseException) -> str:
    """Return the class of an error's cause and the status of the HTTP answer behind it, as far as they are known.

    A cause of the error's own class, of which it has the message, says nothing and is passed over.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and len(chain) < _MAX_CAUSES:
        chain.append(cause)
    names = [type(each).__name__ for each in chain if type(each) is not type(error)]
    statuses = [str(code) for each in chain for code in _statuses(each) if code in range(100, 600)]
    return ", ".join([*names[:1], *statuses[:1]])


def may_be_a_service(error: BaseException | None) -> bool:
    """Return True if an exception, or one behind it, says that a service gave no answer, failed or is too busy."""
    for each in _chain(error):
        if isinstance(each, StepTimeout):
            break
        names = [base.__name__ for base in type(each).__mro__]
        is_busy = any(code == 429 or code in range(500, 600) for code in _statuses(each))
        if is_busy or any(map(_SERVICE_ERRORS.search, names)):
            return True
        frames = [frame.f_code.co_name for frame, _ in walk_tb(each.__traceback__)]
        if isinstance(each, ValueError) and "json" in frames:  # a response's method: the answer is not JSON
            return True
    return False


def refused_request(error: BaseException) -> str:
    """Return what to do if a service refused what a step asked for, otherwise an empty text."""
    codes = [code for each in _chain(error) for code in _statuses(each)]
    refused = [code for code in codes if code in range(400, 500) and code not in _NOT_OF_ACTIONS]
    return f"If the action caused status {refused[0]}, {TELL_THE_POLICY}" if refused else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those behind it."""
    for _ in range(_MAX_CAUSES):
        if error is None:
            break
        yield error
        error = error.__cause__ or error.__context__


def _statuses(error: BaseException) -> list[Any]:
    """Return what may be the status of the answer that an HTTP client raised."""
    owners = (error, getattr(error, "response", None))
    return [getattr(owner, name, None) for owner in owners for name in _STATUS_NAMES]


def missing_key(error: BaseException) -> str:
    """Return what `states` or the row's metadata has if a line read a key that it lacks, otherwise an empty text."""
    if not isinstance(error, KeyError):
        return ""
    key = str(error.args[0]) if error.args else ""
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        names = frame.f_locals
        states = next((each for each in names.values() if isinstance(each, dict) and _STATES_KEYS & each.keys()), None)
        code = linecache.getline(frame.f_code.co_filename, line)
        read = re.search(rf"(\w+)(\[[^\]]*\])?\[\s*(['\"]){re.escape(key)}\3\s*\]", code)
        if states is None or read is None:
            continue
        owner, part = names.get(read[1]), read[2] or ""
        is_of_states = owner is states
        if is_of_states and not part:
            return f"`states` has no {key!r}. It has {', '.join(sorted(states))}."
        metadata: Any = states.get("metadata")
        if (is_of_states and "metadata" in part) or owner is metadata:
            if not metadata:
                return NO_METADATA
            columns = sorted(map(str, metadata))
            return f"The row has no column {key!r}.{did_you_mean(key, columns)} It has {', '.join(columns)}."
    return ""


def record_failure(trajectory: Trajectory, error: BaseException, stage: Stage) -> None:
    """Log an error of a stage and finish the trajectory with it."""
    name = type(error).__name__
    message = str(error).encode("utf-8", "backslashreplace").decode()  # a log file cannot hold lone surrogates
    logger.warning("episode %s: %s failed: %s: %s", trajectory.episode_id, stage, name, without_middle(message))
    logger.debug("episode %s", trajectory.episode_id, exc_info=error)
    reason = StopReason.ERROR
    if isinstance(error, StepTimeout | Aborted):
        reason = StopReason.STEP_TIMEOUT if isinstance(error, StepTimeout) else StopReason.ABORTED
    kind = error.kind if isinstance(error, AgentEnvError) else "env"
    is_of_step = kind == "infra" and stage is Stage.STEP
    text, hint = str(error) or repr(error), refused_request(error) if is_of_step else missing_key(error)
    text, place = without_middle(f"{text.removesuffix('.')}. {hint}" if hint else text), place_of(error)
    trajectory.finish(reason, EpisodeError(kind, name, text, stage.value, place, traceback_of(error), cause_of(error)))
