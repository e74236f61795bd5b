"""`audit_env`: runs an environment with every policy, and judges the rewards."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from agentenv._util.calls import create
from agentenv.chat.chat import Chat
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Limits, SamplingParams, Task
from agentenv.episode.runner import derive_seed
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError
from agentenv.testing import chats
from agentenv.testing.audit.cases import AuditCase, play_cases
from agentenv.testing.audit.episodes import Play, PolicyRunner, play_all, replay_all
from agentenv.testing.audit.findings import AuditFinding, apply_allowances
from agentenv.testing.audit.judging import Facts, judge_plays
from agentenv.testing.audit.leaks import find_leaks
from agentenv.testing.audit.nondeterminism import find_flaky
from agentenv.testing.audit.policies import all_policies, select_policies
from agentenv.testing.audit.report import Audit, Times, policy_rows
from agentenv.testing.audit.unrated import judge_unrated
from agentenv.testing.hacks import hacks_of

LIMITS = Limits(max_length=200_000, max_turns=8, step_timeout_s=60.0)
SHOWN_GOLD = frozenset({"gold", "wrong", "odd_values", "farm", "hedge"})


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Size and rules of an audit."""

    num_tasks: int = 8
    """Number of tasks, drawn from all tasks by the seed."""
    task_ids: tuple[str, ...] = ()
    """Ids of the tasks to use instead of drawn ones."""
    policies: tuple[str, ...] = ()
    """Policies by name or name/variant, in addition to `policies.BASELINES`; empty: all."""
    seed: int = 0
    concurrency: int = 8
    cases: tuple[AuditCase, ...] = ()
    """Actions with a known reward or score."""
    repeat: bool = True
    """Whether to repeat the actions, to find rewards that are not deterministic."""
    pass_reward: float | None = None
    """Reward of a full score in an environment without scores; None: the reward of gold."""
    reward_range: tuple[float, float] | None = None
    limits: Limits = LIMITS
    max_tokens: int = 20_000
    """Maximum number of tokens of one action."""
    allowed: Mapping[str, str] = field(default_factory=dict)
    """Reason for each accepted finding, by id."""


async def audit_env(
    source: EnvSource,
    tasks: Sequence[Task],
    *,
    name: str = "",
    options: AuditOptions = AuditOptions(),
    tokenizer: Tokenizer | None = None,
    command: Sequence[str] = (),
    notify: Callable[[str], None] = lambda line: None,
) -> Audit:
    """Audit an environment: run policies that solve nothing, and return what they earn and other obstacles to training.

    Args:
        source: the environment and its arguments.
        tasks: all of its tasks; some are drawn, and policies see the labels of the others.
        name: name of the environment in the report.
        options: size and rules of the audit.
        tokenizer: the model's tokenizer; None: one that needs no download.
        command: words of the command line of this audit, used for the commands that reproduce findings.
        notify: called with lines about the progress.

    Raises:
        ConfigError: tasks are missing, a task or policy is unknown, or `hacks` is invalid.
    """
    started = time.perf_counter()
    drawn = _draw_tasks(tasks, options)
    everyone = all_policies(hacks_of(source.cls))
    policies = select_policies(everyone, options.policies)
    make = partial(create, source.cls, source.kwargs)
    offers_tools = tokenizer is None and await chats.offered_tools(make, drawn, options.limits, chats.with_tools())
    chat = Chat(tokenizer) if tokenizer is not None else chats.with_tools() if offers_tools else chats.plain()
    runner = PolicyRunner(
        make, tasks, chat, options.limits, SamplingParams(max_tokens=options.max_tokens), options.seed,
        getattr(source.cls, "max_turns", None) or Limits().max_turns,
    )  # fmt: skip
    pairs = [(policy, task) for task in drawn for policy in policies]
    cases = await play_cases(runner, options.cases, concurrency=options.concurrency)
    plays = await play_all(
        runner, pairs, concurrency=options.concurrency, notify=lambda done: notify(f"{done} of {len(pairs)} episodes")
    )
    by_id = {task.task_id: task for task in drawn}
    facts = Facts(
        plays, by_id, {p.key: p.kind for p in everyone}, options.pass_reward, options.reward_range,
        source.cls.score_range,
    )  # fmt: skip
    # Gold is a secret only if one action is the whole answer, not if it is one move of many.
    secrets = {play.task_id: play.action for play in plays if play.key == "gold" and len(play.steps) == 1}
    findings = [*cases, *judge_plays(facts), *judge_unrated(facts), *find_leaks(plays, by_id, secrets, SHOWN_GOLD)]
    if options.repeat:
        findings += await _repeat_plays(runner, plays, by_id, notify)
    for index, each in enumerate(findings):
        if command and each.evidence and each.kind != "case-fails":
            first = each.evidence[0]
            words = [*command, "--task", first.task_id, "--policies", first.policy]
            findings[index] = replace(each, reproduce=shlex.join(words))
    marked, unused = apply_allowances(findings, options.allowed)
    return Audit(
        name, options.seed, tuple(by_id), len(plays), tuple(marked), tuple(policy_rows(facts, policies)),
        tuple(unused), Times.from_plays(plays, time.perf_counter() - started), tuple(plays), options.policies,
        judged=len(facts.unrated) < len(by_id),
    )  # fmt: skip


def _draw_tasks(tasks: Sequence[Task], options: AuditOptions) -> list[Task]:
    if not tasks:
        raise ConfigError("audit: expected at least one task, got none. Check --data.")
    if options.num_tasks < 1 or options.concurrency < 1:
        wrong = min(options.num_tasks, options.concurrency)
        raise ConfigError(f"audit: expected num_tasks and concurrency >= 1, got {wrong}. Change it.")
    if options.task_ids:
        by_id = {task.task_id: task for task in tasks}
        missing = [task_id for task_id in options.task_ids if task_id not in by_id]
        if missing:
            raise ConfigError(
                f"--task: expected ids of tasks, such as {tasks[0].task_id}, got {missing[0]!r}. Check it."
            )
        return [by_id[task_id] for task_id in options.task_ids]
    places = sorted(
        Random(derive_seed(options.seed, "audit")).sample(range(len(tasks)), min(len(tasks), options.num_tasks))
    )
    return [tasks[place] for place in places]


async def _repeat_plays(
    runner: PolicyRunner, plays: Sequence[Play], tasks: Mapping[str, Task], notify: Callable[[str], None]
) -> list[AuditFinding]:
    """Repeat the first successful play of each policy on each task, and return the findings about differences."""
    first: dict[tuple[str, str], Play] = {}
    for play in plays:
        if play.error is None and play.policy != "length_bomb":
            first.setdefault((play.policy, play.task_id), play)
    num = len(first)
    pairs = await replay_all(
        runner, [*first.values()], tasks, notify=lambda done: notify(f"{done} of {num} episodes again, one at a time")
    )
    return find_flaky(pairs)
