"""`agentenv launch trl`: print a script that trains an environment with TRL's GRPOTrainer.

TRL has no command for a `rollout_func`, so that the script is what its users start, with `python` or `accelerate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentenv.training.launch_script import ScriptConfig

_SCRIPT = '''\
"""Start it with `accelerate launch FILE.py`, or `python FILE.py` on one device. It needs agentenv-rl[trl]."""

from trl import GRPOConfig, GRPOTrainer

from agentenv import Limits
from agentenv.core.dataset import read_tasks
from agentenv.episode.registry import builtin_datasets
from agentenv.interop.trl import EnvRollout, dataset, reward

rows = read_tasks({data!r}, builtin=builtin_datasets())
trainer = GRPOTrainer(
    model={model!r},
    reward_funcs=reward,
    train_dataset=dataset(rows),
    rollout_func=EnvRollout(
        {env!r},
        rows,
        env_kwargs={env_kwargs!r},
        limits=Limits(max_length={max_length!r}, max_turns={max_turns!r}),
        max_tokens={max_tokens!r},
    ),
    args=GRPOConfig(
        {out!r},
        num_generations={n!r},
        per_device_train_batch_size={batch_size!r},
        learning_rate={learning_rate!r},
        temperature={temperature!r},
        beta={kl_coef!r},
        max_steps={max_steps!r},
        seed={seed!r},
        logging_steps=1,
        report_to="none",
        use_cpu={use_cpu!r},
        bf16={bf16!r},
        {engine},
    ),
)
trainer.train()
'''
_ENGINES = {
    "transformers": "use_vllm=False",
    "vllm_colocate": 'use_vllm=True,\n        vllm_mode="colocate"',
    "vllm_server": 'use_vllm=True,\n        vllm_mode="server"',
}


@dataclass(frozen=True)
class TRLLaunchConfig(ScriptConfig):
    """Print a script that trains an environment with TRL's GRPOTrainer. Nothing is started."""

    engine: Literal["transformers", "vllm_colocate", "vllm_server"] = "transformers"
    """What samples: the trainer's own model, or TRL's vLLM in its process or as a server."""
    max_length: int = 2048
    """Maximum number of tokens of an episode, with its prompt."""
    n: int = 8
    """Episodes of each task: TRL's num_generations."""
    batch_size: int = 8
    """Episodes of each device and step: TRL's per_device_train_batch_size."""
    kl_coef: float = 0.0
    """Weight of the divergence from the first model: TRL's beta."""
    use_cpu: bool = False
    """Train on the CPU, without bfloat16."""
    out: str = "runs/trl"
    """Folder of TRL's checkpoints."""


def script(config: TRLLaunchConfig) -> str:
    """Return the script."""
    values = {name: getattr(config, name) for name in TRLLaunchConfig.__dataclass_fields__}
    values |= {"engine": _ENGINES[config.engine], "env_kwargs": dict(config.env_kwargs), "bf16": not config.use_cpu}
    return _SCRIPT.format(**values)
