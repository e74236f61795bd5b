"""A flag moves its number: each test fails if the line that passes the flag on is deleted."""

import time
from operator import attrgetter
from types import SimpleNamespace

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.types import SamplingParams
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.setup import EpisodeSetup
from agentenv.errors import ConfigError
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.training.best_model import EarlyStop
from agentenv.training.config import TrainConfig
from agentenv.training.logs.records import open_records
from agentenv.training.task_order import spread
from agentenv.training.train import make_evaluation, prepare_training, with_engine

MIX = ("math_retry:2", "guess_number")
TASKS = {
    "max_train_steps": ({}, 5, attrgetter("num_steps"), 5),
    "num_episodes": ({"limit": 32}, 3, attrgetter("num_steps"), 6),
    "limit": ({}, 48, attrgetter("num_steps"), 3),
    "seed": ({}, 7, attrgetter("order.seed"), 7),
    "env": ({}, MIX, attrgetter("order.weights"), {"math_retry": 2.0, "guess_number": 1.0}),
    "curriculum": ({"env": MIX}, "spread", lambda job: getattr(job.order._curriculum, "curriculum", None), spread),
}
"""Of each flag: the flags beside it, its value, what it moves, and the value of that."""


async def job_of(**flags):
    known = {"env": "math_retry", "engine": "hf", "ray": False, "out": "out"}
    return await prepare_training(TrainConfig.from_flags(**known | flags))


@pytest.mark.parametrize("flag", TASKS)
async def test_a_flag_moves_the_order_of_the_tasks_or_the_number_of_steps(flag):
    beside, value, moved, expected = TASKS[flag]
    before, after = [moved(await job_of(**beside, **more)) for more in ({}, {flag: value})]
    assert before != expected
    assert after == expected


async def test_a_curriculum_is_tried_before_a_new_training_only(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(environments):\n    return {name: 1 / stats.num_groups for name, stats in environments.items()}\n"
    )
    flags = {"env": MIX, "curriculum": f"{tmp_path}/mine.py:mine"}
    with pytest.raises(ConfigError, match=r"mine\.py:2: expected weights .* ZeroDivisionError"):
        await job_of(**flags)
    await job_of(**flags, resume=True)


async def test_flags_of_evaluations_reach_their_runner():
    flags = {"eval_dataset": "word_problems", "eval_temperature": 0.25, "eval_n_samples_per_prompt": 3, "seed": 7}
    job = await job_of(**flags, top_p=0.9, max_tokens=9, concurrency=5, max_retries=4, save_samples=6)
    setup = EpisodeSetup(ScriptedEngine(["a"]), Chat(CharTokenizer()))
    evaluation = make_evaluation(job, SimpleNamespace(source=None, setup=setup))
    sampling = SamplingParams(temperature=0.25, top_p=0.9, max_tokens=9, seed=8)
    assert (evaluation.num_samples, evaluation.runner.setup.sampling) == (3, sampling)
    assert (evaluation.runner.concurrency, evaluation.runner.policy.max_retries) == (5, 4)
    assert list(evaluation.sets) == ["word_problems"]
    assert len(evaluation.kept_tasks) == 2


async def test_trainings_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    names = ["train-math_retry-tiny-math-now", "train-math_retry-tiny-math-now-2"]
    assert [(await job_of(out=None)).out.name for _ in names] == names
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names


def test_flags_of_files_reach_the_journal_the_checkpoints_and_the_best_model(tmp_path):
    config = TrainConfig.from_flags(
        env="math_retry", logging_steps=3, max_ckpt_num=2, ckpt_path=str(tmp_path / "c"), early_stop="score:2"
    )
    with open_records(config, tmp_path / "out", {}, lambda text: None) as records:
        assert records.journal._logging_steps == 3
        assert (records.checkpoints.keep, records.checkpoints.folder) == (2, tmp_path / "c")
        assert records.best._early_stop == EarlyStop("score", 2)


EPISODES = {
    "data": "d.jsonl", "split": "s", "prompt_key": "q", "label_key": "l", "limit": 3, "n": 5, "model": "m",
    "num_engines": 2, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_turns": 3, "max_length": 99,
    "max_retries": 5, "max_error_share": 0.25, "tool_role": "user", "env_actors": 2, "concurrency": 3,
    "group_reward": "f.py:g", "reference_key": "r", "step_timeout_s": 9.0, "env_kwargs": {"a": 1},
}  # fmt: skip


def test_flags_about_episodes_are_those_of_the_run_that_samples_them():
    given, default = (TrainConfig.from_flags(env="e", **flags).episodes.flags() for flags in (EPISODES, {}))
    for name, value in EPISODES.items():
        assert given[name] == value != default[name], name


def test_flags_of_vllm_are_its_arguments(monkeypatch):
    monkeypatch.setattr("agentenv.training.train.importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("agentenv.training.train._num_gpus", lambda: 1)
    flags = {
        "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.3, "enable_prefix_caching": False,
        "enforce_eager": True, "vllm_enable_sleep": True,
    }  # fmt: skip
    config = with_engine(TrainConfig.from_flags(env="e", engine="vllm", param_dtype="fp16", **flags))
    assert list(config.engine_args.values()) == list(flags.values())
    assert config.dtype == "float16"
