"""RunConfig: the flags of `agentenv run`, and the groups of flags that `agentenv train` has too."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from agentenv._util.ray.cluster import ClusterConfig, Placement
from agentenv.chat.chat import ChatOptions
from agentenv.core.arguments import parse_json_object
from agentenv.core.types import Limits, SamplingParams, own_limits
from agentenv.engines.factory import engine_class
from agentenv.episode.runner import ErrorPolicy
from agentenv.episode.tasks import TaskSource
from agentenv.errors import ConfigError
from agentenv.rewards.groups.batch import GROUP_LIMIT_S
from agentenv.runs.flat_config import FlatConfig
from agentenv.runs.mixture import source_name

FREE_ON_RESUME = (
    "out", "resume", "concurrency", "progress", "json", "grace_s", "max_retries", "max_error_share", "base_url",
    "device", "log_level", "generate_timeout_s", "stall_timeout_s", "num_engines", "ray_address",
    "engine_cpus", "engine_gpus", "env_actors", "env_actor_cpus", "rollout_workers", "ray_runtime_env",
    "ray_placement", "ray_wait_s", "group_timeout_s", "api_key_env", "prices",
    "use_wandb", "wandb_org", "wandb_group", "wandb_project", "wandb_run_name", "use_tensorboard",
    "use_mlflow", "use_trackio", "view",
)  # fmt: skip
"""Flags that may differ when a run is resumed: they change how it runs, not what it measures."""

SOURCES = ("env", "agent_func_path", "remote_rm_url")
"""Flags that name what runs the episodes."""

OPENRLHF_NAMES = {
    "reward_func_path": "remote_rm_url",
    "pretrain": "model",
    "prompt_data": "data",
    "prompt_split": "split",
    "input_key": "prompt_key",
    "max_samples": "limit",
    "n_samples_per_prompt": "n",
    "max_new_tokens": "max_tokens",
    "max_steps": "max_turns",
    "max_len": "max_length",
    "vllm_num_engines": "num_engines",
    "save_path": "out",
    "load_checkpoint": "resume",
}
"""OpenRLHF's flat names of flags, which `run` and `train` take too, and the field that each stands for."""


_USER_INFO = re.compile(r"(?<=://)[^/@\s,]+@")


def _check(flag: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"--{flag}: expected {expected}, got {value!r}.")


@dataclass(frozen=True)
class LimitOptions:
    """Budgets of one episode. An episode that runs out of one is truncated."""

    max_length: int | None = None
    """Tokens of a whole episode: prompt, actions and observations. Default: the environment's `max_length`, else
    2048."""
    max_turns: int | None = None
    """Turns of an episode. Default: the environment's `max_turns`, else 16. OpenRLHF's own files have no such limit."""
    step_timeout_s: float = 60.0
    """Time limit of one call of the environment, in seconds."""
    episode_timeout_s: float = 600.0
    """Time limit of a whole episode, in seconds."""
    generate_timeout_s: float = 300.0
    """Time limit of one generation, in seconds. Beyond it the engine counts as failed and the episode is retried."""

    def __post_init__(self) -> None:
        """Refuse budgets in which no turn fits."""
        self.for_env()

    def for_env(self, env: type[Any] | None = None) -> Limits:
        """Return the limits; what no flag sets is the attribute of the environment's class, else the default."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return Limits(**{**own_limits(env), **given})


@dataclass(frozen=True)
class ErrorOptions:
    """What happens when episodes fail."""

    max_retries: int = 2
    """How often an episode runs again after an infrastructure error, and in each attempt how often a step that asks for
    it (`InfraError(retry_step=True)`) is called again. Both wait 1, 2, 4, … s. All of an attempt fits into
    --episode_timeout_s."""
    max_error_share: float = 0.2
    """Stop when more than this share of the episodes failed, once 20 have ended and at the end of the run; `train`
    looks at the last 200 or more."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        _check("max_retries", self.max_retries, 0 <= self.max_retries < math.inf, "an integer >= 0")
        _check("max_error_share", self.max_error_share, 0 <= self.max_error_share <= 1, "a number in [0, 1]")

    def policy(self, window: int | None = None) -> ErrorPolicy:
        """Return the runner's policy; it judges the last `window` episodes, by default all of them."""
        return ErrorPolicy(max_retries=self.max_retries, max_error_share=self.max_error_share, window=window)


