"""A checkpoint's tokenizer, labels and limits: what scorers that load a model have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from agentenv.agent import Tokenizer
from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.rewards.models.render import Overflow, Rendered, Renderer
from agentenv.rewards.models.types import Conversation

_T = TypeVar("_T")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHIPPED = Path(__file__).parents[2] / "models"
NO_LIMIT = 1_000_000_000
"""transformers gives tokenizers that know no limit a far larger number."""


def resolved(name: str) -> str:
    """The folder of a model that ships with the package, as `loading.resolve_model` has it; else the name as it is."""
    return str(_SHIPPED / name) if name in _shipped() else name


@cache
def _shipped() -> frozenset[str]:
    """Read once: constructors of environments ask, and these read nothing from their second call on."""
    return frozenset(each.name for each in _SHIPPED.iterdir() if each.is_dir()) if _SHIPPED.is_dir() else frozenset()


def tokenizer_of(where: str, given: str, advice: str) -> Any:
    """The tokenizer of a folder or a name; `where` and `advice` are for its error.

    Raises:
        ConfigError: there is none.
        MissingDependency: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependency(
            f"{where}: expected transformers, got {error}. pip install 'transformers>=4.56'"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(resolved(given))
    except Exception as error:  # tokenizers raises its own, of no class
        raise ConfigError(f"{where}: expected a tokenizer in {given!r}, got {error}. {advice}") from error


def options_of(where: str, kind: type[_T], given: _T | Mapping[str, Any] | None) -> _T:
    """A scorer's options, of which a mapping has some.

    Raises:
        ConfigError: it has others, or one is wrong.
    """
    if isinstance(given, kind):
        return given
    try:
        return kind(**(given or {}))  # type: ignore[arg-type]  # which the error is about
    except TypeError as error:
        raise ConfigError(
            f"{where}.options: expected names of {kind.__name__}, got {given!r:.200}: {error}."
        ) from error


def limit_of(tokenizer: Any) -> int | None:
    """Most tokens that a tokenizer says its model takes; None where it says nothing."""
    known: int | None = getattr(tokenizer, "model_max_length", None)
    return known if known and known < NO_LIMIT else None


def label_index(where: str, names: Sequence[str], label: str | int | None) -> int:
    """Which of a head's numbers is the score: that of the label, by name or index, or the only one.

    Raises:
        ConfigError: the head has no such label, or several and none is named.
    """
    if label is None and len(names) == 1:
        return 0
    found = [index for index, name in enumerate(names) if label is not None and label in (index, name)]
    if len(found) != 1:
        raise ConfigError(
            f"{where}.label: expected one of the model's labels {list(names)}, got {label!r}. "
            "Name the one whose raw number is the score."
        )
    return found[0]


def known_ids(renderer: Renderer, conversation: Conversation, vocab_size: int) -> Rendered:
    """The ids of a conversation, all of which the model knows.

    Raises:
        DataError: it cannot be rendered, or has another token: on a GPU that would end all scoring.
    """
    rendered = renderer.ids(conversation)
    largest = max(rendered.token_ids)
    if largest >= vocab_size:
        raise DataError(
            f"conversation: expected tokens of the model, below {vocab_size}, got {largest}. "
            "Use the tokenizer that the model was trained with."
        )
    return rendered


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How a loaded model's conversations are rendered, where that is not the usual way."""

    tokenizer: Tokenizer | str | Path | None = None
    """By default the model's own; a folder, a name or an object."""
    add_bos: bool = False
    """See Renderer, as for the next two."""
    add_eos: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def renderer(
        self, where: str, model: str, *, most: int | None, max_length: int | None, overflow: Overflow
    ) -> Renderer:
        """The renderer of a model's conversations.

        Args:
            where: the scorer's name, for errors.
            model: its folder or name.
            most: tokens that it takes; None where it does not say.
            max_length: most tokens that are wanted; None takes what model and tokenizer take.
            overflow: see Renderer.

        Raises:
            ConfigError: there is no tokenizer, no limit, or one below `max_length`.
            MissingDependency: transformers is not installed.
        """
        tokenizer: Any = model if self.tokenizer is None else self.tokenizer
        if isinstance(tokenizer, str | Path):
            tokenizer = tokenizer_of(where, str(tokenizer), "Give options.tokenizer.")
        if max_length is not None and most is not None and max_length > most:
            raise ConfigError(
                f"{where}.max_length: expected at most the model's {most} positions, got {max_length}. Lower it."
            )
        limits = [limit for limit in (most, limit_of(tokenizer)) if limit and limit < NO_LIMIT]
        if max_length is None and not limits:
            raise ConfigError(
                f"{where}.max_length: expected a number for a model that knows no limit, got None. Give it."
            )
        return Renderer(
            tokenizer,
            max_length=min(limits) if max_length is None else max_length,
            overflow=overflow,
            add_bos=self.add_bos,
            add_eos=self.add_eos,
            template_kwargs=self.template_kwargs,
        )
