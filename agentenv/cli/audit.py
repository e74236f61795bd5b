"""`agentenv audit ENV`: find rewards for policies that solve nothing, before training exploits them.

Exit codes: 0 clean (or allowed), 1 findings that fail (with --strict also those that warn) or a call that
blocks all episodes, 2 usage, 3 an outage took every episode of gold or of another policy, 4 nothing could be judged or
time ran out for a policy or for more than a tenth of the episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from agentenv._util.plurals import counted
from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.episode.tasks import TaskSource
from agentenv.errors import ConfigError
from agentenv.runs.flat_config import flag_values

if TYPE_CHECKING:
    from agentenv.testing.audit.auditing import AuditOptions
    from agentenv.testing.audit.report import Audit
    from agentenv.testing.conformance.child import CheckProgress, ChildDeath


_AGAIN = ("env_kwargs", "data", "prompt_key", "label_key", "split", "seed", "model", "max_turns", "pass_reward")
"""Flags of an audit that the command which reproduces a finding has too."""
_PROGRESS_EVERY_S = 10.0
"""Seconds between progress lines in a log."""
_MIN_BLOCK_S = 60.0
"""Shortest time for which the event loop may be blocked; rules of the audit compute on it, too."""


@dataclass(frozen=True)
class AuditConfig:
    """Play an environment with policies that solve nothing, cheat and break things, and report what they earn."""

    target: Annotated[str, POSITIONAL]
    """agent_func.py, or an environment: installed, module:Attr, path/file.py:Attr, KIND:NAME."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of arguments for the environment's constructor."""
    dataset: TaskSource = field(default_factory=TaskSource)
    """Tasks."""
    apply_chat_template: bool = True
    """Make text prompts user messages."""
    tasks: int = 8
    """Number of tasks to play, chosen at random with the seed."""
    task: tuple[str, ...] = ()
    """Tasks to play instead of random ones: their ids, or the numbers of their rows, from 0."""
    policies: tuple[str, ...] = ()
    """Policies to play in addition to null, constant and gold, as name or name/variant. Default: all. If there are few
    episodes, they are shown completely."""
    seed: int = 0
    """Seed of the choice of tasks, the random policies and the environments."""
    concurrency: int = 8
    """Maximum number of episodes in progress at once."""
    repeat: bool = True
    """Play actions twice, to find rewards that vary."""
    pass_reward: float | None = None
    """Full reward of an environment that returns no score. Default: the reward of the gold actions."""
    reward_range: tuple[float, float] | None = None
    """Lowest and highest intended reward of an episode. Any other reward is a finding."""
    model: str | None = None
    """Model whose tokenizer and chat template are used; a folder with only these is enough.
    Default: a tokenizer that needs no download."""
    max_length: int = 200_000
    """Maximum number of tokens of an episode."""
    max_tokens: int = 20_000
    """Maximum number of tokens of an action."""
    max_turns: int = 8
    """Maximum number of turns of an episode, if the class has no lower `max_turns`. Gold and the class's
    `hacks` take as many as the class has."""
    step_timeout_s: float = 60.0
    """Time limit of one call of the environment, in seconds."""
    time_limit_s: float = 150.0
    """Time limit of the whole audit, in seconds: after it no call is awaited, and the report says what was left out."""
    allow: tuple[str, ...] = ()
    """ID=REASON: a finding to accept. The id may have wildcards; without a policy it stands for all policies."""
    allow_file: str | None = None
    """JSON file with an object of reasons by id."""
    strict: bool = False
    """Exit with 1 on warnings, too."""
    out: str | None = None
    """Folder for audit.json, plays.jsonl and audit.md (a card to publish)."""
    json: bool = False
    """Print JSON."""


def audit(args: Sequence[str]) -> int:
    """Play an environment with policies that solve nothing, cheat and break things, and report what they earn."""
    config = parse(AuditConfig, "audit", args)
    from agentenv.testing.conformance.child import in_child

    return in_child(partial(_audit, config), partial(_report_death, config))


def _report_death(config: AuditConfig, death: ChildDeath) -> int:
    """Report a call that blocked the event loop of all episodes, or native code that ended the process."""
    if death.signal_name:
        sys.stderr.write(death.stacks)
        expected, got = "a process that continues", f"its end by {death.signal_name}"
    else:
        line = death.line_in(os.path.abspath(config.target.partition(":")[0]))
        expected = f"every call to return or await within {_block_limit_s(config):g} s"
        got = "a call that blocks the event loop of all episodes" + (f" at line {line}" if line else "")
    message = f"{config.target}: expected {expected}, got {got}. Run `agentenv check`, which names the call."
    if config.json:
        print_json({"env": config.target, "error": message})
    else:
        sys.stdout.write(f"{message}\n")
    return 1


def _block_limit_s(config: AuditConfig) -> float:
    return max(config.step_timeout_s, _MIN_BLOCK_S)


async def _within_limit(work: Coroutine[Any, Any, Audit], progress: CheckProgress | None, limit_s: float) -> Audit:
    """Return the result of an audit; the process ends if a call blocks the event loop for longer than the limit."""
    if progress is None:
        return await work

    async def say_alive() -> None:
        while True:
            progress.alive(limit_s)
            await asyncio.sleep(1.0)

    saying = asyncio.create_task(say_alive())
    try:
        return await work
    finally:
        saying.cancel()
        progress.pause()


