"""tinker-cookbook's own rollouts and data processing over our episodes, with tiny-math on the CPU; prints JSON.

tinker's own: `do_group_rollout_and_filter_constant_reward`, its completer, its strategies, its runner,
`compute_advantages`, `assemble_training_data`. Ours is only the client that samples, in place of a connection.
"""

import asyncio
import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
from tinker.types import SampledSequence, SampleResponse
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollout_strategy import FailFast, MinViableGroup, RetryOnFailure
from tinker_cookbook.rl.rollouts import RolloutErrorCounter, do_group_rollout_and_filter_constant_reward
from tinker_cookbook.rl.types import Trajectory

from agentenv import Limits
from agentenv.chat.chat import ChatOptions
from agentenv.interop.tinker import EnvDatasetBuilder, EnvGroup
from tests.peers.rollout_parts import COUNTS, FORGETFUL, GROUP, MODEL, NUM_TASKS, Paying, Right, Sampler

MAX_TOKENS = 48
IDS = itertools.count()
SURVIVORS = []
"""Our Envs of each group, in the order of tinker's trajectories."""
SAMPLED = {}
"""Log-probabilities of each action, by what it follows and its tokens."""


class Telling(Paying):
    """Says more of its first turn."""

    first_info = {"first": 1.0, "why": "no"}  # noqa: RUF012


class Client:
    """What tinker's SamplingClient answers, from tiny-math on the CPU."""

    def __init__(self):
        self.sampler = Sampler()

    async def sample(self, prompt, num_samples, sampling_params):
        ids = prompt.to_ints()
        made = await self.sampler.sample(
            ids, temperature=sampling_params.temperature, max_tokens=sampling_params.max_tokens,
            stop_token_ids=tuple(sampling_params.stop),
        )  # fmt: skip
        # The same tokens in another batch have log-probabilities that round otherwise: the first ones are told again.
        logprobs = SAMPLED.setdefault((*ids, *made.token_ids), made.logprobs)
        sequence = SampledSequence(
            stop_reason=made.finish_reason,
            sequence_id=str(next(IDS)),
            tokens_np=np.array(made.token_ids, dtype=np.int32),
            logprobs_np=np.array(logprobs, dtype=np.float32),
        )
        return SampleResponse(sequences=[sequence])


class Kept(EnvGroup):
    """A group that keeps its Envs beyond `cleanup`."""

    async def compute_group_rewards(self, trajectory_group, env_group):
        SURVIVORS.append(env_group)
        return await super().compute_group_rewards(trajectory_group, env_group)


def wanted(segment, turns, advantage):
    """What tinker's Datum of a segment must hold, from our record and the client's log-probabilities."""
    end = turns[-1].end
    ids = [int(token) for token in segment.token_ids[:end]]
    mask = [float(chosen) for chosen in segment.action_mask[:end]]
    logprobs = [0.0] * end
    for turn in turns:
        logprobs[turn.start : turn.end] = SAMPLED[tuple(ids[: turn.end])]
    shift = slice(1, end)
    return {
        "inputs": ids[:-1],
        "targets": ids[shift],
        "mask": mask[shift],
        "logprobs": np.array(logprobs[shift], dtype=np.float32).tolist(),
        "advantages": np.array([chosen * advantage for chosen in mask[shift]], dtype=np.float32).tolist(),
    }


def given(datum):
    made = {"inputs": datum.model_input.to_ints()}
    names = {"targets": "target_tokens", "mask": "mask", "logprobs": "logprobs", "advantages": "advantages"}
    return made | {ours: datum.loss_fn_inputs[theirs].to_numpy().tolist() for ours, theirs in names.items()}


