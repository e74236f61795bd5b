"""Memory of 1,000 live episodes while each of them waits in its second `step`.

    python benchmarks/live_memory.py

Each episode has a prompt, an action, a reply and another action, a quarter of the tokens each, with log-probabilities
(a different number for every token) and its own texts. Each case is a separate process: it completes a few episodes, so
that everything loaded once is loaded, then starts all episodes and reads the growth of its resident memory (RSS) when
all wait. A second process measures the same with tracemalloc, which counts Python's objects without memory that the
allocators keep. `a thread each` is a plain `def step`: 1,000 threads. OpenRLHF is 0.11.2's MultiTurnAgentExecutor with
the same engine, whose outputs have vLLM's shape, and an `async def step`. Tasks and tokenizer are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import ROOT, find_openrlhf, machine

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.engine import Engine
from agentenv.core.types import Completion, Limits, SamplingParams, Task
from agentenv.episode.runner import EpisodeRunner, plan
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.interop.openrlhf import AgentExecutor
from agentenv.interop.openrlhf.engine import VLLMStyleSampling

sys.path.insert(0, str(ROOT))
from tests.models import make_tiny_tokenizer  # after the path is set

CASES = {
    "agentenv run, messages": "messages",
    "agentenv run, raw text": "text",
    "agentenv run, messages, a thread each": "threads",
    "agentenv's AgentExecutor, raw text": "executor",
    "OpenRLHF 0.11.2, raw text": "openrlhf",
}
WORDS = "The sum of 17 and 25 is 42, so we carry on; think, check and answer again: how many does she have now? "


class Gate:
    """The point where the episodes wait, with their number; one per process."""

    num_waiting, is_open = 0, threading.Event()

    @classmethod
    async def wait(cls, loop_gate: asyncio.Event) -> None:
        cls.num_waiting += 1
        await loop_gate.wait()


LOOP_GATE: asyncio.Event
TEXTS: dict[str, str] = {}


def judge(agent: Any) -> dict[str, Any]:
    agent.num_turns += 1
    feedback = f"{random.random()} {TEXTS['piece']}"
    return {"rewards": Scalar(0.5), "environment_feedback": feedback, "done": agent.num_turns == 2}


class Scalar(float):
    def item(self) -> float:
        return float(self)


class Waiting(AgentInstance):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_turns = 0

    async def step(self, states: Any, **kwargs: Any) -> Any:
        if self.num_turns == 1:
            await Gate.wait(LOOP_GATE)
        return judge(self)


class WaitingThread(Waiting):
    def step(self, states: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if self.num_turns == 1:
            Gate.num_waiting += 1
            Gate.is_open.wait()
        return judge(self)


def sample(num_tokens: int) -> tuple[list[int], list[float]]:
    return [random.randrange(10, 380) for _ in range(num_tokens)], [-random.random() for _ in range(num_tokens)]


class OurEngine(Engine):
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    async def generate(self, prompt_token_ids: Any, sampling: Any, *, request_id: str) -> Completion:
        await asyncio.sleep(0)
        ids, logprobs = sample(self.num_tokens)
        return Completion(tuple(ids), "stop", logprobs=tuple(logprobs))


class TheirEngine:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        await asyncio.sleep(0)
        ids, logprobs = sample(self.num_tokens)
        entries = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, logprobs, strict=True)]
        output = SimpleNamespace(token_ids=ids, text="x" * len(ids), logprobs=entries, finish_reason="stop")
        return SimpleNamespace(prompt_token_ids=list(prompt_token_ids), outputs=[output])


def prompt_text(index: int) -> str:
    return f"{index}: {TEXTS['piece']}"


async def run_ours(kind: str, num: int, tokenizer: Any, num_tokens: int) -> None:
    prompts = [prompt_text(index) for index in range(num)]
    tasks = [
        Task(text if kind == "text" else [{"role": "user", "content": text}], "1", task_id=f"{index:06d}")
        for index, text in enumerate(prompts)
    ]
    runner = EpisodeRunner(
        EnvSource(WaitingThread if kind == "threads" else Waiting, {}),
        EpisodeSetup(
            engine=OurEngine(num_tokens // 4),
            chat=Chat(tokenizer),
            sampling=SamplingParams(),
            limits=Limits(max_length=4 * num_tokens, max_turns=3),
        ),
        concurrency=num,
    )
    await runner.run(plan(tasks, 1), lambda _: None)
    if runner.num_failed:
        raise SystemExit(f"{runner.num_failed} episodes failed: {dict(runner.errors)}")


async def run_executor(executor: Any, num: int, tokenizer: Any, num_tokens: int) -> None:
    asked = [VLLMStyleSampling(max_tokens=num_tokens) for _ in range(num)]
    engine = TheirEngine(num_tokens // 4)
    calls = [
        executor.execute(prompt_text(index), "1", asked[index], 4 * num_tokens, tokenizer, engine)
        for index in range(num)
    ]
    await asyncio.gather(*calls)


def make_run(kind: str, num: int, tokenizer: Any, num_tokens: int) -> Any:
    """Return a coroutine that runs `num` episodes to the gate and, when it opens, to their end."""
    if kind == "executor":
        AgentExecutor.max_concurrent = num  # OpenRLHF has no such limit
        return run_executor(AgentExecutor(Waiting), num, tokenizer, num_tokens)
    if kind == "openrlhf":
        find_openrlhf()
        from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

        cls = type("Waiting", (Waiting, AgentInstanceBase), {})
        return run_executor(MultiTurnAgentExecutor(cls), num, tokenizer, num_tokens)
    return run_ours(kind, num, tokenizer, num_tokens)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def growth(kind: str, num: int, tokenizer: Any, num_tokens: int, *, traced: bool) -> int:
    """Return the bytes that `num` waiting episodes hold."""
    global LOOP_GATE
    LOOP_GATE, Gate.num_waiting = asyncio.Event(), 0
    Gate.is_open.clear()
    work = asyncio.ensure_future(make_run(kind, num, tokenizer, num_tokens))
    await asyncio.sleep(0)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0] if traced else resident()
    while Gate.num_waiting < num and not work.done():  # noqa: ASYNC110 - half of the cases wait in threads
        await asyncio.sleep(0.01)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0] if traced else resident()
    LOOP_GATE.set()
    Gate.is_open.set()
    await work
    return after - before


def child(kind: str, num: int, num_tokens: int, *, traced: bool) -> None:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_tokenizer(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer.encode(WORDS))
    TEXTS["piece"] = (WORDS * (num_tokens // 4 // size + 1))[: num_tokens // 4 * len(WORDS) // size]
    random.seed(0)
    asyncio.run(growth(kind, 20, tokenizer, num_tokens, traced=False))
    if traced:
        tracemalloc.start()
    print(json.dumps(asyncio.run(growth(kind, num, tokenizer, num_tokens, traced=traced))))


def measure(kind: str, num: int, num_tokens: int, *, traced: bool) -> int:
    """Return the growth as measured by a separate process."""
    argv = [sys.executable, __file__, "--child", kind, "--episodes", str(num), "--tokens", str(num_tokens)]
    done = subprocess.run([*argv, *(["--traced"] if traced else [])], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--small", action="store_true", help="100 episodes, as a smoke test")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.episodes, options.tokens[0], traced=options.traced)
        return
    num = 100 if options.small else options.episodes
    print(machine())
    print(f"\nMiB that {num:,} waiting episodes hold: resident / Python's objects\n")
    print("| run by |" + "".join(f" {num_tokens:,} tokens |" for num_tokens in options.tokens))
    print("|---|" + "---:|" * len(options.tokens))
    for name, kind in CASES.items():
        cells = []
        for num_tokens in options.tokens:
            both = [measure(kind, num, num_tokens, traced=traced) / 2**20 for traced in (False, True)]
            cells.append(f" {both[0]:.1f} / {both[1]:.1f} |")
        print(f"| {name} |" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
