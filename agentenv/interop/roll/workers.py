"""Rewards inside ROLL: its reward workers, over our rewards.

In ROLL's configuration, without a change to its source:

    rewards:
      math_rule:
        worker_cls: agentenv.interop.roll.MathRuleRewardWorker

`registry.ROLL_NAMES` lists the eight names. For another worker, subclass one of them or `CustomRewardWorker`. Without
ROLL the same classes have our own base, for tests and for `data_parallel`.

Source: alibaba/ROLL 0.3.0 (8eb27cc2), pipeline/rlvr/rewards and distributed/scheduler.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

from agentenv._util.calls import call
from agentenv._util.loop_thread import run_sync
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.errors import ConfigError
from agentenv.interop._data_proto import read_texts, rows, warn_of_invalid
from agentenv.interop.roll.dispatch import Dispatch, LocalWorker, data_parallel, one_to_all, register, roll_module
from agentenv.rewards.grading import MAX_CONCURRENT, grade_all
from agentenv.rewards.groups.statistics import InvalidPolicy, apply_policy, statistics
from agentenv.rewards.registry import ROLL_NAMES, reward_from
from agentenv.rewards.routing import Router
from agentenv.rewards.rules.math.reward import extract_answer
from agentenv.rewards.rules.text import final_text, with_opened_thought
from agentenv.rewards.types import Response, Reward, RewardResult

__all__ = ["CustomReward", "Dispatch", "RollRewards", "data_parallel", "one_to_all", "register", "worker_class"]

COLUMNS = (
    "id", "prompt", "messages", "ground_truth", "tag", "domain", "case_type", "test_cases", "test_case_function",
    "reward_model", "multi_modal_inputs", "source", "difficulty", "data_source", "extra_info",
)  # fmt: skip
"""Columns of a row that rewards see; ROLL's batches may keep others on other machines."""
PUBLIC_MODULE = "agentenv.interop.roll"
"""The module of the worker classes, by which Ray pickles them."""
FACTS = ("global_step", "max_steps")
"""Keys of `meta_info` that rewards see."""
PATCH_SIZE = 14
"""Side of an image patch in pixels, in Qwen2.5-VL."""
POLICIES = (InvalidPolicy.GROUP_MEAN, InvalidPolicy.ZERO, InvalidPolicy.KEEP, InvalidPolicy.RAISE)


