"""Runs episodes of policies, and keeps what an audit needs of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from agentenv.chat.chat import Chat, text_of
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Limits, Message, SamplingParams, Task
from agentenv.core.views import spans_of
from agentenv.episode.loop import AgentFactory, recording_errors
from agentenv.episode.runner import derive_seed
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, Stage
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import EpisodeFailed
from agentenv.testing.audit.policies import LONG_POLICIES, AuditPolicy, View

GOLD_TURNS = 500
"""Maximum number of turns of gold: a task may need many, while other policies gain nothing from more."""
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_SHOWN_CHARS = 400
"""Maximum number of characters of an action or observation in a report."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action and its reply."""

    action: str
    observation: str
    """The observation that the policy read; empty if the episode ended here."""
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
    """Seed of the environment."""
    prompt: str
    steps: tuple[Step, ...]
    reward: float | None
    """Sum over the steps; None if the episode failed."""
    score: float | None
    stop_reason: str
    error: EpisodeError | None = None
    step_s: tuple[float, ...] = field(default=(), compare=False)
    """Seconds of each step of the environment, which differ between equal plays."""

    @property
    def key(self) -> str:
        """The policy as name/variant."""
        return f"{self.policy}/{self.variant}" if self.variant else self.policy

    @property
    def action(self) -> str:
        """The last action."""
        return self.steps[-1].action if self.steps else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, with long texts shortened."""
        steps = [
            {**asdict(step), "action": shorten(step.action), "observation": shorten(step.observation)}
            for step in self.steps
        ]
        error = None if self.error is None else asdict(self.error)
        return {
            "policy": self.key, "task_id": self.task_id, "seed": self.seed, "reward": self.reward, "score": self.score,
            "stop_reason": self.stop_reason, "error": error, "steps": steps,
        }  # fmt: skip


def shorten(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Return a text for a report, without its middle and without lone surrogates, which files cannot store."""
    if len(text) > most:
        text = f"{text[: most // 2]} …[{len(text) - most} characters]… {text[-most // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class PolicyRunner:
    """Runs policies on the tasks of an environment."""

    make_agent: AgentFactory
    tasks: Sequence[Task]
    """All tasks; policies see the labels of the others."""
    chat: Chat
    limits: Limits
    sampling: SamplingParams
    seed: int = 0
    run_turns: int = 0
    """Maximum number of turns of an episode in a run, for the policies that take as many."""

    async def play(self, policy: AuditPolicy, task: Task) -> Play | None:
        """Run one episode; return None if the policy has no action."""
        rng = Random(derive_seed(self.seed, policy.key, task.task_id))
        others = [each.label for each in self.tasks if each.task_id != task.task_id]

        async def act(episode: SteppedEpisode, prompt: str, feedback: str) -> str | None:
            gold = await _gold_action(episode) if policy.sees_gold else None
            room = (episode.asked.sampling.max_tokens if episode.asked else None) or self.limits.max_length
            before = [turn.action for turn in episode.trajectory.turns]
            tools = episode.trajectory.tools
            action = policy.act(View(prompt, feedback, len(before), rng, room - 1, others, gold, tools, before))
            return None if action is None else _SURROGATE.sub("\ufffd", action)  # as a tokenizer's decode would

        limits = self.limits
        if policy.kind == "gold" or policy.key in LONG_POLICIES:
            turns = GOLD_TURNS if policy.kind == "gold" else self.run_turns
            limits = replace(limits, max_turns=max(limits.max_turns, turns))
        return await self._run(task, act, (policy.name, policy.variant), limits)

    async def replay(self, play: Play, task: Task) -> Play:
        """Repeat the actions of a play."""
        actions = [step.action for step in play.steps]

        async def act(episode: SteppedEpisode, prompt: str, feedback: str) -> str | None:
            index = len(episode.trajectory.turns)
            return actions[index] if index < len(actions) else ""

        limits = replace(self.limits, max_turns=max(self.limits.max_turns, len(play.steps)))
        played = await self._run(task, act, (play.policy, play.variant), limits)
        return play if played is None else played

    async def _run(self, task: Task, act: Callable[..., Any], name: tuple[str, str], limits: Limits) -> Play | None:
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
                prompt = _text(episode.trajectory.prompt)  # the error is on the trajectory
            except _NoGoldError as failed:
                # Other policies that need gold are not counted.
                play = Play(
                    *name, task.task_id, episode.trajectory.seed or 0, prompt, (), None, None, "error", failed.error
                )
                return play if name[0] == "gold" else None
        has_no_turns = not episode.trajectory.turns and episode.trajectory.error is None
        return None if has_no_turns else _play(episode.trajectory, name, prompt, self.chat)


