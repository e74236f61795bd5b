"""`agentenv new NAME`: make a plugin, or an agent_func file. Exit codes: 0 made, 2 usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.cli.scaffold.agent_func import write_agent_func
from agentenv.cli.scaffold.plugin import PluginKind, make_plugin
from agentenv.errors import ConfigError


@dataclass(frozen=True)
class NewConfig:
    """Make a plugin: an environment with its data and tests, ready to install.

    With --env, write an agent_func file for that environment instead.
    """

    name: Annotated[str, POSITIONAL]
    """Name of the environment: lowercase letters, digits and underscores, at most 64 of them; with --env, a file."""
    env: str | None = None
    """Write NAME, such as agent_func.py, the file with which OpenRLHF trains this environment."""
    template: PluginKind = "multi_turn"
    """The environment that it begins with: attempts with feedback, one answer, a tool, or a game with an opponent."""
    out: str | None = None
    """Folder to create. Default: NAME in the current folder."""
    json: bool = False
    """Print JSON."""


def new(args: Sequence[str]) -> int:
    """Make a plugin: an environment with its data and tests, ready to install."""
    config = parse(NewConfig, "new", args)
    if config.env is not None:
        if config.out is not None:
            raise ConfigError(f"--out: expected none with --env, got {config.out!r}. NAME is the file to write.")
        file = write_agent_func(config.name, config.env)
        if config.json:
            print_json({"file": str(file)})
            return 0
        sys.stdout.write(f"{file}\n\nNext:\n  agentenv run --agent_func_path {file} --data FILE.jsonl --limit 4\n")
        return 0
    plugin = make_plugin(config.name, config.out, kind=config.template)
    files = [str(path) for path in plugin.files]
    if config.json:
        print_json({"folder": str(plugin.folder), "env": plugin.name, "class": plugin.class_name, "files": files})
        return 0
    lines = [f"{plugin.folder}/", *(f"  {path}" for path in files), "", "Next:"]
    lines += [
        f"  pip install -e '{plugin.folder}[dev]'",
        f"  agentenv check {plugin.name} && agentenv audit {plugin.name}",
        f"  agentenv run --env {plugin.name} --limit 4",
        f"  pytest {plugin.folder}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
