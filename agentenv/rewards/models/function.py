"""FunctionScorer: a `reward_func(queries, prompts, labels)` of OpenRLHF's form as a reward model.

Example:
    >>> scorer = FunctionScorer("my_rm.py", tokenizer="my-rm")  # or "my_rm.py:other_name"
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from agentenv._util.http.client import AttemptFailure
from agentenv.core.engine import Tokenizer
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.rewards.loading import load_function
from agentenv.rewards.models.get_reward import TextScorer, rewards_of
from agentenv.rewards.models.render import Overflow, RenderedText
from agentenv.rewards.models.request_queue import QueueOptionFields, QueueOptions
from agentenv.rewards.models.types import Scored
from agentenv.rewards.workers.threads import Threads

_NAME = "reward_func"


class FunctionScorer(TextScorer):
    """Calls a function with lists of texts: queries, the prompts that they begin with ("" where unknown), None labels.

    It returns a tensor, an array or a list of one number per query, or a dict with these as `rewards`. A plain function
    runs in one of `max_concurrent` threads, an async one on the event loop. A plain call that takes longer than
    `timeout_s` is abandoned in its thread and counted as `num_abandoned`.

    Args:
        function: `FILE.py`, whose `reward_func` it is, `FILE.py:name`, `module:name`, or a function.
        tokenizer: see GetRewardScorer, as for the next two.
        max_length: see there.
        overflow: see there.
        asking: see QueueOptions. Defaults: `max_batch` 1 (as OpenRLHF calls since 0.9.1), `max_concurrent` 16,
            `retries` 0.

    Raises:
        ConfigError: the function is missing, its file cannot be loaded, or it takes other arguments.
    """

    def __init__(
        self,
        function: str | Path | Callable[..., Any],
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        max_length: int | None = None,
        overflow: Overflow = "error",
        **asking: Unpack[QueueOptionFields],
    ) -> None:
        given = str(function) if isinstance(function, Path) else function
        self.where = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
        self._function: Any = given
        if isinstance(given, str):
            self._function = load_function(f"{given}:{_NAME}" if given.endswith(".py") else given)
        try:
            inspect.signature(self._function).bind([], [], [])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.where}: expected a function of queries, prompts and labels by their places, got "
                f"{self._function!r:.200}: {error}. Write `def {_NAME}(queries, prompts, labels)`."
            ) from error
        how = QueueOptions.of("FunctionScorer", asking, max_concurrent=16, retries=0)
        self._threads = Threads(how.max_concurrent)
        self._limit_s = 2 * how.timeout_s  # the request queue cancels it earlier
        super().__init__(self.where, self._send, how, tokenizer=tokenizer, max_length=max_length, overflow=overflow)

    @property
    def num_abandoned(self) -> int:
        """Abandoned calls that have not returned yet."""
        return self._threads.num_abandoned

    async def _send(self, texts: list[RenderedText]) -> Sequence[Scored | AttemptFailure] | AttemptFailure:
        queries, prompts = [text.query for text in texts], [text.prompt for text in texts]
        call = partial(self._function, queries, prompts, [None for _ in texts])

        def called() -> Any:  # in a thread: rewards or failures, or what is still to be awaited
            found = call()
            return found if inspect.isawaitable(found) else rewards_of(found, len(texts), self.where)

        try:
            if inspect.iscoroutinefunction(self._function):
                return rewards_of(await call(), len(texts), self.where)
            found = await self._threads.run(called, limit_s=self._limit_s)
            return rewards_of(await found, len(texts), self.where) if inspect.isawaitable(found) else found
        except AgentEnvError:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {error}"[:400]
            raise InfraError(f"{self.where}: expected rewards, got {got}. Fix the function.") from error
