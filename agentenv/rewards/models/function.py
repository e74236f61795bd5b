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

from agentenv.agent import Tokenizer
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.rewards._functions import load_function
from agentenv.rewards._threads import Threads
from agentenv.rewards.models._asking import Asking, AskingFields
from agentenv.rewards.models._http import Failure
from agentenv.rewards.models._rendering import Text
from agentenv.rewards.models.get_reward import TextScorer, rewards_of
from agentenv.rewards.models.render import Overflow
from agentenv.rewards.models.types import Scored

_NAME = "reward_func"


class FunctionScorer(TextScorer):
    """Calls a function with lists of texts: queries, the prompts that they begin with ("" where unknown), None labels.

    It gives a tensor, an array or a list of one number per query, or a dict with these as `rewards`. A plain function
    runs in one of `max_concurrent` threads, an async one on the event loop; one that takes longer than `timeout_s` is
    left behind in its thread, and counted as `num_abandoned`.

    Args:
        function: `FILE.py`, whose `reward_func` it is, `FILE.py:name`, `module:name`, or a function.
        tokenizer: see GetRewardScorer, as for the next two.
        max_length: see there.
        overflow: see there.
        asking: see Asking; unless given, `max_batch` is 1, as OpenRLHF calls since 0.9.1, `max_concurrent` 16 and
            `retries` 0.

    Raises:
        ConfigError: there is no such function, its file cannot be loaded, or it takes other arguments.
    """

    def __init__(
        self,
        function: str | Path | Callable[..., Any],
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        max_length: int | None = None,
        overflow: Overflow = "error",
        **asking: Unpack[AskingFields],
    ) -> None:
        given = str(function) if isinstance(function, Path) else function
        self.where = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
        self._function = _checked(_loaded(given) if isinstance(given, str) else given, self.where)
        how = Asking.of("FunctionScorer", asking, max_concurrent=16, retries=0)
        self._threads = Threads(how.max_concurrent)
        self._limit_s = 2 * how.timeout_s  # it is cancelled before
        super().__init__(self.where, self._send, how, tokenizer=tokenizer, max_length=max_length, overflow=overflow)

    @property
    def num_abandoned(self) -> int:
        """Calls that were given up and have not returned yet."""
        return self._threads.num_abandoned

    async def _send(self, texts: list[Text]) -> Sequence[Scored | Failure] | Failure:
        queries, prompts = [text.query for text in texts], [text.prompt for text in texts]
        call = partial(self._function, queries, prompts, [None for _ in texts])
        try:
            if inspect.iscoroutinefunction(self._function):
                return rewards_of(await call(), len(texts), self.where)
            found = await self._threads.run(partial(self._called, call, len(texts)), limit_s=self._limit_s)
            return rewards_of(await found, len(texts), self.where) if inspect.isawaitable(found) else found
        except AgentEnvError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:400]
            raise InfraError(f"{self.where}: expected rewards, got {said}. Mend the function.") from error

    def _called(self, call: Callable[[], Any], num: int) -> Any:
        """In a thread: rewards or failures, or what is still to be awaited."""
        found = call()
        return found if inspect.isawaitable(found) else rewards_of(found, num, self.where)


def _loaded(spec: str) -> Callable[..., Any]:
    try:
        return load_function(f"{spec}:{_NAME}" if spec.endswith(".py") else spec)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{spec}: expected a file that can be loaded, got {type(error).__name__}: {error}. Mend it."
        ) from error


def _checked(function: Any, where: str) -> Callable[..., Any]:
    try:
        inspect.signature(function).bind([], [], [])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: expected a function of queries, prompts and labels by their places, got {function!r:.200}: "
            f"{error}. Write `def {_NAME}(queries, prompts, labels)`."
        ) from error
    return function  # type: ignore[no-any-return]
