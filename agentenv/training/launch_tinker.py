"""`agentenv launch tinker`: print a script that trains an environment with tinker-cookbook's `rl.train`.

tinker-cookbook is a library without a command for environments, so that the script is what its users start.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.training.launch_script import ScriptConfig

_SCRIPT = '''\
"""Start it with `python FILE.py`. It needs agentenv-rl[tinker], and TINKER_API_KEY for the service."""

import asyncio

from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollout_strategy import MinViableGroup

from agentenv import Limits
from agentenv.interop.tinker import EnvDatasetBuilder

config = train.Config(
    recipe_name="agentenv",
    model_name={model!r},
    dataset_builder=EnvDatasetBuilder(
        {env!r},
        {data!r},
        {model!r},
        env_kwargs={env_kwargs!r},
        group_size={n!r},
        batch_size={batch_size!r},
        limits=Limits(max_length={max_length!r}, max_turns={max_turns!r}),
        seed={seed!r},
    ),
    rollout_error_tolerance=MinViableGroup(),
    max_tokens={max_tokens!r},
    temperature={temperature!r},
    learning_rate={learning_rate!r},
    lora_rank={lora_rank!r},
    max_steps={max_steps!r},
    eval_every=0,
    base_url={base_url!r},
    log_path={out!r},
)
asyncio.run(train.main(config))
'''


@dataclass(frozen=True)
class TinkerLaunchConfig(ScriptConfig):
    """Print a script that trains an environment with tinker-cookbook. Nothing is started."""

    max_length: int = 2048
    """Maximum number of tokens of an episode, with its prompt."""
    n: int = 8
    """Episodes of each task: a group."""
    batch_size: int = 8
    """Tasks of each step."""
    learning_rate: float = 1e-4
    """Learning rate of the LoRA adapter."""
    lora_rank: int = 32
    """Rank of the LoRA adapter."""
    base_url: str | None = None
    """A server of tinker's interface, such as SkyRL's; None: tinker's service."""
    out: str = "runs/tinker"
    """Folder of tinker-cookbook's logs."""


def tinker_script(config: TinkerLaunchConfig) -> str:
    """Return the script. tinker needs a maximum number of tokens of an action: that of an episode if there is none."""
    values = {name: getattr(config, name) for name in TinkerLaunchConfig.__dataclass_fields__}
    values |= {"env_kwargs": dict(config.env_kwargs), "max_tokens": config.max_tokens or config.max_length}
    return _SCRIPT.format(**values)
