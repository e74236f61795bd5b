"""Rows of a DataProto, the batch of verl and ROLL: its texts without padding, and its columns as plain values.

This module needs neither framework: `batch` is a mapping of tensors, `non_tensor_batch` one of numpy arrays of objects.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentenv.errors import DataError
from agentenv.rewards.types import RewardResult

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
"""Tags by which rewards read a text."""
BULKY = ("multi_modal_data", "multi_modal_inputs", "raw_prompt_ids")
"""verl's columns that rewards do not see."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The prompts and responses of a batch."""

    prompts: list[str]
    responses: list[str]
    prompt_ids: list[tuple[int, ...]]
    """Without padding."""
    num_tokens: list[int]
    """Tokens of each response, without padding."""


def read_texts(data: Any, tokenizer: Any) -> Texts:
    """Decode `batch["prompts"]` and `["responses"]` without padding and special tokens.

    The columns `prompt_len` and `response_len` take precedence over `attention_mask` [B, P+T], which is not aligned
    with prompts that verl pads on the right. Without both, tokens of `tokenizer.pad_token_id` at the end of a response
    count as padding.

    Raises:
        DataError: prompts or responses are missing.
    """
    for name in ("prompts", "responses"):
        if name not in data.batch.keys():  # noqa: SIM118 - a TensorDict
            found = sorted(map(str, data.batch.keys()))
            raise DataError(f"batch: expected {name!r}, got {found}. Grade after generating.")
    prompts, responses = data.batch["prompts"], data.batch["responses"]
    mask = data.batch["attention_mask"] if "attention_mask" in data.batch.keys() else None  # noqa: SIM118 - TensorDict
    masks = [None] * len(responses) if mask is None else mask.bool().tolist()
    pad = getattr(tokenizer, "pad_token_id", None)
    lengths = zip(column(data, "prompt_len"), column(data, "response_len"), strict=True)
    prompt_ids, response_ids = [], []
    for prompt, response, mask_row, (prompt_len, response_len) in zip(
        prompts.tolist(), responses.tolist(), masks, lengths, strict=True
    ):
        width = len(prompt)
        if prompt_len is not None and (mask_row is None or sum(mask_row[:width]) != int(prompt_len)):
            prompt_ids.append(prompt[: int(prompt_len)])
        elif mask_row is None:
            prompt_ids.append([token for token in prompt if token != pad])
        else:
            prompt_ids.append([token for token, real in zip(prompt, mask_row[:width], strict=True) if real])
        if response_len is not None:
            end = int(response_len)
        elif mask_row is not None:
            end = sum(mask_row[width:])
        else:
            end = len(response)
            while end and response[end - 1] == pad:
                end -= 1
        response_ids.append(response[:end])
    return Texts(
        _decoded(tokenizer, prompt_ids),
        _decoded(tokenizer, response_ids),
        [tuple(ids) for ids in prompt_ids],
        [len(ids) for ids in response_ids],
    )


def _decoded(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    """Decode without special tokens, but with the tags that some tokenizers count among them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tags = {token_id for token_id, token in added.items() if token.special and token.content in TAGS}
    left_out = {token_id for token_id, token in added.items() if token.special and token_id not in tags}
    plain_ids = [[token for token in row if token not in left_out] for row in ids] if tags else list(ids)
    texts: list[str] = tokenizer.batch_decode(plain_ids, skip_special_tokens=not tags)
    return texts


def column(data: Any, name: str) -> list[Any]:
    """Return a column's values as plain Python, one for each row; all None if the column does not exist."""
    if name not in data.non_tensor_batch:
        return [None] * len(data)
    return [plain(value) for value in data.non_tensor_batch[name]]


def rows(data: Any, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the columns of each row as plain Python: the existing ones of `names`, or all but images and token ids."""
    existing = data.non_tensor_batch.keys()
    if names is None:
        chosen = [name for name in existing if name not in BULKY]
    else:
        chosen = [name for name in names if name in existing]
    columns = {name: column(data, name) for name in chosen}
    return [{name: values[index] for name, values in columns.items()} for index in range(len(data))]


def plain(value: Any) -> Any:
    """Return the value without numpy types, which come from Parquet; copy mappings and lists, keep other objects."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):  # also OmegaConf's
        return [plain(each) for each in value]
    if type(value).__module__ != "numpy":
        return value
    listed = value.tolist()
    return listed if type(listed) is type(value) else plain(listed)


def placed(responses: torch.Tensor, num_tokens: Sequence[int], rewards: Sequence[float]) -> torch.Tensor:
    """Return [B, T] float32: each reward at its response's last token, zeros elsewhere; an empty response gets none."""
    import torch

    tensor = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
    at = [row for row, length in enumerate(num_tokens) if length]
    tensor[at, [num_tokens[row] - 1 for row in at]] = tensor.new_tensor([rewards[row] for row in at])
    return tensor


def warn_of_invalid(results: Sequence[RewardResult]) -> None:
    """Log the number of responses without a reward, and the first reason: the tensor does not show either."""
    invalid = [result.detail or str(result.status) for result in results if result.reward is None]
    if invalid:
        logger.warning("%d of %d responses have no reward; the first: %s", len(invalid), len(results), invalid[0])
