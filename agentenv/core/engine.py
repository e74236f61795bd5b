"""What an engine is, which samples tokens, and its tokenizer; and one checked engine call."""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any, ClassVar, Literal, NoReturn, Protocol, Self, cast, get_args

from agentenv.core.types import Completion, Conversation, FinishReason, Message, SamplingParams
from agentenv.errors import AgentEnvError, ConfigError, ContractError, EngineError

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Deadline for closing an engine."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the flags say of an engine."""

    model: str
    """Path or Hugging Face id; for an engine over a server the server's name of the model."""
    tokenizer: Tokenizer
    base_url: str = ""
    device: str = "auto"
    dtype: str = "auto"
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the constructor, from `--engine_args`."""


class Engine(ABC):
    """Samples tokens. Safe to call from many episodes concurrently, on one event loop.

    A subclass writes `generate`. Everything else has a default, which is that of an engine that holds nothing, cannot
    score, and keeps its weights. `--engine NAME` finds a class by `agentenv.engines.factory.ENGINES` or the entry point
    group `agentenv.engines`.
    """

    words: ClassVar[str] = ""
    """What the screen calls it; empty for its name in `--engine`."""
    url_example: ClassVar[str] = ""
    """Example of a `--base_url`, which the engine then needs; empty if it needs none."""
    context_argument: ClassVar[str] = ""
    """Argument of the constructor for the tokens that a prompt and its action may have together; empty without one."""
    is_light: ClassVar[bool] = False
    """Whether each rollout worker opens its own: it holds no model."""
    tokenizer: Tokenizer | None = None
    """The model's. None: the user of the engine names it; a NoTokenizer: the engine takes messages, not tokens."""
    base_url: str = ""
    """URL of the engine's server, which errors name; empty without one."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and action together; None if the engine does not know it."""
    logprobs_mode: Literal["processed", "raw"] | None = "processed"
    """Whether log-probabilities are of the distribution that was sampled from; None if the engine does not know yet."""
    policy_version: int = 0
    """Version of the weights that the next token is sampled from."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices of the weights, one for each worker."""
    node: str = ""
    """The machine on which the engine runs; empty for this one."""

    @property
    def constraint_problem(self) -> str:
        """Why the engine cannot follow `SamplingParams.structural_tag`; empty if it can."""
        return f"{type(self).__name__} does not constrain what it samples"

    @property
    def num_restarts(self) -> int:
        """How often failed engines were to be started again, failed starts included."""
        return 0

    @classmethod
    def from_options(cls, options: EngineOptions) -> Self:
        """Return an engine that is not started yet, as the flags describe it. TypeError: it has no such argument."""
        raise ConfigError(f"--engine: expected an engine with `from_options`, got {cls.__name__}. Write the method.")

    async def start(self) -> None:  # noqa: B027 - an engine may have nothing to start
        """Load the model or find the server, once, before the first call.

        Raises:
            EngineError: the engine did not start.
        """

    @abstractmethod
    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action after `prompt_token_ids`, which is read before the call returns and never changed.

        `request_id` is the same for all turns of an episode, with the turn after its last "/": an engine may use it to
        find the cached prefix. Cancelling the call frees the request's resources.

        Raises:
            EngineError: the engine could not return a completion.
        """

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return [T] the model's log-probability of each token given the preceding tokens, at temperature 1,
        untruncated.

        NaN for the first token, which has no context, and where the engine has no value. Safe to call from many tasks
        of one event loop while it samples. `token_ids` is read before the call returns and never changed.

        Raises:
            EngineError: the tokens cannot be scored.
            ConfigError: the engine has no model that scores.
        """
        self._refuse("one that scores tokens")

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Replace all weights. Requests may be in flight; tokens sampled afterwards have `policy_version`.

        Raises:
            EngineError: the weights do not fit, or could not be loaded.
        """
        self._refuse("one that takes new weights")

    async def load_offer(self, offer: Any, policy_version: int) -> None:
        """Replace all weights by those that a `WeightSender` offers; see `update_weights`."""
        self._refuse("one that takes new weights")

    async def join_transfer(self, backend: str, info: Any) -> None:
        """Join the group of processes in which a trainer broadcasts weights; `info` says where."""
        self._refuse("one that takes new weights by broadcast")

    async def pause(self) -> None:
        """Stop sampling until `resume`; requests in flight keep their tokens."""
        self._refuse("one that can be paused")

    async def resume(self) -> None:
        """Continue after `pause`."""
        self._refuse("one that can be paused")

    async def sleep(self) -> None:
        """Free the memory of weights and cache until `wake_up`."""
        self._refuse("vLLM on GPUs", "--vllm_enable_sleep")

    async def wake_up(self) -> None:
        """Take back the memory that `sleep` freed; the weights must be sent again."""
        self._refuse("vLLM on GPUs", "--vllm_enable_sleep")

    async def close(self) -> None:  # noqa: B027 - an engine may have nothing to free
        """Free everything. Called once, also after a failed start; no call follows."""

    def _refuse(self, what: str, flag: str = "--engine") -> NoReturn:
        raise ConfigError(f"{flag}: expected {what}, got {type(self).__name__}.")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that agentenv uses."""

    eos_token_id: int | None
    all_special_ids: list[int]
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """Render messages with the model's template."""


