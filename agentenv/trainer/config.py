"""TrainConfig: everything `agentenv train` can be told, one field per flag, by OpenRLHF's flat names where it has one.

`flags.py` takes its dotted names (0.10.2 on), and names it had before, as other spellings of these.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from agentenv.cluster import Placement
from agentenv.config import RunConfig, parse_json_object
from agentenv.errors import ConfigError
from agentenv.runner import ErrorPolicy
from agentenv.trainer.config_checks import check
from agentenv.types import ChatOptions, Limits, SamplingParams

Estimator = Literal["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce", "gae"]
Correction = Literal["off", "tis", "icepop", "seq-mask-tis"]
Scheduler = Literal["constant", "linear", "cosine", "cosine_with_min_lr"]
_JUDGED = 200
"""Episodes at least that --max_error_share looks back on: of fewer, chance alone would stop a long training."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a model on the episodes of an agent."""

    # What is trained, and on what.
    agent_func_path: str | None = None
    """An agent_func.py with a class AgentExecutor, as OpenRLHF takes it."""
    env: str | None = None
    """Instead: an installed environment (`agentenv list`), module:Attr, or path/file.py[:Attr]."""
    env_kwargs: str = "{}"
    """JSON object of arguments for the environment's constructor."""
    remote_rm_url: str | None = None
    """Or --reward_func_path, the same flag. Instead of both, for one turn: a file with reward_func(queries, prompts,
    labels), or URLs with commas between."""
    reward_batch_size: int = 1
    """Most answers that one call of reward_func judges, as for `agentenv run`."""
    pretrain: str = "tiny-math"
    """The policy: a model that ships with the package, a folder, or a Hugging Face id."""
    critic_pretrain: str | None = None
    """For gae: what the critic starts from; None: --pretrain."""
    prompt_data: str = "word_problems_train"
    """Tasks: FILE.jsonl, FILE.parquet, a Hugging Face dataset id or a built-in name."""
    prompt_split: str | None = None
    """Split of a Hugging Face dataset."""
    input_key: str = "prompt"
    """Column with the prompt: text or chat messages."""
    label_key: str = "label"
    """Column with what the agent grades against."""
    max_samples: int | None = None
    """Take only the first so many tasks."""
    apply_chat_template: bool = True
    """Make text prompts a user message in the model's chat template; off: send the text as it is."""
    chat_template_kwargs: str = "{}"
    """JSON object of variables for the chat template, such as {"enable_thinking": false}."""
    text_feedback: Literal["auto", "raw", "user"] = "auto"
    """What a step's text becomes, as for `agentenv run`."""
    open_reasoning: Literal["keep", "close"] = "keep"
    """Reasoning that a limit cut off: it stays open, or is closed in the model's place."""
    tool_role: Literal["refuse", "user"] = "refuse"
    """Tool results where the template has no such role: an error, or a user message."""
    long_observation: Literal["end", "cut"] = "end"
    """Messages that do not fit: the episode is truncated, or the middle of the longest content is left out."""
    max_observation_tokens: int | None = None
    """Cut messages that become more tokens than this in one turn."""

    # How much of it.
    num_episodes: int = 1
    """Passes over --prompt_data (OpenRLHF's word; an episode is one conversation elsewhere)."""
    max_train_steps: int | None = None
    """Train steps, each on one batch of --rollout_batch_size prompts; None: as --num_episodes gives."""
    rollout_batch_size: int = 16
    """Prompts whose samples one train step trains on."""
    n_samples_per_prompt: int = 8
    train_batch_size: int | None = None
    """Samples per optimiser step; None: all of a train step."""
    max_epochs: int = 1
    """Passes over the samples of a train step."""

    # Episodes.
    max_steps: int = 16
    """Turns of an episode."""
    max_len: int = 2048
    """Tokens of a whole episode."""
    max_new_tokens: int | None = None
    """New tokens per turn; None: as many as fit."""
    temperature: float = 1.0
    top_p: float = 1.0
    concurrency: int = 64
    """Episodes in flight at once."""
    step_timeout_s: float = 60.0
    """Longest one call of the environment may take."""
    episode_timeout_s: float = 600.0
    generate_timeout_s: float = 300.0
    """Longest one generation may take; beyond it the engine counts as failed and the episode is tried again."""
    max_retries: int = 2
    """How often an episode is run again after an infrastructure error."""
    max_error_share: float = 0.2
    """Stop when more than this share of the last episodes failed: the last 200, or those of two train steps where that
    is more; fewer, but 20 at least, at the beginning."""

    # Asynchronous training.
    async_train: bool = False
    """Generate the next samples while the last ones are trained on."""
    async_queue_size: int = 1
    """Batches that may be generated ahead."""
    max_staleness: int | None = None
    """Policy updates that a sample may be behind when it is trained on; None: --async_queue_size."""
    partial_rollout: bool = False
    """Weights change within episodes: engines pause, take them and go on."""
    vllm_generate_batch_size: int | None = None
    """Prompts generated together, more than --rollout_batch_size where --dynamic_filtering throws some away."""

    # Rewards.
    dynamic_filtering: bool = False
    """Train only on prompts whose mean score lies inside --dynamic_filtering_reward_range; others are refilled."""
    dynamic_filtering_reward_range: tuple[float, float] = (0.0, 1.0)
    """Low and high, both outside."""
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    overlong_buffer_len: int | None = None
    """Samples that reach into the last so many tokens before their limit are penalised, more the further they reach.
    With --max_new_tokens, that is the limit, and the longest turn is judged; else --max_len is, and all that the policy
    sampled is. Prompts and observations count in neither."""
    overlong_penalty_factor: float = 1.0
    """Penalty at the very end."""
    stop_properly_penalty_coef: float | None = None
    """Of truncated samples: a factor of their reward in [0, 1], or, below 0, their reward."""

    # The algorithm.
    advantage_estimator: Estimator = "reinforce_baseline"
    credit: Literal["turn", "episode"] = "turn"
    """Whether a turn's tokens are credited with the rewards from that turn on, or with all of the episode, summed."""
    gamma: float = 1.0
    """Discount of later rewards."""
    lambd: float = 1.0
    """Of gae."""
    no_advantage_std_norm: bool = False
    """Centre advantages without dividing by their standard deviation."""
    policy_loss_type: Literal["ppo", "gspo"] = "ppo"
    """ppo: a ratio for each token; gspo: one for each sample, and a mean over samples whatever --loss_agg_mode is."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """Whether every token or every sample weighs the same, or tokens are summed and divided by --max_len (Dr. GRPO)."""
    eps_clip: float = 0.2
    eps_clip_low_high: tuple[float, float] | None = None
    """Two clip ranges, below and above 1, instead of --eps_clip."""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative, above 1."""
    value_clip: float = 0.5
    freezing_actor_steps: int = -1
    """For gae: train steps in which only the critic learns."""
    init_kl_coef: float = 0.0
    """Weight of the KL divergence from the model at the start; 0 needs no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    use_kl_loss: bool = False
    """KL as a term of the loss instead of the reward; with any --kl_estimator its gradient is the divergence's."""
    entropy_loss_coef: float | None = None
    """Weight of the entropy bonus; 0 only logs it."""
    is_correction: Correction = "off"
    """Of what the learner's log-probabilities and the engine's differ by: clamp the ratio of tokens (tis), drop tokens
    (icepop) or samples (seq-mask-tis) outside --is_correction_threshold."""
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Low and high bound of that ratio."""

    # The learner.
    actor_learning_rate: float = 1e-6
    critic_learning_rate: float = 9e-6
    lr_scheduler: Scheduler = "constant"
    lr_warmup_ratio: float = 0.0
    """Share of the train steps in which the learning rate rises to its value."""
    l2: float = 0.0
    """Weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float = 1.0
    """Gradient clipping; 0 does not clip."""
    micro_train_batch_size: int = 8
    """Samples per backward pass."""
    micro_rollout_batch_size: int = 8
    """Samples per forward pass when log-probabilities are computed."""
    use_dynamic_batch: bool = False
    """Micro-batches of up to --train_max_tokens_per_gpu tokens instead of a number of samples."""
    train_max_tokens_per_gpu: int = 16384
    packing_samples: bool = False
    """Several samples in one sequence, without padding."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """What the learner computes in; auto: bf16 on a GPU, fp32 on a CPU."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank; 0 trains everything."""
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get adapters."""
    seed: int = 42
    full_determinism: bool = False

    # Engines, and where they run.
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """What samples; auto: vLLM where it is installed, else transformers."""
    vllm_num_engines: int = 1
    vllm_tensor_parallel_size: int = 1
    vllm_gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that an engine takes; left at that, 0.45 where the learner is on the same GPU."""
    enable_prefix_caching: bool = True
    """Turns of an episode share what the engine computed for the turns before."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    vllm_enable_sleep: bool = False
    """Engines give their memory to the learner while it trains; not with --async_train."""
    ray: bool = True
    """Engines are actors of Ray where it is installed; off: everything runs in this process."""
    engine_cpus: float = 1.0
    """CPU cores of each engine."""
    engine_gpus: float | None = None
    """GPUs of each engine; None: its tensor parallel size where the cluster has any, else 0."""
    env_actors: int = 0
    """Ray actors in which environments run; 0: they run in this process."""
    env_actor_cpus: float = 1.0
    ray_address: str | None = None
    """Ray's cluster: "auto", HOST:6379, "ray://HOST:10001"; None: RAY_ADDRESS where it is set, else one of our own."""
    ray_runtime_env: str = "{}"
    """JSON object that all actors run in, such as {"working_dir": "."}."""
    ray_placement: Placement = "PACK"
    """How Ray places actors: on few nodes, or spread over them."""
    ray_wait_s: float = 60.0
    """Longest wait for room on the cluster."""

    # Evaluation, files and logs.
    eval_dataset: str | None = None
    """Held-out tasks, as --prompt_data."""
    eval_split: str | None = None
    eval_steps: int = -1
    """Evaluate every so many train steps, besides before the first and after the last; -1: only then."""
    eval_temperature: float = 0.6
    eval_n_samples_per_prompt: int = 4
    save_path: str | None = None
    """Where the model, metrics and plots go; default: runs/train-<agent>-<model>-<time>."""
    save_steps: int = -1
    """Write a checkpoint every so many train steps; -1: only at the end and when interrupted."""
    ckpt_path: str | None = None
    """Folder of the checkpoints; None: checkpoints in --save_path."""
    max_ckpt_num: int = 3
    """Checkpoints kept."""
    load_checkpoint: bool = False
    """Go on from the newest checkpoint, where there is one."""
    save_samples: int = 8
    """Episodes of each train step that are kept in trajectories.jsonl, for `agentenv tokens show`."""
    logging_steps: int = 1
    """How often W&B, TensorBoard and MLflow are told; metrics.jsonl has every train step."""
    use_wandb: str | None = None
    """Log to Weights & Biases: its API key, or True for who is logged in."""
    wandb_org: str | None = None
    wandb_group: str | None = None
    wandb_project: str = "agentenv_train"
    wandb_run_name: str | None = None
    use_tensorboard: str | None = None
    """Folder of TensorBoard's logs."""
    use_mlflow: str | None = None
    """MLflow's tracking URI."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """How to show progress; auto: live on a terminal, else plain lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Log records to show on stderr: a warning tells of what went wrong and was mended."""

    def __post_init__(self) -> None:
        """Refuse what is out of bounds or contradicts itself, each with the flag to change."""
        check(self)
        try:
            _ = (self.sampling, self.limits, self.chat_options, self.policy)
        except ValueError as error:
            names = {"max_length": "max_len", "max_turns": "max_steps", "max_tokens": "max_new_tokens"}
            said = re.sub(r"^\w+\.(\w+)", lambda found: f"--{names.get(found[1], found[1])}", str(error))
            raise ConfigError(said) from error

    @property
    def sampling(self) -> SamplingParams:
        """How training episodes are sampled."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_new_tokens, seed=self.seed
        )

    @property
    def limits(self) -> Limits:
        """Budgets of an episode."""
        return Limits(
            self.max_len, self.max_steps, self.step_timeout_s, self.episode_timeout_s, self.generate_timeout_s
        )

    @property
    def chat_options(self) -> ChatOptions:
        """The flags about messages; a sample is one sequence, so histories are kept."""
        return ChatOptions(
            text_feedback=self.text_feedback,
            open_reasoning=self.open_reasoning,
            tool_role=self.tool_role,
            long_observation=self.long_observation,
            max_observation_tokens=self.max_observation_tokens,
            template_kwargs=parse_json_object("--chat_template_kwargs", self.chat_template_kwargs),
        )

    @property
    def policy(self) -> ErrorPolicy:
        """What becomes of episodes that fail."""
        window = max(_JUDGED, 2 * self.num_samples)
        return ErrorPolicy(max_retries=self.max_retries, max_error_share=self.max_error_share, window=window)

    @property
    def episodes(self) -> RunConfig:
        """The flags about episodes, as `agentenv run` has them; the engine is chosen when it is opened."""
        same = {field.name for field in fields(RunConfig)} & {field.name for field in fields(self)} - {"engine"}
        return RunConfig(
            **{name: getattr(self, name) for name in same},
            data=self.prompt_data,
            split=self.prompt_split,
            prompt_key=self.input_key,
            limit=self.max_samples,
            model=self.pretrain,
            num_engines=self.vllm_num_engines,
            n=self.n_samples_per_prompt,
            max_tokens=self.max_new_tokens,
            max_length=self.max_len,
            max_turns=self.max_steps,
        )

    @property
    def num_samples(self) -> int:
        """Samples of one train step."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def optimizer_batch_size(self) -> int:
        """Samples of one optimiser step."""
        return self.train_batch_size or self.num_samples

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may fall below and rise above 1."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def staleness_bound(self) -> int:
        """Most policy updates that a sample is behind; 0 where training waits for its samples."""
        if not self.async_train:
            return 0
        return self.async_queue_size if self.max_staleness is None else self.max_staleness

    def to_dict(self) -> dict[str, Any]:
        """Every flag and its value, as JSON holds them; an API key is left out of it."""
        flags = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return flags | ({"use_wandb": "True"} if self.use_wandb else {})
