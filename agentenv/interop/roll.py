"""Rewards inside of ROLL: its reward workers by their names, over rewards of ours.

In ROLL's configuration, without its source being touched:

    rewards:
      math_rule:
        worker_cls: agentenv.interop.roll.MathRuleRewardWorker

The eight names of ROLL's workers are those of `registry.ROLL_NAMES`; a worker of one's own is a subclass of one, or of
`CustomRewardWorker`. Without ROLL they are the same classes over a base of ours, for tests and for `data_parallel`.

Source: alibaba/ROLL 0.3.0 (8eb27cc2), pipeline/rlvr/rewards and distributed/scheduler.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from agentenv.agent import call
from agentenv.errors import ConfigError
from agentenv.interop.proto import read_texts, rows, warn_of_invalid
from agentenv.interop.roll_dispatch import Dispatch, LocalWorker, data_parallel, one_to_all, register, roll_module
from agentenv.rewards._arguments import number, one_of, whole_number
from agentenv.rewards.grading import MAX_CONCURRENT, graded_all
from agentenv.rewards.invalid import InvalidPolicy, apply_policy
from agentenv.rewards.loop_thread import run_sync
from agentenv.rewards.math import extract_answer
from agentenv.rewards.registry import ROLL_NAMES, reward_from
from agentenv.rewards.routing import Router
from agentenv.rewards.statistics import statistics
from agentenv.rewards.text import final_text, with_opened_thought
from agentenv.rewards.types import Response, Reward, RewardResult

__all__ = ["CustomReward", "Dispatch", "RollRewards", "data_parallel", "one_to_all", "register", "worker_class"]

COLUMNS = (
    "id", "prompt", "messages", "ground_truth", "tag", "domain", "case_type", "test_cases", "test_case_function",
    "reward_model", "multi_modal_inputs", "source", "difficulty", "data_source", "extra_info",
)  # fmt: skip
"""What rewards are shown of a row; ROLL's batches may keep others far away."""
FACTS = ("global_step", "max_steps")
"""What they are shown of `meta_info`."""
PATCH_SIZE = 14
"""Pixels along the side of a patch of an image, in Qwen2.5-VL."""
POLICIES = (InvalidPolicy.GROUP_MEAN, InvalidPolicy.ZERO, InvalidPolicy.KEEP, InvalidPolicy.RAISE)


