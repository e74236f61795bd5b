"""Tokenizer, labels and limits of a checkpoint, for scorers that load a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from agentenv._util.paths import PACKAGE
from agentenv.core.engine import Tokenizer
from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.rewards.models.render import ConversationRenderer, Overflow, Rendered
from agentenv.rewards.models.types import Conversation

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHIPPED = PACKAGE / "_assets"
NO_LIMIT = 1_000_000_000
"""transformers gives tokenizers without a limit a far larger number."""


def resolved(name: str) -> str:
    """Return the folder of a model that ships with the package, else the name unchanged."""
    return str(_SHIPPED / name) if name in _shipped() else name


@cache
def _shipped() -> frozenset[str]:
    """Cached, since constructors of environments must not read files from their second call on."""
    return frozenset(each.name for each in _SHIPPED.iterdir() if each.is_dir()) if _SHIPPED.is_dir() else frozenset()


def tokenizer_of(where: str, given: str, advice: str) -> Any:
    """Return the tokenizer of a folder or a name; `where` and `advice` are for the error.

    Raises:
        ConfigError: it cannot be loaded.
        MissingDependency: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependency(
            f"{where}: expected transformers, got {error}. pip install --upgrade agentenv-rl"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(resolved(given))
    except Exception as error:  # tokenizers raises its own, of no class
        raise ConfigError(f"{where}: expected a tokenizer in {given!r}, got {error}. {advice}") from error


def limit_of(tokenizer: Any) -> int | None:
    """Return the tokenizer's limit on tokens, None if it has none."""
    known: int | None = getattr(tokenizer, "model_max_length", None)
    return known if known and known < NO_LIMIT else None


def label_index(where: str, names: Sequence[str], label: str | int | None) -> int:
    """Return the index of the score among a head's numbers: that of the label (name or index), or the only one.

    Raises:
        ConfigError: the label is unknown, or missing for a head with several.
    """
    if label is None and len(names) == 1:
        return 0
    found = [index for index, name in enumerate(names) if label is not None and label in (index, name)]
    if len(found) != 1:
        raise ConfigError(
            f"{where}.label: expected one of the model's labels {list(names)}, got {label!r}. "
            "Pass the one whose raw number is the score."
        )
    return found[0]


def known_ids(renderer: ConversationRenderer, conversation: Conversation, vocab_size: int) -> Rendered:
    """Return the ids of a conversation, all in the model's vocabulary.

    Raises:
        DataError: it cannot be rendered, or has an unknown token, which on a GPU would break all later scoring.
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
    """Rare options of rendering for a loaded model."""

    tokenizer: Tokenizer | str | Path | None = None
    """Folder, name or object; by default the model's."""
    add_bos: bool = False
    """See ConversationRenderer, also for the next two."""
    add_eos: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def renderer(
        self, where: str, model: str, *, most: int | None, max_length: int | None, overflow: Overflow
    ) -> ConversationRenderer:
        """Return the renderer of a model's conversations.

        Args:
            where: the scorer's name, for errors.
            model: its folder or name.
            most: the model's limit on tokens, if known.
            max_length: requested limit; None uses the limits of model and tokenizer.
            overflow: see ConversationRenderer.

        Raises:
            ConfigError: the tokenizer or a limit is missing, or `max_length` exceeds the model's limit.
            MissingDependency: transformers is not installed.
        """
        tokenizer: Any = model if self.tokenizer is None else self.tokenizer
        if isinstance(tokenizer, str | Path):
            tokenizer = tokenizer_of(where, str(tokenizer), "Pass options.tokenizer.")
        if max_length is not None and most is not None and max_length > most:
            raise ConfigError(
                f"{where}.max_length: expected at most the model's {most} positions, got {max_length}. Lower it."
            )
        limits = [limit for limit in (most, limit_of(tokenizer)) if limit and limit < NO_LIMIT]
        if max_length is None and not limits:
            raise ConfigError(
                f"{where}.max_length: expected a number for a model without a known limit, got None. Pass it."
            )
        return ConversationRenderer(
            tokenizer,
            max_length=min(limits) if max_length is None else max_length,
            overflow=overflow,
            add_bos=self.add_bos,
            add_eos=self.add_eos,
            template_kwargs=self.template_kwargs,
        )
