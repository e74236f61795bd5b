"""TrainConfig: the flags of `agentenv train`.

Settings that `agentenv run` has too are its fields and groups; the others have OpenRLHF's flat names. OpenRLHF's
names of them are accepted: `ALIASES` has the names of one field, and `flags.py` translates what is more than a name and
refuses what has no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from agentenv.chat.chat import ChatOptions
from agentenv.core.types import SamplingParams
from agentenv.episode.runner import ErrorPolicy
from agentenv.runs.config import (
    ErrorOptions,
    LimitOptions,
    RayOptions,
    RunConfig,
    ScreenOptions,
    SourceConfig,
    StopOptions,
)
from agentenv.runs.mixture import longest
from agentenv.training.openrlhf_flags import DOTTED

Estimator = Literal["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce", "gae"]
Correction = Literal["off", "tis", "icepop", "seq-mask-tis"]
Scheduler = Literal["constant", "linear", "cosine", "cosine_with_min_lr"]
_MIN_ERROR_WINDOW = 200
"""--max_error_share looks at this many episodes or more; in a smaller window chance alone could stop a training run."""


@dataclass(frozen=True)
class OneSequenceOptions(ChatOptions):
    """How messages become tokens. History is always kept: a sample is one sequence."""

    history: Literal["keep"] = field(default="keep", init=False)


@dataclass(frozen=True)
class TrainConfig(SourceConfig):
    """Train a model on the episodes of an agent, here or with engines on a Ray cluster."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **SourceConfig.ALIASES,
        **{dotted: name for name, dotted in DOTTED.items()},
    }
    REPEATABLE: ClassVar[tuple[str, ...]] = ("env", "eval_dataset")
    FIRST_FLAGS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What to train on": ("agent_func_path", "env", "data", "limit"),
        "Model and engine": ("model", "engine", "num_engines"),
        "Sizes": ("max_train_steps", "num_episodes", "rollout_batch_size", "n", "max_tokens"),
        "Limits": ("max_turns", "max_length"),
        "Algorithm": ("advantage_estimator", "init_kl_coef", "actor_learning_rate", "seed"),
        "Evaluation and output": ("eval_dataset", "eval_steps", "out", "save_steps", "resume"),
    }
    SECTIONS: ClassVar[Mapping[str, str]] = {
        "env": "What to train on",
        "limit": "Tasks",
        "concurrency": "What to train on",
        "model": "Model and data",
        "num_episodes": "Sizes",
        "max_tokens": "Sampling",
        "async_train": "Asynchronous training",
        "dynamic_filtering": "Rewards",
        "advantage_estimator": "Algorithm",
        "actor_learning_rate": "Learner",
        "engine": "Engines",
        "eval_dataset": "Evaluation, files and logs",
    }

    model: str = "tiny-math"
    """Model to train: a shipped model, a folder, or a Hugging Face id."""
    critic_pretrain: str | None = None
    """Model to initialize the critic from, for gae. None uses --model."""
    curriculum: str | None = None
    """Change the weights of a mixture's environments before each train step. `spread` prefers those whose groups have
    different rewards; FILE.py:name is a function from statistics to weights."""
    chat: OneSequenceOptions = field(default_factory=OneSequenceOptions)
    """How messages become tokens."""

    num_episodes: int = 1
    """Passes over --data, and so the number of train steps; with --dynamic_filtering, further passes replace what is
    rejected. The name is OpenRLHF's; elsewhere an episode is one conversation."""
    max_train_steps: int | None = None
    """Train steps, each on a batch of --rollout_batch_size prompts. None derives them from --num_episodes."""
    rollout_batch_size: int = 16
    """Prompts per train step."""
    n: int = 8
    """Episodes per prompt."""
    train_batch_size: int | None = None
    """Samples per optimizer step. None uses all samples of a train step."""
    max_epochs: int = 1
    """Passes over the samples of a train step."""

    limits: LimitOptions = field(default_factory=LimitOptions)
    """Budgets of one episode. An episode that runs out of one is truncated."""
    errors: ErrorOptions = field(default_factory=ErrorOptions)
    """What happens when episodes fail."""
    max_tokens: int | None = None
    """New tokens per turn. None uses all room that is left."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this total probability."""

    async_train: bool = False
    """Sample the next batch during training on the last one."""
    async_queue_size: int = 1
    """Batches that may be sampled ahead."""
    max_staleness: int | None = None
    """Largest number of policy updates between sampling and training. None uses --async_queue_size."""
    partial_rollout: bool = False
    """Update weights during episodes: engines pause, load the weights and continue."""
    vllm_generate_batch_size: int | None = None
    """Prompts to sample together. Use more than --rollout_batch_size if --dynamic_filtering drops many."""

    dynamic_filtering: bool = False
    """Train only on prompts whose mean score is inside --dynamic_filtering_reward_range, and sample others instead. The
    reward counts only where episodes have no score."""
    dynamic_filtering_reward_range: tuple[float, float] = (0.0, 1.0)
    """Low and high bound, both excluded."""
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    """Low and high bound of rewards after the baseline is subtracted."""
    overlong_buffer_len: int | None = None
    """Penalize samples that reach into this many tokens before their limit; the penalty grows linearly. With
    --max_tokens that is the limit, applied to the longest turn; otherwise --max_length is, applied to all sampled
    tokens. Prompts and observations do not count."""
    overlong_penalty_factor: float = 1.0
    """Penalty at the limit."""
    stop_properly_penalty_coef: float | None = None
    """For samples whose last action a token limit cut: a factor for their reward, in [0, 1], or a negative number that
    replaces it. `rollout/reward` is without penalties, `train/reward` with them."""

    advantage_estimator: Estimator = "reinforce_baseline"
    """Estimator of the advantages."""
    credit: Literal["turn", "episode"] = "turn"
    """Credit a turn's tokens with the rewards from that turn on, or with the sum of the episode's rewards."""
    gamma: float = 1.0
    """Discount of later rewards."""
    lambd: float = 1.0
    """Lambda of gae."""
    no_advantage_std_norm: bool = False
    """Subtract the mean from advantages but do not divide them by their standard deviation."""
    policy_loss_type: Literal["ppo", "gspo"] = "ppo"
    """`ppo`: one ratio per token. `gspo`: one ratio per sample, and the mean over samples with any --loss_agg_mode."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """Weight all tokens equally, weight all samples equally, or divide each sample's sum by --max_length (Dr. GRPO)."""
    eps_clip: float = 0.2
    """Clip range of the ratio around 1."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Clip ranges below and above 1, instead of --eps_clip."""
    dual_clip: float | None = None
    """Upper bound of the ratio for negative advantages, above 1."""
    value_clip: float = 0.5
    """Clip range of the critic's values."""
    freezing_actor_steps: int = -1
    """Train steps in which only the critic learns, for gae."""
    init_kl_coef: float = 0.0  # `kl_in_reward` in algorithm/experience.py chooses between reward and loss
    """Coefficient of the KL divergence from the initial model. 0 does not load a reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence."""
    use_kl_loss: bool = False
    """Add the KL divergence to the loss instead of the reward. Its gradient is exact with any --kl_estimator."""
    entropy_loss_coef: float | None = None
    """Coefficient of the entropy bonus. 0 only logs the entropy."""
    is_correction: Correction = "off"
    """Correct for different log-probabilities of learner and engine. Outside --is_correction_threshold, clamp ratios of
    tokens (tis), drop tokens (icepop), or drop samples (seq-mask-tis)."""
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Low and high bound of that ratio."""

    actor_learning_rate: float = 1e-6
    """Learning rate of the model."""
    critic_learning_rate: float = 9e-6
    """Learning rate of the critic."""
    lr_scheduler: Scheduler = "constant"
    """Schedule of the learning rates."""
    lr_warmup_ratio: float = 0.0
    """Share of the train steps during which the learning rate rises to its value."""
    l2: float = 0.0
    """Weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Adam's beta 1 and beta 2."""
    max_norm: float = 1.0
    """Largest norm of the gradient. 0 does not clip."""
    micro_train_batch_size: int = 8
    """Samples per backward pass."""
    micro_rollout_batch_size: int = 8
    """Samples per forward pass for log-probabilities."""
    use_dynamic_batch: bool = False
    """Fill micro-batches with up to --train_max_tokens_per_gpu tokens instead of a number of samples."""
    train_max_tokens_per_gpu: int = 16384
    """Tokens per micro-batch with --use_dynamic_batch."""
    packing_samples: bool = False
    """Pack several samples into one sequence without padding."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Data type of the learner's computation. `auto` uses bf16 on a GPU and fp32 on a CPU."""
    lora_rank: int = 0
    """Rank of LoRA adapters. 0 trains all weights."""
    lora_alpha: int = 16
    """Alpha of LoRA adapters."""
    lora_dropout: float = 0.0
    """Dropout of LoRA adapters."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get LoRA adapters."""
    seed: int = 42
    """Seed of sampling, environments and training."""

    engine: Literal["auto", "vllm", "hf"] = "auto"
    """Engine for sampling. `auto` uses vLLM if it is installed and there are GPUs, otherwise transformers.
    API models (`run --engine chat`) return no token ids to train on."""
    num_engines: int = 1
    """Number of engines."""
    vllm_tensor_parallel_size: int = 1
    """GPUs that share the weights of an engine."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of GPU memory for an engine. The default becomes 0.45 if the learner is on the same GPU."""
    enable_prefix_caching: bool = True
    """Reuse the computation of earlier turns of an episode."""
    enforce_eager: bool = False
    """Do not use CUDA graphs."""
    vllm_enable_sleep: bool = False
    """Free the engines' GPU memory during training; not with --async_train."""
    ray: bool = True
    """Run engines as Ray actors if Ray is installed. Off: run everything in this process."""
    actors: RayOptions = field(default_factory=RayOptions)
    """Engines and environments in Ray actors, on this machine or a cluster."""

    eval_dataset: tuple[str, ...] = ()
    """Held-out tasks, in the forms of --data. May be given several times; in a mixture ENV=DATA names the
    environment."""
    eval_split: str | None = None
    """Split of a Hugging Face dataset with held-out tasks."""
    eval_limit: int | None = None
    """Number of held-out tasks of each set, from its beginning. None takes all."""
    eval_steps: int = -1
    """Train steps between evaluations. -1 evaluates only before the first step and after the last."""
    eval_temperature: float = 0.6
    """Sampling temperature of evaluations."""
    eval_n_samples_per_prompt: int = 4
    """Episodes per held-out task."""
    early_stop: str | None = None
    """METRIC:PATIENCE, such as score:3. End the training when the metric of the last PATIENCE evaluations is not better
    than the best before; more is better. `model-best` is chosen by this metric, otherwise by the score, or the reward
    without scores."""
    out: str | None = None
    """Folder for the model and the metrics. Default: runs/train-<agent>-<model>-<time>."""
    save_steps: int = -1
    """Train steps between checkpoints. -1 writes one only at the end and on interruption."""
    ckpt_path: str | None = None
    """Folder for checkpoints. None uses `checkpoints` in --out."""
    max_ckpt_num: int = 3
    """Number of checkpoints to keep."""
    resume: bool = False
    """Continue the training in --out from its newest checkpoint, if one exists."""
    save_samples: int = 8
    """Episodes of each train step to keep in trajectories.jsonl, for `agentenv view`, `show` and `tokens show`: as many
    whole groups as they fill, at least one; and as many of each evaluation, in eval/, always of the same tasks, at
    least one of each --eval_dataset. 0 keeps none."""
    save_samples_by: Literal["spread", "first", "random", "all"] = "spread"
    """Which groups to keep: half of them those with the widest spread of rewards and the others at random, both of
    the environments of a mixture in turn, also from step to step; the first, a random choice, or all of the train
    step."""
    save_token_stats: bool = True
    """Keep the learner's log-probability and the advantage of each sampled token of these episodes, in
    token_stats.jsonl; `agentenv view` shows them."""
    logging_steps: int = 1
    """Train steps between updates of trackers, such as W&B. metrics.jsonl has every train step."""
    screen: ScreenOptions = field(default_factory=lambda: ScreenOptions(log_level="warning"))
    """What is shown. Warnings report problems that were handled."""

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of training episodes."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, seed=self.seed
        )

    @property
    def policy(self) -> ErrorPolicy:
        """Handling of failed episodes."""
        return self.errors.policy(max(_MIN_ERROR_WINDOW, 2 * self.num_samples))

    @property
    def episodes(self) -> RunConfig:
        """The flags about episodes as a RunConfig. `train` chooses the engine later."""
        return RunConfig(
            **{each.name: getattr(self, each.name) for each in fields(SourceConfig)},
            n=self.n,
            model=self.model,
            num_engines=self.num_engines,
            sampling=self.sampling,
            limits=self.limits,
            errors=StopOptions(self.errors.max_retries, self.errors.max_error_share),
            chat=self.chat,
            ray=self.actors,
        )

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of an episode, in a mixture of the longest ones."""
        return longest(self.env, self.limits.for_env().max_length)

    @property
    def num_samples(self) -> int:
        """Samples per train step."""
        return self.rollout_batch_size * self.n

    @property
    def optimizer_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.train_batch_size or self.num_samples

    @property
    def clip_range(self) -> tuple[float, float]:
        """Clip ranges of the ratio below and above 1."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def staleness_bound(self) -> int:
        """Largest number of policy updates between sampling and training; 0 for synchronous training."""
        if not self.async_train:
            return 0
        return self.async_queue_size if self.max_staleness is None else self.max_staleness