class _NoGoldError(Exception):
    """`gold` raised."""

    def __init__(self, error: EpisodeError) -> None:
        super().__init__(error.message)
        self.error = error


async def _gold_action(episode: SteppedEpisode) -> str | None:
    """Return the environment's gold action.

    Raises:
        _NoGoldError: `gold` raised an exception; it has the recorded error.
    """
    found: list[str | None] = []
    record = Trajectory(episode.trajectory.task, episode.trajectory.max_length)
    with recording_errors(record, EpisodeProgress(stage=Stage.GOLD)):
        found.append(await episode.gold())
    if record.error is not None:
        raise _NoGoldError(record.error)
    return found[0]


async def play_all(
    runner: PolicyRunner, pairs: Sequence[tuple[AuditPolicy, Task]], *, concurrency: int, notify: Callable[[int], None]
) -> list[Play]:
    """Run all pairs and return the plays in their order; `notify` gets the number of ended episodes."""
    places = asyncio.Semaphore(concurrency)
    done = 0

    async def one(policy: AuditPolicy, task: Task) -> Play | None:
        nonlocal done
        async with places:
            played = await runner.play(policy, task)
        done += 1
        notify(done)
        return played

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(policy, task)) for policy, task in pairs]
    except BaseExceptionGroup as failed:  # such as RunStopped, which ends the whole audit
        raise failed.exceptions[0] from None
    return [play for task in running if (play := task.result()) is not None]


async def replay_all(
    runner: PolicyRunner, plays: Sequence[Play], tasks: Mapping[str, Task], *, notify: Callable[[int], None]
) -> list[tuple[Play, Play]]:
    """Repeat each play alone and in the opposite order; return pairs of the first and the repeated play."""
    pairs = []
    for index, play in enumerate(reversed(plays)):
        pairs.append((play, await runner.replay(play, tasks[play.task_id])))
        notify(index + 1)
    return pairs


def _play(trajectory: Trajectory, name: tuple[str, str], prompt: str, chat: Chat) -> Play:
    steps = []
    for index, turn in enumerate(trajectory.turns):
        if turn.result is None:
            break
        ended = index + 1 == len(trajectory.turns)
        observation = "" if ended else _text(turn.result.observation)
        special = 0 if ended else _num_special(trajectory, index, chat)
        steps.append(Step(turn.action, observation, turn.result.reward, turn.result.score, special))
    return Play(
        name[0], name[1], trajectory.task.task_id, trajectory.seed or 0, prompt, tuple(steps), trajectory.reward,
        trajectory.score, str(trajectory.stop_reason or ""), trajectory.error,
        tuple(turn.step_s for turn in trajectory.turns),
    )  # fmt: skip


def _num_special(trajectory: Trajectory, turn: int, chat: Chat) -> int:
    segment = trajectory.turns[turn].segment
    return sum(
        len(chat.added_in(trajectory.segments[segment].token_ids[span.start : span.end]))
        for span in spans_of(trajectory, segment)
        if span.turn == turn and span.kind in ("close", "feedback")
    )


def _text(observation: str | Sequence[Message]) -> str:
    return observation if isinstance(observation, str) else "\n".join(map(text_of, observation))
