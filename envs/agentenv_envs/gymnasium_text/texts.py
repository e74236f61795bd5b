"""Every text of the games: rules, and the state of an episode. Rows and columns count from 1."""

from __future__ import annotations

from typing import Any

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


def frozen_lake_text(desc: Any, state: int) -> str:
    """Return the map with the player on it."""
    rows = [[square.decode() if isinstance(square, bytes) else str(square) for square in row] for row in desc]
    row, column = divmod(state, len(rows[0]))
    rows[row][column] = "@"
    return f"You are at row {row + 1}, column {column + 1}.\n" + _grid(rows)


def cliff_text(state: int) -> str:
    """Return the map with the player on it."""
    rows = [["."] * 12 for _ in range(3)] + [[".", *["C"] * 10, "G"]]
    row, column = divmod(state, 12)
    rows[row][column] = "@"
    return f"You are at row {row + 1}, column {column + 1}.\n" + _grid(rows)


def taxi_text(desc: Any, place: tuple[int, int, int, int]) -> str:
    """Return the map with the taxi on it, and the passenger's place and destination in words.

    Args:
        desc: the map, characters by row.
        place: the taxi's row and column, the passenger's stop (4: in the taxi), the destination.
    """
    row, column, passenger, destination = place
    rows = [[one.decode() if isinstance(one, bytes) else str(one) for one in line] for line in desc]
    rows[row + 1][2 * column + 1] = "@"
    waits = "sits in the taxi" if passenger == 4 else f"waits at {_stop(passenger)}"
    facts = f"The taxi is at row {row + 1}, column {column + 1}. The passenger {waits}."
    return f"{facts} The destination is {_stop(destination)}.\n" + "\n".join("".join(line) for line in rows)


def blackjack_text(total: int, dealer: int, usable_ace: bool) -> str:
    """Return the player's cards and the dealer's."""
    ace = ", with an ace as 11" if usable_ace else ""
    return f"Your cards count {total}{ace}. The dealer shows {'an ace' if dealer == 1 else f'a {dealer}'}."


def _stop(index: int) -> str:
    row, column = STOP_AT[index]
    return f"{STOPS[index]} (row {row + 1}, column {column + 1})"


def _grid(rows: list[list[str]]) -> str:
    return "\n".join(" ".join(row) for row in rows)
