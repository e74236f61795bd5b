"""Rewards inside verl: RM-Gallery's manager of whole batches, today's manager of single samples, `compute_score`.

How verl finds each, without a change to its source:

- verl >= 0.7.1: `AgentEnvRewardManager`, by `reward.reward_manager.source=importlib`,
  `reward.reward_manager.module.path=pkg://agentenv.interop.verl.rewards` and its name in `reward.reward_manager.name`;
  or by `reward.reward_manager.name=agentenv` if `plugin.py` is loaded, which verl >= 0.9.1 does by itself and older
  ones with VERL_USE_EXTERNAL_MODULES=agentenv.interop.verl.plugin. See `reward_manager.py`.
- verl >= 0.7.1: `compute_score`, by `reward.custom_reward_function`. See `compute_score.py`.
- verl <= 0.6, and any caller with a whole batch: `RMGalleryRewardManager`, here.

math-verify and verl's hydra agree only on antlr4-python3-runtime 4.9.3: pip finds it if it installs both together.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from agentenv._util.loop_thread import run_sync
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.errors import ConfigError
from agentenv.interop._data_proto import Texts, column, placed, read_texts, rows, warn_of_invalid
from agentenv.interop.verl.compute_score import compute_score
from agentenv.interop.verl.judges import MAX_GROUPS, judge_of, mapping, response_of
from agentenv.rewards.groups.batch import Each, check_group_sizes, grade_groups, group_keys
from agentenv.rewards.groups.function import FunctionGroupReward
from agentenv.rewards.groups.rm_gallery import create_rm_gallery_reward_function
from agentenv.rewards.groups.statistics import COLUMNS, InvalidPolicy, apply_policy, statistics
from agentenv.rewards.types import GroupReward, Response, RewardResult

if TYPE_CHECKING:
    import torch

__all__ = ["RMGalleryRewardManager", "compute_score"]

logger = logging.getLogger(__name__)

_COLUMN_NAMES = {"reward": "reward_raw"}
"""New names of components: verl's validation would count a column `reward` twice."""


def __getattr__(name: str) -> Any:
    if name == "AgentEnvRewardManager":
        from agentenv.interop.verl.reward_manager import reward_manager_class

        return reward_manager_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Keyword arguments that `RMGalleryRewardManager` reads; the first five also go to `compute_score`."""

    max_workers: int = MAX_GROUPS
    """Maximum number of groups to judge concurrently."""
    timeout: float = 300.0
    """Time limit of a group, in seconds from the start of its work, and for each of its responses."""
    use_group_reward: bool = True
    """For the default `compute_score`: its judge compares a prompt's responses instead of judging each."""
    return_details: bool = False
    return_statistics: bool = True
    """Add the mean, standard deviation, minimum and maximum of each sample's group to `reward_extra_info`."""
    reward: Any = None
    """A reward to use instead of `compute_score`, as for `judge_of`: `math`, `{math: {wrong: -0.1}}`, FILE.py:name."""
    judge: Any = None
    """The judge of the default `compute_score`; without it and without a `grader`, only rules apply."""
    grader: Any = None
    """A scorer by principles instead of the judge; see `rm_gallery.Grader`."""
    group_size: str = "strict"
    """For groups of different sizes: an AssertionError (strict), a warning in the log (warn), or nothing (any)."""
    invalid_policy: str = InvalidPolicy.KEEP
    """The reward of a response without a grade; see `InvalidPolicy`."""
    acc_key: str = "acc"
    """The key of `data.batch` that receives the rewards."""

    def __post_init__(self) -> None:
        """Check the values."""
        whole_number("max_workers", self.max_workers, low=1)
        number("timeout", self.timeout, low=0.001)
        one_of("group_size", self.group_size, ("strict", "warn", "any"))
        one_of("invalid_policy", self.invalid_policy, list(InvalidPolicy))


_TUTORIAL_OPTIONS = ("max_workers", "timeout", "use_group_reward", "return_details", "return_statistics")


