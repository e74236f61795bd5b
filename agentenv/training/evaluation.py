"""Evaluation on held-out tasks, and the metrics of a batch of episodes."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from agentenv._util.estimates import Moments
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.episode.runner import EpisodeRunner, plan
from agentenv.runs.group_rewards import GroupGrader, OpenGroups
from agentenv.runs.metrics import Metrics, Summary, aggregate, summarize


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation: held-out tasks and the runner for their episodes."""

    runner: EpisodeRunner
    """Uses the sampling parameters of evaluations, with one seed, so that evaluations are comparable."""
    sets: Mapping[str, Sequence[Task]]
    """Held-out tasks by the name of their set. Ids are different in all of them."""
    num_samples: int
    grader: GroupGrader | None = None
    """Grades groups, for --group_reward."""
    pass_scores: Mapping[str, float | None] = field(default_factory=dict)
    """As `aggregate` takes them."""

    kept_tasks: Container[str] = frozenset()
    """Tasks whose episodes are kept."""

    episodes: list[Summary] = field(default_factory=list)
    """Those of the last evaluation."""
    kept: list[Trajectory] = field(default_factory=list)
    """Those of `kept_tasks` in the last evaluation."""

    async def run(self) -> dict[str, float]:
        """Run the held-out tasks and return reward, score, pass@k, turns and infos, by keys without a prefix.

        With several sets, these are of all tasks, and those of a set have the prefix set/NAME/.

        Raises:
            RunStopped: more episodes failed than the runner's policy allows.
        """
        summaries = self.episodes
        summaries.clear()
        self.kept.clear()
        self.runner.num_done = 0
        self.runner.errors.clear()
        planned = plan([task for tasks in self.sets.values() for task in tasks], self.num_samples)

        async def record(*trajectories: Trajectory) -> None:
            summaries.extend(map(summarize, trajectories))
            self.kept.extend(each for each in trajectories if each.group_id in self.kept_tasks)

        if self.grader is None:
            await self.runner.run(planned, record)
        else:
            await OpenGroups(self.runner, self.grader, self.num_samples, record=record).run(planned)
        numbers = self._numbers_of(summaries)
        for name, tasks in self.sets.items() if len(self.sets) > 1 else ():
            ids = {task.task_id for task in tasks}
            held = [each for each in summaries if each.group_id in ids]
            numbers |= {f"set/{name}/{key}": value for key, value in self._numbers_of(held).items()}
        return numbers

    def _numbers_of(self, summaries: Sequence[Summary]) -> dict[str, float]:
        """Return `numbers_of` these episodes, and the 95 % confidence intervals of score and reward over tasks."""
        metrics = aggregate(summaries, num_samples=self.num_samples, pass_scores=self.pass_scores)
        numbers = numbers_of(metrics)
        for name, found in (("score", metrics.score), ("reward", metrics.reward)):
            if found.ci95_low is not None and found.ci95_high is not None:
                numbers |= {f"{name}_ci95_low": found.ci95_low, f"{name}_ci95_high": found.ci95_high}
        return numbers


SURVIVED = ("num_retries", "num_step_retries", "num_failovers")
"""What episodes needed to survive failures; without any, a line of metrics.jsonl has no such number."""


def numbers_of(metrics: Metrics) -> dict[str, float]:
    """Return the numbers of a batch of episodes for the log; unknown ones are left out."""
    numbers = {
        "reward": metrics.reward.mean,
        "score": metrics.score.mean,
        "turns": metrics.turns_mean,
        "truncated_share": metrics.truncated_share,
        "num_episodes": metrics.num_episodes,
        "num_failed": metrics.num_infra_errors + metrics.num_env_errors,
        "action_tokens": metrics.tokens.num_action / max(1, metrics.num_episodes),
        **{
            f"pass@{k}": estimate.mean
            for k, estimate in metrics.pass_at_k.items()
            if int(k) & (int(k) - 1) == 0 or int(k) == metrics.num_samples  # powers of two, and the last
        },
        **{f"reward/{name}": value for name, value in metrics.hygiene.numbers().items()},
        **{f"stop/{reason}": num / metrics.num_episodes for reason, num in metrics.stop_reasons.items()},
        **{f"sandbox/{level}": num / metrics.num_episodes for level, num in metrics.isolation.items()},
        **{f"info/{key}": values["last"] for key, values in metrics.info.items()},
        **{name: value for name in SURVIVED if (value := getattr(metrics, name))},
    }
    return {key: float(value) for key, value in numbers.items() if value is not None}


def spread_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the standard deviation of the rewards of a batch, exactly 0 if all are equal; empty for fewer than two."""
    rewards = [each.reward for each in summaries if each.reward is not None]
    return {"reward_std": math.sqrt(Moments(rewards).variance)} if len(rewards) > 1 else {}


def numbers_by_env(
    summaries: Sequence[Summary], *, num_samples: int, pass_scores: Mapping[str, float | None]
) -> dict[str, float]:
    """Return the numbers of each environment of a mixture, with the prefix env/NAME/; empty without a mixture."""
    numbers: dict[str, float] = {}
    for name in sorted({each.env for each in summaries if each.env}):
        episodes = [each for each in summaries if each.env == name]
        own = aggregate(episodes, num_samples=num_samples, pass_scores=pass_scores)
        numbers |= {f"env/{name}/{key}": value for key, value in numbers_of(own).items()}
    return numbers
