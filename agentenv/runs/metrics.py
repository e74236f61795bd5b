"""Metrics of a run: `summarize` makes a Summary of each episode, and a `Tally` of them makes the Metrics.

What each number counts:
- reward, score and pass@k: each task counts once, for any number of its episodes with a reward. Episodes without one
  are left out and counted. Intervals hold for new tasks of the same kind: tasks are the sample, not episodes.
- turns and info: each episode with a reward counts once. Tokens, seconds, stop reasons and errors: every episode.

To add a number: its fact in `Summary` and `summarize`, its count in `_Counts`, its field in `Metrics`; the screen shows
what `display/report.py` lists.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from agentenv._util.estimates import Estimate, Moments, Passes, over_tasks
from agentenv.core.trajectory import Trajectory, with_cause
from agentenv.core.types import MAX_REWARD, StopReason
from agentenv.core.views import spans_of
from agentenv.errors import ErrorKind
from agentenv.rewards.hygiene import HygieneCounts, RewardHygiene, Style, num_marks, repeated
from agentenv.rewards.judges.protocol import JUDGE_COST
from agentenv.sandbox.types import Isolation

_LEVELS = frozenset(Isolation)
GROUP_REWARD = "group/reward"
"""Key in the last turn's info of the part of its reward that its group earned."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The data of one episode for metrics, screen and a resumed run, without tokens and texts, except an error's."""

    episode_id: str
    group_id: str
    attempt: int = 0
    reward: float | None = None
    """None when the episode failed or a turn's reward is unknown."""
    score: float | None = None
    stop_reason: StopReason | None = None
    error_kind: ErrorKind | None = None
    error_type: str = ""
    """Class name of the exception."""
    error_message: str = ""
    error_place: str = ""
    """file:line of the innermost frame of the environment's own code."""
    num_turns: int = 0
    num_prompt_tokens: int = 0
    """Tokens before the first action of each segment."""
    num_action_tokens: int = 0
    num_marks: int = 0
    repeated_share: float = 0.0
    """Of the actions: Markdown marks, and the share of word 4-grams that repeat others; 0 without a reward."""
    num_observation_tokens: int = 0
    """Tokens that the environment added after the first action."""
    num_input_tokens: int = 0
    """Tokens sent to the engine: the whole prompt of every turn."""
    num_cached_tokens: int = 0
    """Input tokens that the engine had cached."""
    bridges: Mapping[str, int] = field(default_factory=dict)
    """Replies by how their tokens were joined to the action (`Turn.bridge`), and "cut": those with a part left out."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """As `Trajectory.refusals`."""
    generate_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    info_last: Mapping[str, float] = field(default_factory=dict)
    """Each number of `StepResult.info`, from the last turn that has it."""
    info_sum: Mapping[str, float] = field(default_factory=dict)
    """Each number of `StepResult.info`, summed over the turns."""
    cost_usd: float | None = None
    """Dollars that the episode cost; None if unknown."""
    env: str = ""
    """Name of its environment in a mixture."""
    num_cut: int = 0
    """Actions that a limit of tokens cut."""
    num_step_retries: int = 0
    """Calls of `step` again in all attempts, after an InfraError that asks for it."""
    retried: Mapping[str, int] = field(default_factory=dict)
    """Errors in `Trajectory.retried`, by name."""
    num_failovers: int = 0
    """Actions that an engine failed to sample before another one did."""
    isolation: str = ""
    """`isolation` in the last `StepResult.info` that has it: the level of the sandbox of its programs."""
    num_request_retries: int = 0
    """Requests to a server that were sent again."""
    models: Mapping[str, int] = field(default_factory=dict)
    """Actions by the model that a server says to have asked."""
    refusal_reasons: Mapping[str, str] = field(default_factory=dict)
    """As `Trajectory.refusal_reasons`."""
    error_cause: str = ""
    """As `EpisodeError.cause`."""
    num_uncounted: int = 0
    """Actions whose tokens, or those of their prompt, the server did not count."""


def summarize(trajectory: Trajectory) -> Summary:
    """Return the Summary of an episode."""
    turns, error = trajectory.turns, trajectory.error
    num_actions = sum(turn.num_tokens for turn in turns)
    spans = [span for i in range(len(trajectory.segments)) for span in spans_of(trajectory, i)]
    is_text = any(turn.answer is not None for turn in turns)
    num_prompt = turns[0].num_input_tokens if is_text else sum(span.end for span in spans if span.kind == "prompt")
    last: dict[str, float] = {}
    total: dict[str, float] = defaultdict(float)
    isolation = ""
    for turn in turns:
        for key, value in turn.result.info.items() if turn.result is not None else ():
            if key == "isolation" and value in _LEVELS:
                isolation = str(value)
            # Neither text nor NaN, and no number whose sums would be infinite.
            if not isinstance(value, str) and abs(value) <= MAX_REWARD:
                last[key] = float(value)
                total[key] += last[key]
    text = "\n".join(turn.action for turn in turns) if trajectory.reward is not None else ""
    return Summary(
        trajectory.episode_id,
        trajectory.group_id,
        trajectory.attempt,
        trajectory.reward,
        trajectory.score,
        trajectory.stop_reason,
        error_kind=error.kind if error else None,
        error_type=error.type if error else "",
        error_message=error.message if error else "",
        error_place=error.place if error else "",
        num_turns=len(turns),
        num_prompt_tokens=num_prompt,
        num_action_tokens=num_actions,
        num_marks=num_marks(text),
        repeated_share=repeated(text),
        num_observation_tokens=0 if is_text else trajectory.num_tokens - num_prompt - num_actions,
        num_input_tokens=sum(turn.num_input_tokens for turn in turns),
        num_cached_tokens=sum(turn.num_cached_tokens for turn in turns),
        bridges=Counter(
            [t.bridge for t in turns if t.bridge is not None] + ["cut" for t in turns if t.observation_cut]
        ),
        refusals=trajectory.refusals,
        refusal_reasons=trajectory.refusal_reasons,
        generate_s=math.fsum(turn.generate_s for turn in turns),
        step_s=math.fsum(turn.step_s for turn in turns),
        wait_s=trajectory.wait_s,
        info_last=last,
        info_sum=dict(total),
        cost_usd=trajectory.cost_usd,
        env=trajectory.task.env,
        num_cut=sum(turn.finish_reason == "length" for turn in turns),
        num_step_retries=trajectory.num_step_retries,
        retried=Counter(trajectory.retried),
        num_failovers=sum(turn.num_failovers for turn in turns),
        isolation=isolation,
        num_request_retries=sum(turn.num_request_retries for turn in turns),
        error_cause=error.cause if error else "",
        models=Counter(turn.answer.model for turn in turns if turn.answer is not None and turn.answer.model),
        num_uncounted=sum(not turn.is_counted for turn in turns),
    )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of all episodes."""

    num_prompt: int
    """Before the first actions."""
    num_action: int
    """Sampled by the policy."""
    num_observation: int
    """Added by environments; 0 with --engine chat, whose servers do not count them apart."""
    num_input: int
    """Sent to the engine: the whole prompt of every turn."""
    cached_share: float | None
    """Share of the input tokens that the engine had cached."""
    num_uncounted: int
    """Actions of which the server of --engine chat sent no valid counts, and which the sums lack."""


