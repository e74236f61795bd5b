"""Why there is no verdict of a judge. All are InfraErrors: nobody knows what the response is worth."""

from __future__ import annotations

from agentenv.errors import InfraError


class JudgeFailure(InfraError):
    """What all of them are."""


class JudgeUnavailable(JudgeFailure):
    """It cannot be reached, or says that it cannot answer now; asking later may help."""


class JudgeTimeout(JudgeFailure):
    """It gave no answer in time."""


class JudgeUnreadable(JudgeFailure):
    """What it gave holds no reply: it is no JSON, too long, of another form, or empty."""


class JudgeTruncated(JudgeFailure):
    """Its reply was cut off at the limit of its length: what it would have said at the end is not known."""


class JudgeRefused(JudgeFailure):
    """It refuses these messages, or this client; asking the same again cannot help."""


class JudgeMisaddressed(JudgeRefused):
    """There is no judge at this address, or not for this key: no question will have an answer."""


class JudgeUnclear(JudgeFailure):
    """It replied, and commits to no verdict; or its votes, or those of two orders, come to none."""
