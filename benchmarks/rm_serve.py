"""64 clients ask one reward server, a query each time: `agentenv rm serve` against OpenRLHF 0.11.2's own server.

    OMP_NUM_THREADS=1 python benchmarks/rm_serve.py

One model of each size with random weights, and the same queries. The clients are OpenRLHF's: the
function with which its rollouts ask a remote reward model, a connection for every request. The servers run at the same
time, each a process with one torch thread, and are queried alternately; results are medians of the rounds. Theirs runs
in bfloat16, since it does not support float32; ours in bfloat16 and in float32, its default on a CPU. Meanwhile, the
server gets another request every 20 ms: the longest wait for its answer is the lag of the event loop.

OpenRLHF's server is the unchanged `openrlhf.cli.serve_rm`. It imports deepspeed and flash_attn, which need a GPU's
compiler, and uses neither here: if they are not installed, empty modules replace them (see `_Absent`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import random
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from common import ROOT, find_openrlhf, machine

sys.path.append(str(ROOT))

CLIENTS, QUERIES, PING_S = 64, 256, 0.02
CASES = ((2, 64, (1, 8)), (2, 64, (5, 60)), (8, 256, (5, 60)))
"""Layers, width, and words of an answer, from and to."""
OURS, OURS_BF16, THEIRS = "agentenv, float32", "agentenv, bfloat16", "OpenRLHF, bfloat16"
WORDS = ("the", "model", "says", "that", "clips", "sold", "in", "April", "are", "half", "as", "many", "as", "apples")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports empty modules in which every name is an empty class."""

    names = tuple(name for name in ("deepspeed", "flash_attn") if importlib.util.find_spec(name) is None)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_one = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_one else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = lambda name: type(name, (), {})


def serve_theirs(arguments: list[str]) -> None:
    """Run OpenRLHF's server in this process."""
    find_openrlhf()
    sys.meta_path.append(_Absent())
    sys.argv[1:] = arguments
    runpy.run_module("openrlhf.cli.serve_rm", run_name="__main__")


@dataclass
class Round:
    """The results of one round."""

    rewards: list[float]
    waits_s: list[float]
    pings_s: list[float]
    seconds: float


def queries(num_words: tuple[int, int]) -> list[str]:
    """Return conversations as rendered by a policy's template."""
    rng = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    return [
        f"<|im_start|>user\n{words(4, 20)}<|im_end|>\n<|im_start|>assistant\n{words(*num_words)}<|im_end|>"
        for _ in range(QUERIES)
    ]


@contextlib.contextmanager
def servers(model: Path) -> Iterator[dict[str, str]]:
    """Start the three servers and yield their addresses by name."""
    ports: list[int] = []
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    ours = [sys.executable, "-m", "agentenv.cli", "rm", "serve", str(model), "--overflow", "right", "--port"]
    theirs = [sys.executable, __file__, "--theirs", "--reward.model_name_or_path", str(model), "--data.max_len", "512"]
    theirs += ["--ds.attn_implementation", "sdpa", "--host", "127.0.0.1", "--port"]
    words = {OURS: [*ours, str(ports[0])], OURS_BF16: [*ours, str(ports[1]), "--dtype", "bfloat16"]}
    words[THEIRS] = [*theirs, str(ports[2])]
    env, quiet = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, subprocess.DEVNULL
    running = [subprocess.Popen(each, env=env, stdout=quiet, stderr=quiet) for each in words.values()]
    try:
        yield {name: f"http://127.0.0.1:{port}" for name, port in zip(words, ports, strict=True)}
    finally:
        for process in running:
            process.kill()
            process.wait()


async def ready(url: str) -> None:
    """Wait for the first reward."""
    import aiohttp

    async with aiohttp.ClientSession() as session, asyncio.timeout(300):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"{url}/get_reward", json={"query": ["warm"]}) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)


async def asked(url: str, texts: list[str]) -> Round:
    """Run 64 clients, each of which sends its next query after its answer."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    executor = SingleTurnAgentExecutor([f"{url}/get_reward"])
    todo, rewards, waits = iter(enumerate(texts)), [0.0] * len(texts), [0.0] * len(texts)

    async def client() -> None:
        for index, text in todo:
            started = time.perf_counter()
            (answer,) = await executor._fetch_rewards_via_http([text], [""], [""])
            waits[index] = time.perf_counter() - started
            (rewards[index],) = answer["rewards"]

    pings: list[float] = []
    pinging = asyncio.create_task(ping(url, pings))
    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seconds = time.perf_counter() - started
    pinging.cancel()
    await asyncio.gather(pinging, return_exceptions=True)
    return Round(rewards, waits, pings, seconds)


async def ping(url: str, pings: list[float]) -> None:
    """Repeatedly request a path that is answered at once."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        while True:
            started = time.perf_counter()
            pings.append(0.0)
            try:
                async with session.get(f"{url}/health") as answer:
                    await answer.read()
            finally:
                pings[-1] = time.perf_counter() - started  # includes the request interrupted by the end of the round
            await asyncio.sleep(PING_S)


async def measured(model: Path, texts: list[str], rounds: int) -> tuple[dict[str, list[Round]], float]:
    """Return the rounds of each server, and the distance of our bfloat16 rewards from theirs."""
    with servers(model) as urls:
        await asyncio.gather(*map(ready, urls.values()))
        found: dict[str, list[Round]] = {name: [] for name in urls}
        for url in urls.values():
            await asked(url, texts[:CLIENTS])  # to warm up
        for _ in range(rounds):
            for name, url in urls.items():
                found[name].append(await asked(url, texts))
    pairs = zip(found[OURS_BF16][0].rewards, found[THEIRS][0].rewards, strict=True)
    return found, max(abs(ours - theirs) for ours, theirs in pairs)


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def rows(found: dict[str, list[Round]]) -> Iterator[str]:
    """Yield the lines of a table, one per server."""
    speed = {name: median([len(each.rewards) / each.seconds for each in done]) for name, done in found.items()}
    for name, done in found.items():
        waits = [sorted(each.waits_s) for each in done]
        p50, p99 = (median([each[int(len(each) * share)] for each in waits]) * 1e3 for share in (0.5, 0.99))
        late = [median([statistics.median(each.pings_s) for each in done]), max(max(each.pings_s) for each in done)]
        yield (
            f"| {name} | {speed[name]:.0f} | {speed[name] / speed[THEIRS]:.1f}x | {p50:.0f} | {p99:.0f} "
            f"| {late[0] * 1e3:.0f} | {late[1] * 1e3:.0f} |"
        )


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from tests.rewards.models.tiny import make_tiny_rm  # first: OpenRLHF's wheel has a package named `tests`

    find_openrlhf()
    logging.disable(logging.INFO)
    print(f"{machine()}\n{CLIENTS} clients, {QUERIES} queries, {options.rounds} rounds")
    for layers, width, words in CASES:
        texts = queries(words)
        with tempfile.TemporaryDirectory() as folder:
            model = make_tiny_rm(Path(folder) / "rm", layers=layers, width=width)
            found, apart = asyncio.run(measured(model, texts, options.rounds))
        print(f"\n{layers} layers, width {width}, answers of {words[0]} to {words[1]} words;", end=" ")
        print(f"bfloat16 rewards at most {apart:.3g} apart\n")
        print("| server | requests/s | ratio | p50 ms | p99 ms | ping p50 ms | worst ping ms |")
        print("|---|---|---|---|---|---|---|")
        print("\n".join(rows(found)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--theirs"]:
        serve_theirs(sys.argv[2:])
    else:
        main()
