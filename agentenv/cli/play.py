"""`agentenv play`: a person or a pipe replaces the policy.

The episode runs in the same loop as a model's (`SteppedEpisode`), so its record has the same form.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

from agentenv._util.calls import create
from agentenv._util.plurals import counted
from agentenv._util.terminal import safe
from agentenv.chat.chat import Chat, text_of
from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL
from agentenv.core.dataset import place_of_task
from agentenv.core.types import Limits, Message, Task
from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.episode.runner import derive_seed
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.source import EnvSource
from agentenv.episode.stepping import SteppedEpisode
from agentenv.episode.tasks import TaskSource
from agentenv.runs.config import RunConfig
from agentenv.runs.metrics import Tally
from agentenv.runs.prepare import digest, load_stepped
from agentenv.runs.records.directory import RunWriter

HELP = '''\
A line is an action. For several lines: """ on its own line, the lines, and """ again.
/gold     show an action that earns the full score from here, if the environment knows one; /gold! plays it
/label    show the label that the environment grades against
/restart  end this episode and start the same task again
/next     end this episode and start the next task
/quit     quit; so do Ctrl-D and Ctrl-C
Write // for a / at the beginning of an action.'''
_RUN_FLAGS = ("env", "env_kwargs", "max_length", "max_turns", "step_timeout_s", "out")
_FENCE, _MORE = '"""', "… "
_STARTS = ("/restart", "/next")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class PlayConfig:
    """Take the policy's place in an environment, in the terminal.

    A line is an action. Put an action of several lines between two lines of three double quotes. /help lists commands.
    Actions may come from a pipe, one per line.
    """

    env: Annotated[str, POSITIONAL]
    """An agent_func.py, or an environment: installed (`agentenv list`), module:Attr, path/file.py[:Attr], KIND:NAME."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of arguments for the environment's constructor."""
    dataset: TaskSource = field(default_factory=TaskSource)
    """Tasks."""
    task: str = "0"
    """The first task to play: its id, or the number of its row, from 0."""
    seed: int | None = None
    """Seed of the environment. Default: the task's own, or the seed that it gets in a run with --seed 0."""
    model: str | None = None
    """Model whose tokens are counted and recorded: a model that ships with the package, a folder or a Hugging Face id.
    Default: tiny-math with --out; otherwise none, and each character counts as a token."""
    out: str | None = None
    """Run directory to write; `agentenv show` and `agentenv tokens show` read it."""
    max_length: int = 1_000_000
    """Maximum number of tokens of an episode."""
    max_turns: int = 1_000
    """Maximum number of turns of an episode."""
    step_timeout_s: float = 60.0
    """Time limit of one call of the environment, in seconds."""


def play(args: Sequence[str]) -> int:
    """Take the policy's place in an environment, in the terminal."""
    config = parse(PlayConfig, "play", args)
    model = config.model or ("tiny-math" if config.out else None)
    flags: dict[str, Any] = {name: getattr(config, name) for name in _RUN_FLAGS} | vars(config.dataset)
    if model is not None:
        flags["model"] = model
    screen, with_model = Screen(sys.stdin, sys.stdout), model is not None
    return asyncio.run(_play(RunConfig.from_flags(**flags), screen, config.task, config.seed, with_model=with_model))


async def _play(config: RunConfig, screen: Screen, task: str, seed: int | None, *, with_model: bool) -> int:
    if with_model:
        model = resolve_model(config.model)
        chat = Chat(load_tokenizer(model), stop_token_ids=load_stop_token_ids(model))
    else:
        from agentenv.engines.scripted import PlainTextTokenizer

        chat = Chat(PlainTextTokenizer())
    source, tasks = await load_stepped(config, chat)
    place = place_of_task(tasks, task)
    game = Game(config, source, [*tasks[place:], *tasks[:place]], chat, screen, seed, with_model)
    if config.output.out is None:
        return await game.play(None)
    stored = {"flags": config.to_dict(), "resolved": {"engine": "person", "tasks": digest(tasks)}}
    with RunWriter.open(Path(config.output.out), stored, tally=Tally(1)) as writer:
        try:
            return await game.play(writer)
        finally:
            num = len(writer.tally)
            metrics = writer.tally.metrics(num_tasks=game.num_tasks, num_samples=max(1, num), wall_s=0.0)
            writer.write_metrics(metrics.to_dict())
            screen.note(f"run directory: {config.output.out}")