class RollRewards:
    """Grades batches of ROLL's shape with one reward, or with one for each domain.

    Rewards see a response with the `<think>` that its prompt ends with.

    Args:
        reward: settings for `reward_from`, or a reward; with `domains`, they are of each domain.
        tokenizer: with `batch_decode`.
        tags: what makes `reward` one of domains: the domain of each tag, or as ROLL's `tag_included` each domain's
            tags. A row's domain is that of its `tag`; without a tag, its `domain`.
        on_unknown: a row of no domain: "raise" for all of the batch, or "invalid" for `invalid_policy` to deal with.
        invalid_policy: a response that nobody could grade: the mean of the others to its prompt, 0.0 where there are
            none (group_mean), 0.0 (zero), -999.0 (keep), or InfraError for the batch (raise).
        dtype: of the tensors; ROLL's are float16.
        limit_s: longest that grading one response may take; by default what `grading.patience_s` says.
        max_concurrent: most responses at a time.

    Raises:
        ConfigError: a value cannot be.
    """

    patch_size: int | None = PATCH_SIZE
    """What makes `image_size` of `multi_modal_inputs["image_grid_thw"]`; None for models whose boxes are in thousandths
    of an image, as Qwen2-VL's and Qwen3-VL's are, whatever a row says."""

    def __init__(
        self,
        reward: Any,
        tokenizer: Any,
        *,
        tags: Mapping[str, str | Sequence[str]] | None = None,
        on_unknown: str = "raise",
        invalid_policy: str = InvalidPolicy.GROUP_MEAN,
        dtype: str = "float16",
        limit_s: float | None = None,
        max_concurrent: int = MAX_CONCURRENT,
    ) -> None:
        self.tokenizer = tokenizer
        self.reward: Reward = reward_from(reward) if tags is None else _routed(reward, tags)
        self._raises = one_of("on_unknown", on_unknown, ("raise", "invalid")) == "raise"
        self._policy = one_of("invalid_policy", invalid_policy, POLICIES)
        self._dtype = one_of("dtype", dtype, ("float16", "bfloat16", "float32"))
        self._limit_s = None if limit_s is None else number("limit_s", limit_s, low=0.001)
        self._max_concurrent = whole_number("max_concurrent", max_concurrent, low=1)

    def compute_rewards(self, data: Any) -> Any:
        """`token_level_rewards` [B, T] of zeros, as ROLL has them, `response_level_rewards` [B] and `scores` [B].

        They are in the order of the rows; what `data` is, that comes back: its class has `from_dict`, or a dict comes.
        `meta_info["metrics"]` has the figures of `Statistics.metrics`. A `score` is 0.0 where there is none.

        Raises:
            DataError: a row is of no domain, under `on_unknown="raise"`; before any is graded.
            InfraError: a response could not be graded, under `invalid_policy="raise"`.
        """
        return run_sync(self.acompute_rewards(data))

    async def acompute_rewards(self, data: Any) -> Any:
        """Same as `compute_rewards`, for callers that can await it."""
        responses, groups = await asyncio.to_thread(self._read, data)  # long batches take a while to decode
        if self._raises and isinstance(self.reward, Router):
            for response in responses:
                self.reward.domain(response)
        results = await graded_all(self.reward, responses, limit_s=self._limit_s, max_concurrent=self._max_concurrent)
        warn_of_invalid(results)
        applied = apply_policy(results, groups, self._policy)
        tensors = self._tensors(data.batch["responses"], results, applied.rewards)
        metrics = statistics(results, groups).metrics()
        from_dict = getattr(type(data), "from_dict", None)
        if from_dict is None:
            return tensors
        return from_dict(tensors=tensors, meta_info={"metrics": metrics})

    def _read(self, data: Any) -> tuple[list[Response], list[Any]]:
        texts = read_texts(data, self.tokenizer)
        facts = {name: data.meta_info[name] for name in FACTS if name in (data.meta_info or {})}
        responses, groups = [], []
        for row, prompt, text, ids in zip(
            rows(data, COLUMNS), texts.prompts, texts.responses, texts.prompt_ids, strict=True
        ):
            shown = {**facts, **_with_image_sizes(self._with_domain(row), self.patch_size)}
            whole = with_opened_thought(text, prompt)
            responses.append(Response(whole, _label(row), row.get("prompt") or prompt, shown))
            groups.append(row["id"] if isinstance(row.get("id"), str | int) else ids)
        return responses, groups

    def _with_domain(self, row: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.reward, Router) and row.get(self.reward.key) is None:
            return row | {self.reward.key: row.get("domain")}
        return row

    def _tensors(self, ids: Any, results: Sequence[RewardResult], rewards: Iterable[float]) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self._dtype)
        most = torch.finfo(dtype).max
        scores = [(result.reward if result.score is None else result.score) or 0.0 for result in results]
        columns = [torch.tensor(list(each), dtype=torch.float64).clamp(-most, most) for each in (rewards, scores)]
        return {
            "token_level_rewards": torch.zeros(ids.shape, dtype=dtype),
            "response_level_rewards": columns[0].to(dtype),
            "scores": columns[1].to(dtype),
        }


def _routed(rewards: Any, tags: Mapping[str, str | Sequence[str]]) -> Reward:
    if not isinstance(rewards, Mapping):
        raise ConfigError(f"reward: expected a reward for each domain of tags, got {rewards!r:.200}. Pass a mapping.")
    return Router({domain: reward_from(spec) for domain, spec in rewards.items()}, tags, key="tag")


def _with_image_sizes(row: Mapping[str, Any], patch_size: int | None) -> Mapping[str, Any]:
    """The row with its images' widths and heights in what boxes are in, as rewards of boxes want them."""
    inputs = row.get("multi_modal_inputs")
    grids = inputs.get("image_grid_thw") if isinstance(inputs, Mapping) else None
    if grids is None or row.get("image_size") is not None:
        return row
    patches = [grid[-2:] for grid in (grids.tolist() if hasattr(grids, "tolist") else grids)]
    pixels = [[1000, 1000] if patch_size is None else [w * patch_size, h * patch_size] for h, w in patches]
    return {**row, "image_size": pixels}


def _label(row: Mapping[str, Any]) -> Any:
    label, reward_model = row.get("ground_truth"), row.get("reward_model")
    return reward_model.get("ground_truth") if label is None and isinstance(reward_model, Mapping) else label


