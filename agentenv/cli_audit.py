"""`agentenv audit ENV`: what policies that solve nothing earn, before training finds it.

Exit codes: 0 clean (or allowed), 1 findings that fail (with --strict also those that warn), 2 usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import tyro

from agentenv.cli_flags import parse, print_json
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.audit.auditing import AuditOptions
    from agentenv.loading import EnvSource
    from agentenv.types import Task


_TELL_EVERY_S = 10.0
"""In a log, which keeps every line."""


@dataclass(frozen=True)
class AuditConfig:
    """Play an environment with policies that solve nothing, cheat and break things, and report what they earn."""

    target: tyro.conf.Positional[str]
    """agent_func.py, or an environment: installed, module:Attr, path/file.py:Attr."""
    env_kwargs: str = "{}"
    """JSON object of arguments for the environment's constructor."""
    data: str | None = None
    """Tasks, as `run --data` takes them; default: those that come with the environment."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    label_key: str = "label"
    """Column with the label."""
    split: str | None = None
    """Of a Hugging Face dataset."""
    apply_chat_template: bool = True
    """Whether prompts that are text become user messages."""
    tasks: int = 8
    """How many tasks are played, drawn by the seed."""
    task: tuple[str, ...] = ()
    """Ids of the tasks to play instead."""
    policies: tuple[str, ...] = ()
    """Only these, as name or name/variant, beside null, constant and gold; default: all. Few episodes are shown
    whole."""
    cases: str | None = None
    """JSONL of actions whose worth is known, as {"task": ID, "actions": [TEXT], "score": 1.0}; each must hold."""
    seed: int = 0
    """Of what is drawn: tasks, random policies, environments."""
    concurrency: int = 8
    """Episodes at once."""
    repeat: bool = True
    """Whether actions are played again, to find rewards that waver."""
    pass_reward: float | None = None
    """Full marks of an environment that gives no score; default: what gold earns."""
    reward_range: tuple[float, float] | None = None
    """Lowest and highest reward of an episode that are meant; others are a finding."""
    model: str | None = None
    """Model whose tokenizer and chat template are used; default: one that needs no download."""
    max_length: int = 200_000
    """Most tokens of an episode."""
    max_tokens: int = 20_000
    """Most tokens of an action."""
    max_turns: int = 8
    """Most turns of an episode; gold may take more."""
    step_timeout_s: float = 60.0
    """Longest one call of the environment may take."""
    allow: tuple[str, ...] = ()
    """ID=REASON: a finding that is meant so. The id may have wildcards; without a policy it stands for all."""
    allow_file: str | None = None
    """JSON object of reasons by id."""
    strict: bool = False
    """Exit with 1 where something warns, too."""
    out: str | None = None
    """Folder for audit.json, plays.jsonl and audit.md, a card to publish."""
    json: bool = False
    """Print JSON."""


def audit(args: Sequence[str]) -> int:
    """Play an environment with policies that solve nothing, cheat and break things, and report what they earn."""
    config = parse(AuditConfig, "audit", args)
    from agentenv.audit.auditing import audit as audited
    from agentenv.audit.report import screen, write
    from agentenv.report import wide_console

    source = _source(config)
    tasks, options = _tasks(config, source), _options(config)
    with _quiet_episodes(), _progress() as tell:
        result = asyncio.run(
            audited(
                source, tasks, name=config.target, options=options, tokenizer=_tokenizer(config),
                command=_command(config), tell=tell,
            )
        )  # fmt: skip
    if config.out is not None:
        write(result, Path(config.out), strict=config.strict)
    if config.json:
        print_json(result.to_dict())
    else:
        wide_console().print(screen(result, strict=config.strict))
    return result.exit_code(strict=config.strict)


def _source(config: AuditConfig) -> EnvSource:
    """The environment.

    Raises:
        ConfigError: there is none, or it is an agent with a loop of its own, which nobody's actions can be given to.
    """
    from agentenv.agent import AgentInstance, as_agent
    from agentenv.config import parse_json_object
    from agentenv.engines.scripted import ScriptedEngine
    from agentenv.loading import EnvSource, env_source, load_agent_func
    from agentenv.testing.tokenizers import CharTokenizer

    kwargs = parse_json_object("--env_kwargs", config.env_kwargs)
    path = Path(config.target)
    code = path.read_text(errors="replace") if path.suffix == ".py" and path.is_file() else ""
    if "AgentExecutor" in code or "AgentRunner" in code:
        tokenizer = CharTokenizer()
        cls: Any = load_agent_func(path).agent_class(ScriptedEngine([""], tokenizer), tokenizer)
        if not isinstance(cls, type) or not callable(getattr(cls, "step", None)):
            raise ConfigError(
                f"{config.target}: expected an AgentExecutor with an agent class that has `step`, got {cls!r}. One "
                "with a loop of its own cannot be audited: audit the environment or the reward that it asks."
            )
        return EnvSource(as_agent(cls), kwargs)
    source = env_source(config.target, kwargs)
    if not isinstance(source, EnvSource) or not issubclass(source.cls, AgentInstance):
        raise ConfigError(
            f"agentenv audit: expected an environment with `step`, got {config.target!r}, an agent with a loop of its "
            "own: it takes nobody's actions. Audit the environment or reward that it asks; `agentenv check` runs it."
        )
    return source


def _tasks(config: AuditConfig, source: EnvSource) -> list[Task]:
    from agentenv.config import RunConfig
    from agentenv.opening import load_tasks

    of_run = RunConfig(
        env=config.target, data=config.data, prompt_key=config.prompt_key, label_key=config.label_key,
        split=config.split, apply_chat_template=config.apply_chat_template,
    )  # fmt: skip
    return load_tasks(of_run, source)


def _options(config: AuditConfig) -> AuditOptions:
    from agentenv.audit.auditing import AuditOptions
    from agentenv.audit.cases import read_cases
    from agentenv.types import Limits

    try:
        limits = Limits(max_length=config.max_length, max_turns=config.max_turns, step_timeout_s=config.step_timeout_s)
    except ValueError as error:
        raise ConfigError(f"agentenv audit: {error}") from error
    if config.max_tokens < 1:
        raise ConfigError(f"--max_tokens: expected an integer >= 1, got {config.max_tokens}. Change the value.")
    if config.reward_range is not None and not config.reward_range[0] <= config.reward_range[1]:
        raise ConfigError(f"--reward_range: expected lowest and highest, got {config.reward_range}. Swap them.")
    return AuditOptions(
        num_tasks=config.tasks, task_ids=config.task, policies=config.policies, seed=config.seed,
        concurrency=config.concurrency, repeat=config.repeat, pass_reward=config.pass_reward,
        reward_range=config.reward_range, limits=limits, max_tokens=config.max_tokens, allowed=_allowed(config),
        cases=tuple(read_cases(config.cases)) if config.cases is not None else (),
    )  # fmt: skip


def _allowed(config: AuditConfig) -> dict[str, str]:
    """Reason by id, of the file and then of the flags.

    Raises:
        ConfigError: one has no reason, or names no kind of finding.
    """
    from agentenv.audit.findings import WHY

    found: dict[str, Any] = {}
    if config.allow_file is not None:
        try:
            found = json.loads(Path(config.allow_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--allow_file: expected a JSON object of reasons, got {config.allow_file!r}: {error}. Mend it."
            ) from error
        if not isinstance(found, dict):
            raise ConfigError(f"--allow_file: expected a JSON object of reasons, got {found!r:.80}. Mend it.")
    for given in config.allow:
        name, _, reason = given.partition("=")
        found[name] = reason
    for name, reason in found.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"--allow: expected ID=REASON, got {name!r} without a reason. Say why it is meant so.")
        if "*" not in name and name.partition(":")[0] not in WHY:
            raise ConfigError(f"--allow: expected one of {', '.join(WHY)}, got {name!r}. Correct the id.")
    return found


def _tokenizer(config: AuditConfig) -> Any:
    if config.model is None:
        return None
    from agentenv.loading import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(config.model))


def _command(config: AuditConfig) -> list[str]:
    """The words that audit the same, without what is chosen of it."""
    words = ["agentenv", "audit", config.target]
    default = AuditConfig(config.target)
    for name in ("env_kwargs", "data", "prompt_key", "label_key", "split", "seed", "model", "max_turns", "pass_reward"):
        value = getattr(config, name)
        if value != getattr(default, name):
            words += [f"--{name}", str(value)]
    return words if config.apply_chat_template else [*words, "--no_apply_chat_template"]


@contextlib.contextmanager
def _quiet_episodes() -> Iterator[None]:
    """Failures of episodes are findings here: the loop's own warnings would say each of them again."""
    logger = logging.getLogger("agentenv.episode")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _now_and_then(out: TextIO) -> Callable[[str], None]:
    """Writes a line where the last one, or the beginning, is `_TELL_EVERY_S` ago."""
    last = time.monotonic()

    def tell(line: str) -> None:
        """Write it, if it is time."""
        nonlocal last
        if time.monotonic() - last >= _TELL_EVERY_S:
            last = time.monotonic()
            out.write(f"agentenv audit: {line}\n")
            out.flush()

    return tell


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """How far it is: on one line of a terminal; elsewhere a line from time to time."""
    if not sys.stderr.isatty():
        yield _now_and_then(sys.stderr)
        return

    def tell(line: str) -> None:
        """Write it over the last one."""
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    try:
        yield tell
    finally:
        sys.stderr.write("\r\x1b[K")
