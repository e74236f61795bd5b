"""What reward models under NeMo RL are to do, one test for each thing that no other file tests.

Its own environment: a Bradley-Terry classifier on dedicated or shared devices, with precision, batch size and a
checkpoint, mixed with other environments by `task_name`. And remote models (tensor parallelism is their server's),
functions and judges.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import torch

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError
from agentenv.interop.nemo_rl import AgentEnvironment, RewardModelEnvironment, RewardModelOptions
from agentenv.rewards.judges.pointwise import PointwiseReward
from agentenv.rewards.models.factory import open_scorer
from tests.interop.test_nemo_rl_rm import log
from tests.rewards.evaluation.scorers import Scripted
from tests.rewards.judges.rule_judges import RuleJudge
from tests.rewards.models.tiny import tiny_rm

SOON_S = 60.0


@asynccontextmanager
async def environment(config=None, **kwargs):
    """An environment whose steps run in threads, as those of Ray's actor do."""
    made = RewardModelEnvironment(config or {}, **kwargs)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.shutdown)


async def rewards(made, *answers):
    logs = [log(answer) for answer in answers]
    return (await asyncio.to_thread(made.step, logs, [{}] * len(logs))).rewards


# --- NeMo RL's own ----------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_checkpoint_path__its_weights_are_those_that_score():
    async with environment({"model_name": "nowhere/at-all", "checkpoint_path": str(tiny_rm())}) as made:
        found = await rewards(made, "42")
    async with environment({"model_name": str(tiny_rm())}) as made:
        assert torch.allclose(await rewards(made, "42"), found, atol=1e-4)


KNOBS = {"precision": "bfloat16", "batch_size": 4, "max_model_len": 256}


@pytest.mark.parametrize("backend", ["hf", "ray"])
def test_knobs__nemos_precision_batch_size_and_length_reach_every_local_backend(backend):
    args = RewardModelOptions(model_name="x", **KNOBS).scorer_args
    assert args == {"dtype": "bfloat16", "max_batch": 4, "max_length": 256}
    open_scorer(f"{backend}:{tiny_rm()}", **args)
    with pytest.raises(ConfigError, match=r"max_batch"):
        open_scorer(f"{backend}:{tiny_rm()}", **args | {"max_batch": 0})
    with pytest.raises(ConfigError, match=r"dtype"):
        open_scorer(f"{backend}:{tiny_rm()}", **args | {"dtype": "int3"})


class Meeting(AgentInstance):
    """A step that ends when the reward model beside it has been asked."""

    both: threading.Barrier

    async def step(self, states):
        await asyncio.to_thread(self.both.wait, SOON_S)
        return StepResult("", reward=float(states["label"]), terminated=True)


def calculated(rows, task_to_env):
    """As NeMo RL's rollouts do: one step for each task's rows, all at once, and the results put back in order."""
    places = {name: [i for i, row in enumerate(rows) if row[0] == name] for name, *_ in rows}
    with ThreadPoolExecutor(len(places)) as actors:
        steps = {
            name: actors.submit(task_to_env[name].step, [rows[i][1] for i in mine], [rows[i][2] for i in mine])
            for name, mine in places.items()
        }
        found = {name: step.result(SOON_S) for name, step in steps.items()}
    of_rows = {i: (found[name], k) for name, mine in places.items() for k, i in enumerate(mine)}
    return torch.stack([of_rows[i][0].rewards[of_rows[i][1]] for i in range(len(rows))])


def test_mixing__rows_of_several_environments_are_grouped_by_task_name_stepped_at_once_and_keep_their_order():
    Meeting.both = threading.Barrier(2)
    asked = []

    def value(text):
        asked.append(text)
        if len(asked) == 1:
            Meeting.both.wait(SOON_S)
        return len(text)

    envs = {"agentenv": AgentEnvironment({"env": Meeting}), "rm": RewardModelEnvironment({}, reward=Scripted(value))}
    rows = [("rm", log("aaa"), {}), ("agentenv", log("x"), {"label": 7}), ("rm", log("a"), {}), ("rm", log("aa"), {})]
    try:
        together = calculated(rows, envs)
    finally:
        for each in envs.values():
            each.shutdown()
    assert (together.tolist(), together.dtype) == ([3.0, 7.0, 1.0, 2.0], torch.float32)
    assert asked == ["aaa", "a", "aa"]


# --- and beyond it ----------------------------------------------------------------------------------------------------


async def test_judge__a_language_model_scores_nemos_rows():
    judge = RuleJudge(lambda shown: "Score: 9/10" if "forty-two" in shown else "Score: 2/10")
    async with environment(reward=PointwiseReward(judge, scale=(0, 10))) as made:
        assert (await rewards(made, "forty-two", "forty")).tolist() == pytest.approx([0.9, 0.2])
