"""A reward function for conversations, by a Hugging Face classifier: `--reward_func_path` here, `--remote_rm_url` in
OpenRLHF.

    AGENTENV_CONVERSATION_MODEL=OpenAssistant/reward-model-deberta-v3-large
    AGENTENV_CONVERSATION_LABEL=…        # the good class, if its name does not tell
    AGENTENV_CONVERSATION_DEVICE=cuda    # default: cpu

set the model of `reward_func`; `conversation_reward_func` creates one in Python. The guide to OpenRLHF's custom rewards
uses the class LABEL_1. A reward model with one output has no such class, so its rewards come out inverted there; and a
long conversation fails there, or loses its end, which is the answer.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from agentenv.core.arguments import number, whole_number
from agentenv.errors import ConfigError, InfraError
from agentenv.interop.openrlhf.answers import answers
from agentenv.rewards.models.openrlhf_wire import as_answer
from agentenv.rewards.rules.text import final_text

MODEL, LABEL, DEVICE = (f"AGENTENV_CONVERSATION_{name}" for name in ("MODEL", "LABEL", "DEVICE"))
GOOD = ("good", "helpful", "positive")
"""Class names that mean quality, if exactly one of them exists; of two classes without names it is LABEL_1."""
_MOST_TOKENS = 100_000
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
"""A word, or one character of a script without spaces."""


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """Judge with the model that the environment names; see `conversation_reward_func`. The first call loads the model.

    Raises:
        ConfigError: no model is named, or the model cannot be used.
        DataError: a query does not contain its prompt.
        InfraError: the model failed.
    """
    with _LOADING:
        function = _configured_reward_func()
    return function(queries, prompts, labels)


def conversation_reward_func(
    model: str | Path,
    *,
    device: str = "cpu",
    label: str | None = None,
    max_length: int | None = None,
    batch_size: int = 16,
    min_words: int = 10,
    short_factor: float = 0.5,
) -> Callable[..., dict[str, Any]]:
    """Return a `reward_func(queries, prompts, labels)` that rates each answer in its conversation, from 0 to 1.

    The rating is the probability of the good class, or the sigmoid of a single output. The classifier sees the prompt,
    as its template rendered it, and the answer without its thinking. An answer of fewer than `min_words` words gets
    `short_factor` times its rating, an empty one 0. Scores equal the rewards; logs are `quality`, before the penalty,
    and `short` (0/1).

    Several threads may call the function: one at a time uses the model.

    Args:
        model: a folder or Hugging Face id of a sequence classifier.
        device: torch's name of it.
        label: the good class, by its name in the model's `id2label`.
        max_length: tokens that the model sees, counted from the end; None: as many as it supports.
        batch_size: maximum number of conversations in one forward pass.
        min_words: an answer with fewer words is short.
        short_factor: the factor for a short answer's rating.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be loaded or does not tell which class is good.
    """
    where = "conversation_reward_func"
    whole_number(f"{where}.min_words", min_words)
    whole_number(f"{where}.batch_size", batch_size, low=1)
    number(f"{where}.short_factor", short_factor, low=0.0, high=1.0)
    if max_length is not None:
        whole_number(f"{where}.max_length", max_length, low=8)
    classifier = _Classifier(str(model), device, label, max_length)

    def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:

        del labels
        finals = [(each, final_text(each.text) or "") for each in answers(queries, prompts, prompts)]
        texts = [f"{each.prompt}{final}" for each, final in finals if final]
        qualities = iter(classifier.qualities(texts, batch_size))
        quality = [next(qualities) if final else 0.0 for _, final in finals]
        short = [len(_WORD.findall(final)) < min_words for _, final in finals]
        rewards = [rating * (short_factor if cut else 1.0) for rating, cut in zip(quality, short, strict=True)]
        return as_answer(rewards, rewards, {"quality": quality, "short": short})

    return reward_func


class _Classifier:
    """A sequence classifier and the index of its good class."""

    def __init__(self, name: str, device: str, label: str | None, max_length: int | None) -> None:
        self._name = name
        self._lock = Lock()  # guards tokenizer and model: neither is thread-safe
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(name)
            self._tokenizer.truncation_side = "left"  # the answer is at the end
            self._tokenizer.padding_side = "right"
            self._model = AutoModelForSequenceClassification.from_pretrained(name).to(device).eval()
            if self._tokenizer.pad_token_id is None:
                self._tokenizer.pad_token = self._tokenizer.eos_token
            if self._model.config.pad_token_id is None:
                self._model.config.pad_token_id = self._tokenizer.pad_token_id
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"{MODEL}: expected a sequence classifier's folder or Hugging Face id, got {name!r} on {device!r}: "
                f"{type(error).__name__}: {error}. Check the name."
            ) from error
        names = {int(index): str(each) for index, each in self._model.config.id2label.items()}
        by_default = (*GOOD, "label_1") if len(names) == 2 else GOOD
        wanted = by_default if label is None else (label.lower(),)
        good = [index for index, each in names.items() if each.lower() in wanted]
        if label is None and len(names) == 1:
            good = [0]
        if len(good) != 1:
            raise ConfigError(
                f"{LABEL}: expected one class of {list(names.values())} in {name}, got {label!r}. "
                "Name the one that means a good answer."
            )
        self._good = good[0]
        most: int = self._tokenizer.model_max_length
        positions: int | None = getattr(self._model.config, "max_position_embeddings", None)
        if max_length is not None:
            self._max_length = max_length
        elif most < _MOST_TOKENS:
            self._max_length = min(most, positions or most)
        else:
            self._max_length = positions - 2 if positions else 512  # some models reserve two positions

    def qualities(self, texts: Sequence[str], batch_size: int) -> list[float]:
        """Return a number from 0 to 1 for each text.

        Raises:
            InfraError: the model failed, or its output is not finite.
        """
        import torch

        qualities: list[float] = []
        for start in range(0, len(texts), batch_size):
            batch = list(texts[start : start + batch_size])
            try:
                with self._lock, torch.inference_mode():
                    inputs = self._tokenizer(
                        batch, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
                    ).to(self._model.device)
                    logits = self._model(**inputs).logits.float()
                    shares = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)
                    qualities += [float(each) for each in shares[:, self._good]]
            except RuntimeError as error:  # out of memory, or a lost device
                raise InfraError(f"{self._name}: expected a classification, got {error}. Try again.") from error
        if not all(math.isfinite(each) for each in qualities):
            raise InfraError(f"{self._name}: expected numbers, got {qualities!r:.200}. Check the model.")
        return qualities


_LOADING = Lock()  # guards the cache below: only one thread loads the model


@functools.cache
def _configured_reward_func() -> Callable[..., dict[str, Any]]:
    name = os.environ.get(MODEL)
    if not name:
        raise ConfigError(
            f"{MODEL}: expected a sequence classifier's folder or Hugging Face id in the environment, got none. Set it."
        )
    return conversation_reward_func(name, device=os.environ.get(DEVICE) or "cpu", label=os.environ.get(LABEL) or None)
