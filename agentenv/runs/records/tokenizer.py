"""The tokenizer of a run, kept in its directory, so that the record is read on another machine without the model."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from agentenv.core.engine import Tokenizer

logger = logging.getLogger(__name__)

TOKENIZER, _STOPS = "tokenizer", "generation_config.json"
EVAL = "eval"
"""Folder of a training with the episodes of its evaluations: a run directory that lacks a tokenizer."""


def training_of(folder: Path) -> Path | None:
    """Return the folder of the training whose evaluations a folder holds; None for other folders."""
    is_eval = folder.name == EVAL and (folder.parent / "metrics.jsonl").is_file()
    return folder.parent if is_eval else None


def kept_tokenizer(folder: Path) -> Path | None:
    """Return the folder of the tokenizer that a run directory holds, or that its training holds; None without one."""
    kept = (training_of(folder) or folder) / TOKENIZER
    return kept if kept.is_dir() else None


def keep_tokenizer(folder: Path, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> None:
    """Write a tokenizer that saves itself into `tokenizer/` of a run directory, unless it is there.

    A disk that does not take it is a warning, since the run does not depend on it.
    """
    save, target = getattr(tokenizer, "save_pretrained", None), folder / TOKENIZER
    if not callable(save) or target.exists():
        return
    temporary = folder / f".{TOKENIZER}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        save(temporary)
        (temporary / _STOPS).write_text(json.dumps({"eos_token_id": list(stop_token_ids)}), encoding="ascii")
        temporary.rename(target)
    except OSError as error:
        logger.warning("%s: the tokenizer is not kept (%s); readers load that of the model", target, error)
        shutil.rmtree(temporary, ignore_errors=True)
