"""A reward model over HTTP in OpenRLHF's form: `--reward.remote_url http://HOST:5000/get_reward`, and ours.

    async with RewardServer(scorer, ServeOptions()) as server:
        await server.load()
        print(server.url)

Routes: `POST /get_reward`, `GET /health`, 503 until the model is loaded, with counts of conversations, and `/`, what is
served. Conversations of all requests are scored together: the scorer forms the batches. One that cannot be scored makes
the whole request 422, which names it, as do messages that no tokenizer can render; a model that fails makes it 503. No
number is ever made up.

Requests are OpenRLHF's, or messages, and have one form of answer:

    {"query": [text, …], "prompts": […], "labels": […]}   texts as the policy saw and wrote them, used unchanged
    {"messages": [[{"role": …, "content": …}, …], …]}     conversations, rendered with the reward model's own template

    {"rewards": [number, …], "scores": [number, …], "extra_logs": {name: [number, …]}}

Source: openrlhf/cli/serve_rm.py and openrlhf/utils/agent.py, 0.8 to 0.11.2. Models ignore
prompts and labels, as there; a function gets them, and its scores and logs are in the answer. Clients of 0.9.1 to
0.11.0 send an empty batch to the second of several servers: its answer is empty too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentenv._util.brief import brief
from agentenv._util.http.access import AccessPolicy, RequestRefused, closing_headers, read_json_body, retry_after_header
from agentenv._util.http.responses import json_response, until_disconnect
from agentenv._util.http.server import Server
from agentenv._util.version import __version__
from agentenv.core.arguments import is_finite
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.rewards.models.openrlhf_wire import Sample
from agentenv.rewards.models.types import Conversation, RewardScorer, Scored

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

# --- requests and answers ---------------------------------------------------------------------------------------------

_ADVICE = 'Send {"query": ["text", …]} or {"messages": [[{"role": "user", "content": "…"}, …], …]}.'


@dataclass(frozen=True, slots=True)
class Shaping:
    """The reward of a model's score: `scale * (value + shift)`, clipped, as in `ModelReward`.

    Raises:
        ConfigError: a number is not finite, the scale is 0, or the clip is empty.
    """

    shift: float = 0.0
    scale: float = 1.0
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not (is_finite(self.shift) and is_finite(self.scale) and self.scale):
            raise ConfigError(
                f"--shift, --scale: expected finite numbers, scale not 0, got {self.shift!r} and {self.scale!r}."
            )
        if self.clip is not None and not (all(map(is_finite, self.clip)) and self.clip[0] < self.clip[1]):
            raise ConfigError(f"--clip: expected LOW and HIGH, LOW below HIGH, got {self.clip!r}.")

    def of(self, value: float) -> float:
        """Return the reward of a raw score.

        Raises:
            InfraError: the reward is not finite.
        """
        reward = self.scale * (value + self.shift)
        if self.clip is not None:
            reward = min(max(reward, self.clip[0]), self.clip[1])
        if not is_finite(reward):
            raise InfraError(f"rm serve: expected a finite reward, got {reward!r} of {value!r}. Set --clip.")
        return reward


def read_request(
    body: Any, max_items: int, *, with_columns: bool = False
) -> tuple[str, Sequence[Conversation | Sample]]:
    """Return the name of the list in a request, and its texts or conversations, possibly none.

    With columns, each text has its prompt and label.

    Raises:
        RequestRefused: the body has neither list, or an item is wrong; the message names the first one.
    """
    forms = [name for name in ("query", "messages") if isinstance(body, dict) and name in body]
    if len(forms) != 1:
        got = list(islice(body, 10)) if isinstance(body, dict) else type(body).__name__
        raise RequestRefused(f"body: expected one of query and messages, got {brief(got)}. {_ADVICE}")
    (form,) = forms
    items = body[form]
    if not isinstance(items, list):
        raise RequestRefused(f"{form}: expected a list, got {brief(items)}. {_ADVICE}")
    if len(items) > max_items:
        raise RequestRefused(
            f"{form}: expected at most {max_items} items, got {len(items)}. Send several requests.", 413
        )
    for index, item in enumerate(items):
        if form == "query":
            what, valid = "text", isinstance(item, str)
        else:
            what, valid = "a list of messages", isinstance(item, list) and all(isinstance(each, dict) for each in item)
        if not valid:
            raise RequestRefused(f"{form}[{index}]: expected {what}, got {brief(item)}. {_ADVICE}")
    if form == "messages" or not with_columns:
        return form, items
    columns = [body.get(name) or [default] * len(items) for name, default in (("prompts", ""), ("labels", None))]
    for name, column in zip(("prompts", "labels"), columns, strict=True):
        if not isinstance(column, list) or len(column) != len(items):
            raise RequestRefused(f"{name}: expected a list of {len(items)}, one per query, got {brief(column)}.")
    return form, list(map(Sample, items, *columns))


def answer(scored: Sequence[Scored], shaping: Shaping) -> dict[str, Any]:
    """Return the body of an answer, with one number per conversation in each list.

    The logs hold those of a function that every conversation has, the raw scores, 1.0 for truncated conversations, and
    the numbers of tokens if the model reports them.

    Raises:
        InfraError: a reward is not finite.
    """
    rewards = [shaping.of(each.value) for each in scored]
    scores = [
        reward if each.score in (None, each.value) else each.score for each, reward in zip(scored, rewards, strict=True)
    ]
    names = [name for name in (scored[0].logs if scored else ()) if all(name in each.logs for each in scored)]
    logs: dict[str, list[Any]] = {name: [each.logs[name] for each in scored] for name in names} | {
        "rm_value": [each.value for each in scored],
        "rm_truncated": [float(each.truncated) for each in scored],
    }
    tokens = [each.num_tokens for each in scored]
    if None not in tokens:
        logs["rm_num_tokens"] = [float(num or 0) for num in tokens]
    return {"rewards": rewards, "scores": scores, "extra_logs": logs}


# --- the server -------------------------------------------------------------------------------------------------------

_MAX_NAMED = 20
"""Items that an error names."""
_AFTER_GRACE_S = 5.0
_LASTING = (DataError, ConfigError)
"""What another try cannot change: the conversation, or that no tokenizer renders messages."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where a server listens, who may ask, and what it gives."""

    access: AccessPolicy = field(default_factory=lambda: AccessPolicy(without_token=("/health",)))
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
    grace_s: float = 30.0
    """For what is being scored, when the server is stopped."""

    def __post_init__(self) -> None:
        if not 0 < self.max_items <= self.max_waiting:
            raise ConfigError(f"--max_items: expected 1 to --max_waiting ({self.max_waiting}), got {self.max_items}.")


