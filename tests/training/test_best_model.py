"""The best model is kept whole, whatever ends the training, and a training that no longer improves ends."""

import json

import pytest

from agentenv.errors import ConfigError, RunStopped
from agentenv.training.best_model import BestModel, EarlyStop
from agentenv.training.logs.journal import read_metrics
from tests.drivers import command, write_rows
from tests.training.trainings import flags, make_place, rows, without_times


def evaluated(best, *scores, first=0, key="eval/score"):
    """Add evaluations of steps from `first` on; each model's weights are the number of its step."""
    for step, score in enumerate(scores, start=first):
        take(best, step, {key: score})
    return best


def take(best, step, numbers):
    if best.add(step, numbers):
        best.save(step, lambda folder: (folder / "weights").write_text(str(step)))


def kept(folder):
    """The step of the model in model-best, by its weights and by its evaluation; None if there is none."""
    if not (folder / "model-best").exists():
        return None
    step = int((folder / "model-best/weights").read_text())
    assert json.loads((folder / "model-best/evaluation.json").read_bytes())["step"] == step
    return step


def test_the_model_of_the_best_evaluation_is_kept_and_nothing_beside_it(tmp_path):
    best = evaluated(BestModel(tmp_path), 0.2, 0.1, 0.5, 0.4, 0.5)
    assert kept(tmp_path) == 2, "of equal ones the first"
    assert best.evaluation == {"step": 2, "metric": "eval/score", "value": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["model-best"]


def test_an_initial_model_that_stays_the_best_is_not_copied(tmp_path):
    assert evaluated(BestModel(tmp_path), 0.5, 0.1, 0.5).evaluation == {}
    assert kept(tmp_path) is None


def test_the_metric_is_the_score_else_the_reward_else_that_of_early_stop(tmp_path):
    numbers = [{"eval/score": score, "eval/reward": -score, "eval/pass@1": 0.5 - score} for score in (0.0, 0.25, 0.5)]
    reward = [{"eval/reward": each["eval/reward"]} for each in numbers]
    for name, given, early_stop, expected in (
        ("score", numbers, None, 2), ("reward", reward, None, None),
        ("pass", numbers, EarlyStop.parse("pass@1:3"), None), ("reward of both", numbers, EarlyStop("reward", 9), None),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        best = BestModel(tmp_path / name, early_stop=early_stop)
        for step, each in enumerate(given):
            take(best, step, each)
        assert kept(tmp_path / name) == expected, name


def test_a_resumed_training_compares_with_the_lines_and_with_the_model_that_is_kept(tmp_path):
    lines = [{"step": 0, "eval/score": 0.2}, {"step": 1, "eval/score": 0.5}, {"step": 2}]
    evaluated(BestModel(tmp_path), 0.2, 0.5, 0.1, 0.7)
    again = BestModel(tmp_path, lines)  # killed after step 3, before a checkpoint of it
    evaluated(again, 0.6, first=3)
    assert kept(tmp_path) == 3
    assert again.evaluation["value"] == 0.7
    evaluated(again, 0.8, first=4)
    assert kept(tmp_path) == 4


def test_a_kill_while_the_model_is_replaced_leaves_the_old_one_whole(tmp_path):
    evaluated(BestModel(tmp_path), 0.2, 0.5)
    (tmp_path / "model-best").rename(tmp_path / ".model-best.previous")  # between the two renames
    (tmp_path / ".model-best.tmp").mkdir()
    best = BestModel(tmp_path)
    assert kept(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model-best"]
    evaluated(best, 0.6, first=2)
    assert kept(tmp_path) == 2


def test_a_full_disk_keeps_the_old_model_and_says_so(tmp_path):
    def full(folder):
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    best = evaluated(BestModel(tmp_path), 0.2, 0.5)
    assert best.add(2, {"eval/score": 0.9})
    with pytest.raises(RunStopped, match=r"model-best: expected to write the best model, got .*No space left"):
        best.save(2, full)
    assert kept(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model-best"]


# --- early stop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "stops"),
    [
        ((0.2, 0.1), False),
        ((0.2, 0.1, 0.1), True),
        ((0.2, 0.1, 0.3, 0.3), False),
        ((0.2, 0.1, 0.3, 0.3, 0.1), True),
        ((0.1, 0.2, 0.3, 0.4), False),
    ],
)
def test_it_stops_after_so_many_evaluations_that_are_not_better_than_the_best(tmp_path, scores, stops):
    early_stop = EarlyStop.parse("eval/score:2")
    assert bool(evaluated(BestModel(tmp_path, early_stop=early_stop), *scores).end_reason) == stops
    assert not evaluated(BestModel(tmp_path), *scores).end_reason
    lines = [{"step": step, "eval/score": score} for step, score in enumerate(scores)]
    assert bool(BestModel(tmp_path, lines, early_stop).end_reason) == stops, "a resumed training knows"


@pytest.mark.parametrize(
    ("metric", "advice"),
    [
        ("loss", "There are pass@1, score."),
        ("socre", "Did you mean 'score'?"),
        ("acuracy", "Did you mean 'info/accuracy'?"),
    ],
)
def test_a_metric_that_evaluations_do_not_have_is_an_error_that_names_theirs(tmp_path, metric, advice):
    best = BestModel(tmp_path, early_stop=EarlyStop.parse(f"{metric}:2"))
    with pytest.raises(ConfigError) as raised:
        best.add(0, {f"eval/{name}": 0.5 for name in ("score", "pass@1", "info/accuracy", "set/held/score")})
    assert str(raised.value) == f"--early_stop: expected a number of the evaluation, got {metric!r}. {advice}"


def test_an_early_stop_has_a_metric_and_a_patience():
    for form in ("score", "score:", ":3", "score:0", "score:1.5", ""):
        with pytest.raises(ConfigError, match="--early_stop: expected METRIC:PATIENCE"):
            EarlyStop.parse(form)


@pytest.mark.parametrize("metric", ["score", "reward_ci95_low", "pass@1", "info/first", "set/held/info/first", "turns"])
def test_an_evaluation_without_the_metric_is_no_improvement_and_before_its_first_value_the_training_goes_on(
    tmp_path, metric
):
    notes = []
    best = BestModel(tmp_path, early_stop=EarlyStop(metric, 2), note=notes.append)
    for step in range(4):
        assert not best.add(step, {"eval/num_failed": 0.0})
    (told,) = notes
    assert f"warning: --early_stop: expected a number of the evaluation, got {metric!r}. There are num_failed." in told
    assert best.end_reason == ""
    evaluated(best, 0.4, first=4, key=f"eval/{metric}")
    assert not best.add(5, {"eval/num_failed": 0.0})
    assert best.end_reason == ""
    assert not best.add(6, {"eval/num_failed": 0.0})
    assert "best at step 4, with 0.400, and 2 evaluations since are not better" in best.end_reason
    assert kept(tmp_path) == 4
    lines = [{"step": 0, "eval/num_failed": 0.0}, {"step": 1, f"eval/{metric}": 0.4}]
    for num in (1, 2):
        again = BestModel(tmp_path, lines[:num], EarlyStop(metric, 2), notes.append)
        assert notes == [told], "an earlier session has told it"
    assert not again.add(2, {"eval/num_failed": 0.0})
    assert notes == [told], "there are values"


# --- in a training ----------------------------------------------------------------------------------------------------

SAME = """
from agentenv import AgentInstance, StepResult


class Same(AgentInstance):
    async def step(self, states):
        if states["label"] == "held":
            return StepResult(reward=0.5, terminated=True)
        text = states["action_text"]
        return StepResult(reward=sum(each.islower() for each in text) / max(1, len(text)), terminated=True)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    make_place(tmp_path, monkeypatch)
    write_rows(tmp_path / "held.jsonl", [{"prompt": "Say.", "label": "held"}])
    (tmp_path / "same.py").write_text(SAME)
    return tmp_path


@pytest.mark.long
def test_a_training_that_does_not_improve_ends_with_code_0_says_so_and_stays_ended_when_resumed(place, capfd):
    evaluation = ["--eval_dataset", "held.jsonl", "--eval_steps", 1]
    argv = flags(*evaluation, "--early_stop", "reward:2", "--max_train_steps", 9, env="same.py:Same")
    assert command(argv) == 0
    told = "stopped early after step 2 of 9: eval/reward was best at step 0, with 0.500, and 2 evaluations since are"
    assert told in capfd.readouterr().err
    assert (place / "out/model").is_dir()
    assert not (place / "out/model-best").exists(), "the initial model is as good"
    before = without_times(place / "out")
    assert [line["step"] for line in before] == [0, 1, 2]
    assert command(["train", "--resume", "--out", "out"]) == 0
    assert told in capfd.readouterr().err
    assert without_times(place / "out") == before
    assert command(["train", "--resume", "--out", "out", "--early_stop", "reward:4"]) == 0
    assert [line["step"] for line in read_metrics(place / "out")] == [0, 1, 2, 3, 4]
    capfd.readouterr()
    assert command(["train", "--resume", "--out", "out", "--max_train_steps", 4]) == 0
    assert "stopped early" not in capfd.readouterr().err, "step 4 of 4 is its planned end"


@pytest.mark.long
def test_the_best_model_of_a_training_loads_and_is_that_of_its_step(place, capfd):
    from safetensors.torch import load_file

    rows(place, ["ok"] * 8)
    argv = flags("--eval_dataset", "tasks.jsonl", "--eval_steps", 1, "--save_steps", 1, "--max_ckpt_num", 9)
    assert command(argv) == 0
    said = capfd.readouterr().err
    scores = {line["step"]: line["eval/score"] for line in read_metrics(place / "out")}
    best = json.loads((place / "out/model-best/evaluation.json").read_bytes())
    assert best["value"] == max(scores.values()) == scores[best["step"]]
    assert f"out/model-best: eval/score {best['value']:.3f} after step {best['step']}" in " ".join(said.split())
    import torch

    state = torch.load(place / f"out/checkpoints/step-{best['step']:08d}/state.pt", weights_only=True)
    weights = load_file(place / "out/model-best/model.safetensors")
    assert torch.equal(weights["lm_head.weight"], state["learner"]["policy"]["lm_head.weight"])
    run = ["run", "--env", "env.py:Letters", "--data", "tasks.jsonl", "--model", "out/model-best", "--engine", "hf"]
    assert command([*run, "--max_tokens", 2, "--limit", 1, "--out", "run"]) == 0
