"""GymnasiumText: Gymnasium's toy games, each with rules, a map and its best play.

The best actions are found by value iteration over a game's transitions, and for blackjack by its odds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from agentenv.core.agent import ResetState, StepState
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError, DataError
from agentenv.gym.from_gymnasium import FromGymnasium, Moment, TextGame
from agentenv_envs.common import row_of

FROZEN_LAKE = """\
You stand on a frozen lake, a grid of squares. On the map @ is you, S the start, F ice, H a hole, G the goal. \
Each move takes you one square left, down, right or up; at the edge of the map you stay where you are. \
Reach G. Stepping into a hole ends the game."""
SLIPPERY = """\
The ice is slippery: a move goes where you want one time in three, and as often to each side of that direction. \
Your moves are judged, not your luck: choose the one with the best chance of reaching G, and soon."""
CLIFF_WALKING = """\
You walk on a grid of 4 rows and 12 columns. On the map @ is you, G the goal, C a cliff and . safe ground. \
Each move takes you one square up, right, down or left; at the edge of the map you stay where you are. \
Stepping onto C throws you back to row 4, column 1. Reach G."""
TAXI = """\
You drive a taxi on a grid of 5 rows and 5 columns. On the map @ is the taxi, R, G, Y and B are stops; \
you can drive through : and not through |. Row 1 is in the north, column 1 in the west. Each move takes you one \
square south, north, east or west. Drive to the passenger, pick up there, drive to the destination, and drop off. \
Done is done: the game ends when the passenger is dropped off at the destination."""
BLACKJACK = """\
You play blackjack against a dealer. Number cards count their number, faces count 10, an ace 11 or, where that would \
be more than 21, 1. Cards come from a deck that never runs out. Hit takes a card; beyond 21 you lose at once. \
Stick ends your turn: then the dealer draws up to 17 or more, and who is nearer to 21 wins. \
Your choices are judged, not your luck: choose what wins the most on average."""

STOPS = ("R", "G", "Y", "B")
STOP_AT = ((0, 0), (0, 4), (4, 0), (4, 3))

_LAKE = {"left": 0, "down": 1, "right": 2, "up": 3, "west": 0, "south": 1, "east": 2, "north": 3}
_CLIFF = {"up": 0, "right": 1, "down": 2, "left": 3, "north": 0, "east": 1, "south": 2, "west": 3}
_TAXI = {
    "south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5,
    "pick up": 4, "pick-up": 4, "drop off": 5, "drop-off": 5,
}  # fmt: skip
_BLACKJACK = {"stick": 0, "hit": 1, "stand": 0, "stay": 0}
_CLIFF_START = "a [row, column] of safe ground, from 0"

DISCOUNT = 0.99
"""Discount per step, so that the shorter of two ways to the goal is better."""
_TIE = 1e-8
_CARDS = {**dict.fromkeys(range(1, 10), 1 / 13), 10: 4 / 13}
STICK, HIT = 0, 1

Transitions = Mapping[int, Mapping[int, Any]]
"""state -> action -> [(probability, next state, reward, terminated)]: the `P` of Gymnasium's toy games."""


@dataclass(frozen=True, slots=True)
class Game:
    """One of the games."""

    env: str
    """Gymnasium's name, without a version."""
    actions: Mapping[str, int]
    rules: str
    render: Callable[[Moment], str]
    max_steps: int
    invalid_reward: float
    """With the game's own rewards: the cost of an answer without an action, so that giving up does not pay."""
    make_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def text_game(self, row: Mapping[str, Any]) -> TextGame:
        """Return the text game of a row.

        Raises:
            DataError: the row's map is invalid.
        """
        kwargs = dict(self.make_kwargs)
        if self.env == "FrozenLake" and (value := row.get("map")) is not None:
            rows = list(value) if isinstance(value, list | tuple) else []
            whole = rows and all(
                isinstance(row, str) and len(row) == len(rows[0]) and set(row) <= set("SFHG") for row in rows
            )
            letters = "".join(map(str, rows))
            if not whole or letters.count("S") != 1 or "G" not in letters:
                raise DataError(
                    f"GymnasiumText: map: expected rows of S, F, H and G with one S and a G, got {value!r:.80}. "
                    "Fix the row."
                )
            kwargs["desc"] = rows
        return TextGame(newest(self.env), kwargs, self.render, actions=self.actions, rules=self.rules)


