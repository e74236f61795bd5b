"""VLLMHTTPScorer: a reward model in a vLLM server, by its `/classify` or `/pooling`.

Example:
    $ python -m vllm.entrypoints.openai.api_server --model my-rm --runner pooling
    >>> scorer = VLLMHTTPScorer("http://localhost:8000", tokenizer="my-rm")
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)

`/score` is for cross-encoders: of a reward model it gives what its activation makes of two texts without a template.
Source: vLLM 0.32, entrypoints/pooling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from agentenv.agent import Tokenizer
from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.rewards._arguments import one_of, whole_number
from agentenv.rewards._http import checked_url
from agentenv.rewards.models._asking import Asker, Asking, AskingFields, AskingScorer
from agentenv.rewards.models._http import Failure, JSONClient
from agentenv.rewards.models._pooling_wire import (
    Answered,
    Query,
    Served,
    answers_of,
    is_off,
    request_of,
    served_of,
)
from agentenv.rewards.models._rendering import Rendering
from agentenv.rewards.models.render import Overflow, checked
from agentenv.rewards.models.types import Conversation, Scored

SWITCHES = ("use_activation", "activation", "softmax")
"""What turns the activation off, the newest first; one at a time: some versions take `activation` for true once it is
there, false or not, whatever `use_activation` says."""
_LONG = 3600.0
"""Its questions have deadlines of their own."""


@dataclass(frozen=True, slots=True)
class _Activation:
    """How the server's activation is turned off."""

    switch: str = SWITCHES[0]
    proven: bool = False
    """Whether a value in 0..1 is known to be raw."""


