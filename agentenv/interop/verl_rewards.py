"""Rewards inside of verl: RM-Gallery's manager of whole batches, today's manager of single samples, `compute_score`.

Which of them, and how verl finds it without its source being touched:

- verl >= 0.7.1: `AgentEnvRewardManager`, by `reward.reward_manager.source=importlib`,
  `reward.reward_manager.module.path=pkg://agentenv.interop.verl_rewards`, `reward.reward_manager.name=` its name; by
  `reward.reward_manager.name=agentenv` where `verl_plugin.py` was loaded, which verl >= 0.9.1 does by itself and
  others with VERL_USE_EXTERNAL_MODULES=agentenv.interop.verl_plugin. See `verl_loop.py`.
- the same: `compute_score`, by `reward.custom_reward_function`. See `verl_sources.py`.
- verl <= 0.6, and whoever holds a batch: `RMGalleryRewardManager`, here.

math-verify and verl's hydra agree on antlr4-python3-runtime 4.9.3 only: pip finds that, if it installs both together.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from agentenv.errors import ConfigError
from agentenv.interop.proto import Texts, column, placed, read_texts, rows, warn_of_invalid
from agentenv.interop.verl_judges import MAX_GROUPS, judge_of, mapping, response_of
from agentenv.interop.verl_sources import compute_score
from agentenv.rewards._arguments import number, one_of, whole_number
from agentenv.rewards.groups import Each, FunctionGroupReward, check_group_sizes, grade_groups, group_keys
from agentenv.rewards.invalid import InvalidPolicy, apply_policy
from agentenv.rewards.loop_thread import run_sync
from agentenv.rewards.statistics import COLUMNS, statistics
from agentenv.rewards.types import GroupReward, Response, RewardResult

if TYPE_CHECKING:
    import torch

__all__ = ["RMGalleryRewardManager", "compute_score"]

logger = logging.getLogger(__name__)

RENAMED = {"reward": "reward_raw"}
"""verl's validation counts a column `reward` twice."""


def __getattr__(name: str) -> Any:
    """`AgentEnvRewardManager`, which is made of a class of verl's when somebody asks for it."""
    if name == "AgentEnvRewardManager":
        from agentenv.interop.verl_loop import reward_manager_class

        return reward_manager_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """What `RMGalleryRewardManager` reads of its keyword arguments; the first five go to `compute_score` as well."""

    max_workers: int = MAX_GROUPS
    """Groups that are judged at a time."""
    timeout: float = 300.0
    """Longest that a group may take, in seconds from when its work begins; so may each of its responses."""
    use_group_reward: bool = True
    """Of the default `compute_score`: its judge compares a prompt's responses, instead of judging each."""
    return_details: bool = False
    return_statistics: bool = True
    """Add the mean, deviation, least and most of each sample's group to `reward_extra_info`."""
    reward: Any = None
    """What judges, instead of `compute_score`, as `judge_of` has it: `math`, `{math: {wrong: -0.1}}`, FILE.py:name."""
    judge: Any = None
    """Who is asked by the default `compute_score`; without one, and a `grader`, it knows rules only."""
    grader: Any = None
    """What scores by principles in the judge's place; see `gallery.Grader`."""
    group_size: str = "strict"
    """Groups of different sizes are an AssertionError (strict), a line in the log (warn), or nothing (any)."""
    invalid_policy: str = InvalidPolicy.KEEP
    """What a response gets that nobody could grade; see `InvalidPolicy`."""
    acc_key: str = "acc"
    """The key of `data.batch` that gets the rewards, whose name they do not deserve."""

    def __post_init__(self) -> None:
        """Refuse what none of this can be."""
        whole_number("max_workers", self.max_workers, low=1)
        number("timeout", self.timeout, low=0.001)
        one_of("group_size", self.group_size, ("strict", "warn", "any"))
        one_of("invalid_policy", self.invalid_policy, list(InvalidPolicy))


OF_RM_GALLERY = ("max_workers", "timeout", "use_group_reward", "return_details", "return_statistics")