class RollRewards:
    """Grades batches of ROLL's shape with one reward, or with one for each domain.

    Rewards see a response with the `<think>` that its prompt ends with.

    Args:
        reward: settings for `reward_from`, or a reward; with `tags`, a mapping from domain to such settings.
        tokenizer: an object with `batch_decode`.
        tags: the domain of each tag, or, like ROLL's `tag_included`, the tags of each domain. A row's domain is that of
            its `tag`; without a tag, its `domain`.
        on_unknown: for a row of no domain: "raise" for the batch, or "invalid", which `invalid_policy` then handles.
        invalid_policy: the reward of a response without a grade: the mean of the others to its prompt, or 0.0
            without others (group_mean), 0.0 (zero), -999.0 (keep), or an InfraError for the batch (raise).
        dtype: dtype of the tensors; ROLL's are float16.
        limit_s: longest time to grade one response; by default as in `grading.patience_s`.
        max_concurrent: maximum number of responses to grade concurrently.

    Raises:
        ConfigError: an argument has an invalid value.
    """

    patch_size: int | None = PATCH_SIZE
    """Turns `multi_modal_inputs["image_grid_thw"]` into `image_size`. None for models whose boxes are in thousandths of
    the image, such as Qwen2-VL and Qwen3-VL."""

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
        if tags is None:
            self.reward: Reward = reward_from(reward)
        elif isinstance(reward, Mapping):
            rewards = {domain: reward_from(spec) for domain, spec in reward.items()}
            self.reward = Router(rewards, tags, key="tag")
        else:
            raise ConfigError(
                f"reward: expected a reward for each domain of tags, got {reward!r:.200}. Pass a mapping."
            )
        self._raises = one_of("on_unknown", on_unknown, ("raise", "invalid")) == "raise"
        self._policy = one_of("invalid_policy", invalid_policy, POLICIES)
        self._dtype = one_of("dtype", dtype, ("float16", "bfloat16", "float32"))
        self._limit_s = None if limit_s is None else number("limit_s", limit_s, low=0.001)
        self._max_concurrent = whole_number("max_concurrent", max_concurrent, low=1)

    def compute_rewards(self, data: Any) -> Any:
        """Return `token_level_rewards` [B, T] of zeros, `response_level_rewards` [B] and `scores` [B], as ROLL's.

        The rows keep their order. The result is of the class of `data` if that has `from_dict`, else a dict.
        `meta_info["metrics"]` has the numbers of `Statistics.metrics`. A missing `score` is 0.0.

        Raises:
            DataError: a row is of no domain, under `on_unknown="raise"`; raised before any row is graded.
            InfraError: a response has no grade, under `invalid_policy="raise"`.
        """
        return run_sync(self.acompute_rewards(data))

    async def acompute_rewards(self, data: Any) -> Any:
        """Do the same as `compute_rewards`, for callers that can await."""
        import torch

        responses, groups = await asyncio.to_thread(self._read, data)  # decoding a long batch takes time
        if self._raises and isinstance(self.reward, Router):
            for response in responses:
                self.reward.domain(response)
        results = await grade_all(self.reward, responses, limit_s=self._limit_s, max_concurrent=self._max_concurrent)
        warn_of_invalid(results)
        applied = apply_policy(results, groups, self._policy)
        dtype = getattr(torch, self._dtype)
        most = torch.finfo(dtype).max
        scores = [(result.reward if result.score is None else result.score) or 0.0 for result in results]
        columns = [torch.tensor(each, dtype=torch.float64).clamp(-most, most) for each in (applied.rewards, scores)]
        tensors = {
            "token_level_rewards": torch.zeros(data.batch["responses"].shape, dtype=dtype),
            "response_level_rewards": columns[0].to(dtype),
            "scores": columns[1].to(dtype),
        }
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
            if isinstance(self.reward, Router) and row.get(self.reward.key) is None:
                row[self.reward.key] = row.get("domain")
            inputs, size = row.get("multi_modal_inputs"), self.patch_size
            grids = inputs.get("image_grid_thw") if isinstance(inputs, Mapping) else None
            if grids is not None and row.get("image_size") is None:  # which box rewards need, in the boxes' units
                patches = [grid[-2:] for grid in (grids.tolist() if hasattr(grids, "tolist") else grids)]
                row["image_size"] = [[1000, 1000] if size is None else [w * size, h * size] for h, w in patches]
            label, reward_model = row.get("ground_truth"), row.get("reward_model")
            if label is None and isinstance(reward_model, Mapping):
                label = reward_model.get("ground_truth")
            text = with_opened_thought(text, prompt)
            responses.append(Response(text, label, row.get("prompt") or prompt, {**facts, **row}))
            groups.append(row["id"] if isinstance(row.get("id"), str | int) else ids)
        return responses, groups


