"""The benchmarks of training: that their flags are flags, and that their workload is what they say."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentenv.cli.flags import parse
from agentenv.core.agent import ResetState
from agentenv.training.config import TrainConfig

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """A script of benchmarks/ as a module; importing it measures nothing."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def config_of(flags: list[str]) -> TrainConfig:
    return parse(TrainConfig, "train", flags)


@pytest.fixture(scope="module")
def train_async() -> ModuleType:
    return load("train_async")


@pytest.fixture(scope="module")
def train_vs_trl() -> ModuleType:
    return load("train_vs_trl")


@pytest.mark.long
def test_the_ways_differ_in_nothing_but_how_far_sampling_runs_ahead(train_async: ModuleType, tmp_path: Path) -> None:
    args = train_async.parse(["--queue", "3", "--in_process"])
    configs = {way: config_of(train_async.flags_of(way, args, tmp_path)).to_dict() for way in train_async.WAYS}
    changed = {
        way: {name: value for name, value in flags.items() if value != configs["sync"][name]}
        for way, flags in configs.items()
    }
    ahead = {"async_train": True, "async_queue_size": 3}
    assert changed == {
        "sync": {},
        "async": ahead,
        "partial": ahead | {"partial_rollout": True},
        "generate": ahead | {"partial_rollout": True},
    }


async def test_an_episode_waits_as_its_seed_says_and_ends_after_its_turns(train_async: ModuleType) -> None:
    def drawn(seed: int) -> ResetState:
        return {"observation": "", "seed": seed}

    one, same, other = train_async.Waits(1000.0), train_async.Waits(1000.0), train_async.Waits(1000.0)
    await one.reset(drawn(5))
    await same.reset(drawn(5))
    await other.reset(drawn(6))
    assert one.waits_s == same.waits_s != other.waits_s
    ends = [(await one.step({"turn_index": turn, "action_text": "12"})).terminated for turn in range(len(one.waits_s))]
    assert ends == [False] * (len(ends) - 1) + [True]


def test_waits_have_the_median_and_the_tail_that_they_are_drawn_for(train_async: ModuleType) -> None:
    rng = random.Random(0)
    found = sorted(train_async.heavy_tailed(rng, 0.2, 1.5) for _ in range(4000))
    assert statistics.median(found) == pytest.approx(0.2, rel=0.1)
    assert found[int(0.95 * len(found))] == pytest.approx(1.5, rel=0.15)


def test_the_lines_of_a_training_are_summed_up(train_async: ModuleType) -> None:
    def line(wall_s: float, train_s: float, oldest: float) -> dict[str, float]:
        times = {"time/wall_s": wall_s, "time/wait_s": 1.0, "time/train_s": train_s, "time/sync_s": 0.5}
        ages = {"rollout/staleness_mean": oldest / 2, "rollout/staleness_max": oldest}
        return times | ages | {"rollout/turns": 3.0, "rollout/num_episodes": 64.0}

    found = train_async.summed([line(4.0, 2.0, 0.0), line(6.0, 3.0, 2.0)])
    assert (found.wall_s, found.wait_s, found.train_s, found.sync_s) == (10.0, 2.0, 5.0, 1.0)
    assert (found.staleness_mean, found.staleness_max, found.num_samples) == (0.5, 2.0, 128.0)
    assert found.idle_share == 0.5


@pytest.mark.parametrize("argv", [["--ways", "partial"], ["--ways", "sync", "async"]])
def test_ways_without_those_they_are_compared_with_are_refused(train_async: ModuleType, argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        train_async.parse(argv)


def test_both_sides_do_the_same_work(train_vs_trl: ModuleType, tmp_path: Path) -> None:
    args = train_vs_trl.parse(["--trl_python", "python", "--prompts", "4", "--samples", "2", "--tokens", "5"])
    way = train_vs_trl.Way("agentenv", 1, 8)
    ours = train_vs_trl.our_command(way, args, tmp_path, tmp_path / "out")
    config = config_of(ours[ours.index("train") + 1 :])
    theirs: dict[str, Any] = json.loads(train_vs_trl.trl_command(way, args, tmp_path, tmp_path / "out")[-1])
    same = {
        "num_prompts": config.rollout_batch_size, "samples": config.n, "micro": 8,
        "tokens": config.max_tokens, "steps": config.max_train_steps, "model": config.model,
        "prompts": config.dataset.data,
    }  # fmt: skip
    assert {name: theirs[name] for name in same} == {name: str(value) for name, value in same.items()}
    assert (config.micro_train_batch_size, config.limits.max_turns, config.ray) == (8, 1, False)


def test_the_model_of_both_sides_has_no_end(train_vs_trl: ModuleType, tmp_path: Path) -> None:
    train_vs_trl.prepare(tmp_path, num_prompts=3)
    ends = {json.loads((tmp_path / "model" / name).read_text())["eos_token_id"] for name in
            ("config.json", "generation_config.json")}  # fmt: skip
    assert ends == {0}
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["prompt"].endswith("<|im_start|>assistant\n") for row in rows)


@pytest.mark.parametrize("argv", [[], ["--trl_python", "python", "--steps", "1"]])
def test_a_comparison_that_cannot_be_made_is_refused(train_vs_trl: ModuleType, argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        train_vs_trl.parse(argv)


@pytest.mark.long
def test_the_benchmark_of_a_gpu_measures_each_part_and_reports_those_that_fail(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--size", "tiny", "--out", "gpu"]
    subprocess.run([*command, "--parts", "card", "learner"], cwd=tmp_path, check=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failed"] == {}
    assert found["figures"]["card"]["bf16 matrix products, TFLOP/s"] > 0
    assert len({name.rpartition(":")[0] for name in found["figures"]["learner"]}) == 5
    assert "of the card" in (tmp_path / "gpu.md").read_text()
    subprocess.run([*command, "--parts", "card", "--budget_s", "0"], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "gpu.json").read_text())["failed"] == {"card": "it took more than 1 s"}
