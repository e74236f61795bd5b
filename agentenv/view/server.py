"""The page over HTTP, read-only: `GET` only, from runs that the command named, followed while they are written.

    async with ViewServer(runs, ViewOptions(AccessPolicy(token="…"))) as server:
        print(server.address())

`/` and `/static/*` are the page, without data and so without a token. Below `/api` a request names a run by its index
and an episode by the place of its line, never by a path; `docs/reference/view-api.md` describes the answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from agentenv._util.http.access import AccessPolicy, App, RequestRefused, Scope
from agentenv._util.http.responses import json_response
from agentenv._util.http.server import Server
from agentenv._util.version import __version__
from agentenv.errors import ConfigError, DataError
from agentenv.view.episodes import Place, read_episodes, read_heads, search
from agentenv.view.meta import MEASURES, Defaults, compared, run_meta
from agentenv.view.page import HEADERS, STATIC, asset, server_shell
from agentenv.view.tail import FileTail, IndexTail, LearnedLines, TailPlace, read_tail
from agentenv.view.texts import TokenTexts, load_texts
from agentenv.view.viewed import STEPS, TRAIN_METRICS, ViewedRun

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

T = TypeVar("T")
Reader = Callable[[TailPlace], FileTail]
"""Returns the lines of a file after a place."""
POLL_S = 0.1
"""Seconds between two looks at a file that is followed."""
MAX_EPISODES, MAX_HEADS = 64, 256
MAX_ANSWER_BYTES = 64 << 20
_MAX_DIGITS = 13
"""Of a number in a request: no file system refuses an offset below 10 TB."""
_MAX_AT_ONCE = 8
"""Requests that read episodes at the same time; the others wait."""
_MAX_FOLLOWED = 64
"""Files that are followed at the same time; further requests get status 503."""
_LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """How the page is served."""

    access: AccessPolicy
    port: int = 0
    """0 takes a free one."""
    tokenizer: str | None = None
    """Folder of the tokenizer for all runs; None takes that of each run."""
    defaults: Defaults | None = None
    """Default flags by kind of run, for the list of those that were changed."""


class ViewServer(Server):
    """The server of the page."""

    def __init__(self, runs: Sequence[ViewedRun], options: ViewOptions) -> None:
        super().__init__("agentenv view", options.access, port=options.port, grace_s=0.5)
        self._runs, self._options = list(runs), options
        self._texts: dict[int, TokenTexts | str] = {}
        self._loading = asyncio.Lock()  # texts are loaded by the first request that needs them
        self._indexes = [IndexTail(run) for run in runs]
        self._learned = [LearnedLines(run) for run in runs]
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._num_followed = 0

    def address(self, go: str = "") -> str:
        """Return the address to open, with the token in its fragment, which no log has; `go` is a place in the page."""
        token = self._options.access.token
        fragment = urlencode({**({"token": token} if token else {}), **({"go": go} if go else {})})
        return f"{self.url}/{f'#{fragment}' if fragment else ''}"

    def _application(self) -> App:
        app = super()._application()

        async def hardened(scope: Scope, receive: Any, send: Any) -> None:
            async def send_with_headers(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
                await send(message)

            await app(scope, receive, send_with_headers)

        return hardened

    def _routes(self) -> Sequence[Route]:
        from starlette.routing import Route

        api = {
            "runs": self._list_runs, "meta": self._meta, "index": self._followed, "metrics": self._followed,
            "steps": self._followed, "episodes": self._episodes, "heads": self._heads, "grep": self._grep,
            "diff": self._diff,
        }  # fmt: skip
        return [
            Route("/", self._page),
            *(Route(f"/static/{name}", self._page) for name in STATIC),
            *(Route(f"/api/{name}", handler) for name, handler in api.items()),
        ]

    async def _failed(self, request: Request, error: Any) -> Response:
        """Answer an error: wrong requests with their status, files that cannot be read with 422."""
        status = error.status if isinstance(error, RequestRefused) else 422
        return json_response({"detail": str(error)}, status)

    # --- the page -----------------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        """Answer with the shell of the page, or with the file that the address names."""
        from starlette.responses import HTMLResponse, Response

        name = request.url.path.rpartition("/")[2]
        return Response(asset(name), media_type=STATIC[name]) if name else HTMLResponse(server_shell())

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def _list_runs(self, request: Request) -> Response:
        listed = [
            {"run": number, "name": run.name, "kind": run.kind}
            for number, run in enumerate(self._runs)
            if not run.is_eval or run.has_episodes
        ]
        return json_response({"runs": listed, "version": __version__})

    async def _meta(self, request: Request) -> Response:
        number, run = self._run_of(request)
        texts = await self._texts_of(number)
        return json_response(await asyncio.to_thread(run_meta, number, run, texts, self._options.defaults))

    def _run_of(self, request: Request, key: str = "run") -> tuple[int, ViewedRun]:
        number = _number(request, key, 0)
        if number >= len(self._runs):
            raise RequestRefused(f"{key}: expected a run below {len(self._runs)}, got {number}. Ask /api/runs.", 404)
        return number, self._runs[number]

    async def _texts_of(self, number: int) -> TokenTexts | str:
        """Return the texts of a run's tokens, or why there are none."""
        if number in self._texts:
            return self._texts[number]
        async with self._loading:
            if number not in self._texts:
                try:
                    found = await asyncio.to_thread(load_texts, self._runs[number], self._options.tokenizer)
                    self._texts[number] = found
                except (ConfigError, DataError) as error:
                    self._texts[number] = str(error)
            return self._texts[number]

    # --- files that grow ----------------------------------------------------------------------------------------------

    async def _followed(self, request: Request) -> Response:
        """Answer with the lines of the index, of metrics.jsonl or of steps.jsonl, by the name in the address."""
        from starlette.responses import StreamingResponse

        number, run = self._run_of(request)
        name = request.url.path.rpartition("/")[2]
        files = {"metrics": TRAIN_METRICS, "steps": STEPS}
        read: Reader = self._indexes[number].read if name == "index" else partial(read_tail, run, files[name])
        if self._num_followed >= _MAX_FOLLOWED:
            raise RequestRefused(f"expected at most {_MAX_FOLLOWED} open streams, got more. Close a page.", 503)
        place = TailPlace.parse(request.query_params.get("from", ""))
        lines = self._lines(read, place, follows=request.query_params.get("follow") == "1")
        return StreamingResponse(lines, media_type=_LINES)

    async def _lines(self, read: Reader, place: TailPlace, *, follows: bool) -> AsyncIterator[bytes]:
        """Yield the lines of a file after a place, with controls between them, until the client leaves."""
        self._num_followed += 1
        is_first, was_whole = True, False
        try:
            while not self._closing:
                tail = await asyncio.to_thread(read, place)
                is_last, place = not tail.lines and not tail.was_reset, tail.place
                if tail.was_reset:
                    yield _control(reset=True)
                yield tail.lines
                if tail.progress is not None:
                    yield _control(progress=tail.progress)
                if not is_last or is_first:
                    yield _control(next=str(place))
                if is_last and not was_whole:
                    yield _control(end=True)
                    was_whole = True
                if is_last and not follows:
                    return
                if is_last:
                    await asyncio.sleep(POLL_S)
                is_first = False
        except DataError as error:
            yield _control(error=str(error))
        finally:
            self._num_followed -= 1

    # --- episodes -----------------------------------------------------------------------------------------------------

    async def _episodes(self, request: Request) -> Response:
        from starlette.responses import Response

        number, run = self._run_of(request)
        places = _places(request, MAX_EPISODES)
        texts = await self._texts_of(number)
        known = texts if isinstance(texts, TokenTexts) else None
        found = await self._read(partial(read_episodes, run, places, known, learned=self._learned[number].of))
        body = await asyncio.to_thread(found.to_json)
        return Response(body, media_type="application/json")

    async def _heads(self, request: Request) -> Response:
        run, places = self._run_of(request)[1], _places(request, MAX_HEADS)
        return json_response({"heads": await self._read(read_heads, run, places)})

    async def _grep(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        run, text = self._run_of(request)[1], request.query_params.get("q", "")
        if not text:
            raise RequestRefused("q: expected a text to look for, got none. Add it.", 400)
        hits = search(run, text, _number(request, "from", 0), fold=request.query_params.get("fold") == "1")

        async def lines() -> AsyncIterator[bytes]:
            async with self._slots:
                while not self._closing:
                    try:
                        hit = await asyncio.to_thread(next, hits, None)
                    except DataError as error:
                        yield _control(error=str(error))
                        return
                    if hit is None or isinstance(hit, int):
                        yield _control(end=True) if hit is None else _control(next=hit)
                        return
                    yield b"[%d,%d]\n" % hit

        return StreamingResponse(lines(), media_type=_LINES)

    async def _diff(self, request: Request) -> Response:
        (_, a), (_, b) = self._run_of(request, "a"), self._run_of(request, "b")
        text = request.query_params.get("by", "reward")
        by = next((each for each in MEASURES if each == text), None)
        if by is None:
            raise RequestRefused(f"by: expected one of {', '.join(MEASURES)}, got {text[:60]!r}.", 400)
        cluster = request.query_params.get("cluster") or None
        return json_response(await self._read(compared, a, b, by, None, cluster))

    async def _read(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that reads episodes; few of them run at once."""
        async with self._slots:
            return await asyncio.to_thread(function, *args)


def _number(request: Request, key: str, default: int) -> int:
    """Return a number of the query.

    Raises:
        RequestRefused: it is not a whole number, or is negative.
    """
    text = request.query_params.get(key, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise RequestRefused(f"{key}: expected a number >= 0, got {text[:60]!r}.", 400)
    return int(text)


def _places(request: Request, num: int) -> list[Place]:
    """Return the places of the query, `at=OFFSET:LENGTH,…`.

    Raises:
        RequestRefused: they are not places, too many, or too long together.
    """
    parts = [part.split(":") for part in request.query_params.get("at", "").split(",")]
    if not all(
        len(part) == 2 and all(n.isascii() and n.isdecimal() and len(n) <= _MAX_DIGITS for n in part) for part in parts
    ):
        raise RequestRefused("at: expected OFFSET:LENGTH, separated by commas, got another text.", 400)
    places = [(int(offset), int(length)) for offset, length in parts]
    if len(places) > num or sum(length for _, length in places) > MAX_ANSWER_BYTES:
        raise RequestRefused(
            f"at: expected at most {num} episodes of {MAX_ANSWER_BYTES} bytes in all. Ask for fewer.", 413
        )
    return places


def _control(**values: Any) -> bytes:
    """Return a line that no file has: what the reader of a stream has to know."""
    return b"!" + json.dumps(values).encode() + b"\n"


def view_access(host: str, token: str | None, hosts: tuple[str, ...], variable: str = "") -> AccessPolicy:
    """Return the policy of the page's server: the page itself needs no token, and links to it may be followed.

    Raises:
        ConfigError: as `AccessPolicy`.
    """
    static = tuple(f"/static/{name}" for name in STATIC)
    return AccessPolicy(host, token, hosts, without_token=("/", *static), navigable=("/",), variable=variable)
