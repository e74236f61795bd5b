"""The tokenizer of a model that ships with the package, without transformers, whose import takes more than a second."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

_CONFIG, _TOKENS, _TEMPLATE = _FILES = ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja")


class ShippedTokenizer:
    """A fast tokenizer from a folder with `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    Ids and renderings are those of transformers' class. What is not defined here is asked of that class, which is
    loaded then.
    """

    def __init__(self, folder: str | Path) -> None:
        """Load the tokenizer.

        Raises:
            OSError: a file is missing.
        """
        from tokenizers import Tokenizer

        self._folder = str(folder)
        config = json.loads((Path(folder) / _CONFIG).read_text("utf-8"))
        self.backend_tokenizer: Any = Tokenizer.from_file(str(Path(folder) / _TOKENS))
        self.chat_template: Any = (Path(folder) / _TEMPLATE).read_text("utf-8")
        self.name_or_path = self._folder
        self.eos_token, self.pad_token = config["eos_token"], config["pad_token"]
        self.unk_token, self.bos_token, self.bos_token_id = self.pad_token, None, None
        self.special_tokens_map = {name: getattr(self, name) for name in ("eos_token", "unk_token", "pad_token")}
        names = [*self.special_tokens_map.values(), *config["extra_special_tokens"]]
        self.all_special_tokens = list(dict.fromkeys(names))
        to_id: Any = self.backend_tokenizer.token_to_id
        self.all_special_ids: list[int] = [to_id(token) for token in self.all_special_tokens]
        self.eos_token_id: int | None = self.backend_tokenizer.token_to_id(self.eos_token)
        self.pad_token_id = self.backend_tokenizer.token_to_id(self.pad_token)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode as transformers' class does."""
        return self._whole(*args, **kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files of the tokenizer into a folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(Path(self._folder) / name, Path(folder) / name)

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()  # type: ignore[no-any-return]

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by text."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)  # type: ignore[no-any-return]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids  # type: ignore[no-any-return]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any) -> str:
        """Return the text of ids."""
        if options.get("clean_up_tokenization_spaces"):
            return self._whole.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)  # type: ignore[no-any-return]
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """Render messages; see transformers for the arguments."""
        tools = kwargs.get("tools")
        known = kwargs.keys() <= {"tokenize", "add_generation_prompt", "tools"} and kwargs.get("tokenize") is False
        if not known or not all(isinstance(tool, dict) for tool in tools or ()):
            return self._whole.apply_chat_template(conversation, **kwargs)
        opens = kwargs.get("add_generation_prompt", False)
        given = {"messages": conversation, "tools": tools, "documents": None, "add_generation_prompt": opens}
        return _compiled(self.chat_template).render(**given, **self.special_tokens_map)

    @functools.cached_property
    def _whole(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)


@functools.cache
def _compiled(template: str) -> Template:
    """Return a chat template compiled as transformers does, without the tracking of generated tokens."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(template)
