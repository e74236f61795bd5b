"""What a client of a reward server sends and is answered: OpenRLHF's form, and messages.

    {"query": [text, …], "prompts": […], "labels": […]}   texts as the policy saw and wrote them, taken as they are
    {"messages": [[{"role": …, "content": …}, …], …]}     conversations, rendered with the reward model's own template

    {"rewards": [number, …], "scores": [number, …], "extra_logs": {name: [number, …]}}

Source: openrlhf/cli/serve_rm.py and openrlhf/utils/agent.py, 0.8 to 0.11.2. Prompts and labels are not looked at, as
there. Their clients of 0.9.1 to 0.11.0 send the second server of several an empty batch: its answer is empty too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.errors import ConfigError, InfraError
from agentenv.http_serving.doors import Refused
from agentenv.rewards.models.types import Conversation, Scored
from agentenv.rewards.types import is_finite

_ADVICE = 'Send {"query": ["text", …]} or {"messages": [[{"role": "user", "content": "…"}, …], …]}.'


@dataclass(frozen=True, slots=True)
class Shaping:
    """`scale * (value + shift)`, clipped: what becomes of a model's number, as in `ModelReward`.

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
        """The reward of a raw value.

        Raises:
            InfraError: it would be no finite number.
        """
        reward = self.scale * (value + self.shift)
        if self.clip is not None:
            reward = min(max(reward, self.clip[0]), self.clip[1])
        if not is_finite(reward):
            raise InfraError(f"rm serve: expected a finite reward, got {reward!r} of {value!r}. Set --clip.")
        return reward


def read_request(body: Any, max_items: int) -> tuple[str, list[Conversation]]:
    """The name of the list that was sent, and its conversations; there may be none.

    Raises:
        Refused: it is neither form, or a list of other things; names the first item.
    """
    forms = [name for name in ("query", "messages") if isinstance(body, dict) and name in body]
    if len(forms) != 1:
        got = sorted(body)[:10] if isinstance(body, dict) else type(body).__name__
        raise Refused(f"body: expected one of query and messages, got {got!r:.200}. {_ADVICE}")
    (form,) = forms
    items = body[form]
    if not isinstance(items, list):
        raise Refused(f"{form}: expected a list, got {items!r:.200}. {_ADVICE}")
    if len(items) > max_items:
        raise Refused(f"{form}: expected at most {max_items} items, got {len(items)}. Send several requests.", 413)
    for index, item in enumerate(items):
        if not _is_conversation(form, item):
            what = "text" if form == "query" else "a list of messages"
            raise Refused(f"{form}[{index}]: expected {what}, got {item!r:.200}. {_ADVICE}")
    return form, items


def _is_conversation(form: str, item: Any) -> bool:
    if form == "query":
        return isinstance(item, str)
    return isinstance(item, list) and all(isinstance(message, dict) for message in item)


def answer(scored: Sequence[Scored], shaping: Shaping) -> dict[str, Any]:
    """The body of an answer: one number per conversation in every list.

    The logs are the raw values, 1.0 for what was cut, and the numbers of tokens where the model says them.

    Raises:
        InfraError: a reward would be no finite number.
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
