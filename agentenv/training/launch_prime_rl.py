"""`agentenv launch prime-rl`: a package that verifiers loads, prime-rl's configuration, and the commands.

prime-rl finds an environment by the name of an installed package, and its environment servers import it, too.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

from agentenv.episode.registry import installed_envs, load_env
from agentenv.errors import ConfigError
from agentenv.training.launch_script import ScriptConfig

_MODULE = '''\
"""The environment {env} of agentenv for verifiers and prime-rl."""

from pathlib import Path

from agentenv.interop.verifiers_env import env_package

DATA = {data}
EnvTaskset, EnvHarness, EnvOfOne = env_package({env!r}, DATA, {env_kwargs!r})

__all__ = ["EnvHarness", "EnvOfOne", "EnvTaskset"]
'''
_PROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
description = {about}
requires-python = ">=3.11"
dependencies = ["agentenv-rl", {own}"verifiers>=0.3.1.dev61"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""
_CONFIG = """\
max_steps = {max_steps}
seq_len = {max_length}

[deployment]
num_train_gpus = 1
num_infer_gpus = 1

[model]
name = {model}

[orchestrator]
batch_size = {num_episodes}
group_size = {n}

[orchestrator.renderer]
{renderer}

[orchestrator.train.sampling]
temperature = {temperature}
{max_tokens}
[[orchestrator.train.source]]
name = "{name}"

[orchestrator.train.source.env.taskset]
id = "{name}"
seed = {seed}

[orchestrator.train.source.env.agent.harness]
id = "{name}"
max_turns = {max_turns}
max_length = {max_length}

[trainer.optim]
lr = {learning_rate}

[inference]
"""
_OURS = 'name = "custom"\nimport_path = "agentenv.interop.verifiers_renderer.ChatRenderer"'


@dataclass(frozen=True)
class PrimeLaunchConfig(ScriptConfig):
    """Write a package for verifiers and prime-rl's configuration, and print the commands. Nothing is started."""

    max_length: int = 2048
    """Maximum number of tokens of an episode, with its prompt."""
    n: int = 8
    """Episodes of each task: a group."""
    batch_size: int = 8
    """Tasks of each step."""
    renderer: str = "auto"
    """What prime-rl tokenizes with: a name in its package renderers, of which `auto` knows published models by their
    ids; or `agentenv`, for tokens as in `agentenv train`, with any chat template."""
    tool_parser: str | None = None
    """For --renderer default, if the environment has tools: how calls are written, such as qwen3."""
    out: str = "prime-rl"
    """New or empty folder for the package and rl.toml."""


def write_package(config: PrimeLaunchConfig) -> str:
    """Write the package and rl.toml; return the commands.

    Raises:
        ConfigError: the folder is not empty, or the environment is a file, which no package can require.
    """
    cls, folder = load_env(config.env), Path(config.out).expanduser()
    if ".py" in config.env:
        raise ConfigError(
            f"--env: expected the environment of an installed package, got {config.env!r}. Make a package of it: "
            "`agentenv new`."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out: expected a new or empty folder, got {config.out!r}. Name another.")
    words = re.findall(r"[a-z0-9]+", config.env.lower())
    name, module = "-".join(["agentenv", *words]), "_".join(["agentenv", *words])
    top = cls.__module__.partition(".")[0]
    entry = installed_envs().get(config.env)
    owner = entry.distribution if entry else (packages_distributions().get(top) or ["agentenv-rl"])[0]
    (folder / module).mkdir(parents=True)
    data = Path(config.data).expanduser()
    if data.is_file():
        shutil.copyfile(data, folder / module / f"tasks{''.join(data.suffixes[-2:])}")
        place = f'str(Path(__file__).with_name("tasks{"".join(data.suffixes[-2:])}"))'
    else:
        place = repr(config.data)
    text = _MODULE.format(env=config.env, data=place, env_kwargs=dict(config.env_kwargs))
    if not data.is_file():
        text = text.replace("from pathlib import Path\n\n", "")
    (folder / module / "__init__.py").write_text(text, "utf-8")
    own = "" if owner == "agentenv-rl" else f'"{owner}", '
    about = json.dumps(f"The environment {config.env} of agentenv")
    (folder / "pyproject.toml").write_text(_PROJECT.format(name=name, module=module, own=own, about=about), "utf-8")
    (folder / "rl.toml").write_text(_rl_toml(config, name), "utf-8")
    where, model = shlex.quote(str(folder)), shlex.quote(config.model)
    return (
        f"uv pip install -e {where}  # into prime-rl's environment\n"
        f"vf-eval {name} -n 4 -r 2 --no-push --model {model} --client.base-url http://localhost:8000/v1\n"
        f"uv run rl @ {where}/rl.toml\n"
    )


def _rl_toml(config: PrimeLaunchConfig, name: str) -> str:
    values = {key: getattr(config, key) for key in PrimeLaunchConfig.__dataclass_fields__}
    renderer = f"name = {json.dumps(config.renderer)}" if config.renderer != "agentenv" else _OURS
    parser = "" if config.tool_parser is None else f"\ntool_parser = {json.dumps(config.tool_parser)}"
    return _CONFIG.format(
        **values
        | {
            "name": name,
            "model": json.dumps(config.model),
            "num_episodes": config.n * config.batch_size,
            "renderer": renderer + parser,
            "max_tokens": "" if config.max_tokens is None else f"max_completion_tokens = {config.max_tokens}\n",
        }
    )
