"""Define what a reward reads and returns: text in, a typed result out. No tensors and no tokens.

A `Reward` grades one response, a `GroupReward` grades all responses to one prompt together. `grading.py` calls them
with a deadline and turns errors into results, `weighted_sum.py` adds them up, `groups/batch.py` runs many groups
concurrently. A failed grader never becomes a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

from agentenv.core.arguments import is_finite
from agentenv.core.types import Message
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    ContractError,
    DataError,
    InfraError,
    MissingDependency,
    RunStopped,
)


class Status(StrEnum):
    """How grading ended. The first four describe the response and have a reward; the last three have none."""

    OK = "ok"
    """The response was graded; the reward and the score say whether it is right."""
    NO_ANSWER = "no_answer"
    """The response commits to no answer."""
    PARSE_ERROR = "parse_error"
    """There is an answer, in a form that cannot be right."""
    TIMEOUT = "timeout"
    """Grading takes more computing than any answer may: a property of the response, as an endless program is."""
    LABEL = "label"
    """The row cannot be graded: its label is missing, or this reward cannot use it."""
    ERROR = "error"
    """The reward's own code is wrong, such as a function that raises: another attempt would fail the same way."""
    INFRA = "infra"
    """The grader failed: the worth of the response is unknown."""

    @property
    def valid(self) -> bool:
        """True if there is a reward."""
        return self not in (Status.LABEL, Status.ERROR, Status.INFRA)


@dataclass(frozen=True, slots=True)
class Response:
    """One response to grade."""

    text: str
    """The text as the model wrote it, with thinking and terminators; each reward selects the part that it grades."""
    label: Any = None
    """What the text is graded against; any JSON value."""
    prompt: str | Sequence[Message] = ""
    """The prompt that it answers."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What one response is worth, and why."""

    reward: float | None
    """The number that is optimized; None exactly if `status` is LABEL, ERROR or INFRA."""
    score: float | None = None
    """Quality in [0, 1], for filters and reports; None if unknown."""
    status: Status = Status.OK
    """What happened: graded, no answer, or the kind of failure."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Named parts, before weights and clipping. None marks a part whose grader failed."""
    extracted: str | None = None
    """The answer that was graded."""
    feedback: str = ""
    """Text that the policy may see; it never reveals the right answer."""
    detail: str = ""
    """Reason why the reward is missing, or how it was computed, for people."""
    isolation: str = ""
    """Weakest level of the sandbox that ran the answer's program; empty without one."""
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    """What the grader raised, if it did."""

    def __post_init__(self) -> None:
        """Raise ContractError if a number is not finite, or a reward is set although the grader failed."""
        if self.status.valid is not is_finite(self.reward):
            expected = "a finite number" if self.status.valid else f"None, since status is {self.status}"
            raise ContractError(f"RewardResult.reward: expected {expected}, got {self.reward!r}.")
        if self.score is not None and not (is_finite(self.score) and 0.0 <= self.score <= 1.0):
            raise ContractError(f"RewardResult.score: expected None or 0..1, got {self.score!r}.")
        for name, value in self.components.items():
            if value is not None and not is_finite(value):
                raise ContractError(f"RewardResult.components[{name!r}]: expected a number, got {value!r}.")

    @classmethod
    def failed(cls, detail: str, status: Status = Status.INFRA, cause: BaseException | None = None) -> Self:
        """Return a result without a reward.

        An environment raises `error` instead.
        """
        return cls(None, status=status, detail=detail, cause=cause)

    @property
    def is_misconfigured(self) -> bool:
        """True if every other response would fail too: a wrong setting, address or key, or a missing package."""
        return isinstance(self.cause, ConfigError | MissingDependency)

    def error(self, what: str, *, retry_step: bool = False) -> AgentEnvError:
        """Return the error that an environment raises for a result without a reward.

        It is a DataError for LABEL, a ContractError for ERROR, a RunStopped with exit code 2 if `is_misconfigured`, and
        otherwise an InfraError, for which the episode runs again; with `retry_step`, first the step alone. Set it only
        if the step has not changed the environment.
        """
        error: AgentEnvError
        if self.is_misconfigured:
            error = RunStopped(str(self.cause))
            error.exit_code = ConfigError.exit_code
        else:
            kind = {Status.LABEL: DataError, Status.ERROR: ContractError}.get(self.status, InfraError)
            error = kind(f"{what} ({self.status}): {self.detail or 'no detail'}")
            if isinstance(error, InfraError):
                error.retry_step = retry_step
        error.__cause__ = self.cause
        return error


class Reward(Protocol):
    """A grader of one response. It may be called concurrently, from several event loops.

    It may have `check_row`, see `grading.check_row`, and `patience_s`, see `grading.patience_s`.
    """

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest possible reward; may be infinite."""

    async def grade(self, response: Response) -> RewardResult:
        """Return what the response is worth. No text of a model may make it raise, or block the event loop.

        Raises:
            DataError: this reward cannot use the label, or another column.
            ContractError: the reward's own code is wrong; so is what raises an error that is not of infrastructure, see
                `loading.failure_of`.
            InfraError: the grader failed; a result of status INFRA means the same.
        """


class GroupReward(Protocol):
    """A grader of all responses to one prompt together."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest possible reward; may be infinite."""

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> Sequence[RewardResult]:
        """Return one result per response, in order; `reference` is a response to compare with, not graded itself.

        Raises:
            DataError: the rows cannot be graded.
            InfraError: the grader failed for all of them.
        """
