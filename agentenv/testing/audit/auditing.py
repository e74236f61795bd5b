"""`audit_env`: runs an environment with every policy, and judges the rewards."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from random import Random
from types import ModuleType

from agentenv._util.calls import create
from agentenv._util.plurals import counted
from agentenv.chat.chat import Chat
from agentenv.core.dataset import place_of_task
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Limits, SamplingParams, Task
from agentenv.episode.runner import derive_seed
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError
from agentenv.testing import chats
from agentenv.testing.audit import workings
from agentenv.testing.audit.episodes import GOLD_TURNS, Budget, Play, PolicyRunner, play_all, replay_all
from agentenv.testing.audit.facts import EPS, Facts, grouped
from agentenv.testing.audit.findings import SEVERITIES, AuditFinding, apply_allowances
from agentenv.testing.audit.judging import judge_plays, maybe_lucky
from agentenv.testing.audit.leaks import find_leaks
from agentenv.testing.audit.policies import (
    FOLLOWED,
    HEAVY,
    PART,
    AuditPolicy,
    View,
    all_policies,
    ending,
    ends_a_process,
    gold_parts,
    is_answer,
    is_time_to_end,
    select_policies,
)
from agentenv.testing.audit.report import Audit, policy_rows
from agentenv.testing.conformance.cases import hacks_of
from agentenv.testing.odd_actions import recorded_marks
from agentenv.testing.shifted_clock import elapsing_clock, modules_of, shifted_clock
from agentenv.testing.tool_calls import call_text, commands_of

LIMITS = Limits(max_length=200_000, max_turns=8, step_timeout_s=60.0)
CLOCK_POLICIES = ("null/empty", "constant/42", "calls/each_tool", "calls/of_prompt", "gold", "echo/prompt")
"""Policies that are repeated at another time of day."""
BETWEEN_S = 240.0
"""Seconds between the turns of a repetition."""
_FIRST_PLAYS, _GOLD_PLAYS, _PLAYS, _REPEATS = 0.6, 0.65, 0.75, 0.85
"""Parts of the time limit at which plays, those of gold on further tasks, those that follow them up, and their
repetitions end; then other times of day are tried."""
_MAX_GOLD = 64
"""Maximum number of tasks on which gold is played."""
_SEEDS = 3
"""Number of other seeds on each task for guesses that may be luck."""
_HEAVY_TASKS = 2
"""Number of tasks on which the policies in `HEAVY` are played."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Size and rules of an audit."""

    num_tasks: int = 8
    """Number of tasks, drawn from all tasks by the seed."""
    task_ids: tuple[str, ...] = ()
    """Ids, or places, of the tasks to use instead of drawn ones."""
    policies: tuple[str, ...] = ()
    """Policies by name or name/variant, in addition to `policies.BASELINES`; empty: all."""
    seed: int = 0
    concurrency: int = 8
    repeat: bool = True
    """Whether to repeat the actions, to find rewards that are not deterministic."""
    pass_reward: float | None = None
    """Reward of a full score in an environment without scores; None: the reward of gold."""
    reward_range: tuple[float, float] | None = None
    limits: Limits = LIMITS
    time_limit_s: float = math.inf
    """Seconds after which no further episode starts, and those that run are cut off."""
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
    started, budget = time.perf_counter(), Budget(options.time_limit_s)
    drawn = _draw_tasks(tasks, options)
    everyone = all_policies(hacks_of(source.cls))
    policies = select_policies(everyone, options.policies)
    make = partial(create, source.cls, source.kwargs)
    own_turns = getattr(source.cls, "max_turns", None)
    limits = replace(options.limits, max_turns=min(options.limits.max_turns, own_turns or options.limits.max_turns))
    chat = Chat(tokenizer) if tokenizer is not None else chats.stand_in()
    sampling, most = SamplingParams(max_tokens=options.max_tokens), own_turns or Limits().max_turns
    runner = PolicyRunner(make, tasks, chat, limits, sampling, options.seed, most, own_turns or GOLD_TURNS, budget)
    of_few = {task.task_id for task in drawn[:_HEAVY_TASKS]}
    pairs = [
        (policy, task) for task in drawn for policy in policies if policy.key not in HEAVY or task.task_id in of_few
    ]
    budget.part = _FIRST_PLAYS
    with recorded_marks() as marks:
        plays = await _play_pairs(runner, pairs, marks, options.concurrency, notify)
        more_gold = await _play_more_gold(runner, plays, _more_tasks(tasks, drawn, options), options, notify)
        budget.part = _PLAYS
        if parts := _part_pairs(plays, drawn, options):
            everyone += [policy for policy, _ in parts]
            plays += await _play_pairs(runner, parts, marks, options.concurrency, notify)
        by_id = {task.task_id: task for task in drawn}
        kinds = {p.key: p.kind for p in everyone}
        ranges = options.reward_range, source.cls.score_range
        shown = Facts(plays, by_id, kinds, options.pass_reward, *ranges, limits.max_turns)
        more = named_policies(options.policies) if options.policies else follow_up(shown)
        everyone, policies = everyone + more, policies + more
        pairs = [(policy, task) for task in drawn for policy in more]
        plays += await _play_pairs(runner, pairs, marks, options.concurrency, notify)
        facts = replace(shown, plays=plays, kinds={p.key: p.kind for p in everyone})
        keys = maybe_lucky(facts)
        guessed = [(each, task) for each in everyone if each.key in keys for task in _reseeded(drawn)]
        lucky = await _play_pairs(runner, guessed, marks, options.concurrency, notify)
    repeating = _repeat_plays(runner, plays, by_id, notify, modules_of(source.cls)) if options.repeat else None
    varying, failed = await repeating if repeating else ([], [])
    facts = replace(facts, reseeded=lucky, repeated=failed, more_gold=more_gold)
    findings = [
        *judge_plays(facts), *find_leaks(facts),
        *workings.find_run_code(plays, marks), *workings.find_dead_tools(plays), *workings.find_growth(plays),
        *workings.find_late_tools(plays), *workings.find_reply_sizes(plays), *workings.find_slow_calls(budget),
        *varying,
    ]  # fmt: skip
    if budget.left_out["gold"]:  # it may be known for the other tasks
        findings = [each for each in findings if each.kind not in ("no-gold", "no-ceiling", "gold-partly")]
    marked, unused = apply_allowances(_with_commands(findings, command, options), options.allowed)
    marked.sort(key=lambda each: (bool(each.allowed), SEVERITIES.index(each.severity)))
    return Audit(
        name, options.seed, tuple(by_id), len(plays), tuple(marked), tuple(policy_rows(facts, policies)),
        tuple(unused), {"wall_s": time.perf_counter() - started}, (*plays, *more_gold), options.policies,
        judged=len(facts.unrated) < len(by_id), not_played=_not_played(plays, budget),
        num_left_out=budget.num_left_out, lost=_lost(plays, budget),
        not_examined=tuple(_not_examined(facts, tasks, drawn, options, marks, budget)),
    )  # fmt: skip


