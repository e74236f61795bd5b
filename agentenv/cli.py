"""The command line, `agentenv COMMAND`: flags to configs.

Exit codes: 0 done, 1 the run failed, 2 usage, 3 too many episodes failed, 130 and 143 interrupted (resumable).
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import tyro
from rich.table import Table
from rich.text import Text

from agentenv import __version__
from agentenv.cli_audit import audit
from agentenv.cli_flags import parse, print_json
from agentenv.cli_launch import launch
from agentenv.cli_new import new
from agentenv.cli_play import play
from agentenv.cli_rm import rm
from agentenv.cli_sandbox import sandbox
from agentenv.cli_tokens import tokens
from agentenv.cli_train import train
from agentenv.config import RunConfig
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.report import wide_console


@dataclass(frozen=True)
class ListConfig:
    """List the environments, data and models that are installed."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class DoctorConfig:
    """Say what is installed, which engines and isolation work here, and what mends the rest."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class CheckConfig:
    """Find what breaks the contract in an agent_func.py or an environment, before training does."""

    target: tyro.conf.Positional[str]
    """agent_func.py, or an environment or an agent with `run`: installed, module:Attr, path/file.py:Attr."""
    env_kwargs: str = "{}"
    """JSON object of arguments for the environment's constructor."""
    prompt: str = "What is 6 times 7?"
    """Prompt of the task it is tried on."""
    label: str = "42"
    """Label of that task: text, or a JSON list or object."""
    step_timeout_s: float = 30.0
    """Longest one call of the agent may take; an agent with a loop of its own has twice as long."""
    quick: bool = False
    """Only `contract`: odd actions, each call watched."""
    only: tuple[str, ...] = ()
    """Properties to look at; all of them when none is named."""
    skip: tuple[str, ...] = ()
    """Properties to leave out."""
    data: str | None = None
    """Rows to try it on, in place of its own: built-in data, a file or a Hugging Face dataset."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    label_key: str = "label"
    """Column with the label."""
    rows: int = 50
    """Rows of each data set that `reset` is tried on, spread over all of them."""
    max_turns: int = 12
    """An episode has to end within so many, whatever the policy says."""
    json: bool = False
    """Print JSON."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code; an error of ours is one line on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    try:
        return _dispatch(args)
    except AgentEnvError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"agentenv: error: {message}\n")
        return error.exit_code
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(args: Sequence[str]) -> int:
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        _help()
        return 0
    if name == "--version":
        sys.stdout.write(f"agentenv {__version__}\n")
        return 0
    if name not in _COMMANDS:
        close = difflib.get_close_matches(name, list(_COMMANDS), n=1)
        raise ConfigError(
            f"agentenv: expected one of {', '.join(_COMMANDS)}, got {name!r}."
            + (f" Did you mean {close[0]!r}?" if close else " Run `agentenv --help`.")
        )
    return _COMMANDS[name](args[1:])


def _help() -> None:
    lines = ["usage: agentenv COMMAND [flags]        agentenv COMMAND --help for the flags", ""]
    configs = {
        "run": RunConfig, "train": train, "list": ListConfig, "doctor": DoctorConfig, "check": CheckConfig,
        "audit": audit, "new": new, "play": play, "tokens": tokens, "rm": rm, "sandbox": sandbox, "launch": launch,
    }  # fmt: skip
    lines += [f"  {name:8} {(config.__doc__ or '').splitlines()[0]}" for name, config in configs.items()]
    sys.stdout.write("\n".join(lines) + "\n")


def _run(args: Sequence[str]) -> int:
    config = parse(RunConfig, "run", args)
    stored = _stored(config) if config.resume else None
    if stored is not None:
        config = parse(RunConfig, "run", args, default=stored)
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from agentenv.run import run

    return run(config)


