"""Any server with OpenAI's chat completions: messages in, text and tool calls out, without token ids."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentenv._util.http.client import (
    MAX_ANSWER_BYTES,
    NO_CREDIT,
    AttemptFailure,
    HTTPClient,
    HTTPErrors,
    RetryPolicy,
    checked_url,
    excerpt,
)
from agentenv._util.http.json_bodies import parse_body, parse_json
from agentenv._util.off_loop import off_loop, size_of
from agentenv.core.engine import Engine, EngineOptions, NoTokenizer
from agentenv.core.types import Completion, Conversation, SamplingParams
from agentenv.engines.chat.wire import RepeatedAnswer, TokenPrices, completion_of, request_fields
from agentenv.errors import ConfigError, DataError, EngineError, PromptTooLong, RunStopped

if TYPE_CHECKING:
    import httpx

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
FIRST_PAUSE_S = 1.0
KEEPALIVE_S = 4.0
"""Idle connections are dropped before servers drop them (vLLM: 5 s), which would cost a retry."""
_MAX_STRANGE = 3
"""Answers that are neither a completion nor an error, such as pages of HTML, after which a turn has failed."""
_MIN_ID = 20
"""Characters from which an answer's id is taken to be unique: some servers number answers, or name them all alike."""
_NEEDED = frozenset({"model", "messages", "tools"})
"""Fields of a request without which it asks for something else."""
_WORD = r"(?<![\w-]){}(?![\w-])"
_CODE_TOO_LONG = "context_length_exceeded"
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size|limit)|maximum (context|prompt length|model length)|reduce the length|"
    r"too many tokens|prompt\b[^.]{0,80}too long|input is too long|(prompt|input)\b[^.]{0,40}exceed[^.]{0,40}length|"
    r"(tokens|token (count|limit))\b[^.]{0,80}(too (long|large)|exceed)|exceed[^.]{0,80}(tokens|token (count|limit))|"
    r"at most \d+ (completion |output )?tokens|maximum allowed number of output tokens",
    re.IGNORECASE,
)
"""What servers say when the prompt, or the prompt and the limit of the answer, are too long for the model."""
_UNKNOWN_FIELD = re.compile(
    r"un(?:supported|known|recognized)[ _](?:request )?(?:parameter|argument|field)s?(?: supplied)?"
    r"\W{0,4}([\w.\[\]-]*)",
    re.IGNORECASE,
)
"""What they say when they do not know a field, whatever its value, and its name."""
_OTHER_LIMIT = re.compile(
    r"rate[ _-]?limit|quota|usage limit|\b[TR]P[MD]\b|tokens/|\b(minute|hour|day|month)s?\b|daily|hourly|monthly|"
    r"per second|please wait|number of (images|tools)",
    re.IGNORECASE,
)
"""What they say when another limit is exceeded: waiting may help, fewer messages do not."""


class _Refused(EngineError):
    """The server refuses the request. `generate` raises it as an EngineError."""


