"""An environment whose `step` blocks for 50 ms, under our loop and under OpenRLHF 0.11.2's, in one process.

    python benchmarks/blocking_env.py

64 episodes of 4 turns, with an engine that takes 5 ms per request. `sleeps` waits, as a client of a sandbox does;
`computes` is a loop in pure Python, which holds the interpreter's lock: threads do not make it faster. OpenRLHF awaits
`step`, so its users write `async def step` around such work; the same class with a plain `def step` runs
in a thread under agentenv. `as it is` is the unchanged file of an OpenRLHF user under agentenv: code inside an `async
def` blocks the event loop. The engine runs on the same event loop, as vLLM's AsyncLLM does: `loop lag` is the
loop's worst delay, during which no request could reach the engine. Rounds alternate; results are medians. `--switch_ms`
sets how long a thread may keep the interpreter's lock (Python's default: 5 ms), for all variants.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import ROOT, Ticker, find_openrlhf, machine

from agentenv.interop.openrlhf import AgentExecutor
from agentenv.interop.openrlhf.engine import VLLMStyleSampling

sys.path.insert(0, str(ROOT))
from tests.models import make_tiny_tokenizer  # after the path is set

find_openrlhf()
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor  # noqa: E402 - as above

WORK_S, LATENCY_S, NUM_TURNS, ACTION = 0.05, 0.005, 4, list(range(10, 26))


class LateEngine:
    """OpenRLHF's `llm_engine`, on this event loop: 16 tokens after 5 ms."""

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        await asyncio.sleep(LATENCY_S)
        entries = [{token: SimpleNamespace(logprob=-0.5)} for token in ACTION]
        output = SimpleNamespace(token_ids=list(ACTION), text="x" * 16, logprobs=entries, finish_reason="stop")
        return SimpleNamespace(prompt_token_ids=list(prompt_token_ids), outputs=[output])


def sleeps() -> None:
    time.sleep(WORK_S)


def computes() -> None:
    begun, number = time.thread_time(), 0
    while time.thread_time() - begun < WORK_S:
        for _ in range(1000):
            number = (number * 31 + 7) % 1_000_003


class Scalar(float):
    """A reward as OpenRLHF requires it: with `.item()`."""

    def item(self) -> float:
        return float(self)


def agent_class(work: Any, *, plain: bool) -> type:
    """Return an environment whose `step` blocks, in a plain `def` or in the `async def` that OpenRLHF requires."""

    class Agent(AgentInstanceBase):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.num_turns = 0

        def judge(self, states: Any) -> dict[str, Any]:
            work()
            self.num_turns += 1
            done = self.num_turns == NUM_TURNS
            return {"rewards": Scalar(1.0), "environment_feedback": "" if done else "\nAgain: ", "done": done}

        async def step(self, states: Any, **kwargs: Any) -> dict[str, Any]:
            return self.judge(states)

    if plain:
        Agent.step = Agent.judge  # type: ignore[method-assign, assignment]
    return Agent


async def time_round(executor: Any, tokenizer: Any, num: int) -> tuple[float, float, list[Any]]:
    """Return the seconds, the worst lag of the loop and the token ids of every episode."""
    engine = LateEngine()

    async def episode(index: int) -> Any:
        asked = VLLMStyleSampling(max_tokens=64)
        response = await executor.execute(f"What is {index % 10}?", "1", asked, 400, tokenizer, engine)
        return response["observation_tokens"], float(response["reward"])

    async with Ticker() as ticker:
        begun = time.perf_counter()
        made = await asyncio.gather(*(episode(index) for index in range(num)))
        wall_s = time.perf_counter() - begun
    return wall_s, ticker.worst_s, made


async def measure(work: Any, tokenizer: Any, num: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds and the worst lag of each variant."""
    as_theirs, plain = agent_class(work, plain=False), agent_class(work, plain=True)
    ways = {
        "OpenRLHF 0.11.2": MultiTurnAgentExecutor(as_theirs),
        "agentenv": AgentExecutor(plain),
        "agentenv, as it is": AgentExecutor(as_theirs),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    results: dict[str, list[Any]] = {}
    for _ in range(rounds):
        for name, executor in ways.items():
            wall_s, lag_s, results[name] = await time_round(executor, tokenizer, num)
            found[name].append((wall_s, lag_s))
    if any(made != results["agentenv"] for made in results.values()):
        raise SystemExit("the variants returned different tokens or rewards, so they did different work")
    return {
        name: (statistics.median(wall for wall, _ in values), max(lag for _, lag in values))
        for name, values in found.items()
    }


async def run(num: int, rounds: int) -> None:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_tokenizer(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        await measure(lambda: None, tokenizer, 2, 1)  # first calls fill caches
        print(
            f"{num} episodes of {NUM_TURNS} turns, {1000 * WORK_S:.0f} ms of work, {1000 * LATENCY_S:.0f} ms of engine"
        )
        print(f"a turn, {rounds} rounds; one episode alone needs {NUM_TURNS * (WORK_S + LATENCY_S):.2f} s; the lock")
        print(f"changes hands after {1000 * sys.getswitchinterval():g} ms\n")
        print("| step | run by | seconds | faster than OpenRLHF | worst loop lag, ms |\n|---|---|---:|---:|---:|")
        for work in (sleeps, computes):
            found = await measure(work, tokenizer, num, rounds)
            base = found["OpenRLHF 0.11.2"][0]
            for name, (wall_s, lag_s) in found.items():
                row = f"{wall_s:.2f} | {base / wall_s:.1f} × | {1000 * lag_s:.0f}"
                print(f"| {work.__name__} | {name} | {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--switch_ms", type=float, help="sys.setswitchinterval")
    parser.add_argument("--small", action="store_true", help="8 episodes, one round, as a smoke test")
    options = parser.parse_args()
    logging.getLogger("openrlhf").setLevel(logging.ERROR)
    if options.switch_ms:
        sys.setswitchinterval(options.switch_ms / 1000)
    print(machine(), end="\n\n", flush=True)
    asyncio.run(run(8 if options.small else options.episodes, 1 if options.small else options.rounds))


if __name__ == "__main__":
    main()
