"""tinker-cookbook's rollout and training data on math_retry: a tiny model on the CPU takes the place of the service.

It needs agentenv-rl[tinker]. A training takes `train.main`: docs/interop/tinker.md.

    python examples/interop/tinker_rollout.py

expected last line: 8 episodes, 8 data, each with the tokens of its episode
"""

import asyncio
from typing import Any

from agentenv import SamplingParams
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import resolve_model
from agentenv.interop.tinker import EnvDatasetBuilder


class TinyClient:
    """What tinker's SamplingClient offers a rollout: `sample`."""

    def __init__(self, model: str) -> None:
        self.engine = HFEngine(model, dtype="float32")

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        import numpy as np
        from tinker.types import SampledSequence, SampleResponse

        sampling = SamplingParams(
            temperature=sampling_params.temperature,
            max_tokens=sampling_params.max_tokens,
            stop_token_ids=tuple(sampling_params.stop),
        )
        made = await self.engine.generate(prompt.to_ints(), sampling, request_id="example/0")
        sequence = SampledSequence(
            stop_reason=made.finish_reason,
            sequence_id="example",
            tokens_np=np.array(made.token_ids, dtype=np.int32),
            logprobs_np=np.array(made.logprobs, dtype=np.float32),
        )
        return SampleResponse(sequences=[sequence])

    sample_async = sample  # of that name in tinker-cookbook 0.5


async def main() -> None:
    from tinker_cookbook.completers import TinkerTokenCompleter
    from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
    from tinker_cookbook.rl.rollouts import do_group_rollout

    model = str(resolve_model("tiny-math"))
    limits = {"max_length": 256, "max_turns": 2}
    builder = EnvDatasetBuilder("math_retry", "word_problems_train", model, group_size=4, batch_size=2, limits=limits)
    dataset, _ = await builder()
    policy = TinkerTokenCompleter(TinyClient(model), max_tokens=48)
    groups = [await do_group_rollout(group, policy) for group in dataset.get_batch(0)]
    print([group.get_total_rewards() for group in groups])
    data, _ = assemble_training_data(groups, compute_advantages(groups))
    last = [trajectory.transitions[-1] for group in groups for trajectory in group.trajectories_G]
    whole = [step.ob.to_ints() + step.ac.tokens for step in last]
    given = [
        [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])] for datum in data
    ]
    print(
        f"{len(whole)} episodes, {len(data)} data, "
        + ("each with the tokens of its episode" if given == whole else "changed")
    )


if __name__ == "__main__":
    asyncio.run(main())
