"""The benchmarks of training: that their flags are flags, and that their workload is what they say."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.cli.flags import parse
from agentenv.episode.registry import builtin_datasets, env_source
from agentenv.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def found():
    """Scripts of benchmarks/ are modules; importing them measures nothing."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    sys.modules.pop("common", None)


def config_of(flags):
    return parse(TrainConfig, "train", flags)


@pytest.mark.long
def test_the_ways_differ_in_nothing_but_how_far_sampling_runs_ahead(tmp_path):
    train_async = importlib.import_module("train_async")
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


def test_both_sides_do_the_same_work(tmp_path):
    train_vs_trl = importlib.import_module("train_vs_trl")
    args = train_vs_trl.parse(["--trl_python", "python", "--prompts", "4", "--samples", "2", "--tokens", "5"])
    way = train_vs_trl.Way("agentenv", 1, 8)
    ours = train_vs_trl.our_command(way, args, tmp_path, tmp_path / "out")
    config = config_of(ours[ours.index("train") + 1 :])
    theirs = json.loads(train_vs_trl.trl_command(way, args, tmp_path, tmp_path / "out")[-1])
    same = {
        "num_prompts": config.rollout_batch_size, "samples": config.n, "micro": 8,
        "tokens": config.max_tokens, "steps": config.max_train_steps, "model": config.model,
        "prompts": config.dataset.data,
    }  # fmt: skip
    assert {name: theirs[name] for name in same} == {name: str(value) for name, value in same.items()}
    assert (config.micro_train_batch_size, config.limits.max_turns, config.ray) == (8, 1, False)


@pytest.mark.long
def test_the_benchmark_of_a_gpu_measures_each_part_and_reports_those_that_fail(tmp_path):
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--size", "tiny", "--out", "gpu"]
    subprocess.run([*command, "--parts", "card", "learner"], cwd=tmp_path, check=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failed"] == {}
    assert found["figures"]["card"]["bf16 matrix products, TFLOP/s"] > 0
    assert len({name.rpartition(":")[0] for name in found["figures"]["learner"]}) == 5
    assert "of the card" in (tmp_path / "gpu.md").read_text()
    subprocess.run([*command, "--parts", "card", "--budget_s", "0"], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "gpu.json").read_text())["failed"] == {"card": "it took more than 1 s"}


# --- `make train-demo` -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name"), [("math", "vllm"), ("math", "hf"), ("guess", "turns"), ("guess", "episode"), ("guess", "single")]
)
def test_the_flags_of_every_demo_parse_and_it_is_measured_on_tasks_that_ship(kind, name, tmp_path):
    subcommand, *flags = importlib.import_module("train_demo").command(kind, name, 7, tmp_path)
    assert subcommand == "train"
    config = config_of(flags)
    assert (config.seed, config.eval_temperature) == (7, 1.0)
    assert {config.dataset.data, *config.eval_dataset} <= builtin_datasets().keys()
    assert config.dataset.data not in config.eval_dataset or kind == "guess"
    assert config.eval_n_samples_per_prompt >= 4
    source = env_source(config.source, dict(config.env_kwargs))
    assert source.cls(**source.kwargs)


def test_make_train_demo_runs_the_demo_with_flags_that_it_has(monkeypatch):
    flags = re.search(r"^train-demo:.*\n\t.*train_demo\.py (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    for engine in ("vllm", "hf"):
        monkeypatch.setattr(sys, "argv", ["train_demo.py", *flags.replace("$(ENGINE)", engine).split()])
        args = importlib.import_module("train_demo").arguments()
        assert (args.demo, args.engines, args.at_least) == ("math", [engine], 20.0)
