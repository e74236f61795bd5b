"""SkyRL's batch of math_retry episodes: our generator, a tiny model on the CPU in place of SkyRL's inference servers.

It needs SkyRL 0.3.0. A training takes SkyRL's servers and trainer on GPUs; docs/interop/skyrl.md has one.

    python examples/interop/skyrl_generator.py

expected last line: 8 rows, each with its reward at its last token
"""

import asyncio
import typing
from typing import Any

import typing_extensions

from agentenv.core.dataset import read_tasks
from agentenv.core.types import SamplingParams
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.episode.registry import load_env
from agentenv.interop.skyrl import EnvGenerator, dataset


class TinyClient:
    """What SkyRL's client of its inference servers offers a generator."""

    def __init__(self, model: str) -> None:
        self.engine = HFEngine(model, dtype="float32")

    async def generate(self, asked: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        params = asked["sampling_params"]
        sampling = SamplingParams(temperature=params["temperature"], max_tokens=params["max_tokens"])
        made = await self.engine.generate(asked["prompt_token_ids"][0], sampling, request_id="example/0")
        return {
            "response_ids": [list(made.token_ids)],
            "stop_reasons": [made.finish_reason],
            "response_logprobs": [list(made.logprobs or ())],
        }

    async def finish_session(self, session_id: str) -> None:
        pass


async def main() -> None:
    typing.TypedDict = typing_extensions.TypedDict  # SkyRL 0.3.0 needs it on Python 3.11 with pydantic 2.12
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.dataset import PromptDataset
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from skyrl.train.generators.utils import prepare_generator_input

    model = resolve_model("tiny-math")
    tokenizer = load_tokenizer(model)
    config = SkyRLTrainConfig().generator
    config.max_turns, config.max_input_length, config.sampling_params.max_generate_length = 2, 256, 48
    tasks = read_tasks(str(load_env("math_retry").datasets["word_problems_train"]), limit=2)
    dataset(tasks).to_parquet("train.parquet")
    rows = PromptDataset("train.parquet", tokenizer, 256, num_workers=1)
    params = get_sampling_params_for_backend("vllm", config.sampling_params)
    asked, _ = prepare_generator_input(rows.collate_fn([rows[0], rows[1]]), 4, params, "agentenv", "train", 1)
    made = await EnvGenerator(config, TinyClient(str(model)), tokenizer, "math_retry").generate(asked)
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    rewards = convert_prompts_responses_to_batch_tensors(tokenizer, *[made[name] for name in names])[3]
    print(rewards.sum(dim=1).tolist())
    where = "each with its reward at its last token" if rewards[:, -1].equal(rewards.sum(dim=1)) else "misplaced"
    print(f"{len(rewards)} rows, {where}")


if __name__ == "__main__":
    asyncio.run(main())
