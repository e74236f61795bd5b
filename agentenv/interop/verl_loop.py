"""verl's reward manager of single samples over our rewards, rewards of whole groups among them.

The options are in `reward.reward_kwargs` of verl's configuration (`+reward.reward_kwargs.reward=math`):
`LoopOptions` has the names. Without a `reward`, the row's `data_source` chooses one; a `compute_score` of the user's
(`reward.custom_reward_function`) stands before both, with our deadline, keys and policy around it.

A reward of groups needs all samples of a prompt in one process: `reward.num_workers=1`, which is enough, since what is
heavy runs in processes of its own.

Source: verl 0.9.1, experimental/reward_loop/reward_manager/base.py and reward_loop.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from agentenv.errors import ConfigError, DataError
from agentenv.interop.proto import placed, plain, read_texts, rows
from agentenv.interop.verl_judges import ScoreFunction, judge_of, mapping, response_of
from agentenv.interop.verl_sources import ScoreOptions, SourceReward, answer_of
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards.grading import MAX_CONCURRENT, graded
from agentenv.rewards.groups import graded_group
from agentenv.rewards.per_loop import PerLoop
from agentenv.rewards.types import GroupReward, Response, RewardResult

logger = logging.getLogger(__name__)

VALIDATION_SPLITS = ("test", "val", "validation", "dev")


@dataclass(frozen=True, slots=True)
class LoopOptions(ScoreOptions):
    """What `reward.reward_kwargs` may hold."""

    reward: Any = None
    """What judges every row, as `judge_of` has it: `math`, `{math: {wrong: -0.1}}`, FILE.py:name."""
    max_concurrent: int = MAX_CONCURRENT
    """Most samples that are graded at a time, where the reward judges each."""
    group_size: int | None = None
    """Samples of a prompt, where the reward judges groups; None is verl's `rollout.n`."""
    val_group_size: int | None = None
    """The same of rows whose `extra_info.split` is test, val, validation or dev, which is all that verl's loop of
    agents tells of a validation, or whose batch says `validate`; None is `rollout.val_kwargs.n`."""
    group_wait_s: float = 600.0
    """Longest that a group waits for its next sample before those that have come are judged without it."""

    def __post_init__(self) -> None:
        """Refuse what none of this can be."""
        ScoreOptions.__post_init__(self)
        number("reward_kwargs.group_wait_s", self.group_wait_s, low=0.001)
        for name in ("max_concurrent", "group_size", "val_group_size"):
            if getattr(self, name) is not None:
                whole_number(f"reward_kwargs.{name}", getattr(self, name), low=1)


