"""`agentenv launch verl`: print a shell script that trains an environment with verl's PPO trainer, by GRPO.

verl reads its rows from a parquet file and its agent loops from a YAML file; the script writes both, then starts verl.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from agentenv.training.launch_script import ScriptConfig

_SCRIPT = """\
#!/usr/bin/env bash
# It needs verl, and agentenv-rl in the same environment.
set -euo pipefail
mkdir -p {out}

cat > {out}/agent_loops.yaml <<'END'
{loops}
END

python - {data} {out}/train.parquet <<'END'
import sys
from agentenv.core.dataset import read_tasks
from agentenv.episode.registry import builtin_datasets
from agentenv.interop.verl import dataset

dataset(read_tasks(sys.argv[1], builtin=builtin_datasets())).to_parquet(sys.argv[2])
END

python -m verl.trainer.main_ppo \\
{overrides}
"""


@dataclass(frozen=True)
class VerlLaunchConfig(ScriptConfig):
    """Print a shell script that trains an environment with verl's PPO trainer. Nothing is started."""

    engine: Literal["vllm", "sglang"] = "vllm"
    """What samples: verl's rollout.name."""
    max_prompt_length: int = 1024
    """Maximum number of tokens before the first action; a longer prompt is an error."""
    max_response_length: int = 1024
    """Maximum number of tokens of the actions and the observations between them."""
    n: int = 8
    """Episodes of each task: verl's rollout.n."""
    batch_size: int = 32
    """Tasks of each step: verl's train_batch_size, and its mini-batch."""
    num_gpus: int = 1
    """GPUs of the node."""
    out: str = "runs/verl"
    """Folder of the files and of verl's checkpoints."""


def loops(config: VerlLaunchConfig) -> str:
    """Return the YAML file of verl's agent loops, as JSON values."""
    entry = {
        "name": "agentenv",
        "_target_": "agentenv.interop.verl.agent_loop.EnvAgentLoop",
        "env": config.env,
        "env_kwargs": dict(config.env_kwargs),
        "limits": {"max_turns": config.max_turns},
        "max_tokens": config.max_tokens,
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in entry.items()]
    return "- " + "\n  ".join(lines)


def overrides(config: VerlLaunchConfig) -> dict[str, Any]:
    """Return verl's settings; the others are its defaults."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": f"{config.out}/train.parquet",
        "data.val_files": f"{config.out}/train.parquet",
        "data.train_batch_size": config.batch_size,
        "data.max_prompt_length": config.max_prompt_length,
        "data.max_response_length": config.max_response_length,
        "data.seed": config.seed,
        "actor_rollout_ref.model.path": config.model,
        f"{actor}.optim.lr": config.learning_rate,
        f"{actor}.ppo_mini_batch_size": config.batch_size,
        f"{actor}.ppo_micro_batch_size_per_gpu": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 1,
        f"{rollout}.name": config.engine,
        f"{rollout}.n": config.n,
        f"{rollout}.temperature": config.temperature,
        f"{rollout}.calculate_log_probs": "true",
        f"{rollout}.agent.default_agent_loop": "agentenv",
        f"{rollout}.agent.agent_loop_config_path": f"{config.out}/agent_loops.yaml",
        "trainer.n_gpus_per_node": config.num_gpus,
        "trainer.nnodes": 1,
        "trainer.total_training_steps": config.max_steps,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": config.out,
    }


def verl_script(config: VerlLaunchConfig) -> str:
    """Return the script."""
    lines = [f"  {shlex.quote(f'{name}={_hydra(value)}')}" for name, value in overrides(config).items()]
    return _SCRIPT.format(
        out=shlex.quote(config.out),
        loops=loops(config),
        data=shlex.quote(config.data),
        overrides=" \\\n".join(lines),
    )


def _hydra(value: Any) -> str:
    """Return a value as hydra's grammar reads it: text other than a plain path is quoted."""
    text = str(value)
    if isinstance(value, str) and not text.startswith("[") and set(text) & set(" ,:=(){}[]'\"$"):
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return text