@dataclass(frozen=True, slots=True)
class Time:
    """Time of a run; the shares are of the total time of all episodes, which overlap."""

    wall_s: float
    """Duration of the run, in seconds."""
    episodes_per_s: float | None
    """Episodes that ended, per second of the run."""
    action_tokens_per_s: float | None
    """Sampled tokens per second of the run."""
    input_tokens_per_s: float | None
    """Tokens sent to the engine per second of the run."""
    generate_share: float | None
    """In `Engine.generate`."""
    step_share: float | None
    """In `AgentInstance.step`."""
    wait_share: float | None
    """The rest: set-up, reset, close, and calls that failed."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The numbers of a run; the fields are the keys of `metrics.json`, and None is null there."""

    num_tasks: int
    """Tasks of the run."""
    num_samples: int
    """Episodes planned per task."""
    num_episodes: int
    """Episodes that ended, of num_tasks * num_samples."""
    num_missing: int
    """Planned episodes that did not end."""
    num_rewarded: int
    """Episodes with a reward; the means are over these."""
    num_no_reward: int
    """Episodes that ended without one: failed, timed out in a step, or ended before the first action."""
    num_retries: int
    """Attempts that an infrastructure failure ended before the last attempt of an episode, also in earlier sessions."""
    num_step_retries: int
    """Calls of `step` again, after an InfraError that asks for it, also in earlier attempts and sessions."""
    retried_errors: dict[str, int]
    """Errors after which a step or an attempt ran again, by class and cause, the most frequent first."""
    num_failovers: int
    """Actions that an engine failed to sample before another one did, in the recorded attempts."""
    num_request_retries: int
    """Requests for the recorded actions that were sent again: the server was busy, failed, or said nonsense."""
    models: dict[str, int]
    """Actions by the model that a server of chat completions named in its answer, the most frequent first."""
    isolation: dict[str, int]
    """Episodes by level of the sandbox of their programs: `isolation` of `StepResult.info`."""
    num_infra_errors: int
    """Failures of engine, grader or sandbox: independent of policy and environment."""
    num_env_errors: int
    """Failures of the environment, its contract or the dataset row."""
    error_types: dict[str, int]
    """Failed episodes by kind, class and cause, such as "infra:EngineError (429)", the most frequent first."""
    stop_reasons: dict[str, int]
    """Episodes by stop reason, the most frequent first."""
    truncated_share: float | None
    """Share of all episodes that neither the task nor an error ended."""
    reward: Estimate
    """Over the episodes with a reward."""
    score: Estimate
    """Over the episodes that have a score."""
    num_scored: int
    """Episodes with a score."""
    pass_score: float
    """An episode passed when its score, or its reward where it has no score, is at least this."""
    pass_at_k: dict[str, Estimate]
    """By k = 1 … num_samples: at least one of k passed; over tasks with k episodes with a reward; see `Passes`."""
    pass_all_k: dict[str, Estimate]
    """By k: all k passed."""
    hygiene: RewardHygiene
    turns_mean: float | None
    turns_max: int
    num_cut: int
    """Actions that a limit of tokens cut."""
    bridges: dict[str, int]
    """Replies by how their tokens were joined to the action, and "cut": those with a part left out."""
    refusals: dict[str, int]
    """Requests of agents with their own loop that got no answer, by the code of the error, the most frequent first."""
    tokens: TokenCounts
    time: Time
    cost_usd: float | None
    """Dollars that the recorded attempts of the episodes cost, for --prices; None if that is known of no episode."""
    num_priced: int
    """Episodes whose cost is known."""
    cost_per_episode_usd: float | None
    """Mean over those of them that did not fail: a failed one is only a part."""
    judge_cost: float | None
    """What judges with a price cost in the recorded attempts, in its currency; None if no judge had one."""
    info: dict[str, dict[str, float]]
    """By key of `StepResult.info`: "last", the mean over episodes of the last turn's value, "sum", the mean of the sum
    over turns, and "num_episodes" that have the key."""
    refusal_reasons: dict[str, str] = field(default_factory=dict)
    """The error of the last such request of each code."""
    num_engine_restarts: int = 0
    """How often failed engines were to be started again in this session, failed starts included."""
    environments: dict[str, Metrics] = field(default_factory=dict)
    """In a mixture: the numbers of each environment, by its name; in JSON without `time`, which they share."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON: without NaN and infinity, and `environments` in a mixture only."""
        values = asdict(self)
        for own in (environments := values.pop("environments")).values():
            del own["environments"], own["time"]
        return values | ({"environments": environments} if environments else {})