class LoopRewardManager:
    """What `AgentEnvRewardManager` does, without verl: `run_single` for a sample.

    Args:
        config: verl's.
        tokenizer: with `batch_decode`.
        compute_score: a function of verl's signature; read only where the configuration names one of the user's.
        reward_router_address: of a reward model that verl serves; passed on to the user's function.
        reward_model_tokenizer: its tokenizer, passed on as well.

    Raises:
        ConfigError: an option cannot have its value, or a reward of groups would have its groups torn apart.
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
        self.options = LoopOptions.of(plain(config.reward.get("reward_kwargs") or {}))
        self.compute_score = compute_score if _is_users(config) else None
        served = {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
        self._reward = self._opened({} if reward_router_address is None else served)
        self._groups: Gathering | None = None
        self._turns = PerLoop(lambda: asyncio.Semaphore(self.options.max_concurrent))
        if hasattr(self._reward, "grade_group"):
            if int(config.reward.get("num_workers") or 1) != 1:
                raise ConfigError(
                    f"reward.num_workers: expected 1, got {config.reward.num_workers}: {type(self._reward).__name__} "
                    "judges all samples of a prompt together. Set it to 1; what is heavy has processes of its own."
                )
            self._groups = Gathering(self._reward, limit_s=self.options.timeout, wait_s=self.options.group_wait_s)

    def _opened(self, served: Mapping[str, Any]) -> Any:
        if self.compute_score is not None:
            return ScoreFunction(self.compute_score, served, limit_s=self.options.timeout)
        if self.options.reward is not None:
            most, limit_s = self.options.max_concurrent, self.options.timeout
            return judge_of(self.options.reward, limit_s=limit_s, max_threads=most)
        return SourceReward(self.options.rewards)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """`reward_score`, and `reward_extra_info` with the keys of `answer_of`, of the last row: verl's own choice.

        Raises:
            ConfigError: there is no reward for the row's source, under `on_unknown="raise"`.
            DataError, InfraError: it could not be graded, under `invalid_policy="raise"`; in verl's v1 trainer that
                takes the prompt out of the step.
        """
        row, response = await asyncio.to_thread(self._read, data[-1:])
        if isinstance(self._reward, SourceReward) and self.options.on_unknown == "raise":
            self._reward.check([row.get("data_source")])
        answer = answer_of(await self._graded(response, row), self.options)
        return {"reward_score": answer["score"], "reward_extra_info": answer}

    def _read(self, last: Any) -> tuple[dict[str, Any], Response]:
        row = _with_loops_facts(rows(last)[0])
        row.setdefault("validate", (last.meta_info or {}).get("validate", False))
        texts = read_texts(last, self.tokenizer)
        opened = self.options.think_opened
        return row, response_of(row, texts.responses[0], texts.prompts[0], self._reward, think_opened=opened)

    async def _graded(self, response: Response, row: Mapping[str, Any]) -> RewardResult:
        if self._groups is None:
            async with (
                self._turns.here()
            ):  # verl asks about all samples of a batch at once; its time begins with its turn
                return await graded(self._reward, response, limit_s=self.options.timeout)
        uid = row.get("uid")
        if uid is None:
            raise DataError("uid: expected one for each prompt, got None. A reward of groups cannot do without.")
        return await self._groups.graded(uid, response, self._group_size(row))

    def _group_size(self, row: Mapping[str, Any]) -> int:
        said = row.get("__rollout_n__")
        if said is not None:
            return int(said)
        rollout = self.config.actor_rollout_ref.rollout
        if row.get("validate") or mapping(row.get("extra_info")).get("split") in VALIDATION_SPLITS:
            return int(self.options.val_group_size or rollout.val_kwargs.n)
        return int(self.options.group_size or rollout.n)

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Any:
        """[B, T] float32: each score at the last token of its response; one that is empty has no place for it.

        verl's own puts that one on the last token of the padding.
        """
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(dim=1).tolist()
        return placed(data.batch["responses"], lengths, scores)


@cache
def reward_manager_class() -> type:
    """`AgentEnvRewardManager`: `LoopRewardManager` as a subclass of verl's `RewardManagerBase`.

    Raises:
        ImportError: verl is not installed, or is older than 0.7.1.
    """
    base = import_module("verl.experimental.reward_loop.reward_manager.base").RewardManagerBase
    return type("AgentEnvRewardManager", (LoopRewardManager, base), {"__doc__": LoopRewardManager.__doc__})


def _is_users(config: Any) -> bool:
    return bool((config.reward.get("custom_reward_function") or {}).get("path"))


def _with_loops_facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row; as verl's own managers do, what its agent loop says of it is in `extra_info`, of a copy."""
    extra_info = {**mapping(row.get("extra_info")), **mapping(row.get("tool_extra_fields"))}
    facts = {"num_turns": row.get("__num_turns__"), "rollout_reward_scores": row.get("reward_scores") or {}}
    return {**row, "extra_info": extra_info | facts}


@dataclass(slots=True)
class _Group:
    """Samples of a prompt that have come so far."""

    size: int
    """How many there will be."""
    members: dict[asyncio.Future[RewardResult], Response] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Gathering:
    """Lets samples that come one by one wait for the others of their group, and has them judged together.

    A group begins to be judged when all have come; when nobody came for `wait_s`, those that have are judged without
    the rest. One that is cancelled while it waits is waited for no longer.
    """

    def __init__(self, reward: GroupReward, *, limit_s: float, wait_s: float) -> None:
        self._reward, self._limit_s, self._wait_s = reward, limit_s, wait_s
        self._open: dict[Hashable, _Group] = {}
        self._judging: set[asyncio.Task[None]] = set()

    async def graded(self, key: Hashable, response: Response, size: int) -> RewardResult:
        """The result of one sample; see `graded_group`. `size` is how many the group of this key will have."""
        loop = asyncio.get_running_loop()
        group = self._open.setdefault(key, _Group(size))
        mine: asyncio.Future[RewardResult] = loop.create_future()
        group.members[mine] = response
        if group.timer is not None:
            group.timer.cancel()
        group.timer = loop.call_later(self._wait_s, self._give_up_waiting, key, group)
        self._judge_if_complete(key, group)
        try:
            return await mine
        except asyncio.CancelledError:
            if self._open.get(key) is group:
                del group.members[mine]
                group.size -= 1
                self._judge_if_complete(key, group)
            raise

    def _judge_if_complete(self, key: Hashable, group: _Group) -> None:
        if len(group.members) >= group.size:
            self._judge(key, group)

    def _give_up_waiting(self, key: Hashable, group: _Group) -> None:
        shown = len(group.members), group.size, key, self._wait_s
        logger.warning("%d of %d samples of %s came; the last %g s ago: judged without the others", *shown)
        self._judge(key, group)

    def _judge(self, key: Hashable, group: _Group) -> None:
        del self._open[key]
        assert group.timer is not None
        group.timer.cancel()
        if group.members:
            task = asyncio.get_running_loop().create_task(self._hand_out(group))
            self._judging.add(task)  # the loop itself keeps weak references only
            task.add_done_callback(self._judging.discard)

    async def _hand_out(self, group: _Group) -> None:
        grade = await graded_group(self._reward, list(group.members.values()), limit_s=self._limit_s)
        for mine, result in zip(group.members, grade.results, strict=True):
            if not mine.done():
                mine.set_result(result)
