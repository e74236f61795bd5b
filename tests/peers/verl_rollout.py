"""verl's own workers run our environments on the CPU with tiny-math; prints what became of our episodes, as JSON.

verl's own classes: RLHFDataset, AgentLoopManager and AgentLoopWorker (v0) or AgentLoopManagerTQ and
AgentLoopWorkerTQ (v1), LLMServerClient and GlobalRequestLoadBalancer. Ours is only the server that samples.
Usage: verl_rollout.py v0|v1
"""

import json
import logging
import os
import pickle
import sys
import time
import uuid
from pathlib import Path

os.environ["AGENTENV_KEPT"] = str(Path("kept").resolve())
os.environ["VERL_USE_EXTERNAL_MODULES"] = "agentenv.interop.verl.plugin,verl_parts"
os.environ["TRANSFER_QUEUE_ENABLE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from verl_parts import MODEL, TinyServer

from agentenv.core.dataset import read_tasks
from agentenv.episode.registry import builtin_datasets
from agentenv.interop.verl import dataset

GROUP, NUM_TASKS = 4, 2
KEPT = Path("kept").resolve()
LOOPS = """\
- name: ours
  _target_: agentenv.interop.verl.agent_loop.EnvAgentLoop
  env: math_retry
  env_kwargs: {max_attempts: 3}
  limits: {max_turns: 2}
  max_tokens: 64
- name: broken
  _target_: agentenv.interop.verl.agent_loop.EnvAgentLoop
  env: verl_parts:Failing
- name: right
  _target_: agentenv.interop.verl.agent_loop.EnvAgentLoop
  env: rollout_parts:Right
"""
CASES = {
    "math_retry": (None, "word_problems_train"),
    "tool_use": ("agentenv/tool_use", "tool_use"),
    "guess_number": ("agentenv/guess_number", "guess_number"),
    "broken": ("broken", "word_problems_train"),
    "right": ("right", "word_problems_train"),
}
"""Names of agent loops, None for the default one, and data."""


def config_of():
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={MODEL}",
                "actor_rollout_ref.model.use_remove_padding=false",
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.n={GROUP}",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.agent.num_workers=1",
                "actor_rollout_ref.rollout.agent.default_agent_loop=ours",
                "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
                "data.max_prompt_length=1024",
                "data.max_response_length=96",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",  # each takes a CPU of Ray's
            ],
        )


def rows_of(config, file, loop):
    """Rows as verl's dataset and collate function make them of our parquet file."""
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    made = RLHFDataset(file, hf_tokenizer(MODEL), config.data)
    rows = collate_fn([made[i] for i in range(len(made))])
    rows["uid"] = np.array([str(uuid.uuid4()) for _ in rows["raw_prompt"]], dtype=object)
    if loop:
        rows["agent_name"] = np.array([loop] * len(made), dtype=object)
    return rows


def kept():
    """Our trajectories since the last call, by the ids of their episodes."""
    found = {}
    for file in KEPT.iterdir():
        trajectory = pickle.loads(file.read_bytes())
        found[trajectory.episode_id] = trajectory
        file.unlink()
    return found


def compared(trajectory, given):
    """Compare one row's tensors, without padding, with our trajectory; all of them bit by bit."""
    (segment,) = trajectory.segments
    start, end = trajectory.turns[0].start, trajectory.turns[-1].end
    logprobs = torch.tensor(segment.logprobs[start:end].tolist(), dtype=torch.float32)
    logprobs[torch.tensor(list(segment.action_mask[start:end])) == 0] = 0.0
    rewards = torch.zeros(end - start)
    rewards[-1] = trajectory.reward
    equal = {
        "prompts": given["prompts"].tolist() == segment.token_ids[:start].tolist(),
        "responses": given["responses"].tolist() == segment.token_ids[start:end].tolist(),
        "response_mask": given["response_mask"].tolist() == list(segment.action_mask[start:end]),
        "rollout_log_probs": torch.equal(given["rollout_log_probs"], logprobs),
        "rm_scores": torch.equal(given["rm_scores"], rewards),
    }
    return {
        "equal": equal,
        "reward": trajectory.reward,
        "num_turns": len(trajectory.turns),
        "num_response": end - start,
        "finish_reasons": [str(turn.finish_reason) for turn in trajectory.turns],
        "extra": given["extra"],
    }


def facts_of(extra):
    steps = [extra["min_global_steps"], extra["max_global_steps"]]
    return {"turn_scores": list(extra["turn_scores"]), "steps": steps}


