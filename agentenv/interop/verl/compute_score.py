"""verl's `compute_score` over our rewards; the row's `data_source` chooses the reward.

In verl's configuration, without a change to its source:

    reward.custom_reward_function.path=pkg://agentenv.interop.verl.rewards
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.rewards.my_source=math

If the chat template ends prompts with `<think>`, add
`+reward.custom_reward_function.reward_kwargs.think_opened=true`.

Source: verl 0.9.1, utils/reward_score/__init__.py and trainer/ppo/reward.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

from agentenv.core.arguments import construct, number, one_of
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.grading import DEADLINE_S, enforce_bounds, grade
from agentenv.rewards.groups.statistics import INVALID_REWARD, InvalidPolicy
from agentenv.rewards.registry import make_reward, reward_from
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import Response, Reward, RewardResult

MATH_SOURCES = (
    "openai/gsm8k", "gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
    "math_dapo", "math_dapo_reasoning", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime",
    "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads", "math", "aime", "amc23", "hiyouga/geometry3k",
)  # fmt: skip
SOURCES: Mapping[str, str] = {
    **dict.fromkeys(MATH_SOURCES, "math"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco", "code"), "code"),
    **dict.fromkeys(("ifeval", "google/IFEval", "allenai/RLVR-IFeval"), "ifeval"),
    **dict.fromkeys(("ceval", "race_high", "mmlu_pro", "commonsense_qa"), "general_val"),
    **{name: name for name in ("choice", "general_val", "crossthink_qa", "detection")},
}
"""The reward of each `data_source`: the names of verl's `default_compute_score` and of ROLL's tags."""
PREFIXES: Mapping[str, str] = {"aime": "math"}
"""Rewards by the start of the `data_source`, as in verl."""


RESERVED = ("reward", "score", "acc", "reward_valid")
"""Names that no component may have: verl's validation counts a key `reward` twice, and we use the others."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options of `compute_score` and the reward manager, from `reward_kwargs`."""

    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Rewards by source, in addition to SOURCES or instead: each a reward's name, or settings for `reward_from`."""
    on_unknown: str = "raise"
    """For a `data_source` without a reward: "raise", or "invalid", which `invalid_policy` then handles."""
    invalid_policy: str = InvalidPolicy.RAISE
    """For a response without a grade: raise, zero, or keep (-999). verl has no mark to exclude one."""
    components: tuple[str, ...] = ()
    """Components of a reward to pass on, NaN if a response lacks one: verl needs the same keys in the whole batch."""
    timeout: float = DEADLINE_S
    """Longest time to grade a response, in seconds."""
    think_opened: bool | None = None
    """True if prompts end with `<think>`: a response that is cut inside the thought then has no answer. None: the
    manager checks each prompt; `compute_score`, which verl passes no prompt, assumes False."""

    def __post_init__(self) -> None:
        """Check the values."""
        where = "reward_kwargs"
        one_of(f"{where}.on_unknown", self.on_unknown, ("raise", "invalid"))
        if self.invalid_policy not in ("raise", "zero", "keep"):
            raise ConfigError(
                f"{where}.invalid_policy: expected raise, zero or keep, got {self.invalid_policy!r}. verl grades one "
                "response at a time: only RMGalleryRewardManager has a batch to mask, or a group's mean."
            )
        if isinstance(self.components, str) or set(self.components) & set(RESERVED):
            raise ConfigError(
                f"{where}.components: expected a list of names other than {', '.join(RESERVED)}, "
                f"got {self.components!r}. Rename them."
            )
        if self.think_opened not in (None, True, False):
            raise ConfigError(f"{where}.think_opened: expected true, false or null, got {self.think_opened!r}.")
        number(f"{where}.timeout", self.timeout, low=0.001)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the options in `settings`.

        Raises:
            ConfigError: a name is unknown, or a value is invalid.
        """
        components = settings.get("components", ())
        listed = components if isinstance(components, str) else tuple(components)
        return construct("reward_kwargs", cls, {**settings, "components": listed})  # type: ignore[no-any-return]


class SourceReward:
    """Grades each response by the reward of its row's `data_source`, from SOURCES and `rewards`.

    Raises:
        ConfigError: one of `rewards` does not describe a reward.
    """

    bounds = (-math.inf, math.inf)

    def __init__(self, rewards: Mapping[str, Any] | None = None) -> None:
        self._rewards = {source: reward_from(spec) for source, spec in (rewards or {}).items()}

    def check(self, sources: Iterable[object]) -> None:
        """Check that each source has a reward, before any response is graded.

        Raises:
            ConfigError: some have none; the message names all of them.
        """
        unknown = sorted({repr(source) for source in sources if self._reward(source) is None})
        if unknown:
            raise ConfigError(
                f"data_source: expected one with a reward, got {', '.join(unknown)}. Give each a reward, as in "
                "reward_kwargs.rewards.my_source=math, or set on_unknown=invalid."
            )

    async def grade(self, response: Response) -> RewardResult:
        """Return the grade by the reward of the response's source.

        Raises:
            DataError: the source has no reward.
        """
        source = response.metadata.get("data_source")
        reward = self._reward(source)
        if reward is None:
            raise DataError(f"data_source: expected one with a reward, got {source!r}. Name one in `rewards`.")
        return enforce_bounds(reward, await reward.grade(response))

    def _reward(self, source: object) -> Reward | None:
        if not isinstance(source, str):
            return None
        by_prefix = (name for prefix, name in PREFIXES.items() if source.startswith(prefix))
        name = SOURCES.get(source) or next(by_prefix, None)
        if source not in self._rewards and name is not None:
            self._rewards[source] = make_reward(name)
        return self._rewards.get(source)


def answer_of(result: RewardResult, options: ScoreOptions) -> dict[str, float]:
    """Return `score`, `acc`, `reward_valid` and the chosen components: always the same keys, and never `reward`.

    Raises:
        DataError, ContractError, InfraError: the response has no grade, and `invalid_policy` is raise.
    """
    if result.reward is None and options.invalid_policy == InvalidPolicy.RAISE:
        raise result.error("reward: no grade. Fix it, or set invalid_policy")
    zero = options.invalid_policy == InvalidPolicy.ZERO
    replacement = 0.0 if zero else INVALID_REWARD
    score = result.reward if result.reward is not None else replacement
    acc = (score if result.score is None else result.score) if result.status.valid else (0.0 if zero else math.nan)
    parts = (result.components.get(name) for name in options.components)
    values = [math.nan if part is None else float(part) for part in parts]
    answer = {"score": float(score), "acc": float(acc), "reward_valid": float(result.status.valid)}
    return answer | dict(zip(options.components, values, strict=True))


@lru_cache(maxsize=8)
def _reward_of(options_json: str) -> tuple[ScoreOptions, SourceReward]:
    options = ScoreOptions.of(json.loads(options_json))
    return options, SourceReward(options.rewards)


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Grade a response by the reward of `data_source`; a reward function for verl. See `answer_of` for the keys.

    Args:
        data_source: the row's source; SOURCES and the option `rewards` map it to a reward.
        solution_str: the response.
        ground_truth: the row's label.
        extra_info: the row's other columns.
        options: fields of `ScoreOptions`; the arguments that verl adds for its reward model are ignored.

    Raises:
        ConfigError: an option is unknown, or the source has no reward.
        DataError, ContractError, InfraError: the response has no grade; see `ScoreOptions.invalid_policy`.
    """
    ours = {name: value for name, value in options.items() if not name.startswith("reward_")}
    chosen, reward = _reward_of(json.dumps(ours, default=_as_json, sort_keys=True))
    if chosen.on_unknown == "raise":
        reward.check([data_source])
    metadata = {"data_source": data_source, "extra_info": extra_info, **(extra_info or {})}
    prompt = (extra_info or {}).get("prompt") or (extra_info or {}).get("question") or ""
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    text = with_opened_thought(solution_str, "<think>") if chosen.think_opened else solution_str
    response = Response(text, ground_truth, prompt, {**metadata, "data_source": data_source})
    return answer_of(await grade(reward, response, limit_s=chosen.timeout), chosen)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):  # OmegaConf's
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise ConfigError(f"reward_kwargs: expected JSON values, got {value!r:.200}. Name a reward instead of passing it.")
