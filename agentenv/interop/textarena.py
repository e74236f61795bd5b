"""TextArena's games of one player: `--env textarena:GuessTheNumber-v0`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError
from agentenv.interop.guest import Guest, clipped, guest_class, import_library

_ONE_PLAYER = "SinglePlayerState("
"""What the code of each game of one player has: the registry does not say how many a game takes."""
_NO_MESSAGE = "No new message."


class TextArenaGame(Guest):
    """A TextArena game of one player.

    Its text grows with each turn: the policy sees what is new, without its own action. A view that does not only grow
    (ids that end in -train) is shown whole. The reward is the game's, at its end; the score is that reward, in [0, 1].

    info of the last turn: reason (text), invalid_move (0/1), turn_count.
    """

    def begin(self, seed: int) -> str:
        """Make and reset the game, and return its rules."""
        self.env: Any = import_library("textarena", "textarena").make(self.spec.partition(":")[2], **self.kwargs)
        self.env.reset(num_players=1, seed=seed)
        self.seen = ""
        return self._new_text()

    def act(self, action: str) -> StepResult:
        """Play one move."""
        done, _ = self.env.step(action=action)
        if not done:
            return StepResult(self._new_text())
        rewards, infos = self.env.close()
        reward, facts = self.number(rewards[0]), infos[0]
        info: dict[str, float | str] = {
            "reason": str(facts.get("reason") or ""),
            "invalid_move": float(facts.get("invalid_move", False)),
            "turn_count": float(facts.get("turn_count", 0)),
        }
        return StepResult(reward=reward, score=clipped(reward), terminated=True, info=info)

    def _new_text(self) -> str:
        messages = list(self.env.state.observations[0])
        _, text = self.env.get_observation()
        actions = [message for sender, message, _ in messages if sender == 0]
        if not isinstance(text, str):  # ids that end in -raw
            return "\n".join(message for sender, message, _ in messages if sender != 0).strip() or _NO_MESSAGE
        new = text.removeprefix(self.seen)
        self.seen = text
        for message in actions:
            for sender in self.env.state.role_mapping.values():
                new = new.replace(f"\n[{sender}] {message}", "", 1)
        return new.strip() or _NO_MESSAGE


@functools.cache
def env_class(name: str) -> type[TextArenaGame]:
    """Return the class of a game by its id in TextArena.

    Raises:
        ConfigError: there is no such game, or it is one of several players.
        MissingDependency: TextArena is not installed.
    """
    known = names()
    if name not in known:
        if name in _registry():
            raise ConfigError(
                f"--env textarena:{name}: expected a game of one player, got one of several: agentenv has no policy "
                "for the other players. `agentenv list --from textarena` shows the games of one player."
            )
        raise ConfigError(
            f"--env textarena:{name}: expected a game of TextArena, got an unknown id.{did_you_mean(name, known)} "
            "`agentenv list --from textarena` shows them."
        )
    max_turns = _registry()[name].kwargs.get("max_turns")
    return guest_class(TextArenaGame, f"textarena:{name}", f"{known[name]}.", max_turns)


def names() -> dict[str, str]:
    """Return the ids of the games of one player, each with a summary: its class and its settings.

    Raises:
        MissingDependency: TextArena is not installed.
    """
    found = {}
    for name, spec in sorted(_registry().items()):
        module, _, game = str(spec.entry_point).partition(":")
        if _is_for_one_player(module):
            settings = ", ".join(f"{key}={value!r}" for key, value in spec.kwargs.items())
            found[name] = f"TextArena's {game.removesuffix('Env')}" + f" ({settings})" * bool(settings)
    return found


@functools.cache
def _is_for_one_player(module: str) -> bool:
    """Return True if the code of a game says so; importing all games would take a minute."""
    folder = Path(import_library("textarena", "textarena").__file__).parents[1]
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    return path.is_file() and _ONE_PLAYER in path.read_text(encoding="utf-8")


def _registry() -> Mapping[str, Any]:
    registry: Mapping[str, Any] = import_library("textarena", "textarena").envs.registration.ENV_REGISTRY
    return registry
