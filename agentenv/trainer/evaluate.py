"""Evaluation between train steps: episodes of held-out tasks with the newest weights; and the numbers of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentenv.metrics import Metrics, Summary, aggregate, summarize
from agentenv.runner import EpisodeRunner, plan
from agentenv.trajectory import Trajectory
from agentenv.types import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out tasks and how they are run."""

    runner: EpisodeRunner
    """With the sampling of evaluations; its seed makes every evaluation draw alike."""
    tasks: Sequence[Task]
    num_samples: int

    async def run(self) -> dict[str, float]:
        """Reward, score, pass@k, turns and infos over the held-out tasks; keys without a prefix.

        Raises:
            RunStopped: more episodes failed than the runner's policy allows.
        """
        summaries: list[Summary] = []
        self.runner.num_done = self.runner.num_failed = 0
        await self.runner.run(plan(self.tasks, self.num_samples), lambda t: summaries.append(summarize(t)))
        numbers = numbers_of(summaries, num_samples=self.num_samples)
        return numbers


def numbers_of(summaries: Iterable[Summary], *, num_samples: int) -> dict[str, float]:
    """What a batch of episodes says of the policy, one number each; what nobody knows is left out."""
    summaries = list(summaries)
    metrics = aggregate(
        summaries, num_tasks=len({each.group_id for each in summaries}), num_samples=num_samples, wall_s=0.0
    )
    known = {
        "reward": metrics.reward.mean,
        "score": metrics.score.mean,
        "turns": metrics.turns_mean,
        "truncated_share": metrics.truncated_share,
        "num_episodes": metrics.num_episodes,
        "num_failed": metrics.num_infra_errors + metrics.num_env_errors,
        "action_tokens": metrics.tokens.num_action / max(1, metrics.num_episodes),
        **{f"pass@{k}": estimate.mean for k, estimate in metrics.pass_at_k.items() if _is_told(int(k), num_samples)},
        **{f"info/{key}": values["last"] for key, values in metrics.info.items()},
    }
    return {key: float(value) for key, value in known.items() if value is not None}


def _is_told(k: int, num_samples: int) -> bool:
    return k & (k - 1) == 0 or k == num_samples


def shares_of(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Where the seconds of the episodes went: in the engine, in the environments' steps."""
    metrics: Metrics = aggregate(map(summarize, trajectories), num_tasks=1, num_samples=1, wall_s=0.0)
    shares = {"generate_share": metrics.time.generate_share, "step_share": metrics.time.step_share}
    return {key: value for key, value in shares.items() if value is not None}
