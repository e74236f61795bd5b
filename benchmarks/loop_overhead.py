"""Microseconds per turn of our loop and OpenRLHF 0.11.2's, with an engine that answers at once, in one process.

    python benchmarks/loop_overhead.py

Both are called as OpenRLHF calls them (`AgentExecutor.execute` with its `llm_engine`, vLLM's SamplingParams, one
log-probability beside the sampled one), on the same actions and the same environment, whose feedback is another text at
every turn. Two engines:

- `detokenizing`: does with the text what vLLM's AsyncLLM does in the process in which OpenRLHF's loop runs, with vLLM's
  own detokenizer, token by token, unless the sampling parameters say `detokenize=False`. OpenRLHF reads the engine's
  text; agentenv decodes the ids itself, once, and tells the engine not to.
- `text for nothing`: the text and all other results are precomputed. Only the loop is measured; OpenRLHF's loop then
  gets the text at no cost, while ours decodes it.

`lag` is an event loop's worst and total delay while 64 episodes run on it. The loops alternate; results are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from common import Ticker, find_openrlhf, machine
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from agentenv.engines.models import resolve_model
from agentenv.interop.openrlhf import AgentExecutor

find_openrlhf()
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor  # noqa: E402 - after the path is set

TURNS, TOKENS, NUM_LIVE = (1, 8, 32, 256), (200, 1_000), 64
ASKED = SamplingParams(max_tokens=None, min_tokens=1, skip_special_tokens=False, logprobs=1)


class InstantEngine:
    """OpenRLHF's `llm_engine`; it returns the same action at once."""

    def __init__(self, tokenizer: Any, num_tokens: int, *, detokenizes: bool) -> None:
        self.tokenizer, self.detokenizes = tokenizer, detokenizes
        letters = [i for i in range(len(tokenizer)) if len(tokenizer.decode([i])) == 1][:50]
        self.ids = [*itertools.islice(itertools.cycle(letters), num_tokens - 1), tokenizer.eos_token_id]
        self.text = tokenizer.decode(self.ids[:-1])
        self.logprobs = [{i: Logprob(-0.5, 1, None), letters[0]: Logprob(-1.0, 2, None)} for i in self.ids]

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        if self.detokenizes and sampling_params.detokenize:
            self.detokenize(prompt_token_ids, sampling_params)
        await asyncio.sleep(0)  # let other episodes run, as any engine does
        output = SimpleNamespace(
            token_ids=self.ids, text=self.text, logprobs=self.logprobs, finish_reason="stop", stop_reason=None
        )
        return SimpleNamespace(outputs=[output])

    def detokenize(self, prompt: Any, asked: Any) -> None:
        """Do the work of vLLM's OutputProcessor on the ids of each engine step."""
        request = SimpleNamespace(request_id="", sampling_params=asked, prompt_token_ids=prompt, prompt_embeds=None)
        detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        for token_id, found in zip(self.ids, self.logprobs, strict=True):
            detokenizer.update([token_id], False)
            convert_ids_list_to_tokens(self.tokenizer, list(found))


class Scalar(float):
    """A reward as OpenRLHF requires it: with `.item()`."""

    def item(self) -> float:
        return float(self)


def agent_class(num_turns: int) -> type:
    """Return an environment that reads the action and answers at once."""

    class Agent(AgentInstanceBase):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.turn = 0

        async def step(self, states: Any, **kwargs: Any) -> dict[str, Any]:
            self.turn += 1
            reward = Scalar(states["action_text"].count("1") / 1000)
            feedback = f"\n\nThat was try {self.turn}. Try again.\n\nAssistant: "
            return {"rewards": reward, "environment_feedback": feedback, "done": self.turn == num_turns}

    return Agent


def episode_of(executor: Any, engine: InstantEngine, num_turns: int) -> Callable[[], Awaitable[Any]]:
    """Return a function that runs one episode."""
    room = (num_turns + 1) * (len(engine.ids) + 64)

    async def episode() -> Any:
        return await executor.execute("What is 12 + 34?", "46", copy.copy(ASKED), room, engine.tokenizer, engine)

    return episode


