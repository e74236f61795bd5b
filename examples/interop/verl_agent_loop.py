"""verl's agent loop worker on math_retry: verl asks for a batch, our episodes fill it, a tiny model answers on the CPU.

It needs verl 0.9.1. A training takes verl's servers on GPUs instead of `TinyServer`: docs/interop/verl-agent-loop.md.

    python examples/interop/verl_agent_loop.py

expected last line: 8 rows, each with its reward at its last token
"""

import asyncio
import tempfile
from typing import Any

from agentenv.core.dataset import read_tasks
from agentenv.core.types import SamplingParams
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import resolve_model
from agentenv.episode.registry import load_env
from agentenv.interop.verl import dataset


class TinyServer:
    """What verl's client of its servers offers an agent loop: `generate`."""

    def __init__(self, model: str) -> None:
        self.engine = HFEngine(model, dtype="float32")

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        sampling = SamplingParams(temperature=sampling_params["temperature"], max_tokens=sampling_params["max_tokens"])
        made = await self.engine.generate(prompt_ids, sampling, request_id=request_id)
        return TokenOutput(token_ids=made.token_ids, log_probs=made.logprobs, stop_reason="completed")


def batch_of(model: str, config: Any) -> Any:
    """Return two tasks, each four times, as verl's dataset hands them to its workers."""
    import numpy as np
    from verl import DataProto
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    tasks = read_tasks(str(load_env("math_retry").datasets["word_problems_train"]), limit=2)
    with tempfile.TemporaryDirectory() as folder:
        dataset(tasks).to_parquet(file := f"{folder}/train.parquet")
        rows = RLHFDataset(file, hf_tokenizer(model), config.data)
    columns = collate_fn([rows[0], rows[1]]) | {"uid": np.array(["first", "second"], dtype=object)}
    return DataProto.from_single_dict(columns).repeat(4, interleave=True)


async def main() -> None:
    from hydra import compose, initialize_config_module
    from verl.experimental.agent_loop import AgentLoopWorker

    model = str(resolve_model("tiny-math"))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.agent.default_agent_loop=agentenv/math_retry",
                "data.max_prompt_length=256",
                "data.max_response_length=128",
            ],
        )
    worker = AgentLoopWorker(config, TinyServer(model))
    made = (await worker.generate_sequences(batch_of(model, config))).batch
    last = made["attention_mask"][:, made["prompts"].shape[1] :].sum(dim=1, keepdim=True) - 1
    rewards = made["rm_scores"].sum(dim=1, keepdim=True)
    print(rewards.flatten().tolist())
    where = (
        "each with its reward at its last token" if made["rm_scores"].gather(1, last).equal(rewards) else "misplaced"
    )
    print(f"{len(made)} rows, {where}")


if __name__ == "__main__":
    asyncio.run(main())
