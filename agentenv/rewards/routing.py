"""Which reward judges a row, by one of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentenv._util.brief import brief
from agentenv.core.arguments import is_reward
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.grading import check_row, patience_s
from agentenv.rewards.types import Response, Reward, RewardResult


class Router:
    """A reward that grades each row with the reward of its domain; a row without a domain is an error.

    Args:
        rewards: by domain.
        tags: the domain of each tag, `{"gsm8k": "math"}`; or, as in ROLL's configuration, each domain's tags,
            `{"math": ["gsm8k", "math500"]}`. A domain's own name is always a tag of it.
        key: the column of the row with the tag, such as `tag`, `domain` or `data_source`.

    Raises:
        ConfigError: `rewards` is empty, or has a domain without a reward, a tag of two domains, or an invalid tag.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], tags: Mapping[str, str | Sequence[str]] | None = None, key: str = "tag"
    ) -> None:
        if not rewards:
            raise ConfigError("Router.rewards: expected rewards by domain, got none. Pass at least one.")
        for domain, reward in rewards.items():
            is_reward(f"Router.rewards[{domain!r}]", reward, "grade")
        self.rewards = dict(rewards)
        self.key = key
        wrong = [value for value in (tags or {}).values() if not isinstance(value, str | list | tuple)]
        if wrong:
            raise ConfigError(f"Router.tags: expected a domain, or a list of tags, got {wrong[0]!r:.200}.")
        domains: dict[str, str] = {}
        for name, value in (tags or {}).items():
            for tag, domain in [(name, value)] if isinstance(value, str) else [(each, name) for each in value]:
                if not isinstance(domain, str) or domain not in self.rewards:
                    raise ConfigError(f"Router.tags: expected a domain of {sorted(self.rewards)}, got {domain!r}.")
                if domains.setdefault(tag, domain) != domain or (tag in self.rewards and tag != domain):
                    raise ConfigError(f"Router.tags: expected one domain for {tag!r}, got two. Remove one of them.")
        self._domains = {domain: domain for domain in rewards} | domains

    @property
    def bounds(self) -> tuple[float, float]:
        """Widest bounds of all domains."""
        lows, highs = zip(*(reward.bounds for reward in self.rewards.values()), strict=True)
        return min(lows), max(highs)

    @property
    def patience_s(self) -> float:
        """Default time limit of `grading.grade` for this reward: the longest of all domains."""
        return max(patience_s(reward) for reward in self.rewards.values())

    def domain(self, response: Response) -> str:
        """Return the domain of a row.

        Raises:
            DataError: the row has no tag, or an unknown one.
        """
        tag = response.metadata.get(self.key)
        if isinstance(tag, str) and tag in self._domains:
            return self._domains[tag]
        raise DataError(
            f"{self.key}: expected one of {', '.join(sorted(self._domains))}, got {brief(tag)}. "
            "Correct the row, or add a reward for its domain."
        )

    async def check_row(self, row: Response) -> None:
        """Raise DataError if the row has no domain, or its domain's reward cannot use it; see `grading.check_row`."""
        await check_row(self.rewards[self.domain(row)], row)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result of the domain's reward; its components differ between domains.

        Raises:
            DataError: see `domain`.
        """
        return await self.rewards[self.domain(response)].grade(response)
