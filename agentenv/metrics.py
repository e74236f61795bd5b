"""Numbers of a run: `summarize` makes a small Summary of each episode, `aggregate` makes the Metrics of them all.

What counts how:
- reward, score and pass@k: each task counts once, whatever number of its episodes has a reward; episodes without one
  are left out and counted. Intervals hold for new tasks of the same kind: tasks, not episodes, are the draws.
- turns and info: each episode with a reward counts once. Tokens, seconds, stop reasons and errors: every episode.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, variance
from typing import Any

from agentenv.trajectory import ErrorKind, Trajectory
from agentenv.types import StopReason

_Z = 1.959963984540054
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)


@dataclass(frozen=True, slots=True)
class Summary:
    """What metrics, screen and a resumed run need to know of one episode: no tokens, no texts but an error's."""

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
    num_turns: int = 0
    num_prompt_tokens: int = 0
    """Tokens before the first action of each segment."""
    num_action_tokens: int = 0
    num_observation_tokens: int = 0
    """Tokens that the environment added after the first action."""
    num_input_tokens: int = 0
    """Tokens sent to the engine: the whole prompt of every turn."""
    num_cached_tokens: int = 0
    """Those of them that the engine still had."""
    bridges: Mapping[str, int] = field(default_factory=dict)
    """Replies by how their tokens were joined to the action (`Turn.bridge`), and "cut": those with a part left out."""
    generate_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    info_last: Mapping[str, float] = field(default_factory=dict)
    """Each number of `StepResult.info` as the last turn that has it gives it."""
    info_sum: Mapping[str, float] = field(default_factory=dict)
    """Each number of `StepResult.info`, summed over the turns."""


def summarize(trajectory: Trajectory) -> Summary:
    """The Summary of an episode."""
    turns, error = trajectory.turns, trajectory.error
    num_actions = sum(turn.end - turn.start for turn in turns)
    num_prompt = sum(s.end for i in range(len(trajectory.segments)) for s in trajectory.spans(i) if s.kind == "prompt")
    last: dict[str, float] = {}
    total: dict[str, float] = defaultdict(float)
    for turn in turns:
        for key, value in turn.result.info.items() if turn.result is not None else ():
            number = _number(value)
            if number is not None:
                last[key] = number
                total[key] += number
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
        num_turns=len(turns),
        num_prompt_tokens=num_prompt,
        num_action_tokens=num_actions,
        num_observation_tokens=trajectory.num_tokens - num_prompt - num_actions,
        num_input_tokens=sum(turn.start for turn in turns),
        num_cached_tokens=sum(turn.num_cached_tokens for turn in turns),
        bridges=Counter(
            [t.bridge for t in turns if t.bridge is not None] + ["cut" for t in turns if t.observation_cut]
        ),
        generate_s=math.fsum(turn.generate_s for turn in turns),
        step_s=math.fsum(turn.step_s for turn in turns),
        wait_s=trajectory.wait_s,
        info_last=last,
        info_sum=dict(total),
    )


def _number(value: Any) -> float | None:
    # Numbers of any library count, texts and NaN do not.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples passes: 1 - C(n-c, k) / C(n, k), unbiased, in exact integers.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.

    Raises:
        ValueError: not 0 <= num_passed <= num_samples, or not 1 <= k <= num_samples.
    """
    _check_counts(num_samples, num_passed, k)
    drawn = math.comb(num_samples, k)
    return (drawn - math.comb(num_samples - num_passed, k)) / drawn


def pass_all_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that all of k samples pass, also written pass^k: C(c, k) / C(n, k), unbiased.

    Source: Yao et al. 2024, tau-bench, section 4.

    Raises:
        ValueError: as `pass_at_k`.
    """
    _check_counts(num_samples, num_passed, k)
    return math.comb(num_passed, k) / math.comb(num_samples, k)


