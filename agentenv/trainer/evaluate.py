"""Evaluation between train steps: episodes of held-out tasks with the newest weights; and the numbers of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentenv.metrics import Metrics, Summary, aggregate, summarize
from agentenv.runner import EpisodeRunner, plan
from agentenv.types import Task

if TYPE_CHECKING:
    from agentenv.trainer.batch import Batch


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
        self.runner.errors.clear()
        await self.runner.run(plan(self.tasks, self.num_samples), lambda t: summaries.append(summarize(t)))
        return numbers_of(measure(summaries, num_samples=self.num_samples))


def measure(summaries: Sequence[Summary], *, num_samples: int) -> Metrics:
    """The Metrics of a batch of episodes, `num_samples` of each task."""
    num_tasks = len({each.group_id for each in summaries})
    return aggregate(summaries, num_tasks=num_tasks, num_samples=num_samples, wall_s=0.0)


def numbers_of(metrics: Metrics) -> dict[str, float]:
    """What a batch of episodes says of the policy, one number each; what nobody knows is left out."""
    known = {
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
            if _is_told(int(k), metrics.num_samples)
        },
        **{f"reward/{name}": value for name, value in metrics.hygiene.numbers().items()},
        **{f"info/{key}": values["last"] for key, values in metrics.info.items()},
    }
    return {key: float(value) for key, value in known.items() if value is not None}


def _is_told(k: int, num_samples: int) -> bool:
    return k & (k - 1) == 0 or k == num_samples


def shares_of(metrics: Metrics) -> dict[str, float]:
    """Where the seconds of the episodes went: in the engine, in the environments' steps."""
    shares = {"generate_share": metrics.time.generate_share, "step_share": metrics.time.step_share}
    return {key: value for key, value in shares.items() if value is not None}


def ages_of(batch: Batch, version: int) -> dict[str, float]:
    """How many updates the sampled tokens of a batch are behind `version`."""
    ages_N = (version - batch.policy_versions_N).float()
    known = {"mean": float(ages_N.mean()), "max": float(ages_N.max())} if len(ages_N) else {"mean": 0.0, "max": 0.0}
    return {f"staleness_{name}": value for name, value in known.items()}


def speed_of(numbers: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Samples and action tokens per second, by the numbers of a train step's line."""
    num, tokens = numbers.get("rollout/num_episodes", 0.0), numbers.get("rollout/action_tokens", 0.0)
    return {"throughput/samples_per_s": num / wall_s, "throughput/tokens_per_s": num * tokens / wall_s}


def rejections_of(rejected: Counter[str], num_groups: int) -> dict[str, float]:
    """The share of groups that were rejected for a batch of `num_groups`, and how many for each reason."""
    num = rejected.total()
    counts = {f"num_rejected_{reason}": float(count) for reason, count in rejected.items() if count}
    return {"rejection_rate": num / (num + num_groups), **counts}
