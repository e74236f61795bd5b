"""A Gymnasium environment in words: what is fixed of it (TextGame), and where an episode of it stands (Moment)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentenv.errors import ConfigError, ContractError
from agentenv.gym.foreign import named, number_of
from agentenv.gym.parsing import Parse

_SCORES = ("score", "is_success", "success")


@dataclass(frozen=True, slots=True)
class Moment:
    """Where an episode of a Gymnasium environment stands: what rules in words, scores and gold actions look at."""

    env: Any
    """The environment with its wrappers; its insides are in `env.unwrapped`."""
    observation: Any
    info: Mapping[str, Any] = field(default_factory=dict)
    action: Any = None
    """The one that led here; None after the reset."""
    reward: float = 0.0
    """Of the last step."""
    total: float = 0.0
    """All rewards of the environment so far."""
    num_steps: int = 0
    num_illegal: int = 0
    """Answers that were no legal action, none of which the environment saw."""
    terminated: bool = False
    truncated: bool = False
    """By Gymnasium, as `terminated`: while the game goes on, and where our own limits end it, both are False."""
    gave_up: bool = False
    """Illegal answers ended the episode: the game itself had not ended."""


Render = Callable[[Moment], str]
Score = Callable[[Moment], float | None]
Gold = Callable[[Moment], Any]


@dataclass(frozen=True, slots=True)
class TextGame:
    """What makes an agent environment of a Gymnasium environment; see `from_gymnasium` for each."""

    env: str | Callable[..., Any]
    make_kwargs: Mapping[str, Any] = field(default_factory=dict)
    render: Render | Literal["auto", "ansi", "observation"] = "auto"
    parse: Parse | None = None
    actions: Sequence[str] | Mapping[str, int] | None = None
    rules: str | Callable[[Moment], str] = ""
    score: Score | tuple[float, float] | None = None
    gold: Gold | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be used.

        Raises:
            ConfigError: naming the argument.
        """
        if not (isinstance(self.env, str) and self.env) and not callable(self.env):
            self._refuse("env_id", "the id of an environment or what makes one", self.env)
        if self.render not in ("auto", "ansi", "observation") and not callable(self.render):
            self._refuse("render", "auto, ansi, observation or a function of a Moment", self.render)
        for name in ("parse", "gold"):
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
        """The id of the environment, or the name of what makes it: for errors."""
        return self.env if isinstance(self.env, str) else getattr(self.env, "__name__", type(self.env).__name__)

    def scored(self, moment: Moment) -> float | None:
        """The score by the declared rule; without one `score`, `is_success` or `success` of the info, or None.

        A game that was given up by illegal answers has 0.0 where the rule would have a number. By (low, high) a game
        that has not ended has 0.0 too: where steps cost, its sum of rewards is the higher the sooner it stops.

        Raises:
            ContractError: the rule gave what is no score.
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
            found = [moment.info[name] for name in _SCORES if name in moment.info]
            number = number_of(found[0]) if found else math.nan
            return number if 0.0 <= number <= 1.0 else None
        with named(f"{self.name}: score"):
            value = self.score(moment)
        if value is None:
            return None
        if not 0.0 <= (number := number_of(value)) <= 1.0:
            raise ContractError(f"{self.name}: score: expected a number in [0, 1], got {value!r}. Mend the rule.")
        return number
