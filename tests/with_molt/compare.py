"""Molt's own loader, loop and Experiences, over a fake of its router: what they make of ours. Run by a test.

Prints JSON: `theirs` and `ours` are what Molt makes of the same episode played by its StepEnvRunner and by our runner.
"""

import asyncio
import json
import sys

import numpy as np
import torch
from molt.agents.base import Env, Result, Runner, StepEnvRunner, load_agent_runner
from molt.trainer.algorithm.advantage import GROUP_ADVANTAGE_ESTIMATORS, AdvantageContext, get_advantage_estimator
from molt.trainer.algorithm.experience import make_experience_batch, split_experience_batch
from molt.trainer.rollout.samples_generator import SamplesGenerator

from agentenv.chat.chat import ChatOptions
from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.interop.molt import AgentRunner
from tests.episode.endpoint.scenes import chat_of
from tests.with_molt.fakes import Router, rollout

FIELDS = (
    "sequences", "attention_mask", "action_mask", "rollout_log_probs", "routed_experts", "rewards", "scores",
    "truncated", "response_length", "total_length",
)  # fmt: skip
TOKENIZER = chat_of("Qwen3").tokenizer
FEEDBACK = "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
PROMPT = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def words(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


class Molts(Env):
    """Twice no, then the end."""

    def __init__(self):
        self.turn = 0

    async def step(self, state, **kwargs):
        self.turn += 1
        done = self.turn == 3
        return Result(reward=torch.tensor(0.5), score=0.25, observation="" if done else FEEDBACK, terminated=done)


class Ours(AgentInstance):
    """The same."""

    def __init__(self):
        self.turn = 0

    async def step(self, states):
        self.turn += 1
        done = self.turn == 3
        return StepResult("" if done else FEEDBACK, reward=0.5, score=0.25, terminated=done)


class Right(AgentInstance):
    """Right at once, but for one of four."""

    async def step(self, states):
        if states["seed"] % 4 == 3:
            raise ValueError("one of four")
        return StepResult(reward=1.0, terminated=True)


class OurRunner(AgentRunner):
    agent_cls = Ours
    chat_options = ChatOptions(text_feedback="raw")


class Routed(Router):
    """Also says which experts each token of prompt and action went to, the last one excepted."""

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None, session_id=None):
        out, stale = await super().generate(prompt_token_ids, sampling_params, multi_modal_data, session_id)
        num = len(prompt_token_ids) + len(out.outputs[0].token_ids) - 1
        out.outputs[0].routed_experts = np.arange(num * 2, dtype=np.uint8).reshape(num, 2, 1)
        return out, stale


class Rewritten(OurRunner):
    """Its template takes the reasoning out of what was said."""

    chat_options = ChatOptions(history="rerender", text_feedback="user")


def experience(sample):
    """What Molt makes of a Trajectory for its trainer, or why it drops it."""
    sample.group_id, sample.rollout_id = "group", "rollout"
    made, reason = SamplesGenerator._process_response_into_experience(sample, set(), 2_000)
    if made is None:
        return reason
    batch = make_experience_batch(split_experience_batch(make_experience_batch([made, made])))
    assert batch.sequences.shape[0] == 2
    values = {name: getattr(made, name) for name in FIELDS}
    return {name: None if value is None else value.tolist() for name, value in values.items()}


def advantages(rewards):
    """Molt's of one group, by estimator."""
    num = len(rewards)
    ctx = AdvantageContext(
        sample_to_rollout=torch.arange(num), exp_len=[num], action_masks=[torch.ones(num, 1)], kl_coef=0.0, gamma=1.0,
        lam=1.0, kls=[torch.zeros(num, 1)],
    )  # fmt: skip
    made = {}
    for name in sorted(GROUP_ADVANTAGE_ESTIMATORS):
        (values,), _ = get_advantage_estimator(name)(torch.tensor(rewards), [list(range(num))], ctx)
        made[name] = values[:, 0].tolist()
    return made


async def right_siblings():
    """Our runner's rewards of a group one of whose episodes fails, as Molt's actor gathers them."""
    runner = OurRunner(Right)
    llm = Routed("x", token_ids=words("one<|im_end|>"))
    calls = [rollout(runner, llm, prompt=PROMPT, tokenizer=TOKENIZER, max_length=2_000) for _ in range(4)]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    samples = [each for each in ended if not isinstance(each, Exception)]
    return [value for sample in samples for value in experience(sample)["rewards"]]


async def main(file):
    runner = load_agent_runner(file)
    said = words("<think>\nhm\n</think>\n\none<|im_end|>")
    answers = {}
    for name, each, prompt in (
        ("theirs", StepEnvRunner(Molts), PROMPT),
        ("ours", OurRunner(), PROMPT),
        ("segments", Rewritten(), [{"role": "user", "content": "1 + 1?"}]),
    ):
        llm = Routed("x", token_ids=said, stale=[0, 2, 0])
        made = await rollout(each, llm, prompt=prompt, tokenizer=TOKENIZER, max_length=2_000)
        answers[name] = [experience(sample) for sample in (made if isinstance(made, list) else [made])]
    answers["right"] = await right_siblings()
    answers["advantages"] = [advantages(answers["right"]), advantages([*answers["right"], 0.0])]
    answers["loaded"] = [type(runner).__name__, isinstance(runner, Runner), runner.PRERENDER_PROMPT]
    answers["said"] = said
    print("ANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
