"""Resolve names of models, and load their tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentenv._util.paths import PACKAGE
from agentenv._util.suggest import did_you_mean
from agentenv.chat.shipped_tokenizer import ShippedTokenizer
from agentenv.core.engine import Tokenizer
from agentenv.errors import ConfigError

_MODELS = PACKAGE / "_assets"


def resolve_model(name: str) -> str:
    """Return the path of a shipped model or a folder; otherwise the name, for Hugging Face."""
    if name in shipped_models():
        return str(_MODELS / name)
    path = Path(name).expanduser()
    return str(path) if name and path.exists() else name


def load_tokenizer(model: str) -> Tokenizer:
    """Load the Hugging Face tokenizer of a model.

    Raises:
        ConfigError: it cannot be loaded; the message has the reason.
    """
    try:
        tokenizer: Tokenizer = _tokenizer_class(Path(model)).from_pretrained(model)
    except Exception as error:
        known, training = shipped_models(), _training(Path(model))
        if training is not None:
            raise ConfigError(f"--model: expected a model's folder, got {model!r}, {training}") from error
        is_path = len(Path(model).parts) > 2 or model.startswith((".", "~"))
        reason = "the folder does not exist." if is_path and not Path(model).exists() else error
        if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
            reason = "the folder lacks config.json."
        raise ConfigError(
            f"--model: expected a model's folder, a Hugging Face id or one of {known}, got {model!r}: {reason}"
            f"{did_you_mean(model, known)}"
        ) from error
    return tokenizer


def load_light_tokenizer(model: str) -> Tokenizer:
    """Load a tokenizer for engines that need no transformers: without it for a shipped model, else as `load_tokenizer`.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    is_shipped = Path(model).parent == _MODELS and Path(model).name in shipped_models()
    return ShippedTokenizer(model) if is_shipped else load_tokenizer(model)


def _training(path: Path) -> str | None:
    """Return advice if a path is a training run's folder or checkpoint instead of its model, otherwise None."""
    for folder in (path, path.parent, path.parent.parent):
        if not folder.name or not ((folder / "checkpoints").is_dir() and (folder / "metrics.jsonl").exists()):
            continue
        if (folder / "model").is_dir():
            return None if path == folder / "model" else f"of a training run. Its model is {folder / 'model'}."
        return (
            f"of a training run that was interrupted: {folder} has only checkpoints. Finish it: agentenv train "
            f"--resume --out {folder}; --max_train_steps 1 with it leaves the model of the steps so far."
        )
    return None


def _tokenizer_class(folder: Path) -> Any:
    """Return the class that AutoTokenizer would choose for a folder if it is obvious, otherwise AutoTokenizer.

    That of scripted runs is not known there. Importing AutoTokenizer imports torch, which takes seconds.
    """
    asked = _read_json(folder / "tokenizer_config.json")
    if asked.get("tokenizer_class") == "PlainTextTokenizer":
        from agentenv.engines.scripted import PlainTextTokenizer  # `agentenv list` reads names only

        return PlainTextTokenizer
    import transformers

    is_plain = hasattr(transformers, "TokenizersBackend") and "auto_map" not in asked
    if is_plain and (folder / "tokenizer.json").is_file():
        config = _read_json(folder / "config.json")
        match asked.get("tokenizer_class"), config.get("model_type"):
            case "Qwen2Tokenizer" | "Qwen2TokenizerFast", "qwen2":
                return transformers.Qwen2Tokenizer
            case "TokenizersBackend", None if not (folder / "config.json").exists():
                return transformers.TokenizersBackend
    return transformers.AutoTokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing or invalid, which a later step reports."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def load_stop_token_ids(model: str) -> tuple[int, ...]:
    """Return the ids that end a turn according to the generation config; empty if it has none."""
    from agentenv.chat.chat import stop_token_ids_of  # `agentenv list` reads names only

    return stop_token_ids_of(model, may_download=True)


def shipped_models() -> list[str]:
    """Return the names of the models that ship with the package."""
    return sorted(folder.name for folder in _MODELS.iterdir() if folder.is_dir()) if _MODELS.is_dir() else []
