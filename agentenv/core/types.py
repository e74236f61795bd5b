"""The inputs of an episode (Task, SamplingParams, Limits) and the results of its two sides (Completion, StepResult).

Standard library only; all classes are frozen: change a copy with `dataclasses.replace`. Shape: n tokens of one action.
The result of an episode is in `trajectory.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from agentenv._util.brief import brief
from agentenv.errors import ContractError

Message = Mapping[str, Any]
"""One chat message: at least `role` and `content`, as a chat template takes it."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
"""Why one generation ended, in vLLM's terms."""


BridgeKind = Literal[
    "exact",
    "partial-close",
    "non-canonical-close",
    "foreign-terminator",
    "role-marker-mismatch",
    "truncated",
    "text",
    "rerendered",
    "messages",
]
"""How the tokens after an action are joined to it, depending on how the action ended.

exact: with the template's close of a turn; partial-close: with its beginning; non-canonical-close: with its last token,
after other tokens than the template's; foreign-terminator: with a token that ends turns, but not in this template;
role-marker-mismatch: with the marker of another role than the next one; truncated: with none of these.
text: raw text follows, regardless of how the action ended; rerendered: the conversation was rendered again, in a new
segment; messages: the engine takes messages, not tokens.
"""

MAX_REWARD = 3.4e38
"""Rewards are stored as float32, in which larger numbers would become infinite."""


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row."""

    prompt: str | Sequence[Message]
    """Text, used unchanged, or chat messages, rendered with the model's chat template."""
    label: Any = None
    """What the environment grades against; any JSON value."""
    task_id: str = ""
    """Unique in its dataset; half of the key of an episode."""
    images: tuple[Any, ...] = ()
    """Images that belong to the prompt (stored; engines do not use them yet)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    seed: int | None = None
    """Seed of this task's environment; if the row has none, the runner derives one from the run's seed."""
    env: str = ""
    """Name of its environment in a mixture; empty where there is one environment."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one generation, with vLLM's names and meanings."""

    temperature: float = 1.0
    """0.0 means greedy."""
    top_p: float = 1.0
    """Keeps the most likely tokens that together have this probability."""
    top_k: int = 0
    """Keeps this many of the most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this likely, relative to the most likely one."""
    max_tokens: int | None = None
    """Maximum number of new tokens per turn; None: limited only by the room in `Limits.max_length`."""
    min_tokens: int = 0
    """Number of tokens before which a turn cannot end."""
    stop: tuple[str, ...] = ()
    """Strings that end a generation; their tokens stay in the action."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a generation; they stay in the action."""
    seed: int | None = None
    """Seed of the run, or of one request; None samples differently each time."""
    structural_tag: str | None = None
    """JSON text of a structural tag, xgrammar's and vLLM's form of a grammar, that every action must match. None leaves
    the model free. Needs an engine that constrains, and no `min_tokens`."""

    def __post_init__(self) -> None:
        """Raise ValueError for values that no engine can sample with."""
        checks = (
            ("temperature", self.temperature, lambda number: number >= 0.0, "a number >= 0"),
            ("top_p", self.top_p, lambda number: 0.0 < number <= 1.0, "a number in (0, 1]"),
            ("top_k", self.top_k, lambda number: number >= -1, "an integer >= -1"),
            ("min_p", self.min_p, lambda number: 0.0 <= number <= 1.0, "a number in [0, 1]"),
            ("max_tokens", self.max_tokens, lambda number: number is None or number >= 1, "None or an integer >= 1"),
            ("min_tokens", self.min_tokens, lambda number: number >= 0, "an integer >= 0"),
            ("stop", self.stop, lambda stop: not isinstance(stop, str), "a tuple of strings"),
            (
                "min_tokens",
                self.min_tokens,
                lambda number: not (number and self.structural_tag),
                "0 with a structural_tag",
            ),
        )
        check_fields("SamplingParams", checks)

    def for_turn(self, turn_index: int, room: int) -> SamplingParams:
        """Return the parameters of one turn: at most `room` new tokens, and a seed that differs from turn to turn."""
        max_tokens = min(self.max_tokens or room, room)
        seed = None if self.seed is None else self.seed + turn_index
        min_tokens = min(self.min_tokens, max_tokens)
        # All fields in their order: `replace` takes twice as long, and this is every turn's.
        return SamplingParams(
            self.temperature, self.top_p, self.top_k, self.min_p, max_tokens, min_tokens, self.stop,
            self.stop_token_ids, seed, self.structural_tag,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one episode; exhausting `max_length`, `max_turns` or `episode_timeout_s` truncates it."""

    max_length: int = 2048
    """Maximum number of tokens of the whole episode: prompt, actions and observations."""
    max_turns: int = 16
    """Maximum number of turns of the episode."""
    step_timeout_s: float = 60.0
    """Time limit of one call of the agent (constructor, `reset`, `step`, `close`); exceeding it is a failure."""
    episode_timeout_s: float = 600.0
    """Time limit of the whole episode, generation included. An action that has no result yet has no reward then."""
    generate_timeout_s: float = 300.0
    """Time limit of one generation; exceeding it is an engine failure, not a truncation."""

    def __post_init__(self) -> None:
        """Raise ValueError for budgets in which no turn fits."""
        checks = (
            ("max_length", self.max_length, lambda number: number >= 2, "an integer >= 2"),
            ("max_turns", self.max_turns, lambda number: number >= 1, "an integer >= 1"),
            ("step_timeout_s", self.step_timeout_s, lambda number: number > 0, "seconds > 0"),
            ("episode_timeout_s", self.episode_timeout_s, lambda number: number > 0, "seconds > 0"),
            ("generate_timeout_s", self.generate_timeout_s, lambda number: number > 0, "seconds > 0"),
        )
        check_fields("Limits", checks)


def own_limits(env: Any, **trainer: int) -> dict[str, int]:
    """Return `max_length` and `max_turns` of an environment's class where it sets them; a smaller one of a trainer's
    counts, and one that the class does not set.
    """
    own = {name: value for name in ("max_length", "max_turns") if (value := getattr(env, name, None)) is not None}
    return own | {name: min(value, own.get(name, value)) for name, value in trainer.items()}


def check_fields(where: str, checks: Sequence[tuple[str, Any, Callable[[Any], bool], str]]) -> None:
    """Raise ValueError for the first (field, value, holds, expected) whose value does not hold, or has a wrong type."""
    for name, value, holds, expected in checks:
        try:
            is_right = holds(value)
        except TypeError:
            is_right = False
        if not is_right:
            raise ValueError(f"{where}.{name}: expected {expected}, got {value!r}.")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an engine that takes messages is asked, in place of tokens."""

    messages: Sequence[Message]
    """All messages so far, as OpenAI's API takes them."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the environment offers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation of an engine that takes messages: text, without token ids and log-probabilities."""

    content: str
    """The text for the environment."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Calls as OpenAI's API returns them; each has an id that is unique in the answer."""
    reasoning: str = ""
    """Reasoning that the server reports apart from the text; the environment does not see it."""
    model: str = ""
    """Name of the model that the server reports."""
    num_input_tokens: int | None = None
    """Tokens of the prompt, as the server counts them; None if it does not tell."""
    num_output_tokens: int | None = None
    """Tokens of the answer with its reasoning."""
    cost_usd: float | None = None
    """Price of these tokens in dollars; None without prices or counts."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One generation of an engine: only tokens, which the loop decodes for all engines, or only an answer."""

    token_ids: tuple[int, ...]
    """[n] the sampled tokens, unchanged, including a sampled terminator."""
    finish_reason: FinishReason = "stop"
    """Why the generation ended; "abort" and "error" mean that the engine failed."""
    matched_stop: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's own end of sequence."""
    logprobs: tuple[float, ...] | None = None
    """[n] log-probability of each sampled token after a constraint, temperature and truncation (vLLM:
    processed_logprobs): the probability with which it was drawn. NaN if missing, None if the engine returns none."""
    policy_versions: tuple[int, ...] = ()
    """[n] version of the weights that sampled each token; empty if all are `policy_version`."""
    policy_version: int = 0
    """Version of the weights that sampled the tokens."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose keys and values the engine had cached."""
    answer: Answer | None = None
    """What an engine that takes messages returns, without tokens."""
    forced: tuple[int, ...] | None = None
    """Indices of the tokens that `SamplingParams.structural_tag` forced: one token was legal, or only tokens that end
    the action. None: sampled without a structural tag."""
    num_failovers: int = 0
    """1 if an engine of a pool failed before the one that sampled it, else 0."""
    num_request_retries: int = 0
    """How often the request to a server was sent again."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's reply to one action.

    Example: `StepResult("Try again.", reward=0.0)`, `StepResult(reward=1.0, score=1.0, terminated=True)`.
    """

    observation: str | Sequence[Message] = ""
    """Messages go through the model's chat template. Text becomes a user message if the episode began with messages,
    and is appended unchanged after a raw prompt (`agentenv.chat.dialogue`). Ignored if the episode ends here."""
    reward: float = 0.0
    """Reward of the action; an episode's reward is the sum over its turns."""
    terminated: bool = False
    """True if the task ended."""
    truncated: bool = False
    """True if the environment cut the episode short."""
    score: float | None = None
    """Quality so far, for filtering and reports: in [0, 1], unless the environment declares another `score_range`. The
    last score is the episode's."""
    info: Mapping[str, float | str] = field(default_factory=dict)
    """Facts of this turn: numbers become metrics, text is only recorded."""
    sampling: SamplingParams | None = None
    """Sampling parameters of later turns; None keeps the current ones."""
    images: tuple[Any, ...] = ()
    """Images that belong to the observation (stored; engines do not use them yet)."""

    def __post_init__(self) -> None:
        """Convert scalars of numpy and torch; refuse what no record holds, non-finite rewards, and both ends at once.

        Raises:
            ContractError: naming the field.
        """
        if not isinstance(self.info, Mapping):
            raise ContractError(f"StepResult.info: expected a dict, got {brief(self.info)}. Leave it out for none.")
        info: dict[str, float | str] = {}
        for key, value in self.info.items():
            fact = value if isinstance(value, str | float) else _number(value)
            if fact is None or (isinstance(fact, int) and abs(fact) > sys.float_info.max):
                raise ContractError(
                    f"StepResult.info[{key!r}]: expected a number or text, got {brief(value, 200)}. "
                    "Convert or remove it."
                )
            info[str(key)] = fact
        object.__setattr__(self, "info", info)
        for name in ("terminated", "truncated"):
            if type(flag := getattr(self, name)) is not bool:
                object.__setattr__(self, name, as_flag(flag, f"StepResult.{name}"))
        object.__setattr__(self, "reward", _finite("reward", self.reward, _REWARD_ADVICE))
        if self.score is not None:
            object.__setattr__(self, "score", _finite("score", self.score, "Leave it out where there is none."))
        if self.terminated and self.truncated:
            raise ContractError(
                "StepResult: expected at most one of terminated and truncated, got both. "
                "Set terminated when the task is over, truncated when it was cut short."
            )

    @property
    def done(self) -> bool:
        """True if the episode ends here."""
        return self.terminated or self.truncated


def as_flag(value: Any, where: str) -> bool:
    """Return True or False, for 1 and 0, and for a scalar of numpy or torch.

    Raises:
        ContractError: it is something else, such as None or text; the message starts with `where`.
    """
    number = _number(value)
    if number not in (0, 1):
        raise ContractError(f"{where}: expected True or False, got {brief(value, 200)}.")
    return bool(number)


def _number(value: Any) -> int | float | None:
    """Return a number, also of an array or a tensor of one element, a fraction or a decimal; None for other values."""
    try:
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, int | float):
            return value
        return None if isinstance(value, str) or not hasattr(value, "__float__") else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of several elements, or none; too large
        return None


