"""RunConfig: everything `agentenv run` can be told, one field per flag."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agentenv.cluster import ClusterConfig, Placement
from agentenv.engines import EngineName
from agentenv.engines.pool import PoolPolicy
from agentenv.engines.ray_actor import EngineBackend, RayConfig
from agentenv.errors import ConfigError
from agentenv.runner import ErrorPolicy
from agentenv.types import ChatOptions, Limits, SamplingParams

FREE_ON_RESUME = (
    "out", "resume", "concurrency", "progress", "json", "grace_s", "max_retries", "max_error_share", "base_url",
    "device", "log_level", "generate_timeout_s", "stall_timeout_s", "num_engines", "ray_address",
    "engine_cpus", "engine_gpus", "env_actors", "env_actor_cpus", "ray_runtime_env", "ray_placement", "ray_wait_s",
)  # fmt: skip
"""Flags that may differ when a run is resumed: they change how it runs, not what it measures."""
ALIASES = {"reward_func_path": "remote_rm_url"}
"""Other names of flags: the field that each means."""


@dataclass(frozen=True)
class RunConfig:
    """Run episodes of an environment with a model and see what happened."""

    env: str | None = None
    """Environment: an installed one (`agentenv list`), module:Attr, or path/file.py[:Attr]; or such a class with `run`,
    an agent with a loop of its own over an OpenAI client."""
    env_kwargs: str = "{}"
    """JSON object of arguments for the environment's constructor."""
    agent_func_path: str | None = None
    """An OpenRLHF agent_func.py, instead of --env."""
    remote_rm_url: str | None = None
    """Or --reward_func_path, the same flag. Instead of both, for one turn: a file with reward_func(queries, prompts,
    labels), or the addresses of reward servers with commas between."""
    reward_batch_size: int = 1
    """Most answers that one call of reward_func judges; 1, as in OpenRLHF: no reward depends on who comes at the same
    time."""
    data: str | None = None
    """Tasks: FILE.jsonl, FILE.parquet, a Hugging Face dataset id or a built-in name; default: the environment's own."""
    split: str | None = None
    """Split of a Hugging Face dataset."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or chat messages."""
    label_key: str = "label"
    """Column with what the environment grades against."""
    limit: int | None = None
    """Take only the first LIMIT tasks."""
    apply_chat_template: bool = True
    """Make text prompts a user message in the model's chat template; off: send the text as it is."""
    chat_template_kwargs: str = "{}"
    """JSON object of variables for the chat template, such as {"enable_thinking": false}."""
    text_feedback: Literal["auto", "raw", "user"] = "auto"
    """What a step's text becomes: raw tokens, a user message, or (auto) raw after a raw prompt and where OpenRLHF's
    feedback has role markers, else a user message."""
    history: Literal["keep", "rerender"] = "keep"
    """keep: tokens are only appended; rerender: where the template rewrites what was said, a new segment begins."""
    open_reasoning: Literal["keep", "close"] = "keep"
    """Reasoning that a limit cut off: it stays open, or is closed in the model's place."""
    tool_role: Literal["refuse", "user"] = "refuse"
    """Tool results where the template has no such role: an error, or a user message."""
    long_observation: Literal["end", "cut"] = "end"
    """Messages that do not fit: the episode is truncated, or the middle of the longest content is left out."""
    max_observation_tokens: int | None = None
    """Cut messages that become more tokens than this in one turn, role markers and the note of what was left out
    included, whether they fit or not. Raw text is never cut."""

    model: str = "tiny-math"
    """A model that ships with the package, a folder, or a Hugging Face id."""
    tokenizer: str | None = None
    """Tokenizer's folder or id, where it is not the model's."""
    engine: EngineName = "auto"
    """What samples: auto is vllm_http with --base_url, vllm_local with a GPU and vLLM, else hf; ray: actors of Ray."""
    engine_backend: EngineBackend = "hf"
    """For ray: what runs inside each actor."""
    num_engines: int = 1
    """For ray: actors."""
    engine_cpus: float = 1.0
    """For ray: CPU cores of each actor."""
    engine_gpus: float | None = None
    """For ray: GPUs of each actor; None: as many as it computes on where the cluster has any, else 0."""
    env_actors: int = 0
    """Ray actors in which environments run, each for many episodes; 0: they run in this process."""
    env_actor_cpus: float = 1.0
    """CPU cores of each of them."""
    ray_address: str | None = None
    """Ray's cluster: "auto", HOST:6379, "ray://HOST:10001"; None: RAY_ADDRESS where it is set, else one of our own on
    this machine."""
    ray_runtime_env: str = "{}"
    """JSON object that all actors run in, such as {"working_dir": "."}, which takes the files of this folder there."""
    ray_placement: Placement = "PACK"
    """How Ray places engines, and environments' actors: on few nodes, or spread over them."""
    ray_wait_s: float = 60.0
    """Longest wait for room on the cluster."""
    base_url: str | None = None
    """Address of a vLLM server, for vllm_http."""
    device: str = "auto"
    """For hf: auto, cpu, cuda, cuda:1, mps …"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto: the checkpoint's, for hf on a CPU float32."""
    engine_args: str = "{}"
    """JSON object of further arguments for the engine's constructor."""

    n: int = 1
    """Samples per task."""
    concurrency: int = 64
    """Episodes in flight at once."""
    seed: int | None = 0
    """Seed of sampling and environments; None draws sampling anew in every run."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    max_tokens: int | None = None
    """New tokens per turn; None: as many as fit."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    max_length: int = 2048
    """Tokens of a whole episode."""
    max_turns: int = 16
    step_timeout_s: float = 60.0
    """Longest one call of the environment may take."""
    episode_timeout_s: float = 600.0
    generate_timeout_s: float = 300.0
    """Longest one generation may take; beyond it the engine counts as failed and the episode is tried again."""

    max_retries: int = 2
    """How often an episode is run again after an infrastructure error."""
    max_error_share: float = 0.2
    """Stop when more than this share of the episodes failed."""
    stall_timeout_s: float = 600.0
    """When no episode went on for so long, what they wait for goes to stall-1.txt in --out; the run stops after as long
    again, and after generate_timeout_s and step_timeout_s."""
    grace_s: float = 30.0
    """After Ctrl-C, time for episodes in flight to end before they are cancelled."""
    pass_score: float | None = None
    """Score from which an episode counts as passed, in pass@k, and reward where it has no score; default: 1.0, and no
    pass@k where there are no scores and rewards leave 0..1."""

    out: str | None = None
    """Run directory; default: runs/<env>-<model>-<time>."""
    resume: bool = False
    """Continue the run in --out: finished episodes are kept, the rest is run. Its flags are taken over."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """How to show progress; auto: live on a terminal, else plain lines."""
    json: bool = False
    """Print JSON lines for machines on stdout and nothing else."""
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    """Log records to show on stderr."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself, each with the flag to change."""
        checks = (
            ("--n", self.n, self.n >= 1, "an integer >= 1"),
            ("--concurrency", self.concurrency, self.concurrency >= 1, "an integer >= 1"),
            ("--limit", self.limit, self.limit is None or self.limit >= 1, "an integer >= 1"),
            ("--reward_batch_size", self.reward_batch_size, self.reward_batch_size >= 1, "an integer >= 1"),
            ("--max_retries", self.max_retries, self.max_retries >= 0, "an integer >= 0"),
            ("--max_error_share", self.max_error_share, 0 <= self.max_error_share <= 1, "a number in [0, 1]"),
            ("--stall_timeout_s", self.stall_timeout_s, self.stall_timeout_s > 0, "seconds > 0"),
            ("--grace_s", self.grace_s, self.grace_s >= 0, "seconds >= 0"),
            ("--env_actors", self.env_actors, self.env_actors >= 0, "an integer >= 0"),
            ("--env_actor_cpus", self.env_actor_cpus, self.env_actor_cpus >= 0, "a number >= 0"),
        )
        for flag, value, holds, expected in checks:
            if not holds:
                raise ConfigError(f"{flag}: expected {expected}, got {value!r}. Change the value.")
        self._check_source()
        if self.engine == "vllm_http" and not self.base_url:
            raise ConfigError("--base_url: expected the server's address, got none. Add --base_url http://HOST:8000")
        if self.history == "rerender" and self.agent_func_path is not None:
            raise ConfigError(
                "--history: expected 'keep' with --agent_func_path, got 'rerender'. OpenRLHF's response holds one "
                "sequence only; use --env for several."
            )
        try:
            _ = (self.sampling, self.limits, self.chat_options, self.ray)
        except ValueError as error:
            raise ConfigError(re.sub(r"^ChatOptions\.", "--", str(error))) from error

    def _check_source(self) -> None:
        given = {name: getattr(self, name) for name in ("env", "agent_func_path", "remote_rm_url")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1 or not (given or self.resume):
            got = ", ".join(f"--{name} {value}" for name, value in given.items()) or "none"
            raise ConfigError(
                f"run: expected one of --env, --agent_func_path and --reward_func_path, got {got}. "
                "`agentenv list` shows the environments."
            )
        if self.env_kwargs != "{}" and given and self.env is None:
            mend = "Set `agent_kwargs` in the AgentExecutor class of the file instead."
            mend = mend if self.agent_func_path is not None else "A reward function has none; leave it out."
            raise ConfigError(f"--env_kwargs: expected --env beside it, got --{next(iter(given))}. {mend}")
        if self.reward_batch_size > 1 and given and self.remote_rm_url is None:
            raise ConfigError(
                f"--reward_batch_size: expected --reward_func_path beside it, got --{next(iter(given))}. Leave it out."
            )

    @property
    def source(self) -> str:
        """What runs the episodes, as the flags name it; empty where they name nothing."""
        return self.env or self.agent_func_path or self.remote_rm_url or ""

    @property
    def sampling(self) -> SamplingParams:
        """The sampling flags."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop=self.stop,
            seed=self.seed,
        )

    @property
    def limits(self) -> Limits:
        """The limit flags."""
        return Limits(
            self.max_length, self.max_turns, self.step_timeout_s, self.episode_timeout_s, self.generate_timeout_s
        )

    @property
    def chat_options(self) -> ChatOptions:
        """The flags about messages."""
        return ChatOptions(
            text_feedback=self.text_feedback,
            history=self.history,
            open_reasoning=self.open_reasoning,
            tool_role=self.tool_role,
            long_observation=self.long_observation,
            max_observation_tokens=self.max_observation_tokens,
            template_kwargs=parse_json_object("--chat_template_kwargs", self.chat_template_kwargs),
        )

    @property
    def ray(self) -> RayConfig:
        """The flags about actors."""
        # A little before the episode gives up on its generation, so that the pool knows first who is to blame.
        pool = PoolPolicy(stall_s=0.9 * self.generate_timeout_s)
        return RayConfig(
            self.num_engines, self.engine_backend, self.engine_cpus, self.engine_gpus, pool=pool, cluster=self.cluster
        )

    @property
    def cluster(self) -> ClusterConfig:
        """The flags about Ray itself."""
        engines_cpus = self.num_engines * self.engine_cpus if self.engine == "ray" else 0.0
        return ClusterConfig(
            self.ray_address,
            parse_json_object("--ray_runtime_env", self.ray_runtime_env),
            self.ray_placement,
            self.ray_wait_s,
            cpus=engines_cpus + self.env_actors * self.env_actor_cpus,
        )

    @property
    def policy(self) -> ErrorPolicy:
        """The error flags."""
        return ErrorPolicy(max_retries=self.max_retries, max_error_share=self.max_error_share)

    def to_dict(self) -> dict[str, Any]:
        """Every flag and its value, as `config.json` holds them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    """The JSON object that a flag's text holds.

    Raises:
        ConfigError: it is no JSON, or no object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag}: expected a JSON object, got {text!r} ({error}). Write e.g. {flag} '{{\"max_attempts\": 3}}'"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: expected a JSON object, got {text!r}. Write e.g. {flag} '{{\"max_attempts\": 3}}'")
    return value