@dataclass(frozen=True)
class StopOptions(ErrorOptions):
    """Failed episodes, stalls and interruption."""

    stall_timeout_s: float = 600.0
    """When no episode has progressed for this many seconds, write what they wait for to stall-1.txt in --out. The run
    stops after as long again, or after the longest of --generate_timeout_s, --step_timeout_s and --group_timeout_s if
    that is longer."""
    grace_s: float = 30.0
    """Seconds that episodes in progress have to finish after Ctrl-C before they are cancelled."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        super().__post_init__()
        _check("stall_timeout_s", self.stall_timeout_s, self.stall_timeout_s > 0, "seconds > 0")
        _check("grace_s", self.grace_s, self.grace_s >= 0, "seconds >= 0")


@dataclass(frozen=True)
class RayOptions:
    """Ray: engines (--engine ray) and environments in actors, on this machine or a cluster."""

    engine_cpus: float = 1.0
    """CPU cores of each engine actor."""
    engine_gpus: float | None = None
    """GPUs of each engine actor. Default: as many as it computes on if the cluster has any, else 0."""
    env_actors: int | None = None
    """Number of processes that run environments, each for many episodes; of several environments each has as many.
    They are Ray actors with --engine ray, with --ray_address or in a process that is connected to Ray, else processes
    of this machine. 0 runs environments in this process. Default: 0, or one local process per core for a class with
    `cpu_bound = True`."""
    env_actor_cpus: float = 1.0
    """CPU cores of each environment actor in Ray."""
    rollout_workers: int = 0
    """Number of processes of this machine that run episodes, each for many at once. 0 runs all in this process, which
    is enough until its core is busy. Not with --env_actors: environments run in the workers."""
    ray_address: str | None = None
    """Ray cluster: "auto", HOST:6379 or "ray://HOST:10001". Default: RAY_ADDRESS if it is set, else start Ray on this
    machine."""
    ray_runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """JSON object: Ray's runtime environment for all actors. {"working_dir": "."} ships the files of this folder."""
    ray_placement: Placement = "PACK"
    """How Ray places the actors: packed on few nodes, or spread over them."""
    ray_wait_s: float = 60.0
    """How long to wait for room on the cluster, in seconds."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        num = self.env_actors
        _check("env_actors", num, num is None or 0 <= num < math.inf, "an integer >= 0")
        _check("rollout_workers", self.rollout_workers, self.rollout_workers >= 0, "an integer >= 0")
        if self.rollout_workers and num:
            raise ConfigError(f"--env_actors: expected none with --rollout_workers, got {num}. Leave one out.")
        for name in ("engine_cpus", "engine_gpus", "env_actor_cpus", "ray_wait_s"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 <= value < math.inf, "a number >= 0")

    def cluster(self, num_engines: int, num_envs: int = 1) -> ClusterConfig:
        """Return which Ray to use, and the CPU cores that the engines and the actors of each environment need there."""
        return ClusterConfig(
            self.ray_address,
            self.ray_runtime_env,
            self.ray_placement,
            self.ray_wait_s,
            cpus=num_engines * self.engine_cpus + num_envs * (self.env_actors or 0) * self.env_actor_cpus,
        )


def parsed_reward(flag: str, given: Any) -> Any:
    """Return the settings of a reward: JSON as an object, all else as it is."""
    is_json = isinstance(given, str) and given.lstrip().startswith("{")
    return parse_json_object(flag, given) if is_json else given


IncompleteGroups = Literal["grade", "drop"]


@dataclass(frozen=True)
class GroupOptions:
    """A reward of all answers to a task together, in addition to the environment's rewards."""

    group_reward: str | None = None
    """Compare all answers to a task when the last one has ended, and add the result to the reward of each one's last
    turn: pairwise, tournament, bradley_terry, listwise, rm_gallery, FILE.py:name, module:name, a reward of single
    answers, or {"NAME": {"option": value}}."""
    reference_key: str | None = None
    """Column with an answer that takes part in the comparison, for the win rate against it."""
    incomplete_groups: IncompleteGroups = "grade"
    """If an episode of a task failed: `grade` the other answers without it, or `drop` the rewards of them all."""
    group_timeout_s: float = GROUP_LIMIT_S
    """Time limit of comparing the answers to one task, in seconds. Beyond it they have no reward."""

    @property
    def reward(self) -> Any:
        """`group_reward`, with JSON parsed."""
        return parsed_reward("--group_reward", self.group_reward)

    def __post_init__(self) -> None:
        """Refuse values out of range, and flags that do nothing without --group_reward."""
        _check("group_timeout_s", self.group_timeout_s, self.group_timeout_s > 0, "seconds > 0")
        for name in ("reference_key", "incomplete_groups", "group_timeout_s"):
            value = getattr(self, name)
            if self.group_reward is None and value != getattr(type(self), name):
                raise ConfigError(f"--{name}: expected --group_reward with it, got {value!r} alone. Add it.")


