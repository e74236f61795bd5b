"""An engine that samples in one way only: the learner scores every token as if it was drawn as the flags say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.agent import Engine
from agentenv.errors import ConfigError
from agentenv.types import Completion, SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p")


class OneSampling:
    """The engine of the episodes that are trained on; all but `generate` is the engine's own.

    Args:
        engine: what samples.
        sampling: temperature, top_p, top_k and min_p of every action; lengths, stops and seeds are free.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine, self._sampling = engine, sampling

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.agent.Engine`.

        Raises:
            ConfigError: an environment asks for another distribution than the one that is trained.
        """
        wrong = {name: getattr(sampling, name) for name in _NAMES if not self._agrees(sampling, name)}
        if wrong:
            name, value = next(iter(wrong.items()))
            expected = getattr(self._sampling, name)
            raise ConfigError(
                f"episode {request_id.rpartition('/')[0]}: expected actions that are sampled as they are trained, with "
                f"{name} {expected}, got {value} from the environment's sampling. Change only lengths and stops "
                f"there, with dataclasses.replace(states['sampling_params'], ...), or set --{name} {value}."
            )
        return await self._engine.generate(prompt_token_ids, sampling, request_id=request_id)

    def _agrees(self, sampling: SamplingParams, name: str) -> bool:
        asked, trained = getattr(sampling, name), getattr(self._sampling, name)
        if name == "top_k":  # 0 and -1 are one
            asked, trained = max(asked, 0), max(trained, 0)
        return bool(asked == trained)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
