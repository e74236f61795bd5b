"""Train the demos over several seeds, print a table of scores before and after, and draw the mean curve.

    python benchmarks/train_demo.py math --engines vllm hf --seeds 0 1 2
    python benchmarks/train_demo.py guess --seeds 0 1 2 --variants turns episode single

math: the shipped tiny-math on math_retry, trained on `word_problems_train`, measured on the 200 tasks of
`word_problems`, which no training here has seen. Its score is the share of correct first attempts (pass@1 of one
attempt), four samples per task at temperature 1: later attempts are correct mostly because they follow feedback.
guess: an untrained policy on guess_number. Its score is the share of the 15 numbers found within four guesses, 32
samples each at temperature 1. `single` trains only the first guess and is measured over four.
Each finished run prints one line and its command; run directories are kept under --out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common import machine

from agentenv.training.logs.journal import read_metrics

MATH = (
    "--env math_retry --model tiny-math --data word_problems_train --eval_dataset word_problems "
    "--max_turns 3 --max_tokens 128 --max_length 512 --rollout_batch_size 12 --n 8 "
    "--actor_learning_rate 3e-4 --lr_warmup_ratio 0.1 --micro_train_batch_size 32 --max_train_steps 60 "
    "--eval_steps 15 --eval_temperature 1.0 --eval_n_samples_per_prompt 4 --no_ray "
    """--env_kwargs '{"retry_discount": 0.3}'"""
)
GUESS = (
    "--env guess_number --data guess_number --eval_dataset guess_number --max_tokens 1 --max_length 256 "
    "--rollout_batch_size 15 --n 16 --actor_learning_rate 3e-3 --micro_train_batch_size 240 "
    "--eval_temperature 1.0 --eval_n_samples_per_prompt 32 --eval_steps 25 --max_train_steps 250 "
    "--entropy_loss_coef 0.04 --engine hf --no_ray "
    """--env_kwargs '{"information_reward": 1.0}'"""
)
GUESS_VARIANTS = {
    "turns": "--gamma 0 --max_turns 4",
    "episode": "--gamma 1 --max_turns 4 --credit episode",
    "single": "--gamma 0 --max_turns 1",
}
KEYS = {"math": "eval/info/first_correct", "guess": "eval/score"}
LABELS = {"math": "right first attempts, held-out tasks", "guess": "numbers found within four guesses"}
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")


@dataclass(frozen=True, slots=True)
class Curve:
    """The measurements of one training."""

    variant: str
    seed: int
    steps: tuple[int, ...]
    values: tuple[float, ...]
    """Scores at `steps`; the first is before training."""
    minutes: tuple[float, ...]
    """Time since training started, at `steps`; includes evaluations, excludes imports."""
    wall_s: float
    """Time of the whole command."""

    @property
    def gained(self) -> float:
        """Percentage points gained by training."""
        return 100 * (self.values[-1] - self.values[0])

    def minutes_to(self, points: float) -> float | None:
        """Return when an evaluation first showed a gain of `points`; None if none did."""
        late = [
            at for at, value in zip(self.minutes, self.values, strict=True) if value >= self.values[0] + points / 100
        ]
        return late[0] if late else None


def main() -> int:
    """Run the requested trainings; return exit code 1 if one gained less than --at_least points."""
    args = arguments()
    names = args.engines if args.demo == "math" else args.variants
    curves = []
    for seed in args.seeds:
        for name in names:
            out = args.out / f"{args.demo}-{name}-seed{seed}"
            curve = _trained(args.demo, name, seed, out)
            curves.append(curve)
            print(_line(curve), flush=True)
    print(f"\n{machine()}\n\n{table(curves)}")
    if args.png is not None:
        draw(curves, LABELS[args.demo], args.png)
        print(f"\ncurve: {args.png}")
    return int(any(curve.gained < args.at_least for curve in curves))


def arguments() -> argparse.Namespace:
    """Parse the flags of this command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("demo", choices=("math", "guess"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--engines", choices=("vllm", "hf"), nargs="+", default=["hf"], help="of math")
    parser.add_argument("--variants", choices=tuple(GUESS_VARIANTS), nargs="+", default=["turns"], help="of guess")
    parser.add_argument("--out", type=Path, default=Path(f"runs/train-demo-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--png", type=Path, help="where the mean curve goes")
    parser.add_argument("--at_least", type=float, default=0.0, help="points to gain, or the exit code is 1")
    return parser.parse_args()


def command(demo: str, name: str, seed: int, out: Path) -> list[str]:
    """Return the `agentenv train` flags for a demo; `name` is the engine for math, the variant for guess."""
    own = [*shlex.split(MATH), "--engine", name]
    if demo == "guess":
        own = [*shlex.split(GUESS), "--model", str(out / "untrained"), *shlex.split(GUESS_VARIANTS[name])]
    return ["train", *own, "--seed", str(seed), "--out", str(out / "train")]


def _trained(demo: str, name: str, seed: int, out: Path) -> Curve:
    """Train once, in separate processes."""
    env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    out.mkdir(parents=True, exist_ok=True)
    if demo == "guess":
        _call(
            [
                str(Path(__file__).parents[1] / "examples/make/untrained_model.py"),
                str(out / "untrained"),
                "--seed",
                str(seed),
            ],
            env,
        )
    flags, began = command(demo, name, seed, out), time.monotonic()
    print(f"\nagentenv {shlex.join(flags)}", flush=True)
    _call(["-m", "agentenv.cli", *flags], env)
    wall_s, rows = time.monotonic() - began, read_metrics(out / "train")
    curve = curve_of(rows, KEYS[demo], Curve(name, seed, (), (), (), wall_s))
    if name != "single":
        return curve
    found = _found_in_four_guesses(out / "train" / "model", out / "over-four-guesses", env)
    return Curve(
        name, seed, (curve.steps[0], curve.steps[-1]), (_start(out, env), found), (0.0, curve.minutes[-1]), wall_s
    )


def _call(args: Sequence[str], env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, *args], env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(args)}: exit code {done.returncode}")


def curve_of(rows: Sequence[dict[str, Any]], key: str, empty: Curve) -> Curve:
    """Return the curve over the steps that have an evaluation."""
    steps, values, minutes, now_s = [], [], [], 0.0
    for row in rows:
        now_s += row["time/wall_s"]
        if key in row:
            steps.append(row["step"])
            values.append(row[key])
            minutes.append(now_s / 60)
    return Curve(empty.variant, empty.seed, tuple(steps), tuple(values), tuple(minutes), empty.wall_s)


def _start(out: Path, env: dict[str, str]) -> float:
    return _found_in_four_guesses(out / "untrained", out / "untrained-over-four-guesses", env)


def _found_in_four_guesses(model: Path, out: Path, env: dict[str, str]) -> float:
    """Return the score, over whole episodes, of a model trained on the first guess."""
    flags = "run --env guess_number --engine hf --n 32 --max_tokens 1 --max_length 256 --progress none"
    _call(["-m", "agentenv.cli", *shlex.split(flags), "--model", str(model), "--out", str(out)], env)
    score: float = json.loads((out / "metrics.json").read_text())["score"]["mean"]
    return score


def _line(curve: Curve) -> str:
    ends = f"{curve.values[0]:.1%} before, {curve.values[-1]:.1%} after"
    return f"{curve.variant} seed {curve.seed}: {ends} ({curve.gained:+.1f} points), {curve.wall_s / 60:.1f} minutes"


def table(curves: Sequence[Curve]) -> str:
    """Return a Markdown table: a row per training and a mean per variant."""
    rows = [
        "| run | seed | before | after | points | minutes to +20 | minutes in all |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in dict.fromkeys(curve.variant for curve in curves):
        own = [curve for curve in curves if curve.variant == variant]
        for c in own:
            reached = c.minutes_to(20)
            when = "never" if reached is None else f"{reached:.1f}"
            ends = f"{c.values[0]:.1%} | {c.values[-1]:.1%} | {c.gained:+.1f}"
            rows.append(f"| {variant} | {c.seed} | {ends} | {when} | {c.wall_s / 60:.1f} |")
        before, after = fmean(c.values[0] for c in own), fmean(c.values[-1] for c in own)
        gained, minutes = fmean(c.gained for c in own), fmean(c.wall_s for c in own) / 60
        rows.append(f"| {variant} | mean | {before:.1%} | {after:.1%} | {gained:+.1f} | | {minutes:.1f} |")
    return "\n".join(rows)


def draw(curves: Sequence[Curve], label: str, path: Path) -> None:
    """Draw a small PNG: each seed faintly, the mean on top, one color per variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.0, 3.2), dpi=100)
    for variant, color in zip(dict.fromkeys(curve.variant for curve in curves), COLORS, strict=False):
        own = [curve for curve in curves if curve.variant == variant]
        for curve in own:
            axes.plot(curve.steps, [100 * value for value in curve.values], color=color, alpha=0.3, linewidth=1)
        steps = sorted(set.intersection(*(set(curve.steps) for curve in own)))
        means = [100 * fmean(curve.values[curve.steps.index(step)] for curve in own) for step in steps]
        axes.plot(
            steps, means, color=color, linewidth=2, marker="o", markersize=4, label=f"{variant}, mean of {len(own)}"
        )
    axes.set(xlabel="train steps", ylabel="%", title=label, ylim=(0, 100))
    axes.grid(color="#E6E6E6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
