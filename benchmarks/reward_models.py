"""64 concurrent episodes ask one reward model: HFScorer against a call of transformers' pipeline per conversation.

    OMP_NUM_THREADS=1 python benchmarks/reward_models.py

One model with random weights and the same conversations for every variant: one answer per prompt, or groups of 8
answers per prompt, as in GRPO. The peer scores like a reward environment that receives one conversation at a time:
render, then `pipeline("text-classification")`, one after another. `offline` is the bound of batching: all
conversations known beforehand, sorted by length, in batches of our maximum size. All variants include the rendering.
Rounds alternate; results are medians. The two columns of CPU are the same ratios of processor time, which other
programs on the machine affect less.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, Ticker, machine

from agentenv.rewards.models.hf import HFScorer, LoadedHF

sys.path.append(str(ROOT))

EPISODES, ROUNDS, MAX_BATCH = 64, 3, 32
CASES = (
    (2, 64, 1024, 4, (1, 8), 1),
    (2, 64, 512, 20, (5, 60), 1),
    (2, 64, 256, 20, (60, 200), 1),
    (8, 256, 256, 4, (1, 8), 1),
    (2, 64, 1024, 20, (2, 12), 8),
    (2, 64, 512, 80, (2, 12), 8),
    (2, 64, 512, 80, (10, 60), 8),
    (8, 256, 128, 80, (2, 12), 8),
)
"""Layers, width, conversations, words of a question, words of an answer, from and to, and answers to a question."""
WORDS = ("the", "model", "says", "that", "clips", "sold", "in", "April", "are", "half", "as", "many", "as", "apples")


def conversations(num: int, asked: int, words: tuple[int, int], samples: int) -> list[list[dict[str, str]]]:
    """Return `num` conversations: questions of `asked` words, each with `samples` answers of `words` words."""
    rng = random.Random(0)

    def text(length: int) -> str:
        return " ".join(rng.choices(WORDS, k=length))

    questions = [text(asked) for _ in range(num // samples)]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": text(rng.randint(*words))}]
        for question in questions
        for _ in range(samples)
    ]


def peer(pipe: Any, tokenizer: Any, asked: list[Any]) -> list[float]:
    """Score with sequential calls of the pipeline."""
    texts = (tokenizer.apply_chat_template(each, tokenize=False) for each in asked)
    return [pipe(text, function_to_apply="none")[0]["score"] for text in texts]


def offline(loaded: LoadedHF, asked: list[Any]) -> list[float]:
    """Score everything at once."""
    ids = [loaded.renderer.ids(each).token_ids for each in asked]
    found = [0.0] * len(ids)
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    batches = [order[start : start + MAX_BATCH] for start in range(0, len(order), MAX_BATCH)]
    for batch in batches:
        for index, value in zip(batch, loaded.classifier.score_batch([ids[i] for i in batch]), strict=True):
            found[index] = value
    return found


async def ours(scorer: HFScorer, asked: list[Any], ticker: Ticker) -> list[float]:
    """Score in 64 episodes, each of which sends its next request after its answer."""
    todo, found = iter(enumerate(asked)), [0.0] * len(asked)

    async def episode() -> None:
        for index, conversation in todo:
            found[index] = (await scorer.score(conversation)).value

    async with ticker:
        await asyncio.gather(*(episode() for _ in range(EPISODES)))
    return found


async def measured(path: Path, asked: list[Any]) -> str:
    """Return a row of the table."""
    from transformers import pipeline

    scorer = HFScorer(path, max_batch=MAX_BATCH)
    loaded, ticker = await scorer.load(), Ticker()
    pipe = pipeline("text-classification", model=str(path), device="cpu")
    ways: dict[str, Callable[[], Any]] = {
        "peer": lambda: asyncio.to_thread(peer, pipe, loaded.renderer.tokenizer, asked),
        "offline": lambda: asyncio.to_thread(offline, loaded, asked),
        "ours": lambda: ours(scorer, asked, ticker),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            began, worked = time.perf_counter(), time.process_time()
            found[name] = await way()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
                work[name].append(time.process_time() - worked)
    await scorer.close()
    took, cpu = ({name: statistics.median(each) for name, each in by.items()} for by in (seconds, work))
    apart = max(abs(a - b) for name in ways for a, b in zip(found["ours"], found[name], strict=True))
    ids = [loaded.renderer.ids(each).token_ids for each in asked]
    rate = {name: len(asked) / each for name, each in took.items()}
    return (
        f"{sum(map(len, ids)) / len(ids):.0f} | {rate['peer']:.0f} | {rate['offline']:.0f} | {rate['ours']:.0f} "
        f"| {took['peer'] / took['ours']:.2f} | {took['offline'] / took['ours']:.2f} "
        f"| {cpu['peer'] / cpu['ours']:.2f} | {cpu['offline'] / cpu['ours']:.2f} "
        f"| {ticker.worst_s * 1e3:.1f} | {apart:.1e} |"
    )


def main() -> None:
    from tests.rewards.models.tiny import make_tiny_rm

    print(f"{machine()}\n{EPISODES} conversations at a time, batches of at most {MAX_BATCH}\n")
    print(
        "| model | answers | tokens | pipeline/s | offline/s | ours/s | ours / pipeline "
        "| ours / offline | CPU / pipeline | CPU / offline | lag ms | apart |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for layers, width, num, asked, words, samples in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = make_tiny_rm(folder, layers=layers, width=width, max_length=2048)
            row = asyncio.run(measured(path, conversations(num, asked, words, samples)))
        print(f"| {layers} layers of {width} | {samples} | {row}", flush=True)


if __name__ == "__main__":
    main()
