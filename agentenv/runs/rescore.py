"""`agentenv rescore`: the episodes of a run directory are graded again, without a model, into a new one.

The environment plays each episode again with the recorded actions (`RecordedActions`), or a reward grades the recorded
answer (`RecordedAnswers`). An episode that the record does not suffice for is one that failed with NotRecorded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv._util.brief import brief
from agentenv.chat.message_dialogue import MessageDialogue
from agentenv.core.engine import Engine, NoTokenizer, Tokenizer
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.types import Completion, Conversation, SamplingParams, StepResult, StopReason, Task
from agentenv.episode.loop import recording_errors
from agentenv.episode.setup import EpisodeKey, EpisodeSetup, Stage
from agentenv.errors import ConfigError, DataError
from agentenv.interop.verl.judges import judge_of
from agentenv.rewards.grading import collect_usage, grade, with_usage
from agentenv.rewards.types import Reward
from agentenv.runs.config import GroupOptions, OutputOptions, RunConfig, TrackerOptions, parsed_reward
from agentenv.runs.config_file import command_of
from agentenv.runs.group_rewards import WHERE as GROUP
from agentenv.runs.group_rewards import response_of, without_group
from agentenv.runs.mixture import mixture_of
from agentenv.runs.prepare import Job, Part, load_parts, prepare
from agentenv.runs.records.directory import RecordedEpisodes, read_config
from agentenv.runs.records.tokenizer import kept_tokenizer

_GRADED_AT = (Stage.STEP, Stage.ON_TRUNCATE, Stage.CLOSE, GROUP)
"""Where an episode may have failed that has an answer."""
_CONTEXT = 40
"""Tokens to show from where a prompt differs."""


class NotRecorded(DataError):
    """The record of an episode does not suffice to grade it again."""


class Recording:
    """The run directory whose episodes are graded again.

    Args:
        path: the run directory.
        reward: settings of the reward that grades the recorded answers, as for `--reward`; None: the environment plays
            the episodes again.
        keeps_rewards: the environment's rewards stay as they were recorded, without those of groups.

    Raises:
        ConfigError: it is not the directory of `agentenv run`, or there is no such reward.
    """

    def __init__(self, path: Path, reward: str | None = None, *, keeps_rewards: bool = False) -> None:
        self.path = path
        document: Mapping[str, Any] = read_config(path)["config"]
        flags = document.get("flags") or {}
        if command_of(flags) == "train":
            raise ConfigError(f"{path}: expected a run of `agentenv run`, got one of `agentenv train`. Name another.")
        config = replace(RunConfig.from_flags(**flags), output=OutputOptions(), trackers=TrackerOptions())
        is_replayed = reward is None and not keeps_rewards
        self.config = config if is_replayed else replace(config, groups=GroupOptions())
        """The flags of the run, without what belongs to that run alone."""
        self._resolved: Mapping[str, str] = document.get("resolved") or {}
        self._names = [str(entry["name"]) for entry in mixture_of(flags)]
        self._pass_scores: Mapping[str, float | None] = document.get("pass_scores") or {}
        self._episodes = RecordedEpisodes(path)
        self._places = {each.episode_id: place for place, each in enumerate(self._episodes.summaries)}
        self._reward_name, self._keeps_rewards = reward, keeps_rewards
        self._reward: Any = None if reward is None else judge_of(parsed_reward("--reward", reward))
        if hasattr(self._reward, "grade_group"):
            raise ConfigError(f"--reward: expected a reward of single answers, got {reward!r}. Use --group_reward.")

    @property
    def facts(self) -> dict[str, Any]:
        """What `config.json` of the new run says of this one."""
        return {
            "rescored": {
                "run": str(self.path.resolve()),
                "reward": self._reward_name,
                "keeps_rewards": self._keeps_rewards,
            }
        }

    def episode(self, episode_id: str) -> Trajectory:
        """Return an episode, read from the file.

        Raises:
            NotRecorded: there is none.
        """
        place = self._places.get(episode_id)
        if place is None:
            raise NotRecorded(f"rescore: expected the episode in {self.path}, got none. Finish that run with --resume.")
        episode = self._episodes.read(place)
        for turn in episode.turns:
            turn.num_retries = turn.num_request_retries = turn.num_failovers = 0  # they are of the recorded run
            if turn.answer is not None:  # which has paid it, too
                turn.answer = replace(turn.answer, cost_usd=None)
        return episode

    async def prepare(self, config: RunConfig) -> Job:
        """Return the job of the new run; nothing of the model is loaded but its tokenizer, if the run kept none.

        Raises:
            ConfigError: as `prepare`; the run has no episodes, or environments of other names.
        """
        without_model: dict[str, Any] = {"prices": None}
        if config.engine != "chat":
            without_model |= {"engine": "scripted", "engine_args": {}}
            if (tokenizer := kept_tokenizer(self.path)) is not None:
                without_model |= {"model": str(tokenizer), "tokenizer": None}
        local = config.with_flags(**without_model, rollout_workers=0)
        tasks: dict[str, Task] = {}
        for place, summary in enumerate(self._episodes.summaries):
            if summary.group_id not in tasks:
                tasks[summary.group_id] = self._episodes.read(place).task
        if not tasks:
            raise ConfigError(f"{self.path}: expected a run with episodes, got none. Name another.")
        source = None
        if self._reward is not None or self._keeps_rewards:
            source = RecordedAnswers(self, self._reward)
        parts = load_parts(local, source)
        self._check_names(config, parts)
        if self._keeps_rewards:
            own = [
                part.config.with_flags(pass_score=self._pass_scores.get(part.name, config.pass_score)) for part in parts
            ]
            parts = [replace(part, config=each) for part, each in zip(parts, own, strict=True)]
        job = await prepare(local, parts=parts, tasks=list(tasks.values()))
        asked = {name: value for name, value in config.flags().items() if name in without_model}
        digests = {**job.digests, "engine": self._resolved.get("engine", config.engine)}
        facts = {**job.facts, "engine": f"none: the actions of {self.path}"}
        if self._reward_name is not None:
            facts["reward"] = self._reward_name
        num, stored = len(tasks), self._resolved.get("tasks", "")
        if stored.startswith(f"{num} tasks,"):
            digests["tasks"] = stored
        elif stored:
            facts["missing"] = f"of {stored.partition(',')[0]} the record has {num}; finish that run with --resume"
        return replace(job, config=job.config.with_flags(**asked), digests=digests, facts=facts)

    def _check_names(self, config: RunConfig, parts: Sequence[Part]) -> None:
        """Raise ConfigError unless each environment of the run, by its name in a mixture, is among the parts."""
        if {*(self._names or [""])} <= {part.name for part in parts}:
            return
        wanted, advice = f"one environment, as {self.path} has", "Name one."
        if self._names:
            wanted = f"the environments of {self.path}, {' and '.join(self._names)}"
            advice = "Use --env FILE.yaml with the entries of the run: keep each `name`, and change `env` in one."
        raise ConfigError(f"--env: expected {wanted}, got {config.source!r}. {advice}")


class RecordedActions(Engine):
    """An engine that samples what a recorded episode sampled, as long as it is asked what it was asked then.

    Args:
        recording: has the episodes.
        tokenizer: that of the run; a NoTokenizer for one of `--engine chat`.
        num_cached: number of episodes that are kept in memory.
    """

    constraint_problem = ""

    def __init__(self, recording: Recording, tokenizer: Tokenizer, num_cached: int) -> None:
        self.tokenizer = tokenizer
        self._recorded = functools.lru_cache(num_cached)(lambda key: _Recorded(recording.episode(key)))

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Return the recorded action; see `core.engine.Engine`.

        Raises:
            NotRecorded: there is none, or the prompt was another one.
        """
        episode_id, _, number = request_id.rpartition("/")
        recorded, index = self._recorded(episode_id), int(number)
        episode, given = recorded.episode, recorded.given
        if index in given:  # another attempt
            given.clear()
        turns = [turn for turn in episode.turns if turn.finish_reason != "abort"]
        asked = prompt_token_ids if isinstance(prompt_token_ids, Conversation) else list(prompt_token_ids)
        for place in [index, *range(len(turns))]:  # an agent's own loop may ask in another order
            if place < len(turns) and place not in given.values() and self._asked(episode, turns[place]) == asked:
                given[index] = place
                return _completion(episode, turns[place])
        if index >= len(turns):
            ended = episode.error.message if episode.error else f"stop reason {episode.stop_reason}"
            raise NotRecorded(f"rescore: expected {index + 1} recorded actions, got {len(turns)}: {ended}")
        was, now = self._shown(self._asked(episode, turns[index]), asked)
        raise NotRecorded(
            f"rescore: expected the prompt of turn {index} as it was recorded, with {was!r}, got {now!r}. "
            "The model would have answered something else: run it again."
        )

    def _asked(self, episode: Trajectory, turn: Turn) -> Any:
        """Return what the engine was asked for an action: tokens, or a Conversation."""
        if turn.answer is None:
            return episode.segments[turn.segment].token_ids[: turn.start].tolist()
        dialogue = MessageDialogue(episode.max_length)
        dialogue.begin(episode.prompt, list(episode.tools) or None)
        for index, earlier in enumerate(episode.turns[: episode.turns.index(turn)]):
            assert earlier.result is not None  # another turn follows it
            text, _ = dialogue.action_of(_completion(episode, earlier), ())
            dialogue.parse_calls(text, index)
            dialogue.append_action([], text)
            reply = dialogue.reply_to([], text, earlier.result.observation)
            if reply is not None:
                dialogue.append_reply(reply)
        return dialogue.prompt

    def _shown(self, was: Any, now: Any) -> tuple[str, str]:
        """Return both prompts from where they differ, as texts."""
        if isinstance(was, Conversation):
            was, now = ([str(message.get("content")) for message in each.messages] for each in (was, now))
        pairs = enumerate(zip(was, now, strict=False))
        start = next((place for place, (old, new) in pairs if old != new), min(len(was), len(now)))
        first, second = was[start : start + _CONTEXT], now[start : start + _CONTEXT]
        if self.tokenizer is None or isinstance(self.tokenizer, NoTokenizer):
            return brief(first), brief(second)
        return self.tokenizer.decode(first), self.tokenizer.decode(second)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded episode, and what was given of it."""

    episode: Trajectory
    given: dict[int, int] = field(default_factory=dict)
    """The place of the turn that answered each request of this attempt, by the request's number."""


