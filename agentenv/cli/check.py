"""`agentenv check`: find breaches of the contract in an agent or an environment."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from agentenv._util.brief import brief
from agentenv._util.plurals import counted
from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL
from agentenv.episode.failures import TELL_THE_POLICY
from agentenv.episode.tasks import TaskSource
from agentenv.errors import AgentEnvError

if TYPE_CHECKING:
    from agentenv.testing.conformance.child import CheckProgress, ChildDeath
    from agentenv.testing.conformance.context import ConformanceContext
    from agentenv.testing.conformance.suite import PropertyOutcome

_MAX_UNREACHED = 3
"""Maximum number of places in the last line that no episode reached."""


@dataclass(frozen=True)
class CheckConfig:
    """Find breaches of the contract in an agent_func.py or an environment before training."""

    target: Annotated[str, POSITIONAL]
    """agent_func.py, or an environment or an agent with `run`: installed, module:Attr, path/file.py:Attr, KIND:NAME."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of arguments for the environment's constructor."""
    prompt: str = "What is 6 times 7?"
    """Prompt of one task to check it with, in place of rows. Without rows, the default is used."""
    label: str = "42"
    """Label of that task: text, or a JSON list or object."""
    step_timeout_s: float = 30.0
    """Time limit of one call of the agent, in seconds; twice as long for an agent with its own loop."""
    quick: bool = False
    """Check only `contract`: unusual actions, with every call checked."""
    only: tuple[str, ...] = ()
    """Properties to check. Default: all."""
    skip: tuple[str, ...] = ()
    """Properties to skip."""
    dataset: TaskSource = field(default_factory=TaskSource)
    """Tasks."""
    rows: int = 50
    """Rows of each dataset to call `reset` with, spread over the dataset."""
    max_turns: int | None = None
    """Maximum number of turns after which an episode must have ended by itself, for any policy. Default: 12, or the
    environment's `max_turns`, at which the loop ends an episode."""
    actions: str | None = None
    """File of further actions to try in every property: one in each line, or JSON texts in a .jsonl file. Each is
    played alone: write calls that follow one another in one action, and a sequence of turns as `hacks` of the class."""
    model: str | None = None
    """Model whose tokenizer and chat template are used; a folder with only these is enough.
    Default: stand-ins that need no download."""
    json: bool = False
    """Print JSON."""


def check(args: Sequence[str]) -> int:
    """Check an agent and return the exit code: 0, 1 if the contract is broken, or 3 if only infrastructure failed."""
    config = parse(CheckConfig, "check", args)
    from agentenv.testing.conformance.child import in_child

    return in_child(partial(_check, config), partial(_report_death, config))


def _report_death(config: CheckConfig, death: ChildDeath) -> int:
    """Report the property whose check ended the process."""
    from agentenv.testing.conformance.suite import outcome_of_death

    outcome = outcome_of_death(death, config.target)
    if death.signal_name:
        sys.stderr.write(death.stacks)
    if config.json:
        problems = [problem.to_dict() for problem in outcome.problems]
        document = {"target": config.target, "problems": problems, "properties": [outcome.to_dict()]}
        sys.stdout.write(json.dumps(problems if config.quick else document, indent=2) + "\n")
        return 1
    total = f"{config.target}: 1 contract error; the properties after it were not checked"
    sys.stdout.write("".join(f"{line}\n" for line in (*(outcome.problems if config.quick else [outcome]), total)))
    return 1