_REWARD_ADVICE = "Raise InfraError if the value is unknown; never invent one."


def _finite(name: str, value: Any, advice: str) -> float:
    number = _number(value)
    if number is None:
        raise ContractError(f"StepResult.{name}: expected a number, got {brief(value, 200)}. {advice}")
    if not abs(number) <= MAX_REWARD:
        raise ContractError(f"StepResult.{name}: expected a finite number, got {brief(value, 200)}. {advice}")
    return float(number)


class StopReason(StrEnum):
    """Why an episode ended; `terminated` and `truncated` derive from it, so they cannot contradict each other."""

    TERMINATED = "terminated"
    """The environment ended the task."""
    TRUNCATED_BY_ENV = "truncated_by_env"
    """The environment cut the episode short."""
    MAX_TURNS = "max_turns"
    MAX_LENGTH = "max_length"
    """No room for the next observation or for another action; at the endpoint, none for the agent's prompt."""
    STEP_TIMEOUT = "step_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ABORTED = "aborted"
    """The engine aborted a generation, or the episode was cancelled."""
    ERROR = "error"
    """An exception, recorded in `Trajectory.error`."""

    @property
    def terminated(self) -> bool:
        """True if the task ended."""
        return self is StopReason.TERMINATED

    @property
    def truncated(self) -> bool:
        """True if a limit, the environment or a cancellation ended the episode before its task did."""
        return self not in (StopReason.TERMINATED, StopReason.ERROR)