class RMGalleryRewardManager:
    """The manager of RM-Gallery's tutorial for verl: all responses to a prompt are judged together.

    `compute_score` may be its `(prompt, responses, extras, **kw) -> (scores, reward_info[, details])`, verl's own
    `(data_source, solution_str, ground_truth, extra_info)`, or any reward of ours; None is RM-Gallery's composition.
    All but verl's see a response with the `<think>` that its prompt ends with.

    Args:
        tokenizer: with `batch_decode`.
        num_examine: responses of each data source whose text and reward are logged, at level INFO.
        is_val_mode: compare with a reference, `extra_info["y"][0]["content"]`, for `win` and `win_and`.
        compute_score: what judges.
        reward_fn_key: the column of the data source.
        reward_kwargs: see `ManagerOptions`; others are keyword arguments of `compute_score`.

    Raises:
        ConfigError: an option cannot have its value, or both `compute_score` and `reward` are given.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 3,
        is_val_mode: bool = False,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer, self.num_examine, self.is_val_mode = tokenizer, num_examine, is_val_mode
        self.reward_fn_key, self.reward_kwargs = reward_fn_key, reward_kwargs
        known = {each.name for each in fields(ManagerOptions)}
        self.options = ManagerOptions(**{name: value for name, value in reward_kwargs.items() if name in known})
        self.max_workers, self.timeout = self.options.max_workers, self.options.timeout
        passed_on = {name: reward_kwargs[name] for name in reward_kwargs if name in OF_RM_GALLERY or name not in known}
        self.compute_score, self.reward = _judge(compute_score, self.options, passed_on)
        self._compares = is_val_mode and not _by_rules_only(compute_score, self.options)
        self.last_reward_info: dict[str, list[float]] = {}
        """Of the last batch: what was in `reward_extra_info`, and the figures of each sample's group."""
        self.metrics: dict[str, float] = {}
        """Of the last batch, for logs."""
        self.num_empty = 0
        """Responses without a token so far: their rewards have no place in the tensor."""
        self._num_shown: Counter[str] = Counter()

    def __call__(self, data: Any, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Same as `acall`, for callers that cannot await it; an event loop that runs in their thread stands still.

        Raises:
            ContractError: called on the event loop on which rewards are computed.
        """
        return run_sync(self.acall(data, return_dict))

    async def acall(self, data: Any, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """The rewards [B, T] float32, each at the last token of its response; `data.batch["acc"]` gets them as [B].

        With `return_dict`, `{"reward_tensor", "reward_extra_info"}`: of the latter's lists each has a number for every
        sample, NaN where it is not known. Scores that are there already, `rm_scores`, are given back as they are.

        Raises:
            GroupSizeError: prompts have different numbers of responses, under `group_size="strict"`; an AssertionError.
            InfraError: a response could not be graded, under `invalid_policy="raise"`.
        """
        if "rm_scores" in data.batch.keys():  # noqa: SIM118 - a TensorDict
            extra_keys = data.meta_info.get("reward_extra_keys") or ()
            there = {key: data.non_tensor_batch[key] for key in extra_keys}
            return _answer(data.batch["rm_scores"], there, return_dict)
        texts, keys, responses = await asyncio.to_thread(self._read, data)  # long batches take a while to decode
        results = await self._results(data, responses, keys)
        warn_of_invalid(results)
        applied = apply_policy(results, keys, self.options.invalid_policy)
        self._show(data, texts, results)
        extra = self._extra_info(results, keys)
        _store(data, self.options.acc_key, applied.rewards, applied.mask)
        empty = sum(not length for length in texts.num_tokens)
        self.num_empty += empty
        if empty:
            logger.warning("%d of %d responses are empty: their rewards have no token", empty, len(results))
        return _answer(placed(data.batch["responses"], texts.num_tokens, applied.rewards), extra, return_dict)

    def _read(self, data: Any) -> tuple[Texts, list[Hashable], list[Response]]:
        texts = read_texts(data, self.tokenizer)
        uids = column(data, "uid") if "uid" in data.non_tensor_batch else None
        keys = group_keys(uids, texts.prompt_ids)
        check_group_sizes(keys, self.options.group_size)  # type: ignore[arg-type]
        named = [row | {"data_source": row.get(self.reward_fn_key)} for row in rows(data)]
        samples = zip(named, texts.responses, texts.prompts, strict=True)
        return texts, keys, [response_of(row, text, prompt, self.reward) for row, text, prompt in samples]

    async def _results(
        self, data: Any, responses: Sequence[Response], keys: Sequence[Hashable]
    ) -> Sequence[RewardResult]:
        if isinstance(self.reward, FunctionGroupReward):
            self.reward.meta_info = self._meta_info(data)
        references = _references(keys, data) if self._compares else None
        graded = await grade_groups(
            self.reward,
            responses,
            keys,
            references=references,
            limit_s=self.options.timeout,
            max_concurrent=self.options.max_workers,
        )
        self.metrics = graded.metrics()
        return graded.results

    def _meta_info(self, data: Any) -> dict[str, Any]:
        """The mean deviation of the last batch's groups, as the tutorial passes it on."""
        last = data.meta_info.get("last_reward_info") or self.last_reward_info
        known = [float(each) for each in last.get("reward_std", ()) if math.isfinite(each)]
        return {"last_mean_std": sum(known) / len(known)} if known else {}

    def _extra_info(self, results: Sequence[RewardResult], keys: Sequence[Hashable]) -> dict[str, list[float]]:
        """Equal columns: a number for every sample in each."""
        figures = statistics(results, keys)
        self.metrics |= figures.metrics()
        unknown = () if self.is_val_mode else ("win", "win_and")
        names = dict.fromkeys(name for each in results for name in each.components if name not in unknown)
        extra = {RENAMED.get(name, name): [_known(each.components.get(name)) for each in results] for name in names}
        extra["reward_valid"] = [float(result.reward is not None) for result in results]
        groups = {name: [_known(value) for value in figures.columns[name]] for name in COLUMNS}
        self.last_reward_info = extra | groups
        return dict(self.last_reward_info if self.options.return_statistics else extra)

    def _show(self, data: Any, texts: Texts, results: Sequence[RewardResult]) -> None:
        for index, source in enumerate(column(data, self.reward_fn_key)):
            if self._num_shown[str(source)] < self.num_examine:
                self._num_shown[str(source)] += 1
                shown = (source, texts.prompts[index], texts.responses[index], results[index].reward)
                logger.info("data source %s\nprompt: %s\nresponse: %s\nreward: %s", *shown)


def _judge(
    compute_score: Any, options: ManagerOptions, passed_on: Mapping[str, Any]
) -> tuple[Callable[..., Any] | None, GroupReward]:
    """The function, where there is one, and what judges a group with it."""
    if compute_score is not None and options.reward is not None:
        raise ConfigError(f"reward: expected no compute_score beside it, got {compute_score!r}. Leave one of them out.")
    if compute_score is None and options.reward is None:
        compute_score = _default_function(options)
    chosen = options.reward if compute_score is None else compute_score
    judge: Any = judge_of(chosen, passed_on, limit_s=options.timeout, max_threads=options.max_workers)
    return compute_score, judge if hasattr(judge, "grade_group") else Each(judge, limit_s=options.timeout)


def _default_function(options: ManagerOptions) -> Callable[..., Any]:
    from agentenv.rewards.gallery import create_rm_gallery_reward_function

    by_rules = _by_rules_only(None, options)
    if by_rules:
        logger.warning("no compute_score, reward, judge or grader: rewards are of format, length and repetition only")
    return create_rm_gallery_reward_function(
        options.use_group_reward,
        options.return_details,
        options.return_statistics,
        judge=options.judge,
        grader=options.grader,
        rules_only=by_rules,
    )


def _by_rules_only(compute_score: Any, options: ManagerOptions) -> bool:
    return all(each is None for each in (compute_score, options.reward, options.judge, options.grader))


def _references(keys: Sequence[Hashable], data: Any) -> dict[Hashable, str]:
    """The reference of each group whose first sample has one."""
    first: dict[Hashable, Any] = {}
    for key, extra in zip(keys, column(data, "extra_info"), strict=True):
        first.setdefault(key, extra)
    found = {key: _reference(extra) for key, extra in first.items()}
    return {key: text for key, text in found.items() if text}


def _reference(extra_info: Any) -> str:
    turns = mapping(extra_info).get("y")
    content = mapping(turns[0]).get("content") if isinstance(turns, list) and turns else None
    return content if isinstance(content, str) else ""


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _store(data: Any, acc_key: str, rewards: Sequence[float], mask: Sequence[bool]) -> None:
    """The rewards beside the batch, and samples that must not be trained on out of its mask."""
    import torch

    responses = data.batch["responses"]
    data.batch[acc_key] = torch.tensor(rewards, dtype=torch.float32, device=responses.device)
    if all(mask):
        return
    if "response_mask" in data.batch.keys():  # noqa: SIM118 - a TensorDict
        trained = data.batch["response_mask"].clone()
    else:
        trained = data.batch["attention_mask"][:, -responses.shape[1] :].clone()
    trained[torch.tensor([not each for each in mask], device=trained.device)] = 0
    data.batch["response_mask"] = trained


def _answer(tensor: torch.Tensor, extra: Mapping[str, Any], return_dict: bool) -> torch.Tensor | dict[str, Any]:
    return {"reward_tensor": tensor, "reward_extra_info": dict(extra)} if return_dict else tensor