def actions(response: Any) -> list[int]:
    """Return the sampled ids of an episode."""
    ids = response["observation_tokens"]
    return [i for start, end in response["action_ranges"] for i in ids[start:end]]


async def time_turns(episode: Callable[[], Awaitable[Any]], num_turns: int, num_episodes: int) -> float:
    """Return the microseconds per turn, with sequential episodes."""
    gc.collect()
    started = time.perf_counter()
    for _ in range(num_episodes):
        await episode()
    return 1e6 * (time.perf_counter() - started) / num_episodes / num_turns


async def measure(engine: InstantEngine, num_turns: int, rounds: int, num_turns_a_round: int) -> dict[str, float]:
    """Return the median microseconds per turn of each loop."""
    cls = agent_class(num_turns)
    ways = {
        name: episode_of(executor, engine, num_turns)
        for name, executor in {"OpenRLHF": MultiTurnAgentExecutor(cls), "agentenv": AgentExecutor(cls)}.items()
    }
    made = {name: await episode() for name, episode in ways.items()}  # first calls fill caches
    if any(actions(response) != engine.ids * num_turns for response in made.values()):
        raise SystemExit("a loop recorded other actions than the engine returned, so the loops did different work")
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, episode in ways.items():
            spent[name].append(await time_turns(episode, num_turns, max(1, num_turns_a_round // num_turns)))
    return {name: statistics.median(values) for name, values in spent.items()}


async def measure_lag(engine: InstantEngine, num_turns: int) -> dict[str, tuple[float, float, float]]:
    """Return the seconds, worst lag and late share of the time of each loop, with 64 live episodes."""
    cls, found = agent_class(num_turns), {}
    for name, executor in {"OpenRLHF": MultiTurnAgentExecutor(cls), "agentenv": AgentExecutor(cls)}.items():
        episode = episode_of(executor, engine, num_turns)
        await episode()
        async with Ticker() as ticker:
            started = time.perf_counter()
            await asyncio.gather(*(episode() for _ in range(NUM_LIVE)))
            wall_s = time.perf_counter() - started
        found[name] = wall_s, ticker.worst_s, ticker.late_s / wall_s
    return found


async def run(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-math"))
    print("| engine | turns × tokens | OpenRLHF, µs | agentenv, µs | OpenRLHF / agentenv |\n|---|---|---:|---:|---:|")
    for detokenizes, num_tokens, num_turns in itertools.product((True, False), TOKENS, options.turns):
        engine = InstantEngine(tokenizer, num_tokens, detokenizes=detokenizes)
        few = max(1, options.turns_a_round // 8) if detokenizes else options.turns_a_round
        found = await measure(engine, num_turns, options.rounds, few)
        theirs, ours = found["OpenRLHF"], found["agentenv"]
        kind = "detokenizing" if detokenizes else "text for nothing"
        print(
            f"| {kind} | {num_turns} × {num_tokens:,} | {theirs:,.0f} | {ours:,.0f} | {theirs / ours:.2f} |", flush=True
        )
    print(f"\n{NUM_LIVE} episodes of 8 turns of 1,000 tokens on one event loop:\n")
    print("| engine | loop of | seconds | worst lag, ms | late, share of the time |\n|---|---|---:|---:|---:|")
    for detokenizes in (True, False):
        engine = InstantEngine(tokenizer, 1_000, detokenizes=detokenizes)
        for name, (wall_s, worst_s, late) in (await measure_lag(engine, 8)).items():
            kind = "detokenizing" if detokenizes else "text for nothing"
            print(f"| {kind} | {name} | {wall_s:.2f} | {1000 * worst_s:.1f} | {late:.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns_a_round", type=int, default=512, help="with the detokenizing engine an eighth of it")
    parser.add_argument("--small", action="store_true", help="two rounds of few turns, as a smoke test")
    options = parser.parse_args()
    if options.small:
        options.turns, options.rounds, options.turns_a_round = (1, 8), 2, 16
    print(machine() + "\n")
    sys.stdout.flush()
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
