"""What the scripts of several trainers share: data, an environment that fails, a template that forgets, tiny-math."""

import itertools
import zlib
from collections import Counter, defaultdict
from pathlib import Path

from agentenv import SamplingParams, StepResult
from agentenv.engines.hf.engine import HFEngine
from agentenv_envs.math_retry import MathRetry

MODEL = str(Path(__file__).parents[2] / "agentenv/_assets/tiny-math")
GROUP, NUM_TASKS = 4, 2
DATA = {"math_retry": "word_problems_train", "tool_use": "tool_use", "guess_number": "guess_number"}
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('=')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that rewrites earlier answers, so that a rendered history does not extend what was sampled."""
COUNTS = defaultdict(itertools.count)
"""Numbers of the siblings of a task, by its label."""


class Paying(MathRetry):
    """Math_retry, of whose siblings one raises in its second turn; the others pay 0.5 and then 1, 2 and 4."""

    first_info = {}  # noqa: RUF012

    async def reset(self, states):
        self.pay, self.turn = next(COUNTS[states["label"]]) % GROUP, 0
        return await super().reset(states)

    async def step(self, states):
        self.turn += 1
        if self.turn == 1:
            return StepResult([{"role": "user", "content": "Again."}], reward=0.5, info=self.first_info)
        if self.pay == GROUP - 1:
            raise RuntimeError("one of four")
        return StepResult(reward=2.0**self.pay, score=0.25, terminated=True)


class Right(MathRetry):
    """Math_retry, of whose siblings one raises and the others are right."""

    async def reset(self, states):
        self.is_lost = next(COUNTS[states["label"]]) % GROUP == GROUP - 1
        return await super().reset(states)

    async def step(self, states):
        if self.is_lost:
            raise RuntimeError("one of four")
        return StepResult(reward=1.0, terminated=True)


class Sampler:
    """Samples from tiny-math: siblings differ, and what is sampled does not depend on the order of the calls."""

    def __init__(self):
        self.engine, self.calls = HFEngine(MODEL, dtype="float32"), Counter()

    async def sample(self, ids, **sampling):
        key = zlib.crc32(repr(list(ids)).encode())
        self.calls[key] += 1
        sampling = SamplingParams(**sampling, seed=(key + self.calls[key]) % 2**31)
        return await self.engine.generate(ids, sampling, request_id=f"{key}+{self.calls[key]}/0")
