"""TRL's own GRPOTrainer trains tiny-math for some steps on each environment; prints what it made of our episodes.

One episode of each group fails. It prints JSON. Usage: trl_training.py [masked]
"""

import itertools
import json
import os
import sys
from collections import defaultdict

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agentenv import Limits, StepResult
from agentenv.core.dataset import read_tasks
from agentenv.episode.registry import builtin_datasets
from agentenv.interop import trl as module
from agentenv.interop.trl import EnvRollout, dataset, reward
from agentenv_envs.guess_number import GuessNumber
from agentenv_envs.math_retry import MathRetry
from agentenv_envs.tool_use import ToolUse
from tests.peers.where import ROOT

MODEL = str(ROOT / "agentenv/_assets/tiny-math")
run_planned = module.run_planned
COUNTS = defaultdict(itertools.count)
"""Numbers of the siblings of a group, by the seed that they share."""


class Right(MathRetry):
    """Math_retry, whose answers are all right."""

    async def step(self, states):
        return StepResult(reward=1.0, terminated=True)


CASES = {
    # A third attempt has no turn left: such an episode is truncated, although its last token is an EOS.
    "math_retry": (MathRetry, "word_problems_train", {"max_attempts": 3}, Limits(max_length=256, max_turns=2)),
    "tool_use": (ToolUse, "tool_use", {}, Limits(max_length=1024, max_turns=2)),
    "guess_number": (GuessNumber, "guess_number", {}, Limits(max_length=1024, max_turns=2)),
    "right": (Right, "word_problems_train", {}, Limits(max_length=256)),
}
"""Class, data, arguments of the class and limits of each environment."""


def failing(base, group):
    """The environment, of whose episodes one of each group raises."""

    class Failing(base):
        async def reset(self, states):
            if next(COUNTS[states["seed"]]) % group == 3:
                raise RuntimeError("one of its group")
            return await super().reset(states)

    return Failing


def recorded(function, into):
    async def run(*arguments, **options):
        into.extend(made := await function(*arguments, **options))
        return made

    return run


def checks_of(trainer, out, trajectories, columns):
    """Compare one generation's tensors with our trajectories, row by row."""
    ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
    attended = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
    trainer.model.eval()
    with torch.no_grad():
        logprobs = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attended, out["completion_ids"].size(1)
        )[0]
    trainer.model.train()
    rows = []
    for i, trajectory in enumerate(trajectories):
        completion = out["completion_mask"][i].bool()
        mask = (out["tool_mask"][i] * out["completion_mask"][i])[completion].tolist()
        chosen = torch.tensor(mask).bool()
        row = {
            "failed": trajectory.reward is None,
            "truncated": trajectory.truncated,
            "reward": trajectory.reward,
            "advantage": out["advantages"][i].item(),
            "mask_sum": sum(mask),
            "num": len(mask),
        }
        if trajectory.reward is not None and mask:  # TRL drops the tokens of what it takes for truncated
            segment = trajectory.segments[0]
            start, end = trajectory.turns[0].start, trajectory.turns[-1].end
            size = end - start
            theirs = out["prompt_ids"][i][out["prompt_mask"][i].bool()].tolist()
            theirs += out["completion_ids"][i][completion].tolist()[:size]
            ours = logprobs[i][completion][:size][chosen[:size]]
            sampled = torch.tensor(segment.logprobs[start:end].tolist())[chosen[:size]]
            row |= {
                "same_tokens": theirs == segment.token_ids[:end].tolist(),
                "same_mask": mask[:size] == list(segment.action_mask[start:end]),
                "added": mask[size:],
                "logprob_gap": (ours - sampled).abs().max().item() if sum(mask) else 0.0,
                "same_logprobs": torch.equal(
                    out["sampling_per_token_logps"][i][completion][:size][chosen[:size]], sampled
                ),
            }
        rows.append(row)
    return {"rows": rows, "columns": sorted(columns)}


def zero(completions, reward, failed, **columns):
    """Rewards with a 0 for an episode that has none."""
    return [value or 0.0 for value in reward]


zero._is_without_failed = True  # EnvRollout would replace the 0


def brevity(completions, **columns):
    """A second reward, which knows nothing of failed episodes."""
    return [-1.0] * len(completions)


def trained(name, *, max_steps=1, is_masked=False, group=8, reward_func=reward):
    env, data, env_kwargs, limits = CASES[name]
    rows = read_tasks(data, builtin=builtin_datasets(), limit=64)
    rollout = EnvRollout(failing(env, group), rows, env_kwargs=env_kwargs, limits=limits, max_tokens=64)
    trajectories, columns, made = [], {}, []
    module.run_planned = recorded(run_planned, trajectories)

    def rollout_func(prompts, trainer):
        trajectories.clear()
        columns.update(rollout(prompts, trainer))
        return dict(columns)

    args = GRPOConfig(
        "out", per_device_train_batch_size=16, num_generations=group, max_steps=max_steps, learning_rate=1e-3,
        max_completion_length=256, report_to=[], logging_steps=1, save_strategy="no", beta=0.0, use_cpu=True,
        bf16=False, mask_truncated_completions=is_masked,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    before = model.lm_head.weight.detach().clone()
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward_func, args=args, train_dataset=dataset(rows),
        processing_class=AutoTokenizer.from_pretrained(MODEL), rollout_func=rollout_func,
    )  # fmt: skip
    original = trainer._generate_and_score_completions

    def spy(inputs):
        out = original(inputs)
        made.append(checks_of(trainer, out, trajectories, columns))
        return out

    trainer._generate_and_score_completions = spy
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "steps": made,
        "rewards": [entry["reward"] for entry in logged],
        "failed": [entry.get("failed") for entry in logged],
        "is_training": model.training,
        "weights_changed": not torch.equal(before, model.lm_head.weight.detach()),
    }


def main():
    if "masked" in sys.argv:
        print(json.dumps(trained("math_retry", is_masked=True)))
    else:
        made = {name: trained(name) for name in ("tool_use", "guess_number")}
        made["math_retry"] = trained("math_retry", max_steps=3)
        made["right"], made["zero"] = (
            trained("right", group=4, reward_func=each) for each in ([reward, brevity], zero)
        )
        print(json.dumps(made))


main()