def _check_counts(num_samples: int, num_passed: int, k: int) -> None:
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k: expected 0 <= num_passed <= num_samples and 1 <= k <= num_samples, got n={num_samples}, "
            f"num_passed={num_passed}, k={k}. Leave out tasks with fewer than k samples."
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval."""

    mean: float | None
    """None without a task."""
    ci95_low: float | None
    """None with fewer than two tasks, from which nothing about other tasks follows."""
    ci95_high: float | None
    num_tasks: int
    """Tasks that it is the mean of."""


def mean_over_tasks(values: Sequence[float]) -> Estimate:
    """Mean and Student t interval of one value per task (for a task with several samples: their mean)."""
    if len(values) < 2:
        return Estimate(values[0] if values else None, None, None, len(values))
    half = _student_t(len(values) - 1) * math.sqrt(variance(values) / len(values))
    mean = fmean(values)
    return Estimate(mean, mean - half, mean + half, len(values))


def share_over_tasks(values: Sequence[float], num_samples: int) -> Estimate:
    """Mean and Wilson interval of one value in [0, 1] per task, each estimated from some of `num_samples` episodes.

    The interval uses the effective sample size mean (1 - mean) / (variance of the mean over tasks), at most
    `num_samples`, and the number of tasks where every value is 0 or every value is 1: ten tasks that all passed show
    [0.72, 1.0], not [1.0, 1.0]. Source: Wilson 1927; Franco et al. 2019, doi:10.1093/jssam/smy019.
    """
    if len(values) < 2:
        return Estimate(values[0] if values else None, None, None, len(values))
    mean, spread = fmean(values), variance(values) / len(values)
    size: float = len(values)
    if 0.0 < mean < 1.0:
        size = min(mean * (1.0 - mean) / spread, num_samples) if spread > 0.0 else num_samples
    scale = 1.0 + _Z**2 / size
    middle = (mean + _Z**2 / (2.0 * size)) / scale
    half = _Z * math.sqrt(mean * (1.0 - mean) / size + _Z**2 / (4.0 * size**2)) / scale
    return Estimate(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)), len(values))


def _student_t(degrees: int) -> float:
    # 97.5 % quantile: a table, then Abramowitz and Stegun 26.7.5, which is within 0.002 from there on.
    if degrees <= len(_T):
        return _T[degrees - 1]
    z, n = _Z, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of all episodes."""

    num_prompt: int
    """Before the first actions."""
    num_action: int
    """Sampled by the policy."""
    num_observation: int
    """Added by environments."""
    num_input: int
    """Sent to the engine: the whole prompt of every turn."""
    cached_share: float | None
    """Of those, what the engine still had."""


@dataclass(frozen=True, slots=True)
class Time:
    """Where the seconds went; the shares are of the time of all episodes, which overlap."""

    wall_s: float
    episodes_per_s: float | None
    action_tokens_per_s: float | None
    input_tokens_per_s: float | None
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
    num_samples: int
    """Episodes planned per task."""
    num_episodes: int
    """Episodes that ended, of num_tasks * num_samples."""
    num_missing: int
    """Planned episodes that did not end."""
    num_rewarded: int
    """Episodes with a reward: what the means are made of."""
    num_no_reward: int
    """Episodes that ended without one: failed, timed out in a step, or ended before the first action."""
    num_infra_errors: int
    """Failures of engine, grader or sandbox: the episode says nothing about policy or environment."""
    num_env_errors: int
    """Failures of the environment, its contract or the dataset row."""
    error_types: dict[str, int]
    """Failed episodes by kind and class of the exception, such as "infra:EngineError", the most frequent first."""
    stop_reasons: dict[str, int]
    """Episodes by stop reason, the most frequent first."""
    truncated_share: float | None
    """Of all episodes, those that something other than the task or an error ended."""
    reward: Estimate
    score: Estimate
    """Over the episodes that have a score."""
    num_scored: int
    pass_score: float
    """An episode passed when its score, or its reward where it has no score, is at least this."""
    pass_at_k: dict[str, Estimate]
    """By k = 1 … num_samples: at least one of k passed; over tasks with at least k episodes with a reward."""
    pass_all_k: dict[str, Estimate]
    """By k: all k passed."""
    turns_mean: float | None
    turns_max: int
    bridges: dict[str, int]
    """Replies by how their tokens were joined to the action, and "cut": those with a part left out."""
    tokens: Tokens
    time: Time
    info: dict[str, dict[str, float]]
    """By key of `StepResult.info`: "last", the mean over episodes of the last turn's value, "sum", the mean of the sum
    over turns, and "num_episodes" that have the key."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON: no NaN, no infinity."""
        return asdict(self)