@dataclass(frozen=True)
class ScreenOptions:
    """What is shown."""

    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """How to show progress. `auto` is live on a terminal, else plain lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    """Lowest level of log records to show on stderr."""
    json: bool = False
    """Print JSON lines on stdout and nothing else."""
    view: bool = False
    """Open a page that shows the episodes as they end (`agentenv view`), and keep it open until Ctrl-C."""


@dataclass(frozen=True)
class OutputOptions(ScreenOptions):
    """Where results go, and what is shown."""

    out: str | None = None
    """Run directory. Default: runs/<env>-<model>-<time>; of `rescore`, runs/rescored-<env>-<model>-<time>."""
    resume: bool = False
    """Continue the run in --out with its flags: keep finished episodes and run the rest."""


@dataclass(frozen=True)
class TrackerOptions:
    """Services that get the numbers too."""

    use_wandb: str | None = None
    """Log to Weights & Biases: an API key, or True if you are logged in."""
    wandb_org: str | None = None
    """Weights & Biases organization."""
    wandb_group: str | None = None
    """Group of the run, for Weights & Biases and trackio."""
    wandb_project: str | None = None
    """Project for Weights & Biases and trackio, and experiment for MLflow. Default: agentenv_run or agentenv_train."""
    wandb_run_name: str | None = None
    """Name of the run for all trackers. Default: that of the run directory."""
    use_tensorboard: str | None = None
    """Folder for TensorBoard logs."""
    use_mlflow: str | None = None
    """MLflow tracking URI."""
    use_trackio: str | None = None
    """Log to trackio: a Hugging Face Space, or True for files on this machine."""

    def __post_init__(self) -> None:
        """Refuse values that mean no tracker, and flags that do nothing without one."""
        for name, expected in _TRACKERS.items():
            value = getattr(self, name)
            if str(value).lower() in ("", "false", "no", "off", "0"):
                raise ConfigError(f"--{name}: expected {expected}, got {value!r}. Leave the flag out to disable it.")
        for name, needed in _OF_TRACKERS.items():
            if getattr(self, name) is not None and not any(getattr(self, each) for each in needed):
                flags = " or ".join(f"--{each}" for each in needed)
                raise ConfigError(f"--{name}: expected {flags} with it, got none. Add it, or leave --{name} out.")


_TRACKERS = {
    "use_wandb": "an API key, or True",
    "use_tensorboard": "a folder",
    "use_mlflow": "a tracking URI",
    "use_trackio": "a Space, or True",
}
_OF_TRACKERS = {
    "wandb_org": ("use_wandb",),
    "wandb_group": ("use_wandb", "use_trackio"),
    "wandb_project": ("use_wandb", "use_mlflow", "use_trackio"),
    "wandb_run_name": tuple(_TRACKERS),
}


@dataclass(frozen=True)
class SourceConfig(FlatConfig):
    """What runs and rewards the episodes: flags of `run` and of `train`."""

    ALIASES: ClassVar[Mapping[str, str]] = OPENRLHF_NAMES
    BARE: ClassVar[Mapping[str, str]] = {"use_wandb": "True", "use_trackio": "True"}

    REPEATABLE: ClassVar[tuple[str, ...]] = ("env",)

    env: tuple[str, ...] = ()
    """Environment: an installed name (`agentenv list`), module:Attr, path/file.py[:Attr], or KIND:NAME of another
    library (`agentenv list --from KIND`). The class has `reset` and `step`, or `run`: an agent with its own loop over
    an OpenAI client. Given several times, the environments are a
    mixture; ENV:WEIGHT sets its share of the training. Also FILE.yaml or FILE.json with a list of entries: env, name,
    weight, env_kwargs, data, split, prompt_key, label_key, limit, max_turns, max_length."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of arguments for the environment's constructor."""
    agent_func_path: str | None = None
    """An OpenRLHF agent_func.py, instead of --env."""
    remote_rm_url: str | None = None
    """Instead of --env, for single-turn episodes: a file with reward_func(queries, prompts,
    labels), or the URLs of reward servers, separated by commas."""
    reward_batch_size: int = 1
    """Maximum number of answers per call of reward_func. With 1, as in OpenRLHF, no reward depends on other answers."""
    dataset: TaskSource = field(default_factory=TaskSource)
    """Tasks."""
    limit: int | None = None
    """Use only the first LIMIT tasks."""
    apply_chat_template: bool = True
    """Make text prompts a user message in the model's chat template. If off, send the text as it is."""
    concurrency: int = 64
    """Maximum number of episodes in progress at once."""
    groups: GroupOptions = field(default_factory=GroupOptions)
    """A reward of all answers to a task together, in addition to the environment's rewards."""
    trackers: TrackerOptions = field(default_factory=TrackerOptions)
    """Services that get the numbers too."""

    @property
    def source(self) -> str:
        """The name or path of what runs the episodes; empty if no flag names it."""
        return source_name(self.env) or self.agent_func_path or self.remote_rm_url or ""

    def to_dict(self) -> dict[str, Any]:
        """Return every flag and its value as `config.json` holds them.

        A group reward from Python is module:name. Secrets are left out: the API key of a tracker is "True", an engine's
        is missing, and addresses have neither user nor password.
        """
        flags = super().to_dict() | ({"use_wandb": "True"} if self.trackers.use_wandb else {})
        flags = {name: _USER_INFO.sub("", value) if isinstance(value, str) else value for name, value in flags.items()}
        if isinstance(engine_args := flags.get("engine_args"), dict):
            flags["engine_args"] = {name: value for name, value in engine_args.items() if name != "api_key"}
        given: Any = self.groups.group_reward
        if given is None or isinstance(given, str | Mapping):
            return flags
        named = given if hasattr(given, "__qualname__") else type(given)
        return flags | {"group_reward": f"{named.__module__}:{named.__qualname__}"}