def v0(manager, rows):
    from verl import DataProto

    batch = DataProto.from_single_dict(rows, meta_info={"global_steps": 7, "validate": False})
    batch = batch.repeat(GROUP, interleave=True)
    try:
        out = manager.generate_sequences(batch)
    except ray.exceptions.RayTaskError as error:
        return {"error": str(error.cause)}
    found, rows, num_prompt = kept(), [], out.batch["prompts"].shape[1]
    for i in range(len(out)):
        tensors, columns = out.batch[i], {key: values[i] for key, values in out.non_tensor_batch.items()}
        asked, answered = tensors["attention_mask"].bool().split([num_prompt, tensors["responses"].numel()])
        given = {"prompts": tensors["prompts"][asked], "extra": facts_of(columns)}
        for key in ("responses", "response_mask", "rollout_log_probs", "rm_scores"):
            given[key] = tensors[key][answered]
            assert not tensors[key][~answered].any() or key == "responses"
        rows.append(compared(found.pop(columns["episode_id"]), given))
    return {"rows": rows, "left": len(found)}


def v1(manager, rows):
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    batch = tu.get_tensordict(rows)
    tu.assign_non_tensor_data(batch, "global_steps", 7)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 7} for _ in rows["uid"]]
    tq.kv_batch_put(keys=list(rows["uid"]), partition_id="train", tags=tags)
    manager.generate_sequences(batch)
    statuses = waited(tq, list(rows["uid"]))
    tags = {key: tag for key, tag in tq.kv_list()["train"].items() if not tag.get("is_prompt")}
    if not tags:
        return {"statuses": statuses, "rows": []}
    data = tq.kv_batch_get(keys=list(tags), partition_id="train")
    found, made = kept(), []
    for i in range(len(tags)):
        extra = data[i]["extra_fields"]
        extra = getattr(extra, "data", extra)
        given = {"extra": facts_of(extra)}
        for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"):
            given[name] = data[i][name]
        made.append(compared(found.pop(extra["episode_id"]), given))
    given = [data[i] for i in range(len(tags))]
    advantages = advantages_of(given, list(tags))
    for key, row, advantage in zip(tags, made, advantages, strict=True):
        row |= {"uid": key.split("_")[0], "advantage": advantage}
    masked = {"rm_scores": torch.zeros(1), "response_mask": torch.zeros(1, dtype=torch.long)}
    instead = advantages_of([*given, *[masked] * NUM_TASKS], [*tags, *(f"{uid}_{GROUP}_0" for uid in rows["uid"])])
    tq.kv_clear(partition_id="train", keys=[*tags, *rows["uid"]])
    return {"statuses": statuses, "rows": made, "left": len(found), "instead": instead[: len(made)]}


def advantages_of(rows, keys):
    """verl's GRPO advantage of each row, at its first token."""
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    padded = {
        name: torch.nn.utils.rnn.pad_sequence([row[source] for row in rows], batch_first=True)
        for name, source in (("token_level_rewards", "rm_scores"), ("response_mask", "response_mask"))
    }
    uids = np.array([key.split("_")[0] for key in keys], dtype=object)
    batch = DataProto.from_single_dict({**padded, "uid": uids})
    made = compute_advantage_for_multi_trajectories(batch, keys, "grpo")
    made = batch if made is None else made
    return made.batch["advantages"][:, 0].tolist()


def waited(tq, uids):
    """Wait until each prompt is over; return how they ended."""
    while True:
        tags = tq.kv_list()["train"]
        statuses = [tags[uid]["status"] for uid in uids]
        if not {"pending", "running"} & set(statuses):
            return statuses
        time.sleep(0.2)


def manager_of(version, config):
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    server = ray.remote(TinyServer).remote()
    client = LLMServerClient(config, ray.remote(GlobalRequestLoadBalancer).remote({"tiny": server}))
    if version == "v0":
        from verl.experimental.agent_loop import AgentLoopManager

        return AgentLoopManager.create(config, client)
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ

    tq.init(config.transfer_queue)
    return AgentLoopManagerTQ.create(config, client)


def main():
    KEPT.mkdir()
    Path("loops.yaml").write_text(LOOPS)
    version, config = sys.argv[1], config_of()
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    answers = {}
    try:
        manager = manager_of(version, config)
        for name, (loop, data) in CASES.items():
            file = f"{name}.parquet"
            dataset(read_tasks(data, builtin=builtin_datasets(), limit=NUM_TASKS)).to_parquet(file)
            answers[name] = {"v0": v0, "v1": v1}[version](manager, rows_of(config, file, loop))
    finally:
        ray.shutdown()
    print("\n" + json.dumps(answers))


main()
