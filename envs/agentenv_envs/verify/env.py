"""Verify: one answer per task, graded by any verifiable reward, by the task's domain or by settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.arguments import number
from agentenv.core.types import StepResult
from agentenv.errors import DataError
from agentenv.rewards.grading import check_row, grade
from agentenv.rewards.registry import REWARDS, shared_reward
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import Response, Reward, Status
from agentenv_envs.common import check, row_of, texts_of

DOMAINS = tuple(name for name, entry in REWARDS.items() if entry.by_row)
"""The domains that a row may name: the rewards that need nothing but a row."""
_SETTINGS: Mapping[str, Any] = {"format": {"format": {"mode": "strict"}}}
"""Settings of domains whose reward is stricter here: an echo of the prompt has the looser form."""
_IN_A_BOX = ("math", "choice", "general_val", "crossthink_qa")
"""Domains whose label is the answer."""
_COUNTED = (Status.NO_ANSWER, Status.PARSE_ERROR, Status.TIMEOUT)
"""Statuses whose shares a run reports."""


class Verify(AgentInstance):
    """The environment of one answer, graded by rule.

    Without `reward` each row names in its column `domain` which of `DOMAINS` grades it. If a row has only its label, as
    in OpenRLHF, that is an object: `{"domain": "math", "label": "42"}`, with the row's other columns in it.

    Reward and score are those of the reward. An answer that a token limit cut is truncated, and still graded. A failed
    grader raises, so that the episode is retried unless its code is wrong; it is never a wrong answer.

    info: correct (0/1, the score is 1; missing without a score), the reward's known components, and no_answer,
    parse_error, timeout (0/1); status, extracted and detail as texts. If rows have domains, all numbers are also there
    as `domain/name`, so that a run has the figures of each.
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
        """Set the reward.

        Args:
            reward: settings for `agentenv.rewards.registry.reward_from`; None: by the row's domain.
            key: the column with the domain, used without settings.
            limit_s: time limit of grading; less than --step_timeout_s, so that a slow grader is retried.

        Raises:
            ConfigError: the settings do not describe a reward.
        """
        check("Verify.key", key, isinstance(key, str) and key, "the name of a column")
        self.reward = reward
        self.prompt: Any = None
        self.key = key
        self.limit_s = number("Verify.limit_s", limit_s, low=0.001)
        if reward is not None:
            _ = shared_reward(reward)

    async def reset(self, states: ResetState) -> ResetState:
        """Return the prompt unchanged; fail before generation if the row cannot be graded.

        Raises:
            DataError: the row has no known domain, or its reward cannot use the row, as far as its `check_row` tells.
        """
        label, columns = row_of(states, (self.key,))
        _, reward = self._reward_of(columns)
        await check_row(reward, Response("", label, "", columns))
        self.prompt = states.get("observation")
        return states

    def _reward_of(self, columns: Mapping[str, Any]) -> tuple[str, Reward]:
        """Return the domain and the reward of a row; DataError if it has no known domain."""
        if self.reward is not None:
            return "", shared_reward(self.reward)
        domain = columns.get(self.key)
        if not isinstance(domain, str) or domain not in DOMAINS:
            raise DataError(
                f"Verify: {self.key}: expected one of {', '.join(DOMAINS)}, got {domain!r:.80}. "
                "Fix the row, or describe its reward in --env_kwargs."
            )
        return domain, shared_reward(_SETTINGS.get(domain, domain))

    async def step(self, states: StepState) -> StepResult:
        """Grade the answer.

        Raises:
            DataError: the row has no known domain, or its reward cannot use the label.
            ContractError: the reward's own code is wrong.
            InfraError: the grader failed.
        """
        label, columns = row_of(states, (self.key,))
        domain, reward = self._reward_of(columns)
        rendered = states.get("observation_text", "")
        text = with_opened_thought(states["action_text"], rendered)
        # A judge reads the messages, not the marks of a chat template.
        response = Response(text, label, self.prompt or rendered, columns)
        result = await grade(reward, response, limit_s=self.limit_s)
        if result.reward is None:
            raise result.error("Verify.step: no grade", retry_step=True)
        known = {name: float(value) for name, value in result.components.items() if value is not None}
        known |= {str(status): float(result.status is status) for status in _COUNTED}
        correct = {} if result.score is None else {"correct": float(result.score >= 1.0)}
        if domain:
            known = {f"{domain}/{name}": value for name, value in (known | correct).items()}
        cut = states.get("finish_reason") == "length"
        return StepResult(
            reward=result.reward,
            score=result.score,
            terminated=not cut,
            truncated=cut,
            info={**known, **correct, **texts_of(result)},
        )

    async def gold(self, states: StepState) -> str | None:
        """Return the row's column `reference`; without one the label, if it is the answer itself; else None."""
        label, columns = row_of(states, (self.key,))
        reference = columns.get("reference")
        if isinstance(reference, str):
            return reference
        domain = columns.get(self.key) if self.reward is None else None
        label = label[0] if isinstance(label, list) and label else label
        if not isinstance(label, str | int | float) or isinstance(label, bool):
            return None
        if domain in _IN_A_BOX:
            return rf"\boxed{{{str(label).strip().strip('$')}}}"
        return str(label) if domain == "similarity" else None