class RMGalleryRewardManager:
    """The manager of RM-Gallery's tutorial for verl: all responses to a prompt are judged together.

    `compute_score` may be the tutorial's `(prompt, responses, extras, **kw) -> (scores, reward_info[, details])`,
    verl's `(data_source, solution_str, ground_truth, extra_info)`, or any of our rewards; None is RM-Gallery's
    composition. All but verl's see a response with the `<think>` that its prompt ends with.

    Args:
        tokenizer: an object with `batch_decode`.
        num_examine: number of responses of each data source to log with text and reward, at level INFO.
        is_val_mode: compare with a reference, `extra_info["y"][0]["content"]`, for `win` and `win_and`.
        compute_score: the function or reward that judges.
        reward_fn_key: the column of the data source.
        reward_kwargs: see `ManagerOptions`; others are keyword arguments of `compute_score`.

    Raises:
        ConfigError: an option has an invalid value, or both `compute_score` and `reward` are given.
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
        own = known - set(_TUTORIAL_OPTIONS)
        passed_on = {name: value for name, value in reward_kwargs.items() if name not in own}
        reward = self.options.reward
        if compute_score is not None and reward is not None:
            raise ConfigError(f"reward: expected no compute_score with it, got {compute_score!r}. Remove one of them.")
        judges = (compute_score, reward, self.options.judge, self.options.grader)
        by_rules = all(each is None for each in judges)
        self._compares = is_val_mode and not by_rules
        if compute_score is None and reward is None:
            if by_rules:
                logger.warning(
                    "no compute_score, reward, judge or grader: rewards are for format, length and repetition only"
                )
            compute_score = create_rm_gallery_reward_function(
                self.options.use_group_reward,
                self.options.return_details,
                self.options.return_statistics,
                judge=self.options.judge,
                grader=self.options.grader,
                rules_only=by_rules,
            )
        self.compute_score = compute_score
        chosen = reward if compute_score is None else compute_score
        judge: Any = judge_of(chosen, passed_on, limit_s=self.timeout, max_threads=self.max_workers)
        self.reward: GroupReward = judge if hasattr(judge, "grade_group") else Each(judge, limit_s=self.timeout)
        self.last_reward_info: dict[str, list[float]] = {}
        """The last batch's `reward_extra_info`, and the statistics of each sample's group."""
        self.metrics: dict[str, float] = {}
        """The last batch's metrics, for logs."""
        self.num_empty = 0
        """Number of responses without a token so far: their rewards have no place in the tensor."""
        self._num_shown: Counter[str] = Counter()

    def __call__(self, data: Any, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Run `acall` for callers that cannot await it; an event loop of the caller's thread is blocked meanwhile.

        Raises:
            ContractError: the caller runs on the event loop that computes the rewards.
        """
        return run_sync(self.acall(data, return_dict))

    async def acall(self, data: Any, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Return the rewards [B, T] float32, each at its response's last token; store them as `data.batch["acc"]` [B].

        With `return_dict`, return `{"reward_tensor", "reward_extra_info"}`: each list of the latter has a number for
        every sample, NaN if it is unknown. Existing scores, `rm_scores`, are returned unchanged.

        Raises:
            GroupSizeError: prompts have different numbers of responses, under `group_size="strict"`; an AssertionError.
            InfraError: a response has no grade, under `invalid_policy="raise"`.
        """
        if "rm_scores" in data.batch.keys():  # noqa: SIM118 - a TensorDict
            extra_keys = data.meta_info.get("reward_extra_keys") or ()
            scores = {key: data.non_tensor_batch[key] for key in extra_keys}
            return _answer(data.batch["rm_scores"], scores, return_dict)
        texts, keys, responses = await asyncio.to_thread(self._read, data)  # long batches take a while to decode
        if isinstance(self.reward, FunctionGroupReward):
            # The mean standard deviation of the last batch's groups, which the tutorial passes on.
            last = data.meta_info.get("last_reward_info") or self.last_reward_info
            deviations = [float(each) for each in last.get("reward_std", ()) if math.isfinite(each)]
            self.reward.meta_info = {"last_mean_std": sum(deviations) / len(deviations)} if deviations else {}
        graded = await grade_groups(
            self.reward,
            responses,
            keys,
            references=_references(keys, data) if self._compares else None,
            limit_s=self.options.timeout,
            max_concurrent=self.options.max_workers,
        )
        self.metrics, results = graded.metrics(), graded.results
        warn_of_invalid(results)
        applied = apply_policy(results, keys, self.options.invalid_policy)
        for index, source in enumerate(column(data, self.reward_fn_key)):
            if self._num_shown[str(source)] < self.num_examine:
                self._num_shown[str(source)] += 1
                shown = (source, texts.prompts[index], texts.responses[index], results[index].reward)
                logger.info("data source %s\nprompt: %s\nresponse: %s\nreward: %s", *shown)
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

    def _extra_info(self, results: Sequence[RewardResult], keys: Sequence[Hashable]) -> dict[str, list[float]]:
        """Return columns with a number for every sample."""
        figures = statistics(results, keys)
        self.metrics |= figures.metrics()
        unknown = () if self.is_val_mode else ("win", "win_and")
        names = dict.fromkeys(name for each in results for name in each.components if name not in unknown)
        extra = {
            _COLUMN_NAMES.get(name, name): [_known(each.components.get(name)) for each in results] for name in names
        }
        extra["reward_valid"] = [float(result.reward is not None) for result in results]
        groups = {name: [_known(value) for value in figures.columns[name]] for name in COLUMNS}
        self.last_reward_info = extra | groups
        return dict(self.last_reward_info if self.options.return_statistics else extra)


def _references(keys: Sequence[Hashable], data: Any) -> dict[Hashable, str]:
    """Return the reference of each group whose first sample has one."""
    first: dict[Hashable, Any] = {}
    for key, extra in zip(keys, column(data, "extra_info"), strict=True):
        first.setdefault(key, extra)
    references = {}
    for key, extra_info in first.items():
        turns = mapping(extra_info).get("y")
        content = mapping(turns[0]).get("content") if isinstance(turns, list) and turns else None
        if isinstance(content, str) and content:
            references[key] = content
    return references


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _store(data: Any, acc_key: str, rewards: Sequence[float], mask: Sequence[bool]) -> None:
    """Store the rewards with the batch, and remove samples that must not be trained on from its mask."""
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
