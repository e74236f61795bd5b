"""What goes between the event loops and the worker thread of HFEngine: requests there, outcomes back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentenv.types import Completion, SamplingParams

if TYPE_CHECKING:
    from agentenv.engines._sampling import StopStrings


@dataclass(slots=True, eq=False)
class Request:
    """One generation on its way; its slot is its place in the running batch."""

    token_ids: list[int]
    """The prompt, then what was sampled."""
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    episode: str
    """The key of its prefix; empty when the request names no turn."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    rng: random.Random
    stop_strings: StopStrings | None
    num_prompt: int
    num_computed: int = 0
    """Tokens whose keys and values are in the slot."""
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    cancelled: bool = False


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call `function(*args)` on a loop, from another thread."""
    # A loop that was closed meanwhile has nobody left who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def settle(outcomes: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    """Give futures of the running loop their results and exceptions; those that were cancelled stay so."""
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