def _with_commands(
    findings: Sequence[AuditFinding], command: Sequence[str], options: AuditOptions
) -> list[AuditFinding]:
    """Return the findings with the command that reproduces each, if the audit has one."""
    found = [*findings]
    for index, each in enumerate(found if command else ()):
        if each.evidence:
            first = each.evidence[0]
            of_task = ["--task", first.task_id]
            if first.policy.startswith((f"farm/{PART}", "other_gold/")):  # it depends on the other tasks
                of_task = ["--tasks", str(options.num_tasks)] if options.num_tasks != AuditOptions().num_tasks else []
            policy = "hedge" if each.kind == "hedging" else first.policy  # judged by several variants
            policy = "farm" if each.kind == "calls-ungraded" and policy.startswith("farm/") else policy
            found[index] = replace(each, reproduce=shlex.join([*command, *of_task, "--policies", policy]))
    return found


def _not_played(plays: Sequence[Play], budget: Budget) -> tuple[str, ...]:
    """Return the policies that had time on no task."""
    return tuple(sorted(budget.left_out.keys() - {play.policy for play in plays}))


def _applied(plays: Sequence[Play], budget: Budget) -> dict[str, list[Play]]:
    """Return the plays of each policy, without policies that had nothing to play wherever an episode began."""
    own = grouped(plays, attrgetter("policy"))
    return {
        name: played for name, played in own.items()
        if name not in budget.without_action or any(play.began for play in played)
    }  # fmt: skip


