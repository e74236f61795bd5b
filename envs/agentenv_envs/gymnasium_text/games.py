"""The games: how each is created from a row, put in words, and played best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import DataError
from agentenv.gym.from_gymnasium import Moment, TextGame
from agentenv_envs.gymnasium_text import planning, texts

_LAKE = {"left": 0, "down": 1, "right": 2, "up": 3, "west": 0, "south": 1, "east": 2, "north": 3}
_CLIFF = {"up": 0, "right": 1, "down": 2, "left": 3, "north": 0, "east": 1, "south": 2, "west": 3}
_TAXI = {
    "south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5,
    "pick up": 4, "pick-up": 4, "drop off": 5, "drop-off": 5,
}  # fmt: skip
_BLACKJACK = {"stick": 0, "hit": 1, "stand": 0, "stay": 0}
_CLIFF_START = "a [row, column] of safe ground, from 0"


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
            raise DataError(
                f"GymnasiumText: state: expected one of the game's {len(inner.P)}, got {state!r:.60}. Fix the row."
            )
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


class Play:
    """The best play of a game: from its transitions if it has some, else from blackjack's odds."""

    def __init__(self, env: Any) -> None:
        self.env = env.unwrapped
        transitions = getattr(self.env, "P", None)
        self.values = None if transitions is None else planning.action_values(transitions)
        self.is_certain = transitions is not None and planning.is_certain(transitions)
        """True if every action has one outcome, so that the best play wins."""

    def best(self, observation: Any) -> list[int]:
        """Return the best actions in the current state."""
        if self.values is not None:
            return planning.best_actions(self.values[int(self.env.s)])
        total, dealer, usable_ace = (int(one) for one in observation)
        return planning.best_actions(planning.blackjack_values(total, dealer, bool(usable_ace)))


def _lake(moment: Moment) -> str:
    return texts.frozen_lake_text(moment.env.unwrapped.desc, int(moment.observation))


def _cliff(moment: Moment) -> str:
    return texts.cliff_text(int(moment.observation))


def _taxi(moment: Moment) -> str:
    inner = moment.env.unwrapped
    row, column, passenger, destination = (int(one) for one in inner.decode(int(moment.observation)))
    return texts.taxi_text(inner.desc, (row, column, passenger, destination))


def _blackjack(moment: Moment) -> str:
    total, dealer, usable_ace = (int(one) for one in moment.observation)
    return texts.blackjack_text(total, dealer, bool(usable_ace))


_SLIPPERY = f"{texts.FROZEN_LAKE} {texts.SLIPPERY}"
GAMES: Mapping[str, Game] = {
    "frozen_lake": Game("FrozenLake", _LAKE, texts.FROZEN_LAKE, _lake, 24, -1.0, {"is_slippery": False}),
    "frozen_lake_slippery": Game("FrozenLake", _LAKE, _SLIPPERY, _lake, 50, -1.0, {"is_slippery": True}),
    "cliff_walking": Game("CliffWalking", _CLIFF, texts.CLIFF_WALKING, _cliff, 24, -100.0),
    "taxi": Game("Taxi", _TAXI, texts.TAXI, _taxi, 24, -10.0),
    "blackjack": Game("Blackjack", _BLACKJACK, texts.BLACKJACK, _blackjack, 24, -1.0),
}
"""The games by the name in a row or in the argument `game`."""