def newest(name: str) -> str:
    """Return the id of the highest registered version: Taxi is v3 in older Gymnasiums and v4 in newer ones."""
    import gymnasium

    versions = [spec.version or 0 for spec in gymnasium.registry.values() if spec.name == name and not spec.namespace]
    return f"{name}-v{max(versions, default=1)}"


def put(env: Any, row: Mapping[str, Any]) -> int | None:
    """Move a game to its row's start after a reset; return the state, or None if the row has no start.

    Raises:
        DataError: the place does not exist.
    """
    inner = env.unwrapped
    if (state := row.get("state")) is not None:  # Taxi
        if type(state) is not int or not 0 <= state < len(inner.P):
            raise DataError(f"GymnasiumText: state: expected one of the game's {len(inner.P)}, got {state!r:.60}.")
        inner.s = state
        return state
    if row.get("start") is not None:  # CliffWalking
        start = row["start"]
        whole = isinstance(start, list | tuple) and len(start) == 2 and all(type(one) is int for one in start)
        if not whole or (not (0 <= start[0] < 3 and 0 <= start[1] < 12) and list(start) != [3, 0]):
            raise DataError(f"GymnasiumText: start: expected {_CLIFF_START}, got {start!r:.60}. Fix the row.")
        inner.s = start[0] * 12 + start[1]
        return int(inner.s)
    return None


def won(name: str, moment: Moment) -> bool:
    """Return True if a game was won: the goal reached, the passenger delivered, or more points than the dealer."""
    if not moment.terminated:
        return False
    return moment.reward > 0 if name in ("FrozenLake", "Blackjack") else True


def action_values(transitions: Transitions) -> Any:
    """Return [num_states, num_actions] discounted sums of rewards of each action followed by the best ones."""
    num_states, num_actions = len(transitions), len(transitions[0])
    most = max(len(outcomes) for actions in transitions.values() for outcomes in actions.values())
    chance, follows, reward = np.zeros((3, num_states, num_actions, most))
    continues = np.zeros((num_states, num_actions, most))
    for state, actions in transitions.items():
        for action, outcomes in actions.items():
            for index, (probability, after, earned, ended) in enumerate(outcomes):
                at = state, action, index
                chance[at], follows[at], reward[at], continues[at] = probability, after, earned, not ended
    states, values = follows.astype(np.int64), np.zeros(num_states)
    while True:
        updated = (chance * (reward + DISCOUNT * continues * values[states])).sum(axis=2)
        best = updated.max(axis=1)
        if np.abs(best - values).max() < 1e-11:
            return updated
        values = best


def best_actions(values: Any) -> list[int]:
    """Return the actions of the highest value, several if they are equally good."""
    return [int(action) for action in np.flatnonzero(np.asarray(values) >= np.max(values) - _TIE)]


@functools.cache
def blackjack_values(total: int, dealer: int, usable_ace: bool) -> tuple[float, float]:
    """Return the average result of sticking and of hitting, with cards from an infinite deck.

    This is the best play of the game, whose average result is negative in most hands.
    """
    ends = _dealt(*_with(0, False, dealer))
    stick = sum(chance * ((end > 21 or total > end) - (total < end <= 21)) for end, chance in ends)
    hit = 0.0
    for card, chance in _CARDS.items():
        after, ace = _with(total, usable_ace, card)
        hit += chance * (-1.0 if after > 21 else max(blackjack_values(after, dealer, ace)))
    return stick, hit


def _with(total: int, usable_ace: bool, card: int) -> tuple[int, bool]:
    total += card
    if card == 1 and not usable_ace and total + 10 <= 21:
        return total + 10, True
    return (total - 10, False) if usable_ace and total > 21 else (total, usable_ace)


@functools.cache
def _dealt(total: int, usable_ace: bool) -> tuple[tuple[int, float], ...]:
    """Return the dealer's possible final totals with their probabilities."""
    if total >= 17:
        return ((total, 1.0),)
    ends: dict[int, float] = {}
    for card, probability in _CARDS.items():
        for end, share in _dealt(*_with(total, usable_ace, card)):
            ends[end] = ends.get(end, 0.0) + probability * share
    return tuple(ends.items())