class RewardWorker:
    """Our part of a worker; it precedes ROLL's Worker among the bases of a class.

    The class attributes `reward` and `options` define the worker; a subclass overrides them.
    """

    reward: Any = None
    """Settings for `reward_from`."""
    options: Mapping[str, Any] = {}
    """Keyword arguments of `RollRewards`, and `judge`: settings of the judge that the reward asks, such as
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
        """Return the reward, with the judge of `options`; override it for a reward that needs its own client."""
        if "judge" not in self.options:
            return self.reward
        settings = {self.reward: {}} if isinstance(self.reward, str) else self.reward
        if not isinstance(settings, Mapping) or len(settings) != 1:
            raise ConfigError(
                f"options: expected no judge besides the reward {self.reward!r:.200}. Name the judge in the reward."
            )
        ((name, arguments),) = settings.items()
        return {name: {**arguments, "judge": self.options["judge"]}}

    def initialize(self, pipeline_config: Any) -> None:
        """Do nothing; ROLL calls this method on every worker."""

    def compute_rewards(self, data: Any) -> Any:
        """See `RollRewards.compute_rewards`."""
        return self.rewards.compute_rewards(data)


class CustomReward(RewardWorker):
    """The reward worker of ROLL's guide: 1 for the answer, 0.5 for the format, minus a penalty for repetition.

    A subclass overrides `_check_answer_correctness` and others; `worker_class` turns it into a worker class. An
    exception of these methods costs only that response its reward.
    """

    def make_reward(self) -> Any:
        """Return a reward that calls the worker's methods."""
        return _WorkerReward(self._compute_single_reward)

    def _compute_single_reward(self, response: str, ground_truth: Any) -> float:
        correct = bool(self._check_answer_correctness(response, ground_truth))
        formatted = bool(self._check_format_correctness(response))
        return 1.0 * correct + 0.5 * formatted + self._compute_repetition_penalty(response)

    def _check_answer_correctness(self, response: str, ground_truth: Any) -> bool:
        final = final_text(response)
        return final is not None and extract_answer(final) == str(ground_truth).strip()

    def _check_format_correctness(self, response: str) -> bool:
        from agentenv.rewards.rules.format import compute_format_reward

        return compute_format_reward([response]) == [1.0]

    def _compute_repetition_penalty(self, response: str) -> float:
        from agentenv.rewards.rules.repetition import RepetitionReward

        return RepetitionReward(ngram_size=3, max_penalty=-0.1).penalty(response)


class _WorkerReward:
    """A worker's method as a reward. It is a separate class, because Ray treats a class with async methods as async."""

    bounds = (-math.inf, math.inf)

    def __init__(self, function: Callable[[str, Any], float]) -> None:
        self._function = function

    async def grade(self, response: Response) -> RewardResult:
        """Return the method's reward, computed in a thread."""
        return RewardResult(float(await call(self._function, response.text, response.label)))


def worker_class(name: str, kind: type[RewardWorker] = RewardWorker, **attributes: Any) -> type:
    """Return a worker class of this kind: over ROLL's Worker and with its decorators if ROLL is installed.

    Args:
        name: the class's name.
        kind: the class to extend.
        attributes: attributes of the class, such as `reward` and `options`.
    """
    worker = roll_module("roll.distributed.executor.worker")
    decorators: Any = roll_module("roll.distributed.scheduler.decorator")
    modes, decorate = (Dispatch, register) if decorators is None else (decorators.Dispatch, decorators.register)
    methods = {
        "initialize": decorate(dispatch_mode=modes.ONE_TO_ALL)(_copy_of(kind.initialize)),
        "compute_rewards": decorate(dispatch_mode=modes.DP_MP_COMPUTE, clear_cache=False)(
            _copy_of(kind.compute_rewards)
        ),
    }
    bases = (kind, LocalWorker if worker is None else worker.Worker)
    return type(name, bases, {"__module__": PUBLIC_MODULE, "__doc__": kind.__doc__, **methods, **attributes})


def _copy_of(method: Any) -> Any:
    """Return a new function, so that a decorator's marks do not end up on the kind's method."""

    @wraps(method)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return copy


@cache
def named_worker_class(name: str) -> type:
    """Return one of ROLL's eight worker classes, or `CustomRewardWorker`."""
    if name == "CustomRewardWorker":
        return worker_class(name, CustomReward)
    return worker_class(name, reward=ROLL_NAMES[name])


def tokenizer_of(worker_config: Any) -> Any:
    """Return a worker's tokenizer: `worker_config.tokenizer`, or the one that ROLL or transformers loads."""
    tokenizer = getattr(worker_config, "tokenizer", None)
    if tokenizer is not None:
        return tokenizer
    providers: Any = roll_module("roll.models.model_providers")
    if providers is not None:
        return providers.default_tokenizer_provider(model_args=worker_config.model_args)
    auto: Any = importlib.import_module("transformers").AutoTokenizer
    return auto.from_pretrained(worker_config.model_args.model_name_or_path)