def aggregate(
    summaries: Iterable[Summary], *, num_tasks: int, num_samples: int, wall_s: float, pass_score: float = 1.0
) -> Metrics:
    """The Metrics of a run that planned `num_samples` episodes for each of `num_tasks` tasks and took `wall_s`."""
    episodes = list(summaries)
    rewarded = [e for e in episodes if e.reward is not None]
    scored = [e for e in rewarded if e.score is not None]
    kinds = Counter(e.error_kind for e in episodes if e.error_kind)
    truncated = sum(e.stop_reason is not None and e.stop_reason.truncated for e in episodes)
    at_least_one, all_of = _passes(rewarded, num_samples, pass_score)
    return Metrics(
        num_tasks=num_tasks,
        num_samples=num_samples,
        num_episodes=len(episodes),
        num_missing=max(0, num_tasks * num_samples - len(episodes)),
        num_rewarded=len(rewarded),
        num_no_reward=len(episodes) - len(rewarded),
        num_infra_errors=kinds["infra"],
        num_env_errors=kinds.total() - kinds["infra"],
        error_types=_histogram(f"{e.error_kind}:{e.error_type}" for e in episodes if e.error_kind),
        stop_reasons=_histogram(str(e.stop_reason) if e.stop_reason else "unfinished" for e in episodes),
        truncated_share=_ratio(truncated, len(episodes)),
        reward=mean_over_tasks([fmean(e.reward or 0.0 for e in group) for group in _by_task(rewarded)]),
        score=_score(scored),
        num_scored=len(scored),
        pass_score=pass_score,
        pass_at_k=at_least_one,
        pass_all_k=all_of,
        turns_mean=fmean(e.num_turns for e in rewarded) if rewarded else None,
        turns_max=max((e.num_turns for e in rewarded), default=0),
        bridges=_histogram(name for e in episodes for name, num in e.bridges.items() for _ in range(num)),
        tokens=_tokens(episodes),
        time=_time(episodes, wall_s),
        info=_info(rewarded),
    )


def _score(scored: Sequence[Summary]) -> Estimate:
    """The mean score; its interval is that of a share where every score is in [0, 1], as it should be."""
    values = [fmean(e.score or 0.0 for e in group) for group in _by_task(scored)]
    in_range = all(0.0 <= value <= 1.0 for value in values)
    return share_over_tasks(values, len(scored)) if in_range else mean_over_tasks(values)


def _histogram(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _tokens(episodes: Sequence[Summary]) -> Tokens:
    num_input = sum(e.num_input_tokens for e in episodes)
    return Tokens(
        num_prompt=sum(e.num_prompt_tokens for e in episodes),
        num_action=sum(e.num_action_tokens for e in episodes),
        num_observation=sum(e.num_observation_tokens for e in episodes),
        num_input=num_input,
        cached_share=_ratio(sum(e.num_cached_tokens for e in episodes), num_input),
    )


def _time(episodes: Sequence[Summary], wall_s: float) -> Time:
    generate_s = math.fsum(e.generate_s for e in episodes)
    step_s = math.fsum(e.step_s for e in episodes)
    wait_s = math.fsum(e.wait_s for e in episodes)
    total_s = generate_s + step_s + wait_s
    return Time(
        wall_s=wall_s,
        episodes_per_s=_ratio(len(episodes), wall_s),
        action_tokens_per_s=_ratio(sum(e.num_action_tokens for e in episodes), wall_s),
        input_tokens_per_s=_ratio(sum(e.num_input_tokens for e in episodes), wall_s),
        generate_share=_ratio(generate_s, total_s),
        step_share=_ratio(step_s, total_s),
        wait_share=_ratio(wait_s, total_s),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _by_task(episodes: Iterable[Summary]) -> list[list[Summary]]:
    groups: dict[str, list[Summary]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group_id or episode.episode_id].append(episode)
    return list(groups.values())


def _passes(
    rewarded: Sequence[Summary], num_samples: int, pass_score: float
) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    counts = [(len(group), sum(_passed(e, pass_score) for e in group)) for group in _by_task(rewarded)]
    at_least_one, all_of = {}, {}
    for k in range(1, num_samples + 1):
        usable = [(num, passed) for num, passed in counts if num >= k]
        num_episodes = sum(num for num, _ in usable)
        at_least_one[str(k)] = share_over_tasks([pass_at_k(*count, k) for count in usable], num_episodes)
        all_of[str(k)] = share_over_tasks([pass_all_k(*count, k) for count in usable], num_episodes)
    return at_least_one, all_of


def _passed(episode: Summary, pass_score: float) -> bool:
    # Without the reward, an environment that scores only what it finished would have its truncated episodes left out.
    value = episode.score if episode.score is not None else episode.reward
    return value is not None and value >= pass_score


def _info(episodes: Iterable[Summary]) -> dict[str, dict[str, float]]:
    last: dict[str, list[float]] = defaultdict(list)
    total: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for key, value in episode.info_last.items():
            last[key].append(value)
            total[key].append(episode.info_sum[key])
    return {
        key: {"last": fmean(last[key]), "sum": fmean(total[key]), "num_episodes": len(last[key])}
        for key in sorted(last)
    }