class ChatEngine(Engine):
    """An engine over an API model, for runs only: it returns text and tool calls, which nothing can be trained on.

    Failed attempts are repeated as `agentenv._util.http.client` says, and so are answers that are not a completion.
    If the room of the episode is more than the model takes, the server's own limit applies.

    Example::

        engine = ChatEngine("https://api.openai.com/v1", "gpt-4o")
        trajectory = await run_episode(MathRetry, task, engine=engine)
        await engine.close()

    Args:
        base_url: the part before `/chat/completions`, as for the openai package.
        model: name of the model.
        api_key_env: environment variable that holds the key; the default one may be missing.
        prices: by the name of the model, for the cost of each answer; one that names another model without a price
            costs what `model` does.
        extra_body: more fields of the request, which override ours; None removes a field.
        timeout_s: deadline of one `generate`, with all retries and their pauses.
        max_retries: further attempts after the first.
        transport: another way to reach the server, for tests.

    Raises:
        ConfigError: the address or the key is wrong, or the key is missing.
    """

    words = "the client of the API"
    url_example = "https://api.openai.com/v1"
    is_light = True
    tokenizer = NoTokenizer()

    @classmethod
    def from_options(cls, options: EngineOptions) -> ChatEngine:
        """See `Engine`."""
        return cls(options.base_url, options.model, **options.args)

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = DEFAULT_KEY_ENV,
        prices: Mapping[str, TokenPrices] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 10,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        key = os.environ.get(api_key_env, "").strip() or None
        if key is None and api_key_env != DEFAULT_KEY_ENV:
            raise ConfigError(
                f"--api_key_env: expected a key in the environment variable {api_key_env!r}, got none. Set it."
            )
        self.model = model
        self.prices = dict(prices or {})
        self.extra_body = dict(extra_body or {})
        self.timeout_s = timeout_s
        self._http = HTTPClient(
            checked_url("--base_url", base_url, path="/v1"),
            api_key=key,
            key_name=api_key_env,
            errors=HTTPErrors(unavailable=EngineError, timeout=EngineError, refused=_Refused, unreadable=EngineError),
            keepalive_s=KEEPALIVE_S,
            transport=transport,
        )
        self.base_url = self._http.url
        self._policy = RetryPolicy(max_attempts=max_retries + 1, timeout_s=timeout_s, first_pause_s=FIRST_PAUSE_S)
        self._limit_field = "max_completion_tokens"
        self._seen_ids: set[str] = set()

    async def start(self) -> None:
        """Look at the server's list of models, which costs nothing and which not every server has.

        Raises:
            ConfigError: nothing answers at the address, or the key is wrong.
        """
        answer = await self._http.attempt("/models", timeout_s=self.timeout_s, max_bytes=2 * MAX_ANSWER_BYTES)
        if isinstance(answer, AttemptFailure):
            if answer.status is None and not answer.suspect:  # no connection; later failures may pass
                raise ConfigError(f"--base_url: expected a server, got none: {answer.error}") from answer.error
            if answer.status == 401:
                raise answer.error
            return
        try:
            found = await parse_body(answer.body, parse_json)
        except ValueError:
            return
        models = found.get("data") if isinstance(found, dict) else None
        for each in models if isinstance(models, list) else ():
            length = each.get("max_model_len") if isinstance(each, dict) and each.get("id") == self.model else None
            self.max_model_len = length if isinstance(length, int) and length > 0 else self.max_model_len

    async def generate(  # type: ignore[override]  # it takes messages: its tokenizer is a NoTokenizer
        self, asked: Conversation, sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Return one answer; see `agentenv.core.engine.Engine`. Cancelling it closes the connection.

        Raises:
            EngineError: no valid answer within `timeout_s` and `max_retries`, or the server refuses the request.
            PromptTooLong: the conversation is too long for the model.
            ConfigError: the address, key or model is wrong, or the server does not know a field; retrying cannot help.
            RunStopped: the account has no credit.
        """
        body = request_fields(self.model, asked, sampling)
        counts: Counter[str] = Counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await self._answer(body, sampling.max_tokens, counts)
        except TimeoutError as error:
            raise EngineError(
                f"{self.base_url}: expected an answer within {self.timeout_s:g} s, got none. "
                "Look at the server's load, or raise --generate_timeout_s."
            ) from error
        except _Refused as error:
            text = self._without_names(error)
            unknown = [name.rstrip(".") for name in _UNKNOWN_FIELD.findall(text)]
            fields = sorted(body.keys() - _NEEDED)
            words = unknown or [name for name in fields if re.search(_WORD.format(name), text)]
            said = next((name for name in fields if name in words), None)
            cure = said and f""" --engine_args '{{"extra_body": {{"{said}": null}}}}' leaves it out."""
            # Every other request has the field, too, so a ConfigError ends the run.
            kind = ConfigError if said and unknown else EngineError
            refused = kind(f"{error}{cure or ''}")
            refused.http_status = error.http_status
            raise refused from None
        try:
            prices = self.prices.get(str(found.get("model")), self.prices.get(self.model))
            completion = await off_loop(size_of(found), completion_of, found, asked, prices)
            return replace(completion, num_request_retries=counts["requests"] - 1)
        except EngineError as error:
            raise type(error)(f"{self.base_url}/chat/completions: {error}") from error

    async def close(self) -> None:
        """Close all connections; calling it again does nothing."""
        await self._http.close()

    async def _answer(self, body: dict[str, Any], max_tokens: int | None, counts: Counter[str]) -> dict[str, Any]:
        """Return the server's answer, and count the requests for it, and the strange ones of what came back.

        Where the server refuses our limit of tokens, it is asked in another way.
        """
        field = self._limit_field  # other requests may change it in the meantime
        try:
            return await self._request({**body, field: max_tokens}, counts)
        except _Refused as error:
            if self._is_too_long(error):
                try:  # the room that the server has left is smaller than our limit
                    return await self._request(body, counts)
                except _Refused as second:
                    if self._is_too_long(second):
                        raise PromptTooLong(str(second)) from second
                    raise
            if field == "max_tokens" or field not in self._without_names(error):
                raise
            self._limit_field = "max_tokens"  # the older name of the field
        return await self._answer(body, max_tokens, counts)

    def _is_too_long(self, error: _Refused) -> bool:
        text = self._without_names(error)
        return _CODE_TOO_LONG in text or bool(_TOO_LONG.search(text) and not _OTHER_LIMIT.search(text))

    def _without_names(self, error: _Refused) -> str:
        """Return what the server says without the address and the model, whose names say nothing of the request."""
        return re.sub(_WORD.format(re.escape(self.model)), "", str(error).replace(self.base_url, ""))

    async def _request(self, body: dict[str, Any], counts: Counter[str]) -> dict[str, Any]:
        fields = {name: value for name, value in (body | self.extra_body).items() if value is not None}
        try:
            content = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"messages: expected what JSON can represent, got {error}. Fix the environment.") from error
        return await self._policy.run(lambda _: self._attempt(content, counts))

    async def _attempt(self, content: bytes, counts: Counter[str]) -> dict[str, Any] | AttemptFailure:
        path = "/chat/completions"
        counts["requests"] += 1
        answer = await self._http.attempt(path, content)
        if isinstance(answer, AttemptFailure):
            text = str(answer.error)
            if text.endswith(NO_CREDIT):
                raise RunStopped(f"{text} Then continue with --resume.") from answer.error
            if answer.status == 403:  # of this request: a filter of the server may have refused its content
                return replace(answer, error=_Refused(text))
            return answer
        where = f"{self.base_url}{path}"
        found, is_strange = await parse_body(answer.body, _completion_in)
        if isinstance(found, str):
            wrong = f"{where}: expected a chat completion, got {found}. Check the address and the server's log."
            counts["strange"] += is_strange
            is_over = is_strange and counts["strange"] >= _MAX_STRANGE
            return AttemptFailure(EngineError(wrong), retryable=not is_over, status=200)
        name = found.get("id")
        if isinstance(name, str) and len(name) >= _MIN_ID:
            if name in self._seen_ids:
                raise RepeatedAnswer(
                    f"{where}: expected a new answer, got that of an earlier request, {name[:80]!r}. "
                    "Switch off caches of answers between here and the model."
                )
            self._seen_ids.add(name)
        return found


def _completion_in(body: bytes) -> tuple[dict[str, Any] | str, bool]:
    """Return the JSON object of a body, or what it is if not a chat completion; and whether it is not even an error."""
    try:
        found = parse_json(body)
    except ValueError as error:  # a page of a website, or of a gateway that is down, unless JSON was cut off
        return excerpt(body, error), not body.lstrip().startswith((b"{", b"["))
    choices = found.get("choices") if isinstance(found, dict) else None
    choices = choices if isinstance(choices, list) else []
    if any(isinstance(part, dict) and part.get("error") is not None for part in (found, *choices)):
        return excerpt(body), False
    is_whole = bool(choices) and all(isinstance(each, dict) and "message" in each for each in choices)
    return found if is_whole else excerpt(body), not is_whole