def _lost(plays: Sequence[Play], budget: Budget) -> tuple[str, ...]:
    """Return the policies of which an outage took every episode."""
    own = _applied(plays, budget)
    return tuple(name for name in own if all(play.failed_outside for play in own[name]))


def _without_action(applied: Mapping[str, Sequence[Play]]) -> Iterator[str]:
    """Return the policies that had nothing to say beside gold, or no tool to call, by what they would have tried."""
    golds = {play.task_id: play.actions for play in applied.get("gold", ()) if play.key == "gold"}
    hedges = [p for p in applied.get("hedge", ()) if p.actions != golds.get(p.task_id, ())[: len(p.actions)]]
    if golds and not hedges:
        yield "right and wrong answers together: the last action of `gold` has no number and no text of its label"
    if "calls" not in applied:
        yield "calls of tools: none are offered"


def _not_examined(
    facts: Facts, tasks: Sequence[Task], drawn: Sequence[Task], options: AuditOptions, marks: set[str],
    budget: Budget,
) -> Iterator[str]:  # fmt: skip
    """Return what was left out, and why."""
    plays = facts.plays
    if budget.num_left_out:
        num = len(plays) + budget.num_left_out
        yield f"{budget.num_left_out} of {counted(num, 'episode')}, because time ran out (--time_limit_s)"
    if names := _not_played(plays, budget):
        yield f"policies that had no time on any task: {', '.join(names)}"
    if names := _lost(plays, budget):
        yield f"policies of which an outage (InfraError) took every episode: {', '.join(names)}"
    if budget.num_not_repeated:
        yield f"{budget.num_not_repeated} repetitions, because time ran out (--time_limit_s)"
    if options.policies:
        yield "other policies than those of --policies"
    if len(drawn) < len(tasks):
        by_gold = f", {len(facts.more_gold)} of them only by gold" if facts.more_gold else ""
        yield f"{len(tasks) - len(drawn)} of {counted(len(tasks), 'task')} (--tasks){by_gold}"
    applied = _applied(plays, budget)
    if not budget.left_out["gold"] and "gold" not in applied:
        yield "wrong, hedged, odd and repeated gold actions: `gold` returns none"
    if not options.policies and not budget.num_left_out:
        yield from _without_action(applied)
    if not options.repeat:
        yield "repetitions, and another time of day (--no_repeat)"
    if marks:
        yield "programs that end their process: it runs them in this one"
    if max((len(play.steps) for play in plays), default=0) <= workings.MIN_SIZES:
        yield f"growth over turns: no episode has more than {workings.MIN_SIZES} turns"


def _draw_tasks(tasks: Sequence[Task], options: AuditOptions) -> list[Task]:
    if not tasks:
        raise ConfigError("audit: expected at least one task, got none. Check --data.")
    if options.num_tasks < 1 or options.concurrency < 1:
        wrong = min(options.num_tasks, options.concurrency)
        raise ConfigError(f"audit: expected num_tasks and concurrency >= 1, got {wrong}.")
    if options.task_ids:
        return [tasks[place_of_task(tasks, task_id)] for task_id in options.task_ids]
    places = sorted(
        Random(derive_seed(options.seed, "audit")).sample(range(len(tasks)), min(len(tasks), options.num_tasks))
    )
    return [tasks[place] for place in places]