class RewardWorker:
    """What is ours of a worker; it stands before ROLL's Worker among the bases of a class.

    `reward` and `options` of a class say what it is; a subclass changes them.
    """

    reward: Any = None
    """Settings for `reward_from`."""
    options: Mapping[str, Any] = {}
    """Keyword arguments of `RollRewards`; and `judge`, settings of the judge that the reward asks, as
    `{"base_url": "http://127.0.0.1:8000/v1", "model": "…"}`."""
    patch_size: int | None = PATCH_SIZE
    """See `RollRewards.patch_size`."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)  # type: ignore[call-arg]
        rank_info: Any = self.rank_info  # type: ignore[attr-defined]
        rank_info.dp_rank, rank_info.dp_size = rank_info.rank, rank_info.world_size
        self.tokenizer = tokenizer_of(worker_config)
        options = {name: value for name, value in self.options.items() if name != "judge"}
        self.rewards = RollRewards(self.make_reward(), self.tokenizer, **options)
        self.rewards.patch_size = self.patch_size

    def make_reward(self) -> Any:
        """What judges, with the judge of `options`; one that needs a client of its own is made here."""
        if "judge" not in self.options:
            return self.reward
        named = {self.reward: {}} if isinstance(self.reward, str) else self.reward
        if not isinstance(named, Mapping) or len(named) != 1:
            raise ConfigError(f"options: expected no judge beside the reward {self.reward!r:.200}. Name it there.")
        ((name, arguments),) = named.items()
        return {name: {**arguments, "judge": self.options["judge"]}}

    def initialize(self, pipeline_config: Any) -> None:
        """Nothing to prepare; ROLL calls it on every worker."""

    def compute_rewards(self, data: Any) -> Any:
        """See `RollRewards.compute_rewards`."""
        return self.rewards.compute_rewards(data)


class CustomReward(RewardWorker):
    """The reward worker of ROLL's guide: 1 for the answer, 0.5 for the format, less what is repeated.

    A subclass, which is a class of workers through `worker_class`, has its own `_check_answer_correctness` and others;
    what they raise costs one response its reward, and no other.
    """

    def make_reward(self) -> Any:
        """What asks the worker."""
        return _Asked(self._compute_single_reward)

    def _compute_single_reward(self, response: str, ground_truth: Any) -> float:
        correct = bool(self._check_answer_correctness(response, ground_truth))
        formatted = bool(self._check_format_correctness(response))
        return 1.0 * correct + 0.5 * formatted + self._compute_repetition_penalty(response)

    def _check_answer_correctness(self, response: str, ground_truth: Any) -> bool:
        final = final_text(response)
        return final is not None and extract_answer(final) == str(ground_truth).strip()

    def _check_format_correctness(self, response: str) -> bool:
        from agentenv.rewards.format import compute_format_reward

        return compute_format_reward([response]) == [1.0]

    def _compute_repetition_penalty(self, response: str) -> float:
        from agentenv.rewards.repetition import create_ngram_penalty_reward

        return create_ngram_penalty_reward(ngram_size=3, max_penalty=-0.1, min_scaling=0.0)([response])[0]


class _Asked:
    """A worker's function as a reward; apart from the worker, since Ray takes a class with async methods for async."""

    bounds = (-math.inf, math.inf)

    def __init__(self, function: Callable[[str, Any], float]) -> None:
        self._function = function

    async def grade(self, response: Response) -> RewardResult:
        """What the function says, in a thread."""
        return RewardResult(float(await call(self._function, response.text, response.label)))


def worker_class(name: str, kind: type[RewardWorker] = RewardWorker, **attributes: Any) -> type:
    """A class of workers of this kind: over ROLL's Worker and with its decorators where ROLL is installed.

    Args:
        name: of the class.
        kind: what it is.
        attributes: of the class, such as `reward` and `options`.
    """
    worker = roll_module("roll.distributed.executor.worker")
    decorators: Any = roll_module("roll.distributed.scheduler.decorator")
    modes, decorate = (Dispatch, register) if decorators is None else (decorators.Dispatch, decorators.register)
    methods = {
        "initialize": decorate(dispatch_mode=modes.ONE_TO_ALL)(_own(kind.initialize)),
        "compute_rewards": decorate(dispatch_mode=modes.DP_MP_COMPUTE, clear_cache=False)(_own(kind.compute_rewards)),
    }
    bases = (kind, LocalWorker if worker is None else worker.Worker)
    return type(name, bases, {"__module__": __name__, "__doc__": kind.__doc__, **methods, **attributes})


def _own(method: Any) -> Any:
    """A function of its own, so that what a decorator writes on it is not written on the kind's."""

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The method."""
        return method(self, *args, **kwargs)

    own.__name__, own.__doc__ = method.__name__, method.__doc__
    return own


@cache
def _named(name: str) -> type:
    if name == "CustomRewardWorker":
        return worker_class(name, CustomReward)
    return worker_class(name, reward=ROLL_NAMES[name])


def __getattr__(name: str) -> Any:
    """ROLL's eight workers, and `CustomRewardWorker`: made when somebody asks for one, since ROLL is slow to import."""
    if name in ROLL_NAMES or name == "CustomRewardWorker":
        return _named(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def tokenizer_of(worker_config: Any) -> Any:
    """A worker's tokenizer: `worker_config.tokenizer`, or what ROLL, or transformers, opens of `model_args`."""
    tokenizer = getattr(worker_config, "tokenizer", None)
    if tokenizer is not None:
        return tokenizer
    providers: Any = roll_module("roll.models.model_providers")
    if providers is not None:
        return providers.default_tokenizer_provider(model_args=worker_config.model_args)
    auto: Any = importlib.import_module("transformers").AutoTokenizer
    return auto.from_pretrained(worker_config.model_args.model_name_or_path)
