"""Parts of verl_rollout.py that verl's Ray actors import: the server that samples, and what keeps our trajectories.

verl imports this module in each of its processes, by VERL_USE_EXTERNAL_MODULES.
"""

import itertools
import os
import pickle
from collections import defaultdict
from pathlib import Path

import agentenv.interop.verl.agent_loop as ours
from agentenv.core.types import StepResult
from agentenv_envs.math_retry import MathRetry

MODEL = str(Path(__file__).parents[2] / "agentenv/_assets/tiny-math")
COUNTS = defaultdict(itertools.count)
original = ours.run_planned


async def kept(source, setup, planned, **options):
    """Run our episodes as always, and keep their trajectories in a folder."""
    made = await original(source, setup, planned, **options)
    for each in made:
        file = Path(os.environ["AGENTENV_KEPT"]) / f"{each.episode_id.replace('/', '+')}.pickle"
        file.write_bytes(pickle.dumps(each))
    return made


ours.run_planned = kept


class Failing(MathRetry):
    """Math_retry, of whose four siblings one raises; the others pay 1, 2 and 4."""

    async def reset(self, states):
        self.pay = next(COUNTS[states["label"]]) % 4
        if self.pay == 3:
            raise RuntimeError("one of four")
        return await super().reset(states)

    async def step(self, states):
        return StepResult(reward=float(self.pay or 4), terminated=True)


class TinyServer:
    """What verl's vLLM server answers, from tiny-math on the CPU."""

    def __init__(self):
        from rollout_parts import Sampler  # verl brings a package `tests`

        self.sampler = Sampler()

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None, priority=0):
        from verl.workers.rollout.replica import TokenOutput

        assert sampling_params["logprobs"] is True
        made = await self.sampler.sample(
            prompt_ids, temperature=sampling_params["temperature"], max_tokens=sampling_params["max_tokens"]
        )
        return TokenOutput(
            token_ids=list(made.token_ids),
            log_probs=list(made.logprobs),
            stop_reason="completed",  # as verl's vLLM server says after "stop" and after "length"
            extra_fields={"global_steps": 7},
        )
