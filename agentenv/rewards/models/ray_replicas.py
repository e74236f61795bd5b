"""RayScorer: replicas of a reward model in Ray actors, beside the policy on its GPUs or on their own.

Example:
    >>> scorer = RayScorer("my-rm", num_replicas=2, num_gpus=0.2, max_length=4096)
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

from agentenv.cluster import ClusterConfig, Need, Placement, ray_session, reserve
from agentenv.errors import ConfigError
from agentenv.ray_import import import_ray
from agentenv.rewards._arguments import number, one_of, whole_number
from agentenv.rewards.models._counting import closed_error
from agentenv.rewards.models._home import HomeScorer
from agentenv.rewards.models._ray_actor import RayReplica, ReplicaSpec
from agentenv.rewards.models._replicas import ReplicaPool
from agentenv.rewards.models.types import Conversation, Scored

BACKENDS = ("hf", "vllm")
_SHARE_OF_A_GPU = 0.9
"""Of its part of a GPU's memory, that vLLM takes."""


class RayScorer(HomeScorer):
    """Scores conversations in Ray actors; implements `agentenv.rewards.models.types.Scorer`.

    Args:
        model: a folder, which every node has, or a Hugging Face id.
        num_replicas: actors, each with the whole model; the one with the fewest conversations in flight is asked.
        backend: `hf` for HFScorer in each of them, `vllm` for VLLMScorer.
        num_gpus: of each; a part of one (0.2) shares it with other actors that ask for a part. None: as many as it
            computes on where the cluster has any, else 0. On a part, vLLM takes nine tenths of that part's memory,
            unless `options` says otherwise.
        num_cpus: CPU cores of each.
        placement: Ray's strategy, or a placement group whose bundles the replicas take in turn: the policy's, to be
            beside it.
        max_restarts: replicas that take the place of dead ones within an hour.
        timeout_s: longest wait for a score. A replica that answers nothing for so long is replaced.
        scorer: arguments of the backend's scorer: `max_length`, `overflow`, `max_batch`, `dtype`, `label`, `options`,
            and `device` of HFScorer.

    Uses the Ray that this process is connected to, or the one at RAY_ADDRESS, or starts one, which it ends. All that is
    asked travels at once, a few conversations in each call, and the replica forms its batches of all that reach it.
    Whom a dead replica leaves waiting, another one scores; see ReplicaPool. Any event loop may ask.

    `num_scored`, `num_failed`, `num_truncated`, `num_retried` and `num_restarts` count conversations and replicas.
    """

    counts = (*HomeScorer.counts, "num_retried", "num_restarts")

    def __init__(
        self,
        model: str | Path,
        *,
        num_replicas: int = 1,
        backend: str = "hf",
        num_gpus: float | None = None,
        num_cpus: float = 1.0,
        placement: Placement | Any = "PACK",
        max_restarts: int = 8,
        timeout_s: float = 600.0,
        **scorer: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"RayScorer: expected a folder or a name, got {type(model).__name__}. Save the model.")
        super().__init__("RayScorer", "agentenv-ray-rm")
        there = Path(model).expanduser()
        path = str(there.resolve()) if there.exists() else str(model)
        self._spec = ReplicaSpec(
            one_of("RayScorer.backend", backend, BACKENDS), path, _shared(num_gpus, backend, scorer)
        )
        self._spec.scorer()  # refuses wrong arguments
        self._num = whole_number("RayScorer.num_replicas", num_replicas, low=1)
        self._gpus = None if num_gpus is None else number("RayScorer.num_gpus", num_gpus, low=0.0)
        self._cpus = number("RayScorer.num_cpus", num_cpus, low=0.0)
        self._placement = placement
        if not hasattr(placement, "bundle_specs"):
            one_of("RayScorer.placement", placement, get_args(Placement))
        self._max_restarts = whole_number("RayScorer.max_restarts", max_restarts)
        self._timeout_s = number("RayScorer.timeout_s", timeout_s, low=1e-3)
        self._pool: ReplicaPool | None = None  # this and the next are the home's
        self._held = AsyncExitStack()

    @property
    def patience_s(self) -> float:
        """Longest that a score may take, where no replica dies."""
        return self._timeout_s

    @property
    def num_retried(self) -> int:
        """Times that a conversation was asked about again, since its replica had died."""
        return 0 if self._pool is None else self._pool.num_retried

    @property
    def num_restarts(self) -> int:
        """Replicas that took the place of dead ones."""
        return 0 if self._pool is None else self._pool.num_restarts

    async def load(self) -> None:
        """Start the actors and load the model in them, if that is not done; no time of an agent's step goes by.

        Raises:
            ConfigError: the cluster has no room for them, or what a replica's scorer refuses.
            InfraError: a replica did not start, none is left, or the scorer was closed.
            MissingDependency: Ray is not installed, here or on a node.
        """
        await self._started()

    # --- at home ------------------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> bool:
        return self._pool is not None and bool(self._pool.alive)

    async def _start(self) -> None:
        if self._pool is not None:
            await self._pool.ready()
            return
        try:
            options = await self._places()
            pool = ReplicaPool(
                lambda index: RayReplica(self._spec, options[index]),
                self._num,
                max_restarts=self._max_restarts,
                timeout_s=self._timeout_s,
            )
            await pool.start()
        except BaseException:
            await self._held.aclose()
            raise
        self._pool = pool

    async def _places(self) -> list[dict[str, Any]]:
        """Ray's options of each actor, with room for it; Ray runs afterwards."""
        config = ClusterConfig(cpus=self._num * self._cpus)
        if isinstance(self._placement, str):
            config = ClusterConfig(cpus=config.cpus, placement=self._placement)  # type: ignore[arg-type]
        self._held.enter_context(ray_session(config))
        gpus = self._needed_gpus()
        if isinstance(self._placement, str):
            need = Need("RayScorer.num_replicas, num_cpus, num_gpus", self._num, self._cpus, gpus)
            return await self._held.enter_async_context(reserve(need, config))
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return [
            {
                "num_cpus": self._cpus,
                "num_gpus": gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self._placement, index % self._placement.bundle_count
                ),
            }
            for index in range(self._num)
        ]

    def _needed_gpus(self) -> float:
        if self._gpus is not None:
            return self._gpus
        if self._spec.args.get("device") == "cpu" or not import_ray().cluster_resources().get("GPU", 0.0):
            return 0.0
        options = self._spec.args.get("options")
        size = options.get("tensor_parallel_size", 1) if isinstance(options, Mapping) else None
        return float(getattr(options, "tensor_parallel_size", 1) if size is None else size)

    async def _scored(self, conversation: Conversation) -> Scored:
        if self._pool is None:
            raise closed_error("RayScorer")
        return await self._pool.score(conversation)

    async def _end(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await self._held.aclose()


def _shared(num_gpus: float | None, backend: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """A scorer's arguments, with vLLM kept to its part of a GPU."""
    options = args.get("options") or {}
    if backend != "vllm" or not num_gpus or num_gpus >= 1 or not isinstance(options, Mapping):
        return dict(args)
    return {**args, "options": {"gpu_memory_utilization": _SHARE_OF_A_GPU * num_gpus, **options}}