@dataclass
class Game:
    """Tasks in order, each played as often as the player starts it."""

    config: RunConfig
    source: EnvSource
    tasks: Sequence[Task]
    chat: Chat
    screen: Screen
    given_seed: int | None
    with_model: bool
    num_started: Counter[str] = field(default_factory=Counter)
    """Episodes that were started of each task, by its id."""
    num_tasks: int = 1
    """Tasks that were started."""

    @property
    def limits(self) -> Limits:
        """The limits of an episode."""
        return self.config.limits.for_env(self.source.cls)

    @property
    def task(self) -> Task:
        """The task that is played; after the last one comes the first again."""
        return self.tasks[(self.num_tasks - 1) % len(self.tasks)]

    @property
    def seed(self) -> int:
        """The seed of the environment for this task."""
        own = derive_seed(0, self.task.task_id) if self.task.seed is None else self.task.seed
        return own if self.given_seed is None else self.given_seed

    async def play(self, writer: RunWriter | None) -> int:
        """Play until the player quits, and return the exit code."""
        again = True
        while again:
            task_id = self.task.task_id
            key = EpisodeKey(f"{task_id}/{self.num_started[task_id]}", task_id, seed=self.seed)
            self.num_started[task_id] += 1
            make = partial(create, self.source.cls, self.source.kwargs)
            episode = SteppedEpisode(make, self.task, chat=self.chat, limits=self.limits, key=key)
            try:
                async with episode:
                    again = await self._episode(episode)
                if not episode.trajectory.turns and not again:
                    self.screen.note("no action was played.")
            finally:
                if writer is not None and episode.trajectory.stop_reason is not None:
                    writer.append(episode.trajectory)
        return 130 if self.screen.interrupted else 0

    async def _episode(self, episode: SteppedEpisode) -> bool:
        """Play one episode and return True if the player wants another."""
        screen = self.screen
        screen.note(f"{self.config.source} · task {self.task.task_id} · seed {self.seed} · /help for help")
        observation = await episode.begin()
        if episode.trajectory.tools:
            from agentenv.chat.tool_roles import tools_text

            form = "" if not self.with_model else "\n(or in the format of the model's chat template)"
            screen.note(tools_text(episode.trajectory.tools) + form)
        screen.show(observation)
        while not episode.over:
            entry = screen.read(f"{len(episode.trajectory.turns) + 1}> ")
            if entry is None or entry.command == "/quit":
                return False
            if entry.command in _STARTS:
                return self._starts(entry)
            action = await self._command(episode, entry.command) if entry.command else entry.action
            if action is None:
                continue
            result = await episode.act(action)
            score = "" if result.score is None else f"  score {result.score:g}"
            facts = "".join(f"  {name}={_value(value)}" for name, value in result.info.items())
            screen.note(f"reward {result.reward + 0.0:+g}{score}{facts}")
            if not episode.over:
                screen.show(result.observation)
        trajectory = episode.trajectory
        score = "" if trajectory.score is None else f", score {trajectory.score:g}"
        reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
        screen.note(
            f"end: {trajectory.stop_reason} after {counted(len(trajectory.turns), 'turn')}, reward {reward}{score}"
        )
        entry = screen.read("/restart, /next or /quit> ")
        return entry is not None and self._starts(entry)

    def _starts(self, entry: Entry) -> bool:
        """Return True if the player wants another episode, of this task or of the next."""
        self.num_tasks += entry.command == "/next"
        return entry.command in _STARTS

    async def _command(self, episode: SteppedEpisode, command: str) -> str | None:
        """Run a command, and return the action to play for /gold!."""
        if command in ("/gold", "/gold!"):
            gold, error = await episode.tried_gold()
            if error is not None:
                at = f" at {error.place}" if error.place else ""
                self.screen.note(f"gold failed: {error.type}: {error.message}{at}")
            else:
                self.screen.note("the environment knows no gold action." if gold is None else f"gold: {gold}")
            return gold if command == "/gold!" else None
        if command == "/label":
            self.screen.note(f"label: {self.task.label}")
        elif command == "/help":
            self.screen.note(HELP)
        else:
            self.screen.note(f"{command}: expected a command, got another word.\n{HELP}")
        return None


class Entry(NamedTuple):
    """What the player entered: a command, or else an action."""

    action: str
    command: str = ""


class Screen:
    """A terminal, or a pipe."""

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.interrupted = False
        """Ctrl-C was pressed, or a signal arrived."""

    def note(self, text: str) -> None:
        """Show a line that does not come from the environment."""
        self.stdout.write(f"{safe(text)}\n")
        self.stdout.flush()

    def show(self, observation: str | Sequence[Message]) -> None:
        """Show an observation of the environment, by role."""
        messages = [{"role": "", "content": observation}] if isinstance(observation, str) else observation
        for message in messages:
            if message.get("role"):
                self.note(f"[{message['role']}]")
            self.note(text_of(message))

    def read(self, prompt: str) -> Entry | None:
        """Return an action or a command; None at the end of the input or if the player interrupts.

        Blank lines are skipped, except in a block of lines.
        """
        # asyncio's own handler would wait for the line.
        before = {number: signal.signal(number, signal.default_int_handler) for number in _SIGNALS}
        try:
            line = self._line(prompt)
            while line is not None and not line.strip():
                line = self._line(prompt)
            if line is None:
                return None
            if line.strip() == _FENCE:
                lines: list[str] = []
                while (line := self._line(_MORE)) is not None and line.strip() != _FENCE:
                    lines.append(line)
                return None if line is None else Entry("\n".join(lines))
            if line.lstrip().startswith("//"):
                return Entry(line.replace("//", "/", 1))
            return Entry(line, line.strip() if line.lstrip().startswith("/") else "")
        except KeyboardInterrupt:
            self.interrupted = True
            self.stdout.write("\n")
            return None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _line(self, prompt: str) -> str | None:
        """Return a line without its newline; None at the end of the input."""
        if self.stdin is sys.stdin and self.stdin.isatty() and self.stdout.isatty():
            import readline  # noqa: F401 - adds a line editor and a history to `input`

            try:
                return input(prompt)
            except EOFError:
                self.stdout.write("\n")
                return None
        line = self.stdin.readline()
        if line.strip() or not line or prompt == _MORE:
            self.note(f"{prompt}{line.removesuffix(chr(10))}")
        return line.removesuffix("\n") if line else None


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{float(value):.4g}"
