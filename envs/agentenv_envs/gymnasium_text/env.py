"""GymnasiumText: Gymnasium's toy games, each with rules, a map and its best play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentenv.core.agent import ResetState, StepState
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError, DataError
from agentenv.gym.from_gymnasium import FromGymnasium, Moment, TextGame
from agentenv_envs.common import row_of
from agentenv_envs.gymnasium_text import games
from agentenv_envs.gymnasium_text.games import GAMES, Game

_DATA = Path(__file__).parent / "data"
_NAMES = ("gymnasium_text", *GAMES)


class GymnasiumText(FromGymnasium):
    """FrozenLake, CliffWalking, Taxi or Blackjack in words, one action per turn.

    Each row names its `game`, in its own column or in a label that is an object, as in OpenRLHF: frozen_lake,
    frozen_lake_slippery, cliff_walking, taxi, blackjack. A row may also have `map` (FrozenLake, a list of rows),
    `start` (CliffWalking, [row, column] from 0) and `state` (Taxi); everything else is drawn with the task's seed.

    Score: if every action has one outcome, 1.0 for a won game, else 0.0. In games of luck (slippery ice, blackjack) no
    strategy always wins, so the score is the share of answers that were a best action, by value iteration or the odds
    of the cards: best play has 1.0, and `won` tells the result. A game that was given up by answers without an action
    has 0.0. Reward: "score": the score at the end of the episode; "game": Gymnasium's own, every turn.

    info per turn: optimal (0/1, the action was a best one), won (0/1), and the keys of FromGymnasium.
    """

    game: ClassVar[TextGame] = GAMES["frozen_lake"].text_game({})
    datasets: ClassVar[Mapping[str, str | Path]] = {name: _DATA / f"{name}.jsonl" for name in _NAMES}
    max_turns: ClassVar[int | None] = 52
    """The longest game (50 actions, on slippery ice) and two answers without an action."""
    row_seeds: ClassVar[bool] = False
    """True: the row's `seed` takes precedence over the trainer's, which may differ between samples."""
    hacks: ClassVar[Mapping[str, str]] = {
        **FromGymnasium.hacks,
        "says_every_action": "left down right up south north east west pickup dropoff stick hit",
        "numbers_beyond": "99",
        "names_the_goal": "<action>G</action> goal dropoff at the destination, 21",
    }

    def __init__(
        self,
        game: str | None = None,
        *,
        reward: Literal["score", "game"] = "score",
        max_steps: int | None = None,
        max_invalid: int = 3,
        invalid_reward: float | None = None,
        form: Literal["last", "tags"] = "last",
        make_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Choose the game and the costs of an episode.

        Args:
            game: the game of rows that name none; rows of another game are refused.
            reward: "score" or "game".
            max_steps: number of actions after which the episode is truncated; None: 24, on slippery ice 50.
            max_invalid: number of answers without an action after which the episode is terminated.
            invalid_reward: reward of each of them; None: -0.1, and under `reward="game"` that of the game's worst step.
            form: "last" or "tags", as in `FromGymnasium`.
            make_kwargs: more arguments of Gymnasium's environment, such as {"is_rainy": true} for Taxi.

        Raises:
            ConfigError: an argument has an invalid value.
        """
        for name, value, choices in (("game", game, (None, *GAMES)), ("reward", reward, ("score", "game"))):
            if value not in choices:
                raise ConfigError(f"GymnasiumText.{name}: expected one of {choices}, got {value!r}.")
        super().__init__(
            make_kwargs,
            max_steps=max_steps,
            max_invalid=max_invalid,
            invalid_reward=-0.1 if invalid_reward is None else invalid_reward,
            form=form,
        )
        self.name = game
        self.reward = reward
        self._arguments = {"max_steps": max_steps, "invalid_reward": invalid_reward}
        self._row: Mapping[str, Any] = {}
        self._kind: Game = GAMES[game or "frozen_lake"]
        self._text = self._kind.text_game({})
        self.play: games.Play | None = None
        self.num_optimal = 0
        self._was_optimal = False

    def reset(self, states: ResetState) -> ResetState:  # type: ignore[override]  # plain: runs in a thread
        """Set up the row's game; append its rules and first state to the task's prompt.

        Raises:
            DataError: the row's game, map or place is invalid.
        """
        _, self._row = row_of(states, ("game",))
        name = self._row.get("game") or self.name
        if not isinstance(name, str) or name not in GAMES or self.name not in (None, name):
            expected = self.name or f"one of {', '.join(GAMES)}"
            raise DataError(
                f"GymnasiumText: game: expected {expected}, got {self._row.get('game')!r:.60}. "
                "Fix the row, or choose its game with --env_kwargs '{\"game\": …}' and --data."
            )
        self._kind = GAMES[name]
        self._text = self._kind.text_game(self._row)
        if self._arguments["max_steps"] is None:
            self.max_steps = self._kind.max_steps
        if self._arguments["invalid_reward"] is None and self.reward == "game":
            self.invalid_reward = self._kind.invalid_reward
        return super().reset(states)

    def _best(self) -> games.Play:
        if self.play is None:
            self.play = games.Play(self.env)
        return self.play

    def step(self, states: StepState) -> StepResult:  # type: ignore[override]  # plain: runs in a thread
        """Play an action; see `FromGymnasium.step`."""
        self._was_optimal = False
        result = super().step(states)
        moment = self._now()
        score = self._score(moment)
        reward = result.reward
        if self.reward == "score":
            reward = (self.invalid_reward if result.info["illegal"] else 0.0) + (score if result.done else 0.0)
        info = {**result.info, "optimal": float(self._was_optimal), "won": float(games.won(self._kind.env, moment))}
        return replace(result, reward=reward, score=score, info=info)

    def on_truncate(self, states: StepState) -> StepResult | None:  # type: ignore[override]
        """Pay the score of a game of luck that a limit ends, as at any other end."""
        score = self._score(self._now())
        return StepResult(reward=score, score=score) if self.reward == "score" and score else None

    def gold(self, states: StepState) -> str | None:  # type: ignore[override]  # plain: runs in a thread
        """Return a best action; None in a game of luck after a worse answer, because the full score is lost."""
        if self.moment is None or self.env is None:
            return None
        answers = self.moment.num_steps + self.moment.num_illegal
        if not self._best().is_certain and self.num_optimal < answers:
            return None
        action = self._best().best(self.moment.observation)[0]
        name = next(name for name, meaning in self.names.items() if meaning == action)
        return f"<action>{name}</action>" if self.form == "tags" else name

    def _score(self, moment: Moment) -> float:
        if self._best().is_certain:
            return float(games.won(self._kind.env, moment))
        answers = moment.num_steps + moment.num_illegal
        return self.num_optimal / answers if answers and not moment.gave_up else 0.0

    def _game(self) -> TextGame:
        return getattr(self, "_text", self.game)

    def _reset_env(self, states: ResetState) -> Any:
        seed, own = states.get("seed"), self._row.get("seed")
        observation, info = self.env.reset(seed=own if own is not None and (self.row_seeds or seed is None) else seed)
        state = games.put(self.env, self._row)
        if state is None:
            return observation, info
        mask = getattr(self.env.unwrapped, "action_mask", None)
        return state, {**info, **({"action_mask": mask(state)} if mask is not None else {})}

    def _step_env(self, action: Any) -> Any:
        self._was_optimal = action in self._best().best(self._now().observation)
        self.num_optimal += self._was_optimal
        return self.env.step(action)
