"""The answers in OpenRLHF's queries, and their grades: for the reward functions in `agent_funcs/reward_*.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv._util.loop_thread import run_sync
from agentenv.errors import DataError
from agentenv.rewards.grading import DEADLINE_S, grade_all
from agentenv.rewards.rules.text import with_opened_thought, without_special_tokens
from agentenv.rewards.types import Response, Reward, RewardResult


def answers(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> list[Response]:
    """Return the answer in each query: the text after its prompt, without the special tokens at its end.

    The prompt is cut off at its first occurrence, so that an answer may repeat it. A token that starts every text may
    precede the prompt.

    Raises:
        DataError: the arguments are not lists of texts of one length, or a query does not contain its prompt.
    """
    for name, texts in (("queries", queries), ("prompts", prompts)):
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise DataError(f"reward_func: {name}: expected a list of texts, got {texts!r:.200}. Decode them.")
    lengths = {"queries": len(queries), "prompts": len(prompts), "labels": len(labels)}
    if len(set(lengths.values())) != 1:
        raise DataError(f"reward_func: expected lists of one length, got {lengths}. Pass one entry per answer.")
    responses = []
    for index, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True)):
        start = query.find(prompt)
        if start < 0:
            raise DataError(
                f"reward_func: query {index}: expected it to begin with its prompt {prompt!r:.80}, got {query!r:.80}. "
                "Decode both in the same way."
            )
        text = with_opened_thought(without_special_tokens(query[start + len(prompt) :]), prompt)
        responses.append(Response(text, label, prompt))
    return responses


def grade_or_raise(reward: Reward, responses: Sequence[Response], *, limit_s: float = DEADLINE_S) -> list[RewardResult]:
    """Return a result with a reward for each response; each may take `limit_s`.

    Raises:
        DataError: the reward cannot use a label.
        ContractError: the reward's own code is wrong.
        InfraError: a grader failed.
    """
    results = run_sync(grade_all(reward, responses, limit_s=limit_s))
    for index, result in enumerate(results):
        if result.reward is None:
            raise result.error(f"reward_func: answer {index}: no grade")
    return results
