"""`audit`: plays an environment with every policy, and judges what it paid them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from agentenv.agent import Tokenizer, create, hacks_of
from agentenv.audit.cases import Case, play_cases
from agentenv.audit.findings import Finding, allowing
from agentenv.audit.judging import Facts, judged
from agentenv.audit.leaks import leaks
from agentenv.audit.plays import Play, Table, play_again, play_all
from agentenv.audit.policies import all_policies, chosen
from agentenv.audit.report import Audit, Times, policy_rows
from agentenv.audit.wavering import flaky
from agentenv.chat import Chat
from agentenv.errors import ConfigError
from agentenv.loading import EnvSource
from agentenv.runner import derive_seed
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.types import Limits, SamplingParams, Task

LIMITS = Limits(max_length=200_000, max_turns=8, step_timeout_s=60.0)
SHOWN_GOLD = frozenset({"gold", "wrong", "hedge"})


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """How much is played, and by which rules."""

    num_tasks: int = 8
    """Drawn from all tasks by the seed."""
    task_ids: tuple[str, ...] = ()
    """These tasks instead."""
    policies: tuple[str, ...] = ()
    """Names, or name/variant, beside `policies.BASELINES`; empty: all."""
    seed: int = 0
    concurrency: int = 8
    cases: tuple[Case, ...] = ()
    """Actions whose worth is known."""
    repeat: bool = True
    """Whether actions are played a second time, to find graders that waver."""
    pass_reward: float | None = None
    """What full marks are where the environment gives no score; None: what gold earns."""
    reward_range: tuple[float, float] | None = None
    limits: Limits = LIMITS
    max_tokens: int = 20_000
    """Of one action."""
    allowed: Mapping[str, str] = field(default_factory=dict)
    """Reason by id of findings that are meant so."""


async def audit(
    source: EnvSource,
    tasks: Sequence[Task],
    *,
    name: str = "",
    options: AuditOptions = AuditOptions(),
    tokenizer: Tokenizer | None = None,
    command: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Audit:
    """What policies that solve nothing earn from an environment, and what else stands in the way of training with it.

    Args:
        source: the environment and its arguments.
        tasks: all of its tasks; some are drawn, of the others policies know the labels.
        name: of the environment, in the report.
        options: how much is played.
        tokenizer: of the model; one that needs no download where None.
        command: words of the command line that audits the same, from which those that play it again are made.
        tell: is told how far it is.

    Raises:
        ConfigError: no tasks, a task or policy that is not there, or `hacks` of another form.
    """
    started = time.perf_counter()
    played = _drawn(tasks, options)
    everyone = all_policies(hacks_of(source.cls))
    policies = chosen(everyone, options.policies)
    table = Table(
        partial(create, source.cls, source.kwargs), tasks, Chat(tokenizer or CharTokenizer()), options.limits,
        SamplingParams(max_tokens=options.max_tokens), options.seed,
    )  # fmt: skip
    pairs = [(policy, task) for task in played for policy in policies]
    cases = await play_cases(table, options.cases, concurrency=options.concurrency)
    plays = await play_all(
        table, pairs, concurrency=options.concurrency, tell=lambda done: tell(f"{done} of {len(pairs)} episodes")
    )
    by_id = {task.task_id: task for task in played}
    facts = Facts(plays, by_id, {p.key: p.kind for p in everyone}, options.pass_reward, options.reward_range)
    wavering = await _wavering(table, plays, by_id, tell) if options.repeat else []
    findings = [*cases, *judged(facts), *leaks(plays, by_id, _golds(plays), SHOWN_GOLD), *wavering]
    marked, unused = allowing([_reproducible(each, command) for each in findings], options.allowed)
    return Audit(
        name, options.seed, tuple(by_id), len(plays), tuple(marked), tuple(policy_rows(facts, policies)),
        tuple(unused), Times.of(plays, time.perf_counter() - started), tuple(plays), options.policies,
    )  # fmt: skip


def _drawn(tasks: Sequence[Task], options: AuditOptions) -> list[Task]:
    if not tasks:
        raise ConfigError("audit: expected at least one task, got none. Check --data.")
    if options.num_tasks < 1 or options.concurrency < 1:
        wrong = min(options.num_tasks, options.concurrency)
        raise ConfigError(f"audit: expected numbers of tasks and of episodes at once >= 1, got {wrong}. Change it.")
    if options.task_ids:
        by_id = {task.task_id: task for task in tasks}
        missing = [task_id for task_id in options.task_ids if task_id not in by_id]
        if missing:
            raise ConfigError(f"--task: expected ids of tasks, such as {tasks[0].task_id}, got {missing[0]!r}. Check.")
        return [by_id[task_id] for task_id in options.task_ids]
    places = sorted(
        Random(derive_seed(options.seed, "audit")).sample(range(len(tasks)), min(len(tasks), options.num_tasks))
    )
    return [tasks[place] for place in places]


async def _wavering(
    table: Table, plays: Sequence[Play], tasks: Mapping[str, Task], tell: Callable[[str], None]
) -> list[Finding]:
    """What was paid otherwise the second time."""
    first = _to_repeat(plays)
    return flaky(
        await play_again(
            table, first, tasks, tell=lambda done: tell(f"{done} of {len(first)} episodes again, one at a time")
        )
    )


def _to_repeat(plays: Sequence[Play]) -> list[Play]:
    """One play of each policy on each task, and those that failed not."""
    first: dict[tuple[str, str], Play] = {}
    for play in plays:
        if play.error is None and play.policy != "length_bomb":
            first.setdefault((play.policy, play.task_id), play)
    return list(first.values())


def _golds(plays: Sequence[Play]) -> dict[str, str | None]:
    """Gold by task, where one action is the answer: a move of many is no secret."""
    return {play.task_id: play.action for play in plays if play.key == "gold" and len(play.steps) == 1}


def _reproducible(each: Finding, command: Sequence[str]) -> Finding:
    if not command or not each.evidence or each.kind == "case-fails":
        return each
    first = each.evidence[0]
    words = [*command, "--task", first.task_id, "--policies", first.policy]
    return replace(each, reproduce=shlex.join(words))
