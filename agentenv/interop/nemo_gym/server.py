"""An agent server for NeMo Gym: `POST /run` runs a row's episode in our loop and returns its verified response.

    async with GymServer(env_source("guess_number", {}), engine=engine, chat=Chat(tokenizer)) as server:
        print(server.url)

In NeMo Gym's configuration it is a server without an `entrypoint`, which Gym does not start itself. Rows name it by
their `agent_ref`: {my_agent: {responses_api_agents: {agentenv: {host: 127.0.0.1, port: 8700}}}}. NeMo RL and Gym's
rollouts call only `/run`. Gym's own agents call `/v1/responses`, `/seed_session` and `/verify` among themselves, and
its command line calls `/aggregate_metrics` afterwards (pass +disable_aggregation=true).

The engine is any that samples the policy after token ids. The HTTP server that NeMo RL opens over its policy is not
suitable: it takes messages (`/v1/chat/completions`, at 7ea279a) and no tokens. If the weights are also elsewhere, as in
an evaluation, a vLLM server works (`engines.vllm.http`).

An episode that failed is an HTTP error and never a reward of 0 (Gym #1606): 503 if infrastructure failed and 504 if it
timed out, which NeMo RL rolls out again; 422 if the row or the environment would fail again; 500 if the engine is set
up wrongly. The body says which: {"error": {"class": "infra", "type": …, "message": …, "where": …}}.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from agentenv._util.http.access import AccessPolicy, RequestRefused, closing_headers, read_json_body, retry_after_header
from agentenv._util.http.responses import json_response, until_disconnect
from agentenv._util.http.server import Server
from agentenv.chat.chat import Chat
from agentenv.core.arguments import whole_number
from agentenv.core.engine import Engine
from agentenv.core.types import Limits, SamplingParams, StopReason, own_limits
from agentenv.episode.runner import PlannedEpisode
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EpisodeSource
from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.interop.hosted import check_label, kind_of, problem_of, run_planned
from agentenv.interop.nemo_gym.responses import LABEL_KEYS, GymRun, read_run, run_answer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_BUSY_S = 2
"""Seconds after which a refused request may be sent again."""


@dataclass(frozen=True, slots=True)
class GymOptions:
    """The address, access rules and limits of a server."""

    access: AccessPolicy = field(default_factory=partial(AccessPolicy, without_token=("/", "/health")))
    """On other hosts than the loopback it wants a token, as http://x:TOKEN@HOST or a Bearer."""
    port: int = 0
    """0 means a free port."""
    model: str = "policy"
    """The model's name in responses."""
    reward_components: tuple[str, ...] = ()
    """Numbers of a step's `info` whose sums over the turns become `reward_components`, with a `rest`, so that the sum
    of all is the reward."""
    max_in_flight: int = 4096
    """Maximum number of concurrent episodes; another request is answered with 429."""
    max_retries: int = 1
    """How often an episode is run again if infrastructure failed."""
    max_body_bytes: int = 32 << 20
    grace_s: float = 10.0
    """Time for running episodes to end when the server stops."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, low in (("max_in_flight", 1), ("max_retries", 0), ("max_body_bytes", 1)):
            whole_number(f"GymOptions.{name}", getattr(self, name), low=low)


class GymServer(Server):
    """Serves the episodes of one source; `async with` starts and stops it. The caller owns the engine.

    Args:
        source: runs the episodes: `registry.env_source(…)`, or another EpisodeSource.
        engine: samples them; it must return log-probabilities.
        chat: the policy's tokenizer and template.
        sampling: defaults for rows.
        limits: limits of each episode; None: those of the environment's class, and the defaults.
        options: options of the server.

    Raises:
        ConfigError: `chat` renders histories again, which NeMo RL cannot use.
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
                f"GymServer.chat: expected the history keep, got {chat.options.history!r}: NeMo RL needs each "
                "prompt to extend the last. Remove the option."
            )
        self.options = options or GymOptions()
        super().__init__("nemo_gym", self.options.access, port=self.options.port, grace_s=self.options.grace_s)
        self.counts = {"done": 0, "failed": 0, "refused": 0}
        """Episodes with a reward, episodes without one, and refused requests."""
        self.in_flight = 0
        self._source, self._engine, self._chat = source, engine, chat
        self._sampling, self._limits = (
            sampling or SamplingParams(),
            limits or Limits(**own_limits(getattr(source, "cls", None))),
        )
        self._numbers = itertools.count()

    def _routes(self) -> list[Route]:
        from starlette.routing import Route

        routes = [Route("/", self._health), Route("/health", self._health)]
        return [*routes, Route("/run", self._run, methods=["POST"])]

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "in_flight": self.in_flight, **self.counts})

    async def _run(self, request: Request) -> Response:
        if self.in_flight >= self.options.max_in_flight:
            raise RequestRefused(
                f"run: expected fewer than {self.options.max_in_flight} episodes, got that many. Wait.", 429
            )
        self.in_flight += 1
        try:
            read = partial(read_run, sampling=self._sampling)
            run = await read_json_body(request, self.options.max_body_bytes, read)
            answer = await until_disconnect(request, self._answer(run), InfraError("run: the server is stopping"))
        finally:
            self.in_flight -= 1
        if answer is None:
            return await self._client_left(request)
        return answer

    async def _answer(self, run: GymRun) -> Response:
        """Return the row with its episode, or why the episode has no reward.

        Raises:
            InfraError, ContractError: NeMo RL's format cannot express the episode.
            DataError: the row has no label, and the environment needs one.
        """
        check_label(run.task, run.body, self._source, f"Its column is one of {', '.join(LABEL_KEYS)}.")
        setup = EpisodeSetup(engine=self._engine, chat=self._chat, sampling=run.sampling, limits=self._limits)
        planned = [PlannedEpisode(run.task, next(self._numbers))]
        (trajectory,) = await run_planned(self._source, setup, planned, max_retries=self.options.max_retries)
        reason = trajectory.stop_reason
        problem = problem_of(trajectory)
        if problem is not None:
            kind = kind_of(trajectory)
            status = 503 if kind == "infra" else 422
            if reason in (StopReason.STEP_TIMEOUT, StopReason.EPISODE_TIMEOUT):
                status = 504
            self.counts["failed"] += 1
            if (error := trajectory.error) is None:
                return _failure(kind, f"run: the episode ended with {reason}", status, type="", where="")
            return _failure(kind, problem, status, type=error.type, where=error.where)
        answer = await asyncio.to_thread(
            run_answer, run, trajectory, model=self.options.model, components=self.options.reward_components
        )
        self.counts["done"] += 1
        return json_response(answer)

    async def _failed(self, request: Request, error: Any) -> Response:
        if isinstance(error, RequestRefused):
            self.counts["refused"] += 1
            headers = retry_after_header(_BUSY_S) if error.status == 429 else {}
            headers |= closing_headers(request, error, self.options.max_body_bytes)
            return _failure("data", str(error), error.status, type="RequestRefused", headers=headers)
        self.counts["failed"] += 1
        classes = {InfraError: ("infra", 503), ContractError: ("contract", 422), DataError: ("data", 422)}
        kind, status = next((each for cls, each in classes.items() if isinstance(error, cls)), ("config", 500))
        return _failure(kind, str(error), status, type=type(error).__name__)

    def _error_body(self, text: str, kind: str) -> Any:
        return {"error": {"class": kind, "message": text}}

    async def _http_error(self, request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: expected POST /run, GET /health or GET /, got another."
        return _failure("data", message, error.status_code, type="HTTPException")


def _failure(kind: str, message: str, status: int, *, headers: Any = None, **facts: str) -> Response:
    return json_response({"error": {"class": kind, "message": message[:2000], **facts}}, status, headers=headers)
