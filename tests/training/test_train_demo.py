"""The demos of `make train-demo`: their flags are flags, what they hold out is held out, and their figures add up."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from agentenv.cli.flags import parse
from agentenv.episode.registry import builtin_datasets, env_source
from agentenv.training.config import TrainConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("train_demo")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        sys.modules.pop("common", None)


def config_of(demo, kind, name, out):
    subcommand, *flags = demo.command(kind, name, 7, out)
    assert subcommand == "train"
    return parse(TrainConfig, "train", flags)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name"), [("math", "vllm"), ("math", "hf"), ("guess", "turns"), ("guess", "episode"), ("guess", "single")]
)
def test_the_flags_of_every_demo_parse_and_its_environment_takes_its_arguments(demo, kind, name, tmp_path):
    config = config_of(demo, kind, name, tmp_path)
    assert config.seed == 7
    assert {config.dataset.data, *config.eval_dataset} <= builtin_datasets().keys()
    assert config.eval_temperature == 1.0
    assert config.eval_n_samples_per_prompt >= 4
    source = env_source(config.source, dict(config.env_kwargs))
    assert source.cls(**source.kwargs)


@pytest.mark.long
def test_the_maths_demo_is_measured_on_other_tasks_than_it_trains_on(demo, tmp_path):
    config = config_of(demo, "math", "hf", tmp_path)
    assert (config.dataset.data, config.eval_dataset) == ("word_problems_train", ("word_problems",))


@pytest.mark.long
def test_the_variants_of_the_guessing_demo_differ_in_what_their_names_say(demo, tmp_path):
    turns, episode, single = (config_of(demo, "guess", name, tmp_path) for name in ("turns", "episode", "single"))
    assert (turns.credit, turns.limits.max_turns) == ("turn", 4)
    assert (episode.credit, episode.limits.max_turns) == ("episode", 4)
    assert (single.credit, single.limits.max_turns) == ("turn", 1)


def test_make_train_demo_runs_the_demo_with_flags_that_it_has(demo, monkeypatch):
    makefile = (ROOT / "Makefile").read_text()
    flags = re.search(r"^train-demo:.*\n\t.*train_demo\.py (.*)$", makefile, re.MULTILINE)[1]
    for engine in ("vllm", "hf"):
        monkeypatch.setattr(sys, "argv", ["train_demo.py", *flags.replace("$(ENGINE)", engine).split()])
        args = demo.arguments()
        assert (args.demo, args.engines, args.at_least) == ("math", [engine], 20.0)


def test_a_curve_is_made_of_the_evaluations_and_of_all_the_time_between_them(demo):
    rows = [
        {"step": 0, "time/wall_s": 60.0, "eval/score": 0.4},
        {"step": 1, "time/wall_s": 30.0},
        {"step": 2, "time/wall_s": 30.0, "eval/score": 0.5},
        {"step": 4, "time/wall_s": 60.0, "eval/score": 0.7},
    ]
    curve = demo.curve_of(rows, "eval/score", demo.Curve("hf", 0, (), (), (), 200.0))
    assert (curve.steps, curve.values, curve.minutes) == ((0, 2, 4), (0.4, 0.5, 0.7), (1.0, 2.0, 3.0))
    assert curve.gained == pytest.approx(30.0)
    assert (curve.minutes_to(10), curve.minutes_to(20), curve.minutes_to(31)) == (2.0, 3.0, None)


def test_the_table_has_a_mean_of_each_variant(demo):
    one = demo.Curve("hf", 0, (0, 5), (0.40, 0.70), (0.0, 3.0), 240.0)
    two = demo.Curve("hf", 1, (0, 5), (0.50, 0.60), (0.0, 3.0), 120.0)
    rows = demo.table([one, two]).splitlines()[2:]
    assert rows == [
        "| hf | 0 | 40.0% | 70.0% | +30.0 | 3.0 | 4.0 |",
        "| hf | 1 | 50.0% | 60.0% | +10.0 | never | 2.0 |",
        "| hf | mean | 45.0% | 65.0% | +20.0 | | 3.0 |",
    ]