def _completion(episode: Trajectory, turn: Turn) -> Completion:
    """Return a recorded action as its engine returned it."""
    segment, span = episode.segments[turn.segment], slice(turn.start, turn.end)
    return Completion(
        tuple(segment.token_ids[span]),
        turn.finish_reason,
        turn.matched_stop,
        logprobs=tuple(segment.logprobs[span]) if turn.answer is None else None,
        policy_versions=tuple(segment.policy_versions[span]),
        num_cached_tokens=turn.num_cached_tokens,
        answer=turn.answer,
        forced=turn.forced,
    )


class RecordedAnswers:
    """An EpisodeSource of recorded episodes: a reward grades their last actions, or their own rewards stay."""

    def __init__(self, recording: Recording, reward: Reward | None) -> None:
        self._recording, self._reward = recording, reward

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Return the record of an episode with its new reward."""
        setup.progress.stage = Stage.STEP
        missing = Trajectory(task, setup.limits.max_length, key.episode_id, key.group_id, key.attempt, key.seed)
        with recording_errors(missing, setup.progress):
            return await self._graded(self._recording.episode(key.episode_id), setup, key)
        return missing

    async def _graded(self, stored: Trajectory, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        error, has_failed = stored.error, stored.reward is None
        trajectory = replace(stored, attempt=key.attempt, retried=[*key.retried], stop_reason=None, error=None)
        with recording_errors(trajectory, setup.progress):
            is_answered = bool(stored.turns) and (error is None or error.where in _GRADED_AT)
            if not is_answered or (self._reward is None and has_failed and (error is None or error.where != GROUP)):
                why = error.message if error else f"stop reason {stored.stop_reason}"
                raise NotRecorded(f"rescore: expected an answer to grade, got an episode that failed: {why}")
            if self._reward is None:
                without_group(trajectory)
            else:
                await self._grade(self._reward, trajectory, setup)
            is_whole = error is None or error.where == GROUP
            trajectory.finish(stored.stop_reason if is_whole and stored.stop_reason else StopReason.TERMINATED)
        return trajectory

    async def _grade(self, reward: Reward, trajectory: Trajectory, setup: EpisodeSetup) -> None:
        with collect_usage() as spent:
            result = await grade(reward, response_of(trajectory, reward, setup.chat.tokenizer))
        if result.reward is None:
            raise result.error("--reward")
        for turn in trajectory.turns:
            turn.result = replace(turn.result or StepResult(), reward=0.0, score=None, info={})
        for segment in trajectory.segments:
            segment.rewards = type(segment.rewards)("f", bytes(4 * len(segment)))
        last = trajectory.turns[-1].result
        assert last is not None
        parts = {name: value for name, value in result.components.items() if value is not None}
        graded = replace(last, reward=result.reward, score=result.score, info=with_usage(parts, spent))
        trajectory.set_result(graded)
