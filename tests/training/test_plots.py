"""The plot of a training shows what was measured, as it was measured, and nothing else."""

import math
import resource
import sys

import pytest

from agentenv.errors import MissingDependency, RunStopped
from agentenv.training.logs import plots
from agentenv.training.logs.journal import Journal

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"
EVERYTHING = {
    "rollout/reward": 0.5, "rollout/score": 0.25, "rollout/staleness_mean": 0.75, "rollout/staleness_max": 2.0,
    "rollout/rejection_rate": 0.4, "train/kl": 0.01, "train/approx_kl": 0.001, "train/logprob_diff": 0.002,
    "train/entropy": 1.5, "time/wall_s": 8.0, "time/wait_s": 3.0, "time/train_s": 2.0, "time/sync_s": 0.5,
    "time/eval_s": 1.0, "time/save_s": 0.25, "throughput/samples_per_s": 8.0, "throughput/tokens_per_s": 900.0,
    "rollout/pass@1": 0.25, "rollout/pass@8": 0.75, "rollout/action_tokens": 90.0, "rollout/turns": 2.5,
    "train/grad_norm": 0.4, "eval/score": 0.5, "eval/pass@1": 0.25, "eval/reward": 0.6,
    "time/generate_share": 0.5, "time/step_share": 0.25,
}  # fmt: skip


def training(folder, *rows, first=1):
    journal = Journal(folder)
    for step, row in enumerate(rows, start=first):
        journal.log(step, row)
    journal.close()
    return folder


def panel(title, *rows):
    """Return the axes of one panel, with rows of steps from 1 on."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plots._panel(axes, [{"step": step, **row} for step, row in enumerate(rows, start=1)], title)
    return axes


def curves(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}


@pytest.mark.long
def test_one_picture_shows_all(tmp_path):
    path = plots.draw(training(tmp_path, *[EVERYTHING] * 3))
    assert path == tmp_path / "training.png"
    assert path.read_bytes().startswith(PNG)
    width, height = (int.from_bytes(path.read_bytes()[at : at + 4]) for at in (16, 20))
    assert (width, height) == (3 * 624, 4 * 420), "ten panels, three in a row"
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "metrics.jsonl"])


def test_without_numbers_the_picture_is_not_drawn(tmp_path):
    assert plots.draw(tmp_path) is None
    assert plots.draw(training(tmp_path, {"train/policy_loss": 1.0}, {"rollout/reward": math.nan})) is None


@pytest.mark.long
def test_a_full_disk_leaves_the_old_picture_and_says_so(tmp_path):
    path = plots.draw(training(tmp_path, EVERYTHING))
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunStopped, match=r"training.png: expected to write a picture"):
            plots.draw(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_matplotlib_the_answer_is_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is absent
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv-rl\[train\]'"):
        plots.draw(training(tmp_path, EVERYTHING))


def test_curves_are_the_finite_numbers_by_their_steps():
    axes = panel("Score", {"eval/score": 0.1}, {"rollout/score": 0.2}, {"rollout/score": math.nan, "eval/score": 0.4})
    assert curves(axes) == {"training": [(2, 0.2)], "held-out": [(1, 0.1), (3, 0.4)]}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training", "held-out"]


def test_every_k_of_pass_at_k_is_a_curve():
    axes = panel("Pass@k", EVERYTHING, EVERYTHING | {"rollout/pass@16": 1.0})
    assert list(curves(axes)) == ["training, k = 1", "training, k = 8", "training, k = 16", "held-out, k = 1"]
