"""A Gymnasium environment in text: its settings (TextGame) and the state of an episode (Moment)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import ConfigError, ContractError
from agentenv.gym.guarded_calls import named, number_of
from agentenv.gym.parsing import Parse

_SCORES = ("score", "is_success", "success")


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of an episode of a Gymnasium environment, as rules, scores and gold actions see it."""

    env: Any
    """The environment with its wrappers; `env.unwrapped` is the environment itself."""
    observation: Any
    info: Mapping[str, Any] = field(default_factory=dict)
    action: Any = None
    """Last action; None after the reset."""
    reward: float = 0.0
    """Reward of the last step."""
    total: float = 0.0
    """Sum of the environment's rewards so far."""
    num_steps: int = 0
    num_illegal: int = 0
    """Number of answers without a legal action; the environment saw none of them."""
    terminated: bool = False
    truncated: bool = False
    """Gymnasium's flags. Both are False while the game is running, and if our own limits end it."""
    gave_up: bool = False
    """True if illegal answers ended the episode before the game ended."""


Render = Callable[[Moment], str]
Score = Callable[[Moment], float | None]
Gold = Callable[[Moment], Any]


@dataclass(frozen=True, slots=True)
class TextGame:
    """Settings of a Gymnasium environment in text; see `from_gymnasium` for each."""

    env: str | Callable[..., Any]
    """Id of an environment, or a function that makes one."""
    make_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `gymnasium.make`, or of the function."""
    render: Render | None = None
    """How to write an observation as text."""
    parse: Parse | None = None
    """How to read an action from an answer."""
    actions: Sequence[str] | Mapping[str, int] | None = None
    """Names of the discrete actions."""
    rules: str | Callable[[Moment], str] = ""
    """Text before the first observation."""
    score: Score | tuple[float, float] | None = None
    """Score of an episode, or the lowest and highest sum of rewards to scale from."""
    gold: Gold | None = None
    """A right action for tests, from a Moment."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: a setting is invalid; the message names it.
        """
        if not (isinstance(self.env, str) and self.env) and not callable(self.env):
            self._refuse("env_id", "the id of an environment or a function that makes one", self.env)
        for name in ("render", "parse", "gold"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                self._refuse(name, "a function", value)
        if isinstance(self.score, tuple):
            if len(self.score) != 2 or not self.score[0] < self.score[1]:
                self._refuse("score", "(low, high) with low < high", self.score)
        elif self.score is not None and not callable(self.score):
            self._refuse("score", "a function of a Moment, (low, high) or None", self.score)
        if not isinstance(self.rules, str) and not callable(self.rules):
            self._refuse("rules", "a text or a function of a Moment", self.rules)

    def _refuse(self, name: str, expected: str, got: Any) -> None:
        raise ConfigError(f"from_gymnasium.{name}: expected {expected}, got {got!r:.80}. Change it.")

    @property
    def name(self) -> str:
        """Id of the environment, or the name of the function that makes it, for error messages."""
        return self.env if isinstance(self.env, str) else getattr(self.env, "__name__", type(self.env).__name__)

    def score_of(self, moment: Moment) -> float | None:
        """Return the score by the declared rule; without one, `score`, `is_success` or `success` of the info, or None.

        A game that illegal answers ended scores 0.0 instead of the rule's number. By (low, high) a game that has not
        ended scores 0.0 too: if steps cost, its sum of rewards is higher the sooner it stops.

        Raises:
            ContractError: the rule returned something that is not a score.
            EpisodeFailed: the rule raised.
        """
        score = self._by_rule(moment)
        return 0.0 if moment.gave_up and score is not None else score

    def _by_rule(self, moment: Moment) -> float | None:
        if isinstance(self.score, tuple):
            if not (moment.terminated or moment.truncated):
                return 0.0
            low, high = self.score
            return min(1.0, max(0.0, (moment.total - low) / (high - low)))
        if self.score is None:
            scores = [moment.info[name] for name in _SCORES if name in moment.info]
            number = number_of(scores[0]) if scores else math.nan
            return number if 0.0 <= number <= 1.0 else None
        with named(f"{self.name}: score"):
            value = self.score(moment)
        if value is None:
            return None
        if not 0.0 <= (number := number_of(value)) <= 1.0:
            raise ContractError(f"{self.name}: score: expected a number in [0, 1], got {value!r}. Fix the rule.")
        return number