class NoTokenizer:
    """The tokenizer of engines that take messages: every use of it as a tokenizer is refused."""

    def __init__(self) -> None:
        self.eos_token_id: int | None = None
        self.all_special_ids: list[int] = []
        self.chat_template: Any = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raise ConfigError: token ids are not available."""
        raise self._refusal()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any) -> str:
        """Raise ConfigError: token ids are not available."""
        raise self._refusal()

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """Raise ConfigError: a template is not available."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            "--engine: expected one with a tokenizer, got chat, which returns no token ids. Use another engine."
        )


_REASONS = get_args(FinishReason)
MAX_LOGPROB = 1e-3
"""Maximum positive log-probability that is accepted as a rounding error of the engine."""


async def sample(
    engine: Engine, prompt: Sequence[int] | Conversation, sampling: SamplingParams, *, request_id: str, limit_s: float
) -> Completion:
    """Call an engine for at most `limit_s` seconds; return a valid or an aborted completion.

    `prompt` is a Conversation for an engine that takes messages, whose tokenizer is a NoTokenizer.

    Raises:
        EngineError: the engine failed, timed out, or returned a completion that cannot be recorded.
        ContractError: the engine has a bug: its answer has wrong types, or it raised neither an EngineError, an
            OSError, a MemoryError nor a RuntimeError.
        ConfigError: the engine ignored the structural tag.
    """
    where = engine.base_url or "generate"
    try:
        async with asyncio.timeout(limit_s):
            with checked_errors(where):
                completion = await engine.generate(cast(Sequence[int], prompt), sampling, request_id=request_id)
                _check(completion, sampling, where, engine.constraint_problem)
    except TimeoutError as error:
        raise EngineError(
            f"{where}: expected a completion within {limit_s:g} s, got none. "
            "Look at the engine, or raise generate_timeout_s."
        ) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineError(f"{where}: expected a completion, got a cancelled call.") from error
    return completion