class Play:
    """The best play of a game: from its transitions if it has some, else from blackjack's odds."""

    def __init__(self, env: Any) -> None:
        self.env = env.unwrapped
        transitions = getattr(self.env, "P", None)
        self.values = None if transitions is None else action_values(transitions)
        self.is_certain = transitions is not None and all(
            len({after for probability, after, *_ in outcomes if probability > 0}) == 1
            for actions in transitions.values()
            for outcomes in actions.values()
        )
        """True if every action has one outcome, so that the best play wins."""

    def best(self, observation: Any) -> list[int]:
        """Return the best actions in the current state."""
        if self.values is not None:
            return best_actions(self.values[int(self.env.s)])
        total, dealer, usable_ace = (int(one) for one in observation)
        return best_actions(blackjack_values(total, dealer, bool(usable_ace)))


# Every text of an episode's state. Rows and columns count from 1.


def frozen_lake_text(moment: Moment) -> str:
    """Return the map with the player on it."""
    desc = moment.env.unwrapped.desc
    rows = [[square.decode() if isinstance(square, bytes) else str(square) for square in row] for row in desc]
    return _map(rows, moment)


def cliff_text(moment: Moment) -> str:
    """Return the map with the player on it."""
    return _map([["."] * 12 for _ in range(3)] + [[".", *["C"] * 10, "G"]], moment)


def taxi_text(moment: Moment) -> str:
    """Return the map with the taxi on it, and the passenger's place and destination in words."""
    inner = moment.env.unwrapped
    row, column, passenger, destination = (int(one) for one in inner.decode(int(moment.observation)))
    rows = [[one.decode() if isinstance(one, bytes) else str(one) for one in line] for line in inner.desc]
    rows[row + 1][2 * column + 1] = "@"
    waits = "sits in the taxi" if passenger == 4 else f"waits at {_stop(passenger)}"
    facts = f"The taxi is at row {row + 1}, column {column + 1}. The passenger {waits}."
    return f"{facts} The destination is {_stop(destination)}.\n" + "\n".join("".join(line) for line in rows)


def blackjack_text(moment: Moment) -> str:
    """Return the player's cards and the dealer's."""
    total, dealer, usable_ace = (int(one) for one in moment.observation)
    ace = ", with an ace as 11" if usable_ace else ""
    return f"Your cards count {total}{ace}. The dealer shows {'an ace' if dealer == 1 else f'a {dealer}'}."


def _stop(index: int) -> str:
    row, column = STOP_AT[index]
    return f"{STOPS[index]} (row {row + 1}, column {column + 1})"


def _map(rows: list[list[str]], moment: Moment) -> str:
    row, column = divmod(int(moment.observation), len(rows[0]))
    rows[row][column] = "@"
    return f"You are at row {row + 1}, column {column + 1}.\n" + "\n".join(" ".join(line) for line in rows)


_SLIPPERY = f"{FROZEN_LAKE} {SLIPPERY}"
GAMES: Mapping[str, Game] = {
    "frozen_lake": Game("FrozenLake", _LAKE, FROZEN_LAKE, frozen_lake_text, 24, -1.0, {"is_slippery": False}),
    "frozen_lake_slippery": Game("FrozenLake", _LAKE, _SLIPPERY, frozen_lake_text, 50, -1.0, {"is_slippery": True}),
    "cliff_walking": Game("CliffWalking", _CLIFF, CLIFF_WALKING, cliff_text, 24, -100.0),
    "taxi": Game("Taxi", _TAXI, TAXI, taxi_text, 24, -10.0),
    "blackjack": Game("Blackjack", _BLACKJACK, BLACKJACK, blackjack_text, 24, -1.0),
}
"""The games by the name in a row or in the argument `game`."""


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
        self.play: Play | None = None
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

    def _best(self) -> Play:
        if self.play is None:
            self.play = Play(self.env)
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
        info = {**result.info, "optimal": float(self._was_optimal), "won": float(won(self._kind.env, moment))}
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
            return float(won(self._kind.env, moment))
        answers = moment.num_steps + moment.num_illegal
        return self.num_optimal / answers if answers and not moment.gave_up else 0.0

    def _game(self) -> TextGame:
        return getattr(self, "_text", self.game)

    def _reset_env(self, states: ResetState) -> Any:
        seed, own = states.get("seed"), self._row.get("seed")
        observation, info = self.env.reset(seed=own if own is not None and (self.row_seeds or seed is None) else seed)
        state = put(self.env, self._row)
        if state is None:
            return observation, info
        mask = getattr(self.env.unwrapped, "action_mask", None)
        return state, {**info, **({"action_mask": mask(state)} if mask is not None else {})}

    def _step_env(self, action: Any) -> Any:
        self._was_optimal = action in self._best().best(self._now().observation)
        self.num_optimal += self._was_optimal
        return self.env.step(action)
