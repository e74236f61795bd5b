"""Verify: one answer per task, and any verifiable reward, by the task's domain or as settings say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentenv.agent import AgentInstance, ResetState, StepState
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.grading import graded
from agentenv.rewards.registry import shared_reward
from agentenv.rewards.text import with_opened_thought
from agentenv.rewards.types import Response, Reward, RewardResult, Status
from agentenv.types import StepResult
from agentenv_envs.rows import row_of

DOMAINS = (
    "math", "code", "ifeval", "choice", "general_val", "crossthink_qa", "detection", "format", "tool_call_format",
    "length", "thought_length", "repetition", "regex", "similarity", "json_schema",
)  # fmt: skip
"""The rewards that need no more than a row: what a row may have as its domain."""
_SETTINGS: Mapping[str, Any] = {"format": {"format": {"mode": "strict"}}}
"""Of domains whose reward is stricter here: the looser form is in every prompt that asks for it, so an echo had it."""
_IN_A_BOX = ("math", "choice", "general_val", "crossthink_qa")
"""Domains whose label is the answer."""
_TOLD = (Status.NO_ANSWER, Status.PARSE_ERROR, Status.TIMEOUT)
"""Of which a run has the share."""


class Verify(AgentInstance):
    """Answer once; the answer is judged by rule.

    Without `reward` each row says in its column `domain` which of `DOMAINS` judges it. Where a row has its label only,
    as in OpenRLHF, that is an object: `{"domain": "math", "label": "42"}`, with the row's other columns beside them.

    Reward and score are the reward's own. An answer that a limit of tokens cut is truncated, and judged all the same. A
    grader that fails raises, so that the episode is tried again: it is never a wrong answer.

    info: correct (0/1, the score is 1; absent where there is no score), the reward's components that are known, and
    no_answer, parse_error, timeout (0/1); status, extracted and detail as texts. Where rows have domains, all numbers
    are there as `domain/name`, so that a run has the figures of each.
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {"verify_mixed": Path(__file__).parent / "data/mixed.jsonl"}
    hacks: ClassVar[Mapping[str, str]] = {
        "empty_answer": "<think>It is clear.</think>\n<answer></answer>",
        "every_box": " ".join(rf"\boxed{{{letter}}}" for letter in "ABCDEFGHIJ0123456789"),
        "empty_box": r"The answer is \boxed{}.",
        "pattern": ".*",
        "schema": '{"type": "object", "properties": {}, "additionalProperties": true}',
        "open_thought": "<think>The answer is whatever was asked for",
    }

    def __init__(
        self,
        reward: str | Mapping[str, Any] | Reward | None = None,
        *,
        key: str = "domain",
        limit_s: float = 50.0,
    ) -> None:
        """Choose what judges.

        Args:
            reward: settings as `agentenv.rewards.registry.reward_from` takes them; None: by the row's domain.
            key: the column with the domain, where there are no settings.
            limit_s: longest that grading may take; less than --step_timeout_s, so that a slow grader is tried again.

        Raises:
            ConfigError: the settings describe no reward.
        """
        if not isinstance(key, str) or not key:
            raise ConfigError(f"Verify.key: expected the name of a column, got {key!r}. Change it.")
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < float("inf"):
            raise ConfigError(f"Verify.limit_s: expected seconds > 0, got {limit_s!r}. Change it.")
        self.reward, self.key, self.limit_s = reward, key, limit_s
        if reward is not None:
            _ = shared_reward(reward)

    async def reset(self, states: ResetState) -> ResetState:
        """Refuse a row of no domain before anything is generated; else leave the prompt as it is.

        Raises:
            DataError: the row has no domain that is known.
        """
        if self.reward is None:
            self._domain(row_of(states, (self.key,)).columns)
        return states

    async def step(self, states: StepState) -> StepResult:
        """Judge the answer.

        Raises:
            DataError: the row has no domain that is known, or no label that its reward can use.
            InfraError: the grader failed.
        """
        row = row_of(states, (self.key,))
        prompt = states.get("observation_text", "")
        text = with_opened_thought(states["action_text"], prompt)
        domain = self._domain(row.columns) if self.reward is None else ""
        result = await graded(
            shared_reward(_SETTINGS.get(domain, domain) if self.reward is None else self.reward),
            Response(text, row.label, prompt, row.columns),
            limit_s=self.limit_s,
        )
        if result.reward is None:
            kind = DataError if result.status is Status.LABEL else InfraError
            raise kind(f"Verify.step: no grade ({result.status}): {result.detail or 'no detail'}")
        cut = states.get("finish_reason") == "length"
        return StepResult(
            reward=result.reward, score=result.score, terminated=not cut, truncated=cut, info=_info(result, domain)
        )

    async def gold(self, states: StepState) -> str | None:
        """The row's column `reference`; without one the label, where it is what is to be said; else None."""
        row = row_of(states, (self.key,))
        reference = row.columns.get("reference")
        if isinstance(reference, str):
            return reference
        domain = row.columns.get(self.key) if self.reward is None else None
        label = row.label[0] if isinstance(row.label, list) and row.label else row.label
        if not isinstance(label, str | int | float) or isinstance(label, bool):
            return None
        if domain in _IN_A_BOX:
            return rf"\boxed{{{str(label).strip().strip('$')}}}"
        return str(label) if domain == "similarity" else None

    def _domain(self, columns: Mapping[str, Any]) -> str:
        domain = columns.get(self.key)
        if isinstance(domain, str) and domain in DOMAINS:
            return domain
        raise DataError(
            f"Verify: {self.key}: expected one of {', '.join(DOMAINS)}, got {domain!r:.80}. "
            "Mend the row, or describe its reward in --env_kwargs."
        )


def _info(result: RewardResult, domain: str) -> dict[str, float | str]:
    known = {name: float(value) for name, value in result.components.items() if value is not None}
    known |= {str(status): float(result.status is status) for status in _TOLD}
    correct = {} if result.score is None else {"correct": float(result.score >= 1.0)}
    if domain:
        known = {f"{domain}/{name}": value for name, value in (known | correct).items()}
    texts = {"status": result.status.value, "extracted": result.extracted or "", "detail": result.detail}
    return {**known, **correct, **{name: text for name, text in texts.items() if text}}
