"""A reward model over HTTP in OpenRLHF's form: `--reward.remote_url http://HOST:5000/get_reward`, and ours.

    async with RewardServer(scorer, ServeOptions()) as server:
        await server.load()
        print(server.url)

Routes: `POST /get_reward` (see `serve_wire.py`), `GET /health`, 503 until the model is loaded, `/metrics` for
Prometheus, and `/`, what is served. Conversations of all requests are scored together: the scorer forms the batches.
One that cannot be scored makes the whole request 422, which names it; a model that fails makes it 503. No number is
ever made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from agentenv import __version__
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.http_serving import json_response, unless_gone
from agentenv.http_serving.doors import App, Doors, Refused, Scope, cut_off, read_json, retry_after
from agentenv.http_serving.server import Server
from agentenv.rewards.models.types import Conversation, Scored, Scorer
from agentenv.rewards.types import is_finite
from agentenv.rm.serve_metrics import MEDIA_TYPE, Meters
from agentenv.rm.serve_wire import Shaping, answer, read_request

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_ROUTES = ("/get_reward", "/health", "/metrics", "/")
_MAX_NAMED = 20
"""Items that an error names."""
_AFTER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where a server listens, who may ask, and what it gives."""

    doors: Doors = field(default_factory=lambda: Doors(without_token=("/health",)))
    port: int = 0
    """0: a free one."""
    model: str = ""
    """Its name, for `/`."""
    shaping: Shaping = field(default_factory=Shaping)
    max_waiting: int = 4096
    """Conversations without an answer; a request that would make them more is answered 429."""
    max_items: int = 1024
    """Conversations of one request; more are answered 413."""
    max_body_bytes: int = 8 << 20
    timeout_s: float = 170.0
    """For an answer; then it is 503. OpenRLHF's client waits 180 s."""
    header_s: float = 10.0
    """For the head of a request to arrive."""
    grace_s: float = 30.0
    """For what is being scored, when the server is stopped."""

    def __post_init__(self) -> None:
        if not 0 < self.max_items <= self.max_waiting:
            raise ConfigError(
                f"--max_items: expected 1 to --max_waiting ({self.max_waiting}), got {self.max_items}. Change one."
            )


class Unscored(Refused):
    """Conversations of a request have no score: 422 where that lies in them, 503 where the model failed."""

    def __init__(self, message: str, status: int = 422, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message, status)
        self.errors = errors
        """Index and error of each, the first of them."""

    @classmethod
    def of(cls, form: str, errors: Sequence[tuple[int, AgentEnvError]], num: int) -> Self:
        """For these errors of `num` conversations; what lies in them is said before what may pass."""
        named = [(index, error) for index, error in errors if isinstance(error, DataError)]
        told = [{"index": index, "error": str(error)} for index, error in (named or errors)[:_MAX_NAMED]]
        said = f"{form}[{told[0]['index']}]: {told[0]['error']} ({len(errors)} of {num} have no score.)"
        return cls(said, 422 if named else 503, told)


