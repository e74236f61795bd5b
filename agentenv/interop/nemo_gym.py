"""An agent server of NeMo Gym's: `POST /run` takes a row, runs its episode in our loop, gives its verified response.

    async with GymServer(env_source("guess_number", {}), engine=engine, chat=Chat(tokenizer)) as server:
        print(server.url)

In NeMo Gym's configuration it is a server without an `entrypoint`, which Gym does not start itself, and rows name it by
their `agent_ref`: {my_agent: {responses_api_agents: {agentenv: {host: 127.0.0.1, port: 8700}}}}. NeMo RL and Gym's
rollouts call `/run` alone; `/v1/responses`, `/seed_session` and `/verify` are what Gym's own agents call among
themselves, and `/aggregate_metrics` what its command line asks afterwards (pass +disable_aggregation=true).

The engine is any that samples the policy after token ids. The HTTP server that NeMo RL opens over its policy is none:
it takes messages (`/v1/chat/completions`, at 7ea279a) and no tokens. Where the weights are elsewhere too, as in an
evaluation, a vLLM server is one (`engines.vllm_http`).

An episode that failed is an HTTP error and never a reward of 0 (Gym #1606): 503 where infrastructure failed and 504
where it took too long, which NeMo RL rolls out again; 422 where the row or the environment would fail again; 500 where
the engine is set up wrongly. The body says which: {"error": {"class": "infra", "type": …, "message": …, "where": …}}.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentenv.agent import Engine
from agentenv.chat import Chat
from agentenv.errors import AgentEnvError, ConfigError, ContractError, DataError, InfraError
from agentenv.http_serving import json_response, unless_gone
from agentenv.http_serving.doors import Doors, Refused, cut_off, read_json, retry_after
from agentenv.http_serving.server import Server
from agentenv.interop._nemo_responses import RunRequest, read_run, run_answer
from agentenv.loading import EpisodeSource
from agentenv.rewards._arguments import whole_number
from agentenv.runner import EpisodeRunner, ErrorPolicy, PlannedEpisode
from agentenv.trajectory import Trajectory
from agentenv.types import Limits, SamplingParams, StopReason

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_BUSY_S = 2
"""After which a request that there was no room for may come again."""


def _open_doors() -> Doors:
    return Doors(without_token=("/", "/health"))


@dataclass(frozen=True, slots=True)
class GymOptions:
    """Where a server listens, who may ask, and what it does."""

    doors: Doors = field(default_factory=_open_doors)
    """On other hosts than the loopback it wants a token, as http://x:TOKEN@HOST or a Bearer."""
    port: int = 0
    """0: a free one."""
    model: str = "policy"
    """The name that responses give of the model."""
    reward_components: tuple[str, ...] = ()
    """Numbers of a step's `info` whose sums over the turns become `reward_components`, with a `rest` so that all of
    them sum to the reward."""
    max_in_flight: int = 4096
    """Episodes at a time; one more is answered 429."""
    max_retries: int = 1
    """How often an episode is run again here where infrastructure failed it."""
    max_body_bytes: int = 32 << 20
    grace_s: float = 10.0
    """For the episodes that run, when the server is stopped."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        for name, low in (("max_in_flight", 1), ("max_retries", 0), ("max_body_bytes", 1)):
            whole_number(f"GymOptions.{name}", getattr(self, name), low=low)


class EpisodeFailed(AgentEnvError):
    """An episode without a reward, as an HTTP status and a class."""

    def __init__(self, message: str, *, kind: str, type: str = "", where: str = "", status: int = 422) -> None:
        super().__init__(message)
        self.kind, self.type, self.where, self.status = kind, type, where, status


class GymServer(Server):
    """Serves the episodes of one source; `async with` starts and stops it. The engine stays its owner's.

    Args:
        source: what runs episodes: `loading.env_source(…)`, or the like.
        engine: what samples them; it gives log-probabilities.
        chat: the policy's tokenizer and template.
        sampling: where a row says nothing of it.
        limits: of each episode.
        options: of the server.

    Raises:
        ConfigError: `chat` renders histories anew, which NeMo RL cannot take.
    """

    def __init__(
        self,
        source: EpisodeSource,
        *,
        engine: Engine,
        chat: Chat,
        sampling: SamplingParams | None = None,
        limits: Limits | None = None,
        options: GymOptions | None = None,
    ) -> None:
        if chat.options.history != "keep":
            raise ConfigError(
                f"GymServer.chat: expected the history keep, got {chat.options.history!r}: NeMo RL wants each "
                "prompt to extend the last. Leave it out."
            )
        self.options = options or GymOptions()
        super().__init__("nemo_gym", self.options.doors, port=self.options.port, grace_s=self.options.grace_s)
        self.counts = {"done": 0, "failed": 0, "refused": 0}
        """Episodes that have a reward, those without, and requests that were no row or came too many."""
        self.in_flight = 0
        self._source, self._engine, self._chat = source, engine, chat
        self._sampling, self._limits = sampling or SamplingParams(), limits or Limits()
        self._numbers = itertools.count()

    def _routes(self) -> list[Route]:
        from starlette.routing import Route

        routes = [Route("/", self._health), Route("/health", self._health)]
        return [*routes, Route("/run", self._run, methods=["POST"])]

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "in_flight": self.in_flight, **self.counts})

    async def _run(self, request: Request) -> Response:
        if self.in_flight >= self.options.max_in_flight:
            raise Refused(f"run: expected fewer than {self.options.max_in_flight} episodes, got as many. Wait.", 429)
        self.in_flight += 1
        try:
            asked = read_run(await read_json(request, self.options.max_body_bytes), self._sampling)
            answer = await unless_gone(request, self._answer(asked), InfraError("run: the server is being stopped"))
        finally:
            self.in_flight -= 1
        if answer is None:
            return await self._gone(request)
        self.counts["done"] += 1
        return json_response(answer)

    async def _answer(self, asked: RunRequest) -> dict[str, Any]:
        """The row with its episode.

        Raises:
            EpisodeFailed: the episode has no reward.
            InfraError, ContractError: it cannot be told in NeMo RL's terms.
        """
        runner = EpisodeRunner(
            self._source, engine=self._engine, chat=self._chat, sampling=asked.sampling, limits=self._limits,
            policy=ErrorPolicy(max_retries=self.options.max_retries, max_error_share=1.0),
        )  # fmt: skip
        ended: list[Trajectory] = []
        await runner.run_one(PlannedEpisode(asked.task, next(self._numbers)), ended.append)
        (trajectory,) = ended
        _check(trajectory)
        return await asyncio.to_thread(
            run_answer, asked, trajectory, model=self.options.model, components=self.options.reward_components
        )

    async def _failed(self, request: Request, error: Any) -> Response:
        if isinstance(error, EpisodeFailed):
            self.counts["failed"] += 1
            return _failure(error.kind, str(error), error.status, type=error.type, where=error.where)
        if isinstance(error, Refused):
            self.counts["refused"] += 1
            headers = retry_after(_BUSY_S) if error.status == 429 else {}
            headers |= cut_off(request, error, self.options.max_body_bytes)
            return _failure("data", str(error), error.status, type="Refused", headers=headers)
        self.counts["failed"] += 1
        kinds = {InfraError: ("infra", 503), ContractError: ("contract", 422), DataError: ("data", 422)}
        kind, status = next((told for cls, told in kinds.items() if isinstance(error, cls)), ("config", 500))
        return _failure(kind, str(error), status, type=type(error).__name__)

    def _told(self, text: str, kind: str) -> Any:
        return {"error": {"class": kind, "message": text}}

    async def _http_error(self, request: Request, error: Any) -> Response:
        told = f"{request.method} {request.url.path}: expected POST /run, GET /health or GET /, got another."
        return _failure("data", told, error.status_code, type="HTTPException")


def _check(trajectory: Trajectory) -> None:
    """Refuse an episode without a reward, by whose failure it is."""
    if trajectory.reward is not None:
        return
    error, reason = trajectory.error, trajectory.stop_reason
    kind = "infra" if error is None or reason in (StopReason.ABORTED, StopReason.STEP_TIMEOUT) else error.kind
    told = f"run: the episode ended with {reason}" if error is None else f"{error.where}: {error.type}: {error.message}"
    status = 504 if reason in (StopReason.STEP_TIMEOUT, StopReason.EPISODE_TIMEOUT) else 503 if kind == "infra" else 422
    raise EpisodeFailed(
        told, kind=kind, type="" if error is None else error.type, where="" if error is None else error.where,
        status=status,
    )  # fmt: skip


def _failure(kind: str, message: str, status: int, *, headers: Any = None, **facts: str) -> Response:
    return json_response({"error": {"class": kind, "message": message[:2000], **facts}}, status, headers=headers)
