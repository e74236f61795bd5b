"""`agentenv new NAME`: make a plugin, or an agent_func file. Exit codes: 0 made, 2 usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.cli.scaffold.plugin import PluginKind, make_plugin
from agentenv.episode.endpoint.agent import owns_its_loop
from agentenv.episode.registry import GUESTS, installed_envs, load_env
from agentenv.errors import ConfigError

_FILE = '''"""{env} for `--train.agent_func_path` of OpenRLHF and `--agent_func_path` of `agentenv`."""

from agentenv import AgentExecutor as Executor
from {module} import {name}


class AgentExecutor(Executor):
    agent_cls = {agent}
    agent_kwargs = {{}}  # of its constructor
    logs = {{}}  # numbers of `info` that OpenRLHF logs, such as {{"correct": "last"}}: first, last, sum, mean or max
    # `limits`, `on_error` and others: the page "OpenRLHF" of the documentation
'''


@dataclass(frozen=True)
class NewConfig:
    """Make a plugin: an environment with its data and tests, ready to install.

    With --env, write an agent_func file for that environment instead.
    """

    name: Annotated[str, POSITIONAL]
    """Name of the environment: lowercase letters, digits and underscores, at most 64 of them; with --env, a file."""
    env: str | None = None
    """Write NAME, such as agent_func.py, the file with which OpenRLHF trains this environment. Its arguments are
    `agent_kwargs` of the class in the file."""
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
        lines = [f"{file}\n", "Next:", f"  agentenv check {file} --data FILE.jsonl"]
        sys.stdout.write("\n".join([*lines, f"  agentenv run --agent_func_path {file} --data FILE.jsonl --limit 4\n"]))
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


def write_agent_func(path: str, env: str) -> Path:
    """Write the file for an environment, as --env names it, and return its path.

    Raises:
        ConfigError: the file exists, there is no such environment or folder, the environment's file cannot be imported
            from there, or its agent has its own loop.
    """
    file, cls = Path(path).expanduser(), load_env(env)
    if file.exists():
        raise ConfigError(f"agentenv new: expected a new file, got {path!r}, which exists. Name another.")
    if file.suffix != ".py":
        raise ConfigError(
            f"agentenv new: expected a file that ends in .py, got {path!r}. Name it, such as agent_func.py."
        )
    if not file.parent.is_dir():
        raise ConfigError(f"agentenv new: expected a file in a folder, got {path!r}. Make {str(file.parent)!r}.")
    if owns_its_loop(cls):
        raise ConfigError(
            f"--env: expected an environment with a `step` method, got {env!r}, an agent with its own loop, which "
            "OpenRLHF cannot run. Use `agentenv train`."
        )
    place, _, name = env.partition(":")
    if place in GUESTS:
        module, name, agent = "agentenv.episode.registry", "load_env", f'load_env("{env}")'
    else:
        if place.endswith(".py"):
            module, folder = Path(place).stem, Path(place).expanduser().resolve().parent
            if folder != file.resolve().parent or not module.isidentifier():
                raise ConfigError(
                    f"--env: expected an importable file in the folder of {path!r}, got {place!r}. "
                    f"Write the file into {str(folder)!r}, or name the environment as MODULE:{name or cls.__name__}."
                )
        else:
            module, _, name = (
                f"{place}:{name}" if name else installed_envs()[place.replace("-", "_")].value
            ).partition(":")
        agent = name = name or cls.__name__
    file.write_text(_FILE.format(env=env, module=module, name=name, agent=agent), "utf-8")
    return file
