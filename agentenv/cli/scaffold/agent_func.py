"""Write an agent_func.py for an environment, the file that OpenRLHF loads."""

from __future__ import annotations

from pathlib import Path

from agentenv.episode.endpoint.agent import owns_its_loop
from agentenv.episode.registry import GUESTS, installed_envs, load_env
from agentenv.errors import ConfigError

_FILE = '''"""{env} for `--train.agent_func_path` of OpenRLHF and `--agent_func_path` of `agentenv`."""

from agentenv import AgentExecutor as Executor
from {module} import {name}


class AgentExecutor(Executor):
    agent_cls = {agent}
'''


def write_agent_func(path: str, env: str) -> Path:
    """Write the file for an environment, as --env names it, and return its path.

    Raises:
        ConfigError: the file exists, there is no such environment or folder, the environment's file cannot be imported
            from there, or its agent has its own loop.
    """
    file, cls = Path(path).expanduser(), load_env(env)
    if file.exists():
        raise ConfigError(f"agentenv new: expected a new file, got {path!r}, which exists. Name another.")
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
