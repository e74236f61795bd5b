"""TextWorld's games, generated here: `--env textworld:tw-cooking --env_kwargs '{"recipe": 2, "cook": true}'`.

Source: textworld 1.7.0, challenges/, helpers.py and envs/. A game is made from its settings and the task's seed,
compiled by TextWorld's Inform 7, and played by the Frotz of jericho, native code in this process.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.core.agent import StepState
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError
from agentenv.interop.guest import Guest, OwnRandom, clipped, guest_class, import_library

CUSTOM = "custom"
"""Name of the games that `textworld.GameOptions` describe."""
_CUSTOM_SETTINGS: dict[str, Any] = {
    "nb_rooms": 5,
    "nb_objects": 10,
    "nb_parallel_quests": 1,
    "quest_length": 5,
    "quest_breadth": 1,
}
_REQUIRED = {
    "tw-simple": ("--rewards=dense", "--goal=detailed"),
    "tw-coin_collector": ("--level=5",),
    "tw-treasure_hunter": ("--level=5",),
}
"""Values of the settings that have no default in TextWorld."""
_MAX_TURNS = 50
_FILE = "tw-game.z8"
"""Frotz adds its status line to the answers of games whose names begin otherwise."""
_NOT_TYPED = re.compile(r"[^A-Za-z0-9' -]+")
"""What no command needs: Frotz ends or crashes the process with some of it, such as a backslash or a NUL."""
_MAX_CHARS = 198
"""Length of a command in Frotz."""
_REFUSED = re.compile(r"\b(?:save|restore|script|replay)\b|\b(?:transcrip|recording|tw-)[\w-]*", re.IGNORECASE)
"""Commands that write or read files, and those that debug the game. Inform compares nine letters of a word."""
_RULE = "Each of your answers is one command to the game, and nothing else. The command help lists the commands."


class TextWorldGame(Guest):
    """A game of TextWorld, made for the task's seed; `--env_kwargs` are the settings of its kind.

    The policy sees the objective and the first room, and then what the game answers to each command. The rewards are
    the game's points, and the score is their share of all points.

    info: not_a_command (0/1); at the end won and lost (0/1), moves, and the last answer as `end`.
    """

    env: Any = None
    state: Any = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        known = settings_of(self.spec.partition(":")[2])
        for name in kwargs.keys() - known.keys():
            raise ConfigError(
                f"{self.spec}: env_kwargs: expected its settings ({', '.join(known)}), got {name!r}."
                f"{did_you_mean(name, known)} Remove it."
            )

    def begin(self, seed: int) -> str:
        """Make the game, or take the one that was made before, and return its first text."""
        self._release()
        story, data = _compiled(self.spec.partition(":")[2], json.dumps(self.kwargs, sort_keys=True), seed % 2**32)
        library = _textworld()
        infos = library.EnvInfos(score=True, max_score=True, won=True, lost=True, moves=True, policy_commands=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _FILE)
            path.write_bytes(story)
            path.with_suffix(".json").write_text(data, encoding="utf-8")
            self.env = library.start(str(path), infos)
            self.state = self.env.reset()
        title, _, rest = self.state.feedback.rpartition("$$")
        return f"{_tidy(rest.partition(chr(10))[2] if title else self.state.feedback)}\n\n{_RULE}"

    def act(self, action: str) -> StepResult:
        """Type a command."""
        command = " ".join(_NOT_TYPED.sub(" ", action).split())[:_MAX_CHARS]
        refused = _REFUSED.search(command)
        if refused is not None:
            return StepResult(f"{refused[0]} is not a command of this game.", info={"not_a_command": 1.0})
        before = self.number(self.state.score or 0)
        self.state, points, done = self.env.step(command)
        score, text = self.number(points), _tidy(self.state.feedback)
        info = {"won": float(self.state.won), "lost": float(self.state.lost), "moves": float(self.state.moves)}
        return StepResult(
            "" if done else text or "The game has no answer.",
            reward=score - before,
            score=clipped(score / (self.state.max_score or 1)),
            terminated=done,
            info={**info, "end": text} if done else {},
        )

    def gold(self, states: StepState) -> str | None:  # type: ignore[override]  # in a separate thread
        """Return the next command of a shortest way to win from here, as TextWorld knows it."""
        commands = self.state.policy_commands
        return str(commands[0]) if commands else None

    def close(self) -> None:  # type: ignore[override]  # in a separate thread
        """End the game."""
        with self._in_library("close"):
            self._release()

    def _release(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            env.close()


def _tidy(text: str) -> str:
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text.replace("\r", "")).strip()


@functools.lru_cache(maxsize=64)
def _compiled(name: str, kwargs: str, seed: int) -> tuple[bytes, str]:
    """Return a game's story file and data, made once for the episodes of a task: it takes more than a second.

    TextWorld has global random numbers beside those of numpy: they are of the seed, and of the process again after it.
    """
    library = _textworld()
    settings = settings_of(name) | json.loads(kwargs)
    numbers, options = library.g_rng, library.GameOptions()
    before = numbers.seed
    options.seeds = seed
    with OwnRandom(seed).active(), tempfile.TemporaryDirectory() as folder:
        options.path = f"{folder}/{_FILE}"
        numbers.set_seed(seed)
        try:
            if name == CUSTOM:
                for key, value in settings.items():
                    setattr(options, key, value)
                game = library.generator.make_game(options)
            else:
                game = _challenges()[name][1](settings, options)
        finally:
            numbers.set_seed(before)
        path = Path(library.generator.compile_game(game, options))
        return path.read_bytes(), path.with_suffix(".json").read_text(encoding="utf-8")


@functools.cache
def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a kind of games, with their defaults; once, since an import may wait for a game's call."""
    if name == CUSTOM:
        return _CUSTOM_SETTINGS
    return dict(vars(_challenges()[name][2]().parse_args(list(_REQUIRED.get(name, ())))))


@functools.cache
def env_class(name: str) -> type[TextWorldGame]:
    """Return the class of a kind of games.

    Raises:
        ConfigError: there is no such kind.
        MissingDependency: TextWorld is not installed.
    """
    known = names()
    if name not in known:
        raise ConfigError(
            f"--env textworld:{name}: expected one of {', '.join(known)}, got an unknown name."
            f"{did_you_mean(name, known)} `agentenv list --from textworld` describes them."
        )
    return guest_class(TextWorldGame, f"textworld:{name}", f"TextWorld: {known[name]}", _MAX_TURNS)


def names() -> dict[str, str]:
    """Return the kinds of games, each with a summary: what TextWorld says of it, and its settings.

    Raises:
        MissingDependency: TextWorld is not installed.
    """
    kinds = {name: str(challenge[0]).partition(" (")[0] for name, challenge in sorted(_challenges().items())}
    kinds[CUSTOM] = "Generate rooms, objects and quests"
    return {name: f"{text.rstrip('.')}. Settings: {', '.join(settings_of(name))}." for name, text in kinds.items()}


def _challenges() -> Mapping[str, Any]:
    challenges: Mapping[str, Any] = import_library("textworld.challenges", "textworld").CHALLENGES
    return challenges


def _textworld() -> Any:
    return import_library("textworld", "textworld")