def _check(config: CheckConfig, progress: CheckProgress | None) -> int:
    from agentenv.runs.display.report import quiet_transformers
    from agentenv.testing.conformance.cases import read_actions, task_from_flags
    from agentenv.testing.conformance.context import ConformanceOptions
    from agentenv.testing.conformance.suite import make_context, run_suite

    label: Any = config.label
    if label[:1] in ("[", "{"):  # a single number stays text, as most labels in data are text
        with contextlib.suppress(json.JSONDecodeError):
            label = json.loads(label)
    options = ConformanceOptions(
        config.target,
        dict(config.env_kwargs),
        None if config.dataset.data else task_from_flags(config.prompt, label),
        **vars(config.dataset),
        num_rows=config.rows,
        step_timeout_s=config.step_timeout_s,
        max_turns=config.max_turns,
        actions=() if config.actions is None else read_actions(config.actions),
        model=config.model,
    )
    quiet_transformers()
    out, err, is_quiet = sys.stdout, sys.stderr, config.json or config.quick
    with contextlib.redirect_stdout(err):  # what the agent prints, also in a thread that is left behind
        context = make_context(options, lambda line: _write_line(err, f"agentenv check: {line}"), progress)
        outcomes = run_suite(
            context,
            only=("contract",) if config.quick else config.only,
            skip=dict.fromkeys(config.skip, "--skip"),
            on_outcome=lambda outcome: None if is_quiet else _write_line(out, outcome),
        )
        problems = [problem for outcome in outcomes for problem in outcome.problems]
        outages = [outcome for outcome in outcomes if outcome.state == "outside"]
        exit_code = 1 if problems else 3 if outages else 0
        if config.json:
            document: Any = [replace(problem, property="").to_dict() for problem in problems]
            if not config.quick:
                document = {
                    "target": config.target,
                    "max_turns": context.limits.max_turns,
                    "unreached": context.unreached,
                    "problems": [problem.to_dict() for problem in problems],
                    "properties": [outcome.to_dict() for outcome in outcomes],
                }
            out.write(json.dumps(document, indent=2) + "\n")
            return exit_code
        total = _total_line(config, context, outcomes)
        notes = [f"note: {note}" for outcome in outcomes for note in outcome.notes]
        out.write("".join(f"{line}\n" for line in (*((*problems, *notes, *outages) if config.quick else ()), total)))
    return exit_code


def _total_line(config: CheckConfig, context: ConformanceContext, outcomes: Sequence[PropertyOutcome]) -> str:
    """Return the last line: the number of problems, and what was skipped or has to be checked again."""
    num_problems = sum(len(outcome.problems) for outcome in outcomes)
    outages = [outcome for outcome in outcomes if outcome.state == "outside"]
    name = config.target if len(config.target) < 60 else Path(config.target).name
    total = f"{name}: {counted(num_problems, 'contract error') if num_problems else 'no contract errors'}"
    if num_notes := sum(len(outcome.notes) for outcome in outcomes):
        total += f"; {counted(num_notes, 'note')}"
    if config.max_turns is None and getattr(context.agent_cls, "max_turns", None) is not None:
        total += f"; max_turns {context.limits.max_turns} (the environment's)"
    errors = [rows for rows in context.rows(1).values() if isinstance(rows, AgentEnvError)]
    if context.uses_default_task and errors:
        total += f"; the built-in question replaced its data: {errors[0]}"
    if not config.quick:
        reasons: dict[str, list[str]] = {}
        for outcome in outcomes:
            if outcome.state == "skipped":
                reasons.setdefault(outcome.reason, []).append(outcome.name)
        for reason, names in reasons.items():
            total += f"; skipped {', '.join(names) if len(names) < 4 else f'{len(names)} properties'}: {reason}"
    if context.avoided.slow:
        action, seconds = max(context.watch.slow.items(), key=lambda pair: pair[1])
        total += f"; left out {counted(len(context.watch.slow), 'slow action')}, such as {brief(action, 80)} "
        total += f"({seconds:.0f} s)"
    if context.unreached:
        more = len(context.unreached) - _MAX_UNREACHED
        total += (
            f"; no episode reached {', '.join(context.unreached[:_MAX_UNREACHED])}{f' and {more} more' * (more > 0)}: "
        )
        has_gold = any(case.policy == "gold" for case in context.base_cases)
        total += (
            f"{'pass rows whose gold does with --data' if has_gold else 'write `gold`'}, name actions that do in a "
        )
        total += "file for --actions (each is played alone), or pass other --env_kwargs"
    if outages:
        is_told = any(TELL_THE_POLICY in outage.reason for outage in outages)
        total += f"; the outside failed in {counted(len(outages), 'property', 'properties')}: "
        total += "the lines above say what to do" if is_told else "run it again, or with a stable stand-in"
    return total


def _write_line(stream: TextIO, line: object) -> None:
    stream.write(f"{line}\n")
    stream.flush()
