"""Which reward judges a row, by one of its columns, and which groups are worth training on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from agentenv.errors import ConfigError, DataError
from agentenv.rewards._arguments import is_reward, number
from agentenv.rewards.grading import patience_s
from agentenv.rewards.statistics import Summary, summary
from agentenv.rewards.types import Response, Reward, RewardResult


class Router:
    """Judges each row with the reward of its domain; a row of none is an error, never another domain's.

    Args:
        rewards: by domain.
        tags: what rows say to the domain it means, `{"gsm8k": "math"}`; or, as ROLL's configuration has it, each
            domain's tags, `{"math": ["gsm8k", "math500"]}`. A domain's own name always means it.
        key: the column of the row that says it: `tag`, `domain`, `data_source`.

    Raises:
        ConfigError: no rewards, a domain without one, a tag of two domains, or tags that are none.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], tags: Mapping[str, str | Sequence[str]] | None = None, key: str = "tag"
    ) -> None:
        if not rewards:
            raise ConfigError("Router.rewards: expected rewards by domain, got none. Pass at least one.")
        for domain, reward in rewards.items():
            is_reward(f"Router.rewards[{domain!r}]", reward, "grade")
        self.rewards, self.key = dict(rewards), key
        self._domains = {domain: domain for domain in rewards} | self._read(tags or {})

    @property
    def bounds(self) -> tuple[float, float]:
        """The widest of all domains."""
        lows, highs = zip(*(reward.bounds for reward in self.rewards.values()), strict=True)
        return min(lows), max(highs)

    @property
    def patience_s(self) -> float:
        """Longest that grading may take, which `graded` keeps to where it is told nothing else: of all domains."""
        return max(patience_s(reward) for reward in self.rewards.values())

    def domain(self, response: Response) -> str:
        """The domain of a row.

        Raises:
            DataError: the row says none, or one that is not known.
        """
        tag = response.metadata.get(self.key)
        if isinstance(tag, str) and tag in self._domains:
            return self._domains[tag]
        raise DataError(
            f"{self.key}: expected one of {', '.join(sorted(self._domains))}, got {tag!r:.200}. "
            "Correct the row, or give its domain a reward."
        )

    async def grade(self, response: Response) -> RewardResult:
        """What the domain's reward says; its components differ from domain to domain.

        Raises:
            DataError: see `domain`.
        """
        return await self.rewards[self.domain(response)].grade(response)

    def _read(self, tags: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
        wrong = [value for value in tags.values() if not isinstance(value, str | list | tuple)]
        if wrong:
            raise ConfigError(f"Router.tags: expected a domain, or a list of tags, got {wrong[0]!r:.200}. Mend it.")
        pairs = [
            pair
            for name, value in tags.items()
            for pair in ([(name, value)] if isinstance(value, str) else [(tag, name) for tag in value])
        ]
        domains: dict[str, str] = {}
        for tag, domain in pairs:
            if not isinstance(domain, str) or domain not in self.rewards:
                raise ConfigError(f"Router.tags: expected a domain of {sorted(self.rewards)}, got {domain!r}. Mend it.")
            if domains.setdefault(tag, domain) != domain or (tag in self.rewards and tag != domain):
                raise ConfigError(f"Router.tags: expected one domain for {tag!r}, got two. Remove one of them.")
        return domains


GroupFilter = Callable[[Summary], str | None]
"""Why a group with these figures of its rewards is dropped; None where it is kept."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """Which groups are kept."""

    kept: Mapping[Hashable, bool]
    """By the group's key."""
    num_dropped: Mapping[str, int]
    """Groups that were dropped, by why."""

    def metrics(self, prefix: str = "rewards/filter/") -> dict[str, float]:
        """Counts of groups, for logs."""
        dropped = {f"{prefix}dropped_{reason}": float(count) for reason, count in self.num_dropped.items()}
        return {f"{prefix}kept": float(sum(self.kept.values())), f"{prefix}num_groups": float(len(self.kept))} | dropped


def filter_groups(results: Sequence[RewardResult], groups: Sequence[Hashable], keep: GroupFilter) -> Filtered:
    """Which groups `keep` keeps, by the rewards that they have; `groups` is the key of each response's group.

    Raises:
        ConfigError: not one group key per response.
    """
    if len(results) != len(groups):
        raise ConfigError(f"groups: expected a key for each of {len(results)} responses, got {len(groups)}. Pass all.")
    rewards: dict[Hashable, list[float]] = {key: [] for key in groups}
    for result, key in zip(results, groups, strict=True):
        if result.reward is not None:
            rewards[key].append(result.reward)
    reasons = {key: keep(summary(values)) for key, values in rewards.items()}
    dropped = Counter(reason for reason in reasons.values() if reason is not None)
    return Filtered({key: reason is None for key, reason in reasons.items()}, dict(dropped))


def no_filter(figures: Summary) -> str | None:
    """Keeps every group."""
    return None


def mean_filter(*, down: float = -1.0, up: float = float("inf")) -> GroupFilter:
    """Drops a group whose mean reward is at most `down` ("low") or at least `up` ("high"); the defaults are ROLL's.

    One without any reward is dropped as "invalid".
    """
    number("mean_filter.down", down, low=-float("inf"), high=float("inf"))
    number("mean_filter.up", up, low=-float("inf"), high=float("inf"))

    def keep(figures: Summary) -> str | None:
        """Why the group is dropped."""
        if figures.mean is None:
            return "invalid"
        if figures.mean <= down:
            return "low"
        return "high" if figures.mean >= up else None

    return keep


def std_filter(*, threshold: float = 0.0) -> GroupFilter:
    """Drops a group whose rewards deviate by at most `threshold` ("even"): it has nothing to learn from.

    So is one with a single reward, and one without any is "invalid".
    """
    number("std_filter.threshold", threshold, low=0.0)

    def keep(figures: Summary) -> str | None:
        """Why the group is dropped."""
        if figures.std is None:
            return "invalid"
        return "even" if figures.std <= threshold else None

    return keep