class Unscored(RequestRefused):
    """Some of `num` conversations of a request have no score: 503 where another try may give one, else 422."""

    def __init__(self, form: str, errors: Sequence[tuple[int, AgentEnvError]], num: int) -> None:
        lasting = [(index, error) for index, error in errors if isinstance(error, _LASTING)]
        self.errors = [{"index": index, "error": str(error)} for index, error in (lasting or errors)[:_MAX_NAMED]]
        """Index and error of the first of them; what stays is said before what may pass."""
        first = self.errors[0]
        message = f"{form}[{first['index']}]: {first['error']} ({len(errors)} of {num} have no score.)"
        super().__init__(message, 422 if lasting else 503)


class RewardServer(Server):
    """A server of one scorer, which stays its owner's; `async with` starts and stops it."""

    def __init__(self, scorer: RewardScorer, options: ServeOptions | None = None) -> None:
        self.options = options or ServeOptions()
        super().__init__("rm serve", self.options.access, port=self.options.port, grace_s=_AFTER_GRACE_S)
        self.waiting = 0
        """Conversations without an answer, and requests that are being read."""
        self.counts: Counter[str] = Counter(scored=0, failed=0, refused=0, cancelled=0, truncated=0, turned_away=0)
        """Conversations: scored, failed for now or for good (refused), given up by their client, cut, answered 429."""
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

        async def health(request: Request) -> Response:
            state = "stopping" if self._closing else "ok" if self.loaded else "loading"
            body = {"status": state, "waiting": self.waiting, **self.counts}
            return json_response(body, 200 if state == "ok" else 503)

        async def info(request: Request) -> Response:
            limits = {name: getattr(self.options, name) for name in ("max_items", "max_waiting", "max_body_bytes")}
            shaping = {name: getattr(self.options.shaping, name) for name in ("shift", "scale", "clip")}
            return json_response({"model": self.options.model, "agentenv": __version__, **shaping, **limits})

        return [
            Route("/get_reward", self._get_reward, methods=["POST"]),
            Route("/health", health),
            Route("/", info),
        ]

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _get_reward(self, request: Request) -> Response:
        started = time.perf_counter()
        with self._room(1):
            with_columns = hasattr(self._scorer, "score_sample")
            read = partial(read_request, max_items=self.options.max_items, with_columns=with_columns)
            form, conversations = await read_json_body(request, self.options.max_body_bytes, read)
        stopping = RequestRefused("rm serve: it was stopped. Ask another server, or later.", 503)
        with self._room(len(conversations)):
            work = asyncio.ensure_future(self._scores(form, conversations))
            self._work.add(work)
            try:
                scored = await until_disconnect(request, work, stopping)
            finally:
                self._work.discard(work)
        if scored is None:
            return await self._client_left(request)
        self._mean_s += 0.05 * (time.perf_counter() - started - self._mean_s)
        return json_response(answer(scored, self.options.shaping))

    @contextlib.contextmanager
    def _room(self, num: int) -> Iterator[None]:
        """Room for so many conversations, which wait within the block.

        Raises:
            RequestRefused: there is none, or the server is being stopped.
        """
        if self._closing:
            raise RequestRefused("rm serve: expected a running server, got one that is being stopped.", 503)
        if self.waiting + num > self.options.max_waiting:
            self.counts["turned_away"] += num
            raise RequestRefused(
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

    async def _scores(self, form: str, conversations: Sequence[Conversation | Sample]) -> list[Scored]:
        """Return the scores of all conversations, in order.

        Raises:
            Unscored: some have no score.
            InfraError: the time limit passed.
        """
        scorer: Any = self._scorer

        async def score(conversation: Conversation | Sample) -> Scored | AgentEnvError:
            try:
                is_sample = isinstance(conversation, Sample)
                scored: Scored = await (scorer.score_sample if is_sample else scorer.score)(conversation)
            except AgentEnvError as error:
                return error  # the other conversations of the request continue
            if not is_finite(scored.value):
                return InfraError(f"reward model: expected a finite number, got {scored.value!r}. Check its weights.")
            return scored

        try:
            async with asyncio.timeout(self.options.timeout_s):
                results = await asyncio.gather(*map(score, conversations))
        except asyncio.CancelledError:
            self.counts["cancelled"] += len(conversations)
            raise
        except TimeoutError:
            self.counts["failed"] += len(conversations)
            raise InfraError(
                f"rm serve: expected scores within {self.options.timeout_s:g} s, got none. Send fewer at a time."
            ) from None
        scored = [result for result in results if isinstance(result, Scored)]
        errors = [(index, result) for index, result in enumerate(results) if not isinstance(result, Scored)]
        refused = sum(isinstance(error, _LASTING) for _, error in errors)
        for name, num in (("scored", len(scored)), ("refused", refused), ("failed", len(errors) - refused)):
            self.counts[name] += num
        self.counts["truncated"] += sum(each.truncated for each in scored)
        if errors:
            raise Unscored(form, errors, len(results))
        return scored

    # --- errors -------------------------------------------------------------------------------------------------------

    async def _failed(self, request: Request, error: Any) -> Response:
        """Answer an error of the request, a full queue, or an error of the model."""
        if not isinstance(error, RequestRefused):
            return json_response({"detail": str(error)}, 503, retry_after_header(self._mean_s))
        # A request sent now would be answered after that time.
        headers = retry_after_header(self._mean_s) if error.status in (429, 503) else {}
        body = {"detail": str(error)} | ({"errors": error.errors} if isinstance(error, Unscored) else {})
        return json_response(body, error.status, headers | closing_headers(request, error, self.options.max_body_bytes))
