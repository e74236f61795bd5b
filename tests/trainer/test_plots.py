"""The pictures of a training: what was measured is drawn as it was measured, and nothing else."""

import math
import resource
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import MissingDependency, RunStopped
from agentenv.trainer import plots
from agentenv.trainer.journal import Journal

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"
EVERYTHING = {
    "rollout/reward": 0.5, "rollout/score": 0.25, "rollout/staleness_mean": 0.75, "rollout/staleness_max": 2.0,
    "rollout/rejection_rate": 0.4, "train/kl": 0.01, "train/approx_kl": 0.001, "train/logprob_diff": 0.002,
    "train/entropy": 1.5, "time/wall_s": 8.0, "time/wait_s": 3.0, "time/train_s": 2.0, "time/sync_s": 0.5,
    "time/eval_s": 1.0, "time/save_s": 0.25, "throughput/samples_per_s": 8.0, "throughput/tokens_per_s": 900.0,
    "eval/score": 0.5, "eval/pass@1": 0.25, "eval/reward": 0.6, "time/generate_share": 0.5, "time/step_share": 0.25,
}  # fmt: skip


def training(folder, *rows, first=1):
    journal = Journal(folder)
    for step, row in enumerate(rows, start=first):
        journal.log(step, row)
    journal.close()
    return folder


