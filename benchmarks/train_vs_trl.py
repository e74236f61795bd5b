"""Samples per second and peak memory of `agentenv train` and TRL's GRPOTrainer, on one model in one run.

    python benchmarks/train_vs_trl.py --trl_python PATH/TO/A/VENV/bin/python

tiny-math in float32 on the CPU, one process and no vLLM on either side; each train step samples the same 16 prompts
8 times at temperature 1, 64 tokens each, scores them by their share of digits and makes one optimizer step of GRPO
(group advantages, no KL term). The model is a copy whose end of sequence is a token that it never samples, so that all
samples have all their tokens; both sides count them. The sides alternate, each round in a separate process. The
speed of a round is that of its median step, without the first; memory is the process's peak resident memory.

TRL runs under another interpreter, since it may need another version of transformers:

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl datasets accelerate

Both sides are tried with each of `--threads` and `--micro`, the samples of a backward pass, and the best of each is
compared. TRL generates with transformers' `generate`; its continuous batching (`--trl_continuous`) was slower on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONTINUOUS = {"page_size": 32, "num_blocks": 1024, "max_batch_tokens": 1024, "max_requests_per_batch": 128}
"""Settings of transformers' continuous batching for a CPU; its defaults size the cache by the machine's memory."""
AGENT = '''
from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult


class Digits(AgentInstance):
    """One turn, rewarded by its share of digits."""

    async def step(self, states):
        text = states["action_text"]
        return StepResult(reward=sum(c.isdigit() for c in text) / max(1, len(text)), terminated=True)
'''


@dataclass(frozen=True)
class Way:
    """A side with its settings."""

    side: str
    threads: int
    micro: int

    def __str__(self) -> str:
        """Return the name in tables."""
        return f"{self.side}, {self.threads} thread{'s' * (self.threads > 1)}, {self.micro} a backward pass"


@dataclass(frozen=True)
class Round:
    """The results of one process."""

    samples_per_s: float
    rss_mib: float
    cpu_s: float
    """Of a process, start-up included."""
    tokens: float
    """Of a sample, mean."""


def prepare(folder: Path, *, num_prompts: int) -> None:
    """Write the model without an EOS, the prompts as text and the agent."""
    model = folder / "model"
    shutil.copytree(ROOT / "agentenv/_assets/tiny-math", model)
    for name, key, value in (
        ("config.json", "eos_token_id", 0),
        ("generation_config.json", "eos_token_id", 0),
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
    ):
        facts = json.loads((model / name).read_text()) | {key: value}
        (model / name).write_text(json.dumps(facts))
    sys.path.append(str(ROOT))
    from examples.make.word_problems import make_problems

    texts = [
        f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"
        for problem in make_problems(num_prompts, 0)
    ]
    rows = [json.dumps({"prompt": text, "label": ""}) + "\n" for text in texts]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "digits.py").write_text(AGENT)


def our_command(way: Way, args: argparse.Namespace, folder: Path, out: Path) -> list[str]:
    """Return the command of synchronous `agentenv train` in one process."""
    flags = {
        "env": f"{folder}/digits.py:Digits", "model": folder / "model", "data": folder / "prompts.jsonl",
        "rollout_batch_size": args.prompts, "n": args.samples, "max_train_steps": args.steps,
        "max_tokens": args.tokens, "max_turns": 1, "concurrency": args.prompts * args.samples, "engine": "hf",
        "advantage_estimator": "group_norm", "actor_learning_rate": 1e-6, "micro_train_batch_size": way.micro,
        "out": out, "save_samples": 0, "progress": "none",
    }  # fmt: skip
    listed = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "agentenv.cli", "train", *listed, "--no_ray", "--no_apply_chat_template"]


def trl_command(way: Way, args: argparse.Namespace, folder: Path, out: Path) -> list[str]:
    """Return the command that runs this file under the other interpreter."""
    settings = {
        "model": folder / "model", "prompts": folder / "prompts.jsonl", "out": out, "threads": way.threads,
        "micro": way.micro, "steps": args.steps, "num_prompts": args.prompts, "samples": args.samples,
        "tokens": args.tokens, "continuous": int(args.trl_continuous),
    }  # fmt: skip
    return [args.trl_python, __file__, "--trl_side", json.dumps({name: str(value) for name, value in settings.items()})]


def run_round(way: Way, args: argparse.Namespace, folder: Path) -> Round:
    """Run one process to its end."""
    out = folder / f"out-{time.monotonic_ns()}"
    command = (our_command if way.side == "agentenv" else trl_command)(way, args, folder, out)
    env = os.environ | {"OMP_NUM_THREADS": str(way.threads), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    if way.side == "agentenv":
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(
            f"{way}: expected exit code 0, got {process.returncode}.\n{(folder / 'log').read_text()[-3000:]}"
        )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    step_s = statistics.median(line["time/wall_s"] for line in lines[1:])
    tokens = statistics.mean(line["rollout/action_tokens"] for line in lines)
    return Round(args.prompts * args.samples / step_s, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime, tokens)


def trl_side(settings: dict[str, str]) -> None:
    """Run GRPOTrainer on the same work and write a line per step like our metrics; runs without agentenv."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(settings["threads"]))
    num_prompts, samples, micro = int(settings["num_prompts"]), int(settings["samples"]), int(settings["micro"])
    ends_s: list[float] = []
    lengths: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Records when steps end."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends_s.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends_s.append(time.perf_counter())

    def digits(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    more: dict[str, Any] = {}
    if int(settings["continuous"]):
        more = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": CONTINUOUS}
    config = GRPOConfig(
        output_dir=settings["out"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=int(settings["steps"]),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=num_prompts * samples // micro,
        num_generations=samples,
        max_completion_length=int(settings["tokens"]),
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=digits,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    tokens = statistics.mean(lengths)
    lines = [
        json.dumps({"time/wall_s": end - begin, "rollout/action_tokens": tokens}) + "\n"
        for begin, end in itertools.pairwise(ends_s)
    ]
    out = Path(settings["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").write_text("".join(lines))


def measure(args: argparse.Namespace, folder: Path) -> dict[Way, list[Round]]:
    """Run every variant in every round; the sides alternate within a round, and the order reverses between rounds."""
    ways = [Way(side, t, m) for t in args.threads for m in args.micro for side in ("agentenv", "TRL")]
    found: dict[Way, list[Round]] = {way: [] for way in ways}
    for index in range(args.rounds):
        for way in ways if index % 2 == 0 else ways[::-1]:
            found[way].append(run_round(way, args, folder))
            print(
                f"round {index + 1}: {way}: {found[way][-1].samples_per_s:.1f} samples/s", file=sys.stderr, flush=True
            )
    return found


def report(found: dict[Way, list[Round]], args: argparse.Namespace) -> None:
    print(f"{args.prompts} prompts × {args.samples} samples × {args.tokens} tokens a step, {args.steps} steps a round")
    print(f"(the first not counted), {args.rounds} rounds; medians\n")
    print("| side | samples/s | lowest and highest round | CPU s | peak memory, MiB | tokens a sample |")
    print("|---|---:|---:|---:|---:|---:|")
    speeds: dict[Way, float] = {}
    for way, rounds in found.items():
        values = [each.samples_per_s for each in rounds]
        speeds[way] = statistics.median(values)
        memory, tokens = max(each.rss_mib for each in rounds), statistics.mean(each.tokens for each in rounds)
        row = f"{min(values):.1f} to {max(values):.1f} | {statistics.median(r.cpu_s for r in rounds):.1f}"
        print(f"| {way} | {speeds[way]:.1f} | {row} | {memory:,.0f} | {tokens:.2f} |")
    best = {side: max((w for w in found if w.side == side), key=speeds.__getitem__) for side in ("agentenv", "TRL")}
    ours, theirs = best["agentenv"], best["TRL"]
    memory = {
        side: min(r.rss_mib for way, rounds in found.items() if way.side == side for r in rounds) for side in best
    }
    print(f"\nbest of each: {ours}: {speeds[ours]:.1f}; {theirs}: {speeds[theirs]:.1f} samples/s")
    print(f"agentenv / TRL: {speeds[ours] / speeds[theirs]:.2f}")
    print(f"least memory of each: {memory['agentenv']:,.0f} and {memory['TRL']:,.0f} MiB")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl_python", help="interpreter of an environment with TRL")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="OMP_NUM_THREADS of both sides")
    parser.add_argument("--micro", nargs="+", type=int, default=[8, 32], help="samples of a backward pass")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a train step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=6, help="train steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl_continuous", action="store_true", help="TRL with transformers' continuous batching")
    parser.add_argument("--small", action="store_true", help="one round of 2 steps, to see that it works")
    parser.add_argument("--trl_side", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.small:
        args.steps, args.rounds, args.threads, args.micro = 2, 1, [1], [32]
    if args.steps < 2:
        parser.error("--steps: expected at least 2, of which the first is not counted")
    if args.trl_side is None and args.trl_python is None:
        parser.error("--trl_python: expected the interpreter of an environment with TRL")
    return args


def main() -> None:
    args = parse()
    if args.trl_side is not None:
        trl_side(json.loads(args.trl_side))
        return
    from common import machine

    names = ("trl", "torch", "transformers")
    code = f"from importlib.metadata import version; print(', '.join(n + ' ' + version(n) for n in {names}))"
    theirs = subprocess.run([args.trl_python, "-c", code], check=True, capture_output=True, text=True).stdout
    print(machine(), f"TRL's side: {theirs.strip()}", sep="\n", end="\n\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), num_prompts=args.prompts * args.steps)
        report(measure(args, Path(name)), args)


if __name__ == "__main__":
    main()
