"""What goes into an episode (Task, SamplingParams, Limits) and what its two sides answer (Completion, StepResult).

Standard library only, everything frozen: change a copy with `dataclasses.replace`. Shape: n tokens of one action.
What comes out of an episode is in `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from agentenv.errors import ContractError

Message = Mapping[str, Any]
"""One chat message: at least `role` and `content`, as a chat template takes it."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
"""Why one generation ended, in vLLM's words."""


BridgeKind = Literal[
    "exact",
    "partial-close",
    "non-canonical-close",
    "foreign-terminator",
    "role-marker-mismatch",
    "truncated",
    "text",
    "rerendered",
]
"""How what follows an action is joined to it, by how the action ended.

exact: with the template's close of a turn; partial-close: with its beginning; non-canonical-close: with its last token,
after other tokens than the template's; foreign-terminator: with a token that ends turns, though not in this template;
role-marker-mismatch: with the marker of another role than the one that speaks next; truncated: with none of these.
text: whatever it ended with, as raw text follows; rerendered: the conversation was rendered anew, in a new segment.
"""

MAX_REWARD = 3.4e38
"""Rewards are kept as float32, in which larger numbers would become infinite."""


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row."""

    prompt: str | Sequence[Message]
    """Text, taken as it is, or chat messages, rendered with the model's chat template."""
    label: Any = None
    """What the environment grades against; any JSON value."""
    task_id: str = ""
    """Unique in its dataset; half of the key of an episode."""
    images: tuple[Any, ...] = ()
    """Pictures that belong to the prompt (carried, not yet sampled with)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    seed: int | None = None
    """Seed of this task's environment; the runner derives one from the run's seed where the row has none."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one generation; vLLM's names and meanings."""

    temperature: float = 1.0
    """0.0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps every token."""
    min_p: float = 0.0
    max_tokens: int | None = None
    """New tokens per turn; None leaves only the room in `Limits.max_length`."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end a generation; their tokens stay in the action."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that no engine can sample with."""
        checks = (
            ("temperature", self.temperature, self.temperature >= 0.0, "a number >= 0"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= -1, "an integer >= -1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "None or an integer >= 1"),
            ("min_tokens", self.min_tokens, self.min_tokens >= 0, "an integer >= 0"),
            ("stop", self.stop, not isinstance(self.stop, str), "a tuple of strings"),
        )
        _check("SamplingParams", checks)


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one episode; running out truncates it."""

    max_length: int = 2048
    """Tokens of the whole episode: prompt, actions and observations."""
    max_turns: int = 16
    step_timeout_s: float = 60.0
    """Longest one call of the agent may take: its constructor, `reset`, `step`, `close`."""
    episode_timeout_s: float = 600.0
    generate_timeout_s: float = 300.0
    """Longest one generation may take; beyond it the engine has failed, which is no truncation."""

    def __post_init__(self) -> None:
        """Refuse budgets in which no turn fits."""
        checks = (
            ("max_length", self.max_length, self.max_length >= 2, "an integer >= 2"),
            ("max_turns", self.max_turns, self.max_turns >= 1, "an integer >= 1"),
            ("step_timeout_s", self.step_timeout_s, self.step_timeout_s > 0, "seconds > 0"),
            ("episode_timeout_s", self.episode_timeout_s, self.episode_timeout_s > 0, "seconds > 0"),
            ("generate_timeout_s", self.generate_timeout_s, self.generate_timeout_s > 0, "seconds > 0"),
        )
        _check("Limits", checks)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How an episode's messages become tokens, where there is a choice."""

    text_feedback: Literal["auto", "raw", "user"] = "auto"
    """What a step's text becomes: raw tokens, a user message, or by the rule of `agentenv.dialogue`."""
    history: Literal["keep", "rerender"] = "keep"
    """keep: tokens are only ever appended; rerender: a template that rewrites what was said opens a new segment."""
    open_reasoning: Literal["keep", "close"] = "keep"
    """What becomes of reasoning that was cut off: it stays open, or is closed in the model's place."""
    tool_role: Literal["refuse", "user"] = "refuse"
    """Tool results where the template has no role for them: an error, or a user message."""
    long_observation: Literal["end", "cut"] = "end"
    """Messages that do not fit: the episode is truncated, or the middle of the longest content is cut out."""
    max_observation_tokens: int | None = None
    """Messages that become more tokens than this are cut in any case."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        """Refuse what no option means."""
        choices = {
            "text_feedback": ("auto", "raw", "user"),
            "history": ("keep", "rerender"),
            "open_reasoning": ("keep", "close"),
            "tool_role": ("refuse", "user"),
            "long_observation": ("end", "cut"),
        }
        named = [
            (name, getattr(self, name), getattr(self, name) in known, f"one of {', '.join(known)}")
            for name, known in choices.items()
        ]
        most = self.max_observation_tokens
        enough = most is None or most >= 1
        _check("ChatOptions", [*named, ("max_observation_tokens", most, enough, "None or an integer >= 1")])


def _check(where: str, checks: Sequence[tuple[str, Any, bool, str]]) -> None:
    for name, value, holds, expected in checks:
        if not holds:
            raise ValueError(f"{where}.{name}: expected {expected}, got {value!r}. Change the value.")


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine gives back for one generation: tokens only; the loop decodes them, in one place for all."""

    token_ids: tuple[int, ...]
    """[n] the sampled tokens, untouched, with the terminator where one was sampled."""
    finish_reason: FinishReason = "stop"
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's own end of sequence."""
    logprobs: tuple[float, ...] | None = None
    """[n] log-probability of each sampled token after temperature and truncation (vLLM: processed_logprobs); NaN where
    missing, None where the engine gives none."""
    policy_versions: tuple[int, ...] = ()
    """[n] version of the weights that sampled each token; empty when they are all `policy_version`."""
    policy_version: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values the engine still had."""

    @property
    def min_policy_version(self) -> int:
        """The oldest weights among the tokens."""
        return min(self.policy_versions, default=self.policy_version)

    @property
    def max_policy_version(self) -> int:
        """The newest weights among the tokens."""
        return max(self.policy_versions, default=self.policy_version)


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's reply to one action.

    Example: `StepResult("Try again.", reward=0.0)`, `StepResult(reward=1.0, score=1.0, terminated=True)`.
    """

    observation: str | Sequence[Message] = ""
    """Messages go through the model's chat template; text becomes a user message after messages, and after a raw prompt
    is appended as it is (`agentenv.dialogue`). Dropped when the episode ends here."""
    reward: float = 0.0
    terminated: bool = False
    """The task came to its end."""
    truncated: bool = False
    """The environment cut the episode short."""
    score: float | None = None
    """Quality in [0, 1] so far, for filtering and reports; the last one given is the episode's."""
    info: Mapping[str, float | str] = field(default_factory=dict)
    """Facts of this turn: numbers become metrics, text is only recorded."""
    sampling: SamplingParams | None = None
    """Sampling for the turns that follow; None keeps what is in force."""
    images: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        """Refuse rewards and scores that are not finite, and two ends at once; keep a copy of `info`.

        Raises:
            ContractError: naming the field.
        """
        object.__setattr__(self, "info", dict(self.info))
        wrong = {key: value for key, value in self.info.items() if not _is_fact(value)}
        if wrong:
            raise ContractError(
                f"StepResult.info: expected numbers and text, got {wrong!r}. Convert or leave them out."
            )
        object.__setattr__(self, "reward", _finite("reward", self.reward))
        if self.score is not None:
            object.__setattr__(self, "score", _finite("score", self.score))
        if self.terminated and self.truncated:
            raise ContractError(
                "StepResult: expected at most one of terminated and truncated, got both. "
                "Set terminated when the task is over, truncated when it was cut short."
            )

    @property
    def done(self) -> bool:
        """The episode ends here."""
        return self.terminated or self.truncated


def _finite(name: str, value: Any) -> float:
    advice = "Raise InfraError where no value can be had; never invent one."
    if name == "score":
        advice = "Leave it out where there is none."
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise ContractError(f"StepResult.{name}: expected a number, got {value!r}. {advice}")
    number = float(value)
    if not abs(number) <= MAX_REWARD:
        raise ContractError(f"StepResult.{name}: expected a finite number, got {value!r}. {advice}")
    return number


def _is_fact(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "__float__")


class StopReason(StrEnum):
    """Why an episode ended; `terminated` and `truncated` derive from it, so they cannot disagree."""

    TERMINATED = "terminated"
    """The environment said the task is over."""
    TRUNCATED_BY_ENV = "truncated_by_env"
    """The environment cut the episode."""
    MAX_TURNS = "max_turns"
    MAX_LENGTH = "max_length"
    """No room for the prompt, for the next observation or for another action."""
    STEP_TIMEOUT = "step_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ABORTED = "aborted"
    """The engine gave a generation up."""
    ERROR = "error"
    """Something raised; `Trajectory.error` says what."""

    @property
    def terminated(self) -> bool:
        """The task came to its end."""
        return self is StopReason.TERMINATED

    @property
    def truncated(self) -> bool:
        """Something other than the task ended the episode, and no error did."""
        return self not in (StopReason.TERMINATED, StopReason.ERROR)
