"""verl's reward manager for single samples over our rewards, including rewards of whole groups.

`reward.reward_kwargs` of verl's configuration holds the options (`+reward.reward_kwargs.reward=math`), which
`RewardManagerOptions` names. Without a `reward`, the row's `data_source` chooses one. The user's `compute_score`
(`reward.custom_reward_function`) takes precedence over both, with our deadline, keys and policy.

A group reward needs all samples of a prompt in one process: `reward.num_workers=1`. One is enough, because heavy work
runs in separate processes.

Source: verl 0.9.1, experimental/reward_loop/reward_manager/base.py and reward_loop.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from agentenv._util.per_loop import PerLoop
from agentenv.core.arguments import whole_number
from agentenv.errors import ConfigError, DataError
from agentenv.interop._data_proto import placed, plain, read_texts, rows
from agentenv.interop.verl.compute_score import ScoreOptions, SourceReward, answer_of
from agentenv.interop.verl.judges import ScoreFunction, judge_of, mapping, response_of
from agentenv.rewards.grading import MAX_CONCURRENT, grade
from agentenv.rewards.groups.batch import grade_group
from agentenv.rewards.types import GroupReward, Response, RewardResult

logger = logging.getLogger(__name__)

_GROUP_WAIT_S = 600.0
"""Time limit of a group's wait for its next sample; then the present ones are judged."""
VALIDATION_SPLITS = ("test", "val", "validation", "dev")


@dataclass(frozen=True, slots=True)
class RewardManagerOptions(ScoreOptions):
    """Options in `reward.reward_kwargs`."""

    reward: Any = None
    """The reward of every row, as for `judge_of`: `math`, `{math: {wrong: -0.1}}`, FILE.py:name."""
    max_concurrent: int = MAX_CONCURRENT
    """Maximum number of samples to grade concurrently, for a reward that judges each."""
    group_size: int | None = None
    """Samples of a prompt, for a group reward; None means verl's `rollout.n`. Validation rows have
    `rollout.val_kwargs.n`: those whose `extra_info.split` is test, val, validation or dev (verl's agent loop passes no
    other sign of a validation), or whose batch has `validate`."""

    def __post_init__(self) -> None:
        """Check the values."""
        ScoreOptions.__post_init__(self)
        for name in ("max_concurrent", "group_size"):
            if getattr(self, name) is not None:
                whole_number(f"reward_kwargs.{name}", getattr(self, name), low=1)


class SampleRewardManager:
    """The work of `AgentEnvRewardManager`, without verl: `run_single` grades a sample.

    Args:
        config: verl's configuration.
        tokenizer: an object with `batch_decode`.
        compute_score: a function of verl's signature; used only if the configuration names one of the user's.
        reward_router_address: the address of a reward model that verl serves; passed to the user's function.
        reward_model_tokenizer: that model's tokenizer; passed to the user's function.

    Raises:
        ConfigError: an option has an invalid value, or several workers would split the groups of a group reward.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Callable[..., Any] | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.options = RewardManagerOptions.of(plain(config.reward.get("reward_kwargs") or {}))
        is_users = bool((config.reward.get("custom_reward_function") or {}).get("path"))
        self.compute_score = compute_score if is_users else None
        served = {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
        most, limit_s = self.options.max_concurrent, self.options.timeout
        self._reward: Any
        if self.compute_score is not None:
            self._reward = ScoreFunction(
                self.compute_score, {} if reward_router_address is None else served, limit_s=limit_s
            )
        elif self.options.reward is not None:
            self._reward = judge_of(self.options.reward, limit_s=limit_s, max_threads=most)
        else:
            self._reward = SourceReward(self.options.rewards)
        self._groups: GroupGatherer | None = None
        self._turns = PerLoop(lambda: asyncio.Semaphore(self.options.max_concurrent))
        if hasattr(self._reward, "grade_group"):
            if int(config.reward.get("num_workers") or 1) != 1:
                raise ConfigError(
                    f"reward.num_workers: expected 1, got {config.reward.num_workers}: {type(self._reward).__name__} "
                    "judges all samples of a prompt together. Set it to 1; heavy work has its own processes."
                )
            self._groups = GroupGatherer(self._reward, limit_s=self.options.timeout, wait_s=_GROUP_WAIT_S)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Grade the last row, as verl does: `reward_score`, and `reward_extra_info` with the keys of `answer_of`.

        Raises:
            ConfigError: the row's source has no reward, under `on_unknown="raise"`.
            DataError, ContractError, InfraError: the row has no grade, under `invalid_policy="raise"`; verl's v1
                trainer then removes the prompt from the step.
        """
        row, response = await asyncio.to_thread(self._read, data[-1:])
        if isinstance(self._reward, SourceReward) and self.options.on_unknown == "raise":
            self._reward.check([row.get("data_source")])
        if self._groups is None:
            # verl asks for all samples of a batch together; a sample's time starts with its turn.
            async with self._turns.here():
                result = await grade(self._reward, response, limit_s=self.options.timeout)
        else:
            uid = row.get("uid")
            if uid is None:
                raise DataError("uid: expected one for each prompt, got None. A group reward needs it.")
            size = row.get("__rollout_n__")
            if size is None:
                rollout, split = self.config.actor_rollout_ref.rollout, mapping(row.get("extra_info")).get("split")
                is_validation = row.get("validate") or split in VALIDATION_SPLITS
                size = rollout.val_kwargs.n if is_validation else self.options.group_size or rollout.n
            result = await self._groups.grade(uid, response, int(size))
        answer = answer_of(result, self.options)
        return {"reward_score": answer["score"], "reward_extra_info": answer}

    def _read(self, last: Any) -> tuple[dict[str, Any], Response]:
        row = rows(last)[0]
        # The agent loop's facts go where verl's own managers put them.
        extra_info = {**mapping(row.get("extra_info")), **mapping(row.get("tool_extra_fields"))}
        facts = {"num_turns": row.get("__num_turns__"), "rollout_reward_scores": row.get("reward_scores") or {}}
        row["extra_info"] = extra_info | facts
        row.setdefault("validate", (last.meta_info or {}).get("validate", False))
        texts = read_texts(last, self.tokenizer)
        opened = self.options.think_opened
        return row, response_of(row, texts.responses[0], texts.prompts[0], self._reward, think_opened=opened)

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Any:
        """Return [B, T] float32: each score at the last token of its response; an empty response has no place for it.

        verl's own method puts that score on the last token of the padding.
        """
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(dim=1).tolist()
        return placed(data.batch["responses"], lengths, scores)


