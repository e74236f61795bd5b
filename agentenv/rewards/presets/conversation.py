"""A reward function for conversations, by a classifier of Hugging Face: OpenRLHF's `--remote_rm_url` form.

    AGENTENV_CONVERSATION_MODEL=OpenAssistant/reward-model-deberta-v3-large
    AGENTENV_CONVERSATION_LABEL=…        # the good class, where its name does not say so
    AGENTENV_CONVERSATION_DEVICE=cuda    # default: cpu

name the model for `reward_func`; `conversation_reward_func` makes one in Python. The guide to OpenRLHF's custom rewards
asks for the class LABEL_1, which a reward model of one output does not have, so that its quality is turned around; and
a long conversation fails there, or loses its end, which is the answer.
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

from agentenv.errors import ConfigError, InfraError
from agentenv.openrlhf_rewards import as_answer
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards.presets._answers import answers
from agentenv.rewards.text import final_text

MODEL, LABEL, DEVICE = (f"AGENTENV_CONVERSATION_{name}" for name in ("MODEL", "LABEL", "DEVICE"))
GOOD = ("good", "helpful", "positive")
"""Names of classes that mean quality, where just one of them is there; of two without names it is LABEL_1."""
_MOST_TOKENS = 100_000
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
"""A word, or a letter of a script that has no spaces."""


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """As `conversation_reward_func`, with the model that the environment names; it is loaded at the first call.

    Raises:
        ConfigError: none is named, or it cannot be used.
        DataError: a query does not hold its prompt.
        InfraError: the model failed.
    """
    with _LOADING:
        function = _of_the_environment()
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
    """A `reward_func(queries, prompts, labels)` that gives the quality of each answer in its conversation, 0 to 1.

    That is the probability of the good class, or of a model of one output the sigmoid of it. What is judged is the
    prompt, as its template has it, with the answer, without its thinking. An answer of fewer than `min_words` words is
    worth `short_factor` of that, and none at all 0. Scores are the rewards; logs are `quality`, before the penalty, and
    `short` (0/1).

    The function may be called from several threads: one at a time uses the model.

    Args:
        model: a folder or Hugging Face id of a sequence classifier.
        device: as torch names it.
        label: the good class, by the name that the model's `id2label` has for it.
        max_length: tokens that the model is given, the last ones; None: as many as it takes.
        batch_size: most conversations at once.
        min_words: below it an answer is short.
        short_factor: what is left of a short answer's quality.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be loaded, or does not say which class is good.
    """
    where = "conversation_reward_func"
    whole_number(f"{where}.min_words", min_words)
    whole_number(f"{where}.batch_size", batch_size, low=1)
    number(f"{where}.short_factor", short_factor, low=0.0, high=1.0)
    if max_length is not None:
        whole_number(f"{where}.max_length", max_length, low=8)
    classifier = _Classifier(str(model), device, label, max_length)

    def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
        """Rewards, scores and logs, each a float tensor of shape [number of queries]; see what made it."""
        del labels
        finals = [(each, final_text(each.text) or "") for each in answers(queries, prompts, prompts)]
        texts = [f"{each.prompt}{final}" for each, final in finals if final]
        found = iter(classifier.qualities(texts, batch_size))
        quality = [next(found) if final else 0.0 for _, final in finals]
        short = [len(_WORD.findall(final)) < min_words for _, final in finals]
        rewards = [one * (short_factor if is_short else 1.0) for one, is_short in zip(quality, short, strict=True)]
        return as_answer(rewards, rewards, {"quality": quality, "short": short})

    return reward_func


class _Classifier:
    """A model and what its outputs mean."""

    def __init__(self, name: str, device: str, label: str | None, max_length: int | None) -> None:
        self._name = name
        self._lock = Lock()  # guards tokenizer and model: neither may be used from two threads at once
        try:
            self._load(name, device)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"{MODEL}: expected a sequence classifier's folder or Hugging Face id, got {name!r} on {device!r}: "
                f"{type(error).__name__}: {error}. Check the name."
            ) from error
        self._good = self._good_class(label)
        self._max_length = max_length or self._room()

    def _load(self, name: str, device: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._tokenizer.truncation_side = "left"  # the answer stands at the end
        self._tokenizer.padding_side = "right"
        self._model = AutoModelForSequenceClassification.from_pretrained(name).to(device).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def _good_class(self, label: str | None) -> int:
        names = {int(index): str(name) for index, name in self._model.config.id2label.items()}
        if label is None and len(names) == 1:
            return 0
        by_default = (*GOOD, "label_1") if len(names) == 2 else GOOD
        wanted = by_default if label is None else (label.lower(),)
        good = [index for index, name in names.items() if name.lower() in wanted]
        if len(good) != 1:
            raise ConfigError(
                f"{LABEL}: expected one class of {list(names.values())} in {self._name}, got {label!r}. "
                "Name the one that means a good answer."
            )
        return good[0]

    def _room(self) -> int:
        most: int = self._tokenizer.model_max_length
        positions: int | None = getattr(self._model.config, "max_position_embeddings", None)
        if most < _MOST_TOKENS:
            return min(most, positions or most)
        return positions - 2 if positions else 512  # some models keep two positions for themselves

    def qualities(self, texts: Sequence[str], batch_size: int) -> list[float]:
        """Between 0 and 1, for each text.

        Raises:
            InfraError: the model failed, or gave what is no number.
        """
        found: list[float] = []
        for start in range(0, len(texts), batch_size):
            try:
                with self._lock:
                    found += self._batch(list(texts[start : start + batch_size]))
            except RuntimeError as error:  # memory, a device that is gone
                raise InfraError(f"{self._name}: expected a classification, got {error}. Try again.") from error
        if not all(math.isfinite(each) for each in found):
            raise InfraError(f"{self._name}: expected numbers, got {found!r:.200}. Check the model.")
        return found

    def _batch(self, texts: list[str]) -> list[float]:
        import torch

        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
        ).to(self._model.device)
        with torch.inference_mode():
            logits = self._model(**inputs).logits.float()
        shares = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)
        return [float(each) for each in shares[:, self._good]]


_LOADING = Lock()  # guards the cache below: of several threads one loads


@functools.cache
def _of_the_environment() -> Callable[..., dict[str, Any]]:
    name = os.environ.get(MODEL)
    if not name:
        raise ConfigError(
            f"{MODEL}: expected a sequence classifier's folder or Hugging Face id in the environment, got none. Set it."
        )
    return conversation_reward_func(name, device=os.environ.get(DEVICE) or "cpu", label=os.environ.get(LABEL) or None)