@dataclass(frozen=True)
class RunConfig(SourceConfig):
    """Run episodes of an environment with a model and report the results."""

    FIRST_FLAGS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What to run": ("env", "env_kwargs", "data", "limit", "n"),
        "Model and engine": ("model", "engine", "base_url", "device", "concurrency"),
        "Sampling": ("temperature", "top_p", "max_tokens", "seed"),
        "Limits": ("max_turns", "max_length", "step_timeout_s"),
        "Output": ("out", "resume", "progress", "json"),
    }
    SECTIONS: ClassVar[Mapping[str, str]] = {
        "env": "What to run",
        "limit": "Tasks",
        "concurrency": "What to run",
        "n": "Tasks",
        "model": "Model and engine",
        "pass_score": "Report",
    }

    n: int = 1
    """Samples per task."""

    model: str = "tiny-math"
    """A model that ships with the package, a folder or a Hugging Face id."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer. Default: the model's."""
    engine: str = "auto"
    """Engine for sampling. `auto` is vllm_http with --base_url, vllm_local with a GPU and vLLM, else hf. `ray` runs
    engines in Ray actors. `chat` is an API model: text without token ids."""
    engine_backend: Literal["hf", "vllm_local"] = "hf"
    """Engine inside each Ray actor, for --engine ray."""
    num_engines: int = 1
    """Number of engine actors, for --engine ray."""
    base_url: str | None = None
    """URL of a vLLM server, for --engine vllm_http; for --engine chat, the part before /chat/completions, such as
    https://api.openai.com/v1."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key, for --engine chat. The default one may be missing."""
    prices: str | None = None
    """For --engine chat, to show what a run costs: FILE.json or JSON, {"MODEL": {"input": 2.5, "output": 10,
    "cached_input": 1.25}}, in dollars per million tokens."""
    device: str = "auto"
    """Device, for --engine hf: auto, cpu, cuda, cuda:1, mps …"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights. `auto` uses the checkpoint's (float32 on a CPU with hf)."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of further arguments for the engine's constructor."""
    pass_score: float | None = None
    """Score from which an episode counts as passed in pass@k; the environment's rewards count in an episode without a
    score. Default: the upper end of the environment's `score_range`; without one, 1.0, and no pass@k if a score is
    outside 0..1."""

    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(seed=0))  # each of its fields is a flag
    """Sampling of one turn. --seed also seeds the environments; None samples differently in every run."""
    limits: LimitOptions = field(default_factory=LimitOptions)
    """Budgets of one episode. An episode that runs out of one is truncated."""
    output: OutputOptions = field(default_factory=OutputOptions)
    """Where results go, and what is shown."""
    errors: StopOptions = field(default_factory=StopOptions)
    """Failed episodes, stalls and interruption."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    """How messages become tokens."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Ray: engines (--engine ray) and environments in actors, on this machine or a cluster."""

    def __post_init__(self) -> None:
        """Refuse flags that are out of range or contradict each other."""
        for name in ("n", "concurrency", "limit", "reward_batch_size", "num_engines"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "an integer >= 1")
        sources = {name: value for name in SOURCES if (value := getattr(self, name))}
        if len(sources) > 1 or not (sources or self.output.resume):
            shown = sources | ({"env": " ".join(self.env)} if self.env else {})
            got = ", ".join(f"--{name} {value}" for name, value in shown.items()) or "none"
            raise ConfigError(
                f"run: expected one of --env, --agent_func_path and --reward_func_path, got {got}. "
                "`agentenv list` shows the environments."
            )
        name = next(iter(sources), "env")
        if self.env_kwargs and name != "env":
            advice = "Set `agent_kwargs` in the AgentExecutor class of the file instead."
            advice = advice if name == "agent_func_path" else "A reward function takes no arguments; leave it out."
            raise ConfigError(f"--env_kwargs: expected --env with it, got --{name}. {advice}")
        if self.reward_batch_size > 1 and sources and name != "remote_rm_url":
            raise ConfigError(f"--reward_batch_size: expected --reward_func_path with it, got --{name}. Leave it out.")
        example = "" if self.engine in ("auto", "ray") else engine_class(self.engine).url_example
        if example and not self.base_url:
            raise ConfigError(f"--base_url: expected the server's URL, got none. Add --base_url {example}")
        if self.prices is not None and self.engine != "chat":
            raise ConfigError(f"--prices: expected --engine chat with it, got {self.engine!r}. Leave it out.")
        if self.engine == "chat":
            self._check_chat()
        if self.chat.history == "rerender" and self.agent_func_path is not None:
            raise ConfigError(
                "--history: expected 'keep' with --agent_func_path, got 'rerender'. OpenRLHF's response holds one "
                "sequence only; use --env for several."
            )

    def _check_chat(self) -> None:
        """Refuse the default model, and flags that need token ids, which --engine chat does not return."""
        if self.model == RunConfig.model:
            raise ConfigError(f"--model: expected the server's name of a model, got {self.model!r}. Add --model NAME.")
        options = [field.name for field in fields(ChatOptions)]
        given = [name for name in options if getattr(self.chat, name) != getattr(ChatOptions(), name)]
        given += ["agent_func_path"] * (self.agent_func_path is not None) + ["tokenizer"] * (self.tokenizer is not None)
        given += [name for name in ("min_tokens", "stop_token_ids") if getattr(self.sampling, name)]
        given += [] if self.apply_chat_template else ["no_apply_chat_template"]
        if given:
            raise ConfigError(
                f"--{given[0]}: expected none with --engine chat, which takes messages and returns no token ids. "
                "Leave it out, or use another engine."
            )

    @property
    def cluster(self) -> ClusterConfig:
        """The Ray cluster and the CPU cores that this run needs there."""
        return self.ray.cluster(self.num_engines if self.engine == "ray" else 0, max(1, len(self.env)))
