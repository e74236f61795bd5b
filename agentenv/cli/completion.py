"""`agentenv completion SHELL`: print a script that completes commands, flags and their values in a shell."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from agentenv._util.version import __version__
from agentenv.cli.flags import parse
from agentenv.cli.help import CONFIG_FLAG, CONFIG_TEXT, POSITIONAL, Flag, flags_of, is_repeatable
from agentenv.engines.factory import engine_names
from agentenv.episode.registry import installed_envs
from agentenv.runs.flat_config import FlatConfig

CLASSES: Mapping[str, str] = {
    "run": "agentenv.runs.config:RunConfig",
    "train": "agentenv.training.config:TrainConfig",
    "list": "agentenv.cli.list:ListConfig",
    "doctor": "agentenv.cli.doctor:DoctorConfig",
    "check": "agentenv.cli.check:CheckConfig",
    "audit": "agentenv.cli.audit:AuditConfig",
    "new": "agentenv.cli.new:NewConfig",
    "play": "agentenv.cli.play:PlayConfig",
    "show": "agentenv.cli.show:ShowRunConfig",
    "view": "agentenv.cli.view:ViewConfig",
    "diff": "agentenv.cli.diff:DiffRunsConfig",
    "rescore": "agentenv.cli.rescore:RescoreConfig",
    "export": "agentenv.cli.export:ExportConfig",
    "tokens certify": "agentenv.cli.tokens:CertifyConfig",
    "tokens show": "agentenv.cli.tokens:ShowConfig",
    "tokens replay": "agentenv.cli.tokens:ReplayConfig",
    "rm eval": "agentenv.cli.rm:RMEvalConfig",
    "rm check": "agentenv.cli.rm:RMCheckConfig",
    "rm serve": "agentenv.cli.rm:RMServeConfig",
    "rm compare": "agentenv.cli.rm:RMCompareConfig",
    "sandbox doctor": "agentenv.cli.sandbox:SandboxDoctorConfig",
    "sandbox run": "agentenv.cli.sandbox:SandboxRunConfig",
    "sandbox bench": "agentenv.cli.sandbox:SandboxBenchConfig",
    "sandbox serve": "agentenv.cli.sandbox:SandboxServeConfig",
    "serve": "agentenv.cli.serve:ServeConfig",
    "config run": "agentenv.runs.config:RunConfig",
    "config train": "agentenv.training.config:TrainConfig",
    "completion": "agentenv.cli.completion:CompletionConfig",
    "help": "agentenv.cli.completion:HelpConfig",
    "version": "agentenv.cli.completion:VersionConfig",
}
"""Each command and the class of its flags, as module:Class."""
_REPLACEMENTS = {
    "(words, current_index, COMPLETION_SPEC)": "(words, current_index, COMPLETION_SPEC) or ['__TYRO_COMPLETE_FILES__']",
    'COMPREPLY=($(compgen -f -- "$cur"))': "COMPREPLY=()",
    "complete -F": "complete -o default -F",
    '$python_cmd -c "$pycode" $words': 'printf %s "$pycode" | $python_cmd - $words',
    "set -l current (count $words)": "set -l current (count $words); set -a words (commandline -ct)",
}
"""What to replace in tyro's scripts, so that a shell completes files where nothing else fits. bash does it best itself:
folders then end with a slash. fish reads the code from a pipe, since it is too long for an argument, and
passes the word at the cursor too."""


@dataclass(frozen=True)
class CompletionConfig:
    """Print a script that completes commands, flags and their values: `source <(agentenv completion bash)`."""

    shell: Annotated[Literal["bash", "zsh", "fish"], POSITIONAL]
    """The shell."""


@dataclass(frozen=True)
class HelpConfig:
    """Show the help of agentenv, or of a command."""

    command: Annotated[tuple[str, ...], POSITIONAL] = ()
    """The command, such as `run` or `tokens show`."""


@dataclass(frozen=True)
class VersionConfig:
    """Show the version of agentenv."""


def completion(args: Sequence[str]) -> int:
    """Print a script that completes commands, flags and their values in a shell."""
    config = parse(CompletionConfig, "completion", args)
    tree: dict[str, Any] = {}
    for command, path in CLASSES.items():
        first, _, second = command.partition(" ")
        if second:
            tree.setdefault(first, {})[second] = config_class(path)
        else:
            tree[first] = config_class(path)
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        asked, marks = ["--tyro-print-completion", config.shell], (OmitArgPrefixes, OmitSubcommandPrefixes)
        tyro.cli(_commands(tree), args=asked, prog="agentenv", use_underscores=True, config=marks)
    text = script.getvalue()
    for old, new in _REPLACEMENTS.items():
        text = text.replace(old, new)
    sys.stdout.write(text)
    return 0


def version(args: Sequence[str]) -> int:
    """Show the version of agentenv."""
    parse(VersionConfig, "version", args)
    sys.stdout.write(f"agentenv {__version__}\n")
    return 0


def config_class(path: str) -> type[Any]:
    """Return the class at module:Class."""
    module, _, name = path.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def _commands(tree: Mapping[str, Any]) -> Any:
    """Return a type from which tyro makes these subcommands."""
    kinds: list[Any] = []
    for name, config in tree.items():
        made = make_dataclass(name, [("command", _commands(config))]) if isinstance(config, Mapping) else _flags(config)
        kinds.append(Annotated[made, tyro.conf.subcommand(name)])
    return Union[tuple(kinds)]  # noqa: UP007 - of a list


def _flags(config: type[Any]) -> type[Any]:
    """Return a class with the flags of a command, in types that tyro can complete."""
    flags = [*flags_of(config)]
    flags += [Flag(CONFIG_FLAG, str, None, CONFIG_TEXT)] if issubclass(config, FlatConfig) else []
    made: list[tuple[str, Any, Any]] = []
    for flag in flags:
        kind: Any = Literal[flag.choices] if flag.choices else str
        if flag.name == "env" and issubclass(config, FlatConfig):
            kind = Literal[tuple(installed_envs())]
        elif flag.name == "engine" and not flag.choices:
            kind = Literal[tuple(engine_names())]
        default: Any = () if is_repeatable(flag.kind) else None
        kind = tuple[kind, ...] if is_repeatable(flag.kind) else kind | None
        if flag.kind is bool:
            kind, default = (bool, True) if flag.default else (tyro.conf.FlagCreatePairsOff[bool], False)
        kind = tyro.conf.Positional[kind] if flag.is_positional else kind  # type: ignore[misc]
        made.append((flag.name, kind, field(default=default, metadata={"help": flag.text})))
    return make_dataclass(config.__name__, made)
