"""verl's `compute_score` over our rewards, which it chooses by `data_source`.

In verl's configuration, without its source being touched:

    reward.custom_reward_function.path=pkg://agentenv.interop.verl_rewards
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.rewards.my_source=math

Where the chat template ends prompts with `<think>`, `+reward.custom_reward_function.reward_kwargs.think_opened=true`.

Source: verl 0.9.1, utils/reward_score/__init__.py and trainer/ppo/reward.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Self

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards._arguments import number, one_of
from agentenv.rewards.grading import DEADLINE_S, graded, within_bounds
from agentenv.rewards.invalid import INVALID_REWARD, InvalidPolicy
from agentenv.rewards.registry import make_reward, reward_from
from agentenv.rewards.text import with_opened_thought
from agentenv.rewards.types import Response, Reward, RewardResult, Status

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
"""The reward of each `data_source`; the names that verl's own `default_compute_score` and ROLL's tags have."""
PREFIXES: Mapping[str, str] = {"aime": "math"}
"""By the beginning of the name, as verl has it."""


RESERVED = ("reward", "score", "acc", "reward_valid")
"""No component may be called so: verl's validation counts a key `reward` twice, the others are ours."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What `compute_score` and the reward manager may be told in `reward_kwargs`."""

    rewards: Mapping[str, Any] = field(default_factory=dict)
    """By source, more than SOURCES has or instead: each a reward's name, or settings as `reward_from` has them."""
    on_unknown: str = "raise"
    """A `data_source` without a reward: "raise", or "invalid", which `invalid_policy` then deals with."""
    invalid_policy: str = InvalidPolicy.RAISE
    """A response that nobody could grade: raise, zero, or keep, which is -999. verl has no mark to leave one out."""
    components: tuple[str, ...] = ()
    """The parts of a reward to pass on, NaN where a response lacks one: verl needs the same keys for all of a batch."""
    timeout: float = DEADLINE_S
    """Longest that grading a response may take, in seconds."""
    think_opened: bool | None = None
    """Whether prompts end with `<think>`: what is cut inside of the thought is then no answer. None: the manager looks
    at each prompt; `compute_score`, which verl shows none, takes it for false."""

    def __post_init__(self) -> None:
        """Refuse what none of this can be."""
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
            raise ConfigError(
                f"{where}.think_opened: expected true, false or null, got {self.think_opened!r}. Correct it."
            )
        number(f"{where}.timeout", self.timeout, low=0.001)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The options of those names.

        Raises:
            ConfigError: one has no such name, or a value that it cannot have.
        """
        known = {each.name for each in fields(cls)}
        if unknown := given.keys() - known:
            raise ConfigError(
                f"reward_kwargs: expected some of {', '.join(sorted(known))}, got {sorted(unknown)}. Correct the names."
            )
        components = given.get("components", ())
        listed = components if isinstance(components, str) else tuple(components)
        return cls(**{**given, "components": listed})


class SourceReward:
    """Judges each response by the reward of its row's `data_source`; SOURCES say which, `rewards` more of them.

    Raises:
        ConfigError: one of `rewards` describes no reward.
    """

    bounds = (-math.inf, math.inf)

    def __init__(self, rewards: Mapping[str, Any] | None = None) -> None:
        self._made = {source: reward_from(spec) for source, spec in (rewards or {}).items()}

    def check(self, sources: Iterable[object]) -> None:
        """See that there is a reward for each of them, before any response is graded.

        Raises:
            ConfigError: for some there is none; all of them are named.
        """
        unknown = sorted({repr(source) for source in sources if self._reward(source) is None})
        if unknown:
            raise ConfigError(
                f"data_source: expected one with a reward, got {', '.join(unknown)}. Give each a reward, as in "
                "reward_kwargs.rewards.my_source=math, or set on_unknown=invalid."
            )

    async def grade(self, response: Response) -> RewardResult:
        """What the reward of its source says.

        Raises:
            DataError: there is none for its source.
        """
        source = response.metadata.get("data_source")
        reward = self._reward(source)
        if reward is None:
            raise DataError(f"data_source: expected one with a reward, got {source!r}. Name one in `rewards`.")
        return within_bounds(reward, await reward.grade(response))

    def _reward(self, source: object) -> Reward | None:
        if not isinstance(source, str):
            return None
        by_prefix = (name for prefix, name in PREFIXES.items() if source.startswith(prefix))
        name = SOURCES.get(source) or next(by_prefix, None)
        if source not in self._made and name is not None:
            self._made[source] = make_reward(name)
        return self._made.get(source)


def answer_of(result: RewardResult, options: ScoreOptions) -> dict[str, float]:
    """`score`, `acc`, `reward_valid` and the chosen components: the same keys whatever came of it, and no `reward`.

    Raises:
        DataError, InfraError: the response could not be graded, where `invalid_policy` is raise.
    """
    if result.reward is None and options.invalid_policy == InvalidPolicy.RAISE:
        kind = DataError if result.status is Status.LABEL else InfraError
        raise kind(f"reward: expected a grade, got {result.status} ({result.detail}). Mend it, or set invalid_policy.")
    zero = options.invalid_policy == InvalidPolicy.ZERO
    instead = 0.0 if zero else INVALID_REWARD
    score = result.reward if result.reward is not None else instead
    acc = (score if result.score is None else result.score) if result.status.valid else (0.0 if zero else math.nan)
    parts = (result.components.get(name) for name in options.components)
    values = [math.nan if part is None else float(part) for part in parts]
    answer = {"score": float(score), "acc": float(acc), "reward_valid": float(result.status.valid)}
    return answer | dict(zip(options.components, values, strict=True))


@lru_cache(maxsize=8)
def _opened(options_json: str) -> tuple[ScoreOptions, SourceReward]:
    options = ScoreOptions.of(json.loads(options_json))
    return options, SourceReward(options.rewards)


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """A reward function for verl: the grade by the reward of `data_source`, under the keys of `answer_of`.

    Args:
        data_source: of the row; which reward that means is in SOURCES and in the option `rewards`.
        solution_str: the response.
        ground_truth: the row's label.
        extra_info: the row's other facts.
        options: of `ScoreOptions`; what verl adds for a reward model of its own is not used.

    Raises:
        ConfigError: an option is none, or there is no reward for the source.
        DataError, InfraError: the response could not be graded; see `ScoreOptions.invalid_policy`.
    """
    mine = {name: value for name, value in options.items() if not name.startswith("reward_")}
    chosen, reward = _opened(json.dumps(mine, default=_as_json, sort_keys=True))
    if chosen.on_unknown == "raise":
        reward.check([data_source])
    metadata = {"data_source": data_source, "extra_info": extra_info, **(extra_info or {})}
    prompt = _prompt(extra_info or {})
    text = with_opened_thought(solution_str, "<think>") if chosen.think_opened else solution_str
    response = Response(text, ground_truth, prompt, {**metadata, "data_source": data_source})
    return answer_of(await graded(reward, response, limit_s=chosen.timeout), chosen)


def _prompt(extra_info: Mapping[str, Any]) -> str | Sequence[Any]:
    prompt = extra_info.get("prompt") or extra_info.get("question") or ""
    return prompt if isinstance(prompt, str) else list(prompt)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):  # of OmegaConf
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise ConfigError(
        f"reward_kwargs: expected what JSON has, got {value!r:.200}. Name a reward instead of passing it."
    )
