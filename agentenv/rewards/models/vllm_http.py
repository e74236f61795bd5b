"""VLLMHTTPScorer: a reward model in a vLLM server, by its `/classify` or `/pooling`.

Example:
    $ python -m vllm.entrypoints.openai.api_server --model my-rm --runner pooling
    >>> scorer = VLLMHTTPScorer("http://localhost:8000", tokenizer="my-rm")
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)

`/score` is for cross-encoders: for a reward model it returns the activated score of two texts without a template.
HTTP statuses are handled in `_util/http/client.py`, retries in `request_queue`.
Source: vLLM 0.32, entrypoints/pooling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from agentenv._util.brief import brief
from agentenv._util.http.client import AttemptFailure, HTTPClient, checked_url
from agentenv.core.arguments import is_finite, one_of, whole_number
from agentenv.core.engine import Tokenizer
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.rewards.models.render import Overflow, ThreadedRenderer, messages_for_server
from agentenv.rewards.models.request_queue import QueueOptionFields, QueueOptions, RequestQueue, RequestScorer
from agentenv.rewards.models.types import Conversation, Scored


@dataclass(frozen=True, slots=True)
class Query:
    """One conversation, as a server is asked about it."""

    given: list[int] | str | list[dict[str, Any]]
    """Its ids, its text, or messages."""
    num_tokens: int | None = None
    """None where only the server knows."""
    truncated: bool = False
    most: int | None = None
    """Maximum number of its tokens; None if it was cut before."""
    active: bool = False
    """Whether the activation is asked for."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of its model."""

    model: str
    max_length: int | None


@dataclass(frozen=True, slots=True)
class Answered:
    """What a server says of one conversation."""

    values: tuple[float, ...]
    """One per label; at least one."""
    num_tokens: int | None


def request_of(queries: Sequence[Query], endpoint: str) -> dict[str, Any]:
    """Return the body of a request for queries of ids or texts, or for one of messages, without the model.

    No special token is added: ids and rendered text have theirs, and the defaults would put a second BOS before text.
    """
    body: dict[str, Any] = {"use_activation": queries[0].active, "add_special_tokens": False}
    if endpoint == "pooling":
        body |= {"task": "classify", "encoding_format": "float"}
    given = [query.given for query in queries]
    if isinstance(given[0], list) and isinstance(given[0][0], dict):
        return body | {"messages": given[0], "add_generation_prompt": False}
    return body | {"input": given}


def answers_of(
    answer: Any, queries: Sequence[Query], where: str
) -> Sequence[Answered | AttemptFailure] | AttemptFailure:
    """Return the answer to each query, or one failure if the answer cannot be read."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return _unreadable(f"{where}: expected an object with a list 'data', got {brief(answer)}.")
    by_index = {row.get("index", place): row for place, row in enumerate(rows) if _is_count(row.get("index", place))}
    if len(rows) != len(queries) or sorted(by_index) != list(range(len(queries))):
        return _unreadable(f"{where}: expected {len(queries)} results, got {len(rows)}: {brief(rows)}.")
    usage = answer.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    total = counted if _is_count(counted) and counted else None
    known = [query.num_tokens for query in queries]
    if total is not None and None not in known and total != sum(count or 0 for count in known):
        error = ConfigError(
            f"{where}: expected a score of the {known} tokens that were sent, got one of {total}: the server adds or "
            "drops some. Look at its settings."
        )
        return AttemptFailure(error)
    num_tokens = total if len(queries) == 1 else None
    answers: list[Answered | AttemptFailure] = []
    for place in range(len(queries)):
        values = by_index[place].get("probs", by_index[place].get("data"))
        numbers = values if isinstance(values, list) else []
        if numbers and all(is_finite(value) and not isinstance(value, bool) for value in numbers):
            answers.append(Answered(tuple(map(float, numbers)), num_tokens))
        else:
            answers.append(_unreadable(f"{where}: expected one finite number per label, got {brief(values)}."))
    return answers


def served_of(answer: Any, model: str | None, max_length: int | None, where: str) -> Served | AttemptFailure:
    """Return the model with that name, or the only one, from the answer of `/v1/models`."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    found = {str(row.get("id")): row for row in rows if isinstance(row.get("id"), str)}
    if not found:
        return _unreadable(f"{where}/v1/models: expected the served models, got {brief(answer)}.")
    same = len({str(row.get("root", name)) for name, row in found.items()}) == 1  # one model of several names
    name = next(iter(found)) if model is None and same else model
    if name not in found:
        wanted = "one model" if model is None else repr(model)
        return AttemptFailure(
            ConfigError(f"{where}: expected {wanted} to be served, got {list(found)}. Name the reward model.")
        )
    most = found[name].get("max_model_len")
    most = most if _is_count(most) and most else None
    if most is not None and max_length is not None and max_length > most:
        message = f"{where}: expected a max_length of at most the server's {most} tokens, got {max_length}. Lower it."
        return AttemptFailure(ConfigError(message))
    return Served(name, most)