@cache
def reward_manager_class() -> type:
    """Return `AgentEnvRewardManager`: `SampleRewardManager` as a subclass of verl's `RewardManagerBase`.

    Raises:
        ImportError: verl is not installed, or is older than 0.7.1.
    """
    base = import_module("verl.experimental.reward_loop.reward_manager.base").RewardManagerBase
    return type("AgentEnvRewardManager", (SampleRewardManager, base), {"__doc__": SampleRewardManager.__doc__})


@dataclass(slots=True)
class _GatheredGroup:
    """The samples of a prompt that have arrived."""

    size: int
    """How many will arrive."""
    members: dict[asyncio.Future[RewardResult], Response] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class GroupGatherer:
    """Collects the samples of a group as they arrive one by one, and judges them together.

    Judging starts when all have arrived, or when none arrived for `wait_s`; the missing ones are then left out. A
    sample that is cancelled while it waits no longer counts.
    """

    def __init__(self, reward: GroupReward, *, limit_s: float, wait_s: float) -> None:
        self._reward, self._limit_s, self._wait_s = reward, limit_s, wait_s
        self._open: dict[Hashable, _GatheredGroup] = {}
        self._judging: set[asyncio.Task[None]] = set()

    async def grade(self, key: Hashable, response: Response, size: int) -> RewardResult:
        """Return the result of one sample; see `grade_group`. `size` is the number of samples of this key's group."""
        loop = asyncio.get_running_loop()
        group = self._open.setdefault(key, _GatheredGroup(size))
        mine: asyncio.Future[RewardResult] = loop.create_future()
        group.members[mine] = response

        def end_waiting() -> None:
            shown = len(group.members), group.size, key, self._wait_s
            logger.warning("%d of %d samples of %s arrived, the last %g s ago; judging without the others", *shown)
            self._judge(key, group)

        if group.timer is not None:
            group.timer.cancel()
        group.timer = loop.call_later(self._wait_s, end_waiting)
        self._judge_if_complete(key, group)
        try:
            return await mine
        except asyncio.CancelledError:
            if self._open.get(key) is group:
                del group.members[mine]
                group.size -= 1
                self._judge_if_complete(key, group)
            raise

    def _judge_if_complete(self, key: Hashable, group: _GatheredGroup) -> None:
        if len(group.members) >= group.size:
            self._judge(key, group)

    def _judge(self, key: Hashable, group: _GatheredGroup) -> None:
        del self._open[key]
        assert group.timer is not None
        group.timer.cancel()

        async def hand_out() -> None:
            grade = await grade_group(self._reward, list(group.members.values()), limit_s=self._limit_s)
            for mine, result in zip(group.members, grade.results, strict=True):
                if not mine.done():
                    mine.set_result(result)

        if group.members:
            task = asyncio.get_running_loop().create_task(hand_out())
            self._judging.add(task)  # the loop keeps only weak references
            task.add_done_callback(self._judging.discard)
