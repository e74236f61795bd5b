"""What the presets have in common: the answers in OpenRLHF's queries, and their grades."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.errors import DataError, InfraError
from agentenv.rewards.grading import DEADLINE_S, graded_all
from agentenv.rewards.loop_thread import run_sync
from agentenv.rewards.text import with_opened_thought, without_special_tokens
from agentenv.rewards.types import Response, Reward, RewardResult, Status


def answers(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> list[Response]:
    """The answer in each query: what follows its prompt, without the special tokens at its end.

    The prompt is cut off where it stands first, so that one whose words the answer repeats is cut off once; before it
    may be a token that begins every text.

    Raises:
        DataError: these are no lists of texts of one length, or a query does not hold its prompt.
    """
    for name, texts in (("queries", queries), ("prompts", prompts)):
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise DataError(f"reward_func: {name}: expected a list of texts, got {texts!r:.200}. Decode them.")
    lengths = {"queries": len(queries), "prompts": len(prompts), "labels": len(labels)}
    if len(set(lengths.values())) != 1:
        raise DataError(f"reward_func: expected lists of one length, got {lengths}. Give one entry per answer.")
    return [
        Response(_after(query, prompt, index), label, prompt)
        for index, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True))
    ]


def judged(reward: Reward, responses: Sequence[Response], *, limit_s: float = DEADLINE_S) -> list[RewardResult]:
    """A result with a reward for each response; each may take `limit_s`.

    Raises:
        DataError: a label is none that the reward can use.
        InfraError: a grader failed.
    """
    results = run_sync(graded_all(reward, responses, limit_s=limit_s))
    for index, result in enumerate(results):
        if result.reward is None:
            kind, mend = (DataError, "Mend the row.") if result.status is Status.LABEL else (InfraError, "Try again.")
            raise kind(
                f"reward_func: answer {index}: expected a grade, got none: {result.detail or 'no detail'} {mend}"
            )
    return results


def _after(query: str, prompt: str, index: int) -> str:
    start = query.find(prompt)
    if start < 0:
        raise DataError(
            f"reward_func: query {index}: expected it to begin with its prompt {prompt!r:.80}, got {query!r:.80}. "
            "Decode both in the same way."
        )
    return with_opened_thought(without_special_tokens(query[start + len(prompt) :]), prompt)
