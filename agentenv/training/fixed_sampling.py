"""An engine that samples from one distribution only, because the learner scores tokens as the flags describe it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from agentenv.core.engine import Engine
from agentenv.core.types import Completion, SamplingParams
from agentenv.errors import ConfigError

_FIXED = ("temperature", "top_p", "top_k", "min_p")


class FixedSamplingEngine(Engine):
    """The engine of training episodes. It refuses sampling parameters that the learner does not know about.

    Forwards `generate`, `score`, `update_weights`, `sleep` and `wake_up`.

    Args:
        engine: the engine to forward to.
        sampling: temperature, top_p, top_k and min_p of every action. Lengths, stops and seeds may vary.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling

    @property
    def constraint_problem(self) -> str:
        """See `Engine`."""
        return self._engine.constraint_problem

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`.

        Raises:
            ConfigError: an environment asks for another distribution than the one that is trained.
        """
        for name in _FIXED:
            value, expected = getattr(sampling, name), getattr(self._sampling, name)
            if name == "top_k":  # 0 and -1 mean the same
                value, expected = max(value, 0), max(expected, 0)
            if value != expected:
                raise ConfigError(
                    f"episode {request_id.rpartition('/')[0]}: expected actions that are sampled as they are trained, "
                    f"with {name} {expected}, got {value} from the environment's sampling. Change only lengths and "
                    f"stops there, with dataclasses.replace(states['sampling_params'], ...), or set --{name} {value}."
                )
        return await self._engine.generate(prompt_token_ids, sampling, request_id=request_id)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token; see `Engine`."""
        return await self._engine.score(token_ids)

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Load new weights."""
        await self._engine.update_weights(named_tensors, policy_version)

    async def sleep(self) -> None:
        """Free the GPU; ConfigError if the engine cannot."""
        await self._engine.sleep()

    async def wake_up(self) -> None:
        """Take the GPU back."""
        await self._engine.wake_up()
