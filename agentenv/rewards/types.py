"""What a reward sees and gives: text in, a typed result out. No tensors and no tokens; a failed grader is no number.

A `Reward` judges one response, a `GroupReward` all responses to one prompt together. `grading.py` calls them with a
deadline and turns what they raise into results, `compose.py` sums them, `groups.py` runs many groups side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

from agentenv.errors import ContractError
from agentenv.types import MAX_REWARD, Message


class Status(StrEnum):
    """How grading ended. The first four are about the response and have a reward; the last two have none."""

    OK = "ok"
    """It was judged; whether it was right is in the reward and the score."""
    NO_ANSWER = "no_answer"
    """The response commits to no answer."""
    PARSE_ERROR = "parse_error"
    """There is an answer, of a form that cannot be right."""
    TIMEOUT = "timeout"
    """Judging it takes more computing than any answer may: the response's property, as an endless program is."""
    LABEL = "label"
    """The row cannot be graded: its label is missing or no label of this reward."""
    INFRA = "infra"
    """The grader failed: nobody knows what the response is worth."""

    @property
    def valid(self) -> bool:
        """Whether there is a reward."""
        return self not in (Status.LABEL, Status.INFRA)


@dataclass(frozen=True, slots=True)
class Response:
    """One response to judge."""

    text: str
    """As the model wrote it, thinking and terminators included; what is judged of it is the reward's business."""
    label: Any = None
    """What it is judged against; any JSON value."""
    prompt: str | Sequence[Message] = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What one response is worth, and why."""

    reward: float | None
    """What is optimised; None exactly where `status` is LABEL or INFRA."""
    score: float | None = None
    """Quality in [0, 1], for filters and reports; None where there is none."""
    status: Status = Status.OK
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Named parts, raw: before weights and clipping. None marks a part whose grader failed."""
    extracted: str | None = None
    """The answer that was judged."""
    feedback: str = ""
    """What the policy may be told; never gives the right answer away."""
    detail: str = ""
    """For people: why there is no reward, or how it came about."""

    def __post_init__(self) -> None:
        """Refuse a reward that is no number, and a number where the grader failed."""
        if self.status.valid is not is_finite(self.reward):
            expected = "a finite number" if self.status.valid else f"None, since status is {self.status}"
            raise ContractError(f"RewardResult.reward: expected {expected}, got {self.reward!r}. Mend the reward.")
        if self.score is not None and not (is_finite(self.score) and 0.0 <= self.score <= 1.0):
            raise ContractError(f"RewardResult.score: expected None or 0..1, got {self.score!r}. Mend the reward.")
        for name, value in self.components.items():
            if value is not None and not is_finite(value):
                raise ContractError(f"RewardResult.components[{name!r}]: expected a number, got {value!r}. Mend it.")

    @classmethod
    def failed(cls, detail: str, status: Status = Status.INFRA) -> Self:
        """A result without a reward."""
        return cls(None, status=status, detail=detail)


def is_finite(value: object) -> bool:
    """Whether it is a number, and one that a float32 holds; bool counts."""
    return isinstance(value, int | float) and abs(value) <= MAX_REWARD


class Reward(Protocol):
    """Judges one response. It may be asked about several at once, from several event loops."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest reward that it can give; may be infinite."""

    async def grade(self, response: Response) -> RewardResult:
        """What the response is worth. Nothing that a model writes makes it raise, or block the event loop.

        Raises:
            DataError: the label, or another column, is none that this reward can use.
            InfraError: the grader failed; a result of status INFRA says the same.
        """


class GroupReward(Protocol):
    """Judges all responses to one prompt together."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest reward that it can give; may be infinite."""

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> Sequence[RewardResult]:
        """One result per response, in order; `reference` is a response to compare with, not judged itself.

        Raises:
            DataError: the rows cannot be judged.
            InfraError: the grader failed for all of them.
        """
