"""`agentenv launch skyrl`: print a script that trains an environment with SkyRL's trainer, by GRPO.

SkyRL's command knows no generator but its own, so that the script is what its users start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentenv.training.launch_script import ScriptConfig

_SCRIPT = '''\
"""Start it with `python FILE.py`, and SkyRL's own settings after it. It needs skyrl[fsdp] and agentenv-rl."""

import json
import os
import sys

import ray
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from agentenv.core.dataset import read_tasks
from agentenv.episode.registry import builtin_datasets
from agentenv.interop.skyrl import EnvGenerator, dataset

OUT = os.path.abspath({out!r})
SETTINGS = {settings} | {{
    "data.train_data": [OUT + "/train.parquet"],
    "trainer.ckpt_path": OUT + "/checkpoints",
    "trainer.export_path": OUT + "/exports",
    "trainer.log_path": OUT + "/logs",
}}


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return EnvGenerator(
            cfg.generator,
            inference_engine_client,
            tokenizer,
            {env!r},
            env_kwargs={env_kwargs!r},
            model=resolve_policy_model_name(cfg),
        )


@ray.remote(num_cpus=1)
def train(cfg):
    Experiment(cfg).run()


def main():
    os.makedirs(OUT, exist_ok=True)
    dataset(read_tasks({data!r}, builtin=builtin_datasets())).to_parquet(OUT + "/train.parquet")
    words = [f"{{name}}={{json.dumps(value)}}" for name, value in SETTINGS.items()]
    cfg = SkyRLTrainConfig.from_cli_overrides(words + sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class SkyRLLaunchConfig(ScriptConfig):
    """Print a script that trains an environment with SkyRL's trainer. Nothing is started."""

    max_prompt_length: int = 1024
    """Maximum number of tokens of a row's prompt; SkyRL leaves longer ones out."""
    max_input_length: int = 2048
    """Maximum number of tokens before an action. With --max_turns 1 it is that of the prompt."""
    n: int = 8
    """Episodes of each task: SkyRL's n_samples_per_prompt."""
    batch_size: int = 32
    """Tasks of each step: SkyRL's train_batch_size, and its mini-batch."""
    num_gpus: int = 1
    """GPUs of the node, which train and sample in turns."""
    out: str = "runs/skyrl"
    """Folder of the rows and of SkyRL's checkpoints, exports and logs."""


def settings(config: SkyRLLaunchConfig) -> dict[str, Any]:
    """Return SkyRL's settings; the others are its defaults."""
    is_single_turn = config.max_turns == 1
    return {
        "trainer.strategy": "fsdp",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.policy.model.path": config.model,
        "trainer.policy.optimizer_config.lr": config.learning_rate,
        "trainer.placement.policy_num_gpus_per_node": config.num_gpus,
        "trainer.placement.ref_num_gpus_per_node": config.num_gpus,
        "trainer.train_batch_size": config.batch_size,
        "trainer.policy_mini_batch_size": config.batch_size,
        "trainer.max_prompt_length": config.max_prompt_length,
        "trainer.epochs": config.max_steps,
        "trainer.max_training_steps": config.max_steps,
        "trainer.eval_interval": -1,
        "trainer.logger": "console",
        "trainer.seed": config.seed,
        "generator.step_wise_trajectories": True,
        "generator.n_samples_per_prompt": config.n,
        "generator.max_turns": config.max_turns,
        "generator.max_input_length": config.max_prompt_length if is_single_turn else config.max_input_length,
        "generator.sampling_params.max_generate_length": config.max_tokens or 1024,
        "generator.sampling_params.temperature": config.temperature,
        "generator.inference_engine.num_engines": config.num_gpus,
    }


def skyrl_script(config: SkyRLLaunchConfig) -> str:
    """Return the script."""
    lines = "".join(f"    {name!r}: {value!r},\n" for name, value in settings(config).items())
    values = {name: getattr(config, name) for name in ("env", "data", "out")}
    return _SCRIPT.format(settings="{\n" + lines + "}", env_kwargs=dict(config.env_kwargs), **values)