def panel(name, *rows):
    """The axes of one panel, with rows of steps from 1 on."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plots.PANELS[name][1](axes, [{"step": step, **row} for step, row in enumerate(rows, start=1)])
    return axes


def curves(axes):
    """The points of each curve by its label, on both axes."""
    lines = [line for part in axes.figure.axes for line in part.get_lines() if len(line.get_xdata())]
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in lines}


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []


def test_every_part_is_a_picture_and_one_shows_all(tmp_path):
    paths = plots.draw(training(tmp_path, *[EVERYTHING] * 3))
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "training.png", *(f"plots/{name}.png" for name in plots.PANELS),
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    width, height = (int.from_bytes(paths[0].read_bytes()[at : at + 4]) for at in (16, 20))
    assert (width, height) == (4 * 624, 2 * 420), "eight panels, four in a row"
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [*paths, tmp_path / "metrics.jsonl"]
    )


def test_only_what_was_measured_is_drawn(tmp_path):
    paths = plots.draw(training(tmp_path, {"rollout/reward": 1.0, "train/entropy": math.nan}, {"eval/score": 0.5}))
    assert [path.stem for path in paths] == ["training", "reward", "score"]


def test_without_numbers_there_is_no_picture(tmp_path):
    assert plots.draw(tmp_path) == []
    assert plots.draw(training(tmp_path, {"train/policy_loss": 1.0}, {"rollout/reward": math.nan})) == []
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("num_steps", [1, 2, 31])
def test_trainings_of_any_length_are_drawn(tmp_path, num_steps):
    rows = [EVERYTHING if step % 3 else dict.fromkeys(EVERYTHING, math.nan) for step in range(1, num_steps + 1)]
    assert len(plots.draw(training(tmp_path, *rows))) == 9


def test_pictures_are_drawn_anew_as_a_training_goes_on(tmp_path):
    first = plots.draw(training(tmp_path, EVERYTHING))[0].read_bytes()
    journal = Journal(tmp_path, resume_step=1)
    journal.log(2, {key: 2 * value for key, value in EVERYTHING.items()})
    journal.close()
    assert plots.draw(tmp_path)[0].read_bytes() != first


def test_a_full_disk_leaves_the_old_picture_and_says_so(tmp_path):
    (path, *_) = plots.draw(training(tmp_path, EVERYTHING))
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunStopped, match=r"training.png: expected a picture written"):
            plots.draw(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_matplotlib_the_answer_is_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is absent
    with pytest.raises(MissingDependency, match="pip install matplotlib"):
        plots.draw(training(tmp_path, EVERYTHING))


@pytest.mark.parametrize("name", plots.PANELS)
def test_axes_say_what_they_show_and_in_what_unit(name):
    axes = panel(name, EVERYTHING, EVERYTHING)
    assert axes.get_xlabel() == "train step"
    assert all(part.get_ylabel() for part in axes.figure.axes)
    assert axes.get_title(loc="left") or axes.get_title()


def test_curves_are_the_numbers_by_their_steps():
    axes = panel("score", {"eval/score": 0.1}, {"rollout/score": 0.2}, {"rollout/score": 0.3, "eval/score": 0.4})
    assert curves(axes) == {"training": [(2, 0.2), (3, 0.3)], "held-out": [(1, 0.1), (3, 0.4)]}
    assert legend(axes) == ["training", "held-out"]


def test_a_gap_in_a_long_curve_stays_a_gap():
    rows = [{"rollout/reward": math.nan if step == 7 else 1.0} for step in range(60)]
    (points,) = [points for label, points in curves(panel("reward", *rows)).items() if label == "training"]
    assert [step for step, value in points if math.isnan(value)] == [8]


def test_pass_at_1_is_a_curve_of_its_own_where_it_differs_from_the_score():
    same, other = {"eval/score": 0.5, "eval/pass@1": 0.5}, {"eval/score": 0.5, "eval/pass@1": 0.25}
    assert legend(panel("score", same, same)) == ["held-out"]
    assert legend(panel("score", same, other)) == ["held-out", "held-out pass@1"]


def test_the_seconds_of_a_step_stand_on_each_other_up_to_its_wall_time():
    axes = panel("time", EVERYTHING, {**EVERYTHING, "time/wall_s": 20.0})
    assert legend(axes) == ["wait", "train", "sync", "eval", "save", "other"]
    tops = {part.get_label(): part.get_paths()[0].vertices for part in axes.collections}
    assert tops["wait"][:, 1].max() == 3.0
    assert tops["train"][:, 1].max() == 5.0
    assert tops["other"][:, 1].max() == 20.0
    assert tops["other"][tops["other"][:, 0] < 1.5][:, 1].max() == 8.0
    assert (tops["wait"][:, 0].min(), tops["wait"][:, 0].max()) == (0.5, 2.5)


def test_the_seconds_of_the_episodes_are_split_into_generating_stepping_and_the_rest():
    axes = panel("episodes", EVERYTHING, {"time/wall_s": 1.0}, {**EVERYTHING, "time/step_share": 0.5})
    assert legend(axes) == ["generate", "step", "wait"]
    tops = {part.get_label(): part.get_paths()[0].vertices for part in axes.collections}
    first, last = ([top[top[:, 0] == at][:, 1].max() for top in tops.values()] for at in (0.5, 3.5))
    assert (first, last) == ([0.5, 0.75, 1.0], [0.5, 1.0, 1.0])
    assert 0.0 in tops["wait"][tops["wait"][:, 0] == 1.5][:, 1], "nothing is drawn of a step without numbers"
    assert "%" in axes.get_ylabel()
    assert axes.get_ylim()[1] >= 1.0


def test_time_that_no_part_took_is_not_in_the_legend():
    assert legend(panel("time", {"time/wait_s": 1.0, "time/eval_s": 0.0})) == ["wait"]


def test_kl_is_logarithmic_only_where_every_value_is_positive():
    assert panel("kl", EVERYTHING, {"train/kl": 0.5}).get_yscale() == "log"
    assert panel("kl", EVERYTHING, {"train/kl": -0.5}).get_yscale() == "linear"
    assert panel("kl", {"train/kl": 0.0}).get_yscale() == "linear"


def test_rejected_prompts_have_an_axis_in_percent_of_their_own():
    axes = panel("staleness", EVERYTHING, EVERYTHING)
    assert curves(axes) == {
        "mean": [(1, 0.75), (2, 0.75)], "max": [(1, 2.0), (2, 2.0)], "rejected": [(1, 0.4), (2, 0.4)],
    }  # fmt: skip
    right = axes.figure.axes[1]
    ticks = {
        tick.get_text(): position for tick, position in zip(right.get_yticklabels(), right.get_yticks(), strict=True)
    }
    assert ticks["50"] == 0.5
    assert "%" in right.get_ylabel()
    assert len(panel("staleness", {"rollout/staleness_mean": 1.0}).figure.axes) == 1


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=80))
def test_a_running_mean_stays_within_the_values_and_leaves_gaps(values):
    means = plots._smooth(values)
    finite = [value for value in values if math.isfinite(value)]
    assert [math.isnan(mean) for mean in means] == [math.isnan(value) for value in values]
    assert all(min(finite) - 1e-6 <= mean <= max(finite) + 1e-6 for mean in means if math.isfinite(mean))


def test_a_running_mean_of_a_straight_line_is_that_line_in_the_middle():
    assert plots._smooth([float(number) for number in range(100)])[10:90] == list(map(float, range(10, 90)))
