"""The tasks of gymnasium_text, generated from a seed: equal arguments produce equal files.

    python examples/make/game_tasks.py envs/agentenv_envs/gymnasium_text/data --count 32 --seed 0

Every game without luck can be won in `MAX_STEPS` steps, so that a run's default of 16 turns is enough. No game of luck
is played best with a single action, so that always answering "hit" or "left" never has the full score.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv_envs.gymnasium_text import env as games

MAX_STEPS = 13
FAIR_VALUE = 0.4
"""Least discounted value of a slippery lake's start: most of its play then concerns the goal."""
PROMPTS = {
    "frozen_lake": "Cross the frozen lake.",
    "frozen_lake_slippery": "Cross the frozen lake.",
    "cliff_walking": "Walk along the cliff to the goal.",
    "taxi": "Bring the passenger to the destination.",
    "blackjack": "Play this hand of blackjack.",
}


def make_rows(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` different rows of a game; all columns but the prompt are also in the label, for OpenRLHF."""
    rng = Random(f"{name}/{seed}")
    unique: dict[str, dict[str, Any]] = {}
    for columns in _COLUMNS[name](rng):
        unique.setdefault(json.dumps(columns), columns)
        if len(unique) == count:
            break
    rows = []
    for index, columns in enumerate(unique.values()):
        label = {"game": name, "seed": rng.randrange(2**31), **columns}
        rows.append({"task_id": f"{name}-{index:02d}", "prompt": PROMPTS[name], "seed": label["seed"], "label": label})
    return rows


def _lakes(rng: Random, sizes: Sequence[int] = (4, 5, 6)) -> Iterator[dict[str, Any]]:
    """Yield maps on which the goal can be reached."""
    while True:
        size = rng.choice(sizes)
        squares = [["H" if rng.random() < 0.25 else "F" for _ in range(size)] for _ in range(size)]
        squares[0][0], squares[-1][-1] = "S", "G"
        steps = _distance(squares)
        if steps is not None and steps <= MAX_STEPS:
            yield {"map": ["".join(row) for row in squares]}


def _distance(squares: list[list[str]]) -> int | None:
    size, todo, seen = len(squares), deque([(0, 0, 0)]), {(0, 0)}
    while todo:
        row, column, steps = todo.popleft()
        if squares[row][column] == "G":
            return steps
        for place in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= place[0] < size and 0 <= place[1] < size
            if inside and place not in seen and squares[place[0]][place[1]] != "H":
                seen.add(place)
                todo.append((*place, steps + 1))
    return None


def _cliffs(rng: Random) -> Iterator[dict[str, Any]]:
    places = [[row, column] for row in range(3) for column in range(12) if 2 <= 14 - row - column <= MAX_STEPS]
    rng.shuffle(places)
    yield {"start": [3, 0]}
    yield from ({"start": place} for place in places)


def _taxis(rng: Random) -> Iterator[dict[str, Any]]:
    """Yield states in which the passenger waits and the best way is short."""
    import gymnasium

    env: Any = gymnasium.make(games.newest("Taxi")).unwrapped
    values = games.action_values(env.P)
    while True:
        row, column, passenger, destination = rng.randrange(5), rng.randrange(5), rng.randrange(4), rng.randrange(4)
        if passenger == destination:
            continue
        start = at = int(env.encode(row, column, passenger, destination))
        steps, ended = 0, False
        while not ended:
            _, at, _, ended = env.P[at][games.best_actions(values[at])[0]][0]
            steps += 1
        if steps <= MAX_STEPS:
            yield {"state": start}


def _hands(rng: Random) -> Iterator[dict[str, Any]]:
    """Yield seeds of hands for which no single action is always best."""
    import gymnasium

    env = gymnasium.make(games.newest("Blackjack"))
    while True:
        seed = rng.randrange(2**31)
        if _takes_more_than_one(env, seed):
            yield {"seed": seed}


def _slippery_lakes(rng: Random) -> Iterator[dict[str, Any]]:
    """Yield maps of 4 squares a side with a fair chance, and seeds, for which no single action is always best."""
    import gymnasium

    for columns in _lakes(rng, sizes=(4,)):
        env = gymnasium.make(games.newest("FrozenLake"), desc=columns["map"], is_slippery=True)
        play, seed = games.Play(env), rng.randrange(2**31)
        if play.values is not None and play.values[0].max() >= FAIR_VALUE and _takes_more_than_one(env, seed):
            yield {**columns, "seed": seed}


def _takes_more_than_one(env: Any, seed: int) -> bool:
    """Return True if in the best play with this seed no action is a best one every time."""
    play, ended, num_steps = games.Play(env), False, 0
    always = set(range(env.action_space.n))
    observation, _ = env.reset(seed=seed)
    while not ended and num_steps < MAX_STEPS:
        best = play.best(observation)
        always &= set(best)
        observation, _, ended, _, _ = env.step(best[0])
        num_steps += 1
    return not always


_COLUMNS: dict[str, Any] = {
    "frozen_lake": _lakes, "frozen_lake_slippery": _slippery_lakes, "cliff_walking": _cliffs, "taxi": _taxis,
    "blackjack": _hands,
}  # fmt: skip


def main() -> None:
    """Write a file for each game, and one with all of them in turn, into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--count", type=int, default=32, help="tasks of each game; at most 32")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal files")
    args = parser.parse_args()
    files = {name: make_rows(name, args.count, args.seed) for name in games.GAMES}
    files["gymnasium_text"] = [row for rows in zip(*files.values(), strict=True) for row in rows]
    for name, rows in files.items():
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
