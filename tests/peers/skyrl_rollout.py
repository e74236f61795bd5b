"""SkyRL's own training loop over our episodes, with tiny-math on the CPU; prints what became of them, as JSON.

SkyRL's own: `RayPPOTrainer.train`, its data set, its HTTP client, its generator for text environments, its batch and
its advantages. Its models need GPUs and are not run; the server that samples is ours.
"""

import asyncio
import json
import math
from dataclasses import dataclass, field

import numpy as np
import skyrl_gym
import torch
import typed_dict  # noqa: F401
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_parts import TOKENIZER, asynchronous, config_of, evaluated, served, trained

from agentenv import Chat, Limits, SamplingParams, run_episode
from agentenv.chat.chat import ChatOptions, stop_token_ids_of
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.engine import Engine
from agentenv.core.types import Completion
from agentenv.episode.registry import builtin_datasets, load_env
from agentenv.episode.setup import EpisodeKey
from agentenv.errors import AgentEnvError
from agentenv.interop.skyrl import EnvGenerator, dataset
from tests.peers.rollout_parts import DATA, FORGETFUL, GROUP, MODEL, NUM_TASKS, Paying, Right


@dataclass(frozen=True)
class Kept(EnvGenerator):
    """Ours, which keeps the trajectories of its rows."""

    kept: list = field(default_factory=list)

    def _output(self, kept):
        self.kept.extend(trajectory for _, trajectory in kept)
        return super()._output(kept)


def wanted(trajectory, segment, is_last, is_step_wise):
    """What SkyRL's rows must hold of a segment: the prompt, the response, its mask, log-probabilities and rewards."""
    turns = [turn for turn in trajectory.turns if turn.segment == segment]
    start, end, record = turns[0].start, turns[-1].end, trajectory.segments[segment]
    rewards = [0.0] * (end - start)
    for turn in turns:
        rewards[turn.end - start - 1] = turn.result.reward
    if is_step_wise:  # SkyRL learns from the last row's
        others = math.fsum(turn.result.reward for turn in trajectory.turns if turn.segment != segment)
        rewards = [*rewards[:-1], rewards[-1] + others] if is_last else [0.0] * (end - start)
    mask = list(record.action_mask[start:end])
    logprobs = [value if chosen else 0.0 for value, chosen in zip(record.logprobs[start:end], mask, strict=True)]
    ids = record.token_ids.tolist()
    return {"tokens": ids[:end], "responses": ids[start:end], "masks": mask, "logprobs": logprobs, "rewards": rewards}


def compared(batch, trajectories, is_step_wise):
    """Compare SkyRL's batch, without padding, with our trajectories; all but the advantages bit by bit."""
    rows, at = [], 0
    for trajectory in trajectories:
        acted = sorted({turn.segment for turn in trajectory.turns})
        for segment in acted:
            want = wanted(trajectory, segment, segment == acted[-1], is_step_wise)
            answered = batch["response_mask"][at].bool()
            tokens = batch["sequences"][at][batch["attention_mask"][at].bool()]
            given = {
                "tokens": tokens, "responses": tokens[len(tokens) - int(answered.sum()) :],
                "masks": batch["loss_mask"][at][answered], "logprobs": batch["rollout_logprobs"][at][answered],
                "rewards": batch["rewards"][at][answered],
            }  # fmt: skip
            advantages = batch["advantages"][at][answered]
            assert advantages.unique().numel() == 1
            assert not batch["loss_mask"][at][~answered].any()
            assert not batch["rewards"][at][~answered].any()
            rows.append(
                {
                    "equal": {
                        key: torch.equal(given[key], torch.tensor(value, dtype=given[key].dtype))
                        for key, value in want.items()
                    },
                    "uid": batch["uids"][at], "episode": trajectory.episode_id, "reward": trajectory.reward,
                    "advantage": advantages[0].item(), "num_turns": len(trajectory.turns),
                    "num_segments": len(acted), "stop_reason": str(trajectory.stop_reason),
                    "finish_reason": str(trajectory.turns[-1].finish_reason), "num_tokens": len(want["tokens"]),
                    "turn_rewards": [turn.result.reward for turn in trajectory.turns],
                    "was_cut": any(turn.finish_reason == "length" for turn in trajectory.turns[:-1]),
                    "versions": sorted({int(each) for each in trajectory.segments[segment].policy_versions}),
                }
            )  # fmt: skip
            at += 1
    assert at == len(batch["uids"])
    return rows


async def ours(env, data, settings, options=None, is_async=False):
    """Train on the episodes of our generator."""
    is_step_wise = settings.get("step_wise_trajectories", False)
    cfg = config_of(NUM_TASKS, GROUP, **settings)
    if is_async:
        asynchronous(cfg)
    file = f"{data}.parquet"
    dataset(read_tasks(data, builtin=builtin_datasets(), limit=NUM_TASKS)).to_parquet(file)
    async with served() as (server, client):
        generator = Kept(cfg.generator, client, TOKENIZER, env=env, model="tiny-math", max_retries=0, **(options or {}))
        try:
            batch, log = await trained(cfg, file, client, generator)
        except AgentEnvError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        rows = compared(batch, generator.kept, is_step_wise)
    return {
        "rows": rows, "num_failed": generator.failures.num_failed, "sessions": sorted(server.sessions),
        "finished": sorted(server.finished), "salts": sorted(server.salts), "log": log,
    }  # fmt: skip


