"""The texts of a run's tokens, by the package `tokenizers` alone: transformers takes seconds to say the same."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentenv._util.paths import PACKAGE
from agentenv.chat.token_text import token_texts
from agentenv.engines.scripted import PLAIN_TEXT, PlainTextTokenizer
from agentenv.errors import ConfigError
from agentenv.view.viewed import ViewedRun

if TYPE_CHECKING:
    from agentenv.core.engine import Tokenizer

_FILE = "tokenizer.json"


class TokenTexts:
    """Texts of token ids; may be used from several threads.

    Raises:
        ConfigError: the file does not describe a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            content = path.read_bytes()
            backend: Any
            if content == PLAIN_TEXT:
                backend = PlainTextTokenizer()
                added = backend.added_tokens_decoder
            else:
                backend = tokenizers.Tokenizer.from_buffer(content)
                added = backend.get_added_tokens_decoder()
        except Exception as error:  # the package raises the base class
            raise ConfigError(f"{path}: expected a tokenizer, got {error}. Pass --tokenizer.") from error
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.special_ids = frozenset(added)
        """Ids of added tokens, such as those that begin and end a message."""
        self._tokenizer = cast("Tokenizer", _Plain(backend))
        self._table: dict[int, str] = {}
        self._guard = threading.Lock()

    def of(self, ids: Sequence[int]) -> tuple[list[str], dict[int, str]]:
        """Return the text of each of the T tokens, as `token_texts`, and the text of each id alone."""
        with self._guard:
            texts = token_texts(self._tokenizer, ids, self._table)
            return texts, {token: self._table[token] for token in set(ids)}


class _Plain:
    """A tokenizer of the package `tokenizers`, or that of scripted runs, with the two methods of `token_texts`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return list(getattr(encoded, "ids", encoded))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any) -> str:
        known = [token for token in token_ids if token >= 0]  # others are not in any vocabulary, and refused
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))


def load_texts(run: ViewedRun, override: str | None = None) -> TokenTexts:
    """Return the texts of a run's tokens: from its folder, or else from the model that it names, without a network.

    Raises:
        ConfigError: there is no `tokenizer.json`.
    """
    flags = run.flags
    names = [str(name) for name in ([override] if override else [flags.get("tokenizer"), flags.get("model")]) if name]
    try:
        path = _file_of(names, None if override else run.training.folder)
    except (OSError, RuntimeError, ValueError):  # a name that no path can have, or a user without a home
        path = None
    if path is None:
        raise ConfigError(
            f"{run.path}: expected {_FILE} in its folder `tokenizer`, or of {' or '.join(names)!r:.200}, got none. "
            "Pass --tokenizer DIR."
        )
    return TokenTexts(path)


def _file_of(names: Sequence[str], home: Path | None) -> Path | None:
    """Return the file of the tokenizer: from the run's folder `home`, or of the first name that has one."""
    folders = [] if home is None else [home / "tokenizer"]
    for name in names:
        folders += [PACKAGE / "_assets" / name, Path(name).expanduser(), *([] if home is None else [home / name])]
    folders += [] if home is None else [home / "model"]
    for folder in folders:
        path = folder if folder.name == _FILE else folder / _FILE
        if path.is_file():
            return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in names:
        with contextlib.suppress(HFValidationError):
            found = try_to_load_from_cache(name, _FILE)
            if isinstance(found, str):
                return Path(found)
    return None