class RewardServer(Server):
    """A server of one scorer, which stays its owner's; `async with` starts and stops it."""

    def __init__(self, scorer: Scorer, options: ServeOptions | None = None) -> None:
        self.options = options or ServeOptions()
        super().__init__(
            "rm serve", self.options.doors, port=self.options.port, grace_s=_AFTER_GRACE_S,
            header_s=self.options.header_s,
        )  # fmt: skip
        self.waiting = 0
        """Conversations without an answer, and requests that are being read."""
        self.meters = Meters()
        self.loaded = not hasattr(scorer, "load")
        self._scorer = scorer
        self._work: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_s = 1.0

    # --- starting and stopping ----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Load the model, where the scorer does that apart; from then on `/health` is 200.

        Raises:
            AgentEnvError: what the scorer raised.
        """
        if not self.loaded:
            await self._scorer.load()  # type: ignore[attr-defined]  # see `loaded`
            self.loaded = True

    async def close(self) -> None:
        """Answer what came before, within `grace_s`, and all else 503; then stop listening. Again: at once."""
        again, self._closing = self._closing, True
        if not again:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.grace_s):
                    await self._idle.wait()
        for task in self._work:
            task.cancel()
        await super().close()

    def _routes(self) -> list[Route]:
        from starlette.routing import Route

        return [
            Route("/get_reward", self._get_reward, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/", self._info),
        ]

    def _application(self) -> App:
        return self._counted(super()._application())

    def _counted(self, app: App) -> App:
        """The application, whose answers are counted."""

        async def counted(scope: Scope, receive: Any, send: Any) -> None:
            """Count the answer of a request when it begins."""
            begun = time.perf_counter()
            path = scope["path"] if scope["path"] in _ROUTES else "other"

            async def seen(message: Any) -> None:
                """Count, and send on."""
                if message["type"] == "http.response.start":
                    status, seconds = message["status"], time.perf_counter() - begun
                    self.meters.answered(path, status, seconds, timed=path == "/get_reward" and status == 200)
                await send(message)

            await app(scope, receive, seen)

        return counted

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _info(self, request: Request) -> Response:
        limits = {name: getattr(self.options, name) for name in ("max_items", "max_waiting", "max_body_bytes")}
        shaping = {name: getattr(self.options.shaping, name) for name in ("shift", "scale", "clip")}
        return json_response({"model": self.options.model, "agentenv": __version__, **shaping, **limits})

    async def _health(self, request: Request) -> Response:
        state = "stopping" if self._closing else "ok" if self.loaded else "loading"
        told = {"status": state, "waiting": self.waiting, **self.meters.conversations}
        return json_response(told, 200 if state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        from starlette.responses import Response

        ready = self.loaded and not self._closing
        text = self.meters.text(self._scorer, waiting=self.waiting, ready=ready)
        return Response(text, headers={"content-type": MEDIA_TYPE})

    async def _get_reward(self, request: Request) -> Response:
        begun = time.perf_counter()
        with self._room(1):
            body = await read_json(request, self.options.max_body_bytes)
        form, conversations = read_request(body, self.options.max_items)
        stopping = Refused("rm serve: it was stopped. Ask another server, or later.", 503)
        with self._room(len(conversations)):
            work = asyncio.ensure_future(self._scores(form, conversations))
            self._work.add(work)
            try:
                scored = await unless_gone(request, work, stopping)
            finally:
                self._work.discard(work)
        if scored is None:
            return await self._gone(request)
        self._mean_s += 0.05 * (time.perf_counter() - begun - self._mean_s)
        return json_response(answer(scored, self.options.shaping))

    @contextlib.contextmanager
    def _room(self, num: int) -> Iterator[None]:
        """Room for so many conversations, which wait within the block.

        Raises:
            Refused: there is none, or the server is being stopped.
        """
        if self._closing:
            raise Refused("rm serve: expected a server that goes on, got one that is being stopped. Ask another.", 503)
        if self.waiting + num > self.options.max_waiting:
            self.meters.turned_away += num
            raise Refused(
                f"rm serve: expected room for {num} of at most {self.options.max_waiting} conversations, got "
                f"{self.waiting} that wait. Try again later.",
                429,
            )
        self.waiting += num
        self._idle.clear()
        try:
            yield
        finally:
            self.waiting -= num
            if not self.waiting:
                self._idle.set()

    async def _scores(self, form: str, conversations: Sequence[Conversation]) -> list[Scored]:
        """All of them, in order.

        Raises:
            Unscored: there are some without.
            InfraError: not in time.
        """
        try:
            async with asyncio.timeout(self.options.timeout_s):
                results = await asyncio.gather(*map(self._score, conversations))
        except asyncio.CancelledError:
            self.meters.conversations["cancelled"] += len(conversations)
            raise
        except TimeoutError:
            self.meters.conversations["failed"] += len(conversations)
            raise InfraError(
                f"rm serve: expected scores within {self.options.timeout_s:g} s, got none. Ask less at a time."
            ) from None
        scored = [result for result in results if isinstance(result, Scored)]
        errors = [(index, result) for index, result in enumerate(results) if not isinstance(result, Scored)]
        refused = sum(isinstance(error, DataError) for _, error in errors)
        for name, num in (("scored", len(scored)), ("refused", refused), ("failed", len(errors) - refused)):
            self.meters.conversations[name] += num
        self.meters.truncated += sum(each.truncated for each in scored)
        if errors:
            raise Unscored.of(form, errors, len(results))
        return scored

    async def _score(self, conversation: Conversation) -> Scored | AgentEnvError:
        """Its score, or why it has none; the other conversations of its request go on."""
        try:
            scored = await self._scorer.score(conversation)
        except AgentEnvError as error:
            return error
        if not is_finite(scored.value):
            return InfraError(f"reward model: expected a finite number, got {scored.value!r}. Look at its weights.")
        return scored

    # --- errors -------------------------------------------------------------------------------------------------------

    async def _failed(self, request: Request, error: Any) -> Response:
        """What lies in the request, in there being no room for it, or in the model's having failed."""
        if not isinstance(error, Refused):
            return json_response({"detail": str(error)}, 503, retry_after(self._mean_s))
        # Who asked now would have an answer after that time.
        headers = retry_after(self._mean_s) if error.status in (429, 503) else {}
        told = {"detail": str(error)} | ({"errors": error.errors} if isinstance(error, Unscored) else {})
        return json_response(told, error.status, headers | cut_off(request, error, self.options.max_body_bytes))