async def evaluation(env, settings):
    """Return what SkyRL's evaluation makes of our generator's episodes."""
    cfg = config_of(NUM_TASKS, GROUP, **settings)
    file = "evaluation.parquet"
    dataset(read_tasks("word_problems_train", builtin=builtin_datasets(), limit=NUM_TASKS)).to_parquet(file)
    async with served() as (_, client):
        return await evaluated(cfg, file, client, EnvGenerator(cfg.generator, client, TOKENIZER, env=env))


class Again(Engine):
    """An engine that answers actions that were sampled before."""

    def __init__(self, actions):
        self.actions = iter(actions)

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        ids, logprobs, reason = next(self.actions)
        return Completion(tuple(ids), reason, logprobs=tuple(logprobs))


async def in_text(env, data):
    """Train on the episodes of SkyRL's own generator over our text environment, and play its actions in our loop."""
    cfg = config_of(NUM_TASKS, GROUP)
    cfg.generator.sampling_params.max_generate_length = 96  # fewer actions are cut
    cfg.environment.env_class = f"text_{env}"
    options = {"env": env, "ends": [TOKENIZER.eos_token]}
    skyrl_gym.register(cfg.environment.env_class, "agentenv.interop.skyrl.text_env:EnvText", options)
    file = f"{data}.parquet"
    tasks = [in_messages(task) for task in read_tasks(data, builtin=builtin_datasets(), limit=NUM_TASKS)]
    dataset(tasks).to_parquet(file)
    async with served() as (_, client):
        generator = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, client, TOKENIZER)
        try:
            batch, log = await trained(cfg, file, client, generator)
        except AgentEnvError as error:
            return {"error": f"{type(error).__name__}: {error}"}
    played = [await again(env, tasks[int(uid)], batch, at) for at, uid in enumerate(batch["uids"])]
    return {"rows": compared(batch, played, is_step_wise=False), "log": log}


async def again(env, task, batch, at):
    """Return our trajectory of the actions that a row has."""
    answered = batch["response_mask"][at].bool()
    ids = batch["sequences"][at][-answered.shape[0] :][answered].tolist()
    logprobs, mask = batch["rollout_logprobs"][at][answered].tolist(), batch["loss_mask"][at][answered].tolist()
    edges = [i for i in range(len(mask) + 1) if bool(mask[i : i + 1] and mask[i]) != bool(i and mask[i - 1])]
    actions = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        reason = "stop" if ids[end - 1] == TOKENIZER.eos_token_id else "length"
        actions.append((ids[start:end], logprobs[start:end], reason))
    chat = Chat(TOKENIZER, stop_token_ids=stop_token_ids_of(MODEL))
    return await run_episode(
        load_env(env), task, engine=Again(actions), chat=chat, limits=Limits(max_length=496, max_turns=3),
        sampling=SamplingParams(max_tokens=96), key=EpisodeKey(f"{task.task_id}/{at}"),
    )  # fmt: skip


async def main():
    wise, answers = {"step_wise_trajectories": True}, {}
    for env, data in DATA.items():
        answers[env] = await ours(env, data, {"max_input_length": 1024})
    answers["tight"] = await ours("guess_number", "guess_number", {"max_input_length": 128, "max_turns": 9})
    answers["paying"] = await ours(Paying, "word_problems_train", wise)
    answers["right"] = await ours(Right, "word_problems_train", wise)
    rewards = torch.tensor([[1.0], [1.0], [1.0], [0.0]])  # the last row is masked
    zero, _ = compute_grpo_outcome_advantage(rewards, (rewards > 0).float(), np.zeros(GROUP))
    answers["zero"] = zero[:3, 0].tolist()
    answers["asynchronous"] = await ours("math_retry", "word_problems_train", wise, is_async=True)
    answers["evaluated"] = [await evaluation(Paying, wise), await evaluation("math_retry", {})]
    answers["one_row_each"] = await ours(Paying, "word_problems_train", {})
    forgetful = {"chat_options": ChatOptions(history="rerender")}
    TOKENIZER.chat_template, kept = FORGETFUL, TOKENIZER.chat_template
    answers["rerender"] = await ours("math_retry", "word_problems_train", wise, forgetful)
    TOKENIZER.chat_template = kept
    for env, data in DATA.items():
        answers[f"text_{env}"] = await in_text(env, data)
    answers["text_failing"] = await in_text("tests.peers.rollout_parts:Paying", "word_problems_train")
    print("\n" + json.dumps(answers))


asyncio.run(main())