class VLLMHTTPScorer(AskingScorer[Query, Answered]):
    """Asks a server for raw numbers: without activation, which by default makes 0.9996 of 7.9 and 0.9995 of 7.6.

    With a tokenizer, conversations are rendered here (see Renderer) and sent as ids, several at once. Without one the
    server's template renders messages, one conversation a request; then nothing that a message says is kept from
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
        max_length: most tokens; by default what the server takes.
        overflow: see Renderer; without a tokenizer the server cuts, and drops a BOS on the left.
        asking: see Asking; with a tokenizer `max_batch` is 32 unless given, without one it is 1.

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
        **asking: Unpack[AskingFields],
    ) -> None:
        self.model, self.overflow = model, overflow
        self.endpoint = one_of("VLLMHTTPScorer.endpoint", endpoint, ("classify", "pooling"))
        self.label = None if label is None else whole_number("VLLMHTTPScorer.label", label)
        self._activation = _Activation(proven=bounded)
        self._rendering = Rendering("VLLMHTTPScorer", tokenizer, max_length=max_length, overflow=overflow)
        how = Asking.of("VLLMHTTPScorer", asking, max_batch=32)
        how = how if self._rendering.has_tokenizer else replace(how, max_batch=1)
        self._client = JSONClient(checked_url("VLLMHTTPScorer.url", url).removesuffix("/v1"), api_key=how.api_key)
        self.url = self._client.url
        # Many may want to know the same: who comes while it is asked has the next answer, not a request of its own.
        once = replace(how, max_batch=1 << 20, max_wait_s=0.0, max_concurrent=1)
        self._looker: Asker[None, Served] = Asker(self.url, self._look, once)
        self._prover: Asker[Query, _Activation] = Asker(
            self.url, self._prove, replace(once, retries=0, timeout_s=_LONG)
        )
        self._served: Served | None = None
        super().__init__(f"{self.url}/{self.endpoint}", self._send, how)

    @property
    def num_retried(self) -> int:
        """Attempts that were not the first."""
        return self.asker.num_retried + self._looker.num_retried

    async def served(self) -> Served:
        """What the server says of its model, which is looked at once.

        Raises:
            ConfigError: it has no such model, or a shorter context than `max_length`.
            InfraError: it does not answer.
        """
        return self._served or await self._looker.ask(None)

    async def check_messages(self) -> None:
        """See `AskingScorer.check_messages`."""
        served = await self.served()
        if self._rendering.has_tokenizer:
            await self._rendering.check(served.max_length)

    async def close(self) -> None:
        """Ask nobody any more; what this loop still asks fails. Calling it again does nothing."""
        for asker in (self._looker, self._prover):
            await asker.close()
        await super().close()
        await self._client.close()

    async def _scored(self, conversation: Conversation) -> Scored:
        query = await self._query(conversation, await self.served())
        answered = await self._raw(query)
        num_tokens = query.num_tokens or answered.num_tokens
        truncated = query.truncated
        if query.most is not None and num_tokens is not None:
            if num_tokens > query.most:
                raise DataError(
                    f"conversation: expected at most {query.most} tokens, got {num_tokens}. "
                    "Drop the row, choose overflow 'left' or 'right', or, where the model takes more, raise max_length."
                )
            truncated = self.overflow != "error" and num_tokens == query.most
        return Scored(answered.value(self.label, self.asker.where), num_tokens, truncated)

    async def _query(self, conversation: Conversation, served: Served) -> Query:
        if self._rendering.has_tokenizer:
            rendered = await self._rendering.ids(conversation, served.max_length)
            return Query(rendered.token_ids, num_tokens=len(rendered.token_ids), truncated=rendered.truncated)
        most = self._rendering.max_length or served.max_length
        if isinstance(conversation, str):
            return Query(conversation, most=most)
        messages = [
            {name: value for name, value in each.items() if name != "trusted"} for each in checked(conversation)
        ]
        return Query(messages, most=most)

    async def _raw(self, query: Query) -> Answered:
        """The model's numbers, known to be raw."""
        found = await self.asker.ask(query)
        if not found.may_be_activated:
            return found
        if not self._activation.proven:
            await self._prover.ask(query)
        return found if found.switch == self._activation.switch else await self.asker.ask(query)

    async def _prove(self, queries: list[Query]) -> Sequence[_Activation | Failure] | Failure:
        try:
            if not self._activation.proven:
                self._activation = await self._proven(queries[0])
        except AgentEnvError as error:
            return Failure(error)
        return [self._activation] * len(queries)

    async def _proven(self, query: Query) -> _Activation:
        """How the activation is turned off, seen at one conversation that is asked about both ways."""
        off: Answered | None = None
        for switch in SWITCHES:
            try:
                off = await self.asker.ask(replace(query, switch=switch, active=False), alone=True)
                on = await self.asker.ask(replace(query, switch=switch, active=True), alone=True)
            except DataError:  # a server that refuses what it does not know
                continue
            if is_off(off.values, on.values):
                return _Activation(switch, proven=True)
        seen = None if off is None else list(off.values)
        raise ConfigError(
            f"{self.asker.where}: expected raw numbers, got {seen} whether or not an activation is asked for: this "
            "server applies one always, or the model none. Use a newer vLLM; bounded=True takes a model's own numbers "
            "in 0..1."
        )

    async def _look(self, asked: list[None]) -> Sequence[Served | Failure] | Failure:
        if self._served is None:
            answer = await self._client.attempt("/v1/models")
            if isinstance(answer, Failure):
                return answer
            served = served_of(answer, self.model, self._rendering.max_length, self.url)
            if isinstance(served, Failure):
                return served
            self._served = served
        return [self._served] * len(asked)

    async def _send(self, queries: list[Query]) -> Sequence[Answered | Failure] | Failure:
        switch = queries[0].switch or self._activation.switch
        body = request_of(queries, switch, self.endpoint) | {"model": self._name()}
        if self.overflow != "error" and not self._rendering.has_tokenizer:
            body |= {"truncate_prompt_tokens": self._rendering.max_length or -1, "truncation_side": self.overflow}
        answer = await self._client.attempt(f"/{self.endpoint}", body)
        return answer if isinstance(answer, Failure) else answers_of(answer, queries, switch, self.asker.where)

    def _name(self) -> str | None:
        return self._served.model if self._served is not None else self.model