def _more_tasks(tasks: Sequence[Task], drawn: Sequence[Task], options: AuditOptions) -> list[Task]:
    """Return further tasks for gold, which takes one episode of each: none where tasks or other policies are named."""
    if options.task_ids or (options.policies and "gold" not in options.policies):
        return []
    ids = {task.task_id for task in drawn}
    left = [task for task in tasks if task.task_id not in ids]
    return Random(derive_seed(options.seed, "gold")).sample(left, min(len(left), max(0, _MAX_GOLD - len(drawn))))


async def _play_more_gold(
    runner: PolicyRunner, plays: Sequence[Play], tasks: Sequence[Task], options: AuditOptions,
    notify: Callable[[str], None],
) -> list[Play]:  # fmt: skip
    """Play gold on further tasks, if it is known; those that have no time are not counted as left out."""
    pairs = [(AuditPolicy("gold", "", "gold", attrgetter("gold")), task) for task in tasks]
    if not any(play.key == "gold" for play in plays):
        return []
    budget = runner.budget
    left_out, budget.part = budget.left_out["gold"], _GOLD_PLAYS
    played = await _play_pairs(runner, pairs, set(), options.concurrency, notify)
    budget.left_out["gold"] = left_out
    return played


def _reseeded(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with other seeds, some times each."""
    numbers = range(_SEEDS)
    return [replace(task, seed=derive_seed(task.seed, task.task_id, number)) for number in numbers for task in tasks]


def _part_pairs(plays: Sequence[Play], tasks: Sequence[Task], options: AuditOptions) -> list[tuple[AuditPolicy, Task]]:
    """Return the policies that repeat parts of the gold plays, with their tasks."""
    golds = {p.task_id: p.actions for p in plays if p.key == "gold" and p.error is None}
    parts, names = gold_parts(golds, Random(derive_seed(options.seed, "farm"))), options.policies
    pairs = [(policy, task) for task in tasks for policy in parts.get(task.task_id, ())]
    return [(policy, task) for policy, task in pairs if not names or {policy.name, policy.key} & {*names}]


async def _play_pairs(
    runner: PolicyRunner, pairs: Sequence[tuple[AuditPolicy, Task]], marks: set[str], concurrency: int,
    notify: Callable[[str], None],
) -> list[Play]:  # fmt: skip
    """Play programs that end a process last, and only if none of the harmless ones, in `marks`, was run in this one."""
    plays: dict[int, Play] = {}

    async def play(chosen: Sequence[int]) -> None:
        before = len(plays)
        played = await play_all(
            runner, [pairs[index] for index in chosen], concurrency=concurrency,
            notify=lambda done: notify(f"{before + done} of {counted(len(pairs), 'episode')}"),
        )  # fmt: skip
        plays.update({index: one for index, one in zip(chosen, played, strict=True) if one is not None})

    risky = [index for index, (policy, _) in enumerate(pairs) if ends_a_process(policy)]
    await play([index for index in range(len(pairs)) if index not in risky])
    if not marks:
        await play(risky)
    return [plays[index] for index in sorted(plays)]


async def _repeat_plays(
    runner: PolicyRunner, plays: Sequence[Play], tasks: Mapping[str, Task], notify: Callable[[str], None],
    modules: Sequence[ModuleType],
) -> tuple[list[AuditFinding], list[Play]]:  # fmt: skip
    """Repeat the first successful play of each policy on each task; return what differs, and repetitions that failed.

    If nothing differs, repeat a few with another time of day for the code of `modules`, and with time between turns.
    """

    async def again(
        own: Sequence[Play], how: str, before: Callable[[], None] = lambda: None
    ) -> list[tuple[Play, Play]]:
        return await replay_all(
            runner, own, tasks, notify=lambda done: notify(f"{done} of {len(own)} episodes {how}"), before=before
        )

    first: dict[tuple[str, str], Play] = {}
    for play in plays:
        if play.error is None and play.policy != "length_bomb":
            first.setdefault((play.policy, play.task_id), play)
    runner.budget.part = _REPEATS
    pairs = await again([*first.values()], "again, one at a time")
    failed = [second for _, second in pairs if second.error is not None]
    flaky = workings.find_flaky(pairs)
    if flaky or not all(play.failed_outside for play in failed):
        return flaky, failed
    timed = [play for play in plays if play.key in CLOCK_POLICIES and play.error is None]
    runner.budget.part = 1.0
    with shifted_clock(modules):
        pairs = await again(timed, "at another time of day")
    if by_day := workings.find_clock(pairs):
        return by_day, failed
    with elapsing_clock(modules) as add:
        pairs = await again(timed, "with time between turns", partial(add, BETWEEN_S))
    return workings.find_clock(pairs, f"after {BETWEEN_S:g} s between turns"), failed


# --- policies of what the first plays showed: commands that prompts name, calls that earned, and actions that were paid

_NUM_COMMANDS, _NUM_CALLS, _NUM_PAID, _NUM_ANSWERS = 10, 6, 6, 3
_MAX_CHARS = 400
_CALL = re.compile(r"<tool_call>\n.*?\n</tool_call>", re.DOTALL)
_HALF = 0.5


def followed(name: str, action: str) -> AuditPolicy:
    """Return a policy with a fixed action, whose variant is the action itself: a call as its JSON."""
    variant = action.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") if _CALL.fullmatch(action) else action

    def act(view: View) -> str | None:
        if name == "other_gold":
            is_own = action == view.gold or is_answer(action, view.label)
            return action if view.before or not is_own else None
        if name == "say" or (not view.before if name == "call" else not is_time_to_end(view)):
            return action
        return ending(view)

    return AuditPolicy(name, variant, "wrong" if name == "other_gold" else "blind", act)


def named_policies(names: Sequence[str]) -> list[AuditPolicy]:
    """Return the policies of such keys, which hold their action."""
    found = []
    for key in names:
        name, _, variant = key.partition("/")
        if name in FOLLOWED and variant:
            try:
                call = json.loads(variant)
            except ValueError:
                call = None
            is_call = isinstance(call, dict) and call.keys() == {"name", "arguments"}
            found.append(followed(name, call_text(call["name"], call["arguments"]) if is_call else variant))
    return found


def follow_up(facts: Facts) -> list[AuditPolicy]:
    """Return policies with the commands of prompts, calls of plays that earned, actions that were paid, and answers."""
    prompts = {play.task_id: play.prompt for play in facts.plays}
    commands = Counter(command for prompt in prompts.values() for command in commands_of(prompt))
    found = [followed("say", each) for each, _ in commands.most_common(_NUM_COMMANDS)]
    earned, paid = Counter[str](), Counter[str]()
    for play in facts.plays:
        if facts.kinds[play.key] in ("gold", "wrong") or play.reward is None:
            continue
        if play.policy == "explore" and (facts.full(play) or facts.score_share(play.score) >= _HALF):
            earned.update({call for step in play.steps for call in _CALL.findall(step.action)})
        paid.update({step.action for step in play.steps if step.reward > EPS and len(step.action) <= _MAX_CHARS})
    found += [followed("call", each) for each, _ in earned.most_common(_NUM_CALLS)]
    found += [followed("again", each) for each, _ in paid.most_common(_NUM_PAID)]
    golds = [gold for gold in facts.gold.values() if facts.full(gold) and len(gold.action) <= _MAX_CHARS]
    answers = [p.action for p in golds if len(p.steps) == 1 or is_answer(p.action, facts.tasks[p.task_id].label)]
    return found + [followed("other_gold", each) for each in [*dict.fromkeys(answers)][:_NUM_ANSWERS]]
