"""What a run and a training open alike: the source of episodes, tasks, what the chat template is; and how they end.

All raise ConfigError before anything has run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from agentenv.agent import create
from agentenv.chat import Chat
from agentenv.config import RunConfig, parse_json_object
from agentenv.dataset import in_messages, read_tasks
from agentenv.deadlines import StepTimeout, bounded
from agentenv.endpoint.agent import ChatAgentSource
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.loading import EnvSource, EpisodeSource, builtin_datasets, env_source, load_agent_func
from agentenv.signals import interruptible
from agentenv.types import Task
from agentenv.watchdog import Watchdog

_END_GRACE_S = 5.0
"""Time at the end for calls that were given up to let go."""


async def then_end(work: Awaitable[int], stdout: TextIO) -> int:
    """The exit code of `work`; an environment's call that ignores being cancelled does not hold the end up."""
    code, failure = 0, None
    try:
        code = await work
    except AgentEnvError as error:
        code, failure = error.exit_code, error
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    stuck = (await asyncio.wait(left, timeout=_END_GRACE_S))[1] if left else set()
    if stuck:
        names = ", ".join(sorted({getattr(task.get_coro(), "__qualname__", "?") for task in stuck}))
        sys.stderr.write(f"agentenv: {len(stuck)} calls ignored being cancelled ({names}); ending without them\n")
        if failure is not None:
            sys.stderr.write(f"agentenv: error: {' '.join(str(failure).split())}\n")
        stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if failure is not None:
        raise failure
    return code


async def until_signal(
    work: asyncio.Future[Any], watchdog: Watchdog, drain: Callable[[], str], *, grace_s: float
) -> list[int]:
    """Await `work`, watched, with signals handled; the signals that came, whatever became of the work after them."""
    with watchdog, interruptible(drain, work, grace_s, watchdog.tell) as signals:
        try:
            await watchdog.guard(work)
        except asyncio.CancelledError:
            if not signals:
                raise
    return signals


def described(chat: Chat, config: RunConfig, *, flag: Literal["model", "pretrain"] = "pretrain") -> dict[str, str]:
    """What the probe of the chat template found, for the screen and the run directory; `flag` names the model.

    Raises:
        ConfigError: prompts are to be rendered, and the template cannot.
    """
    if not chat.has_template:
        return {"template": "none: messages become plain paragraphs (User: …, Assistant:)", "sha256": ""}
    unknown = [name for name in config.chat_options.template_kwargs if name not in str(chat.tokenizer.chat_template)]
    if unknown:
        raise ConfigError(
            f"--chat_template_kwargs: expected variables that the chat template reads, got {unknown}. "
            "Check their names."
        )
    template = chat.template
    if template.kind == "unsupported" and config.apply_chat_template:
        raise ConfigError(
            f"--{flag}: expected a chat template that renders user, assistant and user, got one of {config.model} that "
            f"does not: {template.error}. Use another model{' or --tokenizer' if flag == 'model' else ''}, or "
            "--no_apply_chat_template for raw text."
        )
    facts = "; ".join([*template.reasons, *([template.error] if template.error else [])])
    said = f"{template.kind}{f' ({facts})' if facts else ''}, turns end with {template.close or 'nothing'!r}"
    return {"template": said, "sha256": template.sha256}


def digest(tasks: list[Task]) -> str:
    """What the tasks are, in a few letters, so that a run is not resumed on other data."""
    content = hashlib.blake2b(digest_size=8)
    for task in tasks:
        content.update(repr((task.task_id, task.prompt, task.label)).encode("utf-8", "surrogatepass"))
    return f"{len(tasks)} tasks, {content.hexdigest()}"


def code_digest(config: RunConfig) -> str:
    """What the files of the agent, of a reward function and of rewards in --env_kwargs say, in a few letters.

    "" where all is installed, or at an address.
    """
    named = [config.agent_func_path, config.env, config.remote_rm_url]
    content, num_files = hashlib.blake2b(digest_size=8), 0
    for text in [*filter(None, named), *_texts(parse_json_object("--env_kwargs", config.env_kwargs))]:
        name, is_file, _ = text.rpartition(".py")
        path = Path(f"{name}.py").expanduser()
        if is_file and path.is_file():
            content.update(path.read_bytes())
            num_files += 1
    return content.hexdigest() if num_files else ""


def _texts(value: Any) -> Iterator[str]:
    """The texts in JSON, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _needs_label(source: EpisodeSource) -> bool:
    """What the environment's class says, of an agent_func its agents'."""
    executor_cls = getattr(source, "executor_cls", None)
    return bool(getattr(getattr(source, "cls", getattr(executor_cls, "agent_cls", None)), "needs_label", True))


async def try_constructor(source: EnvSource | ChatAgentSource, limit_s: float) -> None:
    """Make an agent and drop it: a wrong argument is one clear line now and not an error in every episode."""
    where = "__init__"
    try:
        made = await bounded(create, source.cls, source.kwargs, limit_s=limit_s)
        where, close = "close", getattr(made, "close", None)
        if close is not None:
            await bounded(close, limit_s=limit_s)
    except AgentEnvError:
        raise
    except StepTimeout as error:
        told = f"{source.cls.__name__}.{where}: expected an end within {limit_s:g} s, got none."
        raise ConfigError(f"{told} Mend the class, or raise --step_timeout_s.") from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{place.filename}:{place.lineno}: expected {source.cls.__name__} to be made with {dict(source.kwargs)!r}, "
            f"got {type(error).__name__}: {error}. Change --env_kwargs, or mend the class."
        ) from error


def load_source(config: RunConfig) -> EpisodeSource:
    """What runs the episodes: the agent_func, the reward function, or the environment with its arguments."""
    if config.agent_func_path is not None:
        return load_agent_func(config.agent_func_path)
    if config.remote_rm_url is not None:
        from agentenv.reward_func import load_reward_source

        return load_reward_source(config.remote_rm_url, batch_size=config.reward_batch_size)
    if config.env is None:
        raise ConfigError("run: expected --env or --agent_func_path, got neither. `agentenv list` shows environments.")
    source = env_source(config.env, parse_json_object("--env_kwargs", config.env_kwargs))
    if isinstance(source, ChatAgentSource) and config.history != "keep":
        raise ConfigError(
            f"--history: expected keep for an agent with a loop of its own, got {config.history!r}. Leave it out: what "
            "such an agent rewrites begins a segment anyway."
        )
    return source


def load_tasks(config: RunConfig, source: EpisodeSource) -> list[Task]:
    """The tasks of --data, or of the environment's own data; text prompts as user messages unless that is off."""
    own_data = {name: Path(path) for name, path in getattr(source, "datasets", {}).items()}
    builtin = builtin_datasets() | own_data  # a class in a file has data that nobody installed
    data = config.data
    if data is None:
        own = list(own_data)
        if not own:
            raise ConfigError(
                f"--data: expected tasks, got none. Add --data FILE.jsonl or a built-in name ({', '.join(builtin)})."
            )
        data = own[0]
    tasks = read_tasks(
        data,
        prompt_key=config.prompt_key,
        label_key=config.label_key,
        limit=config.limit,
        split=config.split,
        builtin=builtin,
        needs_label=config.label_key != RunConfig.label_key or _needs_label(source),
    )
    if not config.apply_chat_template:
        return tasks
    return [in_messages(task) for task in tasks]