def is_off(off: Sequence[float], on: Sequence[float]) -> bool:
    """Return True if `off` are raw numbers, judged by comparison with `on`, requested with activation."""
    if not all(0.0 <= value <= 1.0 for value in off):
        return True
    sigmoid = [1.0 / (1.0 + math.exp(-value)) for value in off]
    total = sum(math.exp(value) for value in off)
    softmax = [math.exp(value) / total for value in off]
    activated = [sigmoid] if len(off) == 1 else [sigmoid, softmax]
    return len(off) == len(on) and min(math.dist(each, on) for each in activated) < math.dist(off, on)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unreadable(message: str) -> AttemptFailure:
    return AttemptFailure(InfraError(f"{message} Look at the server's log."), retryable=True, suspect=True)


_LONG = 3600.0
"""The requests of a proof have their own deadlines."""


class VLLMHTTPScorer(RequestScorer[Query, Answered]):
    """Asks a server for raw numbers: without activation, which by default makes 0.9996 of 7.9 and 0.9995 of 7.6.

    With a tokenizer, conversations are rendered here (see ConversationRenderer) and sent as ids, several at once.
    Without one, the server's template renders messages, one conversation a request: then no message is kept from
    forging special tokens, roles that the template drops are not found, and one that has as many tokens as fit counts
    as truncated. Text is taken as it is, and nothing put before it.

    Where all values of a model are in 0..1, it is asked once with and once without activation, to see that the server
    knows the difference; older ones that ignore what turns it off are refused, never believed.

    Args:
        url: the server's, with or without `/v1`.
        model: the served model's name; None asks the server.
        tokenizer: the reward model's folder, its name or an object.
        endpoint: `classify` or `pooling`.
        label: index of the number that is the score; needed where the model has several.
        bounded: the model's raw numbers are in 0..1 by themselves; nothing shows that they are raw then.
        max_length: maximum number of tokens; by default what the server takes.
        overflow: see ConversationRenderer; without a tokenizer the server cuts, and drops a BOS on the left.
        asking: see QueueOptions; with a tokenizer `max_batch` is 32 unless given, without one it is 1.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        endpoint: str = "classify",
        label: int | None = None,
        bounded: bool = False,
        max_length: int | None = None,
        overflow: Overflow = "error",
        **asking: Unpack[QueueOptionFields],
    ) -> None:
        self.model, self.overflow = model, overflow
        self.endpoint = one_of("VLLMHTTPScorer.endpoint", endpoint, ("classify", "pooling"))
        self.label = None if label is None else whole_number("VLLMHTTPScorer.label", label)
        self._proven = bounded
        """Whether values in 0..1 are known to be raw."""
        self._rendering = ThreadedRenderer("VLLMHTTPScorer", tokenizer, max_length=max_length, overflow=overflow)
        how = QueueOptions.of("VLLMHTTPScorer", asking, max_batch=32)
        how = how if self._rendering.has_tokenizer else replace(how, max_batch=1)
        self._client = HTTPClient(checked_url("VLLMHTTPScorer.url", url).removesuffix("/v1"), api_key=how.api_key)
        self.url = self._client.url
        self._looker: RequestQueue[None, Served] = RequestQueue(self.url, self._look, how.one_at_once())
        proving = how.one_at_once(retries=0, timeout_s=_LONG)
        self._prover: RequestQueue[Query, None] = RequestQueue(self.url, self._prove, proving)
        self._served: Served | None = None
        super().__init__(f"{self.url}/{self.endpoint}", self._send, how)
        self._helpers = (self._looker, self._prover)

    async def served(self) -> Served:
        """Return the server's description of its model, which is requested once.

        Raises:
            ConfigError: it has no such model, or a shorter context than `max_length`.
            InfraError: it does not answer.
        """
        return self._served or await self._looker.ask(None)

    async def check_messages(self) -> None:
        """See `RequestScorer.check_messages`."""
        served = await self.served()
        if self._rendering.has_tokenizer:
            await self._rendering.check(served.max_length)

    async def close(self) -> None:
        """Accept no further requests, and fail those of this loop. Calling it again does nothing."""
        await super().close()
        await self._client.close()

    async def _scored(self, conversation: Conversation) -> Scored:
        served = await self.served()
        if self._rendering.has_tokenizer:
            rendered = await self._rendering.ids(conversation, served.max_length)
            query = Query(rendered.token_ids, num_tokens=len(rendered.token_ids), truncated=rendered.truncated)
        else:
            given = conversation if isinstance(conversation, str) else await messages_for_server(conversation)
            query = Query(given, most=self._rendering.max_length or served.max_length)
        answered = await self.asker.ask(query)
        values = answered.values
        if not self._proven and all(0.0 <= value <= 1.0 for value in values):  # as a sigmoid or softmax gives
            await self._prover.ask(query)
        num_tokens = query.num_tokens or answered.num_tokens
        truncated = query.truncated
        if query.most is not None and num_tokens is not None:
            if num_tokens > query.most:
                raise DataError(
                    f"conversation: expected at most {query.most} tokens, got {num_tokens}. "
                    "Drop the row, choose overflow 'left' or 'right', or, where the model takes more, raise max_length."
                )
            truncated = self.overflow != "error" and num_tokens == query.most
        label = 0 if self.label is None and len(values) == 1 else self.label
        if label is None or label >= len(values):
            raise ConfigError(
                f"{self.asker.where}: expected label, the index of one of the model's {len(values)} numbers, got "
                f"{label!r}. Pass the one that is the score."
            )
        return Scored(values[label], num_tokens, truncated)

    async def _prove(self, queries: list[Query]) -> Sequence[None] | AttemptFailure:
        """Show that the server turns the activation off, by scoring one conversation with and without it."""
        if not self._proven:
            try:
                off, on = [await self.asker.ask(replace(queries[0], active=each), alone=True) for each in (False, True)]
            except AgentEnvError as error:
                return AttemptFailure(error)
            if not is_off(off.values, on.values):
                message = (
                    f"{self.asker.where}: expected raw numbers, got {list(off.values)} whether or not an activation is "
                    "asked for: this server applies one always, or the model none. Use a newer vLLM; bounded=True "
                    "takes a model's own numbers in 0..1."
                )
                return AttemptFailure(ConfigError(message))
            self._proven = True
        return [None] * len(queries)

    async def _look(self, asked: list[None]) -> Sequence[Served | AttemptFailure] | AttemptFailure:
        if self._served is None:
            read = partial(served_of, model=self.model, max_length=self._rendering.max_length, where=self.url)
            served = await self._client.attempt_json("/v1/models", None, read)
            if isinstance(served, AttemptFailure):
                return served
            self._served = served
        return [self._served] * len(asked)

    async def _send(self, queries: list[Query]) -> Sequence[Answered | AttemptFailure] | AttemptFailure:
        body = request_of(queries, self.endpoint) | {
            "model": self._served.model if self._served is not None else self.model
        }
        if self.overflow != "error" and not self._rendering.has_tokenizer:
            body |= {"truncate_prompt_tokens": self._rendering.max_length or -1, "truncation_side": self.overflow}
        read = partial(answers_of, queries=queries, where=self.asker.where)
        return await self._client.attempt_json(f"/{self.endpoint}", body, read)
