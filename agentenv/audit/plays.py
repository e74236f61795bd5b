"""Plays of policies: episodes of the one loop, and what an audit keeps of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from agentenv.audit.policies import Policy, View
from agentenv.chat import Chat, text_of
from agentenv.episode import AgentFactory, EpisodeKey, guarded
from agentenv.errors import EpisodeFailed
from agentenv.runner import derive_seed
from agentenv.stepping import SteppedEpisode
from agentenv.trajectory import EpisodeError, Trajectory
from agentenv.types import Limits, Message, SamplingParams, Task

GOLD_TURNS = 500
"""Gold may take so many turns: what its tasks need is theirs to say, and others earn nothing by going on."""
_SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN = 400
"""Characters of an action or observation that a report shows."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action and its reply."""

    action: str
    observation: str
    """What the policy was told; empty where the episode ended here."""
    reward: float
    score: float | None
    num_special: int
    """Special tokens in the observation and around it."""


@dataclass(frozen=True, slots=True)
class Play:
    """One episode of one policy on one task."""

    policy: str
    variant: str
    task_id: str
    seed: int
    """Of the environment."""
    prompt: str
    steps: tuple[Step, ...]
    reward: float | None
    """Sum over the steps; None where the episode failed."""
    score: float | None
    stop_reason: str
    error: EpisodeError | None = None
    step_s: tuple[float, ...] = field(default=(), compare=False)
    """Seconds of each step of the environment; no part of what is the same twice."""

    @property
    def key(self) -> str:
        """name/variant of the policy."""
        return f"{self.policy}/{self.variant}" if self.variant else self.policy

    @property
    def action(self) -> str:
        """The last action."""
        return self.steps[-1].action if self.steps else ""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, long texts cut."""
        steps = [
            {**asdict(step), "action": shown(step.action), "observation": shown(step.observation)}
            for step in self.steps
        ]
        error = None if self.error is None else asdict(self.error)
        return {
            "policy": self.key, "task_id": self.task_id, "seed": self.seed, "reward": self.reward, "score": self.score,
            "stop_reason": self.stop_reason, "error": error, "steps": steps,
        }  # fmt: skip


def shown(text: str, most: int = SHOWN) -> str:
    """A text for a report: its middle left out, and no lone surrogate, which no file takes."""
    if len(text) > most:
        text = f"{text[: most // 2]} …[{len(text) - most} characters]… {text[-most // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class Table:
    """Where episodes are played: the environment, its tasks, and the rules."""

    make_agent: AgentFactory
    tasks: Sequence[Task]
    """All of them: what policies know of other rows."""
    chat: Chat
    limits: Limits
    sampling: SamplingParams
    seed: int = 0

    async def play(self, policy: Policy, task: Task) -> Play | None:
        """Play one episode; None where the policy has nothing to say."""
        rng = Random(derive_seed(self.seed, policy.key, task.task_id))
        others = [each.label for each in self.tasks if each.task_id != task.task_id]

        async def act(episode: SteppedEpisode, prompt: str, feedback: str) -> str | None:
            """What the policy says now."""
            gold = await _gold(episode) if policy.shown_gold else None
            room = (episode.asked.sampling.max_tokens if episode.asked else None) or self.limits.max_length
            turn_index = len(episode.trajectory.turns)
            action = policy.act(View(prompt, feedback, turn_index, rng, room - 1, others, gold))
            return None if action is None else _SURROGATE.sub("\ufffd", action)  # as every decode would

        limits = self.limits
        if policy.kind == "gold":
            limits = replace(limits, max_turns=max(limits.max_turns, GOLD_TURNS))
        return await self._played(task, act, (policy.name, policy.variant), limits)

    async def again(self, play: Play, task: Task) -> Play:
        """The same actions once more."""
        actions = [step.action for step in play.steps]

        async def act(episode: SteppedEpisode, prompt: str, feedback: str) -> str | None:
            """The next of them."""
            index = len(episode.trajectory.turns)
            return actions[index] if index < len(actions) else ""

        limits = replace(self.limits, max_turns=max(self.limits.max_turns, len(play.steps)))
        played = await self._played(task, act, (play.policy, play.variant), limits)
        return play if played is None else played

    async def _played(self, task: Task, act: Callable[..., Any], name: tuple[str, str], limits: Limits) -> Play | None:
        seed = task.seed if task.seed is not None else derive_seed(self.seed, task.task_id)
        key = EpisodeKey(f"audit/{task.task_id}", seed=seed)
        episode = SteppedEpisode(self.make_agent, task, chat=self.chat, sampling=self.sampling, limits=limits, key=key)
        async with episode:
            try:
                prompt = _text(await episode.begin())
                feedback = ""
                while not episode.over:
                    action = await act(episode, prompt, feedback)
                    if action is None:
                        break
                    result = await episode.act(action)
                    feedback = _text(result.observation)
            except EpisodeFailed:
                prompt = _text(episode.trajectory.prompt)  # the trajectory has the error
            except _NoGoldError as failed:
                return _without_gold(episode.trajectory, name, prompt, failed.error)
        said_nothing = not episode.trajectory.turns and episode.trajectory.error is None
        return None if said_nothing else _play(episode.trajectory, name, prompt, self.chat)


class _NoGoldError(Exception):
    """`gold` raised."""

    def __init__(self, error: EpisodeError) -> None:
        super().__init__(error.message)
        self.error = error


async def _gold(episode: SteppedEpisode) -> str | None:
    """What the environment calls gold; what it raises becomes data where all else does, on a record of its own."""
    found: list[str | None] = []
    record = Trajectory(episode.trajectory.task, episode.trajectory.max_length)

    async def asked() -> None:
        """Ask."""
        found.append(await episode.gold())

    await guarded(asked(), record, lambda: "gold")
    if record.error is not None:
        raise _NoGoldError(record.error)
    return found[0]


async def play_all(
    table: Table, pairs: Sequence[tuple[Policy, Task]], *, concurrency: int, tell: Callable[[int], None]
) -> list[Play]:
    """All pairs, so many at a time, in the order of the pairs; `tell` is told how many have ended."""
    places = asyncio.Semaphore(concurrency)
    done = 0

    async def one(policy: Policy, task: Task) -> Play | None:
        """One of them, in its turn."""
        nonlocal done
        async with places:
            played = await table.play(policy, task)
        done += 1
        tell(done)
        return played

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(policy, task)) for policy, task in pairs]
    except BaseExceptionGroup as failed:  # such as RunStopped, which one of them said of all
        raise failed.exceptions[0] from None
    return [play for task in running if (play := task.result()) is not None]


async def play_again(
    table: Table, plays: Sequence[Play], tasks: Mapping[str, Task], *, tell: Callable[[int], None]
) -> list[tuple[Play, Play]]:
    """Each play once more, alone and in the opposite order: pairs of what came first and what came now."""
    pairs = []
    for index, play in enumerate(reversed(plays)):
        pairs.append((play, await table.again(play, tasks[play.task_id])))
        tell(index + 1)
    return pairs


def _play(trajectory: Trajectory, name: tuple[str, str], prompt: str, chat: Chat) -> Play:
    steps = []
    for index, turn in enumerate(trajectory.turns):
        if turn.result is None:
            break
        ended = index + 1 == len(trajectory.turns)
        said = "" if ended else _text(turn.result.observation)
        special = 0 if ended else _num_special(trajectory, index, chat)
        steps.append(Step(turn.action, said, turn.result.reward, turn.result.score, special))
    return Play(
        name[0], name[1], trajectory.task.task_id, trajectory.seed or 0, prompt, tuple(steps), trajectory.reward,
        trajectory.score, str(trajectory.stop_reason or ""), trajectory.error,
        tuple(turn.step_s for turn in trajectory.turns),
    )  # fmt: skip


def _without_gold(trajectory: Trajectory, name: tuple[str, str], prompt: str, error: EpisodeError) -> Play | None:
    """A play that could not go on; of what is made of gold, only gold itself says so."""
    if name[0] != "gold":
        return None
    task_id, seed = trajectory.task.task_id, trajectory.seed or 0
    return Play(*name, task_id, seed, prompt, (), None, None, "error", error)


def _num_special(trajectory: Trajectory, turn: int, chat: Chat) -> int:
    segment = trajectory.turns[turn].segment
    return sum(
        len(chat.added_in(trajectory.segments[segment].token_ids[span.start : span.end]))
        for span in trajectory.spans(segment)
        if span.turn == turn and span.kind in ("close", "feedback")
    )


def _text(observation: str | Sequence[Message]) -> str:
    return observation if isinstance(observation, str) else "\n".join(map(text_of, observation))