def _audit(config: AuditConfig, progress: CheckProgress | None) -> int:
    from agentenv._util.terminal import wide_console
    from agentenv.chat.chat import Chat
    from agentenv.runs.config import RunConfig
    from agentenv.runs.display.report import quiet_transformers
    from agentenv.runs.prepare import load_env_tasks
    from agentenv.testing.audit.auditing import audit_env as audited
    from agentenv.testing.audit.report import screen, write

    quiet_transformers()
    same = {name: getattr(config, name) for name in ("env_kwargs", "apply_chat_template")} | vars(config.dataset)
    options, tokenizer, chat = _options(config), None, None
    if config.model is not None:
        from agentenv.engines.models import load_tokenizer, resolve_model

        tokenizer = load_tokenizer(resolve_model(config.model))
        chat = Chat(tokenizer)
    source, tasks = load_env_tasks(RunConfig.from_flags(env=config.target, **same), chat)
    # The command line of the same audit, without the flags that select a part of it.
    words, default = ["agentenv", "audit", config.target], flag_values(AuditConfig(config.target))
    for name, value in flag_values(config).items():
        if name in _AGAIN and value != default[name]:
            words += [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    words += [] if config.apply_chat_template else ["--no_apply_chat_template"]
    with _quiet_episodes(), _progress() as show:
        work = audited(
            source, tasks, name=config.target, options=options, tokenizer=tokenizer, command=words, notify=show
        )
        result = asyncio.run(_within_limit(work, progress, _block_limit_s(config)))
    if config.out is not None:
        write(result, Path(config.out), strict=config.strict)
    if config.json:
        print_json(result.to_dict())
    else:
        wide_console().print(screen(result, strict=config.strict), crop=False)
    return result.exit_code(strict=config.strict)


def _options(config: AuditConfig) -> AuditOptions:
    from agentenv.core.types import Limits
    from agentenv.testing.audit.auditing import AuditOptions
    from agentenv.testing.audit.findings import WHY

    try:
        limits = Limits(max_length=config.max_length, max_turns=config.max_turns, step_timeout_s=config.step_timeout_s)
    except ValueError as error:
        raise ConfigError(f"agentenv audit: {error}") from error
    if config.max_tokens < 1:
        raise ConfigError(f"--max_tokens: expected an integer >= 1, got {config.max_tokens}.")
    if not config.time_limit_s > 0:
        raise ConfigError(f"--time_limit_s: expected seconds > 0, got {config.time_limit_s}.")
    if config.reward_range is not None and not config.reward_range[0] <= config.reward_range[1]:
        raise ConfigError(f"--reward_range: expected lowest and highest, got {config.reward_range}. Swap them.")
    reasons: dict[str, Any] = {}  # by id, from the file and then from the flags
    if config.allow_file is not None:
        try:
            reasons = json.loads(Path(config.allow_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--allow_file: expected a JSON object of reasons, got {config.allow_file!r}: {error}. Fix the file."
            ) from error
        if not isinstance(reasons, dict):
            raise ConfigError(f"--allow_file: expected a JSON object of reasons, got {reasons!r:.80}. Fix the file.")
    for argument in config.allow:
        name, _, reason = argument.partition("=")
        reasons[name] = reason
    for name, reason in reasons.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"--allow: expected ID=REASON, got {name!r} without a reason. Add the reason.")
        if "*" not in name and name.partition(":")[0] not in WHY:
            raise ConfigError(f"--allow: expected one of {', '.join(WHY)}, got {name!r}. Correct the id.")
    return AuditOptions(
        num_tasks=config.tasks, task_ids=config.task, policies=config.policies, seed=config.seed,
        concurrency=config.concurrency, repeat=config.repeat, pass_reward=config.pass_reward,
        reward_range=config.reward_range, limits=limits, time_limit_s=config.time_limit_s,
        max_tokens=config.max_tokens, allowed=reasons,
    )  # fmt: skip


class _Counted(io.TextIOWrapper):
    """Drops the text that is written to it, and counts its characters. Programs may have its file as their output."""

    num = 0

    def write(self, text: str) -> int:
        self.num += len(text)
        return len(text)


@contextlib.contextmanager
def _quiet_episodes() -> Iterator[None]:
    """Silence the loop's warnings, which are findings here, and what the environment prints in thousands of steps."""
    logger = logging.getLogger("agentenv.episode.failures")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with _Counted(open(os.devnull, "wb")) as printed:
        try:
            with contextlib.redirect_stdout(printed):
                yield
        finally:
            logger.setLevel(level)
            if printed.num:
                text = counted(printed.num, "character")
                sys.stderr.write(
                    f"agentenv audit: {text} printed by the environment, not shown. `agentenv check` shows them.\n"
                )


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that shows the progress: on one line of a terminal, elsewhere a line at intervals."""
    out, last = sys.stderr, time.monotonic()
    is_terminal = out.isatty()

    def show(line: str) -> None:
        nonlocal last
        if is_terminal:
            out.write(f"\r\x1b[K{line}")
        elif time.monotonic() - last >= _PROGRESS_EVERY_S:
            last = time.monotonic()
            out.write(f"agentenv audit: {line}\n")
        out.flush()

    try:
        yield show
    finally:
        if is_terminal:
            out.write("\r\x1b[K")
