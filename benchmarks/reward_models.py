"""64 concurrent episodes ask one reward model: HFScorer against a call of transformers' pipeline per conversation.

    OMP_NUM_THREADS=1 python benchmarks/reward_models.py

One model, made on the spot with random weights, and the same conversations for every way. The peer is how a reward
environment that is asked about one conversation at a time scores: render, then `pipeline("text-classification")`, one
after another. `offline` is the bound: all conversations known beforehand, sorted by length, cut into batches of the
most that ours may have. Both ways of ours include the rendering. The rounds of all ways are interleaved; medians.
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

from agentenv.rewards.models.hf import HFScorer, Loaded

sys.path.append(str(ROOT))

EPISODES, CONVERSATIONS, ROUNDS, MAX_BATCH = 64, 256, 3, 32
CASES = ((2, 64, 4, (1, 8)), (2, 64, 20, (5, 60)), (2, 64, 20, (60, 200)), (8, 256, 4, (1, 8)))
"""Layers, width, words of a question, and words of an answer, from and to."""
WORDS = ("the", "model", "says", "that", "clips", "sold", "in", "April", "are", "half", "as", "many", "as", "apples")


def conversations(asked: int, words: tuple[int, int]) -> list[list[dict[str, str]]]:
    """Questions of so many words, and answers of as many as the two numbers say."""
    rng = random.Random(0)

    def text(num: int) -> str:
        return " ".join(rng.choices(WORDS, k=num))

    return [
        [{"role": "user", "content": text(asked)}, {"role": "assistant", "content": text(rng.randint(*words))}]
        for _ in range(CONVERSATIONS)
    ]


def peer(pipe: Any, tokenizer: Any, asked: list[Any]) -> list[float]:
    """One call of the pipeline after another."""
    texts = (tokenizer.apply_chat_template(each, tokenize=False) for each in asked)
    return [pipe(text, function_to_apply="none")[0]["score"] for text in texts]


def offline(loaded: Loaded, asked: list[Any]) -> list[float]:
    """Everything at once, sorted."""
    ids = [loaded.renderer.ids(each).token_ids for each in asked]
    found = [0.0] * len(ids)
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    for batch in (order[start : start + MAX_BATCH] for start in range(0, len(order), MAX_BATCH)):
        for index, value in zip(batch, loaded.classifier.score_batch([ids[i] for i in batch]), strict=True):
            found[index] = value
    return found


async def ours(scorer: HFScorer, asked: list[Any], ticker: Ticker) -> list[float]:
    """64 episodes, each of which asks again when it has its answer."""
    todo, found = iter(enumerate(asked)), [0.0] * len(asked)

    async def episode() -> None:
        for index, conversation in todo:
            found[index] = (await scorer.score(conversation)).value

    async with ticker:
        await asyncio.gather(*(episode() for _ in range(EPISODES)))
    return found


async def measured(path: Path, asked: list[Any]) -> str:
    """A row of the table."""
    from transformers import pipeline

    scorer = HFScorer(path, max_batch=MAX_BATCH)
    loaded, ticker = await scorer.load(), Ticker()
    pipe = pipeline("text-classification", model=str(path), device="cpu")
    seconds: dict[str, list[float]] = {"peer": [], "offline": [], "ours": []}
    ways: dict[str, Callable[[], Any]] = {
        "peer": lambda: asyncio.to_thread(peer, pipe, loaded.renderer.tokenizer, asked),
        "offline": lambda: asyncio.to_thread(offline, loaded, asked),
        "ours": lambda: ours(scorer, asked, ticker),
    }
    found: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            found[name] = await way()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    await scorer.close()
    took = {name: statistics.median(each) for name, each in seconds.items()}
    apart = max(abs(a - b) for name in ("peer", "offline") for a, b in zip(found["ours"], found[name], strict=True))
    ids = [loaded.renderer.ids(each).token_ids for each in asked]
    rate = {name: len(asked) / each for name, each in took.items()}
    return (
        f"{sum(map(len, ids)) / len(ids):.0f} | {rate['peer']:.0f} | {rate['offline']:.0f} | {rate['ours']:.0f} "
        f"| {took['peer'] / took['ours']:.2f} | {took['offline'] / took['ours']:.2f} "
        f"| {ticker.worst_s * 1e3:.1f} | {apart:.1e} |"
    )


def main() -> None:
    from tests.rewards.models.tiny import make_tiny_rm

    print(f"{machine()}\n{CONVERSATIONS} conversations, {EPISODES} at a time, batches of at most {MAX_BATCH}\n")
    print("| model | tokens | pipeline/s | offline/s | ours/s | ours / pipeline | ours / offline | lag ms | apart |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for layers, width, asked, words in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = make_tiny_rm(folder, layers=layers, width=width, max_length=2048)
            row = asyncio.run(measured(path, conversations(asked, words)))
        print(f"| {layers} layers of {width} | {row}", flush=True)


if __name__ == "__main__":
    main()
