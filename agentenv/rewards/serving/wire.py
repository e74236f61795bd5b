"""Requests and answers of a reward server: OpenRLHF's format, and messages.

    {"query": [text, …], "prompts": […], "labels": […]}   texts as the policy saw and wrote them, used unchanged
    {"messages": [[{"role": …, "content": …}, …], …]}     conversations, rendered with the reward model's own template

    {"rewards": [number, …], "scores": [number, …], "extra_logs": {name: [number, …]}}

Source: openrlhf/cli/serve_rm.py and openrlhf/utils/agent.py, 0.8 to 0.11.2. Prompts and labels are ignored, as
there. Clients of 0.9.1 to 0.11.0 send an empty batch to the second of several servers: its answer is empty too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.http.access import RequestRefused
from agentenv.core.arguments import is_finite
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.models.types import Conversation, Scored

_ADVICE = 'Send {"query": ["text", …]} or {"messages": [[{"role": "user", "content": "…"}, …], …]}.'


@dataclass(frozen=True, slots=True)
class Shaping:
    """The reward of a model's score: `scale * (value + shift)`, clipped, as in `ModelReward`.

    Raises:
        ConfigError: a number is not finite, the scale is 0, or the clip is empty.
    """

    shift: float = 0.0
    scale: float = 1.0
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not (is_finite(self.shift) and is_finite(self.scale) and self.scale):
            raise ConfigError(
                f"--shift, --scale: expected finite numbers, scale not 0, got {self.shift!r} and {self.scale!r}. "
                "Change them."
            )
        if self.clip is not None and not (all(map(is_finite, self.clip)) and self.clip[0] < self.clip[1]):
            raise ConfigError(f"--clip: expected LOW and HIGH, LOW below HIGH, got {self.clip!r}. Change them.")

    def of(self, value: float) -> float:
        """Return the reward of a raw score.

        Raises:
            InfraError: the reward is not finite.
        """
        reward = self.scale * (value + self.shift)
        if self.clip is not None:
            reward = min(max(reward, self.clip[0]), self.clip[1])
        if not is_finite(reward):
            raise InfraError(f"rm serve: expected a finite reward, got {reward!r} of {value!r}. Set --clip.")
        return reward


def read_request(body: Any, max_items: int) -> tuple[str, list[Conversation]]:
    """Return the name of the list in a request, and its conversations, possibly none.

    Raises:
        RequestRefused: the body has neither list, or an item is wrong; the message names the first one.
    """
    forms = [name for name in ("query", "messages") if isinstance(body, dict) and name in body]
    if len(forms) != 1:
        got = list(islice(body, 10)) if isinstance(body, dict) else type(body).__name__
        raise RequestRefused(f"body: expected one of query and messages, got {brief(got)}. {_ADVICE}")
    (form,) = forms
    items = body[form]
    if not isinstance(items, list):
        raise RequestRefused(f"{form}: expected a list, got {brief(items)}. {_ADVICE}")
    if len(items) > max_items:
        raise RequestRefused(
            f"{form}: expected at most {max_items} items, got {len(items)}. Send several requests.", 413
        )
    for index, item in enumerate(items):
        if form == "query":
            what, valid = "text", isinstance(item, str)
        else:
            what, valid = "a list of messages", isinstance(item, list) and all(isinstance(each, dict) for each in item)
        if not valid:
            raise RequestRefused(f"{form}[{index}]: expected {what}, got {brief(item)}. {_ADVICE}")
    return form, items


def answer(scored: Sequence[Scored], shaping: Shaping) -> dict[str, Any]:
    """Return the body of an answer, with one number per conversation in each list.

    The logs hold the raw scores, 1.0 for truncated conversations, and the numbers of tokens if the model reports them.

    Raises:
        InfraError: a reward is not finite.
    """
    rewards = [shaping.of(each.value) for each in scored]
    logs: dict[str, list[float]] = {
        "rm_value": [each.value for each in scored],
        "rm_truncated": [float(each.truncated) for each in scored],
    }
    tokens = [each.num_tokens for each in scored]
    if None not in tokens:
        logs["rm_num_tokens"] = [float(num or 0) for num in tokens]
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs}