@dataclass(slots=True)
class _Group:
    """The episodes of a task that are counted so far."""

    num: int = 0
    rewards: list[float] = field(default_factory=list)
    styles: list[Style] = field(default_factory=list)  # one for each reward
    scores: list[float] = field(default_factory=list)
    num_passed: int = 0


_KINDS = ("error_types", "stop_reasons", "bridges", "refusals", "retried_errors", "isolation", "models")


class Totals(Counter[str]):
    """Sums over episodes of the numbers in a Summary, and "num_episodes"."""

    NAMES = (
        "attempt", "num_action_tokens", "num_cached_tokens", "num_cut", "num_failovers", "num_input_tokens",
        "num_observation_tokens", "num_prompt_tokens", "num_request_retries", "num_step_retries", "num_uncounted",
        "generate_s", "step_s", "wait_s",
    )  # fmt: skip

    def count(self, e: Summary) -> None:
        """Count an episode."""
        self["num_episodes"] += 1
        for name in self.NAMES:
            self[name] += getattr(e, name)

    def time(self, wall_s: float) -> Time:
        """Return the Time of a run of `wall_s` seconds."""
        total_s = self["generate_s"] + self["step_s"] + self["wait_s"]
        return Time(
            wall_s=wall_s,
            episodes_per_s=_ratio(self["num_episodes"], wall_s),
            action_tokens_per_s=_ratio(self["num_action_tokens"], wall_s),
            input_tokens_per_s=_ratio(self["num_input_tokens"], wall_s),
            generate_share=_ratio(self["generate_s"], total_s),
            step_share=_ratio(self["step_s"], total_s),
            wait_share=_ratio(self["wait_s"], total_s),
        )