def _check(completion: Completion, sampling: SamplingParams, where: str, constraint_problem: str) -> None:
    """Raise EngineError if no record can hold a completion, and ConfigError if it ignores the structural tag."""
    num, logprobs = len(completion.token_ids), completion.logprobs or ()
    try:  # in C, as the record holds them: below 2**31 and not negative
        struct.pack(f"{num}i", *completion.token_ids)
        struct.pack(f"{num}I", *completion.token_ids)
        array("i", [*completion.policy_versions, completion.policy_version])
    except (struct.error, OverflowError) as error:
        wrong = [i for i in completion.token_ids if not 0 <= index(i) < 2**31]
        found = f"id {wrong[0]}" if wrong else "a larger version"
        raise EngineError(
            f"{where}: expected token ids of 0 to 2**31 - 1 and policy versions below 2**31, got {found}. "
            "Fix the engine."
        ) from error
    if completion.finish_reason not in _REASONS:
        raise EngineError(
            f"{where}: expected a finish reason of {', '.join(_REASONS)}, got {completion.finish_reason!r}. "
            "Fix the engine."
        )
    if completion.finish_reason == "error":
        raise EngineError(f"{where}: expected a completion, got finish reason 'error'. Look at the engine's log.")
    if sampling.structural_tag is not None and completion.forced is None and (num or completion.answer is not None):
        raise ConfigError(
            f"{where}: expected an engine that follows structural_tag, got one that ignores it: "
            f"{constraint_problem or 'its Completion has forced=None'}. Choose another --engine."
        )
    if sampling.max_tokens is not None and num > sampling.max_tokens:
        raise EngineError(
            f"{where}: expected at most max_tokens={sampling.max_tokens} tokens, got {num}. Fix the engine."
        )
    # Fast path in C: if the sum is finite, no value is NaN or infinite, and `max` is right.
    if not math.isfinite(sum(logprobs)) or max(logprobs, default=0.0) > MAX_LOGPROB:
        too_high = [x for x in logprobs if x > MAX_LOGPROB or x == -math.inf]
        if too_high:
            raise EngineError(
                f"{where}: expected log-probabilities, finite and at most 0, got {too_high[0]!r}. Fix the engine."
            )
    if completion.logprobs is not None and len(logprobs) != num:
        raise EngineError(f"{where}: expected {num} log-probabilities, got {len(logprobs)}. Fix the engine.")


@contextmanager
def checked_errors(where: str) -> Iterator[None]:
    """Raise failures of an Engine's machine in the block as EngineErrors, its bugs as ContractErrors, ours as they are.

    Errors that cross to another process keep only their class: call it where the engine is.
    """
    try:
        yield
    except AgentEnvError:
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        raise EngineError(f"{where}: {type(error).__name__}: {error}").with_traceback(error.__traceback__) from error
    except Exception as error:
        raise ContractError(
            f"{where}: expected a completion or an EngineError, got {type(error).__name__}: {error}. Fix the engine."
        ).with_traceback(error.__traceback__) from error


@contextmanager
def engine_errors(where: str) -> Iterator[None]:
    """Raise what another system's engine raises in the block as an EngineError, and errors of agentenv as they are."""
    try:
        yield
    except AgentEnvError:
        raise
    except Exception as error:
        raise EngineError(f"{where}: {type(error).__name__}: {error}. See the log of the engine.") from error


def is_plain(sampling: SamplingParams) -> bool:
    """Return True if sampled tokens have the model's own log-probabilities: nothing was scaled, cut off or forbidden.

    This includes greedy sampling, for which engines report log-probabilities at temperature 1.
    """
    untouched = sampling.temperature == 1.0 and sampling.top_p == 1.0 and sampling.top_k <= 0 and sampling.min_p == 0.0
    free = sampling.min_tokens == 0 and sampling.structural_tag is None
    return (untouched or sampling.temperature == 0.0) and free


async def close_engine(engine: Engine, limit_s: float | None = None) -> None:
    """Close an engine that may be dead or hang, within `limit_s` (default: CLOSE_S); log it if that fails."""
    limit_s = CLOSE_S if limit_s is None else limit_s
    closing = asyncio.ensure_future(engine.close())
    done, _ = await asyncio.wait([closing], timeout=limit_s)
    error: BaseException | None = TimeoutError(f"close took longer than {limit_s:g} s")
    if not done:
        closing.cancel()
    else:
        error = None if closing.cancelled() else closing.exception()
    if error is not None:
        name, kind = type(engine).__name__, type(error).__name__
        logger.warning("%s: expected to close, got %s: %s. Its processes may still run.", name, kind, error)