def _stored(config: RunConfig) -> RunConfig | None:
    """The config of the run in --out, so that --resume needs no other flag.

    None where nothing has begun there and the flags name a run: the same command then starts and resumes a job.
    """
    from agentenv.record import read_config

    if config.out is None:
        raise ConfigError("--resume: expected --out DIR beside it, got none. Name the run directory.")
    out = Path(config.out)
    if not (out / "config.json").is_file():
        if config.source and (out.is_dir() or not out.exists()):
            return None
        raise ConfigError(
            f"--resume: expected a run directory in --out, got {config.out!r}. Check the path, or name a run to start."
        )
    flags = read_config(config.out)["config"]["flags"]
    known = {key: tuple(value) if isinstance(value, list) else value for key, value in flags.items()}
    try:
        return RunConfig(**{**known, "resume": True})  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"--resume: expected a config of this version in {config.out}, got {error}.") from error


def _list(args: Sequence[str]) -> int:
    config = parse(ListConfig, "list", args)
    from agentenv.catalog import catalog

    rows = catalog()
    if config.json:
        print_json(rows)
        return 0
    table = Table("kind", "name", "what it is", "from", box=None, header_style="bold")
    for row in rows:
        table.add_row(row["kind"], row["name"], Text(row["summary"]), Text(row["origin"], overflow="fold"))
    wide_console().print(table)
    return 0


def _doctor(args: Sequence[str]) -> int:
    config = parse(DoctorConfig, "doctor", args)
    from agentenv.doctor import diagnose

    findings = diagnose()
    if config.json:
        print_json([finding.to_dict() for finding in findings])
    else:
        table = Table("", "what", "state", "to mend it", box=None, header_style="bold")
        for finding in findings:
            table.add_row({"ok": "✓", "missing": "–", "broken": "✗"}[finding.state], *map(Text, finding.row()))
        wide_console().print(table)
    return int(any(finding.required and finding.state != "ok" for finding in findings))


def _check(args: Sequence[str]) -> int:
    config = parse(CheckConfig, "check", args)
    from agentenv.conformance.suite import run_suite, scene_of

    out, is_quiet = sys.stdout, config.json or config.quick
    with contextlib.redirect_stdout(sys.stderr):  # what the agent prints, also in a thread that is left behind
        outcomes = run_suite(
            scene_of(_check_options(config), lambda line: _tell(f"agentenv check: {line}")),
            only=("contract",) if config.quick else config.only,
            skip=dict.fromkeys(config.skip, "--skip"),
            told=lambda outcome: None if is_quiet else _show(out, str(outcome)),
        )
        problems = [problem for outcome in outcomes for problem in outcome.problems]
        if config.json:
            found: Any = [replace(problem, property="").to_dict() for problem in problems]
            if not config.quick:
                properties = [outcome.to_dict() for outcome in outcomes]
                told = [problem.to_dict() for problem in problems]
                found = {"target": config.target, "problems": told, "properties": properties}
            out.write(json.dumps(found, indent=2) + "\n")
            return int(bool(problems))
        name = config.target if len(config.target) < 60 else Path(config.target).name
        total = f"{name}: {len(problems) or 'no'} contract error{'s' if len(problems) != 1 else ''}"
        out.write("".join(f"{line}\n" for line in (*(problems if config.quick else ()), total)))
    return int(bool(problems))


def _show(out: TextIO, text: str) -> None:
    out.write(f"{text}\n")
    out.flush()


def _check_options(config: CheckConfig) -> Any:
    from agentenv.check import task_of
    from agentenv.config import parse_json_object
    from agentenv.conformance.scene import Options

    return Options(
        config.target,
        parse_json_object("--env_kwargs", config.env_kwargs),
        None if config.data else task_of(config.prompt, _label(config.label)),
        data=config.data,
        prompt_key=config.prompt_key,
        label_key=config.label_key,
        num_rows=config.rows,
        step_timeout_s=config.step_timeout_s,
        max_turns=config.max_turns,
    )


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _label(text: str) -> Any:
    # A lone number stays text, as labels in data mostly are.
    try:
        return json.loads(text) if text[:1] in ("[", "{") else text
    except json.JSONDecodeError:
        return text


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run, "train": train, "list": _list, "doctor": _doctor, "check": _check, "audit": audit,
    "new": new, "play": play, "tokens": tokens, "rm": rm, "sandbox": sandbox, "launch": launch,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
