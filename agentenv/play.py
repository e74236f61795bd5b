"""`agentenv play`: a person, or a pipe, in the policy's place.

The episode is the one loop's (`SteppedEpisode`), so that what is recorded is what a model's episode would be.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from agentenv.agent import create
from agentenv.chat import Chat, text_of
from agentenv.config import RunConfig
from agentenv.endpoint.agent import ChatAgentSource
from agentenv.episode import EpisodeKey, guarded
from agentenv.errors import ConfigError
from agentenv.loading import EnvSource, load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.metrics import Tally
from agentenv.opening import digest, load_source, load_tasks, try_constructor
from agentenv.record import RunWriter
from agentenv.runner import derive_seed
from agentenv.stepping import SteppedEpisode
from agentenv.trajectory import Trajectory
from agentenv.types import Message, StepResult, Task

HELP = '''\
A line is the action. More lines than one: """ on a line of its own, the lines, """ again.
/gold     show an action that earns the full score from here, where the environment knows one; /gold! plays it
/tokens   how long the episode is, and how much room is left
/restart  give this episode up and begin the same task anew
/quit     end; so do Ctrl-D and Ctrl-C
An action that begins with / is written with //.'''
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_FENCE, _MORE = '"""', "… "
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def play(
    config: RunConfig,
    *,
    task_index: int = 0,
    seed: int | None = None,
    with_model: bool = False,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Play the task of this index until its end, or that of the input; gives the exit code: 0, or 130 after Ctrl-C.

    Args:
        config: env, env_kwargs, data, limits, out; and model, which counts `with_model` only.
        task_index: from 0.
        seed: of the environment; None: the task's own or derived, as in a run.
        with_model: tokens are those of the model's tokenizer; else each character is one.
        stdin: where actions come from; None is the process's.
        stdout: what is shown to; None is the process's.

    Raises:
        ConfigError: a flag is wrong; nothing was played.
        EpisodeFailed: the environment failed; it is closed, and its episode is in the run directory.
    """
    screen = Screen(stdin or sys.stdin, stdout or sys.stdout)
    return asyncio.run(_play(config, screen, task_index, seed, with_model=with_model))


async def _play(config: RunConfig, screen: Screen, task_index: int, seed: int | None, *, with_model: bool) -> int:
    source = load_source(config)
    if isinstance(source, ChatAgentSource) or not isinstance(source, EnvSource):
        raise ConfigError(
            f"ENV: expected an environment with `step`, got {config.source!r}, which has a loop of its own. "
            "Run it with `agentenv run`."
        )
    tasks = load_tasks(config, source)
    if task_index >= len(tasks):
        raise ConfigError(f"--task: expected an index below {len(tasks)}, got {task_index}. Change the value.")
    task = tasks[task_index]
    if seed is None:
        seed = task.seed if task.seed is not None else derive_seed(0, task.task_id)
    await try_constructor(source, config.limits.step_timeout_s)
    game = Game(config, source, task, _chat(config, with_model=with_model), screen, seed=seed, with_model=with_model)
    if config.out is None:
        return await game.play(None)
    stored = {"flags": config.to_dict(), "resolved": {"engine": "person", "tasks": digest(tasks)}}
    with RunWriter.open(Path(config.out), stored, tally=Tally(1)) as writer:
        try:
            return await game.play(writer)
        finally:
            num = len(writer.tally)
            writer.write_metrics(writer.tally.metrics(num_tasks=1, num_samples=max(1, num), wall_s=0.0).to_dict())
            screen.note(f"run directory: {config.out}")


def _chat(config: RunConfig, *, with_model: bool) -> Chat:
    if not with_model:
        from agentenv.gym.plain_text import PlainTextTokenizer

        return Chat(PlainTextTokenizer())
    model = resolve_model(config.model)
    return Chat(load_tokenizer(model), stop_token_ids=load_stop_token_ids(model))


class Game:
    """One task, played as often as the player begins it anew."""

    def __init__(
        self, config: RunConfig, source: EnvSource, task: Task, chat: Chat, screen: Screen, *, seed: int,
        with_model: bool,
    ) -> None:  # fmt: skip
        self.config, self.source, self.task, self.chat, self.screen = config, source, task, chat, screen
        self.seed, self.with_model = seed, with_model
        self.num_begun = 0

    async def play(self, writer: RunWriter | None) -> int:
        """Play until the player leaves; gives the exit code."""
        again = True
        while again:
            key = EpisodeKey(f"{self.task.task_id}/{self.num_begun}", self.task.task_id, seed=self.seed)
            self.num_begun += 1
            make = partial(create, self.source.cls, self.source.kwargs)
            episode = SteppedEpisode(make, self.task, chat=self.chat, limits=self.config.limits, key=key)
            try:
                async with episode:
                    again = await self._episode(episode)
                if not episode.trajectory.turns and not again:
                    self.screen.note("nothing was played.")
            finally:
                if writer is not None and episode.trajectory.stop_reason is not None:
                    writer.append(episode.trajectory)
        return 130 if self.screen.interrupted else 0

    async def _episode(self, episode: SteppedEpisode) -> bool:
        """One episode; whether the player wants another."""
        screen = self.screen
        screen.note(f"{self.config.source} · task {self.task.task_id} · seed {self.seed} · /help for help")
        observation = await episode.begin()
        self._tools(episode.trajectory.tools)
        screen.says(observation)
        while not episode.over:
            said = screen.read(f"{len(episode.trajectory.turns) + 1}> ")
            if said is None or said.command == "/quit":
                return False
            if said.command == "/restart":
                return True
            action = await self._command(episode, said.command) if said.command else said.action
            if action is not None:
                self._shown(episode, await episode.act(action))
        self._end(episode)
        said = screen.read("/restart or /quit> ")
        return said is not None and said.command == "/restart"

    async def _command(self, episode: SteppedEpisode, command: str) -> str | None:
        """Do what a command says; the action to play, for /gold!."""
        if command in ("/gold", "/gold!"):
            gold = await self._gold(episode)
            return gold if command == "/gold!" else None
        if command == "/tokens":
            self.screen.note(self._tokens(episode))
        elif command == "/help":
            self.screen.note(HELP)
        else:
            self.screen.note(f"{command}: expected a command, got another word.\n{HELP}")
        return None

    async def _gold(self, episode: SteppedEpisode) -> str | None:
        """What the environment calls gold, which is shown, as is what it raises: the episode goes on."""
        found: list[str | None] = []
        record = Trajectory(self.task, self.config.max_length)

        async def asked() -> None:
            """Ask."""
            found.append(await episode.gold())

        await guarded(asked(), record, lambda: "gold")
        gold, error = found[0] if found else None, record.error
        if error is not None:
            at = f" at {error.place}" if error.place else ""
            self.screen.note(f"gold failed: {error.type}: {error.message}{at}")
        else:
            self.screen.note("the environment knows no such action." if gold is None else f"gold: {gold}")
        return gold

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if not tools:
            return
        from agentenv.gym.plain_text import tools_text

        form = "" if not self.with_model else "\n(or in the form of the model's own template)"
        self.screen.note(tools_text(tools) + form)

    def _shown(self, episode: SteppedEpisode, result: StepResult) -> None:
        """What an action brought."""
        score = "" if result.score is None else f"  score {result.score:g}"
        facts = "".join(f"  {name}={_value(value)}" for name, value in result.info.items())
        self.screen.note(f"reward {result.reward:+g}{score}{facts}")
        if self.with_model:
            self.screen.note(self._tokens(episode))
        if not episode.over:
            self.screen.says(result.observation)

    def _tokens(self, episode: SteppedEpisode) -> str:
        segment = episode.trajectory.segments[-1]
        num, unit = len(segment.token_ids), "tokens" if self.with_model else "characters"
        last = episode.trajectory.turns[-1:]
        of_last = f"{last[0].end - last[0].start} in the last action, " if last else ""
        return f"{num} {unit}, {of_last}{max(0, self.config.max_length - num)} left"

    def _end(self, episode: SteppedEpisode) -> None:
        trajectory = episode.trajectory
        score = "" if trajectory.score is None else f", score {trajectory.score:g}"
        num = len(trajectory.turns)
        reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
        self.screen.note(f"end: {trajectory.stop_reason} after {num} turns, reward {reward}{score}")


@dataclass(frozen=True, slots=True)
class Said:
    """What the player wrote."""

    text: str
    is_block: bool = False
    """Between two lines of quotes: an action, whatever it holds."""

    @property
    def command(self) -> str:
        """The command that it is; empty where it is an action."""
        word = self.text.strip()
        return word if not self.is_block and word.startswith("/") and not word.startswith("//") else ""

    @property
    def action(self) -> str:
        """The action that it is."""
        doubled = not self.is_block and self.text.lstrip().startswith("//")
        return self.text.replace("//", "/", 1) if doubled else self.text


class Screen:
    """A terminal, with colours, a line editor and a history; or a pipe, with none of these."""

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.is_terminal = stdin.isatty() and stdout.isatty()
        self.interrupted = False
        """Ctrl-C was pressed, or a signal asked to end."""
        color: Any = "auto" if stdout.isatty() else None
        self.console = Console(file=stdout, force_terminal=stdout.isatty(), color_system=color, highlight=False)

    def note(self, text: str) -> None:
        """Say something that is not the environment's."""
        self._print(text, "dim")

    def says(self, observation: str | Sequence[Message]) -> None:
        """Show what the environment says, by role."""
        messages = [{"role": "", "content": observation}] if isinstance(observation, str) else observation
        for message in messages:
            if message.get("role"):
                self._print(f"[{message['role']}]", "bold cyan")
            self._print(text_of(message), "")

    def read(self, prompt: str) -> Said | None:
        """An action or a command; None at the end of the input, or when the player interrupts.

        Blank lines are passed over; in a block of lines they are kept.
        """
        with self._interruptible():
            try:
                line = self._line(prompt)
                while line is not None and not line.strip():
                    line = self._line(prompt)
                if line is not None and line.strip() == _FENCE:
                    return self._block()
                return None if line is None else Said(line)
            except KeyboardInterrupt:
                self.interrupted = True
                self.stdout.write("\n")
                return None

    def _block(self) -> Said | None:
        lines: list[str] = []
        while (line := self._line(_MORE)) is not None and line.strip() != _FENCE:
            lines.append(line)
        return None if line is None else Said("\n".join(lines), is_block=True)

    def _line(self, prompt: str) -> str | None:
        """A line without its end; None at the end of the input."""
        if self.is_terminal and self.stdin is sys.stdin:
            import readline  # noqa: F401 - gives `input` its editor and history

            try:
                return input(prompt)
            except EOFError:
                self.stdout.write("\n")
                return None
        line = self.stdin.readline()
        if line.strip() or not line or prompt == _MORE:
            self.stdout.write(f"{prompt}{safe(line.rstrip(chr(10)))}\n")
            self.stdout.flush()
        return line.removesuffix("\n") if line else None

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """While a line is read, signals interrupt it: asyncio's own handler would wait for the line."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _print(self, text: str, style: str) -> None:
        self.console.print(Text(safe(text), style=style), soft_wrap=True)


def safe(text: str) -> str:
    """The text with control characters, escapes and marks of direction written out: a terminal obeys none."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{float(value):.4g}"