class _Counts:
    """The running counts behind Metrics. The episodes of a task are folded in and dropped when all are there."""

    def __init__(
        self,
        pass_score: float | None,
        group_size: int | None,
        pass_scores: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:
        self.pass_scores = dict(pass_scores)
        self.group_size, self.passes = group_size, Passes(pass_score)
        self.reward_low = self.score_low = math.inf
        self.reward_high = self.score_high = -math.inf
        self.num_truncated = self.turns = self.turns_max = 0
        self.totals = Totals()
        self.kinds: dict[str, Counter[str]] = defaultdict(Counter)
        """Counts of errors, stop reasons, bridges, refusals and retried errors, by name of the field of Metrics."""
        self.refusal_reasons: dict[str, str] = {}
        self.info: dict[str, tuple[Moments, Moments]] = {}
        self.rewards, self.scores, self.task_rewards, self.task_scores = (Moments() for _ in range(4))
        self.cost, self.whole_cost, self.judge_cost = Moments(), Moments(), Moments()
        self.hygiene = HygieneCounts()
        self.open: dict[str, _Group] = {}

    def add(self, e: Summary) -> None:
        """Count an episode."""
        self.totals.count(e)
        self.num_truncated += e.stop_reason is not None and e.stop_reason.truncated
        self.kinds["stop_reasons"][str(e.stop_reason) if e.stop_reason else "unfinished"] += 1
        if e.error_kind:
            self.kinds["error_types"][f"{e.error_kind}:{with_cause(e.error_type, e.error_cause)}"] += 1
        kinds = {"bridges": e.bridges, "refusals": e.refusals, "retried_errors": e.retried, "models": e.models}
        kinds["isolation"] = {e.isolation: 1} if e.isolation else {}
        for field_name, counts in kinds.items():
            for kind, num in counts.items():  # `Counter.update` is slow for few values
                self.kinds[field_name][kind] += num
        self.refusal_reasons.update(e.refusal_reasons)
        if e.cost_usd is not None:
            self.cost.add(e.cost_usd)
            if e.error_kind is None:
                self.whole_cost.add(e.cost_usd)
        if JUDGE_COST in e.info_sum:
            self.judge_cost.add(e.info_sum[JUDGE_COST])
        key = e.group_id or e.episode_id
        group = self.open.get(key)
        if group is None:
            group = self.open[key] = _Group()
        group.num += 1
        if e.reward is not None:
            self.turns, self.turns_max = self.turns + e.num_turns, max(self.turns_max, e.num_turns)
            self.hygiene.add_info(e.info_sum)
            for name, value in e.info_last.items():
                last, total = self.info.setdefault(name, (Moments(), Moments()))
                last.add(value)
                total.add(e.info_sum[name])
            self.rewards.add(e.reward)
            group.rewards.append(e.reward)
            length = None if e.num_uncounted else e.num_action_tokens
            group.styles.append(Style(length, e.num_marks, e.repeated_share))
            own_reward = e.reward - e.info_last.get(GROUP_REWARD, 0.0)
            group.num_passed += self.passes.passed(own_reward, e.score, self.pass_scores.get(e.env))
            if e.score is not None:
                self.scores.add(e.score)
                group.scores.append(e.score)
        if group.num == self.group_size:
            self._fold(self.open.pop(key))

    def _fold(self, group: _Group) -> None:
        if group.rewards:
            self.task_rewards.add(fmean(group.rewards))
            self.reward_low = min(self.reward_low, *group.rewards)
            self.reward_high = max(self.reward_high, *group.rewards)
            self.hygiene.add_group(group.rewards, group.styles)
            self.passes.add(len(group.rewards), group.num_passed)
        if group.scores:
            self.task_scores.add(fmean(group.scores))
            self.score_low = min(self.score_low, *group.scores)
            self.score_high = max(self.score_high, *group.scores)

    def metrics(self, num_tasks: int, num_samples: int, wall_s: float) -> Metrics:
        """Return the Metrics. Nothing can be counted afterwards."""
        while self.open:
            self._fold(self.open.popitem()[1])
        totals, num, num_rewarded = self.totals, self.totals["num_episodes"], self.rewards.num
        kinds: dict[str, Any] = {name: dict(self.kinds[name].most_common()) for name in _KINDS}
        num_infra = sum(num for name, num in kinds["error_types"].items() if name.startswith("infra:"))
        at_least_one, all_of = self.passes.estimates(num_samples)
        return Metrics(
            num_tasks=num_tasks,
            num_samples=num_samples,
            num_episodes=num,
            num_missing=max(0, num_tasks * num_samples - num),
            num_rewarded=num_rewarded,
            num_no_reward=num - num_rewarded,
            num_retries=totals["attempt"],
            num_step_retries=totals["num_step_retries"],
            num_failovers=totals["num_failovers"],
            num_request_retries=totals["num_request_retries"],
            num_infra_errors=num_infra,
            num_env_errors=sum(kinds["error_types"].values()) - num_infra,
            truncated_share=_ratio(self.num_truncated, num),
            reward=over_tasks(self.task_rewards, self.rewards.num, self.reward_low, self.reward_high),
            score=over_tasks(self.task_scores, self.scores.num, self.score_low, self.score_high),
            num_scored=self.scores.num,
            pass_score=self.passes.pass_score,
            pass_at_k=at_least_one,
            pass_all_k=all_of,
            hygiene=self.hygiene.hygiene(),
            turns_mean=_ratio(self.turns, num_rewarded),
            turns_max=self.turns_max,
            num_cut=totals["num_cut"],
            tokens=TokenCounts(
                num_prompt=totals["num_prompt_tokens"],
                num_action=totals["num_action_tokens"],
                num_observation=totals["num_observation_tokens"],
                num_input=totals["num_input_tokens"],
                cached_share=_ratio(totals["num_cached_tokens"], totals["num_input_tokens"]),
                num_uncounted=totals["num_uncounted"],
            ),
            time=totals.time(wall_s),
            cost_usd=self.cost.total if self.cost.num else None,
            num_priced=self.cost.num,
            cost_per_episode_usd=self.whole_cost.mean,
            judge_cost=self.judge_cost.total if self.judge_cost.num else None,
            refusal_reasons=self.refusal_reasons,
            info={
                key: {"last": last.mean or 0.0, "sum": total.mean or 0.0, "num_episodes": last.num}
                for key, (last, total) in sorted(self.info.items())
            },
            **kinds,
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean(folded: Moments, others: Iterable[Sequence[float]]) -> float | None:
    means = [fmean(values) for values in others if values]
    num = folded.num + len(means)
    return (folded.total + math.fsum(means)) / num if num else None


class Tally:
    """Counts the episodes of a run as they end, for its Metrics; its size does not grow with episodes that succeed.

    A failed episode is kept, since a later attempt may replace it. A successful one is counted exactly once and
    dropped when all `group_size` episodes of its task are counted.

    Args:
        group_size: episodes planned per task; None keeps every task open, for any number of them.
        pass_score: as `Passes` takes it.
        pass_scores: that of each environment of a mixture, by name.
    """

    def __init__(
        self,
        group_size: int | None = None,
        *,
        pass_score: float | None = None,
        pass_scores: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:
        self.failed: dict[str, Summary] = {}
        """Episodes whose last attempt failed, by id."""
        self.finished: set[str] = set()
        """Episodes that did not fail."""
        self._counts = _Counts(pass_score, group_size, pass_scores)
        self._by_env = {name: _Counts(score, group_size) for name, score in pass_scores.items()}

    def add(self, summary: Summary) -> None:
        """Count an episode instead of its failed attempts."""
        if (key := summary.episode_id) in self.finished:
            return
        if summary.error_kind is not None:
            self.failed[key] = summary
        else:
            self.failed.pop(key, None)
            self.finished.add(key)
            self._counts.add(summary)
            if summary.env in self._by_env:
                self._by_env[summary.env].add(summary)

    def __len__(self) -> int:
        return len(self.finished) + len(self.failed)

    def means(self) -> tuple[float | None, float | None]:
        """Return the mean reward and the mean score so far, over tasks as in Metrics; may be called from any thread."""
        counts = self._counts
        groups = list(counts.open.values())
        return (
            _mean(counts.task_rewards, [group.rewards for group in groups]),
            _mean(counts.task_scores, [group.scores for group in groups]),
        )

    def metrics(
        self,
        *,
        num_tasks: int,
        num_samples: int,
        wall_s: float,
        env_tasks: Mapping[str, int] = MappingProxyType({}),
    ) -> Metrics:
        """Return the Metrics of a run that planned `num_samples` episodes for each of `num_tasks` tasks.

        `env_tasks` are the numbers of tasks of the environments in a mixture.
        """
        counts, by_env = deepcopy((self._counts, self._by_env))
        for summary in self.failed.values():
            for each in (counts, by_env.get(summary.env)):
                if each is not None:
                    each.add(summary)
        environments = {name: each.metrics(env_tasks[name], num_samples, wall_s) for name, each in by_env.items()}
        return replace(counts.metrics(num_tasks, num_samples, wall_s), environments=environments)


def aggregate(
    summaries: Iterable[Summary], *, num_samples: int, pass_scores: Mapping[str, float | None] = MappingProxyType({})
) -> Metrics:
    """Return the Metrics of a batch of episodes, `num_samples` per task, each of which must occur once.

    `pass_scores` are those of environments by name, "" is that of the only one.
    """
    counts = _Counts(None, None, pass_scores)
    for summary in summaries:
        counts.add(summary)
    return counts.metrics(len(counts.open), num_samples, 0.0)
