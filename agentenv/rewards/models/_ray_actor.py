"""One replica of a reward model in a Ray actor: this process's side, and the actor's."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv import __version__
from agentenv.cluster import answer_of, check_node, death_said, hear_of_children, without_package
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.ray_import import import_ray
from agentenv.rewards.models._home import Died
from agentenv.rewards.models._replicas import Outcome, Replica
from agentenv.rewards.models.types import Scored, Scorer

_MAX_CALLS = 10_000
"""Calls that an actor takes at once."""
_START_LIMIT_S, _CLOSE_TIMEOUT_S = 3600.0, 20.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What an actor makes its scorer of; travels to it."""

    backend: str
    model: str
    args: Mapping[str, Any]

    def scorer(self) -> Scorer:
        """The scorer, with nothing loaded.

        Raises:
            ConfigError: it takes no such arguments.
        """
        cls: Any
        if self.backend == "hf":
            from agentenv.rewards.models.hf import HFScorer as cls
        else:
            from agentenv.rewards.models.vllm_local import VLLMScorer as cls
        taken = list(inspect.signature(cls).parameters)[1:]
        wrong = [name for name in self.args if name not in taken]
        if wrong:
            raise ConfigError(
                f"RayScorer: expected arguments of its own or of {cls.__name__} ({', '.join(taken)}), got {wrong[0]!r}."
            )
        scorer: Scorer = cls(self.model, **self.args)
        return scorer


class RayReplica(Replica):
    """A scorer in a Ray actor. Ray must be running.

    Args:
        spec: what the actor makes its scorer of.
        options: of the actor: `num_cpus`, `num_gpus`, `scheduling_strategy` …
    """

    def __init__(self, spec: ReplicaSpec, options: Mapping[str, Any]) -> None:
        self._spec, self._options = spec, dict(options)
        self._actor: Any = None
        self.pid = 0
        """Of the actor's process, on its machine."""

    async def start(self) -> None:
        """Place the actor and load the model in it."""
        # Ray's own restarts would bring an actor back without its model; the pool makes a whole new one.
        options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _MAX_CALLS, **self._options}
        try:
            self._actor = import_ray().remote(ReplicaActor).options(**options).remote(self._spec)
        except ValueError as error:
            raise ConfigError(f"RayScorer.placement: expected bundles that hold a replica, got {error}") from error
        try:
            self.pid, version = await asyncio.wait_for(self._ask("start"), _START_LIMIT_S)
        except TimeoutError as error:
            raise InfraError(
                f"RayScorer: expected a replica to start within {_START_LIMIT_S:g} s, got none. See whether the "
                "placement group has room for all of them."
            ) from error
        check_node("RayScorer", version)

    async def score(self, pickled: Sequence[bytes]) -> Sequence[Outcome]:
        """See Replica."""
        outcomes: Sequence[Outcome] = await self._ask("score", list(pickled))
        return outcomes

    async def close(self) -> None:
        """See Replica; it has a while to end what it started."""
        with contextlib.suppress(AgentEnvError, TimeoutError):
            await asyncio.wait_for(self._ask("close"), _CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """See Replica."""
        ray, actor, self._actor = import_ray(), self._actor, None
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
                ray.kill(actor)

    async def _ask(self, method: str, *args: Any) -> Any:
        """A method of the actor, with Ray's errors as ours."""
        ray = import_ray()
        if self._actor is None:
            raise Died("RayScorer: expected a living replica, got one that was ended.")
        try:
            return await answer_of(getattr(self._actor, method).remote(*args))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AgentEnvError):
                raise error.cause from None
            raise InfraError(
                f"RayScorer.{method}: expected an answer, got {type(error.cause).__name__}: {error.cause}. Retry."
            ) from error
        except ray.exceptions.TaskCancelledError as error:
            raise InfraError(f"RayScorer.{method}: expected an answer, got a call that was cancelled.") from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            absent = without_package("RayScorer", error)
            raise absent or Died(f"RayScorer.{method}: expected a living actor, got {death_said(error)}") from error


class ReplicaActor:
    """The actor's side: a scorer, on one event loop."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._scorer: Any = None

    async def start(self) -> tuple[int, str]:
        """Load the model; process id, and the version of agentenv."""
        hear_of_children()
        self._scorer = self._spec.scorer()
        await self._scorer.load()
        return os.getpid(), __version__

    async def score(self, pickled: Sequence[bytes]) -> list[Outcome]:
        """The score or the error of each conversation."""
        outcomes = await asyncio.gather(*map(self._one, pickled), return_exceptions=True)
        return [_outcome(outcome) for outcome in outcomes]

    async def _one(self, pickled: bytes) -> Scored:
        scored: Scored = await self._scorer.score(pickle.loads(pickled))
        return scored

    async def close(self) -> None:
        """End what the scorer holds; the process is ended by the caller."""
        if self._scorer is not None:
            await self._scorer.close()


def _outcome(outcome: Scored | BaseException) -> Outcome:
    """In a form that crosses: causes and notes stay behind."""
    if isinstance(outcome, Scored):
        return outcome
    if isinstance(outcome, AgentEnvError):
        return type(outcome)(str(outcome))
    return InfraError(f"RayScorer: expected a score, got {type(outcome).__name__}: {outcome}"[:500])