def compared(groups):
    """Compare each Datum with a segment of our trajectories, and return the rows; tinker's own arithmetic of both."""
    advantages = compute_advantages(groups)
    data, places = assemble_training_data(groups, advantages)
    by_episode = {}
    for datum, place in zip(data, places, strict=True):
        by_episode.setdefault((place["group_idx"], place["traj_idx"]), []).append(given(datum))
    rows = []
    for g, group in enumerate(groups):
        rewards = group.get_total_rewards()
        for t, theirs in enumerate(group.trajectories_G):
            ours = SURVIVORS[g][t].episode.trajectory
            advantage = rewards[t] - sum(rewards) / len(rewards)
            acted = sorted({turn.segment for turn in ours.turns})
            expected = [
                wanted(ours.segments[s], [turn for turn in ours.turns if turn.segment == s], advantage) for s in acted
            ]
            found = by_episode[g, t]
            rows.append(
                {
                    "group": g,
                    "num_data": len(found),
                    "num_segments": len(expected),
                    "equal": {
                        name: [each[name] for each in found] == [each[name] for each in expected]
                        for name in ("inputs", "targets", "mask", "logprobs")
                    },
                    "advantage_gap": max(
                        abs(a - b)
                        for mine, yours in zip(expected, found, strict=True)
                        for a, b in zip(mine["advantages"], yours["advantages"], strict=True)
                    ),
                    "advantage": float(advantages[g][t]),
                    "reward": ours.reward,
                    "their_rewards": [step.reward for step in theirs.transitions],
                    "turn_rewards": [turn.result.reward for turn in ours.turns],
                    "num_tokens": sum(len(each["inputs"]) + 1 for each in found),
                    "action_sizes": [turn.end - turn.start for turn in ours.turns],
                    "stop_reason": str(ours.stop_reason),
                    "their_stop_reason": theirs.stop_reason,
                    "finish_reasons": [str(turn.finish_reason) for turn in ours.turns],
                    "last_metrics": theirs.transitions[-1].metrics,
                    "logs": [step.logs for step in theirs.transitions],
                }
            )
    return rows


async def groups_of(client, strategy, num_tasks=NUM_TASKS, **options):
    """Let tinker roll out the first tasks; return its groups, without those that it dropped."""
    SURVIVORS.clear()
    COUNTS.clear()
    builder = EnvDatasetBuilder(model=MODEL, group_size=GROUP, batch_size=num_tasks, **options)
    dataset, _ = await builder()
    made = []
    for group in dataset.get_batch(0):
        group = pickle.loads(pickle.dumps(group))
        group = Kept(replace(group.options), group.task)
        rolled_out = do_group_rollout_and_filter_constant_reward(
            client, group, MAX_TOKENS, 1.0, False, enable_logging=False, strategy=strategy
        )
        made.append(await rolled_out)
        assert not group.envs  # closed
    return made


CASES = {
    "math_retry": {"data": "word_problems_train", "limits": Limits(max_length=160, max_turns=2)},
    "tool_use": {"data": "tool_use", "limits": Limits(max_length=1024, max_turns=3)},
    "guess_number": {"data": "guess_number", "limits": Limits(max_length=160, max_turns=4)},
}


async def main():
    client, answers = Client(), {}
    for name, options in CASES.items():
        answers[name] = compared(await groups_of(client, FailFast(), env=name, **options))

    paying = {"env": Telling, "data": "word_problems_train"}
    groups = await groups_of(client, MinViableGroup(max_retries=0), **paying)
    answers["failing"] = {
        "rows": compared(groups),
        "errors": [[e.error_message for e in g.rollout_errors] for g in groups],
    }
    (group,) = await groups_of(client, MinViableGroup(max_retries=0), 1, env=Right, data="word_problems_train")
    counter = RolloutErrorCounter()
    counter.ingest(group)
    nothing = Trajectory(transitions=[], final_ob=None)
    zero = replace(
        group, trajectories_G=[*group.trajectories_G, nothing], final_rewards_G=[*group.final_rewards_G, 0.0]
    )
    advantages = [each.tolist()[:3] for each in compute_advantages([group, zero])]
    rewards, metrics = group.get_total_rewards(), counter.get_metrics()
    answers["right"] = {"rewards": rewards, "advantages": advantages, "metrics": metrics}
    groups = await groups_of(client, RetryOnFailure(max_retries=0), **paying)
    answers["dropped"] = [group is None for group in groups]
    try:
        await groups_of(client, FailFast(), **paying)
    except Exception as error:
        answers["fail_fast"] = f"{type(error).__name__}: {error}"

    tokenizer_utils.get_tokenizer(MODEL).chat_template = FORGETFUL
    options = {**CASES["math_retry"], "chat_options": ChatOptions(history="rerender")}
    answers["rerender"] = compared(await groups_of(client, FailFast(), env="math_retry", **options))
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(main())
