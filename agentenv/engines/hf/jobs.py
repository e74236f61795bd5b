"""Requests and outcomes between event loops and the worker thread of HFEngine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentenv.core.types import Completion, SamplingParams

if TYPE_CHECKING:
    from agentenv.engines.constraints import GrammarWalk
    from agentenv.engines.hf.sampling import StopStrings


@dataclass(slots=True, eq=False)
class GenerationJob:
    """A generation in progress. Its slot is its index in the running batch."""

    token_ids: list[int]
    """The prompt and the sampled tokens."""
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    episode: str
    """Key of its cached prefix; empty if the request id has no turn."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    rng: random.Random
    stop_strings: StopStrings | None
    walk: GrammarWalk | None
    num_prompt: int
    num_computed: int = 0
    """Number of tokens whose keys and values are in the slot."""
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    cancelled: bool = False


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call `function(*args)` on a loop from another thread; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def settle(outcomes: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set results and exceptions of futures on the running loop, except cancelled ones."""
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
