"""Why there is no reply of a judge. All are InfraErrors: nobody knows what the response is worth."""

from __future__ import annotations

from agentenv.errors import InfraError


class JudgeUnavailable(InfraError):
    """It cannot be reached, or says that it cannot answer now; asking later may help."""


class JudgeTimeout(InfraError):
    """It gave no answer in time."""


class JudgeUnreadable(InfraError):
    """What it gave holds no reply: it is no JSON, too long, of another form, or empty."""


class JudgeTruncated(InfraError):
    """Its reply was cut off at the limit of its length: what it would have said at the end is not known."""


class JudgeRefused(InfraError):
    """It refuses these messages, or this client; asking the same again cannot help."""
